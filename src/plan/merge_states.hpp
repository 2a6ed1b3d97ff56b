#ifndef FA_SRC_PLAN_MERGE_STATES_HPP_
#define FA_SRC_PLAN_MERGE_STATES_HPP_

#include <cstdint>
#include <span>

#include <common/merge_states_params.cuh>
#include <fa/merge.hpp>

#include "plan/call_plan.hpp"
#include "plan/kernel_spec.hpp"

namespace fa::plan {

/// Every fact that picks the kernel of a merge.
struct MergeProblem {
  Arch arch = {};
  DType dtype = DType::bf16;
  int d_v = 0;
  int states = 0;             ///< as MergeStates::states
  bool float_result = false;  ///< and the dtype is another
  bool aligned = true;        ///< rows of o of all states and of the result start at multiples of 16 bytes
  bool sum = false;           ///< without weights: there are no logarithms
};

/// The tensors of a merge, o as views of rank 4 [b, h_q, s_q, d_v], lse of rank 3.
struct MergeTensors {
  std::span<const AttentionState> states;  ///< stacked: the first
  std::int64_t stacked = 0;                ///< how many lie at the distances below; 0: the states are listed
  std::int64_t stride_o = 0;               ///< in elements
  std::int64_t stride_lse = 0;
  AttentionState merged = {};  ///< lse may be undefined
  TensorView sink = {};        ///< [h_q], may be undefined
};

/// The kernels that serve it, in order of preference: with more blocks a multiprocessor, and with fewer.
Alternatives merge_specs(const MergeProblem& problem);

/// Plans a call into an empty plan, in which it is the one step. The tensors have passed checks (api::check_merge), and
/// have rows. Throws fa::Error(invalid_argument) for more rows than are counted in 31 bits.
void plan_call(const MergeProblem& problem, const KernelSpec& kernel, const MergeTensors& tensors, CallPlan& call);

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_MERGE_STATES_HPP_
