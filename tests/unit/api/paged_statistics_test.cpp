// Column sums and top keys of requests over a KV cache on the host device: those of a dense call on a request's keys.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include <fa/attention.hpp>

#include "api/validate.hpp"
#include "expect_error.hpp"
#include "normals.hpp"

namespace fa {
namespace {

using test::expect_error;
using test::expect_invalid;
using test::normals;

constexpr std::int64_t kHeadsQ = 4, kHeadsKv = 2, kDim = 8, kPage = 4, kPages = 14, kMaxPages = 6, kRequests = 4;
constexpr std::int64_t kPositions = kPage * kMaxPages;
constexpr int kCount = 9;

class PagedStatistics : public testing::Test {
 protected:
  PagedStatistics() {
    config_.head_dim = kDim;
    config_.dtype = DType::f64;
    config_.causal = true;
    config_.page_size = kPage;
    config_.statistics = {MaxLogit::none, false, false, ColumnSums::query_heads, kCount};
  }

  std::int64_t heads() const { return config_.statistics.summed_heads() == ColumnSums::kv_heads ? kHeadsKv : kHeadsQ; }
  bool contiguous() const { return config_.page_size == kContiguous; }
  TensorView pool(std::vector<double>& values) const {
    return contiguous() ? TensorView(values.data(), DType::f64, {kRequests, kHeadsKv, kLongest, kDim})
                        : TensorView(values.data(), DType::f64, {kPages, kHeadsKv, kPage, kDim});
  }
  ForwardInputs inputs() {
    ForwardInputs in{TensorView(q_.data(), DType::f64, {kRequests, kHeadsQ, kRows, kDim}), pool(k_), pool(v_)};
    in.sequences.seqused_kv = keys_.data();
    in.sequences.max_s_kv = longest_;
    in.cache.seq_begin = begin_.data();
    if (!contiguous()) in.cache.block_table = TensorView(table_.data(), DType::i32, {kRequests, kMaxPages});
    if (!config_.varlen) return in;
    in.q = TensorView(q_.data(), DType::f64, {cu_q_.back(), kHeadsQ, kDim});
    in.sequences.b = kRequests;
    in.sequences.cu_seqlens_q = cu_q_.data();
    return in;
  }
  ForwardOutputs outputs() {
    ForwardOutputs out{TensorView(o_.data(), DType::f64, {kRequests, kHeadsQ, kRows, kDim}),
                       TensorView(lse_.data(), DType::f64, {kRequests, kHeadsQ, kRows})};
    if (config_.varlen) {
      out.o = TensorView(o_.data(), DType::f64, {cu_q_.back(), kHeadsQ, kDim});
      out.lse = TensorView(lse_.data(), DType::f64, {kHeadsQ, cu_q_.back()});
    }
    sums_.assign(static_cast<std::size_t>(kRequests * heads() * positions()), 77);
    keys_found_.assign(kRequests * heads() * kCount, 77);
    if (config_.statistics.column_sums != ColumnSums::none) {
      out.statistics.column_sums = TensorView(sums_.data(), DType::f64, {kRequests, heads(), positions()});
    }
    if (config_.statistics.top_keys > 0) {
      out.statistics.top_keys = TensorView(keys_found_.data(), DType::i32, {kRequests, heads(), kCount});
    }
    return out;
  }
  std::int64_t positions() const { return longest_ > 0 ? longest_ : contiguous() ? kLongest : kPositions; }

  /// Row `key` of a request in the pool.
  std::int64_t row_of(std::int64_t request, std::int64_t h, std::int64_t key) const {
    if (contiguous()) return (request * kHeadsKv + h) * kLongest + key;
    return (table_[static_cast<std::size_t>(request * kMaxPages + key / kPage)] * kHeadsKv + h) * kPage + key % kPage;
  }

  /// Holds the results to dense calls, each on the keys that count for one request.
  void expect_dense() {
    Attention::create(config_, Device::host()).forward(inputs(), outputs());
    for (std::int64_t request = 0; request < kRequests; ++request) expect_dense(request);
  }

  void expect_dense(std::int64_t request) {
    const auto i = static_cast<std::size_t>(request);
    const std::int64_t begin = begin_[i], keys = keys_[i] - begin;
    const std::int64_t rows = config_.varlen ? cu_q_[i + 1] - cu_q_[i] : kRows;
    std::vector<double> k, v, o(static_cast<std::size_t>(kHeadsQ * rows * kDim)),
        lse(static_cast<std::size_t>(kHeadsQ * rows));
    for (std::int64_t h = 0; h < kHeadsKv; ++h) {
      for (std::int64_t key = begin; key < keys_[i]; ++key) {
        const std::int64_t at = row_of(request, h, key) * kDim;
        k.insert(k.end(), k_.begin() + at, k_.begin() + at + kDim);
        v.insert(v.end(), v_.begin() + at, v_.begin() + at + kDim);
      }
    }
    AttentionConfig config = config_;
    config.page_size = 0;
    config.varlen = config.zero_padding = false;
    config.statistics.column_sums =
        heads() == kHeadsKv ? ColumnSums::kv_heads : ColumnSums::query_heads;  // where top keys are wanted alone, too
    TensorView q(q_.data() + request * kHeadsQ * kRows * kDim, DType::f64, {1, kHeadsQ, rows, kDim});
    if (config_.varlen) {
      q = TensorView(q_.data() + cu_q_[i] * kHeadsQ * kDim, DType::f64, {1, rows, kHeadsQ, kDim}).swap_axes(1, 2);
    }
    std::vector<double> sums(static_cast<std::size_t>(heads() * keys));
    std::vector<std::int32_t> found(static_cast<std::size_t>(heads() * kCount));
    ForwardOutputs out{TensorView(o.data(), DType::f64, {1, kHeadsQ, rows, kDim}),
                       TensorView(lse.data(), DType::f64, {1, kHeadsQ, rows})};
    out.statistics.column_sums = TensorView(sums.data(), DType::f64, {1, heads(), keys});
    if (config.statistics.top_keys > 0) {
      out.statistics.top_keys = TensorView(found.data(), DType::i32, {1, heads(), kCount});
    }
    Attention::create(config, Device::host())
        .forward({q, TensorView(k.data(), DType::f64, {1, kHeadsKv, keys, kDim}),
                  TensorView(v.data(), DType::f64, {1, kHeadsKv, keys, kDim})},
                 out);
    for (std::int64_t h = 0; h < heads(); ++h) {
      SCOPED_TRACE(testing::Message() << "request " << request << ", head " << h);
      const std::int64_t row = request * heads() + h;
      for (std::int64_t j = 0; config_.statistics.column_sums != ColumnSums::none && j < positions(); ++j) {
        const bool counts = j >= begin && j < keys_[i];
        const double expected = counts ? sums[static_cast<std::size_t>(h * keys + j - begin)] : 0;
        EXPECT_NEAR(sums_[static_cast<std::size_t>(row * positions() + j)], expected, 1e-12) << j;
      }
      for (std::int64_t n = 0; config_.statistics.top_keys > 0 && n < kCount; ++n) {
        const std::int32_t key = found[static_cast<std::size_t>(h * kCount + n)];
        EXPECT_EQ(keys_found_[static_cast<std::size_t>(row * kCount + n)], key < 0 ? -1 : key + begin) << n;
      }
    }
  }

  static constexpr std::int64_t kRows = 3, kLongest = 22;
  AttentionConfig config_;
  std::int64_t longest_ = 0;
  std::vector<std::int32_t> keys_{13, 0, 20, 9}, begin_{0, 0, 14, 5}, cu_q_{0, 2, 6, 6, 11};
  std::vector<std::int32_t> table_{7, 0, 3,  11, -1, -1, -1, -1, -1, -1, -1, -1,
                                   5, 6, 12, 13, 9,  -1, -1, 2,  10, -1, -1, -1};
  std::vector<double> q_ = normals(kRequests * kHeadsQ * kRows * kDim, 1);
  std::vector<double> k_ = normals(kRequests * kLongest * kHeadsKv * kDim, 2);
  std::vector<double> v_ = normals(kRequests * kLongest * kHeadsKv * kDim, 3);
  std::vector<double> o_ = q_, lse_ = q_, sums_;
  std::vector<std::int32_t> keys_found_;
};

TEST_F(PagedStatistics, AreThoseOfADenseCallOnTheKeysThatCount) {
  for (const bool causal : {false, true}) {
    for (const ColumnSums sums : {ColumnSums::query_heads, ColumnSums::kv_heads, ColumnSums::none}) {
      for (const std::int64_t longest : {0, 21}) {
        for (const std::int64_t page : {kPage, kContiguous}) {
          config_.causal = causal;
          config_.page_size = page;
          config_.statistics.column_sums = sums;
          longest_ = longest;
          expect_dense();
        }
      }
    }
  }
}

TEST_F(PagedStatistics, OfPackedRowsSomeOfWhichAreNotThere) {
  for (const bool zero_padding : {false, true}) {
    for (const std::int64_t page : {kPage, kContiguous}) {
      config_.varlen = true;
      config_.zero_padding = zero_padding;
      config_.page_size = page;
      expect_dense();
    }
  }
}

TEST_F(PagedStatistics, OfScoreFunctions) {
  config_.causal = false;
  config_.score = ScoreFunction{"score * 2.0"};
  config_.statistics.top_keys = 0;
  expect_dense();
}

TEST_F(PagedStatistics, OfNoRowsAreNothing) {
  ForwardInputs in = inputs();
  ForwardOutputs out = outputs();
  in.q = TensorView(q_.data(), DType::f64, {kRequests, kHeadsQ, std::int64_t{0}, kDim});
  out.o = in.q;
  out.o.data = o_.data();
  out.o.read_only = false;
  out.lse = TensorView(lse_.data(), DType::f64, {kRequests, kHeadsQ, std::int64_t{0}});
  Attention::create(config_, Device::host()).forward(in, out);
  EXPECT_EQ(sums_, std::vector<double>(sums_.size(), 0));
  EXPECT_EQ(keys_found_, std::vector<std::int32_t>(keys_found_.size(), -1));
}

TEST_F(PagedStatistics, HaveTheAxesOfRequestsAndPositions) {
  const auto refuses = [&](const char* name, const auto& change) {
    ForwardOutputs out = outputs();
    change(out.statistics);
    expect_invalid(name, [&] { Attention::create(config_, Device::host()).forward(inputs(), out); });
  };
  const auto cut = [](StatisticsOutputs& to) { to.column_sums.shape[2] -= 1; };
  refuses("column_sums", cut);
  refuses("top_keys", [](StatisticsOutputs& to) { to.top_keys.shape[0] -= 1; });
  config_.varlen = true;
  refuses("column_sums", cut);
  refuses("column_sums", [this](StatisticsOutputs& to) {
    to.column_sums = TensorView(sums_.data(), DType::f64, {heads(), kRequests * kPositions});
  });
  refuses("top_keys", [](StatisticsOutputs& to) { to.top_keys.dtype = DType::f32; });
}

TEST_F(PagedStatistics, HaveNoGradients) {
  config_.statistics.column_sums_gradient = true;
  EXPECT_NO_THROW(api::validate(config_, true));
  BackwardInputs in;
  expect_error(ErrorCode::unsupported, "page_size",
               [&] { Attention::create(config_, Device::host()).backward(in, {}); });
}

}  // namespace
}  // namespace fa
