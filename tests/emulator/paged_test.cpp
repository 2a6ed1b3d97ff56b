// Kernels over pages: rendered kernels against float64. What no row needs can be read neither in the pool nor in the
// table, and wrong tables and lengths lead nowhere.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <optional>
#include <random>
#include <vector>

#include "api/validate.hpp"
#include "emulator/paged_run.hpp"
#include "emulator/paged_specs.hpp"
#include "plan/catalogue.hpp"
#include "support/thorough.hpp"

namespace emulator {
namespace {

using fa::DType;
using fa::plan::KernelSpec;
using fa::test::AttentionOutputs;
using fa::test::HostTensor;
using fa::test::Layout;
using fa::test::PagedCase;
using fa::test::PagedData;

constexpr std::size_t kBatches = 3;

/// Prefills, chunks of them, decodes and drafts of several tokens in one batch; requests without rows or keys, of one
/// key, of whole pages, of more rows than keys. The last batch is decodes alone.
PagedCase make_case(const PagedKernel& kernel, std::size_t batch) {
  const KernelSpec& spec = kernel.spec;
  PagedCase c;
  c.attention.dtype = spec.dtype;
  c.attention.d_qk = spec.d_qk;
  c.attention.d_v = spec.d_v;
  c.attention.causal = spec.causal && kernel.choice.config.window_right < 0;
  c.attention.h_q = 4;
  c.attention.h_kv = 2;
  c.attention.seed = 11 + batch;
  c.attention.layout = batch == 0 ? Layout::bhsd : Layout::bshd;
  c.variant = kernel.choice;
  c.page_size = spec.page_size;
  set_storage(spec, c);
  c.packed = spec.varlen;
  c.indexed = batch == 1;
  c.bounded = batch != 1;
  const std::int32_t page = c.page_size == fa::kContiguous ? spec.tile_n : spec.page_size;
  const std::vector<std::int32_t> keys[kBatches] = {
      {37, 80, 5, 0, 64, 3}, {2 * page, 90, 1, page + 1, 33}, {1, 100, 47, 96}};
  const std::vector<std::int32_t> rows[kBatches] = {{37, 20, 1, 1, 4, 5}, {1, 45, 1, 0, 3}, {1, 1, 1, 1}};
  c.keys = keys[batch];
  const std::int32_t chunk = spec.own_parts() && spec.tile_m == 8 ? 20 : 35;  // blocks find parts of 32 query tiles
  c.rows = spec.varlen
               ? rows[batch]
               : std::vector<std::int32_t>(c.keys.size(), std::array<std::int32_t, kBatches>{1, chunk, 4}[batch]);
  if (kernel.spec.kernel().tensor_maps) return c;  // the copy engine has no first positions
  if (batch == 1) c.begin = {page, 41, 0, 1, 33};
  if (batch == 2) c.begin = {0, 7, 32, 95};
  return c;
}

double tolerance(DType dtype) {
  return dtype == DType::bf16 ? 2e-2 : dtype == DType::f16 ? 3e-3 : 1e-5;
}

/// The copy engine has no strides below 0.
Placement pool_of(const KernelSpec& spec, std::size_t batch) {
  constexpr std::array kPlacements{Placement::bhsd, Placement::bshd, Placement::padded};
  return spec.kernel().tensor_maps ? kPlacements[batch % 2] : kPlacements[batch];
}

class Paged : public testing::TestWithParam<std::size_t> {};

TEST_P(Paged, MatchesTheReference) {
  const PagedKernel& kernel = paged_kernels()[GetParam()];
  for (std::size_t batch = 0; batch < kBatches; ++batch) {
    if (!fa::test::thorough() && (GetParam() + batch) % kBatches == 0) continue;  // two of the three
    const PagedCase c = make_case(kernel, batch);
    SCOPED_TRACE(canonical(kernel.spec) + ", " + testing::PrintToString(c));
    const PagedData data = make_data(c);
    const AttentionOutputs expected = reference_f64(c, data);
    const double bound = tolerance(kernel.spec.dtype);
    const int runs = kernel.spec.dynamic() ? 3 : 1;  // other blocks are the first to ask the counter
    PagedRun how{.pool = pool_of(kernel.spec, batch), .multiprocessors = runs};
    for (; how.schedule <= static_cast<std::uint64_t>(runs); ++how.schedule) {
      AttentionOutputs actual;
      ASSERT_NO_THROW(actual = run_paged(kernel.spec, c, data, how)) << "schedule " << how.schedule;
      EXPECT_LE(worst_of(c, data, actual.o, expected.o), 4 * bound) << "o";
      EXPECT_LE(worst_of(c, data, actual.lse, expected.lse), kernel.spec.dtype == DType::f32 ? 1e-4 : 1e-2) << "lse";
    }
  }
}

/// Entries, lengths, first positions and rows of the table that are anything.
TEST_P(Paged, WrongTablesAndLengthsReadNothingElse) {
  const PagedKernel& kernel = paged_kernels()[GetParam()];
  constexpr std::array<std::size_t, kBatches> kAll{0, 1, 2};
  for (const std::size_t batch : fa::test::tried(kAll, GetParam())) {
    const PagedCase c = make_case(kernel, batch);
    SCOPED_TRACE(canonical(kernel.spec) + ", " + testing::PrintToString(c));
    PagedData data = make_data(c);
    std::mt19937_64 engine(batch + 1);
    constexpr std::int32_t kLow = std::numeric_limits<std::int32_t>::min();
    constexpr std::int32_t kHigh = std::numeric_limits<std::int32_t>::max();
    const auto spoil = [&](std::vector<std::int32_t>& values, std::int32_t edge) {
      const std::int32_t wild[] = {-1, kLow, kHigh, edge, edge - 1, edge + 1, 1 << 24};
      for (std::int32_t& value : values) {
        if (engine() % 2 == 0) value = wild[engine() % std::size(wild)];
      }
    };
    spoil(data.table, static_cast<std::int32_t>(data.k.view().shape[0]));
    const auto positions = static_cast<std::int32_t>(data.max_pages * data.page_rows);
    if (batch > 0) spoil(data.used_kv, positions);
    spoil(data.begin, positions);
    if (batch > 0) spoil(data.batch_index, static_cast<std::int32_t>(data.table_rows));
    EXPECT_NO_THROW(run_paged(kernel.spec, c, data, {.pool = pool_of(kernel.spec, batch), .trust = false}));
  }
}

/// All scores are one great number, in parts of unequal length that several blocks have: O is the mean of what a row
/// sees.
TEST_P(Paged, WeighsPartsBesideALargeMaximum) {
  const PagedKernel& kernel = paged_kernels()[GetParam()];
  const KernelSpec& spec = kernel.spec;
  if (!spec.scheduled() && !spec.own_parts() && !spec.split) GTEST_SKIP() << "no parts";
  if (spec.variants.any()) GTEST_SKIP() << "scores differ";
  PagedCase c = make_case(kernel, 2);
  c.begin.clear();
  c.keys = {37, 580, 5, 264};
  c.attention.scale = (spec.positive_scale ? 0.3f : -0.3f) * 0x1p30f;
  PagedData data = make_data(c);
  if (data.wide_k.bytes().size() + data.k_scale.bytes().size() > 0) GTEST_SKIP() << "scores are rounded";
  const auto put = [](HostTensor& tensor, double first, std::optional<double> others) {
    const fa::TensorView view = tensor.view();
    for (std::int64_t b = 0; b < view.shape[0]; ++b) {
      for (std::int64_t h = 0; h < view.shape[1]; ++h) {
        for (std::int64_t s = 0; s < view.shape[2]; ++s) {
          if (std::isnan(tensor.at(b, h, s, 0))) continue;  // of rows that no row of q sees
          for (std::int64_t d = 1; others && d < view.shape[3]; ++d) tensor.set(b, h, s, d, *others);
          tensor.set(b, h, s, 0, first);
        }
      }
    }
  };
  put(data.q, 64, 0.0);
  put(data.k, spec.positive_scale ? 64 : -64, std::nullopt);
  if (c.value_in_key) put(data.v, spec.positive_scale ? 64 : -64, std::nullopt);
  SCOPED_TRACE(canonical(spec) + ", " + testing::PrintToString(c));
  AttentionOutputs actual;
  ASSERT_NO_THROW(actual = run_paged(spec, c, data, {.multiprocessors = 24}));
  const AttentionOutputs expected = reference_f64(c, data);
  const double greatest = c.value_in_key ? 64 : 4;
  EXPECT_LE(worst_of(c, data, actual.o, expected.o), tolerance(spec.dtype) * greatest);
}

/// Requests of one length are cut into equal parts, or blocks take as many of them whole.
TEST(PagedParts, OfOneLengthAreEqual) {
  for (const PagedKernel& kernel : paged_kernels()) {
    if (!kernel.spec.own_parts() || !kernel.spec.is<fa::plan::Sm90Forward>()) continue;
    for (const int multiprocessors : {2, 5, 24}) {
      PagedCase c = make_case(kernel, 2);
      c.rows.assign(3, 1);
      c.keys.assign(3, 9 * kernel.spec.tile_n - 5);
      SCOPED_TRACE(canonical(kernel.spec) + ", " + testing::PrintToString(c));
      const PagedData data = make_data(c);
      AttentionOutputs actual;
      ASSERT_NO_THROW(actual = run_paged(kernel.spec, c, data, {.multiprocessors = multiprocessors}));
      EXPECT_LE(worst_of(c, data, actual.o, reference_f64(c, data).o), 4 * tolerance(kernel.spec.dtype)) << "o";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Paged, testing::Range<std::size_t>(0, paged_kernels().size()));

/// What a request of `keys` positions gets whose pages are all one, so that keys are the same wherever it ends. Of
/// positions before the last 40 none counts.
AttentionOutputs run_of_one_page(const PagedKernel& kernel, std::int64_t keys) {
  PagedCase c = make_case(kernel, 2);
  const std::int64_t page = c.page_size;
  c.bounded = c.indexed = false;
  c.begin.clear();
  c.rows = {5};
  c.keys = {static_cast<std::int32_t>(page)};
  PagedCase whole = c;  // every key of the page is needed
  whole.variant = {};
  PagedData data = make_data(whole);
  data.table.resize(1);
  data.used_kv = {static_cast<std::int32_t>(keys)};
  data.begin = {static_cast<std::int32_t>(keys - 40)};
  data.max_pages = (keys + page - 1) / page;
  AttentionOutputs outputs = run_paged(kernel.spec, c, data, {.one_page = true});
  EXPECT_TRUE(std::isfinite(outputs.o.at(0, 0, c.packed ? data.cu_q[0] : 0)));
  return outputs;
}

/// Positions are added to rows, tiles and windows in 32 bits, as far as the library lets them go.
TEST(PagedPositions, MayBeAsManyAs32BitsCount) {
  constexpr std::int64_t kMostOfWindows = std::int64_t{1} << 29;
  for (const char* const name : {"", "two_sided", "window_sink"}) {
    PagedKernel kernel = *std::ranges::find_if(
        paged_kernels(), [&](const PagedKernel& other) { return other.choice.name == name && other.spec.causal; });
    SCOPED_TRACE(canonical(kernel.spec));
    const bool bounded = *name != '\0';
    if (bounded) kernel.choice.config.window_right = fa::api::kMaxLength - 1;
    const std::int64_t page = kernel.spec.page_size, most = bounded ? kMostOfWindows : fa::api::kMaxLength;
    const std::int64_t period = page * kernel.spec.tile_n;  // of pages and of tiles
    const std::int64_t keys = most / page * page;
    const AttentionOutputs few = run_of_one_page(kernel, period + keys % period), many = run_of_one_page(kernel, keys);
    EXPECT_TRUE(equal_outside(few.o, many.o, {})) << "o";
    EXPECT_TRUE(equal_outside(few.lse, many.lse, {})) << "lse";
  }
}

/// A request's bits do not depend on which pages it has, nor on its neighbours' contents.
TEST(PagedBits, AreThoseOfAnyOtherPages) {
  std::size_t n = 0;
  for (const PagedKernel& kernel : paged_kernels()) {
    if (!fa::test::tries(n++, 2)) continue;
    PagedCase c = make_case(kernel, 0);
    SCOPED_TRACE(canonical(kernel.spec));
    const PagedData data = make_data(c);
    PagedData moved = data;  // page p lies where p + 1 was
    const std::int64_t pages = data.k.view().shape[0];
    if (data.contiguous) {
      for (std::int64_t i = 0; i < c.b(); ++i) moved.batch_index.push_back(static_cast<std::int32_t>((i + 1) % pages));
    }
    for (std::int32_t& entry : moved.table) {
      if (entry >= 0 && entry < pages) entry = static_cast<std::int32_t>((entry + 1) % pages);
    }
    const auto rotate = [&](const fa::test::HostTensor& from, fa::test::HostTensor& to) {
      const fa::TensorView view = from.view();
      for_each_row(pages, view.shape[1], view.shape[2], [&](std::int64_t page, std::int64_t h, std::int64_t row) {
        for (std::int64_t d = 0; d < (view.rank == 4 ? view.shape[3] : 1); ++d)
          to.set((page + 1) % pages, h, row, d, from.at(page, h, row, d));
      });
    };
    const auto rotate_bytes = [&](const fa::TensorView& from, const fa::TensorView& to) {
      const auto row_of = [](const fa::TensorView& view, std::int64_t page, std::int64_t h, std::int64_t row) {
        return static_cast<std::byte*>(view.data) + page * view.strides[0] + h * view.strides[1] +
               row * view.strides[2];
      };
      for_each_row(pages, from.shape[1], from.shape[2], [&](std::int64_t page, std::int64_t h, std::int64_t row) {
        std::memcpy(row_of(to, (page + 1) % pages, h, row), row_of(from, page, h, row),
                    static_cast<std::size_t>(from.shape[3]));
      });
    };
    if (c.latent()) {  // scales and bf16 lie between the codes: as numbers they would not come back
      rotate_bytes(data.k.view(), moved.k.view());
    } else {
      rotate(data.k, moved.k);
    }
    rotate(data.v, moved.v);
    if (c.k_dtype && !c.latent()) rotate(data.k_scale, moved.k_scale);
    if (c.v_dtype) rotate(data.v_scale, moved.v_scale);
    for (std::size_t i = 0; i < data.needed.size(); ++i) {
      moved.needed[(i + static_cast<std::size_t>(data.page_rows)) % data.needed.size()] = data.needed[i];
    }
    const AttentionOutputs first = run_paged(kernel.spec, c, data, {});
    const AttentionOutputs second = run_paged(kernel.spec, c, moved, {});
    EXPECT_TRUE(equal_outside(first.o, second.o, {})) << "o";
    EXPECT_TRUE(equal_outside(first.lse, second.lse, {})) << "lse";
  }
}

}  // namespace
}  // namespace emulator
