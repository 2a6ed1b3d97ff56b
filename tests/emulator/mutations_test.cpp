// Deliberate mistakes in the kernel text: every one is caught, and called by its name.

#include "emulator/mutations.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <random>
#include <set>
#include <span>
#include <string>
#include <utility>

#include "emulator/append_run.hpp"
#include "emulator/backward_run.hpp"
#include "emulator/backward_specs.hpp"
#include "emulator/forward_run.hpp"
#include "emulator/merge_run.hpp"
#include "emulator/paged_run.hpp"
#include "emulator/schedule_run.hpp"
#include "emulator/sm90_backward_cases.hpp"
#include "emulator/specs.hpp"
#include "emulator/variant_specs.hpp"
#include "plan/catalogue.hpp"
#include "support/thorough.hpp"

namespace emulator {
namespace {

struct Size {
  std::int64_t s_q, s_kv;
};
/// The first one: ragged everywhere, four key tiles, two query tiles (of 32 rows, or two heads in one persistent
/// block). Some mistakes show in others alone: under a diagonal, in a second query tile, where rows keep no key.
constexpr std::array<Size, 5> kSizes{{{43, 101}, {150, 190}, {70, 70}, {150, 151}, {130, 70}}};
constexpr double kWrong = 0.05;

ForwardCase case_of(const Mutation& mutation, const Size& size = kSizes[0]) {
  ForwardCase c;
  c.spec = mutation.subject.spec;
  c.attention.dtype = mutation.subject.spec.dtype;
  c.attention.d_qk = mutation.subject.spec.d_qk;
  c.attention.d_v = mutation.subject.spec.d_v;
  c.attention.causal = mutation.subject.spec.causal;
  c.attention.b = mutation.subject.entries;
  c.attention.h_kv = mutation.subject.entries;
  c.attention.h_q = 2 * c.attention.h_kv;
  c.attention.s_q = size.s_q;
  c.attention.s_kv = size.s_kv;
  c.splits = splits_of(mutation.subject.spec, 2);
  c.blocks = 1;
  if (mutation.subject.spec.kernel().tensor_maps) c.attention.scale = mutation.subject.scale;
  if (mutation.subject.choice.empty() || mutation.subject.spec.page_size != 0) return c;
  static std::map<std::pair<std::string, std::int64_t>, fa::test::VariantCase> cases;  // of a choice and a size
  const auto kernels = std::ranges::find(hopper_variant_kernels(), mutation.subject.choice, &VariantKernels::choice);
  c.attention.causal = kernels->attention.causal;
  c.variant =
      &cases.try_emplace({mutation.subject.choice, size.s_q}, variant_case(*kernels, c.attention)).first->second;
  return c;
}

ForwardKernels kernels_with(const Mutation& mutation, const ForwardCase& c) {
  ForwardKernels kernels = kernels_of(c);
  const bool combine = mutation.header == "common/forward_combine.cuh";
  (combine ? kernels.combine : kernels.attention) = "mutant " + mutation.name;
  return kernels;
}

constexpr std::int64_t kSpoiltRows = 6;

BackwardCase backward_case_of(const Mutation& mutation) {
  const ForwardCase forward = case_of(mutation);
  BackwardCase c;
  c.specs = backward_specs_of(mutation);
  c.attention = forward.attention;
  if (c.specs.main.family() == fa::plan::Family::sm90) {  // two key tiles in one block, six steps each
    c.attention.s_q = 150;
    c.attention.s_kv = 160;
    c.attention.scale.reset();
  }
  if (c.specs.main.ordered_dq()) {  // a key tile a block, which wait for each other
    c.attention.s_kv = 500;
    c.blocks = 4 * static_cast<int>(c.attention.b * c.attention.h_kv);
  }
  c.splits = c.specs.main.split ? 2 : 1;
  if (c.specs.main.in_turns()) {
    c.splits = 3;
    c.attention.h_q = c.splits * c.attention.h_kv;
  }
  c.attention.causal = c.specs.main.causal;
  if (mutation.subject.spoilt == Spoilt::row) c.attention.s_kv = c.attention.s_q - kSpoiltRows;
  if (mutation.subject.spoilt == Spoilt::key) c.attention.causal_align = fa::CausalAlign::top_left;
  return c;
}

/// The first row of every head, before the first key; or the first key behind the last row.
BackwardData data_of(const Mutation& mutation, const BackwardCase& c) {
  BackwardData data = make_backward_data(c);
  if (mutation.subject.spoilt == Spoilt::row) {
    fill(data.inputs.q, {0, 1}, std::nan(""));
    fill(data.dout, {0, 1}, std::nan(""));
  }
  if (mutation.subject.spoilt == Spoilt::key) fill(data.inputs.k, {c.attention.s_q, 1}, std::nan(""));
  return data;
}

BackwardKernelNames kernels_with(const Mutation& mutation, const BackwardCase& c) {
  using fa::plan::Op;
  BackwardKernelNames kernels = kernels_of(c);
  const Op op = mutation.subject.spec.op();
  (op == Op::backward              ? kernels.main
   : op == Op::backward_dq         ? kernels.dq
   : op == Op::backward_preprocess ? kernels.preprocess
   : op == Op::backward_convert    ? kernels.convert
                                   : kernels.reduce) = "mutant " + mutation.name;
  return kernels;
}

double error_of(const ForwardCase& c, const fa::test::AttentionInputs& inputs,
                const fa::test::AttentionOutputs& actual) {
  const fa::test::AttentionOutputs expected =
      c.variant != nullptr ? fa::test::reference_f64(*c.variant, inputs) : fa::test::reference_f64(c.attention, inputs);
  // What is added to all scores of a row shows in its sum alone.
  return std::max(fa::test::compare(actual.o.view(), expected.o.view()).max_abs,
                  fa::test::lse_max_abs_error(actual.lse.view(), expected.lse.view()));
}

/// A mutant that breaks no rule of the machine must at least be wrong in one size, which what it was made of is not in
/// any: kernels take one of them in turn, in a thorough run all. `error(size)` runs it.
template <class Error>
void judge_sizes(const Mutation& mutation, bool changed, const Error& error) {
  double worst = 0;
  const std::size_t turn = mutation.name.size();  // as good as any number that differs
  for (const Size& size : changed ? std::span<const Size>(kSizes) : fa::test::tried(kSizes, turn)) {
    worst = std::max(worst, error(size));
    if (changed && worst > kWrong) break;
  }
  if (!changed) {
    EXPECT_LT(worst, 0.03);
    return;
  }
  EXPECT_TRUE(mutation.faults.empty()) << "not caught";
  EXPECT_GT(worst, kWrong) << "harmless";
}

double relative_error(const fa::test::HostTensor& actual, const fa::test::HostTensor& expected) {
  fa::test::HostTensor zero = expected;
  std::ranges::fill(zero.bytes(), std::byte{0});
  return fa::test::compare(actual.view(), expected.view()).max_abs /
         fa::test::compare(zero.view(), expected.view()).max_abs;
}

void expect_wrong(const Mutation& mutation, const BackwardCase& c, const BackwardData& data,
                  const fa::test::AttentionGradients& actual) {
  const fa::test::AttentionGradients expected =
      fa::test::reference_gradients_f64(c.attention, data.inputs, data.dout.view(), {});
  EXPECT_TRUE(mutation.faults.empty()) << "not caught";
  const auto [wants_dq, wants_dk, wants_dv] = c.specs.gradients();
  const double worst = std::max({wants_dq ? relative_error(actual.dq, expected.dq) : 0,
                                 wants_dk ? relative_error(actual.dk, expected.dk) : 0,
                                 wants_dv ? relative_error(actual.dv, expected.dv) : 0});
  EXPECT_GT(worst, 0.05) << "harmless";
}

void expect_right(const BackwardCase& c, const BackwardData& data, const fa::test::AttentionGradients& actual) {
  const fa::test::AttentionGradients expected =
      fa::test::reference_gradients_f64(c.attention, data.inputs, data.dout.view(), {});
  const auto [wants_dq, wants_dk, wants_dv] = c.specs.gradients();
  if (wants_dq) {
    EXPECT_LT(relative_error(actual.dq, expected.dq), 0.02);
  }
  if (wants_dk) {
    EXPECT_LT(relative_error(actual.dk, expected.dk), 0.02);
  }
  if (wants_dv) {
    EXPECT_LT(relative_error(actual.dv, expected.dv), 0.02);
  }
}

/// How far gradients are off; rows that kernels leave alone are NaN, and 0 in what is expected.
double worst_of(const fa::test::HostTensor& actual, const fa::test::HostTensor& expected, bool all) {
  double worst = 0, largest = 0;
  const fa::TensorView view = expected.view();
  for_each_row(view.shape[0], view.shape[1], view.shape[2], [&](std::int64_t b, std::int64_t h, std::int64_t s) {
    for (std::int64_t d = 0; d < view.shape[3]; ++d) {
      const double wanted = expected.at(b, h, s, d), got = actual.at(b, h, s, d);
      largest = std::max(largest, std::abs(wanted));
      if (!all && std::isnan(got) && wanted == 0) continue;
      worst = std::isnan(got) ? HUGE_VAL : std::max(worst, std::abs(got - wanted));
    }
  });
  return worst / largest;
}

void run_hopper_backward(const Mutation& mutation, bool changed, std::uint64_t seed) {
  const Sm90BackwardVariant& kernel = *mutation.subject.hopper_backward;
  PackedCase c = sm90_backward_case(kernel, 1);  // which has rows of no sequence, NaN
  const fa::test::VariantCase variant = variant_of(kernel, c);
  if (mutation.subject.spec.variants.any()) c.variant = &variant;
  if (changed) c.main_kernel = "mutant " + mutation.name;
  c.schedule = seed;
  if (kernel.varlen) c.main_blocks = 1;  // which then has many jobs
  const BackwardData data = make_data(c);
  const fa::test::AttentionGradients actual = run_packed(backward_specs_of(kernel), c, data);
  const fa::test::AttentionGradients expected = expected_of(c, data);
  const bool all = !c.sequences || c.clear;
  const double worst = std::max({worst_of(actual.dq, expected.dq, all), worst_of(actual.dk, expected.dk, all),
                                 worst_of(actual.dv, expected.dv, all)});
  if (!changed) {
    EXPECT_LT(worst, 0.02);
    return;
  }
  EXPECT_TRUE(mutation.faults.empty()) << "not caught";
  EXPECT_GT(worst, 0.05) << "harmless";
}

/// Two sequences that start behind other rows and keys, dropout, or both.
double error_of_packed_forward(const Mutation& mutation, bool changed, std::uint64_t seed, const Size& size) {
  PackedCase c;
  c.attention = case_of(mutation, size).attention;
  c.attention.causal = mutation.subject.spec.causal;
  c.attention.h_q = 4;
  c.attention.h_kv = 2;
  c.dropout = mutation.subject.spec.dropout ? 0.3f : 0;  // whose digits all count
  if (mutation.subject.spec.varlen) {
    c.sequences = Sequences{{3, 43, 90}, {5, 86, 180}, {}, {}};
    c.attention.s_q = 90;
    c.attention.s_kv = 180;
  }
  c.schedule = seed;
  if (changed) c.main_kernel = "mutant " + mutation.name;
  const fa::test::AttentionInputs inputs = fa::test::make_inputs(c.attention);
  const fa::test::AttentionOutputs actual = run_packed(mutation.subject.spec, c, inputs);
  return worst_of(actual.o, expected_of(c, inputs).o, !c.sequences);
}

/// Few requests, of which parts share items, and many, in one block and in several.
void run_schedule_of(const Mutation& mutation, bool changed, std::uint64_t seed) {
  std::mt19937_64 engine(seed);
  std::string found;
  for (const std::int64_t b : {12, 25, 50, 1500, 2500}) {
    const fa::plan::Problem problem = schedule_problem({mutation.subject.spec, {}}, b, 2, 2000);
    const Lengths lengths = random_lengths(problem, engine, true);
    const fa::test::ScheduleLists lists =
        run_schedule(problem, mutation.subject.spec, lengths, 132, seed, changed ? "mutant " + mutation.name : "");
    found += difference(problem, mutation.subject.spec, lengths, lists);
  }
  EXPECT_EQ(found.empty(), !changed) << "harmless";
  EXPECT_TRUE(mutation.faults.empty() || !changed) << "not caught";
}

/// Requests whose first positions, and last ones, stand amid pages and tiles.
void run_over_pages(const Mutation& mutation, bool changed, std::uint64_t seed) {
  fa::test::PagedCase c;
  c.attention = case_of(mutation).attention;
  c.attention.causal = mutation.subject.spec.causal;
  c.attention.h_q = 4;
  c.attention.h_kv = 2;
  c.page_size = mutation.subject.spec.page_size;
  c.packed = mutation.subject.spec.varlen;
  c.indexed = true;
  if (!mutation.subject.choice.empty())
    c.variant = paged_kernel(mutation.subject.choice, mutation.subject.spec.family()).choice;
  c.rows = c.packed ? std::vector<std::int32_t>{37, 20, 1, 4} : std::vector<std::int32_t>(4, 20);
  c.keys = {37, 80, 5, 64};
  const bool scheduled = mutation.subject.spec.scheduled() || mutation.subject.spec.own_parts();
  if (scheduled || mutation.subject.spec.split) c.keys = {37, 580, 5, 264};
  const bool by_copy_engine = mutation.subject.spec.kernel().tensor_maps;
  set_storage(mutation.subject.spec, c);
  if (!by_copy_engine) c.begin = {3, 41, 0, 9};
  const fa::test::PagedData data = make_data(c);
  const bool wide = mutation.subject.spec.is<fa::plan::Sm90WideForward>();
  const int blocks = mutation.subject.spec.dynamic() ? 3 : wide ? 6 : 24;  // some have several query tiles
  PagedRun how{.schedule = seed, .multiprocessors = blocks, .launches = scheduled ? 2 : 0};
  if (changed) how.kernel = "mutant " + mutation.name;
  fa::test::AttentionOutputs actual;
  try {
    actual = run_paged(mutation.subject.spec, c, data, how);
  } catch (const NotWritten& problem) {
    EXPECT_TRUE(changed && mutation.faults.empty()) << problem.what();
    return;
  }
  const double worst = emulator::worst_of(c, data, actual.o, reference_f64(c, data).o);
  if (!changed) {
    EXPECT_LT(worst, 0.03);
    return;
  }
  EXPECT_TRUE(mutation.faults.empty()) << "not caught";
  EXPECT_GT(worst, 0.05) << "harmless";
}

/// Random calls that a mutant is given, some of which show the mistake; the kernel itself a few, which other tests give
/// many, too.
std::uint32_t draws(bool changed) {
  return changed || fa::test::thorough() ? 60 : 6;
}

/// Many calls, some of which show the mistake.
void run_append_of(const Mutation& mutation, bool changed, std::uint64_t seed) {
  fa::test::AppendCase c = *mutation.subject.append;
  bool wrong = false;
  for (std::uint32_t draw = 0; draw < draws(changed); ++draw) {
    draw_requests(c, static_cast<std::uint32_t>(seed) * 60 + draw);
    const fa::test::AppendData data(c);
    const auto after = run_append(c, data, mutation.subject.spec, seed, changed ? "mutant " + mutation.name : "");
    wrong = wrong || !data.judge(after).empty();
    if (wrong && mutation.faults.empty()) break;
  }
  EXPECT_EQ(wrong, changed) << "harmless";
  EXPECT_TRUE(mutation.faults.empty() || !changed) << "not caught";
}

/// Likewise merges.
void run_merge_of(const Mutation& mutation, bool changed, std::uint64_t seed) {
  fa::test::MergeCase c = *mutation.subject.merge;
  bool wrong = false;
  for (std::uint32_t draw = 0; draw < draws(changed); ++draw) {
    draw_rows(c, static_cast<std::uint32_t>(seed) * 60 + draw);
    const fa::test::MergeData data(c);
    const auto after = run_merge(c, data, mutation.subject.spec, seed, changed ? "mutant " + mutation.name : "");
    wrong = wrong || !data.judge(after).empty();
    if (wrong && mutation.faults.empty()) break;
  }
  EXPECT_EQ(wrong, changed) << "harmless";
  EXPECT_TRUE(mutation.faults.empty() || !changed) << "not caught";
}

/// Forwards that add to a state.
void run_accumulating(const Mutation& mutation, bool changed, std::uint64_t seed) {
  ForwardCase c = case_of(mutation);
  c.attention.causal = c.spec.causal;
  c.attention.scale.reset();
  const fa::test::AttentionOutputs state = make_state(c);
  c.state = &state;
  const fa::test::AttentionInputs inputs = make_inputs(c);
  const fa::test::AttentionOutputs actual =
      run_forward(c, inputs, changed ? kernels_with(mutation, c) : kernels_of(c), seed);
  const fa::test::AttentionOutputs expected = joined(fa::test::reference_f64(c.attention, inputs), state);
  const double worst = std::max(fa::test::compare(actual.o.view(), expected.o.view()).max_abs,
                                fa::test::lse_max_abs_error(actual.lse.view(), expected.lse.view()));
  if (!changed) {
    EXPECT_LT(worst, 0.03);
    return;
  }
  EXPECT_TRUE(mutation.faults.empty()) << "not caught";
  EXPECT_GT(worst, 0.05) << "harmless";
}

/// Runs the mutant, or with `changed` = false what it was made of.
void run(const Mutation& mutation, bool changed, std::uint64_t seed) {
  if (mutation.subject.hopper_backward) {
    run_hopper_backward(mutation, changed, seed);
  } else if (mutation.subject.append) {
    run_append_of(mutation, changed, seed);
  } else if (mutation.subject.merge) {
    run_merge_of(mutation, changed, seed);
  } else if (mutation.subject.spec.accumulate) {
    run_accumulating(mutation, changed, seed);
  } else if (is_backward(mutation)) {
    const BackwardCase c = backward_case_of(mutation);
    const BackwardData data = data_of(mutation, c);
    const fa::test::AttentionGradients actual =
        run_backward(c, data, changed ? kernels_with(mutation, c) : kernels_of(c), seed);
    if (changed) {
      expect_wrong(mutation, c, data, actual);
    } else {
      expect_right(c, data, actual);
    }
  } else if (is_of_schedule(mutation)) {
    run_schedule_of(mutation, changed, seed);
  } else if (mutation.subject.spec.page_size != 0) {
    run_over_pages(mutation, changed, seed);
  } else if (mutation.subject.spec.varlen || mutation.subject.spec.dropout) {
    judge_sizes(mutation, changed,
                [&](const Size& size) { return error_of_packed_forward(mutation, changed, seed, size); });
  } else {
    judge_sizes(mutation, changed, [&](const Size& size) {
      const ForwardCase c = case_of(mutation, size);
      const fa::test::AttentionInputs inputs = make_inputs(c);
      return error_of(c, inputs, run_forward(c, inputs, changed ? kernels_with(mutation, c) : kernels_of(c), seed));
    });
  }
}

class Mutants : public testing::TestWithParam<std::size_t> {};

TEST_P(Mutants, AreCaughtAndNamed) {
  const Mutation& mutation = mutations()[GetParam()];
  constexpr std::array<std::uint64_t, 3> kSeeds{1, 2, 3};
  for (const std::uint64_t seed : fa::test::tried(kSeeds, GetParam())) {
    try {
      run(mutation, true, seed);
    } catch (const Fault& fault) {
      EXPECT_TRUE(mutation.faults.contains(fault.kind)) << fault.what();
      RecordProperty("fault", fault.what());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernel, Mutants, testing::ValuesIn(built_mutations()),
                         [](const testing::TestParamInfo<std::size_t>& parameter) {
                           return mutations()[parameter.param].name;
                         });

TEST(Mutants, ADeadlockNamesTheBarrier) {
  const std::pair<const char*, const char*> expected[] = {
      {"hopper_backward_q_and_dout_not_released", "mbarrier step_empty(stage) at"},
      {"hopper_dq_alone_buffers_not_released", "mbarrier step_empty(stage) at"}};
  for (const auto& [name, barrier] : expected) {
    const auto mutation = std::ranges::find(mutations(), name, &Mutation::name);
    ASSERT_NE(mutation, mutations().end());
    const auto place = static_cast<std::size_t>(mutation - mutations().begin());
    if (std::ranges::find(built_mutations(), place) == built_mutations().end()) continue;
    try {
      run(*mutation, true, 1);
      ADD_FAILURE() << name;
    } catch (const Fault& fault) {
      EXPECT_NE(std::string(fault.what()).find(barrier), std::string::npos) << fault.what();
    }
  }
}

TEST(Mutants, TheUnchangedKernelsHaveNoFault) {
  std::set<std::string> done;
  for (const Mutation& mutation : mutations()) {
    const std::string name = canonical(mutation.subject.spec) +
                             std::to_string(static_cast<int>(mutation.subject.spoilt)) +
                             (is_of_schedule(mutation) ? "schedule" : "") +
                             (mutation.subject.append ? to_string(*mutation.subject.append) : "") +
                             (mutation.subject.merge ? to_string(*mutation.subject.merge) : "");
    if (!done.insert(name).second) continue;
    SCOPED_TRACE(mutation.name);
    EXPECT_NO_THROW(run(mutation, false, 1));
  }
}

}  // namespace
}  // namespace emulator
