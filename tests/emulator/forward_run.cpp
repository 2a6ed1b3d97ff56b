#include "emulator/forward_run.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <ostream>
#include <random>
#include <vector>

#include "emulator/placement.hpp"
#include "emulator/plan_run.hpp"
#include "emulator/specs.hpp"
#include "emulator/variant_run.hpp"
#include "plan/call_plan.hpp"
#include "plan/catalogue.hpp"
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
  problem.accumulate = c.spec.accumulate;
  problem.o_dtype = a.o_dtype;
  problem.bounded = c.spec.bounded;
  return problem;
}

void place_scales(const ForwardCase& c, const AttentionInputs& inputs, Memory& memory,
                  fa::plan::ForwardTensors& tensors) {
  const auto place = [&](const char* name, const HostTensor& scale, TensorView view) {
    view.data = place_input(memory, name, scale, Placement::bhsd, true).data;
    return view;
  };
  if (inputs.q_scale.bytes().empty()) return;
  const AttentionCase& a = c.attention;
  tensors.q_scale = place("q_scale", inputs.q_scale, inputs.q_scale.view());
  if (!inputs.row_bias.bytes().empty()) tensors.row_bias = place("row_bias", inputs.row_bias, inputs.row_bias.view());
  tensors.k_scale = place("k_scale", inputs.k_scale, fa::test::scale_of_heads(inputs.k_scale, a.s_kv));
  tensors.v_scale = place("v_scale", inputs.v_scale, fa::test::scale_of_heads(inputs.v_scale, a.s_kv));
}

}  // namespace

void PrintTo(const ForwardCase& c, std::ostream* out) {
  constexpr std::array kNames{"bhsd", "bshd", "padded", "broadcast", "gaps"};
  *out << canonical(c.spec) << ", ";
  fa::test::PrintTo(c.attention, out);
  *out << ", " << kNames[static_cast<std::size_t>(c.placement)] << (c.lse ? "" : ", no lse") << ", " << c.splits
       << " splits, " << c.heads_in_flight << " heads in flight";
  if (c.spec.kernel().persistent) *out << ", " << c.blocks << " blocks";
}

AttentionInputs make_inputs(const ForwardCase& c) {
  AttentionInputs inputs = fa::test::make_inputs(c.attention);
  if (c.placement != Placement::broadcast) return inputs;
  make_broadcast(inputs.k);
  make_broadcast(inputs.v);
  return inputs;
}

AttentionOutputs make_state(const ForwardCase& c) {
  AttentionOutputs state = fa::test::make_outputs(c.attention);
  std::mt19937 random(7);
  const AttentionCase& a = c.attention;
  for_each_row(a.b, a.h_q, a.s_q, [&](std::int64_t b, std::int64_t h, std::int64_t s) {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    constexpr std::array kLevels{2.0, 5.0, 3.0, -kInfinity, kInfinity, 150.0, -150.0};
    const double lse = kLevels[random() % kLevels.size()];
    state.lse.set(b, h, s, 0, lse + (std::isinf(lse) ? 0.0 : static_cast<double>(random() % 64) / 32.0));
    for (std::int64_t d = 0; d < a.d_v; ++d) {
      const double value = static_cast<double>(random() % 256) / 64.0 - 2.0;
      state.o.set(b, h, s, d, std::isinf(lse) && d % 2 == 0 ? std::nan("") : value);
    }
  });
  return state;
}

AttentionOutputs joined(const AttentionOutputs& keys, const AttentionOutputs& state) {
  AttentionOutputs both = keys;
  const TensorView o = both.o.view();
  for_each_row(o.shape[0], o.shape[1], o.shape[2], [&](std::int64_t b, std::int64_t h, std::int64_t s) {
    const double old = state.lse.at(b, h, s), own = keys.lse.at(b, h, s);
    if (std::isinf(old)) return;
    const double base = std::max(old, own);
    const double old_weight = std::exp(old - base), own_weight = std::exp(own - base), sum = old_weight + own_weight;
    both.lse.set(b, h, s, 0, base + std::log(sum));
    for (std::int64_t d = 0; d < o.shape[3]; ++d) {
      both.o.set(b, h, s, d, (own_weight * keys.o.at(b, h, s, d) + old_weight * state.o.at(b, h, s, d)) / sum);
    }
  });
  return both;
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
  const bool adds = c.state != nullptr;
  const Placed o = adds ? place_state(memory, "o", c.state->o, q_placement, aligned)
                        : place_output(memory, "o", outputs.o, q_placement, aligned);
  const Placed lse = adds ? place_state(memory, "lse", c.state->lse, q_placement, aligned)
                          : place_output(memory, "lse", outputs.lse, q_placement, aligned);
  fa::plan::ForwardTensors tensors;
  tensors.q = view_of(place_input(memory, "q", inputs.q, q_placement, aligned), inputs.q);
  tensors.k = view_of(place_input(memory, "k", inputs.k, c.placement, aligned), inputs.k);
  tensors.v = view_of(place_input(memory, "v", inputs.v, c.placement, aligned), inputs.v);
  tensors.o = view_of(o, outputs.o);
  if (c.lse) tensors.lse = view_of(lse, outputs.lse);
  place_scales(c, inputs, memory, tensors);
  std::optional<PlacedVariant> variant;
  if (c.variant != nullptr) tensors.variant = variant.emplace(memory, *c.variant, false).tensors();

  fa::plan::Problem problem = problem_of(c);
  if (c.spec.place_in_memory) put_place_in_memory(memory, c.place_words, problem);
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
                                .splits = c.splits,
                                .split_blocks = c.spec.cluster()};
  fa::plan::PackedArgs packed;
  if (c.spec.dropout) packed.dropout = fa::plan::dropout_params(0.5);
  const std::vector<std::byte> zeros(2 * sizeof(std::uint64_t));
  if (c.state_in_memory) {
    packed.dropout.state = reinterpret_cast<const std::uint64_t*>(memory.add_input("dropout", zeros));
  }
  fa::plan::CallPlan call;
  plan_call(problem, choice, plan_kernels.specs, tensors,
            {static_cast<double>(c.attention.softmax_scale()), std::max(c.blocks, 1), false, packed}, call);
  // What is of the GPU, as the case has it: more blocks than tiles, too.
  call.forward_params.attention.base.heads_in_flight = c.heads_in_flight;
  const bool waves = fa::plan::needs_tile_lists(problem) && !c.spec.bounded;
  if (c.spec.kernel().persistent && c.spec.cluster() == 1 && !waves) call.step(Role::attention)->grid = c.blocks;
  run_plan(call, plan_kernels, memory, seed);
  fetch(memory, o, outputs.o);
  if (c.lse) fetch(memory, lse, outputs.lse);
  return outputs;
}

}  // namespace emulator
