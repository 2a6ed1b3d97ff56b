#include "emulator/statistics_run.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>

#include "api/packed.hpp"
#include "emulator/placement.hpp"
#include "emulator/plan_run.hpp"
#include "emulator/variant_run.hpp"
#include "plan/call_plan.hpp"

namespace emulator {
namespace {

using fa::DType;
using fa::TensorView;
using fa::plan::Role;
using fa::test::AttentionCase;
using fa::test::HostTensor;

/// What a kernel has written, and 0 elsewhere.
template <class T>
void fetch(const Memory& memory, const std::byte* from, std::vector<T>& values) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::byte* const at = from + i * sizeof(T);
    if (memory.written(at, sizeof(T))) std::memcpy(&values[i], at, sizeof(T));
  }
}

template <class T>
std::byte* place(Memory& memory, const char* name, const std::vector<T>& values) {
  return values.empty() ? nullptr : memory.add_output(name, sizeof(T) * values.size());
}

/// The greatest logits of heads are raised from -inf.
std::byte* place_max_logit(Memory& memory, const StatisticsCase& c, const std::vector<float>& values) {
  if (values.empty() || !c.config.statistics.max_logit_by_head) return place(memory, "max_logit", values);
  const std::vector<float> lowest(values.size(), -std::numeric_limits<float>::infinity());
  std::byte* const base = memory.add_input("max_logit", std::as_bytes(std::span(lowest)));
  memory.set_flags(base, sizeof(float) * lowest.size(), Memory::kReadable | Memory::kWritable);
  return base;
}

/// Rows of O that a kernel has written.
void fetch_rows(const Memory& memory, const Placed& from, HostTensor& o) {
  const TensorView view = o.view();
  for_each_row(from.b, from.h, from.s, [&](std::int64_t b, std::int64_t h, std::int64_t s) {
    const std::byte* const row = from.row(b, h, s);
    if (!memory.written(row, from.row_bytes)) return;
    const std::int64_t to = b * view.strides[0] + h * view.strides[1] + s * view.strides[2];
    std::memcpy(o.bytes().data() + to * static_cast<std::int64_t>(from.element), row, from.row_bytes);
  });
}

}  // namespace

StatisticsResults run_statistics(const StatisticsCase& c, const StatisticsData& data, std::uint64_t seed,
                                 const std::string& kernel, const std::string& sums_kernel) {
  const AttentionCase& a = c.attention;
  StatisticsResults results(c);
  const Placement placement = c.packed() ? Placement::bshd : Placement::bhsd;
  Memory memory;
  fa::plan::ForwardTensors tensors;
  const auto input = [&](const char* name, const HostTensor& tensor) {
    return view_of(place_input(memory, name, tensor, placement, true), tensor);
  };
  tensors.q = input("q", data.inputs.q);
  tensors.k = input("k", data.inputs.k);
  tensors.v = input("v", data.inputs.v);
  const Placed placed_o = place_output(memory, "o", results.o, placement, true);
  tensors.o = view_of(placed_o, results.o);
  std::byte* const lse = place(memory, "lse", results.lse);
  std::byte* const max_logit = place_max_logit(memory, c, results.max_logit);
  std::byte* const entropy = place(memory, "entropy", results.entropy);
  if (c.without_sums) results.column_sums.clear();
  std::byte* const sums = place(memory, "column_sums", results.column_sums);
  std::byte* const top_keys = place(memory, "top_keys", results.top_keys);
  tensors.lse = TensorView(lse, DType::f32, {a.b, a.h_q, a.s_q});
  tensors.statistics.max_logit.data = max_logit;
  tensors.statistics.entropy.data = entropy;
  if (sums != nullptr) tensors.statistics.column_sums = TensorView(sums, DType::f32, {a.b, a.h_q, a.s_kv});
  tensors.statistics.top_keys.data = top_keys;
  const PlacedVariant variant(memory, data.variant, false);
  tensors.variant = variant.tensors();

  fa::PackedSequences sequences;
  sequences.cu_seqlens_q = place_array(memory, "cu_seqlens_q", c.cu_q);
  sequences.cu_seqlens_kv = place_array(memory, "cu_seqlens_kv", c.cu_kv);
  sequences.seqused_kv = place_array(memory, "seqused_kv", c.used_kv);
  fa::PagedCache cache;
  if (!data.table.empty()) {
    cache.block_table = TensorView(place_array(memory, "block_table", data.table), DType::i32, {a.b, data.pages_each});
  }
  const fa::plan::PackedArgs packed = fa::api::packed_args(data.variant.config, sequences, {}, cache);
  const fa::plan::ForwardPlan plan = plan_of(c);
  const fa::plan::Problem problem = problem_of(c, data.variant);
  PlanKernels kernels;
  kernels.specs[Role::attention] = plan.kernel;
  kernels.names[Role::attention] = kernel;
  kernels.names[Role::column_sums] = sums_kernel;
  add_companions(problem, kernels);
  const fa::plan::Choice choice{.pack_gqa = plan.kernel.pack_gqa, .family = plan.kernel.family()};
  fa::plan::CallPlan call;
  plan_call(problem, choice, kernels.specs, tensors, {double{a.softmax_scale()}, 3, false, packed}, call);
  if (c.sum_heads_in_flight > 0) call.forward_params.sums.heads_in_flight = c.sum_heads_in_flight;
  run_plan(call, kernels, memory, seed);
  fetch(memory, max_logit, results.max_logit);
  fetch(memory, entropy, results.entropy);
  fetch(memory, sums, results.column_sums);
  fetch(memory, top_keys, results.top_keys);
  fetch(memory, lse, results.lse);
  fetch_rows(memory, placed_o, results.o);
  return results;
}

}  // namespace emulator
