#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <string>

#include "compile/architectures.hpp"
#include "compile/compiler.hpp"
#include "plan/catalogue.hpp"
#include "plan/column_sums.hpp"
#include "plan/inspect.hpp"
#include "render/source.hpp"

// The kernels of debug calls, and that of column sums, compile with NVRTC, with checks and without, and do not spill:
// for every architecture where FA_TESTS is thorough, else for one of them.
namespace fa {
namespace {

class InspectCompile : public ::testing::TestWithParam<const char*> {
 protected:
  void expect_clean(plan::KernelSpec spec) {
    if (!test::has_turn(GetParam(), cases_++)) return;
    for (const bool debug : {false, true}) {
      spec.debug = debug;
      SCOPED_TRACE(canonical(spec));
      const compile::Cubin cubin = compile::compile(render::render(spec), spec.arch);
      EXPECT_EQ(cubin.log, "");
      EXPECT_TRUE(debug || cubin.facts.local_bytes == 0);
    }
  }

  static plan::Problem problem(DType dtype, int d_qk) {
    plan::Problem problem;
    problem.arch = plan::parse_arch(GetParam());
    problem.dtype = dtype;
    problem.d_qk = problem.d_v = d_qk;
    problem.causal = true;
    problem.h_q = problem.h_kv = 2;
    problem.s_q = problem.s_kv = 64;
    return problem;
  }

 private:
  std::size_t cases_ = 0;
};

TEST_P(InspectCompile, ScansResults) {
  expect_clean(plan::scan_results_spec(plan::parse_arch(GetParam())));
}

TEST_P(InspectCompile, WritesP) {
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
    expect_clean(plan::probabilities_spec(problem(dtype, 72)));
  }
  plan::Problem packed = problem(DType::bf16, 128);
  packed.varlen = packed.dropout = true;
  packed.aligned = false;
  expect_clean(plan::probabilities_spec(packed));
  for (const int page_size : {16, -1}) {
    plan::Problem paged = problem(DType::f16, 576);
    paged.page_size = page_size;
    expect_clean(plan::probabilities_spec(paged));
  }
}

TEST_P(InspectCompile, WritesPOfFunctions) {
  plan::Variants variants;
  variants.left_window = variants.sink = variants.placed = true;
  variants.score = "score + bias[b, h, q, kv] * slope[h]";
  variants.mask = "doc[q] == doc[kv]";
  variants.captures = {{"bias", DType::bf16, 4}, {"slope", DType::f32, 1}, {"doc", DType::i32, 1}};
  plan::Problem with = problem(DType::bf16, 64);
  with.variants = &variants;
  with.dropout = true;
  expect_clean(plan::probabilities_spec(with));
}

/// Of 16 bits, two blocks of 128 keys share a multiprocessor where they fit, or one has eight warps; none spills.
TEST_P(InspectCompile, SumsColumns) {
  for (const DType dtype : {DType::bf16, DType::f32}) {
    for (const int d : {64, 128, 256}) {
      plan::Problem with = problem(dtype, d);
      with.causal = d != 64;
      with.statistics.column_sums = ColumnSums::query_heads;
      with.b = 256;  // rounds of thread blocks
      const plan::KernelSpec spec = plan::column_sums_spec(with);
      const int shared = plan::limits(spec.arch).shared_per_block;
      // As many blocks of 128 keys have room as of 64, of the two that registers leave.
      const auto blocks = [&](int keys) { return std::min(shared / ((256 + keys) * (2 * d + 16)), 2); };
      const bool alone = dtype != DType::f32 && blocks(64) == 1 && spec.arch.major >= 8;
      const bool eight_warps = alone && 384 * (2 * d + 16) <= shared;
      const bool large = eight_warps || (dtype != DType::f32 && blocks(128) > 0 && blocks(128) == blocks(64));
      EXPECT_EQ(spec.warps == 8, eight_warps);
      EXPECT_EQ(spec.tile_n == 128, large);
      EXPECT_LE(std::max(large ? blocks(64) : 1, 1) * plan::shared_bytes(spec), shared);
      expect_clean(spec);
      with.b = 1;
      if (with.causal && large && !eight_warps) {
        EXPECT_LT(plan::column_sums_spec(with).tile_n, 128) << "one round";
      }
      if (!eight_warps) continue;
      with.b = 256;
      with.sum_buffers = 2;
      expect_clean(plan::column_sums_spec(with));
    }
  }
}

/// Over pages and contiguous caches, K being of 16, of 8 and of 4 bits, and in latent rows.
TEST_P(InspectCompile, SumsColumnsOverCaches) {
  constexpr std::array kPageSizes{16, -1, 0};
  std::size_t turn = 0;
  plan::Variants variants;
  variants.left_window = true;
  variants.score = "score * gain[h]";
  variants.captures = {{"gain", DType::f32, 1}};
  for (const DType stored : {DType::bf16, DType::e4m3, DType::i8, DType::u4x2}) {
    for (const int d : {64, 128, 256}) {
      plan::Problem with = problem(stored == DType::i8 ? DType::f16 : DType::bf16, d);
      with.k_dtype = stored;
      with.group_size = stored == DType::u4x2 ? 64 : 0;
      with.causal = d != 64;
      with.statistics.column_sums = ColumnSums::kv_heads;
      for (const int page_size : test::tried(kPageSizes, turn++)) {
        if (with.arch.major < 8 && with.dtype == DType::bf16) continue;
        with.page_size = page_size;
        with.varlen = with.causal && page_size != 0;
        with.variants = page_size == 16 && d == 128 ? &variants : nullptr;
        expect_clean(plan::column_sums_spec(with));
      }
    }
  }
  plan::Problem latent = problem(DType::f16, 576);
  latent.page_size = 64;
  latent.value_in_key = true;
  latent.k_dtype = DType::e4m3;
  latent.statistics.column_sums = ColumnSums::kv_heads;
  expect_clean(plan::column_sums_spec(latent));
}

/// Two blocks share the registers of a multiprocessor.
TEST_P(InspectCompile, FindsTopKeys) {
  for (const bool varlen : {false, true}) {
    for (const int page_size : {0, 16}) {
      plan::Problem with = problem(DType::bf16, 64);
      with.varlen = varlen;
      with.page_size = page_size;
      expect_clean(plan::top_keys_spec(with));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Architectures, InspectCompile, ::testing::ValuesIn(test::kArchitectures),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace fa
