// The Hopper forward over a KV cache by blocks that share keys, on inputs at the ends of what a dtype has, against
// float64. Requests without keys stand beside, and rows of the pool that nobody sees hold NaN.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <vector>

#include "emulator/paged_run.hpp"
#include "emulator/paged_specs.hpp"
#include "support/extreme_case.hpp"

namespace emulator {
namespace {

using fa::plan::KernelSpec;
using fa::test::AttentionCase;
using fa::test::AttentionInputs;
using fa::test::AttentionOutputs;
using fa::test::Extreme;
using fa::test::HostTensor;
using fa::test::PagedCase;
using fa::test::PagedData;

constexpr std::int32_t kRows = 12, kKeys = 210;
constexpr int kMultiprocessors = 5;

std::vector<KernelSpec> sharing_specs() {
  std::vector<KernelSpec> found;
  for (const PagedKernel& kernel : paged_kernels()) {
    const KernelSpec& spec = kernel.spec;
    if (!spec.is<fa::plan::Sm90Forward>() || spec.variants.any()) continue;
    if (spec.scheduled() || spec.own_parts()) found.push_back(spec);
  }
  return found;
}

PagedCase case_of(const KernelSpec& spec, const Extreme& extreme) {
  PagedCase c;
  c.attention.dtype = spec.dtype;
  c.attention.d_qk = spec.d_qk;
  c.attention.d_v = spec.d_v;
  c.attention.causal = spec.causal;
  c.attention.h_q = 4;
  c.attention.h_kv = 2;
  c.page_size = spec.page_size;
  c.packed = spec.varlen;
  c.bounded = true;
  c.keys = {0, kKeys, 0};
  c.rows = std::vector<std::int32_t>(c.keys.size(), kRows);
  if (extreme.scale != nullptr) c.attention.scale = extreme.scale(c.attention);
  if (!spec.positive_scale) c.attention.scale = -c.attention.softmax_scale();
  return c;
}

/// The request with keys, alone.
AttentionCase alone(const PagedCase& c) {
  AttentionCase attention = c.attention;
  attention.b = 1;
  attention.s_q = kRows;
  attention.s_kv = kKeys;
  return attention;
}

/// Its rows of q or of the outputs: of which entry, and which is the first.
struct Place {
  std::int64_t b, first;
};
Place place_of(const PagedCase& c, const PagedData& data) {
  return c.packed ? Place{0, data.cu_q[1]} : Place{1, 0};
}

/// copy(b, h, s): for each row of a tensor.
template <class Copy>
void each_row(const HostTensor& tensor, const Copy& copy) {
  const fa::TensorView view = tensor.view();
  for (std::int64_t h = 0; h < view.shape[1]; ++h) {
    for (std::int64_t s = 0; s < view.shape[2]; ++s) {
      for (std::int64_t d = 0; d < (view.rank == 4 ? view.shape[3] : 1); ++d) copy(h, s, d);
    }
  }
}

void put(const PagedCase& c, const AttentionInputs& inputs, PagedData& data) {
  const Place place = place_of(c, data);
  each_row(inputs.q,
           [&](auto h, auto s, auto d) { data.q.set(place.b, h, place.first + s, d, inputs.q.at(0, h, s, d)); });
  const auto put_keys = [&](const HostTensor& from, HostTensor& to) {
    each_row(from, [&](auto h, auto s, auto d) {
      const auto entry = static_cast<std::size_t>(data.max_pages + s / data.page_rows);  // of the second row
      to.set(data.table[entry], h, s % data.page_rows, d, from.at(0, h, s, d));
    });
  };
  put_keys(inputs.k, data.k);
  put_keys(inputs.v, data.v);
}

AttentionOutputs taken(const PagedCase& c, const PagedData& data, const AttentionOutputs& outputs,
                       const AttentionCase& attention) {
  AttentionOutputs result = make_outputs(attention);
  const Place place = place_of(c, data);
  const auto take = [&](const HostTensor& from, HostTensor& to) {
    each_row(to, [&](auto h, auto s, auto d) { to.set(0, h, s, d, from.at(place.b, h, place.first + s, d)); });
  };
  take(outputs.o, result.o);
  take(outputs.lse, result.lse);
  return result;
}

class PagedExtremes : public testing::TestWithParam<std::size_t> {};

TEST_P(PagedExtremes, MatchFloat64) {
  const KernelSpec spec = sharing_specs()[GetParam()];
  const bool half = spec.dtype == fa::DType::f16;
  const fa::test::ExtremeBounds bounds{2.2 * (half ? 0x1p-11 : 0x1p-8), half ? 0x1p-24 : 0x1p-126, 0x1p-20};
  for (const Extreme& extreme : fa::test::extremes()) {
    if (extreme.causal && !spec.causal) continue;
    const PagedCase c = case_of(spec, extreme);
    SCOPED_TRACE(extreme.name + ", " + canonical(spec));
    const AttentionCase attention = alone(c);
    AttentionInputs inputs = make_inputs(attention);
    extreme.change(attention, inputs);
    PagedData data = make_data(c);
    put(c, inputs, data);
    AttentionOutputs actual;
    ASSERT_NO_THROW(actual = run_paged(spec, c, data, {.multiprocessors = kMultiprocessors}));
    EXPECT_LE(
        extreme_error(attention, inputs, reference_f64(attention, inputs), taken(c, data, actual, attention), bounds),
        1);
    const std::int64_t empty = c.packed ? data.cu_q[2] : 0;  // a row of a request without keys
    EXPECT_EQ(actual.o.at(c.packed ? 0 : 2, 0, empty), 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Kernel, PagedExtremes, testing::Range<std::size_t>(0, sharing_specs().size()));

}  // namespace
}  // namespace emulator
