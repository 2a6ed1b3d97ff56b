#ifndef FA_SRC_PLAN_KERNELS_SM80_BACKWARD_HPP_
#define FA_SRC_PLAN_KERNELS_SM80_BACKWARD_HPP_

namespace fa::plan {

struct Kernel;

/// What a spec of the mma.sync backward has besides its head. `warps_n` of the head: groups of keys in the grid of
/// warps.
struct Sm80Backward {
  int dq_warps_m = 0;             ///< groups of queries in the grid of warps, for dQ
  int substeps = 1;               ///< parts in which a warp takes its queries of a step
  int operands_in_registers = 0;  ///< 1: V, 2: V and K stay in registers
  bool delayed_dq = false;        ///< adds a step's dQ during the next step

  static const Kernel& kernel() noexcept;
  friend bool operator==(const Sm80Backward&, const Sm80Backward&) = default;
};

/// dQ alone, in a fixed order.
struct Sm80BackwardDq {
  static const Kernel& kernel() noexcept;
  friend bool operator==(const Sm80BackwardDq&, const Sm80BackwardDq&) = default;
};

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_KERNELS_SM80_BACKWARD_HPP_
