#include "emulator/backward_run.hpp"

#include <array>
#include <optional>
#include <ostream>
#include <utility>

#include "emulator/specs.hpp"
#include "emulator/variant_run.hpp"
#include "plan/call_plan.hpp"

namespace emulator {
namespace {

using fa::DType;
using fa::TensorView;
using fa::plan::KernelSpec;
using fa::test::AttentionCase;
using fa::test::AttentionGradients;
using fa::test::AttentionOutputs;
using fa::test::HostTensor;

fa::plan::Problem problem_of(const BackwardCase& c) {
  const AttentionCase& a = c.attention;
  fa::plan::Problem problem;
  problem.arch = c.specs.main.arch;
  problem.dtype = a.dtype;
  problem.d_qk = static_cast<int>(a.d_qk);
  problem.d_v = static_cast<int>(a.d_v);
  problem.causal = a.causal;
  problem.causal_align = a.causal_align;
  problem.aligned = c.specs.main.aligned;
  problem.b = a.b;
  problem.h_q = a.h_q;
  problem.h_kv = a.h_kv;
  problem.s_q = a.s_q;
  problem.s_kv = a.s_kv;
  problem.gradients = c.specs.gradients();
  if (c.variant != nullptr) add_variant(problem, *c.variant);
  problem.dropout = c.specs.main.dropout;
  problem.bounded = c.bounded;
  return problem;
}

/// Values of one tensor in the dtype of another.
void copy_values(const HostTensor& from, HostTensor& to) {
  const TensorView view = from.view();
  for_each_row(view.shape[0], view.shape[1], view.shape[2], [&](std::int64_t b, std::int64_t h, std::int64_t s) {
    const std::int64_t d = view.rank == 4 ? view.shape[3] : 1;
    for (std::int64_t i = 0; i < d; ++i) to.set(b, h, s, i, from.at(b, h, s, i));
  });
}

}  // namespace

void PrintTo(const BackwardCase& c, std::ostream* out) {
  constexpr std::array kNames{"bhsd", "bshd", "padded", "broadcast", "gaps"};
  *out << canonical(c.specs.main) << ", ";
  if (c.specs.passes_for_dq()) *out << canonical(c.specs.dq) << ", ";
  fa::test::PrintTo(c.attention, out);
  *out << ", " << kNames[static_cast<std::size_t>(c.placement)] << (c.dlse ? ", dlse" : "") << ", " << c.splits
       << " splits";
  if (c.specs.main.family() == fa::plan::Family::sm90) *out << ", " << c.blocks << " blocks";
}

BackwardData make_backward_data(const BackwardCase& c) {
  return make_backward_data(c, fa::test::make_inputs(c.attention));
}

BackwardData make_backward_data(const BackwardCase& c, fa::test::AttentionInputs inputs) {
  BackwardData data{std::move(inputs), fa::test::make_outputs(c.attention), fa::test::make_dout(c.attention),
                    fa::test::make_dlse(c.attention)};
  if (c.placement == Placement::broadcast) {
    for (HostTensor* tensor : {&data.inputs.k, &data.inputs.v, &data.dout}) make_broadcast(*tensor);
  }
  const AttentionOutputs exact = c.variant != nullptr ? fa::test::reference_f64(*c.variant, data.inputs)
                                                      : fa::test::reference_f64(c.attention, data.inputs);
  copy_values(exact.o, data.outputs.o);
  copy_values(exact.lse, data.outputs.lse);
  return data;
}

BackwardKernelNames kernels_of(const BackwardCase& c) {
  const KernelSpec& main = c.specs.main;
  using fa::plan::Op;
  return {canonical(backward_helper_spec(main, Op::backward_preprocess)), canonical(main),
          canonical(backward_helper_spec(main, Op::backward_reduce)),     canonical(c.specs.dq),
          canonical(backward_helper_spec(main, Op::backward_convert)),    canonical(backward_sink_spec(main))};
}

PlanKernels plan_kernels(const BackwardSpecs& specs, const fa::plan::Problem& problem,
                         const BackwardKernelNames& names) {
  using fa::plan::Op;
  using fa::plan::Role;
  PlanKernels kernels;
  const auto add = [&kernels](Role role, const KernelSpec& spec, const std::string& name) {
    kernels.specs[role] = spec;
    kernels.names[role] = name;
  };
  add(Role::statistics, backward_helper_spec(specs.main, Op::backward_preprocess), names.preprocess);
  add(Role::attention, specs.main, names.main);
  add(Role::reduce, backward_helper_spec(specs.main, Op::backward_reduce), names.reduce);
  if (specs.passes_for_dq()) add(Role::dq, specs.dq, names.dq);
  add(Role::convert, backward_helper_spec(specs.main, Op::backward_convert), names.convert);
  add(Role::sink, backward_sink_spec(specs.main), names.sink);
  add_companions(problem, kernels);
  return kernels;
}

AttentionGradients run_backward(const BackwardCase& c, const BackwardData& data, const BackwardKernelNames& kernels,
                                std::uint64_t seed, VariantResults* extra) {
  const bool aligned = c.specs.main.aligned;
  const bool broadcast = c.placement == Placement::broadcast;
  const Placement other = broadcast ? Placement::bhsd : c.placement;
  AttentionGradients gradients = fa::test::make_gradients(c.attention);
  Memory memory;
  const auto input = [&](const char* name, const HostTensor& tensor, Placement placement) {
    return view_of(place_input(memory, name, tensor, placement, aligned), tensor);
  };
  fa::plan::Problem problem = problem_of(c);
  if (c.specs.main.place_in_memory) put_place_in_memory(memory, {}, problem);
  const auto [wants_dq, wants_dk, wants_dv] = problem.gradients;
  const auto output = [&](const char* name, const HostTensor& tensor, bool wanted) {
    return wanted ? std::optional(place_output(memory, name, tensor, other, aligned)) : std::nullopt;
  };
  const std::optional<Placed> dq = output("dq", gradients.dq, wants_dq);
  const std::optional<Placed> dk = output("dk", gradients.dk, wants_dk);
  const std::optional<Placed> dv = output("dv", gradients.dv, wants_dv);
  fa::plan::BackwardTensors tensors;
  tensors.q = input("q", data.inputs.q, other);
  tensors.k = input("k", data.inputs.k, c.placement);
  tensors.v = input("v", data.inputs.v, c.placement);
  tensors.o = input("o", data.outputs.o, other);
  tensors.dout = input("dout", data.dout, c.placement);
  tensors.lse = input("lse", data.outputs.lse, other);
  if (c.dlse) tensors.dlse = input("dlse", data.dlse, other);
  if (dq) tensors.dq = view_of(*dq, gradients.dq);
  if (dk) tensors.dk = view_of(*dk, gradients.dk);
  if (dv) tensors.dv = view_of(*dv, gradients.dv);

  std::optional<PlacedVariant> variant;
  if (c.variant != nullptr) {
    variant.emplace(memory, *c.variant, true);
    tensors.variant = variant->tensors();
  }

  fa::plan::PackedArgs packed;
  if (problem.dropout) packed.dropout = fa::plan::dropout_params(0.5);
  fa::plan::CallPlan call;
  const PlanKernels all = plan_kernels(c.specs, problem, kernels);
  const fa::plan::BackwardChoice choice{.family = c.specs.main.family(),
                                        .aligned = aligned,
                                        .splits = c.splits,
                                        .in_turns = c.specs.main.in_turns(),
                                        .gradients = problem.gradients};
  plan_call(problem, choice, all.specs, tensors,
            {static_cast<double>(c.attention.softmax_scale()), c.blocks, false, packed}, call);
  run_plan(call, all, memory, seed);
  if (variant && extra != nullptr) {
    for (const fa::expression::CapturedView& captured : variant->views) {
      extra->captures.push_back(floats_of(captured.gradient));
    }
    extra->dsink = floats_of(variant->dsink);
  }
  if (dq) fetch(memory, *dq, gradients.dq);
  if (dk) fetch(memory, *dk, gradients.dk);
  if (dv) fetch(memory, *dv, gradients.dv);
  return gradients;
}

}  // namespace emulator
