#include "emulator/forward_run.hpp"

#include <array>
#include <cstring>
#include <ostream>
#include <stdexcept>
#include <vector>

#include <common/forward_params.cuh>
#include <sm90/sm90_forward_params.cuh>

#include "emulator/placement.hpp"
#include "emulator/registry.hpp"
#include "emulator/specs.hpp"
#include "emulator/tensor_map.hpp"
#include "plan/planner.hpp"

namespace emulator {
namespace {

using fa::DType;
using fa::TensorView;
using fa::kernel::ForwardParams;
using fa::kernel::Sm90ForwardParams;
using fa::test::AttentionCase;
using fa::test::AttentionInputs;
using fa::test::AttentionOutputs;
using fa::test::HostTensor;

int ceil_div(std::int64_t a, std::int64_t b) {
  return static_cast<int>((a + b - 1) / b);
}

/// The launch parameters that follow from the shapes, as the host computes them.
ForwardParams shape_params(const ForwardCase& c) {
  const AttentionCase& a = c.attention;
  ForwardParams params{};
  params.b = static_cast<int>(a.b);
  params.h_q = static_cast<int>(a.h_q);
  params.h_kv = static_cast<int>(a.h_kv);
  params.s_q = static_cast<int>(a.s_q);
  params.s_kv = static_cast<int>(a.s_kv);
  params.group = static_cast<int>(a.h_q / a.h_kv);
  params.causal_shift = a.causal_align == fa::CausalAlign::bottom_right ? static_cast<int>(a.s_kv - a.s_q) : 0;
  params.heads = static_cast<int>(c.spec.pack_gqa ? a.h_kv : a.h_q);
  params.m_blocks = ceil_div(c.spec.pack_gqa ? a.s_q * params.group : a.s_q, c.spec.tile_m);
  params.heads_in_flight = c.heads_in_flight;
  params.splits = c.splits;
  params.scale = a.softmax_scale();
  params.scale_log2 = static_cast<float>(static_cast<double>(a.softmax_scale()) * 1.44269504088896340736);
  return params;
}

/// Slabs of 64 columns of a tensor whose outer axes are `dims` with `strides` in elements; a box takes `box` of them.
void encode(fa::kernel::TensorMap& map, const Placed& t, std::vector<std::uint64_t> dims,
            const std::vector<std::int64_t>& strides, std::vector<std::uint32_t> box) {
  TensorShape shape;
  shape.base = t.data;
  shape.element_bytes = static_cast<int>(t.element);
  shape.dims = std::move(dims);
  shape.dims.insert(shape.dims.begin(), t.row_bytes / t.element);
  for (const std::int64_t stride : strides) shape.strides.push_back(static_cast<std::uint64_t>(stride) * t.element);
  shape.box = std::move(box);
  shape.box.insert(shape.box.begin(), 64);
  encode_tensor_map(map.bytes, shape);
}

Sm90ForwardParams with_maps(const ForwardCase& c, const ForwardParams& params, const Placed& q, const Placed& k,
                            const Placed& v, const Placed& o) {
  Sm90ForwardParams result{};
  result.base = params;
  const auto u64 = [](std::int64_t x) { return static_cast<std::uint64_t>(x); };
  const auto group = static_cast<std::uint32_t>(c.spec.pack_gqa ? params.group : 1);
  const auto rows = static_cast<std::uint32_t>(c.spec.tile_m) / group;
  encode(result.map_q, q, {u64(params.group), u64(q.s), u64(params.h_kv), u64(q.b)},
         {q.stride_h, q.stride_s, q.stride_h * params.group, q.stride_b}, {group, rows, 1, 1});
  encode(result.map_o, o, {u64(params.group), u64(o.s), u64(params.h_kv), u64(o.b)},
         {o.stride_h, o.stride_s, o.stride_h * params.group, o.stride_b}, {1, 16, 1, 1});
  const auto keys = static_cast<std::uint32_t>(c.spec.tile_n);
  encode(result.map_k, k, {u64(k.s), u64(k.h), u64(k.b)}, {k.stride_s, k.stride_h, k.stride_b}, {keys, 1, 1});
  encode(result.map_v, v, {u64(v.s), u64(v.h), u64(v.b)}, {v.stride_s, v.stride_h, v.stride_b}, {keys, 1, 1});
  return result;
}

void set_strides(const Placed& t, std::int64_t& b, std::int64_t& h, std::int64_t& s) {
  b = t.stride_b;
  h = t.stride_h;
  s = t.stride_s;
}

}  // namespace

void PrintTo(const ForwardCase& c, std::ostream* out) {
  constexpr std::array kNames{"bhsd", "bshd", "padded", "broadcast", "gaps"};
  *out << canonical(c.spec) << ", ";
  fa::test::PrintTo(c.attention, out);
  *out << ", " << kNames[static_cast<std::size_t>(c.placement)] << (c.lse ? "" : ", no lse") << ", " << c.splits
       << " splits, " << c.heads_in_flight << " heads in flight";
  if (c.spec.sm90()) *out << ", " << c.blocks << " blocks";
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
  ForwardParams params = shape_params(c);

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
    params.partial_lse = reinterpret_cast<float*>(memory.add_output("partial_lse", partials * sizeof(float)));
  }

  LaunchOptions options;
  options.seed = seed;
  const RegisteredKernel& attention = registered_kernel(kernels.attention);
  const int tiles = params.m_blocks * params.heads * params.b * params.splits;
  options.grid = c.spec.sm90() ? c.blocks : tiles;
  options.threads = attention.threads;
  options.shared_bytes = shared_bytes(c.spec);
  if (c.spec.sm90()) {
    const Sm90ForwardParams sm90 = with_maps(c, params, q, k, v, o);
    launch(attention.entry, &sm90, memory, options);
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
