#include "emulator/schedule_run.hpp"

#include <algorithm>
#include <span>

#include "emulator/plan_run.hpp"

namespace emulator {
namespace {

using fa::plan::KernelSpec;
using fa::plan::Problem;
using fa::plan::Role;
using fa::test::ScheduleLists;

const std::int32_t* place(Memory& memory, const char* name, const std::vector<std::int32_t>& values) {
  if (values.empty()) return nullptr;
  return reinterpret_cast<const std::int32_t*>(memory.add_input(name, std::as_bytes(std::span(values))));
}

}  // namespace

ScheduleLists run_schedule(const Problem& problem, const KernelSpec& attention, const Lengths& lengths,
                           int multiprocessors, std::uint64_t seed, const std::string& name) {
  Memory memory;
  fa::plan::PackedArgs args;
  args.sequences.cu_q = place(memory, "cu_seqlens_q", lengths.cu_q);
  args.sequences.used_q = place(memory, "seqused_q", lengths.used_q);
  args.sequences.used_kv = place(memory, "seqused_kv", lengths.used_kv);
  args.paged.begin = place(memory, "seq_begin", lengths.begin);
  PlanKernels kernels;
  kernels.specs[Role::attention] = attention;
  add_companions(problem, kernels);
  kernels.names[Role::schedule] = name;
  fa::plan::CallFacts facts{1.0, multiprocessors, false, args};
  facts.schedule = place_schedule(problem, attention, multiprocessors, memory);
  fa::plan::CallPlan plan;
  plan_schedule(problem, kernels.specs, facts, plan);
  run_plan(plan, kernels, memory, seed);

  return fa::test::read_schedule(static_cast<const std::byte*>(facts.schedule),
                                 schedule_shape(problem, attention, multiprocessors));
}

std::string difference(const Problem& problem, const KernelSpec& attention, const Lengths& lengths,
                       const ScheduleLists& lists) {
  return fa::test::difference(
      lists, schedule_on_host(problem, attention, {lengths.cu_q, lengths.used_q, lengths.used_kv, lengths.begin},
                              static_cast<int>(lists.starts.size()) - 1));
}

Problem schedule_problem(const PagedKernel& kernel, std::int64_t b, std::int64_t s_q, std::int64_t s_kv) {
  const KernelSpec& spec = kernel.spec;
  Problem problem;
  problem.arch = spec.arch;
  problem.dtype = spec.dtype;
  problem.d_qk = spec.d_qk;
  problem.d_v = spec.d_v;
  problem.causal = spec.causal;
  problem.varlen = spec.varlen;
  problem.page_size = spec.page_size;
  problem.b = b;
  problem.h_q = 6;
  problem.h_kv = 2;
  problem.s_q = s_q;
  problem.s_kv = s_kv;
  problem.total_q = spec.varlen ? 2 * b + 4 * s_q : 0;
  if (spec.variants.any()) problem.variants = &spec.variants;
  problem.window_left = 100;
  problem.window_right = kernel.choice.config.window_right >= 0 ? 9 : 0;
  problem.chunk = 48;
  return problem;
}

Lengths random_lengths(const Problem& problem, std::mt19937_64& engine, bool prefills) {
  Lengths lengths;
  const auto below = [&](std::int64_t n) {
    return static_cast<std::int32_t>(engine() % static_cast<std::uint64_t>(n));
  };
  std::int32_t row = 0;
  for (std::int64_t i = 0; i < problem.b; ++i) {
    lengths.cu_q.push_back(row);
    const auto most = static_cast<std::int32_t>(problem.s_q);
    const std::int32_t rows = prefills && below(8) == 0 ? below(most + 1) : std::min(below(3), most);
    row = std::min<std::int32_t>(row + rows, static_cast<std::int32_t>(problem.total_q));
    const std::int32_t keys = below(5) == 0   ? 0
                              : below(4) == 0 ? below(problem.s_kv + 1)
                                              : below(std::min<std::int64_t>(problem.s_kv, 90));
    lengths.used_kv.push_back(keys);
    lengths.begin.push_back(below(2) == 0 ? 0 : below(keys + 1));
  }
  lengths.cu_q.push_back(row);
  if (!problem.varlen) lengths.cu_q.clear();
  return lengths;
}

}  // namespace emulator
