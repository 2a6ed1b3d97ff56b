#ifndef FA_SRC_PLAN_KERNELS_MERGE_STATES_HPP_
#define FA_SRC_PLAN_KERNELS_MERGE_STATES_HPP_

namespace fa::plan {

struct Kernel;

/// Partial results over different keys into one.
struct MergeStates {
  int states = 0;             ///< what o of the states is made of: 0: the dtype, 1: f32, 2: either
  bool float_result = false;  ///< f32, whatever the dtype
  bool sum = false;           ///< without weights

  static const Kernel& kernel() noexcept;
  friend bool operator==(const MergeStates&, const MergeStates&) = default;
};

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_KERNELS_MERGE_STATES_HPP_
