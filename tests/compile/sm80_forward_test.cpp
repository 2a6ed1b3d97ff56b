#include <gtest/gtest.h>

#include <array>
#include <iterator>
#include <string>
#include <vector>

#include <fa/paged.hpp>

#include "compile/architectures.hpp"
#include "compile/compiler.hpp"
#include "plan/planner.hpp"
#include "plan/schedule.hpp"
#include "render/source.hpp"

// Every kernel that the planner picks compiles with NVRTC for every architecture, without a toolkit header and without
// spilling; no GPU is involved.
namespace fa {
namespace {

struct HeadDims {
  int d_qk, d_v;
};

constexpr HeadDims kHeadDims[] = {{8, 8}, {40, 40}, {64, 64}, {96, 96}, {128, 128}, {192, 192}, {256, 256}, {192, 128}};

class Sm80ForwardCompile : public ::testing::TestWithParam<const char*> {
 protected:
  /// The first choice of a plan, or what is taken in its place, compiles without spilling.
  static void expect_clean(const plan::ForwardPlan& plan) {
    if (expect_compiles(plan.kernel) == 0) return;
    for (const plan::KernelSpec& spec : plan.alternatives) {
      if (expect_compiles(spec) == 0) return;
    }
    ADD_FAILURE() << "every kernel spills: " << canonical(plan.kernel);
  }

  /// Bytes that a thread spills.
  static int expect_compiles(const plan::KernelSpec& spec) {
    SCOPED_TRACE(canonical(spec));
    const compile::Cubin cubin = compile::compile(render::render(spec), spec.arch);
    EXPECT_GT(cubin.facts.registers, 0);
    EXPECT_LE(cubin.facts.registers * spec.threads() * spec.min_blocks, plan::limits(spec.arch).registers_per_sm);
    EXPECT_EQ(cubin.log, "");
    return cubin.facts.local_bytes;
  }

  static plan::Problem problem(const HeadDims& dims, DType dtype, bool causal) {
    plan::Problem result;
    result.arch = plan::parse_arch(GetParam());
    result.dtype = dtype;
    result.d_qk = dims.d_qk;
    result.d_v = dims.d_v;
    result.causal = causal;
    result.b = 4;
    result.h_q = result.h_kv = 16;
    result.s_q = result.s_kv = 2048;
    return result;
  }
};

const plan::Fixed kSm80{plan::Family::sm80};

TEST_P(Sm80ForwardCompile, HeadDimsAndDtypes) {
  bool causal = false;
  std::size_t n = 0;
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
    for (const HeadDims& dims : kHeadDims) {
      causal = !causal;  // each head dim meets both over the dtypes
      if (!test::has_turn(GetParam(), n++)) continue;
      expect_clean(plan::plan_forward(problem(dims, dtype, causal), kSm80));
    }
  }
}

TEST_P(Sm80ForwardCompile, VariantsOfOneProblem) {
  plan::Problem p = problem({64, 64}, DType::bf16, true);
  p.positive_scale = false;
  expect_clean(plan::plan_forward(p, kSm80));
  p.positive_scale = true;
  p.aligned = false;
  expect_clean(plan::plan_forward(p, kSm80));
  p.aligned = true;
  p.h_kv = 2;
  p.s_q = 1;
  p.b = 1;
  const plan::ForwardPlan decode = plan::plan_forward(p, kSm80);
  EXPECT_TRUE(decode.kernel.pack_gqa);
  EXPECT_TRUE(decode.kernel.split);
  expect_clean(decode);
  EXPECT_EQ(expect_compiles(decode.combine), 0);
}

// What pairs of warps keep in registers fits as planned, packed batches included.
TEST_P(Sm80ForwardCompile, PairsOfWarpsDoNotSpill) {
  const std::string arch = GetParam();
  if (arch != "sm_80" && arch != "sm_90a") GTEST_SKIP() << "an alternative may serve at head dim 256";
  for (const bool causal : {false, true}) {
    for (const bool varlen : {false, true}) {
      plan::Problem p = problem({256, 256}, DType::bf16, causal);
      p.varlen = varlen;
      p.total_q = p.total_kv = 8192;
      const plan::KernelSpec spec = plan::plan_forward(p, kSm80).kernel;
      EXPECT_EQ(spec.warps_n, 2) << canonical(spec);
      EXPECT_EQ(expect_compiles(spec), 0) << canonical(spec);
    }
  }
}

TEST_P(Sm80ForwardCompile, PackedBatchesAndDropout) {
  plan::Problem p = problem({128, 128}, DType::bf16, true);
  p.varlen = p.dropout = true;
  p.total_q = p.total_kv = 8192;
  expect_clean(plan::plan_forward(p, kSm80));
  EXPECT_EQ(expect_compiles(plan::clear_padding_spec(p.arch, DType::f16)), 0);
}

// Of caches of 4 bits, beside 8 and 16.
TEST_P(Sm80ForwardCompile, FourBitsDoNotSpill) {
  std::size_t n = 0;
  for (const HeadDims& dims : {HeadDims{64, 64}, {128, 128}, {256, 256}, {192, 128}}) {
    for (const std::int64_t s_q : {1, 2048}) {
      const std::size_t turn = n++;
      if (!test::has_turn(GetParam(), turn)) continue;
      plan::Problem p = problem(dims, turn % 2 == 0 ? DType::bf16 : DType::f16, true);
      p.k_dtype = turn % 4 == 3 ? DType::i8 : DType::u4x2;
      p.v_dtype = turn % 4 == 2 ? p.dtype : DType::u4x2;
      p.group_size = turn % 3 == 0 ? 64 : 32;
      p.page_size = turn % 4 == 1 ? 0 : 64;
      p.h_kv = 4;
      p.s_q = s_q;
      p.s_kv = 32768;
      const plan::ForwardPlan planned = plan::plan_forward(p, {});
      EXPECT_TRUE(planned.kernel.stored());
      expect_clean(planned);
    }
  }
}

// Decodes over caches of 8 and 4 bits take the tile of few rows, with as many blocks as have their registers: ptxas may
// not find out that it spills, or another tile is taken.
TEST_P(Sm80ForwardCompile, FewRowsOfStoredCachesDoNotSpill) {
  const std::string arch = GetParam();
  if (arch != "sm_80" && arch != "sm_90a") GTEST_SKIP() << "an alternative may serve";
  std::size_t n = 0;
  for (const HeadDims& dims : {HeadDims{128, 128}, {64, 64}}) {
    for (const DType k : {DType::bf16, DType::e4m3, DType::i8, DType::u4x2}) {
      for (const DType v : {DType::bf16, DType::e4m3, DType::i8, DType::u4x2}) {
        if (k == DType::bf16 && v == DType::bf16) continue;
        const std::size_t turn = n++;
        if (!test::has_turn(arch, turn)) continue;
        plan::Problem p = problem(dims, DType::bf16, false);
        p.k_dtype = k;
        p.v_dtype = v;
        p.group_size = k == DType::u4x2 || v == DType::u4x2 ? 32 : 0;
        p.page_size = turn % 2 == 0 ? 16 : kContiguous;
        p.h_kv = 4;
        p.s_q = turn % 3 == 0 ? 3 : 1;
        p.s_kv = 8192;
        const plan::KernelSpec first = plan::plan_forward(p, {}).kernel;
        EXPECT_TRUE(first.as<plan::Sm80Forward>().split_warps);
        EXPECT_EQ(expect_compiles(first), 0) << canonical(first);
      }
    }
  }
}

// Prefills and decodes over pages of every kind: one for many tiles, many for a tile, and no power of two.
TEST_P(Sm80ForwardCompile, PagesDoNotSpill) {
  constexpr int kPageSizes[] = {16, 1, 256, 12};
  constexpr std::array kSchedules{false, true};
  std::size_t n = 0;
  for (const DType dtype : {DType::bf16, DType::f32}) {
    for (const HeadDims& dims : {HeadDims{64, 64}, {128, 128}, {256, 256}, {192, 128}}) {
      for (const std::int64_t s_q : {1, 2048}) {
        const std::size_t turn = n++;
        if (!test::has_turn(GetParam(), turn)) continue;
        plan::Problem p = problem(dims, dtype, turn % 3 != 0);
        p.page_size = kPageSizes[turn % std::size(kPageSizes)];
        p.varlen = turn % 2 == 0;
        p.h_kv = 4;
        p.s_q = s_q;
        p.total_q = p.b * s_q;
        p.s_kv = 32768;
        for (const bool scheduled : test::tried(kSchedules, turn / std::size(test::kArchitectures))) {
          const plan::ForwardPlan planned = plan::plan_forward(p, {plan::Family::sm80, {{"scheduled", scheduled}}});
          EXPECT_EQ(planned.kernel.page_size, p.page_size);
          EXPECT_EQ(planned.kernel.scheduled(), scheduled);
          EXPECT_FALSE(planned.kernel.split);
          expect_clean(planned);
          if (scheduled) {
            EXPECT_EQ(expect_compiles(plan::schedule_spec(planned.kernel)), 0);
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Architectures, Sm80ForwardCompile, ::testing::ValuesIn(test::kArchitectures),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace fa
