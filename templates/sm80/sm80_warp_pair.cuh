#ifndef FA_TEMPLATES_SM80_SM80_WARP_PAIR_CUH_
#define FA_TEMPLATES_SM80_SM80_WARP_PAIR_CUH_

#include <common/constants.cuh>
#include <common/online_softmax.cuh>
#include <common/types.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>

namespace fa::sm80 {

using namespace kernel;

/// What two warps that share 32 query rows tell each other through shared memory. A warp has the same rows in the same
/// lanes as its partner and half of the keys, kNTiles n tiles: its P, rounded, goes over as it stands in registers.
///
/// In shared memory: P [warps][chunk][lane] of 16 bytes, then statistics [warps][lane / 4][lane % 4] of floats, the
/// last index that of the four rows of a thread.
template <int kWarps, int kNTiles>
struct WarpPair {
  static constexpr int kMTiles = 2;
  static constexpr int kSteps = kNTiles / 2;
  static constexpr int kPBytes = kMTiles * kSteps * kWarpSize * kChunkBytes;  // of a warp
  static constexpr int kRowBytes = kWarpSize * static_cast<int>(sizeof(float));
  static constexpr int kBytes = kWarps * (kPBytes + kRowBytes);

  const int thread = ptx::thread_index();  // read anew, like all that follows from it
  const int lane = thread % kWarpSize;
  const int warp = thread / kWarpSize;
  const uint32_t p_own;
  const uint32_t p_other;
  const uint32_t rows_own;
  const uint32_t rows_other;

  FA_DEVICE explicit WarpPair(uint32_t shared)
      : p_own(shared + warp * kPBytes + lane * kChunkBytes),
        p_other(shared + (warp ^ 1) * kPBytes + lane * kChunkBytes),
        rows_own(shared + kWarps * kPBytes + warp * kRowBytes),
        rows_other(shared + kWarps * kPBytes + (warp ^ 1) * kRowBytes) {}

  /// Both warps of the pair, and their shared memory accesses.
  FA_DEVICE void meet() const { ptx::barrier_sync(1 + kWarps + warp / 2, 2 * kWarpSize); }

  /// The largest scores of this warp's keys and `start`, for `maxima` after a barrier of the pair or the block.
  FA_DEVICE void publish_maxima(const Fragment<kMTiles, kNTiles>& s, const float (&start)[kMTiles][2]) const {
    float own[4];  // of the rows 8i + lane / 4
    FA_UNROLL
    for (int i = 0; i < 4; ++i) {
      own[i] = start[i / 2][i % 2];
      FA_UNROLL
      for (int n = 0; n < kNTiles; ++n) {
        const float(&c)[4] = s[i / 2][n];
        own[i] = ptx::max(own[i], ptx::max(c[2 * (i % 2)], c[2 * (i % 2) + 1]));
      }
    }
    // Lanes of a quad swap rows, so that each ends with one whole row instead of all with all four.
    const bool odd = lane % 2 != 0;
    const bool upper = lane / 2 % 2 != 0;
    FA_UNROLL
    for (int i = 0; i < 2; ++i) {
      const float given = ptx::shfl_xor(upper ? own[i] : own[2 + i], 2);
      own[i] = ptx::max(upper ? own[2 + i] : own[i], given);
    }
    const float given = ptx::shfl_xor(odd ? own[0] : own[1], 1);
    ptx::st_shared_b32(rows_own + lane * 4, ptx::bits(ptx::max(odd ? own[1] : own[0], given)));
  }

  /// The larger of both warps' maxima.
  FA_DEVICE void maxima(float (&result)[kMTiles][2]) const {
    const Chunk own = ptx::ld_shared_chunk(rows_own + lane / 4 * kChunkBytes);
    const Chunk other = ptx::ld_shared_chunk(rows_other + lane / 4 * kChunkBytes);
    FA_UNROLL
    for (int i = 0; i < 4; ++i) {
      result[i / 2][i % 2] = ptx::max(ptx::from_bits(own.word[i]), ptx::from_bits(other.word[i]));
    }
  }

  /// Adds the partner's row sums; both warps have left the main loop then.
  FA_DEVICE void add_sums(float (&sum)[kMTiles][2]) const {
    const Chunk own{{ptx::bits(sum[0][0]), ptx::bits(sum[0][1]), ptx::bits(sum[1][0]), ptx::bits(sum[1][1])}};
    if (lane % 4 == 0) ptx::st_shared_chunk(rows_own + lane / 4 * kChunkBytes, own);
    meet();  // the sums are in shared memory, and both have read Q for the last time
    const Chunk other = ptx::ld_shared_chunk(rows_other + lane / 4 * kChunkBytes);
    FA_UNROLL
    for (int i = 0; i < 4; ++i) sum[i / 2][i % 2] += ptx::from_bits(other.word[i]);
  }

  /// P of the warp's keys 16k to 16k + 15. A barrier of the block is to come between one tile's `receive` and the next
  /// tile's `send`.
  FA_DEVICE void send(const uint32_t (&p)[kMTiles][4], int k) const {
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      ptx::st_shared_chunk(p_own + (k * kMTiles + m) * kWarpSize * kChunkBytes, {{p[m][0], p[m][1], p[m][2], p[m][3]}});
    }
  }

  FA_DEVICE void announce() const {
    ptx::barrier_arrive(1 + (warp ^ 1), 2 * kWarpSize);  // P is there for the partner
  }

  FA_DEVICE void wait() const {
    ptx::barrier_sync(1 + warp, 2 * kWarpSize);  // the partner's P is there
  }

  FA_DEVICE void receive(uint32_t (&p)[kMTiles][4], int k) const {
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      const Chunk words = ptx::ld_shared_chunk(p_other + (k * kMTiles + m) * kWarpSize * kChunkBytes);
      FA_UNROLL
      for (int e = 0; e < 4; ++e) p[m][e] = words.word[e];
    }
  }

  /// O += P V for n tiles kBegin to kEnd of O and 16 keys, whose P is `p` and whose V starts at `v_rows`.
  template <class Gemm, class VTile, int kBegin, int kEnd, int kOTiles>
  static FA_DEVICE void add_columns(Fragment<kMTiles, kOTiles>& o, const uint32_t (&p)[kMTiles][4], int lane,
                                    uint32_t v_rows) {
    Gemm::template multiply<VTile, 16, kBegin, kEnd>(o, v_rows, lane, [&](uint32_t(&a)[4], int m, int) {
      FA_UNROLL
      for (int i = 0; i < 4; ++i) a[i] = p[m][i];
    });
  }

  /// O += P V of a warp of a pair: with its own P, while the other's is on its way, then with the other's.
  template <class Gemm, class VTile, int kOTiles>
  FA_DEVICE void accumulate(Fragment<kMTiles, kOTiles>& o, const Fragment<kMTiles, kNTiles>& p, uint32_t v_tile) const {
    constexpr int kColumns = 8 * kOTiles;
    constexpr int kKeys = 8 * kNTiles;
    const int part = warp % 2;
    const uint32_t v_columns = v_tile + VTile::offset(0, part * kColumns);
    const uint32_t v_own = v_columns + VTile::offset(part * kKeys, 0);
    const uint32_t v_other = v_columns + VTile::offset((1 - part) * kKeys, 0);
    constexpr int kMiddle = kOTiles / 4 * 2;
    uint32_t words[kSteps][kMTiles][4];  // P, 16 keys a step
    FA_UNROLL
    for (int k = 0; k < kSteps; ++k) {
      Gemm::pack_step(words[k], p, k);
      send(words[k], k);
      // Exponentials of later keys run beside these.
      if (k < kSteps - 1) add_columns<Gemm, VTile, 0, kMiddle>(o, words[k], lane, v_own + VTile::offset(16 * k, 0));
    }
    announce();
    FA_UNROLL
    for (int k = 0; k < kSteps; ++k) {  // while P is on its way
      const uint32_t v_rows = v_own + VTile::offset(16 * k, 0);
      if (k == kSteps - 1) add_columns<Gemm, VTile, 0, kMiddle>(o, words[k], lane, v_rows);
      add_columns<Gemm, VTile, kMiddle, kOTiles>(o, words[k], lane, v_rows);
    }
    wait();
    FA_UNROLL
    for (int k = 0; k < kSteps; ++k) {
      receive(words[k], k);
      add_columns<Gemm, VTile, 0, kOTiles>(o, words[k], lane, v_other + VTile::offset(16 * k, 0));
    }
  }
};

}  // namespace fa::sm80

#endif  // FA_TEMPLATES_SM80_SM80_WARP_PAIR_CUH_
