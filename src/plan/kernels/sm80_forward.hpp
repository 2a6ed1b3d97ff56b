#ifndef FA_SRC_PLAN_KERNELS_SM80_FORWARD_HPP_
#define FA_SRC_PLAN_KERNELS_SM80_FORWARD_HPP_

#include <fa/tensor.hpp>

#include "plan/arch.hpp"

namespace fa::plan {

struct Kernel;

/// How kernels number what K and V may be stored as (templates/common/stored.cuh): 0 as the queries; u4x2 by the
/// columns of a group.
constexpr int storage_of(DType dtype, int group_size) noexcept {
  return dtype == DType::e4m3 ? 1 : dtype == DType::i8 ? 2 : dtype == DType::u4x2 ? group_size : 0;
}
/// Latent rows: codes of e4m3, their scales, and columns of bf16 (templates/sm80/sm80_latent.cuh).
inline constexpr int kLatentRows = 3;
/// Whether a number of storage_of is one of 4 bits.
constexpr bool is_u4(int storage) noexcept {
  return storage >= 32;
}
constexpr bool is_8_bits(int storage) noexcept {  // and each row a scale
  return storage == 1 || storage == 2;
}
/// Bytes of a row of `columns` numbers of `element` bytes where they are not stored, and of its scales.
constexpr int stored_row_bytes(int storage, int columns, int element) noexcept {
  return is_u4(storage) ? columns / 2 : columns * (storage != 0 && storage != kLatentRows ? 1 : element);
}
constexpr int stored_scale_bytes(int storage, int columns) noexcept {
  return is_u4(storage) ? columns / storage * 4 : 4;
}

/// The first compute capability, times ten, with an instruction that converts e4m3 to f16.
inline constexpr int kHalfProductsFrom = 89;
/// Whether products are of f16: K or V has 8 bits, by numbers of storage_of.
constexpr bool has_half_products(Arch arch, int k_storage, int v_storage) noexcept {
  return arch.sm() >= kHalfProductsFrom && (is_8_bits(k_storage) || is_8_bits(v_storage));
}

/// What a spec of the mma.sync forward has besides its head. `warps_n` of the head: so many warps share their rows; 2
/// with two m tiles a warp: in pairs.
struct Sm80Forward {
  bool q_in_registers = false;
  int loop_bodies = 1;
  bool conditional_rescale = true;  ///< O is rescaled only when a row maximum grew, behind a branch
  int split_keys = 0;         ///< fixed split size: the softmax of so many keys is formed alone, in every call; 0: none
  bool scheduled = false;     ///< thread blocks take their parts of a schedule, and may share the keys of a query tile
  bool own_parts = false;     ///< likewise, without a schedule: each block finds its part by itself
  bool value_in_key = false;  ///< V is the first columns of K
  bool split_warps = false;   ///< warps share the query rows, each with keys of its own
  int k_storage = 0;          ///< what K is stored as: storage_of its dtype
  int v_storage = 0;          ///< likewise V

  /// Whether tiles in shared memory are of what K, or V, is stored as.
  bool stored() const noexcept { return (k_storage != 0 && k_storage != kLatentRows) || v_storage != 0; }

  static const Kernel& kernel() noexcept;
  friend bool operator==(const Sm80Forward&, const Sm80Forward&) = default;
};

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_KERNELS_SM80_FORWARD_HPP_
