#include "emulator/backward_run.hpp"

#include <array>
#include <optional>
#include <ostream>
#include <utility>

#include "emulator/registry.hpp"
#include "emulator/specs.hpp"
#include "emulator/variant_run.hpp"
#include "plan/early_start.hpp"
#include "plan/planner.hpp"

namespace emulator {
namespace {

using fa::DType;
using fa::TensorView;
using fa::plan::BackwardLaunch;
using fa::plan::KernelSpec;
using fa::test::AttentionCase;
using fa::test::AttentionGradients;
using fa::test::AttentionOutputs;
using fa::test::HostTensor;

TensorView view_of(const Placed& t, const HostTensor& tensor) {
  TensorView view = tensor.view();
  view.data = t.data;
  view.strides[0] = t.stride_b;
  view.strides[1] = t.stride_h;
  view.strides[2] = t.stride_s;
  return view;
}

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
  if (c.variant != nullptr) add_variant(problem, *c.variant);
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

void run_kernel(const std::string& name, const KernelSpec& spec, std::int64_t grid, const void* params, Memory& memory,
                std::uint64_t seed) {
  if (grid == 0) return;
  const RegisteredKernel& kernel = registered_kernel(name);
  LaunchOptions options;
  options.grid = static_cast<int>(grid);
  options.threads = kernel.threads;
  options.shared_bytes = fa::plan::shared_bytes(spec);
  options.seed = seed;
  options.cluster = spec.cluster();
  options.early = fa::plan::may_start_early(spec);
  options.last_first = spec.ordered_dq();
  launch(kernel.entry, params, memory, options);
}

void run_main(const KernelSpec& spec, const std::string& name, const BackwardLaunch& launch,
              const fa::plan::BackwardTensors& tensors, Memory& memory, std::uint64_t seed) {
  if (spec.family() != fa::plan::Family::sm90) {
    run_kernel(name, spec, launch.grids.main, &launch.params, memory, seed);
    return;
  }
  const fa::kernel::Sm90BackwardVariantParams params = sm90_backward_params(launch, tensors, spec);
  run_kernel(name, spec, launch.grids.main, &params, memory, seed);
}

}  // namespace

fa::kernel::Sm90BackwardVariantParams sm90_backward_params(const BackwardLaunch& launch,
                                                           const fa::plan::BackwardTensors& tensors,
                                                           const KernelSpec& spec) {
  const fa::plan::Sm90BackwardMaps maps = sm90_backward_maps(tensors, spec);
  fa::kernel::Sm90BackwardVariantParams params{};
  params.base = launch.params;
  encode(params.map_q, maps.q);
  encode(params.map_k, maps.k);
  encode(params.map_v, maps.v);
  encode(params.map_dout, maps.dout);
  return params;
}

void PrintTo(const BackwardCase& c, std::ostream* out) {
  constexpr std::array kNames{"bhsd", "bshd", "padded", "broadcast", "gaps"};
  *out << canonical(c.specs.main) << ", ";
  if (!c.specs.main.write_dq) *out << canonical(c.specs.dq) << ", ";
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
  const Placed dq = place_output(memory, "dq", gradients.dq, other, aligned);
  const Placed dk = place_output(memory, "dk", gradients.dk, other, aligned);
  const Placed dv = place_output(memory, "dv", gradients.dv, other, aligned);
  fa::plan::BackwardTensors tensors;
  tensors.q = input("q", data.inputs.q, other);
  tensors.k = input("k", data.inputs.k, c.placement);
  tensors.v = input("v", data.inputs.v, c.placement);
  tensors.o = input("o", data.outputs.o, other);
  tensors.dout = input("dout", data.dout, c.placement);
  tensors.lse = input("lse", data.outputs.lse, other);
  if (c.dlse) tensors.dlse = input("dlse", data.dlse, other);
  tensors.dq = view_of(dq, gradients.dq);
  tensors.dk = view_of(dk, gradients.dk);
  tensors.dv = view_of(dv, gradients.dv);

  std::optional<PlacedVariant> variant;
  if (c.variant != nullptr) {
    variant.emplace(memory, *c.variant, true);
    tensors.variant = variant->tensors();
  }

  const fa::plan::Problem problem = problem_of(c);
  const bool deterministic = c.deterministic();
  const fa::plan::BackwardChoice choice{c.specs.main.family(), aligned, c.splits};
  std::byte* workspace =
      memory.add_output("workspace", fa::plan::backward_workspace(problem, choice, deterministic).bytes);
  fa::plan::BackwardKernels taken{c.specs.main, c.specs.dq, 1};
  taken.reduce_warps = backward_helper_spec(c.specs.main, fa::plan::Op::backward_reduce).warps;
  BackwardLaunch launch = backward_launch(problem, tensors, static_cast<double>(c.attention.softmax_scale()), choice,
                                          deterministic, taken, c.blocks, workspace);
  using fa::plan::Op;
  const auto helper = [&](Op op) { return backward_helper_spec(c.specs.main, op); };
  run_kernel(kernels.preprocess, helper(Op::backward_preprocess), launch.grids.preprocess, &launch.params, memory,
             seed);
  if (variant) run_mask_tiles(memory, problem, c.specs.main, launch.params.variant, seed);
  run_main(c.specs.main, kernels.main, launch, tensors, memory, seed);
  run_kernel(kernels.reduce, helper(Op::backward_reduce), launch.grids.reduce, &launch.params, memory, seed);
  if (!c.specs.main.write_dq) {
    if (variant) run_mask_tiles(memory, problem, c.specs.dq, launch.dq_params.variant, seed);
    run_kernel(kernels.dq, c.specs.dq, launch.grids.dq, &launch.dq_params, memory, seed);
  }
  run_kernel(kernels.convert, helper(Op::backward_convert), launch.grids.convert, &launch.params, memory, seed);
  if (variant && variant->dsink.defined()) {
    run_kernel(kernels.sink, backward_sink_spec(c.specs.main), launch.grids.sink, &launch.params, memory, seed);
  }
  if (variant && extra != nullptr) {
    for (const fa::expression::CapturedView& captured : variant->views) {
      extra->captures.push_back(floats_of(captured.gradient));
    }
    extra->dsink = floats_of(variant->dsink);
  }
  fetch(memory, dq, gradients.dq);
  fetch(memory, dk, gradients.dk);
  fetch(memory, dv, gradients.dv);
  return gradients;
}

}  // namespace emulator
