#include "emulator/forward_run.hpp"

#include <algorithm>
#include <array>
#include <optional>
#include <ostream>

#include "emulator/placement.hpp"
#include "emulator/plan_run.hpp"
#include "emulator/specs.hpp"
#include "emulator/variant_run.hpp"
#include "plan/call_plan.hpp"
#include "plan/mask_tiles.hpp"

namespace emulator {
namespace {

using fa::DType;
using fa::TensorView;
using fa::plan::Role;
using fa::test::AttentionCase;
using fa::test::AttentionInputs;
using fa::test::AttentionOutputs;
using fa::test::HostTensor;

fa::plan::Problem problem_of(const ForwardCase& c) {
  const AttentionCase& a = c.attention;
  fa::plan::Problem problem;
  problem.dtype = a.dtype;
  problem.d_qk = static_cast<int>(a.d_qk);
  problem.d_v = static_cast<int>(a.d_v);
  problem.causal = c.spec.causal;
  problem.causal_align = a.causal_align;
  problem.aligned = c.spec.aligned;
  problem.b = a.b;
  problem.h_q = a.h_q;
  problem.h_kv = a.h_kv;
  problem.s_q = a.s_q;
  problem.s_kv = a.s_kv;
  problem.arch = c.spec.arch;
  if (c.variant != nullptr) add_variant(problem, *c.variant);
  problem.dropout = c.spec.dropout;
  return problem;
}

TensorView view_of(const Placed& t, const HostTensor& tensor) {
  TensorView view = tensor.view();
  view.data = t.data;
  view.strides = {t.stride_b, t.stride_h, t.stride_s, 1};
  return view;
}

}  // namespace

void PrintTo(const ForwardCase& c, std::ostream* out) {
  constexpr std::array kNames{"bhsd", "bshd", "padded", "broadcast", "gaps"};
  *out << canonical(c.spec) << ", ";
  fa::test::PrintTo(c.attention, out);
  *out << ", " << kNames[static_cast<std::size_t>(c.placement)] << (c.lse ? "" : ", no lse") << ", " << c.splits
       << " splits, " << c.heads_in_flight << " heads in flight";
  if (c.spec.family() == fa::plan::Family::sm90) *out << ", " << c.blocks << " blocks";
}

AttentionInputs make_inputs(const ForwardCase& c) {
  AttentionInputs inputs = fa::test::make_inputs(c.attention);
  if (c.placement != Placement::broadcast) return inputs;
  make_broadcast(inputs.k);
  make_broadcast(inputs.v);
  return inputs;
}

ForwardKernels kernels_of(const ForwardCase& c) {
  return {canonical(c.spec), canonical(combine_spec(c.spec))};
}

AttentionOutputs run_forward(const ForwardCase& c, const AttentionInputs& inputs, const ForwardKernels& kernels,
                             std::uint64_t seed) {
  const bool aligned = c.spec.aligned;
  const Placement q_placement = c.placement == Placement::broadcast ? Placement::bhsd : c.placement;
  AttentionOutputs outputs = fa::test::make_outputs(c.attention);
  Memory memory;
  const Placed o = place_output(memory, "o", outputs.o, q_placement, aligned);
  const Placed lse = place_output(memory, "lse", outputs.lse, q_placement, aligned);
  fa::plan::ForwardTensors tensors;
  tensors.q = view_of(place_input(memory, "q", inputs.q, q_placement, aligned), inputs.q);
  tensors.k = view_of(place_input(memory, "k", inputs.k, c.placement, aligned), inputs.k);
  tensors.v = view_of(place_input(memory, "v", inputs.v, c.placement, aligned), inputs.v);
  tensors.o = view_of(o, outputs.o);
  if (c.lse) tensors.lse = view_of(lse, outputs.lse);
  std::optional<PlacedVariant> variant;
  if (c.variant != nullptr) tensors.variant = variant.emplace(memory, *c.variant, false).tensors();

  const fa::plan::Problem problem = problem_of(c);
  PlanKernels plan_kernels;
  plan_kernels.specs[Role::attention] = c.spec;
  plan_kernels.specs[Role::combine] = combine_spec(c.spec);
  plan_kernels.names[Role::attention] = kernels.attention;
  plan_kernels.names[Role::combine] = kernels.combine;
  add_companions(problem, plan_kernels);
  const fa::plan::Choice choice{.pack_gqa = c.spec.pack_gqa,
                                .dynamic = c.spec.dynamic(),
                                .affine_reach = c.spec.affine_reach(),
                                .family = c.spec.family(),
                                .splits = c.splits};
  fa::plan::PackedArgs packed;
  if (c.spec.dropout) packed.dropout = fa::plan::dropout_params(0.5);
  fa::plan::CallPlan call;
  plan_call(problem, choice, plan_kernels.specs, tensors,
            {static_cast<double>(c.attention.softmax_scale()), std::max(c.blocks, 1), false, packed}, call);
  // What is of the GPU, as the case has it: more blocks than tiles, too.
  call.forward_params.attention.base.heads_in_flight = c.heads_in_flight;
  const bool waves = fa::plan::needs_tile_lists(problem);
  if (c.spec.family() == fa::plan::Family::sm90 && !waves) call.step(Role::attention)->grid = c.blocks;
  run_plan(call, plan_kernels, memory, seed);
  fetch(memory, o, outputs.o);
  if (c.lse) fetch(memory, lse, outputs.lse);
  return outputs;
}

}  // namespace emulator
