#ifndef FA_TEMPLATES_COMMON_DROPOUT_CUH_
#define FA_TEMPLATES_COMMON_DROPOUT_CUH_

#include <common/constants.cuh>
#include <common/online_softmax.cuh>
#include <common/packed_params.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>

namespace fa::kernel {

constexpr uint32_t kPhiloxMultipliers[2] = {0xd2511f53u, 0xcd9e8d57u};
constexpr uint32_t kPhiloxSteps[2] = {0x9e3779b9u, 0xbb67ae85u};  // of the key, from round to round
constexpr int kPhiloxRounds = 7;

/// Four words of Philox4x32-7 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011):
/// seven rounds are the fewest that pass BigCrush. `begin`: of the rounds, which other code has done.
FA_DEVICE void philox(uint32_t (&counter)[4], uint32_t key_low, uint32_t key_high, int begin = 0) {
  FA_UNROLL
  for (int round = 0; round < kPhiloxRounds; ++round) {
    if (round < begin) continue;
    const auto step = static_cast<uint32_t>(round);
    const uint64_t a = ptx::mul_wide(counter[0], kPhiloxMultipliers[0]);
    const uint64_t b = ptx::mul_wide(counter[2], kPhiloxMultipliers[1]);
    counter[0] = static_cast<uint32_t>(b >> 32) ^ counter[1] ^ (key_low + step * kPhiloxSteps[0]);
    counter[1] = static_cast<uint32_t>(b);
    counter[2] = static_cast<uint32_t>(a >> 32) ^ counter[3] ^ (key_high + step * kPhiloxSteps[1]);
    counter[3] = static_cast<uint32_t>(a);
  }
}

/// Of Philox with the counter {low half of a stream, column, high half, row}. One round leaves two words of the column
/// and two of the row, and the next multiplies each of them alone. So after three rounds what is a row's and what is a
/// column's are still only joined by XOR: both are made once for many calls, which begin with the fourth round.
class PhiloxStream {
 public:
  static constexpr int kRounds = 3;

  FA_DEVICE PhiloxStream(uint64_t stream, uint32_t key_low, uint32_t key_high) {
    const uint64_t a = ptx::mul_wide(static_cast<uint32_t>(stream), kPhiloxMultipliers[0]);
    const uint64_t b = ptx::mul_wide(static_cast<uint32_t>(stream >> 32), kPhiloxMultipliers[1]);
    row_[0] = high(a) ^ key_high;
    row_[1] = low(b) ^ (key_low + kPhiloxSteps[0]);
    row_[2] = key_low + 2 * kPhiloxSteps[0];
    row_[3] = key_high + 2 * kPhiloxSteps[1];
    column_[0] = high(b) ^ key_low;
    column_[1] = low(a) ^ (key_high + kPhiloxSteps[1]);
  }

  /// Three words of a row, and none.
  FA_DEVICE Chunk row(uint32_t row) const {
    const uint64_t b = ptx::mul_wide(row ^ row_[0], kPhiloxMultipliers[1]);
    const uint64_t a = ptx::mul_wide(high(b) ^ row_[1], kPhiloxMultipliers[0]);
    return {{low(b) ^ row_[2], high(a) ^ row_[3], low(a), 0}};
  }

  /// Of a column, likewise.
  FA_DEVICE Chunk column(uint32_t column) const {
    const uint64_t a = ptx::mul_wide(column ^ column_[0], kPhiloxMultipliers[0]);
    const uint64_t b = ptx::mul_wide(high(a) ^ column_[1], kPhiloxMultipliers[1]);
    return {{high(b), low(a), low(b), 0}};
  }

  /// The counter after kRounds rounds.
  FA_DEVICE static void join(uint32_t (&counter)[4], const Chunk& row, const Chunk& column) {
    counter[0] = column.word[0] ^ row.word[0];
    counter[1] = column.word[2];
    counter[2] = column.word[1] ^ row.word[1];
    counter[3] = row.word[2];
  }

  /// What columns need, aside, where it takes no registers: 8 bytes.
  FA_DEVICE void store_columns(uint32_t shared) const { ptx::st_shared_b64(shared, column_[0], column_[1]); }
  FA_DEVICE static PhiloxStream of_columns(uint32_t shared) {
    PhiloxStream stream;
    ptx::ld_shared_b64(stream.column_[0], stream.column_[1], shared);
    return stream;
  }

 private:
  PhiloxStream() = default;

  FA_DEVICE static uint32_t low(uint64_t product) { return static_cast<uint32_t>(product); }
  FA_DEVICE static uint32_t high(uint64_t product) { return static_cast<uint32_t>(product >> 32); }

  uint32_t row_[4], column_[2];
};

/// What is kept of the elements that a thread holds of 16 rows of P by 16 * kSteps keys, a bit each. Pair i of a step's
/// A operand has bytes 2 * (i % 2) and 2 * (i % 2) + 1 of word i / 2; every step has a bit of each byte, from the
/// highest on, which `prmt_sign` spreads after a shift. Eight steps fill a pair of words.
template <int kSteps>
struct KeepMask {
  static constexpr int kWords = 2 * ceil_div(kSteps, 8);
  static constexpr int kBytes = 4 * kWords;
  static_assert(kWords <= 4, "at most 256 keys");

  uint32_t word[kWords] = {};

  /// From comparisons of halves, 0 or 0xffff, of the four pairs of a step.
  FA_DEVICE void add(int step, const uint32_t (&below)[4]) {
    FA_UNROLL
    for (int half = 0; half < 2; ++half) {
      word[step / 8 * 2 + half] |= ptx::prmt(below[2 * half], below[2 * half + 1], 0x6420) & 0x80808080u >> step % 8;
    }
  }

  /// What was added are draws below the threshold.
  FA_DEVICE void store(uint32_t shared, const DropoutParams& params) {
    FA_UNROLL
    for (int i = 0; i < kWords; ++i) word[i] = ~(word[i] ^ params.flip);
    if constexpr (kWords == 4) {
      ptx::st_shared_chunk(shared, {{word[0], word[1], word[2], word[3]}});
    } else {
      ptx::st_shared_b64(shared, word[0], word[1]);
    }
  }

  FA_DEVICE static KeepMask load(uint32_t shared) {
    KeepMask mask;
    if constexpr (kWords == 4) {
      const Chunk chunk = ptx::ld_shared_chunk(shared);
      FA_UNROLL
      for (int i = 0; i < 4; ++i) mask.word[i] = chunk.word[i];
    } else {
      ptx::ld_shared_b64(mask.word[0], mask.word[1], shared);
    }
    return mask;
  }

  /// All ones in the halves of what is kept, in the order of the A operands.
  FA_DEVICE void expand(uint32_t (&kept)[kSteps][4]) const {
    FA_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      FA_UNROLL
      for (int i = 0; i < 4; ++i) {
        kept[step][i] = ptx::prmt_sign(word[step / 8 * 2 + i / 2] << step % 8, i % 2 == 0 ? 0x1100u : 0x3322u);
      }
    }
  }
};

/// Which elements of P are dropped. One call of the generator decides on eight elements, a 16-bit draw each: rows r and
/// r + 8 of a block of 16 rows, keys c, c + 1, c + 8 and c + 9 (c even) of a block of 16 keys. They are what a thread
/// holds of the accumulators of S, and what two neighbouring threads (lane and lane ^ 4) hold of those of S^T: there
/// each makes one call for both, and no bit is drawn twice or in vain.
///
/// The counter is {low half of offset + batch * h_q + head, key block * 4 + c / 2, the high half, row block * 8 + r},
/// the key is the seed. In the word 2 * (row >= 8) + (key >= 8) the even key has the low half. Draws are compared as
/// f16 numbers: one instruction decides on both halves of a word.
class Dropout {
 public:
  /// `heads_before` is batch * h_q, and the head too where it is the same for the whole block.
  FA_DEVICE Dropout(const DropoutParams& params, int64_t heads_before) {
    uint64_t seed = params.seed;
    uint64_t offset = params.offset;
    if (params.state != nullptr) {
      seed = ptx::ld_global(params.state);
      offset = ptx::ld_global(params.state + 1);
    }
    key_[0] = static_cast<uint32_t>(seed);
    key_[1] = static_cast<uint32_t>(seed >> 32);
    stream_ = offset + static_cast<uint64_t>(heads_before);
    threshold_ = params.threshold;
    flip_ = params.flip;
  }

  /// The same from what `share` left in shared memory. Called by whole warps: that a warp's threads agree on the seed
  /// is then known, and what follows from it alone is computed once a warp.
  FA_DEVICE Dropout(const DropoutParams& params, uint32_t shared, int64_t heads_before) {
    const Chunk state = ptx::ld_shared_chunk(shared);
    FA_UNROLL
    for (int i = 0; i < 2; ++i) key_[i] = ptx::shfl(state.word[i], 0);
    stream_ = (static_cast<uint64_t>(state.word[3]) << 32 | state.word[2]) + static_cast<uint64_t>(heads_before);
    threshold_ = params.threshold;
    flip_ = params.flip;
  }

  /// Seed and offset into 16 bytes of shared memory: what they are is then found there, and takes no registers.
  FA_DEVICE static void share(const DropoutParams& params, uint32_t shared) {
    const Dropout dropout(params, 0);
    ptx::st_shared_b32(shared, dropout.key_[0]);
    ptx::st_shared_b32(shared + 4, dropout.key_[1]);
    ptx::st_shared_b32(shared + 8, static_cast<uint32_t>(dropout.stream_));
    ptx::st_shared_b32(shared + 12, static_cast<uint32_t>(dropout.stream_ >> 32));
  }

  /// Zeroes what is dropped of a warp's fragments [rows, keys]; `row` and `key` are multiples of 16.
  template <int kMTiles, int kNTiles>
  FA_DEVICE void drop(Fragment<kMTiles, kNTiles>& p, int row, int key, int lane) const {
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      drop_block<kNTiles>([&](int n, int i) -> float& { return p[m][n][i]; }, row + 16 * m, key, lane);
    }
  }

  /// The same for one block of 16 rows, of which `p(n, i)` is accumulator register i of n8 tile n.
  template <int kNTiles, class Registers>
  FA_DEVICE void drop_block(Registers p, int row, int key, int lane) const {
    FA_UNROLL
    for (int n = 0; n < kNTiles; n += 2) {
      uint32_t words[4];
      draw(words, row / 2 + lane / 4, column<kNTiles>(key, n, lane), stream_);
      FA_UNROLL
      for (int half = 0; half < 2; ++half) {
        FA_UNROLL
        for (int r = 0; r < 2; ++r) drop_pair(p(n + half, 2 * r), p(n + half, 2 * r + 1), words[2 * r + half]);
      }
    }
  }

  /// Of the rows and columns of this head.
  FA_DEVICE PhiloxStream stream() const { return PhiloxStream(stream_, key_[0], key_[1]); }

  /// The row of a lane's calls for a warp's 16 rows. Of 16 keys the column is key / 4 + lane % 4.
  FA_DEVICE static uint32_t row_of(int row, int lane) { return static_cast<uint32_t>(row / 2 + lane / 4); }

  /// Draws for the accumulators of a warp's 16 rows by 16 keys, compared, in the order of the A operand that they
  /// become: `below[n % 2 * 2 + r]` is of n8 tile n and row half r, the even key in the low half. Of *this the seed and
  /// the threshold alone count.
  FA_DEVICE void draw_step(uint32_t (&below)[4], const Chunk& row, const Chunk& column) const {
    uint32_t words[4];
    PhiloxStream::join(words, row, column);
    philox(words, key_[0], key_[1], PhiloxStream::kRounds);
    FA_UNROLL
    for (int i = 0; i < 4; ++i) below[i] = ptx::less_pair(words[i % 2 * 2 + i / 2], threshold_);
  }

  /// Draws for row half r of 16 * kSteps keys alone, which is of any position and head.
  template <int kSteps>
  FA_DEVICE void draw_row(uint32_t (&below)[kSteps][4], int r, int position, int head, int key, int lane) const {
    const bool lower = position % 16 >= 8;
    FA_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      uint32_t words[4];
      draw(words, position / 16 * 8 + position % 8, column<2 * kSteps>(key, 2 * step, lane),
           stream_ + static_cast<uint64_t>(head));
      FA_UNROLL
      for (int half = 0; half < 2; ++half) {
        below[step][2 * half + r] = ptx::less_pair(lower ? words[2 + half] : words[half], threshold_);
      }
    }
  }

  /// The same into a mask.
  template <int kSteps>
  FA_DEVICE void draw_row(KeepMask<kSteps>& mask, int r, int position, int head, int key, int lane) const {
    const bool lower = position % 16 >= 8;
    FA_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      uint32_t words[4];
      uint32_t below[4] = {};
      draw(words, position / 16 * 8 + position % 8, column<2 * kSteps>(key, 2 * step, lane),
           stream_ + static_cast<uint64_t>(head));
      FA_UNROLL
      for (int half = 0; half < 2; ++half) {
        below[2 * half + r] = ptx::less_pair(lower ? words[2 + half] : words[half], threshold_);
      }
      mask.add(step, below);
    }
  }

  /// 0 for what is dropped of a packed pair of elements.
  static FA_DEVICE uint32_t keep_pair(const DropoutParams& params, uint32_t pair, uint32_t below) {
    return pair & ~(below ^ params.flip);
  }

  /// The same for one row, of any position and head, of which p(n, 0) and p(n, 1) are the registers.
  template <int kNTiles, class Registers>
  FA_DEVICE void drop_row(Registers p, int position, int head, int key, int lane) const {
    const bool lower = position % 16 >= 8;
    FA_UNROLL
    for (int n = 0; n < kNTiles; n += 2) {
      uint32_t words[4];
      draw(words, position / 16 * 8 + position % 8, column<kNTiles>(key, n, lane),
           stream_ + static_cast<uint64_t>(head));
      FA_UNROLL
      for (int half = 0; half < 2; ++half) {
        drop_pair(p(n + half, 0), p(n + half, 1), lower ? words[2 + half] : words[half]);
      }
    }
  }

  /// Draws for a block of 16 keys (rows of S^T) by 16 queries: `draws[half][e]` is of query 8 * half + 2 * (lane % 4) +
  /// e, for key lane / 4 in the low bits and key lane / 4 + 8 in the high ones. Called by whole warps.
  FA_DEVICE void draw_transposed(uint32_t (&draws)[2][2], int key, int query, int lane) const {
    const bool odd = lane / 4 % 2 != 0;
    uint32_t words[4];
    draw(words, query / 2 + 2 * (lane % 4) + (odd ? 1 : 0), key / 4 + lane / 8, stream_);
    const uint32_t own_halves = odd ? 0x7632u : 0x5410u;
    const uint32_t other_halves = odd ? 0x5410u : 0x7632u;
    FA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const uint32_t own = ptx::prmt(words[2 * half], words[2 * half + 1], own_halves);
      const uint32_t other = ptx::shfl_xor(ptx::prmt(words[2 * half], words[2 * half + 1], other_halves), 4);
      draws[half][0] = odd ? other : own;
      draws[half][1] = odd ? own : other;
    }
  }

  /// Of two draws: all ones in the halves of a word whose elements are dropped, or with DropoutParams::flip kept.
  FA_DEVICE uint32_t below(uint32_t draws) const { return ptx::less_pair(draws, threshold_); }

  /// Whether the elements of two draws are dropped.
  FA_DEVICE void dropped(bool& low, bool& high, uint32_t draws) const {
    ptx::less_pair(low, high, draws, threshold_);
    low = low != (flip_ != 0);
    high = high != (flip_ != 0);
  }

 private:
  /// The counter's word for n8 tile n (even) of kNTiles that start at `key`, a multiple of their keys.
  template <int kNTiles>
  static FA_DEVICE int column(int key, int n, int lane) {
    const int first = key / 4 + lane % 4;
    return (kNTiles & (kNTiles - 1)) == 0 ? first ^ 2 * n : first + 2 * n;  // one instruction with the next XOR
  }

  FA_DEVICE void draw(uint32_t (&words)[4], int row, int column, uint64_t stream) const {
    words[0] = static_cast<uint32_t>(stream);
    words[1] = static_cast<uint32_t>(column);
    words[2] = static_cast<uint32_t>(stream >> 32);
    words[3] = static_cast<uint32_t>(row);
    philox(words, key_[0], key_[1]);
  }

  FA_DEVICE void drop_pair(float& even, float& odd, uint32_t draws) const {
    bool low, high;
    dropped(low, high, draws);
    if (low) even = 0.f;
    if (high) odd = 0.f;
  }

  uint32_t key_[2];
  uint64_t stream_;
  uint32_t threshold_;
  uint32_t flip_;
};

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_DROPOUT_CUH_
