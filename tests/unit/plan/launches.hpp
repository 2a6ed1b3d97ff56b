#ifndef FA_TESTS_UNIT_PLAN_LAUNCHES_HPP_
#define FA_TESTS_UNIT_PLAN_LAUNCHES_HPP_

#include <cstddef>
#include <cstdint>

#include "plan/backward_launch.hpp"
#include "plan/call_plan.hpp"
#include "plan/forward_launch.hpp"

namespace fa::plan {

/// What the attention kernel of a forward is launched with.
struct ForwardLaunch : ForwardGrid {
  kernel::ForwardVariantParams params;
};

inline ForwardLaunch forward_launch(const Problem& problem, const ForwardTensors& tensors, double scale, int splits,
                                    const KernelSpec& spec, int multiprocessors, const PackedArgs& packed = {}) {
  ForwardLaunch launch;
  static_cast<ForwardGrid&>(launch) =
      forward_params(problem, tensors, scale, splits, spec, multiprocessors, packed, launch.params);
  return launch;
}

/// What the kernels of a backward are launched with, by the plan of a call whose workspace is somewhere.
struct BackwardLaunch {
  kernel::BackwardVariantParams params;
  kernel::BackwardVariantParams dq_params;
  BackwardGrids grids;
};

inline BackwardLaunch backward_launch(const Problem& problem, const BackwardTensors& tensors, double scale,
                                      const BackwardChoice& choice, const KernelSet& kernels, int multiprocessors) {
  alignas(256) static std::byte memory[256];
  CallPlan call;
  plan_call(problem, choice, kernels, tensors, {scale, multiprocessors, false, {}}, call);
  call.bind(call.workspace.addresses(memory, memory));
  const auto grid = [&call](Role role) { return call.step(role) == nullptr ? 0 : call.step(role)->grid; };
  BackwardLaunch launch{call.backward_params.attention.base, {}, {}};
  if (!call.workspace.has(Section::dq_accum)) launch.dq_params = call.backward_params.dq;
  launch.grids = {grid(Role::statistics), grid(Role::attention), grid(Role::reduce),
                  grid(Role::dq),         grid(Role::convert),   grid(Role::sink)};
  return launch;
}

}  // namespace fa::plan

#endif  // FA_TESTS_UNIT_PLAN_LAUNCHES_HPP_
