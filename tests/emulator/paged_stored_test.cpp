// Caches of 8 bits whose products are of f16: what a long walk over keys does to a row's factor. Caches of 4 bits whose
// codes are multiplied where they stand: numbers that need no rounding come out exactly.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "emulator/paged_run.hpp"
#include "emulator/paged_specs.hpp"
#include "plan/kernels/sm80_forward.hpp"

namespace emulator {
namespace {

using fa::plan::KernelSpec;
using fa::test::AttentionOutputs;
using fa::test::HostTensor;
using fa::test::PagedCase;
using fa::test::PagedData;

/// One of those with a warp's rows in a block's warps each, and one of those whose warps share them.
std::vector<KernelSpec> half_value_specs() {
  std::vector<KernelSpec> found;
  for (const PagedKernel& kernel : paged_kernels()) {
    const KernelSpec& spec = kernel.spec;
    if (spec.family() != fa::plan::Family::sm80 || spec.variants.any() || spec.varlen) continue;
    const auto& own = spec.as<fa::plan::Sm80Forward>();
    if (spec.arch.sm() >= fa::plan::kHalfProductsFrom && fa::plan::is_8_bits(own.v_storage)) found.push_back(spec);
  }
  return found;
}

constexpr int kTiles = 48;

/// Row 0 of each head sees all keys alike. The others meet a greater score in every tile, from the last one on.
PagedCase growing_case(const KernelSpec& spec) {
  PagedCase c;
  c.attention.dtype = spec.dtype;
  c.attention.d_qk = spec.d_qk;
  c.attention.d_v = spec.d_v;
  c.attention.causal = spec.causal;
  c.attention.h_q = 2;
  c.attention.h_kv = 1;
  c.page_size = spec.page_size;
  set_storage(spec, c);
  c.keys = {kTiles * spec.tile_n};
  c.rows = {4};
  return c;
}

void grow(const KernelSpec& spec, PagedData& data) {
  for (std::int64_t h = 0; h < 2; ++h) {
    for (std::int64_t s = 0; s < 4; ++s) {
      for (std::int64_t d = 0; d < spec.d_qk; ++d) data.q.set(0, h, s, d, d == s ? 8 : 0);
    }
  }
  const bool scales = fa::plan::is_8_bits(spec.as<fa::plan::Sm80Forward>().k_storage);
  for (std::int64_t key = 0; key < kTiles * spec.tile_n; ++key) {
    const std::int64_t page = data.table[static_cast<std::size_t>(key / data.page_rows)], row = key % data.page_rows;
    const double step = static_cast<double>(kTiles - key / spec.tile_n) / 8;
    if (scales) data.k_scale.set(page, 0, row, 0, step);
    for (std::int64_t d = 0; d < spec.d_qk; ++d) {
      data.k.set(page, 0, row, d, d >= 1 && d < 4 ? (scales ? 1 : step) : 0);
    }
  }
}

class StoredValues : public testing::TestWithParam<std::size_t> {};

TEST_P(StoredValues, RowsKeepTheirPrecisionWhileMaximaBesideThemGrow) {
  const KernelSpec spec = half_value_specs()[GetParam()];
  SCOPED_TRACE(canonical(spec));
  const PagedCase c = growing_case(spec);
  PagedData data = make_data(c);
  grow(spec, data);
  AttentionOutputs actual;
  ASSERT_NO_THROW(actual = run_paged(spec, c, data, {}));
  const HostTensor expected = reference_f64(c, data).o;
  EXPECT_GT(std::abs(expected.at(0, 0, 0, 0)), 1e-3) << "else row 0 shows nothing";
  EXPECT_LE(worst_of(c, data, actual.o, expected), 0x1p-9);
}

INSTANTIATE_TEST_SUITE_P(Kernel, StoredValues, testing::Range<std::size_t>(0, half_value_specs().size()));

TEST(StoredValuesKernels, AreOfBothKinds) {
  const std::vector<KernelSpec> specs = half_value_specs();
  const auto shares = [](const KernelSpec& spec) { return spec.as<fa::plan::Sm80Forward>().split_warps; };
  EXPECT_TRUE(std::ranges::any_of(specs, shares));
  EXPECT_FALSE(std::ranges::all_of(specs, shares));
}

/// Those whose warps share rows, of K or V in 4 bits.
std::vector<KernelSpec> in_place_specs() {
  std::vector<KernelSpec> found;
  for (const PagedKernel& kernel : paged_kernels()) {
    const KernelSpec& spec = kernel.spec;
    if (spec.family() != fa::plan::Family::sm80 || spec.variants.any() || spec.varlen) continue;
    const auto& own = spec.as<fa::plan::Sm80Forward>();
    if (own.split_warps && (fa::plan::is_u4(own.k_storage) || fa::plan::is_u4(own.v_storage))) found.push_back(spec);
  }
  return found;
}

/// Steps that are powers of two, of V twice as great in each tile that is read later, with the code 8 for 0: f16 and
/// bf16 hold every number.
void set_even_steps(const KernelSpec& spec, const PagedCase& c, PagedData& data) {
  const auto set = [&](HostTensor& scales, std::int64_t key, double step) {
    const std::int64_t page = data.table[static_cast<std::size_t>(key / data.page_rows)], row = key % data.page_rows;
    for (std::int64_t i = 0; i < scales.view().shape[3]; i += 2) {
      scales.set(page, 0, row, i, step);
      scales.set(page, 0, row, i + 1, -8 * step);
    }
  };
  for (std::int64_t key = 0; key < c.keys[0]; ++key) {
    if (c.k_dtype == fa::DType::u4x2) set(data.k_scale, key, key % 2 == 0 ? 0.125 : 0.0625);
    if (c.v_dtype == fa::DType::u4x2) set(data.v_scale, key, std::ldexp(1, -static_cast<int>(key / spec.tile_n)));
  }
}

class CodesInPlace : public testing::TestWithParam<std::size_t> {};

TEST_P(CodesInPlace, LoseNothingOfNumbersThatNeedNoRounding) {
  const KernelSpec spec = in_place_specs()[GetParam()];
  SCOPED_TRACE(canonical(spec));
  PagedCase c = growing_case(spec);
  c.keys = {8 * spec.tile_n};
  PagedData data = make_data(c);
  set_even_steps(spec, c, data);
  AttentionOutputs actual;
  ASSERT_NO_THROW(actual = run_paged(spec, c, data, {}));
  const AttentionOutputs expected = reference_f64(c, data);
  const bool half = spec.dtype == fa::DType::f16;
  for (std::int64_t h = 0; h < 2; ++h) {
    for (std::int64_t s = 0; s < 4; ++s) {
      const double lse = expected.lse.at(0, h, s);
      EXPECT_NEAR(actual.lse.at(0, h, s), lse, 1e-5 * (1 + std::abs(lse))) << "head " << h << " row " << s;
      for (std::int64_t d = 0; d < spec.d_v; ++d) {
        const double wanted = expected.o.at(0, h, s, d);
        // P is rounded to f16, and 15 steps of 1 are the most that it multiplies.
        const double bound = (half ? 0x1p-12 : 0x1p-9) * std::abs(wanted) + 15 * 0x1p-12 + 1e-5;
        ASSERT_NEAR(actual.o.at(0, h, s, d), wanted, bound) << "head " << h << " row " << s << " column " << d;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernel, CodesInPlace, testing::Range<std::size_t>(0, in_place_specs().size()));

TEST(CodesInPlaceKernels, HaveThemInEither) {
  const std::vector<KernelSpec> specs = in_place_specs();
  const auto both = [](const KernelSpec& spec) {
    const auto& own = spec.as<fa::plan::Sm80Forward>();
    return fa::plan::is_u4(own.k_storage) && fa::plan::is_u4(own.v_storage);
  };
  EXPECT_TRUE(std::ranges::any_of(specs, both));
  EXPECT_FALSE(std::ranges::all_of(specs, both));
}

}  // namespace
}  // namespace emulator
