// Forward and backward of ranks in this process against one device, in float64: every scheme and layout.

#include <gtest/gtest.h>

#include "support/thorough.hpp"
#include "unit/parallel/parallel_case.hpp"

namespace fa {
namespace {

using test::Differences;
using test::ParallelCase;

constexpr double kBound = 1e-11;

void expect_same(const ParallelCase& c, bool shares_memory) {
  SCOPED_TRACE(to_string(c) + (shares_memory ? ", sharing memory" : ""));
  LocalGroupOptions options;
  options.shares_memory = shares_memory;
  options.seed = c.seed;
  options.max_delay = std::chrono::microseconds(c.seed % 3 == 0 ? 300 : 0);
  try {
    const Differences off = run_case(c, options);
    EXPECT_LT(off.o, kBound) << "o";
    EXPECT_LT(off.lse, kBound) << "lse";
    EXPECT_LT(off.dq, kBound) << "dq";
    EXPECT_LT(off.dk, kBound) << "dk";
    EXPECT_LT(off.dv, kBound) << "dv";
    EXPECT_LT(off.dsink, kBound) << "dsink";
  } catch (const std::exception& problem) {
    ADD_FAILURE() << problem.what();
  }
}

void expect_same(const ParallelCase& c) {
  for (const bool shares_memory : {false, true}) expect_same(c, shares_memory);
}

struct Way {
  const char* name;
  Scheme scheme;
  int ulysses;  ///< 0: as the scheme has it
  bool late = false;
};
constexpr Way kWays[] = {{"ring", Scheme::ring, 0},
                         {"all_gather", Scheme::all_gather, 0},
                         {"ulysses", Scheme::ulysses, 0},
                         {"ulysses_ring", Scheme::ring, 2},
                         {"ulysses_all_gather", Scheme::all_gather, 2},
                         {"ring_own_last", Scheme::ring, 0, true},
                         {"ulysses_ring_own_last", Scheme::ring, 2, true}};
constexpr ShardLayout kLayouts[] = {ShardLayout::contiguous, ShardLayout::zigzag, ShardLayout::striped};

class Parallel : public testing::TestWithParam<std::tuple<int, int>> {
 protected:
  ParallelCase usual(int ranks) const {
    const Way& way = kWays[std::get<0>(GetParam())];
    ParallelCase c;
    c.ranks = ranks;
    c.scheme = way.scheme;
    c.ulysses = way.ulysses;
    c.layout = kLayouts[std::get<1>(GetParam())];
    c.h_kv = way.scheme == Scheme::ulysses ? ranks : way.ulysses > 0 ? 2 : 1;
    if (way.scheme == Scheme::all_gather) c.h_kv *= 2;
    c.late = way.late;
    if (way.late) c.h_kv *= 3;
    c.h_q = 2 * c.h_kv;
    c.s_q = c.s_kv = 4 * ranks;
    if (way.late) c.lengths = {8 * ranks, 0, 4 * ranks};
    return c;
  }
  /// Under sanitizers each case has one layout in turn, and in a thorough run all: they differ in what is whose row.
  void expect_same(const ParallelCase& c) {
    const std::size_t turn = cases_++ + static_cast<std::size_t>(std::get<0>(GetParam()));
    const auto layout = static_cast<std::size_t>(std::get<1>(GetParam()));
    if (test::kSanitized && !test::alternates(turn, layout, std::size(kLayouts))) return;
    fa::expect_same(c);
  }
  bool takes(int ranks) const { return kWays[std::get<0>(GetParam())].ulysses == 0 || ranks % 2 == 0; }

 private:
  std::size_t cases_ = 0;
};

TEST_P(Parallel, AnyNumberOfRanks) {
  for (const int ranks : {1, 2, 3, 4, 5, 8, 16}) {
    if (!takes(ranks)) continue;
    ParallelCase c = usual(ranks);
    c.seed = static_cast<std::uint64_t>(ranks);
    for (const bool causal : {true, false}) {
      c.causal = causal;
      if (ranks == 16 && !causal) continue;
      expect_same(c);
    }
  }
}

TEST_P(Parallel, Masks) {
  ParallelCase c = usual(4);
  c.s_q = c.s_kv = 48;
  c.b = 2;
  c.window_left = 7;
  expect_same(c);
  c.causal = false;
  c.window_right = 3;
  c.seed = 3;
  expect_same(c);
  c.window_left = c.window_right = -1;
  c.chunk = 12;
  expect_same(c);
  c.causal = true;
  expect_same(c);
  c.chunk = 0;
  c.window_left = 0;
  expect_same(c);
}

TEST_P(Parallel, DifferentLengths) {
  ParallelCase c = usual(4);
  c.s_q = 16;
  c.s_kv = 40;
  for (const CausalAlign align : {CausalAlign::bottom_right, CausalAlign::top_left}) {
    c.align = align;
    expect_same(c);
  }
  c.s_q = 40;
  c.s_kv = 16;  // rows without keys
  c.align = CausalAlign::bottom_right;
  expect_same(c);
  c.sink = c.dlse = true;
  expect_same(c);
}

TEST_P(Parallel, Functions) {
  ParallelCase c = usual(4);
  c.s_q = c.s_kv = 48;
  c.alibi = true;
  c.rows_first = true;
  expect_same(c);
  c.documents = true;
  c.causal = false;
  c.seed = 6;
  expect_same(c);
  c.alibi = false;
  c.window_left = 9;
  expect_same(c);
}

TEST_P(Parallel, SinksAndGradientsOfLogarithms) {
  ParallelCase c = usual(4);
  c.sink = true;
  expect_same(c);
  c.dlse = true;
  c.d_qk = 16;
  c.b = 2;
  c.seed = 3;
  expect_same(c);
}

TEST_P(Parallel, Dropout) {
  ParallelCase c = usual(2);
  c.s_q = c.s_kv = 128;
  c.dropout = 0.25F;
  if (!c.lengths.empty()) c.lengths = {256, 128};
  if (c.layout == ShardLayout::striped) {
    EXPECT_THROW(ContextParallel::create(c.config(), make_local_group(2)[0], c.layout), Error);
    return;
  }
  expect_same(c);
}

TEST_P(Parallel, PackedBatches) {
  ParallelCase c = usual(4);
  c.lengths = {8, 32, 16, 0, 64};
  expect_same(c);
  c.causal = false;
  c.seed = 3;
  expect_same(c);
  c.causal = true;
  c.window_left = 6;
  expect_same(c);
  c.window_left = -1;
  c.alibi = true;
  c.sink = c.dlse = true;
  expect_same(c);
}

std::string name_of(const testing::TestParamInfo<std::tuple<int, int>>& info) {
  return std::string(kWays[std::get<0>(info.param)].name) + "_" + to_string(kLayouts[std::get<1>(info.param)]);
}
INSTANTIATE_TEST_SUITE_P(Every, Parallel, testing::Combine(testing::Range(0, 7), testing::Range(0, 3)), name_of);

// Tensors [b, s, h, d], more than one batch entry, and head groups of several heads.
TEST(ParallelTensors, LieInAnyOrder) {
  for (const bool rows_first : {false, true}) {
    ParallelCase c;
    c.ranks = 3;
    c.b = 2;
    c.h_kv = 4;
    c.h_q = 8;
    c.s_q = c.s_kv = 24;
    c.d_v = 16;
    c.rows_first = rows_first;
    for (const Scheme scheme : {Scheme::ring, Scheme::all_gather}) {
      c.scheme = scheme;
      c.head_groups = scheme == Scheme::all_gather ? 2 : 0;
      expect_same(c);
    }
  }
}

// In f32 sums of dK and dV are what their dtype allows.
TEST(ParallelTensors, OfFloats) {
  ParallelCase c;
  c.ranks = 4;
  c.dtype = DType::f32;
  for (const GradientTransfer gradients : {GradientTransfer::f32, GradientTransfer::native}) {
    for (const Scheme scheme : {Scheme::ring, Scheme::all_gather, Scheme::automatic}) {
      c.gradients = gradients;
      c.scheme = scheme;
      EXPECT_LT(run_case(c).greatest(), 1e-5) << to_string(c);
    }
  }
}

// Whatever comes first: the same bits.
TEST(ParallelDelays, ChangeNoBit) {
  for (const Way& way : kWays) {
    ParallelCase c;
    c.ranks = 4;
    c.scheme = way.scheme;
    c.ulysses = way.ulysses;
    c.late = way.late;
    if (way.late) c.lengths = {16, 8, 24};
    c.h_kv = 4;
    c.h_q = 4;
    c.dtype = DType::f32;
    std::vector<double> first;
    for (std::uint64_t seed = 0; seed < 4; ++seed) {
      LocalGroupOptions options;
      options.seed = seed;
      options.max_delay = std::chrono::microseconds(seed == 0 ? 0 : 1000);
      const std::vector<double> outputs = test::outputs_of(c, options);
      if (seed == 0) first = outputs;
      EXPECT_TRUE(outputs == first) << way.name << " seed " << seed;
    }
  }
}

}  // namespace
}  // namespace fa
