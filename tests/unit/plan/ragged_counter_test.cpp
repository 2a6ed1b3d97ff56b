// Query tiles of packed batches and of calls over pages that come from a counter.

#include <gtest/gtest.h>

#include <algorithm>
#include <fa/error.hpp>
#include <string>
#include <vector>

#include "plan/call_plan.hpp"
#include "plan/catalogue.hpp"
#include "plan/early_start.hpp"
#include "plan/forward_launch.hpp"
#include "plan/planner.hpp"
#include "plan/sm90_forward.hpp"

namespace fa::plan {
namespace {

const Fixed kCounter{{"dynamic", 1}};
constexpr std::uintptr_t kBase = std::uintptr_t{1} << 40;

enum class Kind { packed, pages, packed_over_pages, contiguous };
constexpr Kind kKinds[] = {Kind::packed, Kind::pages, Kind::packed_over_pages, Kind::contiguous};

Problem problem_of(Kind kind, std::int64_t s_q = 4096) {
  Problem p;
  p.arch = parse_arch("sm_90a");
  p.d_qk = p.d_v = 128;
  p.causal = true;
  p.b = 4;
  p.h_q = 32;
  p.h_kv = 8;
  p.s_q = s_q;
  p.s_kv = 4096;
  p.varlen = kind == Kind::packed || kind == Kind::packed_over_pages;
  p.page_size = kind == Kind::packed ? 0 : kind == Kind::contiguous ? -1 : 16;
  if (p.varlen) p.total_q = 4 * s_q;
  if (kind == Kind::packed) p.total_kv = 4 * p.s_kv;
  return p;
}

TensorView view(std::int64_t b, std::int64_t heads, std::int64_t s) {
  auto* const memory = reinterpret_cast<void*>(kBase);
  return TensorView(memory, DType::bf16, {b, s, heads, 128}).swap_axes(1, 2);
}

ForwardTensors tensors_of(const Problem& p) {
  const TensorView rows = p.varlen ? view(1, p.h_q, p.total_q) : view(p.b, p.h_q, p.s_q);
  const std::int64_t page = p.page_size > 0 ? p.page_size : p.s_kv;
  const TensorView keys = p.paged() ? view(p.b * p.s_kv / page, p.h_kv, page) : view(1, p.h_kv, p.total_kv);
  return {rows, keys, keys, rows, {}};
}

std::string refusal(const Problem& p, const Fixed& fixed = kCounter) {
  try {
    plan_forward(p, fixed);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    return error.what();
  }
  return {};
}

/// A kernel and all that a tuner may take instead.
std::vector<KernelSpec> all_of(const ForwardPlan& plan) {
  std::vector<KernelSpec> specs = plan.alternatives;
  specs.push_back(plan.kernel);
  return specs;
}

TEST(RaggedCounter, IsTakenForManyTilesUnderACausalMask) {
  for (const Kind kind : kKinds) {
    const Problem p = problem_of(kind);
    const ForwardPlan usual = plan_forward(p, {}), counted = plan_forward(p, kCounter),
                      waves = plan_forward(p, {{"dynamic", 0}});
    SCOPED_TRACE(canonical(usual.kernel));
    EXPECT_TRUE(usual.kernel.dynamic());
    EXPECT_EQ(counted.kernel, usual.kernel);
    KernelSpec same = usual.kernel;
    same.as<Sm90Forward>().dynamic = false;
    EXPECT_EQ(waves.kernel, same);
    EXPECT_FALSE(may_start_early(usual.kernel));
    EXPECT_TRUE(std::ranges::all_of(all_of(counted), &KernelSpec::dynamic));
    EXPECT_TRUE(std::ranges::none_of(all_of(waves), &KernelSpec::dynamic));
    EXPECT_EQ(std::ranges::count_if(all_of(usual), &KernelSpec::dynamic),
              static_cast<std::ptrdiff_t>(all_of(counted).size()));
    EXPECT_EQ(forward_workspace_size(p, {}, 132).bytes, kCounterBytes);
    EXPECT_EQ(forward_workspace_size(p, kCounter, 132).bytes, kCounterBytes);
  }
}

/// Which of these is faster no rule says: a tuner may find out.
TEST(RaggedCounter, OfFewTilesIsAnAlternative) {
  Problem p = problem_of(Kind::packed, 200);
  p.b = 2;
  p.total_q = p.total_kv = 400;
  const ForwardPlan plan = plan_forward(p, {});
  EXPECT_FALSE(plan.kernel.dynamic());
  EXPECT_TRUE(std::ranges::any_of(plan.alternatives, &KernelSpec::dynamic));
  EXPECT_EQ(forward_workspace_size(p, {}, 132).bytes, kCounterBytes);
}

TEST(RaggedCounter, IsElsewhereTakenByAnOverrideAlone) {
  Variants window;
  window.left_window = true;
  for (const Kind kind : kKinds) {
    for (const bool causal : {false, true}) {
      Problem p = problem_of(kind);
      p.causal = causal;
      if (causal && kind == Kind::packed) {
        p.variants = &window;
        p.window_left = 500;
      } else if (causal) {
        p.d_qk = p.d_v = 256;
      }
      const ForwardPlan usual = plan_forward(p, {}), counted = plan_forward(p, kCounter);
      SCOPED_TRACE(canonical(usual.kernel));
      EXPECT_FALSE(usual.kernel.dynamic());
      EXPECT_TRUE(std::ranges::none_of(usual.alternatives, &KernelSpec::dynamic));
      EXPECT_EQ(forward_workspace_size(p, {}, 132).bytes, 0U);
      EXPECT_EQ(plan_forward(p, {{"dynamic", 0}}).kernel, usual.kernel);
      KernelSpec same = usual.kernel;
      same.as<Sm90Forward>().dynamic = true;
      EXPECT_EQ(counted.kernel, same);
      EXPECT_EQ(counted.alternatives.size(), usual.alternatives.size());
      EXPECT_TRUE(std::ranges::all_of(counted.alternatives, &KernelSpec::dynamic));
      EXPECT_EQ(forward_workspace_size(p, kCounter, 132).bytes, kCounterBytes);
    }
  }
}

TEST(RaggedCounter, IsNotOfCallsWhoseBlocksShareKeys) {
  for (const std::int64_t b : {1, 2, 40}) {
    Problem p = problem_of(Kind::pages, 1);
    p.b = b;
    p.s_kv = 8192;
    const KernelSpec usual = plan_forward(p, {}).kernel;
    EXPECT_TRUE(usual.split || usual.own_parts() || usual.scheduled()) << b;
    EXPECT_EQ(plan_forward(p, kCounter).kernel, usual) << b;
    EXPECT_FALSE(choose(p, kCounter).dynamic);
    EXPECT_EQ(forward_workspace_size(p, kCounter, 132).bytes, forward_workspace_size(p, {}, 132).bytes);
  }
  EXPECT_NO_THROW(check_forward_override(problem_of(Kind::pages), kCounter));
  Problem unaligned = problem_of(Kind::packed);
  unaligned.aligned = false;
  EXPECT_EQ(plan_forward(unaligned, kCounter).kernel, plan_forward(unaligned, {}).kernel);
}

TEST(RaggedCounter, IsRefusedByName) {
  Problem p = problem_of(Kind::packed);
  p.dropout = true;
  EXPECT_EQ(refusal(p), "kernel.dynamic = 1: accepted is 0 with dropout");
  Problem dense = problem_of(Kind::packed);
  dense.varlen = false;
  EXPECT_EQ(refusal(dense), "");
  EXPECT_TRUE(plan_forward(dense, kCounter).kernel.dynamic());
  EXPECT_FALSE(plan_forward(dense, {{"dynamic", 0}}).kernel.dynamic());
  dense.causal = false;
  EXPECT_EQ(refusal(dense), "kernel.dynamic = 1: accepted is 0 for dense batches without a causal mask");
  Variants window;
  window.left_window = true;
  dense.causal = true;
  dense.variants = &window;
  dense.window_left = 500;
  EXPECT_EQ(refusal(dense), "kernel.dynamic = 1: accepted is 0 with windows, chunks or masks of dense batches");
  p.dropout = false;
  p.variants = &window;
  p.window_left = 500;
  EXPECT_TRUE(plan_forward(p, kCounter).kernel.dynamic()) << "lengths differ";
  p.arch = parse_arch("sm_80");
  EXPECT_EQ(refusal(p), "kernel.dynamic = 1: accepted is 0: no kernel that serves this problem has a counter");
  EXPECT_EQ(refusal(p, {{"dynamic", 0}}), "");
  KernelSpec spec = plan_forward(problem_of(Kind::pages), kCounter).kernel;
  EXPECT_EQ(sm90_forward_refusal(spec), "");
  for (bool SpecHead::*const field : {&SpecHead::dropout, &SpecHead::split, &SpecHead::bounded}) {
    KernelSpec other = spec;
    other.*field = true;
    EXPECT_NE(sm90_forward_refusal(other).find("dynamic = true: not with"), std::string::npos);
  }
}

/// As many blocks as multiprocessors, or as a call may take, of one wave.
TEST(RaggedCounter, BlocksStayAndTheirCounterIsCleared) {
  for (const Kind kind : kKinds) {
    for (const bool bounded : {false, true}) {
      Problem p = problem_of(kind);
      p.bounded = bounded;
      p.accumulate = kind == Kind::packed;
      KernelSet kernels;
      kernels[Role::attention] = plan_forward(p, kCounter).kernel;
      SCOPED_TRACE(canonical(kernels[Role::attention]));
      ASSERT_TRUE(kernels[Role::attention].dynamic());
      EXPECT_FALSE(kernels[Role::attention].bounded);
      CallPlan call;
      const int multiprocessors = bounded ? 24 : 132;
      plan_call(p, choose(p, kCounter), kernels, tensors_of(p), {0.5, multiprocessors, false, {}}, call);
      const kernel::ForwardParams& params = call.forward_params.attention.base;
      EXPECT_EQ(call.step(Role::attention)->grid, multiprocessors);
      EXPECT_FALSE(call.step(Role::attention)->early);
      EXPECT_EQ(params.sequences.wave, 0);
      EXPECT_EQ(params.heads_in_flight, p.varlen ? 32 : 128) << "32 KV heads of 2 MB each at most";
      EXPECT_EQ(call.cleared, sizeof(std::int32_t));
      EXPECT_EQ(call.workspace.bytes(), forward_workspace_size(p, kCounter, multiprocessors).bytes);
      call.bind(call.workspace.addresses(reinterpret_cast<std::byte*>(kBase), nullptr));
      EXPECT_EQ(params.next_tile, reinterpret_cast<std::int32_t*>(kBase));
    }
  }
}

/// The bits of rows are the same: blocks that share splits count these.
TEST(RaggedCounter, OfInvariantRowsIsWhereABlockFoldsSplits) {
  Problem p = problem_of(Kind::packed);
  p.invariance = Invariance::rows;
  const KernelSpec folds = plan_forward(p, kCounter).kernel;
  EXPECT_TRUE(folds.dynamic() && folds.split_keys() > 0 && !folds.split);
  EXPECT_EQ(forward_workspace_size(p, kCounter, 132).bytes, kCounterBytes);
  p.b = 1;
  p.s_q = p.total_q = 64;
  p.total_kv = p.s_kv;
  const KernelSpec shares = plan_forward(p, kCounter).kernel;
  EXPECT_TRUE(shares.split && !shares.dynamic());
}

}  // namespace
}  // namespace fa::plan
