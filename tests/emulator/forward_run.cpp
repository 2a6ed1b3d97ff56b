#include "emulator/forward_run.hpp"

#include <array>
#include <cstring>
#include <optional>
#include <ostream>
#include <stdexcept>
#include <vector>

#include <common/forward_params.cuh>
#include <sm90/sm90_forward_params.cuh>

#include "emulator/placement.hpp"
#include "emulator/registry.hpp"
#include "emulator/specs.hpp"
#include "emulator/variant_run.hpp"
#include "plan/early_start.hpp"
#include "plan/forward_launch.hpp"
#include "plan/mask_tiles.hpp"
#include "plan/planner.hpp"

namespace emulator {
namespace {

using fa::DType;
using fa::TensorView;
using fa::kernel::ForwardVariantParams;
using fa::kernel::Sm90ForwardVariantParams;
using fa::test::AttentionCase;
using fa::test::AttentionInputs;
using fa::test::AttentionOutputs;
using fa::test::HostTensor;

int ceil_div(std::int64_t a, std::int64_t b) {
  return static_cast<int>((a + b - 1) / b);
}

fa::plan::Problem problem_of(const ForwardCase& c) {
  const AttentionCase& a = c.attention;
  fa::plan::Problem problem;
  problem.dtype = a.dtype;
  problem.d_qk = static_cast<int>(a.d_qk);
  problem.d_v = static_cast<int>(a.d_v);
  problem.causal_align = a.causal_align;
  problem.b = a.b;
  problem.h_q = a.h_q;
  problem.h_kv = a.h_kv;
  problem.s_q = a.s_q;
  problem.s_kv = a.s_kv;
  problem.arch = c.spec.arch;
  if (c.variant != nullptr) add_variant(problem, *c.variant);
  return problem;
}

/// The launch parameters that follow from the shapes, as the host computes them.
ForwardVariantParams shape_params(const ForwardCase& c, const PlacedVariant* placed) {
  fa::plan::ForwardTensors tensors;
  if (placed != nullptr) tensors.variant = placed->tensors();
  ForwardVariantParams params =
      fa::plan::forward_launch(problem_of(c), tensors, static_cast<double>(c.attention.softmax_scale()), c.splits,
                               c.spec, 1)
          .params;
  params.heads_in_flight = c.heads_in_flight;
  if (c.spec.dropout) params.dropout = fa::plan::dropout_params(0.5);
  return params;
}

TensorView view_of(const Placed& t, const HostTensor& tensor) {
  TensorView view = tensor.view();
  view.data = t.data;
  view.strides = {t.stride_b, t.stride_h, t.stride_s, 1};
  return view;
}

void set_strides(const Placed& t, std::int64_t& b, std::int64_t& h, std::int64_t& s) {
  b = t.stride_b;
  h = t.stride_h;
  s = t.stride_s;
}

}  // namespace

Sm90ForwardVariantParams with_maps(const ForwardVariantParams& params, const fa::plan::Sm90ForwardMaps& maps) {
  Sm90ForwardVariantParams result{};
  result.base = params;
  encode(result.map_q, maps.q);
  encode(result.map_k, maps.k);
  encode(result.map_v, maps.v);
  encode(result.map_o, maps.o);
  return result;
}

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
  fa::plan::KernelSpec combine = combine_spec(c.spec);
  combine.variants.sink = c.spec.variants.sink;
  return {canonical(c.spec), canonical(combine)};
}

AttentionOutputs run_forward(const ForwardCase& c, const AttentionInputs& inputs, const ForwardKernels& kernels,
                             std::uint64_t seed) {
  const bool aligned = c.spec.aligned;
  const Placement q_placement = c.placement == Placement::broadcast ? Placement::bhsd : c.placement;
  AttentionOutputs outputs = fa::test::make_outputs(c.attention);
  Memory memory;
  std::optional<PlacedVariant> variant;
  if (c.variant != nullptr) variant.emplace(memory, *c.variant, false);
  ForwardVariantParams params = shape_params(c, variant ? &*variant : nullptr);

  const Placed q = place_input(memory, "q", inputs.q, q_placement, aligned);
  const Placed k = place_input(memory, "k", inputs.k, c.placement, aligned);
  const Placed v = place_input(memory, "v", inputs.v, c.placement, aligned);
  const Placed o = place_output(memory, "o", outputs.o, q_placement, aligned);
  const Placed lse = place_output(memory, "lse", outputs.lse, q_placement, aligned);
  params.q = q.data;
  params.k = k.data;
  params.v = v.data;
  params.o = o.data;
  params.lse = c.lse ? reinterpret_cast<float*>(lse.data) : nullptr;
  set_strides(q, params.stride_q_b, params.stride_q_h, params.stride_q_s);
  set_strides(k, params.stride_k_b, params.stride_k_h, params.stride_k_s);
  set_strides(v, params.stride_v_b, params.stride_v_h, params.stride_v_s);
  set_strides(o, params.stride_o_b, params.stride_o_h, params.stride_o_s);
  set_strides(lse, params.stride_lse_b, params.stride_lse_h, params.stride_lse_s);
  const std::int64_t rows = c.attention.b * c.attention.h_q * c.attention.s_q;
  if (c.spec.split) {
    const auto partials = static_cast<std::size_t>(rows * c.splits);
    params.partial_o = reinterpret_cast<float*>(
        memory.add_output("partial_o", partials * static_cast<std::size_t>(c.attention.d_v) * sizeof(float)));
    params.partial_lse = reinterpret_cast<float*>(memory.add_output("partial_lse", 2 * partials * sizeof(float)));
  }

  std::int32_t next_tile = 0;
  memory.add("next_tile", &next_tile, sizeof next_tile, Memory::kReadable | Memory::kWritable);
  params.next_tile = c.spec.dynamic() ? &next_tile : nullptr;

  if (variant) run_mask_tiles(memory, problem_of(c), c.spec, params.variant, seed);
  if (c.spec.affine_reach()) run_row_norms(memory, problem_of(c), c.spec, params, seed);
  LaunchOptions options;
  options.seed = seed;
  const RegisteredKernel& attention = registered_kernel(kernels.attention);
  const bool sm90 = c.spec.family() == fa::plan::Family::sm90;
  const int tiles = params.m_blocks * params.heads * params.b * params.splits;
  options.grid = sm90 ? c.blocks : tiles;
  if (sm90 && fa::plan::needs_tile_lists(problem_of(c))) {
    options.grid = static_cast<int>(fa::plan::in_waves(params.sequences, tiles, c.blocks));
  }
  options.threads = attention.threads;
  options.shared_bytes = fa::plan::shared_bytes(c.spec);
  if (sm90) {
    const Sm90ForwardVariantParams all = with_maps(
        params,
        fa::plan::sm90_forward_maps(
            {view_of(q, inputs.q), view_of(k, inputs.k), view_of(v, inputs.v), view_of(o, outputs.o), {}}, c.spec));
    options.early = fa::plan::may_start_early(c.spec);
    launch(attention.entry, &all, memory, options);
    options.early = false;
  } else {
    launch(attention.entry, &params, memory, options);
  }
  if (c.spec.split) {
    const RegisteredKernel& combine = registered_kernel(kernels.combine);
    options.grid = ceil_div(rows, combine.threads / 32);
    options.threads = combine.threads;
    options.shared_bytes = 0;
    launch(combine.entry, &params, memory, options);
  }
  fetch(memory, o, outputs.o);
  if (c.lse) fetch(memory, lse, outputs.lse);
  return outputs;
}

}  // namespace emulator
