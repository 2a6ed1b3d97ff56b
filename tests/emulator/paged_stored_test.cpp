// Caches of 8 bits whose products are of f16: what a long walk over keys does to a row's factor.

#include <gtest/gtest.h>

#include <algorithm>
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

}  // namespace
}  // namespace emulator
