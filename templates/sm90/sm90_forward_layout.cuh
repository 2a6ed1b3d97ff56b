#ifndef FA_TEMPLATES_SM90_SM90_FORWARD_LAYOUT_CUH_
#define FA_TEMPLATES_SM90_SM90_FORWARD_LAYOUT_CUH_

#include <ptx/host_device.cuh>
#include <sm90/sm90_sizes.cuh>

// Where things lie in the shared memory of a Hopper forward, and which warps it has. Host and kernels read this.

namespace fa::sm90 {

/// What of a forward kernel decides both.
struct ForwardShape {
  int tile_m, tile_n;
  int d_qk, d_v;
  int stages, q_buffers;
  bool pack_gqa, split, varlen, dropout, affine_product;
  bool dynamic;      // query tiles come from a counter
  bool windowed;     // keys are hidden before others too
  bool masked;       // by a mask function
  bool scheduled;    // blocks take pieces of query tiles
  bool paired;       // two blocks of a cluster have a half of them each
  bool folds;        // a block folds splits of a fixed size, whose softmax is formed alone
  bool clears;       // rows of V behind the last key are cleared when they have landed
  bool whole_tiles;  // a block folds splits of few rows in shared memory

  FA_HOST_DEVICE constexpr int consumers() const { return tile_m / kWarpgroupRows; }

  /// Whether KV tiles are listed: those that are not empty.
  FA_HOST_DEVICE constexpr bool lists() const { return masked && !varlen; }

  /// Whether query tiles that no key is visible to are common, or costly to find: a warp of the producers looks for
  /// them.
  FA_HOST_DEVICE constexpr bool has_empty_warp() const { return varlen || windowed || lists(); }

  /// Whether O leaves through the place of its own Q, by the copy engine, while the next query tile is under way. Else,
  /// and where 16 rows of the tile are not 16 rows of a head, it leaves straight from registers.
  FA_HOST_DEVICE constexpr bool stages_o() const { return q_buffers == 2 && !pack_gqa && !split && !scheduled; }

  /// Whether the dropout RNG warps are a warpgroup of their own. Else its launch leaves too few registers for the
  /// product: they are those of the producers that have nothing to do, with half of the random bits for a product.
  FA_HOST_DEVICE constexpr bool has_dropout_warpgroup() const { return dropout && d_v <= 128; }
  FA_HOST_DEVICE constexpr int dropout_warps() const { return has_dropout_warpgroup() ? 4 : has_empty_warp() ? 1 : 2; }

  FA_HOST_DEVICE constexpr int threads() const {
    return (consumers() + (has_dropout_warpgroup() ? 2 : 1)) * kWarpgroup;
  }

  /// Full and empty of each buffer. With a counter work descriptors have another reader, which need not wait for Q.
  FA_HOST_DEVICE constexpr int mbarriers() const {
    return 4 * stages + (dynamic ? 3 : 2) * q_buffers + (clears ? 1 : 0);
  }

  /// Whether what all random bits of a row have in common is kept, and what all of a column of a KV tile have.
  FA_HOST_DEVICE constexpr bool keeps_row_bits() const { return dropout && !pack_gqa; }
};

/// What a block leaves for its cluster of a query tile of 64 rows: O in float, and 16 bytes of sums a row.
FA_HOST_DEVICE constexpr int cluster_part_bytes(int d_v) {
  return kWarpgroupRows * (d_v * 4 + 16);
}

/// Rows of a query tile whose splits a block may fold: those of its first warp.
inline constexpr int kFoldedRows = 16;

/// So much of a multiprocessor's shared memory that one block fits, not two.
inline constexpr int kMoreThanHalf = 116736;

inline constexpr int kMaskBuffers = 3;  // keep-masks of KV tiles in flight

/// Offsets from the start of shared memory, and sizes in bytes.
struct SharedLayout {
  int q_bytes, k_bytes, v_bytes;  // of a buffer; O leaves through one of Q
  int k, v;                       // Q is first
  int mbarriers;
  int work;  // descriptors, one a Q buffer
  int work_bytes;
  int listed;  // with tile lists: the KV tile of each K buffer
  int seed;    // of dropout
  int mask_mbarriers;
  int masks;
  int mask_bytes;   // [tile_m / 16, 32 lanes]
  int key_numbers;  // of a tile, an operand of the product S
  int row_bits;     // [tile_m / 32, 32 lanes]
  int column_bits;  // [tile_n / 4] of each dropout RNG warp
  int column_bits_bytes;
  int split_sums;  // [2, tile_m] of 16 bytes: of a split in the making, and of those that are folded
  int folded;      // with whole_tiles: O and sums of the splits so far, by the 32 lanes of a warp
  int bytes;
};

FA_HOST_DEVICE constexpr SharedLayout shared_layout(const ForwardShape& shape) {
  constexpr int kLanes = 32;
  constexpr int kWorkSpace = 64, kListedSpace = 32, kSeedSpace = 48, kBitsSpace = 16, kKeySpace = 32, kSumSpace = 16;
  SharedLayout at = {};
  at.q_bytes = tile_bytes(shape.tile_m, shape.stages_o() ? greater(shape.d_qk, shape.d_v) : shape.d_qk);
  at.k_bytes = tile_bytes(shape.tile_n, shape.d_qk);
  at.v_bytes = tile_bytes(shape.tile_n, shape.d_v);
  at.k = shape.q_buffers * at.q_bytes;
  at.v = at.k + shape.stages * at.k_bytes;
  at.mbarriers = at.v + shape.stages * at.v_bytes;
  at.work = at.mbarriers + greater(256, (kMbarrierBytes * shape.mbarriers() + 15) / 16 * 16);
  at.work_bytes = shape.varlen ? kWorkSpace : shape.windowed || shape.lists() ? 48 : 32;
  at.listed = at.work + 2 * kWorkSpace;
  at.seed = at.listed + kListedSpace;
  at.mask_mbarriers = at.seed + kSeedSpace;
  at.masks = at.mask_mbarriers + 2 * kMbarrierBytes * kMaskBuffers;
  at.mask_bytes = shape.tile_m / 16 * kLanes * 8 * ((shape.tile_n + 127) / 128);
  at.key_numbers = shape.dropout ? at.masks + kMaskBuffers * at.mask_bytes : at.mbarriers + 1024;
  at.row_bits = at.key_numbers + (shape.affine_product ? kKeySpace * shape.tile_n : 0);
  at.column_bits = at.row_bits + (shape.keeps_row_bits() ? kBitsSpace * shape.tile_m : 0);
  at.column_bits_bytes = kBitsSpace * (shape.tile_n / 4);
  at.split_sums = at.column_bits + (shape.keeps_row_bits() ? shape.dropout_warps() * at.column_bits_bytes : 0);
  at.folded = at.split_sums + (shape.folds ? 2 * kSumSpace * shape.tile_m : 0);
  at.bytes = at.folded + (shape.whole_tiles ? (shape.d_v / 8 + 2) * 512 : 0);
  // A pair would go to one multiprocessor, and another have none. Larger clusters alone find few places.
  if (shape.paired) at.bytes = greater(at.bytes, kMoreThanHalf);
  return at;
}

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_FORWARD_LAYOUT_CUH_
