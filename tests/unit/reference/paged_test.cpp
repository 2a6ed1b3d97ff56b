// The CPU reference over pages, against softmax(Q K^T) V as the book has it, of keys found one by one.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "support/paged_case.hpp"

namespace fa::test {
namespace {

PagedCase base_case(std::int64_t page_size, bool packed) {
  PagedCase c;
  c.attention.dtype = DType::f32;
  c.attention.h_q = 4;
  c.attention.h_kv = 2;
  c.attention.d_qk = 24;
  c.attention.d_v = 16;
  c.attention.seed = 5;
  c.attention.layout = packed ? Layout::bshd : Layout::bhsd;
  c.page_size = page_size;
  c.packed = packed;
  c.indexed = packed;
  c.bounded = page_size % 2 == 0;
  c.rows = packed ? std::vector<std::int32_t>{5, 1, 0, 70, 1, 3} : std::vector<std::int32_t>{3, 3, 3, 3, 3, 3};
  c.keys = {40, 257, 9, 133, 0, 2};
  return c;
}

VariantChoice bounded_mask(std::int64_t left, std::int64_t right, std::int64_t chunk, bool sink) {
  VariantChoice choice{"bounded", {}};
  choice.config.window_left = left;
  choice.config.window_right = right;
  choice.config.chunk = chunk;
  choice.config.sink = sink;
  return choice;
}

/// One row of one head of request `i`: what it sees, by the words of include/fa/paged.hpp.
class Row {
 public:
  Row(const PagedCase& c, const PagedData& data, std::size_t i, std::int64_t h, std::int64_t row)
      : c_(c), data_(data), i_(i), h_(h), row_(row) {}

  bool sees(std::int64_t key) const {
    const AttentionConfig& config = c_.variant.config;
    const std::int64_t position = c_.keys[i_] - c_.rows[i_] + row_;
    if (key < (c_.begin.empty() ? 0 : c_.begin[i_])) return false;
    if (c_.attention.causal && key > position) return false;
    if (config.window_left >= 0 && key < position - config.window_left) return false;
    if (config.window_right >= 0 && key > position + config.window_right) return false;
    if (config.chunk == 0) return true;
    return position >= 0 && key / config.chunk == position / config.chunk;
  }

  /// O, and LSE behind it.
  std::vector<double> outputs(double sink) const {
    std::vector<double> result(static_cast<std::size_t>(c_.attention.d_v) + 1);
    double sum = std::exp(sink);
    for (std::int64_t key = 0; key < c_.keys[i_]; ++key) {
      if (!sees(key)) continue;
      const double weight = std::exp(score(key));
      sum += weight;
      for (std::int64_t d = 0; d < c_.attention.d_v; ++d)
        result[static_cast<std::size_t>(d)] += weight * of(data_.v, key, d);
    }
    for (double& value : result) value = sum == 0 ? 0 : value / sum;
    result.back() = std::log(sum);
    return result;
  }

  /// Where q, o and lse have it.
  std::int64_t b() const { return c_.packed ? 0 : static_cast<std::int64_t>(i_); }
  std::int64_t s() const { return c_.packed ? data_.cu_q[i_] + row_ : row_; }

 private:
  double of(const HostTensor& pool, std::int64_t key, std::int64_t d) const {
    const std::int64_t table_row = data_.batch_index.empty() ? static_cast<std::int64_t>(i_) : data_.batch_index[i_];
    const std::int32_t page =
        data_.table[static_cast<std::size_t>(table_row * data_.max_pages + key / data_.page_rows)];
    return pool.at(page, h_ / (c_.attention.h_q / c_.attention.h_kv), key % data_.page_rows, d);
  }
  double score(std::int64_t key) const {
    double sum = 0;
    for (std::int64_t d = 0; d < c_.attention.d_qk; ++d) sum += data_.q.at(b(), h_, s(), d) * of(data_.k, key, d);
    return sum * static_cast<double>(c_.attention.softmax_scale());
  }

  const PagedCase& c_;
  const PagedData& data_;
  std::size_t i_;
  std::int64_t h_;
  std::int64_t row_;
};

void expect_as_the_book_has_it(const PagedCase& c) {
  SCOPED_TRACE(testing::PrintToString(c));
  const PagedData data = make_data(c);
  const AttentionOutputs actual = reference_f64(c, data);
  const VariantCase variant = variant_of(c);
  for (std::size_t i = 0; i < c.keys.size(); ++i) {
    for (std::int64_t h = 0; h < c.attention.h_q; ++h) {
      double sink = -std::numeric_limits<double>::infinity();
      if (variant.config.sink) sink = reinterpret_cast<const float*>(variant.sink.bytes.data())[h];
      for (std::int64_t r = 0; r < c.rows[i]; ++r) {
        const Row row(c, data, i, h, r);
        const std::vector<double> expected = row.outputs(sink);
        for (std::int64_t d = 0; d < c.attention.d_v; ++d) {
          ASSERT_NEAR(actual.o.at(row.b(), h, row.s(), d), expected[static_cast<std::size_t>(d)], 1e-12)
              << i << " " << r;
        }
        const double lse = actual.lse.at(row.b(), h, row.s());
        ASSERT_TRUE(lse == expected.back() || std::abs(lse - expected.back()) < 1e-12) << i << " " << r;
      }
    }
  }
}

class PagedReference : public testing::TestWithParam<std::int64_t> {};

TEST_P(PagedReference, IsAsTheBookHasIt) {
  for (const bool packed : {false, true}) {
    for (const bool causal : {false, true}) {
      PagedCase c = base_case(GetParam(), packed);
      c.attention.causal = causal;
      expect_as_the_book_has_it(c);
      c.begin = {7, 0, 9, 100, 0, 1};
      expect_as_the_book_has_it(c);
      for (const VariantChoice& choice : {bounded_mask(20, causal ? 0 : 5, 0, false), bounded_mask(-1, -1, 48, true),
                                          bounded_mask(11, -1, 0, true)}) {
        c.variant = choice;
        expect_as_the_book_has_it(c);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Pages, PagedReference, testing::Values(kContiguous, 1, 3, 8, 12, 16, 40, 64, 256));

TEST(PagedReferencePadding, IsClearedWhereItIsAsked) {
  const PagedCase c = base_case(16, true);
  const PagedData data = make_data(c);
  const AttentionOutputs outputs = reference_f64(c, data);
  const std::int64_t last = data.q.view().shape[2] - 1;
  for (const std::int64_t row : {std::int64_t{0}, std::int64_t{1}, last}) {
    EXPECT_EQ(outputs.o.at(0, 1, row, 3), 0);
    EXPECT_EQ(outputs.lse.at(0, 1, row), -std::numeric_limits<double>::infinity());
  }
}

}  // namespace
}  // namespace fa::test
