// What kernels may follow from: the facts of a request, of the batch around it, of the device.

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include <fa/error.hpp>

#include "plan/backward.hpp"
#include "plan/catalogue.hpp"
#include "plan/planner.hpp"
#include "plan/row_arithmetic.hpp"

namespace fa::plan {
namespace {

template <class Of>
concept KnowsBatch = requires(Of facts) {
  facts.b;
}
|| requires(Of facts) {
  facts.varlen;
}
|| requires(Of facts) {
  facts.aligned;
};
template <class Of>
concept KnowsRequest = requires(Of facts) {
  facts.s_q;
}
|| requires(Of facts) {
  facts.s_kv;
}
|| requires(Of facts) {
  facts.h_q;
}
|| requires(Of facts) {
  facts.causal;
};
template <class Of>
concept KnowsDevice = requires(Of facts) {
  facts.arch;
}
|| requires(Of facts) {
  facts.bounded;
};

static_assert(KnowsBatch<Problem> && KnowsRequest<Problem> && KnowsDevice<Problem>);
static_assert(KnowsRequest<RequestFacts> && !KnowsBatch<RequestFacts> && !KnowsDevice<RequestFacts>);
static_assert(KnowsBatch<BatchFacts> && !KnowsRequest<BatchFacts> && !KnowsDevice<BatchFacts>);
static_assert(KnowsDevice<DeviceFacts> && !KnowsRequest<DeviceFacts> && !KnowsBatch<DeviceFacts>);
static_assert(!KnowsRequest<RowFacts> && !KnowsBatch<RowFacts> && !KnowsDevice<RowFacts>);
// What makes them sees no more than they say.
static_assert(std::is_same_v<decltype(&row_arithmetic), RowArithmetic (*)(const RowFacts&) noexcept>);
static_assert(std::is_same_v<decltype(&alone), Problem (*)(const RequestFacts&, const DeviceFacts&) noexcept>);
static_assert(
    std::is_same_v<decltype(&combine_spec), KernelSpec (*)(const RequestFacts&, const DeviceFacts&) noexcept>);

class FactsOf : public ::testing::TestWithParam<const char*> {
 protected:
  std::int64_t of(const std::vector<std::int64_t>& values) { return values[random_() % values.size()]; }
  bool coin() { return random_() % 2 == 0; }

  Problem request(Invariance invariance) {
    Problem problem;
    problem.arch = parse_arch(GetParam());
    problem.dtype = of({0, 0, 1}) == 0 ? DType::bf16 : DType::f32;
    problem.d_qk = static_cast<int>(of({64, 128, 192, 256}));
    problem.d_v = problem.d_qk == 192 ? 128 : problem.d_qk;
    problem.causal = coin();
    problem.dropout = invariance == Invariance::none && of({0, 0, 1}) == 1;
    problem.invariance = invariance;
    problem.h_kv = of({1, 2, 8});
    problem.h_q = problem.h_kv * of({1, 4});
    problem.s_q = of({1, 64, 200, 1000, 8192});
    problem.s_kv = of({1, 513, 8192, 131072});
    return problem;
  }

  /// Other company, and other tensors, for the same request.
  Problem in_company(const Problem& request) {
    Problem problem = request;
    BatchFacts& batch = problem;
    batch.b = of({1, 2, 7, 64, 1024});
    batch.aligned = coin();
    batch.tensor_maps = coin();
    batch.varlen = coin();
    problem.page_size = static_cast<int>(of({0, 0, 16, 256}));
    batch.total_q = batch.varlen ? batch.b * problem.s_q : 0;
    batch.total_kv = batch.varlen && problem.page_size == 0 ? batch.b * problem.s_kv : 0;
    return problem;
  }

  std::mt19937 random_{1};
};
INSTANTIATE_TEST_SUITE_P(Archs, FactsOf, ::testing::Values("sm_80", "sm_90a", "sm_120a"),
                         [](const auto& arch) { return std::string(arch.param); });

/// The first choices of a call, by the names of their kernels.
using Texts = std::map<std::string_view, std::string>;

void add(const std::vector<Alternatives>& kernels, Texts* texts) {
  for (const Alternatives& specs : kernels) texts->emplace(specs.front().kernel().name, canonical(specs.front()));
}

/// With the kernels around them that no call of these may need.
Texts texts_of(const Problem& problem) {
  Texts texts;
  const ForwardPlan forward = plan_forward(problem, {});
  add(kernels_of(forward), &texts);
  add({{forward.combine}, {row_norms_spec(forward.kernel)}, {clear_padding_spec(problem.arch, problem.dtype)}}, &texts);
  if (!problem.paged()) {
    const BackwardPlan backward = plan_backward(problem, {}, false);
    add(kernels_of(backward), &texts);
    add({{backward.reduce}, {backward.convert}, {backward.sink}}, &texts);
  }
  return texts;
}

/// Kernels of one request in changing company: those that are always the same, declare that they know nothing of it,
/// and no others do.
TEST_P(FactsOf, BatchesReachThoseKernelsThatSaySo) {
  std::set<std::string_view> seen, changed;
  for (int i = 0; i < 200; ++i) {
    const Problem one = request(Invariance::none);
    const Texts alone = texts_of(one);
    for (int company = 0; company < 6; ++company) {
      for (const auto& [name, text] : texts_of(in_company(one))) {
        const auto same = alone.find(name);
        if (same == alone.end()) continue;
        seen.insert(name);
        if (same->second == text) continue;
        changed.insert(name);
        EXPECT_EQ(find_kernel(name)->keyed_on, Facts::call) << same->second << "\n" << text;
      }
    }
  }
  for (const std::string_view name : seen) {
    EXPECT_EQ(changed.contains(name), find_kernel(name)->keyed_on == Facts::call) << name;
  }
  for (const char* const name : {"forward_combine", "row_norms", "clear_padding", "backward_reduce"}) {
    EXPECT_TRUE(seen.contains(name)) << name;
  }
}

/// Of dense calls; ragged ones have the bits of rows (invariance_test.cpp).
TEST_P(FactsOf, ARequestAloneDecidesKernelsOfInvariantBatches) {
  for (int i = 0; i < 400; ++i) {
    const Problem one = request(Invariance::batch);
    Problem many = in_company(one);
    many.varlen = false;
    many.page_size = 0;
    KernelSpec kernel = plan_forward(many, {}).kernel;
    Choice choice = choose(many, {});
    EXPECT_EQ(kernel.whole_tiles(), choice.whole_tiles);
    if (choice.whole_tiles) kernel.as<Sm90Forward>().whole_tiles = choice.whole_tiles = false;  // changes no bit
    EXPECT_EQ(canonical(kernel), canonical(plan_forward(one, {}).kernel));
    EXPECT_EQ(choice.slot(), choose(one, {}).slot());
    EXPECT_EQ(choice.splits, choose(one, {}).splits);
    many.aligned = false;
    EXPECT_THROW(check_invariant(many, {}), Error);
  }
}

/// A family serves a call if what it lets bits follow from is no more than what the call allows.
TEST_P(FactsOf, FamiliesServeCallsWhoseBitsFollowFromEnough) {
  std::set<Facts> met;
  for (const ForwardFamily* const family : forward_families()) {
    for (const Invariance invariance : {Invariance::none, Invariance::batch, Invariance::rows}) {
      for (const bool varlen : {false, true}) {
        for (const DType dtype : {DType::bf16, DType::e4m3}) {
          Problem problem;
          problem.arch = parse_arch(GetParam());
          problem.dtype = dtype;
          problem.d_qk = problem.d_v = family->family == Family::sm90_wide ? 512 : 128;
          problem.varlen = varlen;
          const bool fits = family->misfit == nullptr || family->misfit(problem) == nullptr;
          problem.invariance = invariance;
          met.insert(problem.bits_of());
          const bool serves = family->misfit == nullptr || family->misfit(problem) == nullptr;
          EXPECT_EQ(serves, fits && family->bits_of <= problem.bits_of())
              << to_string(family->family) << " " << static_cast<int>(invariance) << " " << varlen;
        }
      }
    }
  }
  EXPECT_EQ(met.size(), 3U);
}

}  // namespace
}  // namespace fa::plan
