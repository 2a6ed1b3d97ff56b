// A KV cache in pages on the host device, through the public API: what a call means, and what is refused.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
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
constexpr std::int64_t kPage = 4, kPages = 12, kMaxPages = 5, kRequests = 3, kRows = 2;
constexpr double kUntouched = -777;

/// Three requests of two query rows each over a pool of [pages, page, h_kv, d].
class PagedCall : public testing::Test {
 protected:
  PagedCall() {
    config_.head_dim = kDimQk;
    config_.head_dim_v = kDimV;
    config_.dtype = DType::f64;
    config_.causal = true;
    config_.page_size = kPage;
  }

  TensorView table() { return TensorView(table_.data(), DType::i32, {kRequests, kMaxPages}); }
  ForwardInputs inputs() {
    ForwardInputs in;
    in.q = TensorView(q_.data(), DType::f64, {kRequests, kHeadsQ, kRows, kDimQk});
    in.k = TensorView(k_.data(), DType::f64, {kPages, kPage, kHeadsKv, kDimQk}).swap_axes(1, 2);
    in.v = TensorView(v_.data(), DType::f64, {kPages, kPage, kHeadsKv, kDimV}).swap_axes(1, 2);
    in.sequences.seqused_kv = keys_.data();
    in.cache.block_table = table();
    return in;
  }
  ForwardOutputs outputs() {
    return {TensorView(o_.data(), DType::f64, {kRequests, kHeadsQ, kRows, kDimV}),
            TensorView(lse_.data(), DType::f64, {kRequests, kHeadsQ, kRows})};
  }
  ForwardInputs packed_inputs() {
    ForwardInputs in = inputs();
    in.q = TensorView(q_.data(), DType::f64, {kRequests * kRows, kHeadsQ, kDimQk});
    in.sequences.b = kRequests;
    in.sequences.cu_seqlens_q = cu_q_.data();
    return in;
  }
  ForwardOutputs packed_outputs() {
    return {TensorView(o_.data(), DType::f64, {kRequests * kRows, kHeadsQ, kDimV}),
            TensorView(lse_.data(), DType::f64, {kHeadsQ, kRequests * kRows})};
  }

  void run(const ForwardInputs& in, const ForwardOutputs& out) const {
    Attention::create(config_, Device::host()).forward(in, out);
  }
  void expect_refused(const std::string& argument, const ForwardInputs& in) {
    expect_invalid(argument, [&] { run(in, outputs()); });
    EXPECT_EQ(o_, std::vector<double>(o_.size(), kUntouched));
  }

  /// O of request `i`, whose rows are from `row` on, by a dense call on its keys from `begin` on. Without windows and
  /// chunks a first position is a shorter cache.
  std::vector<double> dense(std::size_t i, std::int64_t begin, std::int64_t table_row) const {
    const std::int64_t keys = keys_[i] - begin;
    std::vector<double> k, v, o(kHeadsQ * kRows * kDimV);
    for (std::int64_t h = 0; h < kHeadsKv; ++h) {
      for (std::int64_t key = begin; key < keys_[i]; ++key) {
        const std::int64_t page = table_[static_cast<std::size_t>(table_row * kMaxPages + key / kPage)];
        const std::int64_t row = (page * kPage + key % kPage) * kHeadsKv + h;
        k.insert(k.end(), k_.begin() + row * kDimQk, k_.begin() + (row + 1) * kDimQk);
        v.insert(v.end(), v_.begin() + row * kDimV, v_.begin() + (row + 1) * kDimV);
      }
    }
    AttentionConfig config = config_;
    config.page_size = 0;
    const ForwardInputs in{TensorView(q_.data() + static_cast<std::int64_t>(i) * kHeadsQ * kRows * kDimQk, DType::f64,
                                      {1, kHeadsQ, kRows, kDimQk}),
                           TensorView(k.data(), DType::f64, {1, kHeadsKv, keys, kDimQk}),
                           TensorView(v.data(), DType::f64, {1, kHeadsKv, keys, kDimV})};
    Attention::create(config, Device::host())
        .forward(in, {TensorView(o.data(), DType::f64, {1, kHeadsQ, kRows, kDimV})});
    return o;
  }
  void expect_dense(const std::vector<std::int64_t>& begin, const std::vector<std::int64_t>& rows) const {
    for (std::size_t i = 0; i < kRequests; ++i) {
      const std::vector<double> expected = dense(i, begin[i], rows[i]);
      for (std::size_t n = 0; n < expected.size(); ++n) {
        ASSERT_NEAR(o_[i * expected.size() + n], expected[n], 1e-12) << "request " << i << ", element " << n;
      }
    }
  }

  AttentionConfig config_;
  std::vector<std::int32_t> keys_{13, 2, 20}, cu_q_{0, 2, 4, 6};
  std::vector<std::int32_t> table_{7, 0, 3, 11, -1, 5, -1, -1, -1, -1, 1, 2, 10, 9, 4};
  std::vector<double> q_ = normals(kRequests * kHeadsQ * kRows * kDimQk, 1);
  std::vector<double> k_ = normals(kPages * kPage * kHeadsKv * kDimQk, 2);
  std::vector<double> v_ = normals(kPages * kPage * kHeadsKv * kDimV, 3);
  std::vector<double> o_ = std::vector<double>(kRequests * kHeadsQ * kRows * kDimV, kUntouched);
  std::vector<double> lse_ = std::vector<double>(kRequests * kHeadsQ * kRows, kUntouched);
};

TEST_F(PagedCall, EachRequestIsADenseCallOnItsKeys) {
  run(inputs(), outputs());
  expect_dense({0, 0, 0}, {0, 1, 2});
  config_.causal = false;
  run(inputs(), outputs());
  expect_dense({0, 0, 0}, {0, 1, 2});
}

TEST_F(PagedCall, TableRowsAreFoundByBatchIndexAndKeysFromSeqBegin) {
  const std::vector<std::int32_t> index{2, 1, 0}, begin{9, 0, 17};
  table_[1] = table_[2] = -1;                                          // of request 2, evicted
  table_[10] = table_[11] = std::numeric_limits<std::int32_t>::max();  // of request 0
  keys_ = {13, 2, 16};
  const std::vector<std::int32_t> first{9, 0, 12};
  ForwardInputs in = inputs();
  in.cache.batch_index = index.data();
  in.cache.seq_begin = first.data();
  run(in, outputs());
  expect_dense({9, 0, 12}, {2, 1, 0});
}

TEST_F(PagedCall, PackedQueriesAreTheSameRequests) {
  run(inputs(), outputs());
  const std::vector<double> dense_o = o_;
  config_.varlen = true;
  std::vector<double> q(q_.size());
  for (std::size_t i = 0; i < kRequests; ++i) {  // [b, h, s, d] to [b, s, h, d]
    for (std::size_t h = 0; h < kHeadsQ; ++h) {
      for (std::size_t s = 0; s < kRows; ++s) {
        for (std::size_t d = 0; d < kDimQk; ++d) {
          q[((i * kRows + s) * kHeadsQ + h) * kDimQk + d] = q_[((i * kHeadsQ + h) * kRows + s) * kDimQk + d];
        }
      }
    }
  }
  q_ = q;
  run(packed_inputs(), packed_outputs());
  for (std::size_t i = 0; i < kRequests; ++i) {
    for (std::size_t h = 0; h < kHeadsQ; ++h) {
      for (std::size_t s = 0; s < kRows; ++s) {
        EXPECT_EQ(o_[((i * kRows + s) * kHeadsQ + h) * kDimV], dense_o[((i * kHeadsQ + h) * kRows + s) * kDimV]);
      }
    }
  }
}

/// [pages, h, page, d], K and V interleaved in one tensor, and one KV head without its axis.
TEST_F(PagedCall, PoolsHaveAnyStrides) {
  run(inputs(), outputs());
  const std::vector<double> expected = o_;
  constexpr std::int64_t kWide = kDimQk + kDimV;
  std::vector<double> both(kPages * kHeadsKv * kPage * kWide);
  for (std::int64_t row = 0; row < kPages * kPage * kHeadsKv; ++row) {
    const std::int64_t page = row / (kPage * kHeadsKv), in_page = row / kHeadsKv % kPage, h = row % kHeadsKv;
    double* const to = both.data() + ((page * kHeadsKv + h) * kPage + in_page) * kWide;
    std::copy_n(k_.data() + row * kDimQk, kDimQk, to);
    std::copy_n(v_.data() + row * kDimV, kDimV, to + kDimQk);
  }
  ForwardInputs in = inputs();
  const std::array<std::int64_t, 4> strides{kHeadsKv * kPage * kWide, kPage * kWide, kWide, 1};
  in.k = TensorView(both.data(), DType::f64, std::array{kPages, kHeadsKv, kPage, kDimQk}, strides);
  in.v = TensorView(both.data() + kDimQk, DType::f64, std::array{kPages, kHeadsKv, kPage, kDimV}, strides);
  run(in, outputs());
  EXPECT_EQ(o_, expected);
}

TEST_F(PagedCall, RequestsWithoutKeysGiveZero) {
  keys_ = {0, 0, 20};
  table_[0] = -1;
  run(inputs(), outputs());
  for (std::size_t n = 0; n < 2 * kHeadsQ * kRows * kDimV; ++n) EXPECT_EQ(o_[n], 0);
  for (std::size_t n = 0; n < 2 * kHeadsQ * kRows; ++n) {
    EXPECT_EQ(lse_[n], -std::numeric_limits<double>::infinity());
  }
}

TEST_F(PagedCall, RequestsWhoseKeysAreAllHiddenNeedNoEntry) {
  const std::vector<std::int32_t> begin{13, 2, 20};
  table_.assign(table_.size(), -1);
  ForwardInputs in = inputs();
  in.cache.seq_begin = begin.data();
  run(in, outputs());
  EXPECT_EQ(o_, std::vector<double>(o_.size(), 0));
}

TEST_F(PagedCall, EntriesInFrontOfTheWindowAreNotRead) {
  config_.window_left = 3;  // of the row at position 18: keys from 15 on
  table_[10] = table_[11] = table_[12] = -1;
  EXPECT_NO_THROW(run(inputs(), outputs()));
  table_[13] = -1;
  expect_invalid("cache.block_table[2][3]", [&] { run(inputs(), outputs()); });
}

TEST_F(PagedCall, WrongLengthsAndTablesAreNamed) {
  table_[3] = kPages;
  expect_refused("cache.block_table[0][3]", inputs());
  table_[3] = -1;
  expect_refused("cache.block_table[0][3]", inputs());
  table_[3] = 11;
  keys_[2] = 21;
  expect_refused("seqused_kv[2]", inputs());
  keys_[2] = -1;
  expect_refused("seqused_kv[2]", inputs());
  keys_[2] = 20;
  ForwardInputs in = inputs();
  in.sequences.max_s_kv = 19;
  expect_refused("seqused_kv[2]", in);
  std::vector<std::int32_t> numbers{0, 3, 0};
  in = inputs();
  in.cache.seq_begin = numbers.data();
  expect_refused("cache.seq_begin[1]", in);
  in = inputs();
  in.cache.batch_index = numbers.data();
  expect_refused("cache.batch_index[1]", in);
}

/// A table may have room for 2^31 positions. Windows and chunks are added to positions in 32 bits, so that there are
/// fewer with them.
TEST_F(PagedCall, PositionsAreFewEnoughForWhatIsAddedToThem) {
  const std::int64_t kWide = std::numeric_limits<std::int32_t>::max() - 65537;
  ForwardInputs in = inputs();
  in.cache.block_table.shape[1] = 1 << 29;
  in.cache.block_table.strides = {kMaxPages, 0};
  run(in, outputs());
  const auto expect_fewer = [&] {
    std::fill(o_.begin(), o_.end(), kUntouched);
    in.sequences.max_s_kv = 0;
    expect_refused("s_q, s_kv", in);
    in.sequences.max_s_kv = (1 << 29) + 1;
    expect_refused("s_q, s_kv", in);
    in.sequences.max_s_kv = 1 << 29;
    run(in, outputs());
  };
  config_.window_left = kWide;
  expect_fewer();
  config_.causal = false;
  config_.window_left = -1;
  config_.window_right = kWide;
  expect_fewer();
  config_.window_right = -1;
  config_.chunk = kWide;
  expect_fewer();
}

TEST_F(PagedCall, WrongCallsAreNamed) {
  const auto refused = [this](const std::string& argument, auto change) {
    ForwardInputs in = inputs();
    change(in);
    expect_refused(argument, in);
  };
  refused("cache.block_table", [](ForwardInputs& in) { in.cache.block_table = {}; });
  refused("cache.block_table", [](ForwardInputs& in) { in.cache.block_table.dtype = DType::f32; });
  refused("cache.block_table", [](ForwardInputs& in) { in.cache.block_table.shape[0] = kRequests - 1; });
  refused("cache.block_table", [](ForwardInputs& in) { in.cache.block_table.rank = 1; });
  refused("cache.block_table", [](ForwardInputs& in) { in.cache.block_table.data = nullptr; });
  refused("seqused_kv", [](ForwardInputs& in) { in.sequences.seqused_kv = nullptr; });
  refused("cu_seqlens_q", [this](ForwardInputs& in) { in.sequences.cu_seqlens_q = cu_q_.data(); });
  refused("cu_seqlens_kv", [this](ForwardInputs& in) { in.sequences.cu_seqlens_kv = cu_q_.data(); });
  refused("seqused_q", [this](ForwardInputs& in) { in.sequences.seqused_q = cu_q_.data(); });
  refused("sequences.b", [](ForwardInputs& in) { in.sequences.b = 2; });
  refused("sequences.max_s_kv", [](ForwardInputs& in) { in.sequences.max_s_kv = -1; });
  refused("k", [](ForwardInputs& in) { in.k.shape[2] = kPage + 1; });  // larger than the pool
  refused("v", [](ForwardInputs& in) { in.v.shape[0] = kPages - 1; });
  refused("k", [](ForwardInputs& in) { in.k.dtype = DType::f32; });
  refused("k", [](ForwardInputs& in) { in.k.rank = 2; });
}

TEST_F(PagedCall, OutputsMayNotLieInTheCache) {
  ForwardOutputs out = outputs();
  out.o.data = v_.data();
  expect_invalid("o", [&] { run(inputs(), out); });
  out = outputs();
  out.lse.data = table_.data();
  out.lse.shape = {kRequests, kHeadsQ, kRows, 0};
  expect_invalid("lse", [&] { run(inputs(), out); });
}

TEST_F(PagedCall, CachesNeedAPageSize) {
  config_.page_size = 0;
  ForwardInputs in = inputs();
  in.k = TensorView(k_.data(), DType::f64, {kRequests, kHeadsKv, 8, kDimQk});
  in.v = TensorView(v_.data(), DType::f64, {kRequests, kHeadsKv, 8, kDimV});
  in.sequences = {};
  expect_refused("cache", in);
  in = inputs();
  in.cache = {};
  expect_invalid("k", [&] { run(in, outputs()); });
}

TEST_F(PagedCall, PackedCallsAreCheckedLikewise) {
  config_.varlen = true;
  ForwardInputs in = packed_inputs();
  in.sequences.cu_seqlens_kv = cu_q_.data();
  expect_invalid("cu_seqlens_kv", [&] { run(in, packed_outputs()); });
  in = packed_inputs();
  in.sequences.cu_seqlens_q = nullptr;
  expect_invalid("cu_seqlens_q", [&] { run(in, packed_outputs()); });
  in = packed_inputs();
  in.sequences.b = 2;
  expect_invalid("cache.block_table", [&] { run(in, packed_outputs()); });
  cu_q_[2] = 1;
  expect_invalid("cu_seqlens_q[2]", [&] { run(packed_inputs(), packed_outputs()); });
}

TEST_F(PagedCall, ConfigurationsThatDoNotGoWithPagesAreNamed) {
  const auto refused = [this](const std::string& argument, auto change) {
    AttentionConfig config = config_;
    change(config);
    expect_invalid(argument, [&] { Attention::create(config, Device::host()); });
  };
  refused("page_size", [](AttentionConfig& c) { c.page_size = kContiguous - 1; });
  refused("page_size", [](AttentionConfig& c) { c.page_size = std::int64_t{1} << 31; });
  refused("causal_align", [](AttentionConfig& c) { c.causal_align = CausalAlign::top_left; });
  refused("dropout", [](AttentionConfig& c) { c.dropout = 0.1f; });
}

TEST_F(PagedCall, ThereIsNoBackward) {
  const Attention attention = Attention::create(config_, Device::host());
  const AttentionShape shape{.b = 1, .h_q = 1, .s_q = 1, .s_kv = 1};
  const auto refused = [](auto&& call) { expect_error(ErrorCode::unsupported, "page_size", call); };
  refused([&] { attention.backward({}, {}); });
  refused([&] { attention.prepare_backward(shape); });
  refused([&] { attention.backward_workspace_size(shape); });
  refused([&] { attention.backward_mask_tiles_size(shape); });
  refused([&] { attention.backward_kernel_info(shape); });
  AttentionConfig config = config_;
  config.dtype = DType::bf16;
  refused([&] { find_backward_kernels(config, shape, "sm_90a"); });
}

/// The planner's choice, without a GPU.
TEST_F(PagedCall, KernelsHaveThePageSize) {
  config_.dtype = DType::bf16;
  config_.compile = CompilePolicy::never;
  config_.cache.mode = CachePolicy::Mode::memory;
  config_.kernel = KernelOverride{"sm90", ""};
  const AttentionShape shape{.b = 4, .h_q = 8, .h_kv = 2, .s_q = 1, .s_kv = 4096};
  expect_invalid("kernel.kernel", [&] { find_kernels(config_, shape, "sm_90a"); });
  config_.kernel.reset();
  config_.page_size = 1;
  try {
    find_kernels(config_, shape, "sm_90a");
    ADD_FAILURE() << "found what nobody compiled";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::cache_miss);
    EXPECT_NE(std::string(error.field("kernel")).find(" page_size=1"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.field("command")).find(" --page-size 1"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace fa
