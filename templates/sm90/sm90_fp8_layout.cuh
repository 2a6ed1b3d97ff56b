#ifndef FA_TEMPLATES_SM90_SM90_FP8_LAYOUT_CUH_
#define FA_TEMPLATES_SM90_SM90_FP8_LAYOUT_CUH_

#include <ptx/host_device.cuh>
#include <sm90/sm90_sizes.cuh>

// Where things lie in the shared memory of the Hopper forward of 8-bit floats. Host and kernel read this.

namespace fa::sm90 {

/// What of a kernel decides it.
struct Fp8Shape {
  int tile_m, tile_n;
  int d_qk, d_v;
  int stages;  // K tiles in flight, V tiles as they land, and transposed ones
  int q_buffers;
  bool precise;                // V becomes f16 in the order of memory, in place of being transposed
  bool shared_scales = false;  // of keys: each consumer warp has a place for those of a KV tile

  FA_HOST_DEVICE constexpr int consumers() const { return tile_m / kWarpgroupRows; }
  FA_HOST_DEVICE constexpr int threads() const { return (consumers() + 1) * kWarpgroup; }
  /// Full and empty of each buffer.
  FA_HOST_DEVICE constexpr int mbarriers() const { return 6 * stages + 2 * q_buffers; }
  /// Work descriptors: that of a query tile is read until its O is stored, when its Q may hold another one.
  FA_HOST_DEVICE constexpr int works() const { return q_buffers + 1; }
};

/// Offsets from the start of shared memory, and sizes in bytes.
struct Fp8Layout {
  int q_bytes, k_bytes, v_bytes, landed_bytes;  // of a buffer
  int k, v, landed;                             // Q is first; v: as products read it, landed: as it comes
  int mbarriers;
  int work;
  int work_bytes;
  int listed;  // of each buffer of V: whether there is a tile
  int scales;  // of each consumer warp
  int bytes;
};

/// Bytes of [rows, columns] of 8-bit elements in slabs of 128 columns.
FA_HOST_DEVICE constexpr int fp8_tile_bytes(int rows, int columns) {
  return tile_bytes(rows, (columns + 1) / 2);
}

FA_HOST_DEVICE constexpr Fp8Layout fp8_layout(const Fp8Shape& shape) {
  constexpr int kWorkSpace = 64;
  Fp8Layout at = {};
  at.q_bytes = fp8_tile_bytes(shape.tile_m, shape.d_qk);
  at.k_bytes = fp8_tile_bytes(shape.tile_n, shape.d_qk);
  at.v_bytes = shape.precise ? tile_bytes(shape.tile_n, shape.d_v) : fp8_tile_bytes(shape.d_v, shape.tile_n);
  at.landed_bytes = fp8_tile_bytes(shape.tile_n, shape.d_v);
  at.k = shape.q_buffers * at.q_bytes;
  at.v = at.k + shape.stages * at.k_bytes;
  at.landed = at.v + shape.stages * at.v_bytes;
  at.mbarriers = at.landed + shape.stages * at.landed_bytes;
  at.work = at.mbarriers + (kMbarrierBytes * shape.mbarriers() + 15) / 16 * 16;
  at.work_bytes = kWorkSpace;
  at.listed = at.work + shape.works() * kWorkSpace;
  at.scales = at.listed + (4 * shape.stages + 15) / 16 * 16;
  at.bytes = at.scales + (shape.shared_scales ? 4 * shape.consumers() * 4 * shape.tile_n : 0);
  return at;
}

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_FP8_LAYOUT_CUH_
