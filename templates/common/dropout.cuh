#ifndef FA_TEMPLATES_COMMON_DROPOUT_CUH_
#define FA_TEMPLATES_COMMON_DROPOUT_CUH_

#include <common/online_softmax.cuh>
#include <common/packed_params.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>

namespace fa::kernel {

/// Four words of Philox4x32-7 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011):
/// seven rounds are the fewest that pass BigCrush.
FA_DEVICE void philox(uint32_t (&counter)[4], uint32_t key_low, uint32_t key_high) {
  constexpr uint32_t kMultipliers[2] = {0xd2511f53u, 0xcd9e8d57u};
  constexpr uint32_t kSteps[2] = {0x9e3779b9u, 0xbb67ae85u};
  FA_UNROLL
  for (int round = 0; round < 7; ++round) {
    const uint64_t a = static_cast<uint64_t>(kMultipliers[0]) * counter[0];
    const uint64_t b = static_cast<uint64_t>(kMultipliers[1]) * counter[2];
    counter[0] = static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key_low;
    counter[1] = static_cast<uint32_t>(b);
    counter[2] = static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key_high;
    counter[3] = static_cast<uint32_t>(a);
    key_low += kSteps[0];
    key_high += kSteps[1];
  }
}

/// Which elements of P are dropped. One call of the generator decides on eight elements, a 16-bit draw each: rows r and
/// r + 8 of a block of 16 rows, keys c, c + 1, c + 8 and c + 9 (c even) of a block of 16 keys. They are what a thread
/// holds of the accumulators of S, and what two neighbouring threads (lane and lane ^ 4) hold of those of S^T: there
/// each makes one call for both, and no bit is drawn twice or in vain.
///
/// The counter is {row block * 8 + r, key block * 4 + c / 2, the 64 bits of offset + batch * h_q + head}, the key is
/// the seed. In the word 2 * (row >= 8) + (key >= 8) the even key has the low half.
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
    threshold_ = params.threshold << 16;
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
      draw(words, row / 2 + lane / 4, key / 4 + 2 * n + lane % 4, stream_);
      FA_UNROLL
      for (int half = 0; half < 2; ++half) {
        FA_UNROLL
        for (int r = 0; r < 2; ++r) drop_pair(p(n + half, 2 * r), p(n + half, 2 * r + 1), words[2 * r + half]);
      }
    }
  }

  /// The same for one row, of any position and head, of which p(n, 0) and p(n, 1) are the registers.
  template <int kNTiles, class Registers>
  FA_DEVICE void drop_row(Registers p, int position, int head, int key, int lane) const {
    const bool lower = position % 16 >= 8;
    FA_UNROLL
    for (int n = 0; n < kNTiles; n += 2) {
      uint32_t words[4];
      draw(words, position / 16 * 8 + position % 8, key / 4 + 2 * n + lane % 4, stream_ + static_cast<uint64_t>(head));
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

  /// Whether the draw in the low, or the high half of a word drops its element.
  FA_DEVICE bool drops_low(uint32_t draws) const { return draws << 16 < threshold_; }
  FA_DEVICE bool drops_high(uint32_t draws) const { return draws < threshold_; }

 private:
  FA_DEVICE void draw(uint32_t (&words)[4], int row, int column, uint64_t stream) const {
    words[0] = static_cast<uint32_t>(row);
    words[1] = static_cast<uint32_t>(column);
    words[2] = static_cast<uint32_t>(stream);
    words[3] = static_cast<uint32_t>(stream >> 32);
    philox(words, key_[0], key_[1]);
  }

  FA_DEVICE void drop_pair(float& even, float& odd, uint32_t draws) const {
    if (drops_low(draws)) even = 0.f;
    if (drops_high(draws)) odd = 0.f;
  }

  uint32_t key_[2];
  uint64_t stream_;
  uint32_t threshold_;  // in the high half
};

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_DROPOUT_CUH_
