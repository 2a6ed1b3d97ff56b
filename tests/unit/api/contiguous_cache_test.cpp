// A KV cache that is not in pages on the host device, through the public API: what a call means, and what is refused.

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include <fa/attention.hpp>

#include "expect_error.hpp"
#include "normals.hpp"

namespace fa {
namespace {

using test::expect_error;
using test::expect_invalid;
using test::normals;

constexpr std::int64_t kHeadsQ = 4, kHeadsKv = 2, kDimQk = 16, kDimV = 8;
constexpr std::int64_t kMost = 20, kCacheRows = 5, kRequests = 3, kRows = 2;
constexpr double kUntouched = -777;

/// Three requests of two query rows each over a cache [rows, s_max, h_kv, d].
class ContiguousCache : public testing::Test {
 protected:
  ContiguousCache() {
    config_.head_dim = kDimQk;
    config_.head_dim_v = kDimV;
    config_.dtype = DType::f64;
    config_.causal = true;
    config_.page_size = kContiguous;
  }

  ForwardInputs inputs() {
    ForwardInputs in;
    in.q = TensorView(q_.data(), DType::f64, {kRequests, kHeadsQ, kRows, kDimQk});
    in.k = TensorView(k_.data(), DType::f64, {kCacheRows, kMost, kHeadsKv, kDimQk}).swap_axes(1, 2);
    in.v = TensorView(v_.data(), DType::f64, {kCacheRows, kMost, kHeadsKv, kDimV}).swap_axes(1, 2);
    in.sequences.seqused_kv = keys_.data();
    in.cache.batch_index = rows_.data();
    return in;
  }
  ForwardOutputs outputs() {
    return {TensorView(o_.data(), DType::f64, {kRequests, kHeadsQ, kRows, kDimV}),
            TensorView(lse_.data(), DType::f64, {kRequests, kHeadsQ, kRows})};
  }
  void run(const ForwardInputs& in) { Attention::create(config_, Device::host()).forward(in, outputs()); }
  void expect_refused(const std::string& argument, const ForwardInputs& in) {
    expect_invalid(argument, [&] { run(in); });
    EXPECT_EQ(o_, std::vector<double>(o_.size(), kUntouched));
  }

  /// Each request by a dense call on its keys from `begin` on, of row `rows[i]` of the cache.
  void expect_dense(const std::vector<std::int32_t>& rows, const std::vector<std::int32_t>& begin) {
    AttentionConfig config = config_;
    config.page_size = 0;
    const Attention dense = Attention::create(config, Device::host());
    for (std::size_t i = 0; i < kRequests; ++i) {
      const auto one = static_cast<std::int64_t>(i);
      ForwardInputs in = inputs();
      in.sequences = {};
      in.cache = {};
      in.q.shape[0] = in.k.shape[0] = in.v.shape[0] = 1;
      in.q.data = q_.data() + one * kHeadsQ * kRows * kDimQk;
      in.k.data = k_.data() + (rows[i] * kMost + begin[i]) * kHeadsKv * kDimQk;
      in.v.data = v_.data() + (rows[i] * kMost + begin[i]) * kHeadsKv * kDimV;
      in.k.shape[2] = in.v.shape[2] = keys_[i] - begin[i];
      std::vector<double> o(kHeadsQ * kRows * kDimV);
      dense.forward(in, {TensorView(o.data(), DType::f64, {1, kHeadsQ, kRows, kDimV})});
      for (std::size_t n = 0; n < o.size(); ++n) {
        ASSERT_NEAR(o_[i * o.size() + n], o[n], 1e-12) << "request " << i << ", element " << n;
      }
    }
  }

  AttentionConfig config_;
  std::vector<std::int32_t> keys_{13, 2, 20}, rows_{4, 0, 2}, begin_{3, 0, 11}, cu_q_{0, 2, 4, 6};
  std::vector<double> q_ = normals(kRequests * kHeadsQ * kRows * kDimQk, 1);
  std::vector<double> k_ = normals(kCacheRows * kMost * kHeadsKv * kDimQk, 2);
  std::vector<double> v_ = normals(kCacheRows * kMost * kHeadsKv * kDimV, 3);
  std::vector<double> o_ = std::vector<double>(kRequests * kHeadsQ * kRows * kDimV, kUntouched);
  std::vector<double> lse_ = std::vector<double>(kRequests * kHeadsQ * kRows, kUntouched);
};

TEST_F(ContiguousCache, EachRequestIsADenseCallOnItsKeys) {
  run(inputs());
  expect_dense(rows_, {0, 0, 0});
  ForwardInputs in = inputs();
  in.cache.seq_begin = begin_.data();
  run(in);
  expect_dense(rows_, begin_);
  in = inputs();
  in.k.shape[0] = in.v.shape[0] = kRequests;
  in.cache.batch_index = nullptr;
  run(in);
  expect_dense({0, 1, 2}, {0, 0, 0});
}

TEST_F(ContiguousCache, QueriesMayBePacked) {
  run(inputs());
  const std::vector<double> dense = o_;
  config_.varlen = true;
  ForwardInputs in = inputs();
  std::vector<double> q(q_.size()), o(o_.size());
  for (std::int64_t i = 0; i < kRequests * kHeadsQ * kRows; ++i) {  // [b, h, s] to [b, s, h]
    const std::int64_t b = i / (kHeadsQ * kRows), h = i / kRows % kHeadsQ, s = i % kRows;
    for (std::int64_t d = 0; d < kDimQk; ++d) {
      q[static_cast<std::size_t>(((b * kRows + s) * kHeadsQ + h) * kDimQk + d)] =
          q_[static_cast<std::size_t>(i * kDimQk + d)];
    }
  }
  in.q = TensorView(q.data(), DType::f64, {kRequests * kRows, kHeadsQ, kDimQk});
  in.sequences.b = kRequests;
  in.sequences.cu_seqlens_q = cu_q_.data();
  Attention::create(config_, Device::host())
      .forward(in, {TensorView(o.data(), DType::f64, {kRequests * kRows, kHeadsQ, kDimV})});
  for (std::int64_t i = 0; i < kRequests * kHeadsQ * kRows; ++i) {
    const std::int64_t b = i / (kHeadsQ * kRows), h = i / kRows % kHeadsQ, s = i % kRows;
    for (std::int64_t d = 0; d < kDimV; ++d) {
      ASSERT_EQ(o[static_cast<std::size_t>(((b * kRows + s) * kHeadsQ + h) * kDimV + d)],
                dense[static_cast<std::size_t>(i * kDimV + d)]);
    }
  }
}

/// Of schedules it takes none, and says what is wrong with one that it is asked for.
TEST_F(ContiguousCache, SchedulesAreChecked) {
  const Attention attention = Attention::create(config_, Device::host());
  const AttentionShape limits{.b = kRequests, .h_q = kHeadsQ, .h_kv = kHeadsKv, .s_q = kRows, .s_kv = kMost};
  EXPECT_EQ(attention.schedule_size(limits), 0U);
  ScheduleInputs in;
  in.limits = limits;
  expect_invalid("seqused_kv", [&] { attention.schedule(in, {}); });
  in.sequences.seqused_kv = keys_.data();
  attention.schedule(in, {});
  in.sequences.cu_seqlens_kv = cu_q_.data();
  expect_invalid("cu_seqlens_kv", [&] { attention.schedule(in, {}); });
  config_.page_size = 0;
  in.sequences.cu_seqlens_kv = nullptr;
  expect_invalid("page_size", [&] { Attention::create(config_, Device::host()).schedule(in, {}); });
}

TEST_F(ContiguousCache, WhatDoesNotFitIsNamed) {
  const auto refused = [this](const std::string& argument, auto change) {
    ForwardInputs in = inputs();
    change(in);
    expect_refused(argument, in);
  };
  std::vector<std::int32_t> table(10);
  refused("seqused_kv", [](ForwardInputs& in) { in.sequences.seqused_kv = nullptr; });
  refused("cache.block_table", [&](ForwardInputs& in) {
    in.cache.block_table = TensorView(table.data(), DType::i32, {kRequests, 3});
  });
  refused("k", [](ForwardInputs& in) { in.cache.batch_index = nullptr; });  // five rows, three requests
  refused("v", [](ForwardInputs& in) { in.v.shape[0] = kCacheRows - 1; });
  refused("v", [](ForwardInputs& in) { in.v.shape[2] = kMost - 1; });
  refused("cu_seqlens_kv", [&](ForwardInputs& in) { in.sequences.cu_seqlens_kv = cu_q_.data(); });
  refused("cu_seqlens_q", [&](ForwardInputs& in) { in.sequences.cu_seqlens_q = cu_q_.data(); });
  refused("sequences.b", [](ForwardInputs& in) { in.sequences.b = 2; });
  refused("sequences.max_s_kv", [](ForwardInputs& in) { in.sequences.max_s_kv = -1; });
  refused("seqused_kv[2]", [](ForwardInputs& in) { in.sequences.max_s_kv = 19; });
  rows_[1] = kCacheRows;
  refused("cache.batch_index[1]", [](ForwardInputs&) {});
  rows_[1] = -1;
  refused("cache.batch_index[1]", [](ForwardInputs&) {});
  rows_[1] = 0;
  keys_[0] = kMost + 1;
  refused("seqused_kv[0]", [](ForwardInputs&) {});
  keys_[0] = 2;
  refused("cache.seq_begin[0]", [this](ForwardInputs& in) { in.cache.seq_begin = begin_.data(); });
}

TEST_F(ContiguousCache, LengthsNeedAConfigurationThatReadsThem) {
  config_.page_size = 0;
  ForwardInputs in = inputs();
  in.cache = {};
  in.k.shape[0] = in.v.shape[0] = kRequests;
  expect_refused("sequences", in);
}

TEST_F(ContiguousCache, ConfigurationsThatDoNotGoWithItAreNamed) {
  const auto refused = [this](const std::string& argument, auto change) {
    AttentionConfig config = config_;
    change(config);
    expect_invalid(argument, [&] { Attention::create(config, Device::host()); });
  };
  refused("causal_align", [](AttentionConfig& c) { c.causal_align = CausalAlign::top_left; });
  refused("dropout", [](AttentionConfig& c) { c.dropout = 0.1f; });
  const Attention attention = Attention::create(config_, Device::host());
  expect_error(ErrorCode::unsupported, "page_size", [&] { attention.backward({}, {}); });
  ForwardInputs in = inputs();
  const std::vector<SharedPrefix> prefixes(1);
  in.prefixes = prefixes;
  expect_refused("prefixes", in);
}

/// The planner's choice, without a GPU: prefills by the copy engine, decodes by the other family.
TEST_F(ContiguousCache, KernelsAreThoseOfPages) {
  config_.dtype = DType::bf16;
  config_.head_dim = config_.head_dim_v = 128;
  config_.compile = CompilePolicy::never;
  config_.cache.mode = CachePolicy::Mode::memory;
  const auto missing = [&](const AttentionShape& shape) -> std::string {
    try {
      find_kernels(config_, shape, "sm_90a");
    } catch (const Error& error) {
      return error.what();
    }
    return {};
  };
  const std::string decode = missing({.b = 64, .h_q = 32, .h_kv = 8, .s_q = 1, .s_kv = 8192});
  EXPECT_NE(decode.find("sm90_forward"), std::string::npos) << decode;
  EXPECT_NE(decode.find("exact_max=1 page_size=-1 scheduled=1"), std::string::npos) << decode;
  EXPECT_NE(decode.find("--page-size -1"), std::string::npos) << decode;
  const std::string prefill = missing({.b = 2, .h_q = 32, .h_kv = 8, .s_q = 2048, .s_kv = 8192});
  EXPECT_NE(prefill.find("sm90_forward"), std::string::npos) << prefill;
}

// Also where no request has any: 0 says nothing of max_s_kv, so that lengths on a device may be those of the rows.
TEST_F(ContiguousCache, CapturesCoverTheRowsOrWhatIsSaidOfThem) {
  config_.score = {"score + bias[kv]", {{"bias", DType::f64}}};
  keys_.assign(keys_.size(), 0);
  const auto with = [&](std::int64_t most, std::int64_t elements) {
    ForwardInputs in = inputs();
    in.sequences.max_s_kv = most;
    in.captures = {{"bias", TensorView(static_cast<const void*>(k_.data()), DType::f64, {elements})}};
    return in;
  };
  expect_refused("captures[bias]", with(0, 0));
  expect_refused("captures[bias]", with(0, kMost - 1));
  expect_refused("captures[bias]", with(2, 0));
  EXPECT_NO_THROW(run(with(0, kMost)));
  EXPECT_NO_THROW(run(with(2, 2)));
  EXPECT_EQ(o_, std::vector<double>(o_.size(), 0));
}

}  // namespace
}  // namespace fa
