#include "emulator/turing_specs.hpp"

#include <algorithm>

#include "emulator/specs.hpp"
#include "plan/backward.hpp"
#include "plan/planner.hpp"

namespace emulator {
namespace {

using fa::DType;
using fa::plan::KernelSpec;
using fa::plan::Op;
using fa::plan::Problem;

constexpr fa::plan::Arch kTuring{7, 5, '\0'};

Problem problem_of(DType dtype, int d_qk, int d_v, bool causal) {
  Problem problem;
  problem.arch = kTuring;
  problem.dtype = dtype;
  problem.d_qk = d_qk;
  problem.d_v = d_v;
  problem.causal = causal;
  problem.h_q = problem.h_kv = 2;
  problem.s_q = problem.s_kv = 512;
  return problem;
}

std::vector<TuringForward> make_forwards() {
  std::vector<TuringForward> all;
  const auto add = [&](const char* name, const Problem& problem, const char* text) {
    const fa::KernelOverride wanted{"sm80", text};
    const auto planned = plan_forward(problem, fa::plan::read_override(wanted, Op::forward, "kernel"));
    all.push_back({name, planned.kernel, planned.combine});
  };
  add("f16", problem_of(DType::f16, 64, 64, false), "");
  add("f16_causal", problem_of(DType::f16, 128, 128, true), "");
  add("f16_eighths", problem_of(DType::f16, 24, 40, true), "tile_m=32 tile_n=32 warps=2");
  add("f16_two_buffers", problem_of(DType::f16, 32, 16, true), "tile_m=32 tile_n=32 warps=2 stages=2");
  add("f16_pairs", problem_of(DType::f16, 32, 32, true), "tile_m=32 tile_n=32 warps=2 warps_n=2");
  add("f16_wide", problem_of(DType::f16, 264, 264, true), "");
  Problem strange = problem_of(DType::f16, 16, 16, true);
  strange.aligned = strange.positive_scale = false;
  add("f16_unaligned", strange, "tile_m=32 tile_n=32 warps=2");
  add("f32", problem_of(DType::f32, 24, 16, true), "tile_m=32 tile_n=16 warps=2");
  add("f16_splits", problem_of(DType::f16, 40, 64, true), "tile_m=32 tile_n=32 warps=2 splits=3");
  add("f16_groups", problem_of(DType::f16, 64, 64, false), "tile_m=16 tile_n=32 warps=4 warps_n=4");
  add("f16_split_warps", problem_of(DType::f16, 64, 64, true), "tile_m=16 tile_n=64 warps=4 split_warps=1");
  add("f32_splits", problem_of(DType::f32, 16, 24, false), "tile_m=32 tile_n=16 warps=2 splits=3");
  add("f32_plan", problem_of(DType::f32, 64, 64, false), "");
  add("f32_little", problem_of(DType::f32, 256, 256, true), "");
  return all;
}

std::vector<TuringBackward> make_backwards() {
  std::vector<TuringBackward> all;
  const auto add = [&](const char* name, const Problem& problem, bool deterministic) {
    const fa::plan::BackwardPlan plan = plan_backward(problem, {}, deterministic);
    TuringBackward& one = all.emplace_back(TuringBackward{name, {plan.main.front(), {}}});
    if (!plan.dq.empty()) one.specs.dq = plan.dq.front();
  };
  add("f16", problem_of(DType::f16, 64, 64, true), false);
  add("f16_medium", problem_of(DType::f16, 128, 128, false), false);
  add("f16_eighths", problem_of(DType::f16, 40, 24, true), true);
  add("f16_large", problem_of(DType::f16, 192, 192, true), false);
  add("f32", problem_of(DType::f32, 40, 24, true), false);
  add("f32_large", problem_of(DType::f32, 128, 128, true), true);
  return all;
}

}  // namespace

const std::vector<TuringForward>& turing_forwards() {
  static const std::vector<TuringForward> all = make_forwards();
  return all;
}

const std::vector<TuringBackward>& turing_backwards() {
  static const std::vector<TuringBackward> all = make_backwards();
  return all;
}

std::vector<KernelSpec> all_turing_specs() {
  std::vector<KernelSpec> unique;
  const auto add = [&](const KernelSpec& spec) {
    if (std::ranges::find(unique, spec) == unique.end()) unique.push_back(spec);
  };
  for (const TuringForward& forward : turing_forwards()) {
    add(forward.spec);
    if (forward.spec.split) add(forward.combine);
  }
  for (const TuringBackward& backward : turing_backwards()) {
    add(backward.specs.main);
    if (backward.specs.passes_for_dq()) add(backward.specs.dq);
    add(backward_helper_spec(backward.specs.main, Op::backward_preprocess));
    if (backward.specs.main.adds_dq()) add(backward_helper_spec(backward.specs.main, Op::backward_convert));
  }
  return unique;
}

}  // namespace emulator
