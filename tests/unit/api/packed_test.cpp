// Packed batches and dropout on the host device, through the public API.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <span>
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
constexpr double kUntouched = -777;

TensorView view(std::vector<double>& memory, std::initializer_list<std::int64_t> shape) {
  return TensorView(memory.data(), DType::f64, shape);
}

AttentionConfig base_config() {
  AttentionConfig config;
  config.head_dim = kDimQk;
  config.head_dim_v = kDimV;
  config.dtype = DType::f64;
  return config;
}

Attention host(const AttentionConfig& config) {
  return Attention::create(config, Device::host());
}

/// A packed batch with forward's and backward's tensors, some rows of which belong to no sequence.
class Packed : public testing::Test {
 protected:
  Packed() { config_.varlen = true; }

  PackedSequences sequences() const {
    return {.b = static_cast<std::int64_t>(cu_q_.size()) - 1,
            .cu_seqlens_q = cu_q_.data(),
            .cu_seqlens_kv = cu_kv_.data(),
            .seqused_q = used_q_.empty() ? nullptr : used_q_.data(),
            .seqused_kv = used_kv_.empty() ? nullptr : used_kv_.data(),
            .max_s_q = max_s_q_,
            .max_s_kv = max_s_kv_};
  }
  ForwardInputs inputs() {
    return {view(q_, {kTotalQ, kHeadsQ, kDimQk}),
            view(k_, {kTotalKv, kHeadsKv, kDimQk}),
            view(v_, {kTotalKv, kHeadsKv, kDimV}),
            {},
            {},
            sequences(),
            state_};
  }
  ForwardOutputs outputs() { return {view(o_, {kTotalQ, kHeadsQ, kDimV}), view(lse_, {kHeadsQ, kTotalQ})}; }
  BackwardInputs backward_inputs() {
    const ForwardInputs in = inputs();
    return {in.q, in.k, in.v, outputs().o, outputs().lse, view(dout_, {kTotalQ, kHeadsQ, kDimV}),
            {},   {},   {},   sequences(), state_};
  }
  BackwardOutputs backward_outputs() {
    return {view(dq_, {kTotalQ, kHeadsQ, kDimQk}), view(dk_, {kTotalKv, kHeadsKv, kDimQk}),
            view(dv_, {kTotalKv, kHeadsKv, kDimV})};
  }
  void run() {
    const Attention attention = host(config_);
    attention.forward(inputs(), outputs());
    attention.backward(backward_inputs(), backward_outputs());
  }
  void expect_refused(const std::string& argument) {
    expect_invalid(argument, [&] { host(config_).forward(inputs(), outputs()); });
    expect_invalid(argument, [&] { host(config_).backward(backward_inputs(), backward_outputs()); });
    EXPECT_EQ(o_, std::vector<double>(o_.size(), kUntouched));
  }

  static constexpr std::int64_t kTotalQ = 60, kTotalKv = 90;

  AttentionConfig config_ = base_config();
  std::vector<std::int32_t> cu_q_{2, 7, 7, 30, 55}, cu_kv_{1, 10, 20, 80, 80}, used_q_, used_kv_;
  std::int64_t max_s_q_ = 0, max_s_kv_ = 0;
  DropoutState state_{};
  std::vector<double> q_ = normals(kTotalQ * kHeadsQ * kDimQk, 1), k_ = normals(kTotalKv * kHeadsKv * kDimQk, 2);
  std::vector<double> v_ = normals(kTotalKv * kHeadsKv * kDimV, 3), dout_ = normals(kTotalQ * kHeadsQ * kDimV, 4);
  std::vector<double> o_ = std::vector<double>(dout_.size(), kUntouched);
  std::vector<double> lse_ = std::vector<double>(kTotalQ * kHeadsQ, kUntouched);
  std::vector<double> dq_ = std::vector<double>(q_.size(), kUntouched);
  std::vector<double> dk_ = std::vector<double>(k_.size(), kUntouched);
  std::vector<double> dv_ = std::vector<double>(v_.size(), kUntouched);
};

/// The rows [first, first + count) of a packed [total, heads, d] as a dense [1, heads, count, d].
TensorView dense_rows(std::vector<double>& memory, std::int64_t heads, std::int64_t d, std::int64_t first,
                      std::int64_t count) {
  return TensorView(memory.data() + first * heads * d, DType::f64, {1, count, heads, d}).swap_axes(1, 2);
}

/// Every sequence gives what a dense call on it alone gives; b numbers the sequences in the mask.
TEST_F(Packed, EachSequenceIsADenseCall) {
  for (const bool causal : {false, true}) {
    for (const float dropout : {0.f, 0.4f}) {
      config_.causal = causal;
      config_.dropout = dropout;
      state_ = {.seed = 5, .offset = 100};
      used_q_ = {4, 0, 23, 25};
      used_kv_ = {9, 3, 41, 0};
      run();
      AttentionConfig dense = config_;
      dense.varlen = false;
      for (std::size_t i = 0; i + 1 < cu_q_.size(); ++i) {
        const std::int64_t row = cu_q_[i], rows = used_q_[i], key = cu_kv_[i], keys = used_kv_[i];
        std::vector<double> o(static_cast<std::size_t>(rows * kHeadsQ * kDimV)),
            lse(static_cast<std::size_t>(rows * kHeadsQ));
        std::vector<double> dq(static_cast<std::size_t>(rows * kHeadsQ * kDimQk));
        std::vector<double> dk(static_cast<std::size_t>(keys * kHeadsKv * kDimQk)),
            dv(static_cast<std::size_t>(keys * kHeadsKv * kDimV));
        const DropoutState state = dropout > 0 ? DropoutState{5, 100 + i * kHeadsQ} : DropoutState{};
        const TensorView q = dense_rows(q_, kHeadsQ, kDimQk, row, rows),
                         k = dense_rows(k_, kHeadsKv, kDimQk, key, keys);
        const TensorView v = dense_rows(v_, kHeadsKv, kDimV, key, keys),
                         dout = dense_rows(dout_, kHeadsQ, kDimV, row, rows);
        const TensorView o_view = dense_rows(o, kHeadsQ, kDimV, 0, rows), lse_view = view(lse, {1, kHeadsQ, rows});
        const Attention attention = host(dense);
        attention.forward({q, k, v, {}, {}, {}, state}, {o_view, lse_view});
        attention.backward({q, k, v, o_view, lse_view, dout, {}, {}, {}, {}, state},
                           {dense_rows(dq, kHeadsQ, kDimQk, 0, rows), dense_rows(dk, kHeadsKv, kDimQk, 0, keys),
                            dense_rows(dv, kHeadsKv, kDimV, 0, keys)});
        const auto same = [](const std::vector<double>& part, const std::vector<double>& whole, std::int64_t at) {
          return std::equal(part.begin(), part.end(), whole.begin() + at);
        };
        EXPECT_TRUE(same(o, o_, row * kHeadsQ * kDimV)) << i;
        EXPECT_TRUE(same(dq, dq_, row * kHeadsQ * kDimQk)) << i;
        EXPECT_TRUE(same(dk, dk_, key * kHeadsKv * kDimQk)) << i;
        EXPECT_TRUE(same(dv, dv_, key * kHeadsKv * kDimV)) << i;
        for (std::int64_t h = 0; h < kHeadsQ; ++h) {
          for (std::int64_t n = 0; n < rows; ++n) {
            EXPECT_EQ(lse[static_cast<std::size_t>(h * rows + n)],
                      lse_[static_cast<std::size_t>(h * kTotalQ + row + n)]);
          }
        }
      }
    }
  }
}

TEST_F(Packed, PaddingIsUntouchedOrCleared) {
  used_q_ = {4, 0, 23, 25};
  used_kv_ = {9, 3, 41, 0};
  const auto is_row = [&](std::int64_t row, const std::vector<std::int32_t>& cu,
                          const std::vector<std::int32_t>& used) {
    for (std::size_t i = 0; i < used.size(); ++i) {
      if (row >= cu[i] && row < cu[i] + used[i]) return true;
    }
    return false;
  };
  for (const bool clear : {false, true}) {
    config_.zero_padding = clear;
    run();
    const double padding = clear ? 0 : kUntouched;
    for (std::int64_t row = 0; row < kTotalQ; ++row) {
      if (is_row(row, cu_q_, used_q_)) continue;
      EXPECT_EQ(o_[static_cast<std::size_t>(row * kHeadsQ * kDimV + 3)], padding);
      EXPECT_EQ(dq_[static_cast<std::size_t>(row * kHeadsQ * kDimQk + 3)], padding);
      EXPECT_EQ(lse_[static_cast<std::size_t>(2 * kTotalQ + row)], clear ? -HUGE_VAL : kUntouched);
    }
    for (std::int64_t row = 0; row < kTotalKv; ++row) {
      if (is_row(row, cu_kv_, used_kv_)) continue;
      EXPECT_EQ(dk_[static_cast<std::size_t>(row * kHeadsKv * kDimQk + 5)], padding);
      EXPECT_EQ(dv_[static_cast<std::size_t>(row * kHeadsKv * kDimV + 5)], padding);
    }
  }
}

TEST_F(Packed, NoSequencesOrNoRows) {
  cu_q_ = {0};
  cu_kv_ = {0};
  run();
  EXPECT_EQ(o_, std::vector<double>(o_.size(), kUntouched));
  config_.zero_padding = true;
  run();
  EXPECT_EQ(o_, std::vector<double>(o_.size(), 0.0));
  EXPECT_EQ(dv_, std::vector<double>(dv_.size(), 0.0));
}

TEST_F(Packed, WrongLengthsAreNamed) {
  const auto with = [&](auto change, const std::string& argument) {
    const auto kept = std::tuple(cu_q_, cu_kv_, used_q_, used_kv_, max_s_q_, max_s_kv_);
    change();
    expect_refused(argument);
    std::tie(cu_q_, cu_kv_, used_q_, used_kv_, max_s_q_, max_s_kv_) = kept;
  };
  with([&] { cu_q_[2] = 6; }, "cu_seqlens_q[2]");
  with([&] { cu_q_[0] = -1; }, "cu_seqlens_q[0]");
  with([&] { cu_q_.back() = 61; }, "cu_seqlens_q[4]");
  with([&] { cu_kv_.back() = 79; }, "cu_seqlens_kv[4]");
  with([&] { cu_kv_.back() = std::numeric_limits<std::int32_t>::max(); }, "cu_seqlens_kv[4]");
  with([&] { used_q_ = {5, 1, 0, 0}; }, "seqused_q[1]");
  with([&] { used_kv_ = {5, -1, 0, 0}; }, "seqused_kv[1]");
  with([&] { max_s_q_ = 24; }, "cu_seqlens_q[4] - cu_seqlens_q[3]");
  with([&] { max_s_kv_ = -1; }, "sequences.max_s_kv");
}

TEST_F(Packed, WrongArgumentsAreNamed) {
  const auto refuse = [&](const std::string& argument, auto change) {
    ForwardInputs in = inputs();
    ForwardOutputs out = outputs();
    change(in, out);
    expect_invalid(argument, [&] { host(config_).forward(in, out); });
  };
  refuse("sequences.b", [](ForwardInputs& in, ForwardOutputs&) { in.sequences.b = -1; });
  refuse("cu_seqlens_q", [](ForwardInputs& in, ForwardOutputs&) { in.sequences.cu_seqlens_q = nullptr; });
  refuse("cu_seqlens_kv", [](ForwardInputs& in, ForwardOutputs&) { in.sequences.cu_seqlens_kv = nullptr; });
  refuse("q", [&](ForwardInputs& in, ForwardOutputs&) { in.q = view(q_, {kTotalQ * kHeadsQ, kDimQk}); });
  refuse("q", [&](ForwardInputs& in, ForwardOutputs&) { in.q = view(q_, {2, kHeadsQ, kTotalQ / 2, kDimQk}); });
  refuse("v", [&](ForwardInputs& in, ForwardOutputs&) { in.v = view(v_, {kTotalKv - 1, kHeadsKv, kDimV}); });
  refuse("lse", [&](ForwardInputs&, ForwardOutputs& out) { out.lse = view(lse_, {kTotalQ, kHeadsQ}); });
  refuse("dropout.device", [](ForwardInputs& in, ForwardOutputs&) {
    static const std::uint64_t state[2] = {};
    in.dropout.device = state;
  });
  // [1, h, total, d] is [total, h, d] by another name.
  ForwardInputs in = inputs();
  in.q = TensorView(q_.data(), DType::f64, {1, kTotalQ, kHeadsQ, kDimQk}).swap_axes(1, 2);
  EXPECT_NO_THROW(host(config_).forward(in, outputs()));
}

TEST_F(Packed, ShapesAreCompleted) {
  const Attention attention = host(config_);
  EXPECT_NO_THROW(attention.prepare({.b = 3, .h_q = 4, .h_kv = 2, .s_q = 100, .s_kv = 50}));
  EXPECT_NO_THROW(attention.prepare({.b = 3, .h_q = 4, .s_q = 0, .s_kv = 0, .total_q = 10, .total_kv = 10}));
  expect_invalid("total_q", [&] { attention.prepare({.b = 1 << 20, .s_q = 1 << 20, .s_kv = 1}); });
  expect_invalid("total_kv", [&] { attention.prepare({.b = 1, .s_q = 1, .s_kv = 1, .total_kv = -1}); });
}

TEST(Varlen, ConfigsAreChecked) {
  AttentionConfig config = base_config();
  config.zero_padding = true;
  expect_invalid("zero_padding", [&] { host(config); });
  config.zero_padding = false;
  config.check_sequences = true;
  expect_invalid("check_sequences", [&] { host(config); });
  config.varlen = true;
  EXPECT_NO_THROW(host(config));
  for (const float p : {-0.1f, 1.f, 1.5f, std::nanf(""), HUGE_VALF}) {
    AttentionConfig wrong = base_config();
    wrong.dropout = p;
    expect_invalid("dropout", [&] { host(wrong); });
  }
  std::vector<double> q = normals(8 * kDimQk, 1), v = normals(8 * kDimV, 2), o(8 * kDimV);
  const std::int32_t cu[2] = {0, 8};
  ForwardInputs in{view(q, {1, 8, kDimQk}), view(q, {1, 8, kDimQk}), view(v, {1, 8, kDimV}), {}, {}};
  in.sequences = {.b = 1, .cu_seqlens_q = cu, .cu_seqlens_kv = cu};
  expect_invalid("sequences", [&] { host(base_config()).forward(in, {view(o, {1, 8, kDimV}), {}}); });
}

/// Straight from the definition, with the mask that the library gives away.
TEST(Dropout, IsWhatItsMaskSays) {
  constexpr std::int64_t kB = 2, kRowsQ = 19, kRowsKv = 37;
  std::vector<double> q = normals(kB * kHeadsQ * kRowsQ * kDimQk, 1), k = normals(kB * kHeadsKv * kRowsKv * kDimQk, 2);
  std::vector<double> v = normals(kB * kHeadsKv * kRowsKv * kDimV, 3), o(kB * kHeadsQ * kRowsQ * kDimV);
  std::vector<double> lse(kB * kHeadsQ * kRowsQ), plain_lse(lse.size()), plain_o(o.size());
  ForwardInputs in{view(q, {kB, kHeadsQ, kRowsQ, kDimQk}),
                   view(k, {kB, kHeadsKv, kRowsKv, kDimQk}),
                   view(v, {kB, kHeadsKv, kRowsKv, kDimV}),
                   {},
                   {}};
  AttentionConfig config = base_config();
  host(config).forward(in, {view(plain_o, {kB, kHeadsQ, kRowsQ, kDimV}), view(plain_lse, {kB, kHeadsQ, kRowsQ})});
  config.dropout = 0.25f;
  in.dropout = {.seed = 99, .offset = 12345678901};
  host(config).forward(in, {view(o, {kB, kHeadsQ, kRowsQ, kDimV}), view(lse, {kB, kHeadsQ, kRowsQ})});
  EXPECT_EQ(lse, plain_lse);
  std::vector<std::uint8_t> keep(kB * kHeadsQ * kRowsQ * kRowsKv);
  dropout_mask(in.dropout, 0.25f, kB, kHeadsQ, kRowsQ, kRowsKv, keep.data());
  double worst = 0;
  for (std::int64_t row = 0; row < kB * kHeadsQ * kRowsQ; ++row) {
    const std::int64_t kv = (row / kRowsQ / kHeadsQ * kHeadsKv + row / kRowsQ % kHeadsQ / 2) * kRowsKv;
    std::vector<double> expected(kDimV);
    for (std::int64_t j = 0; j < kRowsKv; ++j) {
      const double score = std::inner_product(&q[row * kDimQk], &q[row * kDimQk] + kDimQk, &k[(kv + j) * kDimQk], 0.0);
      const double p = std::exp(score / 4 - plain_lse[row]) * keep[row * kRowsKv + j] / 0.75;
      for (std::int64_t d = 0; d < kDimV; ++d) expected[d] += p * v[(kv + j) * kDimV + d];
    }
    for (std::int64_t d = 0; d < kDimV; ++d) worst = std::max(worst, std::abs(expected[d] - o[row * kDimV + d]));
  }
  EXPECT_LT(worst, 1e-12);
  const std::uint64_t state[2] = {99, 12345678901};
  in.dropout = {.device = state};
  std::vector<double> again(o.size());
  host(config).forward(in, {view(again, {kB, kHeadsQ, kRowsQ, kDimV}), {}});
  EXPECT_EQ(again, o);
}

/// Central differences of the forward under one mask.
TEST(Dropout, GradientsAreThoseOfForward) {
  constexpr std::int64_t kRows = 9, kKeys = 11;
  std::vector<double> q = normals(kHeadsQ * kRows * kDimQk, 1), k = normals(kHeadsKv * kKeys * kDimQk, 2);
  std::vector<double> v = normals(kHeadsKv * kKeys * kDimV, 3), dout = normals(kHeadsQ * kRows * kDimV, 4);
  std::vector<double> dlse = normals(kHeadsQ * kRows, 5), o(dout.size()), lse(dlse.size());
  std::vector<double> dq(q.size()), dk(k.size()), dv(v.size());
  AttentionConfig config = base_config();
  config.causal = true;
  config.dropout = 0.3f;
  const Attention attention = host(config);
  const ForwardInputs in{view(q, {1, kHeadsQ, kRows, kDimQk}),
                         view(k, {1, kHeadsKv, kKeys, kDimQk}),
                         view(v, {1, kHeadsKv, kKeys, kDimV}),
                         {},
                         {},
                         {},
                         {.seed = 1, .offset = 2}};
  const ForwardOutputs out{view(o, {1, kHeadsQ, kRows, kDimV}), view(lse, {1, kHeadsQ, kRows})};
  const auto loss = [&] {
    attention.forward(in, out);
    return std::inner_product(o.begin(), o.end(), dout.begin(), 0.0) +
           std::inner_product(lse.begin(), lse.end(), dlse.begin(), 0.0);
  };
  loss();
  attention.backward({in.q,
                      in.k,
                      in.v,
                      out.o,
                      out.lse,
                      view(dout, {1, kHeadsQ, kRows, kDimV}),
                      view(dlse, {1, kHeadsQ, kRows}),
                      {},
                      {},
                      {},
                      in.dropout},
                     {view(dq, {1, kHeadsQ, kRows, kDimQk}), view(dk, {1, kHeadsKv, kKeys, kDimQk}),
                      view(dv, {1, kHeadsKv, kKeys, kDimV})});
  const auto expect_derivatives = [&](const char* name, std::vector<double>& x, const std::vector<double>& dx) {
    for (std::size_t i = 0; i < x.size(); i += 7) {
      constexpr double kStep = 1e-5;
      const double kept = x[i];
      x[i] = kept + kStep;
      const double above = loss();
      x[i] = kept - kStep;
      const double below = loss();
      x[i] = kept;
      EXPECT_NEAR(dx[i], (above - below) / (2 * kStep), 1e-7) << name << ' ' << i;
    }
  };
  expect_derivatives("dq", q, dq);
  expect_derivatives("dk", k, dk);
  expect_derivatives("dv", v, dv);
}

TEST(Dropout, MaskArgumentsAreChecked) {
  std::vector<std::uint8_t> keep(16);
  expect_invalid("dropout", [&] { dropout_mask({}, 1.f, 1, 1, 4, 4, keep.data()); });
  expect_invalid("s_q", [&] { dropout_mask({}, 0.5f, 1, 1, -1, 4, keep.data()); });
  expect_invalid("keep", [&] { dropout_mask({}, 0.5f, 1, 1, 4, 4, nullptr); });
  EXPECT_NO_THROW(dropout_mask({}, 0.5f, 1, 1, 0, 4, nullptr));
}

}  // namespace
}  // namespace fa
