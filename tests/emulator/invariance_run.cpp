#include "emulator/invariance_run.hpp"

#include <algorithm>
#include <span>

#include <common/forward_params.cuh>

#include "api/problem.hpp"
#include "api/variants.hpp"
#include "emulator/placement.hpp"
#include "emulator/plan_run.hpp"
#include "emulator/specs.hpp"
#include "plan/call_plan.hpp"

namespace emulator {
namespace {

using fa::TensorView;
using fa::plan::Role;
using fa::test::ChunkCall;
using fa::test::HostTensor;

constexpr int kMostSplits = 4;

fa::plan::PackedArgs place_arrays(Memory& memory, const ChunkCall& call) {
  fa::plan::PackedArgs args;
  args.sequences.cu_q = place_array(memory, "cu_seqlens_q", call.cu_q);
  args.sequences.cu_kv = place_array(memory, "cu_seqlens_kv", call.cu_kv);
  args.sequences.used_kv = place_array(memory, "seqused_kv", call.used_kv);
  if (call.table.empty()) return args;
  args.paged.table = place_array(memory, "block_table", call.table);
  args.paged.stride_row = call.columns;
  args.paged.stride_page = 1;
  args.paged.rows = static_cast<std::int32_t>(call.shape.b);
  return args;
}

}  // namespace

fa::test::AttentionOutputs run_chunks(const InvariantPath& path, const ChunkCall& of, const InvariantRun& run) {
  Memory memory;
  fa::test::AttentionOutputs outputs = of.outputs();
  const bool aligned = path.spec.aligned;
  const fa::plan::PackedArgs args = place_arrays(memory, of);
  const Placed o = place_output(memory, "o", outputs.o, Placement::bshd, aligned);
  const Placed lse = place_output(memory, "lse", outputs.lse, Placement::bhsd, aligned);
  fa::plan::ForwardTensors tensors;
  tensors.q = view_of(place_input(memory, "q", of.q, aligned ? Placement::bshd : Placement::padded, aligned), of.q);
  tensors.k = view_of(place_input(memory, "k", of.k, Placement::bshd, aligned), of.k);
  tensors.v = view_of(place_input(memory, "v", of.v, Placement::bshd, aligned), of.v);
  tensors.o = view_of(o, outputs.o);
  tensors.lse = view_of(lse, outputs.lse);
  if (path.config.sink) {
    tensors.variant.sink = TensorView(memory.add_input("sink", std::as_bytes(std::span(kInvariantSinks))),
                                      fa::DType::f32, {kInvariantHeadsQ});
  }
  const fa::api::Functions functions = fa::api::read_functions(path.config, false);
  fa::AttentionShape shape = of.shape;
  shape.aligned = aligned;
  shape.bounded = path.spec.bounded;
  const fa::plan::Problem problem = fa::api::make_problem(path.config, shape, path.spec.arch, &functions.variants);
  PlanKernels kernels;
  kernels.specs[Role::attention] = path.spec;
  kernels.names[Role::attention] = run.kernel;
  add_companions(problem, kernels);
  fa::plan::Choice choice{.pack_gqa = path.spec.pack_gqa,
                          .dynamic = path.spec.dynamic(),
                          .shares_splits = path.spec.split_keys() > 0 && path.spec.split,
                          .family = path.spec.family()};
  if (path.spec.leaves_splits()) {
    choice.splits = fa::kernel::splits_of_length(shape.s_kv, kMostSplits, path.spec.length_keys());
    // As planned over pages: one at least that a short request does not have.
    if (path.spec.page_size != 0) choice.splits = std::max(choice.splits, 2);
    choice.whole_tiles = path.spec.whole_tiles();
    choice.all_whole = choice.whole_tiles && path.spec.page_size == 0;
    choice.splits_request = path.spec.page_size != 0;
    kernels.specs[Role::combine] = combine_spec(path.spec);
    kernels.names[Role::combine] = run.merge;
  }
  const fa::plan::CallFacts facts{run.scale, 3, false, args};
  fa::plan::CallPlan plan;
  plan_call(problem, choice, kernels.specs, tensors, facts, plan);
  run_plan(plan, kernels, memory, run.seed);
  if (plan.workspace.has(fa::plan::Section::split_flags)) {
    const auto flags = plan.workspace.bytes(fa::plan::Section::split_flags) / sizeof(std::uint64_t);
    expect_flags_down(plan.forward_params.attention.base.split_flags, static_cast<std::int64_t>(flags));
  }
  fetch(memory, o, outputs.o);
  fetch(memory, lse, outputs.lse);
  return outputs;
}

}  // namespace emulator
