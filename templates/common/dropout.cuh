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

/// Of a row or a column of PhiloxStream.
struct PhiloxPart {
  static constexpr int kBytes = 16;  // one is left

  uint32_t word[3];

  FA_DEVICE void store(uint32_t shared) const {
    ptx::st_shared_b64(shared, word[0], word[1]);
    ptx::st_shared_b32(shared + 8, word[2]);
  }
  /// By two instructions: one would take a fourth register.
  FA_DEVICE static PhiloxPart load(uint32_t shared) {
    PhiloxPart part;
    ptx::ld_shared_b64(part.word[0], part.word[1], shared);
    part.word[2] = ptx::ld_shared_b32(shared + 8);
    return part;
  }
};

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

  FA_DEVICE PhiloxPart row(uint32_t row) const {
    const uint64_t b = ptx::mul_wide(row ^ row_[0], kPhiloxMultipliers[1]);
    const uint64_t a = ptx::mul_wide(high(b) ^ row_[1], kPhiloxMultipliers[0]);
    return {{low(b) ^ row_[2], high(a) ^ row_[3], low(a)}};
  }

  FA_DEVICE PhiloxPart column(uint32_t column) const {
    const uint64_t a = ptx::mul_wide(column ^ column_[0], kPhiloxMultipliers[0]);
    const uint64_t b = ptx::mul_wide(high(a) ^ column_[1], kPhiloxMultipliers[1]);
    return {{high(b), low(a), low(b)}};
  }

  /// The counter after kRounds rounds.
  FA_DEVICE static void join(uint32_t (&counter)[4], const PhiloxPart& row, const PhiloxPart& column) {
    counter[0] = column.word[0] ^ row.word[0];
    counter[1] = column.word[2];
    counter[2] = column.word[1] ^ row.word[1];
    counter[3] = row.word[2];
  }

 private:
  FA_DEVICE static uint32_t low(uint64_t product) { return static_cast<uint32_t>(product); }
  FA_DEVICE static uint32_t high(uint64_t product) { return static_cast<uint32_t>(product >> 32); }

  uint32_t row_[4], column_[2];
};

/// What is kept of the elements that a thread holds of 16 rows of P by 16 * kSteps keys, a bit each. The lane of the
/// even row of two (Dropout) draws every other step for both, the first of all among them, and that of the odd row the
/// rest: each writes a part of both masks. Pair i of a step's A operand has bytes 2 * (i % 2) and 2 * (i % 2) + 1 of a
/// word; a step has two bits of each, for i / 2 = 0 and 1, from the highest on, which `prmt_sign` spreads after a
/// shift. Four steps fill a word.
template <int kSteps>
struct KeepMask {
  static constexpr int kDrawn = ceil_div(kSteps, 2);  // steps of one lane
  static constexpr int kPartWords = ceil_div(kDrawn, 4);
  static constexpr int kWords = 2 * kPartWords;
  static constexpr int kBytes = 4 * kWords;
  static_assert(kWords <= 4, "at most 256 keys");

  uint32_t word[kWords];

  struct Part {
    uint32_t word[kPartWords] = {};

    /// From the signs of halves, of the four pairs of a step; the part's own are counted.
    FA_DEVICE void add(int step, const uint32_t (&below)[4]) {
      FA_UNROLL
      for (int half = 0; half < 2; ++half) {
        word[step / 4] |=
            ptx::prmt_sign(below[2 * half], below[2 * half + 1], 0x7531) & 0x80808080u >> (2 * (step % 4) + half);
      }
    }

    /// What was added are draws below the threshold. `shared`: of the whole mask.
    FA_DEVICE void store(uint32_t shared, bool odd, const DropoutParams& params) {
      FA_UNROLL
      for (int i = 0; i < kPartWords; ++i) word[i] = ~(word[i] ^ params.flip);
      const uint32_t part = shared + (odd ? 4 * kPartWords : 0);
      if constexpr (kPartWords == 2) {
        ptx::st_shared_b64(part, word[0], word[1]);
      } else {
        ptx::st_shared_b32(part, word[0]);
      }
    }
  };

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
    for (int n = 0; n < 2 * kSteps; ++n) expand_tile(kept, n);
  }

  /// Of n8 tile n alone.
  FA_DEVICE void expand_tile(uint32_t (&kept)[kSteps][4], int n) const {
    const int step = n / 2;
    const uint32_t bits = word[step % 2 * kPartWords + step / 8] << (2 * (step / 2 % 4) + n % 2);
    FA_UNROLL
    for (int r = 0; r < 2; ++r) kept[step][n % 2 * 2 + r] = ptx::prmt_sign(bits, bits, r == 0 ? 0x1100u : 0x3322u);
  }
};

/// Which elements of P are dropped. One call of the generator decides on 16 elements: rows r, r + 1, r + 8 and r + 9 (r
/// even) of a block of 16 rows, keys c, c + 1, c + 8 and c + 9 (c even) of a block of 16 keys. One half of them is what
/// a thread holds of the accumulators of S, the other what its neighbour (lane ^ 4) holds of them, and so it is with
/// those of S^T: of two blocks each makes the call for one, and no bit is drawn twice or in vain.
///
/// The counter is {low half of offset + batch * h_q + head, key block * 4 + c / 2, the high half, row block * 4 + r /
/// 2}, the key is the seed. Two of the words are of even rows, two of odd ones: of even rows the first two in an even
/// key block. So the first two are a lane's own, where it calls for the key block of its row's parity. An element's
/// draw has 16 bits: a byte of its own, and below it the XOR of two others' (`spread`). So draws are uniform, and any
/// two of them independent. They are compared as f16 numbers: one instruction decides on both halves of a word.
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

  /// Zeroes what is dropped of a warp's fragments [rows, keys]; `row` and `key` are multiples of 16. Called by whole
  /// warps.
  template <int kMTiles, int kNTiles>
  FA_DEVICE void drop(Fragment<kMTiles, kNTiles>& p, int row, int key, int lane) const {
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int n = 0; n < kNTiles; n += 4) {
        const bool two = n + 2 < kNTiles;
        uint32_t words[4];
        uint32_t draws[2][4];
        draw(words, (row + 16 * m) / 4 + lane / 8, key / 4 + 2 * n + (two && is_odd(lane) ? 4 : 0) + lane % 4, stream_);
        if (is_odd_block(key)) swap(words);
        if (two) {
          exchange(draws[0], draws[1], words, lane);
        } else {
          half_of(draws[0], words, is_odd(lane));
        }
        FA_UNROLL
        for (int step = 0; step < (two ? 2 : 1); ++step) {
          FA_UNROLL
          for (int i = 0; i < 4; ++i) {
            float(&pair)[4] = p[m][n + 2 * step + i / 2];
            drop_pair(pair[2 * (i % 2)], pair[2 * (i % 2) + 1], draws[step][i]);
          }
        }
      }
    }
  }

  /// Of the rows and columns of this head.
  FA_DEVICE PhiloxStream stream() const { return PhiloxStream(stream_, key_[0], key_[1]); }

  /// The row of a lane's calls for a warp's 16 rows. Of 16 keys the column is key / 4 + lane % 4.
  FA_DEVICE static uint32_t row_of(int row, int lane) { return static_cast<uint32_t>(row / 4 + lane / 8); }

  /// Whether a lane's rows of S, or keys of S^T, are odd.
  FA_DEVICE static bool is_odd(int lane) { return lane / 4 % 2 != 0; }

  /// Whether 16 keys are an odd block.
  FA_DEVICE static bool is_odd_block(int key) { return key / 16 % 2 != 0; }

  /// A call for 16 rows by 16 keys, compared, in the order of the A operands that the lane itself and its neighbour
  /// make of them: `below[own ? 0 : 1][n % 2 * 2 + r]` is of n8 tile n and row half r, the even key in the low half.
  /// The sign of a half says that the draw is below the threshold. `turned`: the parities of the lane's row and the key
  /// block differ. Of *this the seed and the threshold alone count.
  FA_DEVICE void draw_both(uint32_t (&below)[2][4], const PhiloxPart& row, const PhiloxPart& column,
                           bool turned) const {
    uint32_t words[4];
    draw(words, row, column);
    if (turned) swap(words);
    FA_UNROLL
    for (int other = 0; other < 2; ++other) {
      spread(below[other], words[2 * other], words[2 * other + 1]);
      FA_UNROLL
      for (int i = 0; i < 4; ++i) below[other][i] = ptx::subtract_pair(below[other][i], threshold_);
    }
  }

  /// The same for row half r of 16 keys alone, which is of any position and head: `below[n % 2 * 2 + r]`.
  FA_DEVICE void draw_row(uint32_t (&below)[4], int r, int position, int head, int key, int lane) const {
    uint32_t draws[2];
    draws_of_row(draws, position, head, key, lane);
    FA_UNROLL
    for (int half = 0; half < 2; ++half) below[2 * half + r] = ptx::subtract_pair(draws[half], threshold_);
  }

  /// Zeroes what is dropped of one row, of any position and head, of which p(n, 0) and p(n, 1) are the registers.
  template <int kNTiles, class Registers>
  FA_DEVICE void drop_row(Registers p, int position, int head, int key, int lane) const {
    FA_UNROLL
    for (int n = 0; n < kNTiles; n += 2) {
      uint32_t draws[2];
      draws_of_row(draws, position, head, key + 8 * n, lane);
      FA_UNROLL
      for (int half = 0; half < 2; ++half) drop_pair(p(n + half, 0), p(n + half, 1), draws[half]);
    }
  }

  /// What is dropped of a block of 16 keys (rows of S^T) by 16 * kBlocks queries, as `dropped` reads it. Called by
  /// whole warps.
  template <int kBlocks>
  FA_DEVICE uint32_t draw_transposed(int key, int query, int lane) const {
    static_assert(kBlocks <= 4, "eight bits each");
    const bool odd = is_odd(lane);
    // Own bytes are 0 and 1, of odd keys 2 and 3; those of two neighbouring queries are the other way round in an odd
    // block.
    const uint32_t turned = is_odd_block(key) ? 0x1111u : 0;
    const uint32_t of_two = (odd ? 0x3276u : 0x5410u) ^ turned;
    const uint32_t of_one = (odd ? 0x3232u : 0x1010u) ^ turned;
    uint32_t all = 0;
    FA_UNROLL
    for (int block = 0; block < kBlocks; block += 2) {
      const bool two = block + 1 < kBlocks;
      uint32_t words[4];
      draw(words, query / 4 + 4 * block + (two && odd ? 4 : 0) + lane % 4, key / 4 + lane / 8, stream_);
      uint32_t bits = 0;  // of the even key in the low half
      FA_UNROLL
      for (int pair = 0; pair < 2; ++pair) {
        uint32_t draws[4];
        spread(draws, words[2 * pair], words[2 * pair + 1]);
        compare(draws);
        FA_UNROLL
        for (int i = 0; i < 4; ++i) bits = ptx::xor_masked(bits, draws[i], 0x00010001u << (8 * pair + i));
      }
      const uint32_t both = two ? ptx::prmt(bits, ptx::shfl_xor(bits, 4), of_two) : ptx::prmt(bits, bits, of_one);
      all |= both << 2 * block;
    }
    return all ^ flip_;
  }
  /// Of register e of n8 tile n: of keys lane / 4 and lane / 4 + 8 for e / 2 = 0 and 1, and query 2 * (lane % 4) + e
  /// % 2.
  FA_DEVICE static bool dropped(uint32_t drops, int n, int e) {
    const int byte = n / 2 % 2 * 2 + e % 2;
    return (drops >> (8 * byte + bit(n, e / 2)) & 1) != 0;
  }
  /// All ones in the halves that are dropped of a packed pair, registers 2 * r and 2 * r + 1 of n8 tile n.
  FA_DEVICE static uint32_t dropped_pair(uint32_t drops, int n, int r) {
    return ptx::prmt_sign(drops << (7 - bit(n, r)), drops << (7 - bit(n, r)), n / 2 % 2 == 0 ? 0x1100u : 0x3322u);
  }

 private:
  /// Of a byte of what `draw_transposed` returns.
  FA_DEVICE static int bit(int n, int r) { return n / 4 * 4 + r * 2 + n % 2; }

  FA_DEVICE void draw(uint32_t (&words)[4], int row, int column, uint64_t stream) const {
    words[0] = static_cast<uint32_t>(stream);
    words[1] = static_cast<uint32_t>(column);
    words[2] = static_cast<uint32_t>(stream >> 32);
    words[3] = static_cast<uint32_t>(row);
    philox(words, key_[0], key_[1]);
  }
  FA_DEVICE void draw(uint32_t (&words)[4], const PhiloxPart& row, const PhiloxPart& column) const {
    PhiloxStream::join(words, row, column);
    philox(words, key_[0], key_[1], PhiloxStream::kRounds);
  }

  /// Two words of a call become eight draws: draws[2 * (key >= 8) + (row >= 8)] of the even key in the low half. The
  /// first word's bytes are high bytes of keys 0 and 1, the second's of 8 and 9. Low bytes are XORs of a byte of each
  /// word, no two the same and none of the draw's own: any two draws are 32 independent bits.
  FA_DEVICE static void spread(uint32_t (&draws)[4], uint32_t first, uint32_t second) {
    constexpr uint32_t kLow = 0x00ff00ffu;
    const uint32_t turned_first = ptx::prmt(first, first, 0x2103);
    const uint32_t turned_second = ptx::prmt(second, second, 0x2103);
    draws[0] = ptx::xor_masked(first, second, kLow);
    draws[1] = ptx::xor_masked(turned_first, turned_second, kLow);
    draws[2] = ptx::xor_masked(second, turned_first, kLow);
    draws[3] = ptx::xor_masked(turned_second, first, kLow);
  }

  FA_DEVICE void compare(uint32_t (&draws)[4]) const {
    FA_UNROLL
    for (int i = 0; i < 4; ++i) draws[i] = ptx::less_pair(draws[i], threshold_);
  }

  /// Of the first two words, or else of the last.
  FA_DEVICE static void half_of(uint32_t (&draws)[4], const uint32_t (&words)[4], bool last) {
    spread(draws, last ? words[2] : words[0], last ? words[3] : words[1]);
  }

  FA_DEVICE static void swap(uint32_t (&words)[4]) {
    FA_UNROLL
    for (int i = 0; i < 2; ++i) {
      const uint32_t word = words[i];
      words[i] = words[2 + i];
      words[2 + i] = word;
    }
  }

  /// The lane's draws of two calls, of which lanes of even rows have made the first and those of odd ones the second.
  /// The first two words of a lane's call are its own, the last are its neighbour's.
  FA_DEVICE static void exchange(uint32_t (&first)[4], uint32_t (&second)[4], const uint32_t (&words)[4], int lane) {
    const bool odd = is_odd(lane);
    uint32_t own[2][2];
    FA_UNROLL
    for (int i = 0; i < 2; ++i) {
      const uint32_t other = ptx::shfl_xor(words[2 + i], 4);
      own[0][i] = odd ? other : words[i];
      own[1][i] = odd ? words[i] : other;
    }
    spread(first, own[0][0], own[0][1]);
    spread(second, own[1][0], own[1][1]);
  }

  /// Of a row of any position and head and 16 keys: draws[key >= 8].
  FA_DEVICE void draws_of_row(uint32_t (&draws)[2], int position, int head, int key, int lane) const {
    uint32_t words[4];
    uint32_t both[4];
    draw(words, position / 16 * 4 + position % 8 / 2, key / 4 + lane % 4, stream_ + static_cast<uint64_t>(head));
    half_of(both, words, is_odd_block(key) != (position % 2 != 0));
    FA_UNROLL
    for (int half = 0; half < 2; ++half) draws[half] = position % 16 >= 8 ? both[2 * half + 1] : both[2 * half];
  }

  FA_DEVICE void drop_pair(float& even, float& odd, uint32_t draws) const {
    bool low, high;
    ptx::less_pair(low, high, draws, threshold_);
    if (low != (flip_ != 0)) even = 0.f;
    if (high != (flip_ != 0)) odd = 0.f;
  }

  uint32_t key_[2];
  uint64_t stream_;
  uint32_t threshold_;
  uint32_t flip_;
};

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_DROPOUT_CUH_
