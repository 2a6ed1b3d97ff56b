#include "emulator/statistics_gradients_run.hpp"

#include <cstring>

#include "api/packed.hpp"
#include "emulator/placement.hpp"
#include "emulator/plan_run.hpp"
#include "emulator/variant_run.hpp"

namespace emulator {
namespace {

using fa::DType;
using fa::TensorView;
using fa::plan::Role;
using fa::test::HostTensor;

/// Rows that kernels have written.
void fetch_rows(const Memory& memory, const Placed& from, HostTensor& to) {
  const TensorView view = to.view();
  for_each_row(from.b, from.h, from.s, [&](std::int64_t b, std::int64_t h, std::int64_t s) {
    const std::byte* const row = from.row(b, h, s);
    if (!memory.written(row, from.row_bytes)) return;
    const std::int64_t at = b * view.strides[0] + h * view.strides[1] + s * view.strides[2];
    std::memcpy(to.bytes().data() + at * static_cast<std::int64_t>(from.element), row, from.row_bytes);
  });
}

}  // namespace

StatisticsGradientResults run_statistics_gradients(const StatisticsGradientCase& c, const StatisticsGradientData& data,
                                                   std::uint64_t seed, const std::string& mutant, Role role) {
  const fa::test::AttentionCase& a = c.of.attention;
  const Placement placement = c.of.packed() ? Placement::bshd : Placement::bhsd;
  StatisticsGradientResults results(c, data);
  Memory memory;
  fa::plan::BackwardTensors tensors;
  const auto input = [&](const char* name, const HostTensor& tensor) {
    return view_of(place_input(memory, name, tensor, placement, true), tensor);
  };
  const auto rows = [&](const char* name, const std::vector<float>& values) {
    if (values.empty()) return TensorView();
    return TensorView(memory.add_input(name, std::as_bytes(std::span(values))), DType::f32, {a.b, a.h_q, a.s_q});
  };
  tensors.q = input("q", data.forward.inputs.q);
  tensors.k = input("k", data.forward.inputs.k);
  tensors.v = input("v", data.forward.inputs.v);
  tensors.o = input("o", data.results.o);
  tensors.dout = input("dout", data.dout);
  tensors.lse = rows("lse", data.results.lse);
  tensors.dlse = rows("dlse", data.dlse);
  if (!data.dentropy.empty()) tensors.statistics.entropy = rows("entropy", data.results.entropy);
  tensors.statistics.dentropy = rows("dentropy", data.dentropy);
  tensors.statistics.dmax_logit = rows("dmax_logit", data.dmax_logit);
  tensors.statistics.dcolumn_sums = rows("dcolumn_sums", data.dcolumn_sums);
  const Placed dq = place_output(memory, "dq", results.dq, placement, true);
  const Placed dk = place_output(memory, "dk", results.dk, placement, true);
  const Placed dv = place_output(memory, "dv", results.dv, placement, true);
  tensors.dq = view_of(dq, results.dq);
  tensors.dk = view_of(dk, results.dk);
  tensors.dv = view_of(dv, results.dv);
  const PlacedVariant variant(memory, data.forward.variant, true);
  tensors.variant = variant.tensors();

  fa::PackedSequences sequences;
  sequences.cu_seqlens_q = place_array(memory, "cu_seqlens_q", c.of.cu_q);
  sequences.cu_seqlens_kv = place_array(memory, "cu_seqlens_kv", c.of.cu_kv);
  const fa::plan::PackedArgs packed = fa::api::packed_args(data.forward.variant.config, sequences, {}, {});
  const fa::plan::Problem problem = problem_of(c.of, data.forward.variant);
  PlanKernels kernels;
  kernels.specs = gradient_kernels(c, data.forward.variant);
  kernels.names[role] = mutant;
  add_companions(problem, kernels);
  const fa::plan::Fixed fixed = fa::plan::read_override(c.kernel, fa::plan::Op::backward, "kernel_backward");
  fa::plan::CallPlan call;
  plan_call(problem, choose_backward(problem, fixed), kernels.specs, tensors,
            {double{a.softmax_scale()}, 3, false, packed}, call);
  run_plan(call, kernels, memory, seed);
  fetch_rows(memory, dq, results.dq);
  fetch_rows(memory, dk, results.dk);
  fetch_rows(memory, dv, results.dv);
  results.dsink = floats_of(variant.dsink);
  for (std::size_t i = 0; i < results.captures.size(); ++i) results.captures[i] = floats_of(variant.views[i].gradient);
  return results;
}

}  // namespace emulator
