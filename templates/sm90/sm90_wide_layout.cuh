#ifndef FA_TEMPLATES_SM90_SM90_WIDE_LAYOUT_CUH_
#define FA_TEMPLATES_SM90_SM90_WIDE_LAYOUT_CUH_

#include <ptx/host_device.cuh>
#include <sm90/sm90_sizes.cuh>

// Where things lie in the shared memory of the Hopper forward for wide heads. Host and kernel read this.

namespace fa::sm90 {

/// What of a kernel decides it.
struct WideShape {
  int tile_n;
  int d_qk, d_v;
  int stages;         // K tiles in flight, and V tiles
  bool value_in_key;  // V is the first columns of K

  /// Of 64 columns. V has two halves of as many slabs, one for each consumer.
  FA_HOST_DEVICE constexpr int k_slabs() const { return (d_qk + kSlabColumns - 1) / kSlabColumns; }
  FA_HOST_DEVICE constexpr int half_slabs() const { return (d_v + 2 * kSlabColumns - 1) / (2 * kSlabColumns); }

  FA_HOST_DEVICE constexpr int threads() const { return 3 * kWarpgroup; }

  /// Parts of a stage that are loaded, and released, each by itself.
  FA_HOST_DEVICE constexpr int units() const { return value_in_key ? 1 + 2 * output_parts() : 4; }
  /// Of a half of V in K: parts that are multiplied, and released, one after the other.
  FA_HOST_DEVICE constexpr int output_parts() const { return value_in_key && half_slabs() % 2 == 0 ? 2 : 1; }
  /// Barriers that say what of a KV tile has landed: one a slab of K, one a half of V. There are two sets of them, for
  /// every second tile each, whatever buffers these have: who waits for one has seen all that was there before.
  FA_HOST_DEVICE constexpr int landed() const { return k_slabs() + (value_in_key ? 0 : 2); }
};

/// Offsets from the start of shared memory, and sizes in bytes.
struct WideLayout {
  int q_bytes, k_bytes, v_bytes;  // of a buffer; v_bytes: 0 where V is in K
  int k, v;                       // Q is first
  int exchange;                   // P and the row statistics of a KV tile, from consumer to consumer
  int mbarriers;
  int work;  // descriptors, two
  int work_bytes;
  int arrived;  // how many blocks have left a partial result before
  int bytes;
};

FA_HOST_DEVICE constexpr WideLayout wide_layout(const WideShape& shape) {
  constexpr int kWorkSpace = 80, kWorks = 2, kHeard = 8, kOfQ = 2;
  WideLayout at = {};
  at.q_bytes = tile_bytes(kWarpgroupRows, shape.d_qk);
  at.k_bytes = tile_bytes(shape.tile_n, shape.d_qk);
  at.v_bytes = shape.value_in_key ? 0 : 2 * shape.half_slabs() * kSlabRowBytes * shape.tile_n;
  at.k = at.q_bytes;
  at.v = at.k + shape.stages * at.k_bytes;
  at.exchange = at.v + shape.stages * at.v_bytes;
  // Of a thread: P, tile_n / 4 words, and four numbers.
  at.mbarriers = at.exchange + kWarpgroup * (shape.tile_n + 16);
  at.work = at.mbarriers + kMbarrierBytes * (2 * shape.landed() + shape.stages * shape.units() + kHeard + kOfQ);
  at.work = (at.work + 15) / 16 * 16;
  at.work_bytes = kWorkSpace;
  at.arrived = at.work + kWorks * kWorkSpace;
  at.bytes = at.arrived + 16;
  return at;
}

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_WIDE_LAYOUT_CUH_
