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

constexpr uint32_t kPhiloxMultiplier0 = 0xd2511f53u;
constexpr uint32_t kPhiloxMultiplier1 = 0xcd9e8d57u;
constexpr uint32_t kPhiloxStep0 = 0x9e3779b9u;  // of the key, from round to round
constexpr uint32_t kPhiloxStep1 = 0xbb67ae85u;
constexpr int kPhiloxRounds = 7;

/// Four words of Philox4x32-7 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011):
/// seven rounds are the fewest that pass BigCrush. Here rounds `begin` to `end`.
FA_DEVICE void philox(uint32_t (&counter)[4], uint32_t key_low, uint32_t key_high, int begin, int end) {
  FA_UNROLL
  for (int round = 0; round < kPhiloxRounds; ++round) {
    if (round < begin || round >= end) continue;
    const auto step = static_cast<uint32_t>(round);
    const uint64_t a = ptx::mul_wide(counter[0], kPhiloxMultiplier0);
    const uint64_t b = ptx::mul_wide(counter[2], kPhiloxMultiplier1);
    counter[0] = static_cast<uint32_t>(b >> 32) ^ counter[1] ^ (key_low + step * kPhiloxStep0);
    counter[1] = static_cast<uint32_t>(b);
    counter[2] = static_cast<uint32_t>(a >> 32) ^ counter[3] ^ (key_high + step * kPhiloxStep1);
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
    const uint64_t a = ptx::mul_wide(static_cast<uint32_t>(stream), kPhiloxMultiplier0);
    const uint64_t b = ptx::mul_wide(static_cast<uint32_t>(stream >> 32), kPhiloxMultiplier1);
    row_[0] = high(a) ^ key_high;
    row_[1] = low(b) ^ (key_low + kPhiloxStep0);
    row_[2] = key_low + 2 * kPhiloxStep0;
    row_[3] = key_high + 2 * kPhiloxStep1;
    column_[0] = high(b) ^ key_low;
    column_[1] = low(a) ^ (key_high + kPhiloxStep1);
  }

  FA_DEVICE PhiloxPart row(uint32_t row) const {
    const uint64_t b = ptx::mul_wide(row ^ row_[0], kPhiloxMultiplier1);
    const uint64_t a = ptx::mul_wide(high(b) ^ row_[1], kPhiloxMultiplier0);
    return {{low(b) ^ row_[2], high(a) ^ row_[3], low(a)}};
  }

  FA_DEVICE PhiloxPart column(uint32_t column) const {
    const uint64_t a = ptx::mul_wide(column ^ column_[0], kPhiloxMultiplier0);
    const uint64_t b = ptx::mul_wide(high(a) ^ column_[1], kPhiloxMultiplier1);
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
/// rest: each writes a part of both masks. A step has a byte, whose bits are those of a call (Dropout::draw).
template <int kSteps>
struct KeepMask {
  static constexpr int kDrawn = ceil_div(kSteps, 2);  // steps of one lane
  static constexpr int kPartWords = ceil_div(kDrawn, 4);
  static constexpr bool kHalves = kDrawn <= 2;  // of a word, for the parts
  static constexpr int kWords = kHalves ? 1 : 2 * kPartWords;
  static constexpr int kBytes = 8 * kPartWords;
  static_assert(kWords <= 4, "at most 256 keys");

  uint32_t word[kWords];

  /// Of one lane's steps: `dropped`, a byte each. `shared`: of the whole mask.
  FA_DEVICE static void store_part(uint32_t shared, bool odd, const uint32_t (&dropped)[kPartWords]) {
    const uint32_t part = shared + (odd ? (kHalves ? 2 : 4 * kPartWords) : 0);
    if constexpr (kHalves) {
      ptx::st_shared_b16(part, static_cast<uint16_t>(~dropped[0]));
    } else if constexpr (kPartWords == 2) {
      ptx::st_shared_b64(part, ~dropped[0], ~dropped[1]);
    } else {
      ptx::st_shared_b32(part, ~dropped[0]);
    }
  }

  FA_DEVICE static KeepMask load(uint32_t shared) {
    KeepMask mask;
    if constexpr (kWords == 4) {
      const Chunk chunk = ptx::ld_shared_chunk(shared);
      FA_UNROLL
      for (int i = 0; i < 4; ++i) mask.word[i] = chunk.word[i];
    } else if constexpr (kWords == 2) {
      ptx::ld_shared_b64(mask.word[0], mask.word[1], shared);
    } else {
      mask.word[0] = ptx::ld_shared_b32(shared);
    }
    return mask;
  }

  /// All ones in the halves of what is kept, in the order of the A operands, of n8 tile n.
  FA_DEVICE void expand_tile(uint32_t (&kept)[kSteps][4], int n) const {
    const int step = n / 2;
    const uint32_t bits = word[kHalves ? 0 : step % 2 * kPartWords + step / 8];
    const auto byte = static_cast<uint32_t>(kHalves ? step % 2 * 2 + step / 2 : step / 2 % 4);
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int place = n % 2 * 2 + r;
      // The highest bits of bytes are spread: that of the even key, and that of the odd one from another register.
      kept[step][place] = ptx::prmt_sign(bits << (7 - place), bits << (3 - place), 0x4400u + 0x1111u * byte);
    }
  }

  /// Of all.
  FA_DEVICE void expand(uint32_t (&kept)[kSteps][4]) const {
    FA_UNROLL
    for (int n = 0; n < 2 * kSteps; ++n) expand_tile(kept, n);
  }
};

/// Which elements of P are dropped. One call of the generator decides on 32 elements: rows r, r + 1, r + 8 and r + 9 (r
/// even) of both halves of a block of 32 rows, keys c, c + 1, c + 8 and c + 9 (c even) of a block of 16 keys. One half
/// of them is what a thread holds of the accumulators of S, the other what its neighbour (lane ^ 4) holds of them, and
/// so it is with those of S^T: of two blocks each makes the call for one.
///
/// The counter is {low half of offset + batch * h_q + head, key block * 4 + c / 2, the high half, row block * 4 + r /
/// 2}, the key is the seed. An element's draw has 16 bits, and drops it when it is less than p * 2^16. The four highest
/// are its bits of the call's words, the next four sums of others' (add_bits). The low byte, which decides in one case
/// of 256, all elements of a call share: the highest byte of the XOR of words 1 and 3 after three rounds. So 32
/// elements are compared at once, by one operation of logic for each of eight bits.
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
    FA_UNROLL
    for (int i = 0; i < 8; ++i) threshold_[i] = params.threshold[i];
    low_threshold_ = params.low_threshold;
  }

  /// The same from what `share` left in shared memory. Called by whole warps: that a warp's threads agree on the seed
  /// is then known, and what follows from it alone is computed once a warp.
  FA_DEVICE Dropout(const DropoutParams& params, uint32_t shared, int64_t heads_before) {
    const Chunk state = ptx::ld_shared_chunk(shared);
    FA_UNROLL
    for (int i = 0; i < 2; ++i) key_[i] = ptx::shfl(state.word[i], 0);
    stream_ = (static_cast<uint64_t>(state.word[3]) << 32 | state.word[2]) + static_cast<uint64_t>(heads_before);
    FA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const Chunk threshold = ptx::ld_shared_chunk(shared + 16 + 16 * half);
      FA_UNROLL
      for (int i = 0; i < 4; ++i) threshold_[4 * half + i] = threshold.word[i];
    }
    low_threshold_ = params.low_threshold;
  }

  static constexpr int kSharedBytes = 48;

  /// Seed, offset and threshold into shared memory: what they are is then found there, and takes no registers of warps
  /// that do not draw. (Of thresholds that are constants ptxas takes away consumers' uniform registers.)
  FA_DEVICE static void share(const DropoutParams& params, uint32_t shared) {
    const Dropout dropout(params, 0);
    ptx::st_shared_b32(shared, dropout.key_[0]);
    ptx::st_shared_b32(shared + 4, dropout.key_[1]);
    ptx::st_shared_b32(shared + 8, static_cast<uint32_t>(dropout.stream_));
    ptx::st_shared_b32(shared + 12, static_cast<uint32_t>(dropout.stream_ >> 32));
    FA_UNROLL
    for (int i = 0; i < 8; ++i) ptx::st_shared_b32(shared + 16 + 4 * i, params.threshold[i]);
  }

  /// Zeroes what is dropped of a warp's fragments [rows, keys]; `row` and `key` are multiples of 16. Called by whole
  /// warps.
  template <int kMTiles, int kNTiles>
  FA_DEVICE void drop(Fragment<kMTiles, kNTiles>& p, int row, int key, int lane) const {
    constexpr int kTogether = kMTiles % 2 == 0 ? 2 : 1;  // blocks of 16 rows, which then begin at a multiple of 32
    const bool odd = is_odd(lane);
    const uint32_t turned = is_odd_block(key) ? 0x1111u : 0;
    FA_UNROLL
    for (int m = 0; m < kMTiles; m += kTogether) {
      FA_UNROLL
      for (int n = 0; n < kNTiles; n += 4) {
        const bool two = n + 2 < kNTiles;
        const uint32_t drawn = draw(static_cast<int>(row_of(row + 16 * m, lane)),
                                    key / 4 + 2 * n + (two && odd ? 4 : 0) + lane % 4, stream_);
        // The lane's own bytes of two calls, of which lanes of even rows have made the first and those of odd ones the
        // second: of the first 16 rows in the low half.
        uint32_t drops = two ? ptx::prmt(drawn, ptx::shfl_xor(drawn, 4), (odd ? 0x2705u : 0x7250u) ^ turned)
                             : ptx::prmt(drawn, drawn, (odd ? 0x3311u : 0x2200u) ^ turned);
        if constexpr (kTogether == 1) drops >>= row_shift(row + 16 * m);
        FA_UNROLL
        for (int block = 0; block < kTogether; ++block) {
          FA_UNROLL
          for (int step = 0; step < (two ? 2 : 1); ++step) {
            FA_UNROLL
            for (int i = 0; i < 4; ++i) {
              float(&pair)[4] = p[m + block][n + 2 * step + i / 2];
              drop_pair(pair[2 * (i % 2)], pair[2 * (i % 2) + 1], drops >> (16 * block + 8 * step + i));
            }
          }
        }
      }
    }
  }

  /// Of the rows and columns of this head.
  FA_DEVICE PhiloxStream stream() const { return PhiloxStream(stream_, key_[0], key_[1]); }

  /// The row of a lane's calls for 16 or 32 rows from `row` on. Of 16 keys the column is key / 4 + lane % 4.
  FA_DEVICE static uint32_t row_of(int row, int lane) { return static_cast<uint32_t>(row / 32 * 4 + lane / 8); }

  /// Whether a lane's rows of S, or keys of S^T, are odd.
  FA_DEVICE static bool is_odd(int lane) { return lane / 4 % 2 != 0; }

  /// Whether 16 keys are an odd block.
  FA_DEVICE static bool is_odd_block(int key) { return key / 16 % 2 != 0; }

  /// A call: what it drops. Byte 0 is of the rows whose parity is that of the key block, byte 1 of the others, both of
  /// the first 16 rows, bytes 2 and 3 likewise of the next; bit 4 * (key % 2) + 2 * (key % 16 >= 8) + (row % 16 >= 8).
  FA_DEVICE uint32_t draw(const PhiloxPart& row, const PhiloxPart& column) const {
    uint32_t words[4];
    PhiloxStream::join(words, row, column);
    return finish(words);
  }

  /// The byte of row half r of 16 keys alone, with the bits of r, which is of any position and head.
  FA_DEVICE uint32_t draw_row(int r, int position, int head, int key, int lane) const {
    return drops_of_row(position, head, key, lane) << r;
  }

  /// Zeroes what is dropped of one row, of any position and head, of which p(n, 0) and p(n, 1) are the registers.
  template <int kNTiles, class Registers>
  FA_DEVICE void drop_row(Registers p, int position, int head, int key, int lane) const {
    FA_UNROLL
    for (int n = 0; n < kNTiles; n += 2) {
      const uint32_t drops = drops_of_row(position, head, key + 8 * n, lane);
      FA_UNROLL
      for (int half = 0; half < 2; ++half) drop_pair(p(n + half, 0), p(n + half, 1), drops >> 2 * half);
    }
  }

  /// How many neighbouring n8 tiles of queries are drawn for together, of as many as there are.
  FA_DEVICE static constexpr int drawn_tiles(int tiles) { return tiles % 8 == 0 ? 8 : tiles % 4 == 0 ? 4 : 2; }

  /// What is dropped of a block of 16 keys (rows of S^T) by kTiles n8 tiles of queries, as `dropped` reads it; `query`
  /// is a multiple of 8 * kTiles. Called by whole warps.
  template <int kTiles>
  FA_DEVICE uint32_t draw_transposed(int key, int query, int lane) const {
    static_assert(kTiles == 2 || kTiles == 4 || kTiles == 8, "a part of a call, one or two");
    const bool odd = is_odd(lane);
    const int row = query / 32 * 4 + (kTiles == 8 && odd ? 4 : 0) + lane % 4;
    uint32_t drawn = draw(row, key / 4 + lane / 8, stream_);
    if constexpr (kTiles == 8) {
      // Lanes of even keys, whose bits are the low ones of each byte, have made the call for the first 32 queries.
      const uint32_t other = ptx::shfl_xor(drawn, 4);
      const uint32_t own = odd ? 0xf0f0f0f0u : 0x0f0f0f0fu;
      drawn = (drawn & own) | ((odd ? other >> 4 : other << 4) & ~own);
    } else {
      drawn = (odd ? drawn >> 4 : drawn) & 0x0f0f0f0fu;
      if constexpr (kTiles == 2) drawn >>= row_shift(query);
    }
    // In an odd block the bytes of two neighbouring queries are the other way round.
    return ptx::prmt(drawn, drawn, is_odd_block(key) ? 0x2301u : 0x3210u);
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

  FA_DEVICE uint32_t draw(int row, int column, uint64_t stream) const {
    uint32_t words[4] = {static_cast<uint32_t>(stream), static_cast<uint32_t>(column),
                         static_cast<uint32_t>(stream >> 32), static_cast<uint32_t>(row)};
    philox(words, key_[0], key_[1], 0, PhiloxStream::kRounds);
    return finish(words);
  }

  /// Of a counter after PhiloxStream::kRounds rounds. `below`: the bits so far of a draw are less than the threshold's.
  FA_DEVICE uint32_t finish(uint32_t (&words)[4]) const {
    uint32_t below = (words[1] ^ words[3]) < low_threshold_ ? ~0u : 0;
    philox(words, key_[0], key_[1], PhiloxStream::kRounds, kPhiloxRounds);
    uint32_t sums[4];
    add_bits(sums, words);
    FA_UNROLL
    for (int i = 0; i < 4; ++i) below = borrow(sums[i], threshold_[i], below);
    FA_UNROLL
    for (int i = 0; i < 4; ++i) below = borrow(words[i], threshold_[4 + i], below);
    return below;
  }

  /// Sums of four bits of other elements each, such that the eight bits of any four elements of a call are independent.
  FA_DEVICE static void add_bits(uint32_t (&sums)[4], const uint32_t (&words)[4]) {
    const uint32_t first = words[0] ^ ptx::rotate_left(words[1], 6);
    const uint32_t second = words[2] ^ ptx::rotate_left(words[3], 6);
    sums[0] = ptx::rotate_left(first, 12) ^ ptx::rotate_left(second, 11);
    sums[1] = ptx::rotate_left(first, 11) ^ ptx::rotate_left(second, 12);
    sums[2] = ptx::rotate_left(first, 15) ^ ptx::rotate_left(second, 7);
    sums[3] = ptx::rotate_left(first, 16) ^ ptx::rotate_left(second, 20);
  }

  /// Of each bit, whether a - b - c borrows from the next.
  FA_DEVICE static uint32_t borrow(uint32_t a, uint32_t b, uint32_t c) { return (~a & b) | (c & (~a | b)); }

  /// Of a row of any position and head and 16 keys: bits 4 * (key % 2) + 2 * (key % 16 >= 8).
  FA_DEVICE uint32_t drops_of_row(int position, int head, int key, int lane) const {
    const uint32_t drawn =
        draw(position / 32 * 4 + position % 8 / 2, key / 4 + lane % 4, stream_ + static_cast<uint64_t>(head));
    const int byte = is_odd_block(key) != (position % 2 != 0) ? 1 : 0;
    return drawn >> (row_shift(position) + 8 * byte + position % 16 / 8) & 0x55u;
  }

  /// Where a call's bits of a row begin.
  FA_DEVICE static int row_shift(int row) { return row / 16 % 2 * 16; }

  FA_DEVICE static void drop_pair(float& even, float& odd, uint32_t drops) {
    if ((drops & 1) != 0) even = 0.f;
    if ((drops & 16) != 0) odd = 0.f;
  }

  uint32_t key_[2];
  uint64_t stream_;
  uint32_t threshold_[8];
  uint32_t low_threshold_;
};

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_DROPOUT_CUH_
