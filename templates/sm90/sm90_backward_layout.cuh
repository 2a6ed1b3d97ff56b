#ifndef FA_TEMPLATES_SM90_SM90_BACKWARD_LAYOUT_CUH_
#define FA_TEMPLATES_SM90_SM90_BACKWARD_LAYOUT_CUH_

#include <ptx/host_device.cuh>
#include <sm90/sm90_sizes.cuh>

// Where things lie in the shared memory of a Hopper backward. Host and kernels read this.

namespace fa::sm90 {

/// What of a backward kernel decides that.
struct BackwardShape {
  int tile_m, tile_n;
  int d_qk, d_v;
  int stages;
  bool write_dq, varlen;

  FA_HOST_DEVICE constexpr int consumers() const { return tile_n / kWarpgroupRows; }
  FA_HOST_DEVICE constexpr int threads() const { return (consumers() + 1) * kWarpgroup; }

  /// How the warpgroups share dQ: 64 rows each, or 64 columns each.
  FA_HOST_DEVICE constexpr bool dq_by_rows() const { return tile_m == kWarpgroupRows * consumers(); }
  FA_HOST_DEVICE constexpr int dq_columns() const { return dq_by_rows() ? d_qk : kSlabColumns; }  // of a warpgroup

  FA_HOST_DEVICE constexpr int mbarriers() const { return 4 + 3 * stages + (write_dq ? 3 : 0); }
};

/// Offsets from the start of shared memory, and sizes in bytes.
struct BackwardSharedLayout {
  int v;  // K is first
  int q, dout;
  int ds;  // two buffers: of this step and of the one before
  int dq;  // [tile_m / 16, d_qk / 4, 16, 4] in float
  int lse, delta;
  int stats_bytes;  // of a buffer of either
  int mbarriers;
  int work;  // of a packed batch: two descriptors and their barriers
  int work_bytes;
  int words;  // of dQ: one of each consumer warp, and a last one for the warp that looks at it
  int bytes;
};

FA_HOST_DEVICE constexpr BackwardSharedLayout shared_layout(const BackwardShape& shape) {
  constexpr int kFloat = 4, kBarrierSpace = 128;
  BackwardSharedLayout at = {};
  at.stats_bytes = shape.tile_m * kFloat;
  at.v = tile_bytes(shape.tile_n, shape.d_qk);
  at.q = at.v + tile_bytes(shape.tile_n, shape.d_v);
  at.dout = at.q + shape.stages * tile_bytes(shape.tile_m, shape.d_qk);
  at.ds = at.dout + shape.stages * tile_bytes(shape.tile_m, shape.d_v);
  at.dq = at.ds + (shape.write_dq ? 2 * tile_bytes(shape.tile_m, shape.tile_n) : 0);
  at.lse = at.dq + (shape.write_dq ? shape.tile_m * shape.d_qk * kFloat : 0);
  at.delta = at.lse + shape.stages * at.stats_bytes;
  at.mbarriers = at.delta + shape.stages * at.stats_bytes;
  at.work = at.mbarriers + kBarrierSpace;
  at.work_bytes = 64;
  at.words = at.work + (shape.varlen ? 2 * at.work_bytes + 64 : 0);
  at.bytes = at.words + (shape.write_dq ? 64 : 0);
  return at;
}

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_BACKWARD_LAYOUT_CUH_
