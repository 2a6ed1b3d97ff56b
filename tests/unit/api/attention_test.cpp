#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <vector>

#include <fa/attention.hpp>

#include "expect_error.hpp"

namespace fa {
namespace {

using test::expect_invalid;

constexpr float kUntouched = -777;

/// q, k, v, o and lse in their own row-major memory; a test bends one of the views.
class ForwardTest : public testing::Test {
 protected:
  static constexpr std::int64_t kB = 2, kHeadsQ = 4, kHeadsKv = 2, kRowsQ = 3, kRowsKv = 5, kDimQk = 16, kDimV = 8;

  ForwardTest() {
    std::mt19937 generator(1);
    std::normal_distribution<float> normal;
    for (std::vector<float>* memory : {&q_, &k_, &v_}) {
      for (float& value : *memory) {
        value = normal(generator);
      }
    }
    inputs_ = {view(q_, {kB, kHeadsQ, kRowsQ, kDimQk}), view(k_, {kB, kHeadsKv, kRowsKv, kDimQk}),
               view(v_, {kB, kHeadsKv, kRowsKv, kDimV})};
    outputs_ = {view(o_, {kB, kHeadsQ, kRowsQ, kDimV}), view(lse_, {kB, kHeadsQ, kRowsQ})};
  }

  static TensorView view(std::vector<float>& memory, std::initializer_list<std::int64_t> shape) {
    return TensorView(memory.data(), DType::f32, shape);
  }

  static Attention attention(bool causal = false) {
    AttentionConfig config;
    config.head_dim = kDimQk;
    config.head_dim_v = kDimV;
    config.dtype = DType::f32;
    config.causal = causal;
    return Attention::create(config, Device::host());
  }

  void forward(bool causal = false) { attention(causal).forward(inputs_, outputs_); }

  /// The call is refused, names `argument` and writes nothing.
  void expect_refused(const std::string& argument) {
    expect_invalid(argument, [&] { forward(); });
    EXPECT_EQ(o_, std::vector<float>(o_.size(), kUntouched));
    EXPECT_EQ(lse_, std::vector<float>(lse_.size(), kUntouched));
  }

  std::vector<float> q_ = std::vector<float>(kB * kHeadsQ * kRowsQ * kDimQk);
  std::vector<float> k_ = std::vector<float>(kB * kHeadsKv * kRowsKv * kDimQk);
  std::vector<float> v_ = std::vector<float>(kB * kHeadsKv * kRowsKv * kDimV);
  std::vector<float> o_ = std::vector<float>(kB * kHeadsQ * kRowsQ * kDimV, kUntouched);
  std::vector<float> lse_ = std::vector<float>(kB * kHeadsQ * kRowsQ, kUntouched);
  ForwardInputs inputs_;
  ForwardOutputs outputs_;
};

TEST_F(ForwardTest, WritesEveryElement) {
  forward();
  for (const std::vector<float>* memory : {&o_, &lse_}) {
    for (const float value : *memory) {
      EXPECT_TRUE(std::isfinite(value) && value != kUntouched);
    }
  }
}

TEST_F(ForwardTest, LseIsOptional) {
  outputs_.lse = {};
  forward();
  EXPECT_EQ(lse_, std::vector<float>(lse_.size(), kUntouched));
  EXPECT_NE(o_[0], kUntouched);
}

TEST_F(ForwardTest, MissingTensorsAreNamed) {
  for (const auto& [name, tensor] : {std::pair<const char*, TensorView*>{"q", &inputs_.q},
                                     {"k", &inputs_.k},
                                     {"v", &inputs_.v},
                                     {"o", &outputs_.o}}) {
    const TensorView kept = *tensor;
    *tensor = {};
    expect_refused(name);
    *tensor = kept;
    tensor->data = nullptr;
    expect_refused(name);
    *tensor = kept;
    tensor->dtype = DType::f16;
    expect_refused(name);
    *tensor = kept;
    tensor->rank = 2;
    expect_refused(name);
    *tensor = kept;
    tensor->strides[3] = 2;
    expect_refused(name);
    *tensor = kept;
    tensor->shape[3] += 8;
    expect_refused(name);
    *tensor = kept;
    tensor->shape[2] = -1;
    expect_refused(name);
    *tensor = kept;
    tensor->data = static_cast<std::byte*>(kept.data) + 1;
    expect_refused(name);
    *tensor = kept;
  }
  EXPECT_NO_THROW(forward());
}

TEST_F(ForwardTest, ShapesMustAgree) {
  inputs_.k = view(k_, {kB, kHeadsKv, kRowsKv - 1, kDimQk});
  expect_refused("v");
  inputs_.k = view(k_, {kB - 1, kHeadsKv, kRowsKv, kDimQk});
  expect_refused("k");
  inputs_.k = view(k_, {kB, kHeadsKv, kRowsKv, kDimQk});
  outputs_.o = view(o_, {kB, kHeadsQ - 1, kRowsQ, kDimV});
  expect_refused("o");
}

TEST_F(ForwardTest, QueryHeadsAreAMultipleOfKvHeads) {
  inputs_.q = view(q_, {kB, kHeadsQ - 1, kRowsQ, kDimQk});
  outputs_.o = view(o_, {kB, kHeadsQ - 1, kRowsQ, kDimV});
  outputs_.lse = {};
  expect_refused("h_q");
}

TEST_F(ForwardTest, LseIsChecked) {
  const TensorView kept = outputs_.lse;
  outputs_.lse.dtype = DType::bf16;
  expect_refused("lse");
  outputs_.lse = kept;
  outputs_.lse.shape[2] -= 1;
  expect_refused("lse");
  outputs_.lse = kept;
  outputs_.lse.rank = 4;
  expect_refused("lse");
  outputs_.lse = kept;
  outputs_.lse.data = nullptr;
  expect_refused("lse");
  outputs_.lse = kept;
  outputs_.lse.strides[2] = 0;
  expect_refused("lse");
}

TEST_F(ForwardTest, ReadOnlyOutputsAreRefused) {
  const std::vector<float>& constant = o_;
  outputs_.o = TensorView(constant.data(), DType::f32, {kB, kHeadsQ, kRowsQ, kDimV});
  expect_refused("o");
  outputs_.o = view(o_, {kB, kHeadsQ, kRowsQ, kDimV});
  outputs_.lse.read_only = true;
  expect_refused("lse");
}

TEST_F(ForwardTest, ReadOnlyInputsAreAccepted) {
  inputs_.q.read_only = inputs_.k.read_only = inputs_.v.read_only = true;
  EXPECT_NO_THROW(forward());
}

TEST_F(ForwardTest, OutputsMustNotOverlap) {
  const std::vector<float> q = q_;
  outputs_.o = TensorView(v_.data(), DType::f32, {kB, kHeadsQ, kRowsQ, kDimV});
  inputs_.v = TensorView(v_.data() + 1, DType::f32, {kB, kHeadsKv, kRowsKv, kDimV});
  expect_refused("o");
  inputs_.v = view(v_, {kB, kHeadsKv, kRowsKv, kDimV});
  outputs_.o = view(o_, {kB, kHeadsQ, kRowsQ, kDimV});
  outputs_.lse.data = o_.data() + 5;
  expect_refused("lse");
  outputs_.lse.data = q_.data();
  expect_refused("lse");
  EXPECT_EQ(q, q_);
}

TEST_F(ForwardTest, AnOutputMustNotOverlapItself) {
  outputs_.o.strides[1] = 0;
  expect_refused("o");
  outputs_.o.strides[1] = kDimV / 2;
  expect_refused("o");
}

TEST_F(ForwardTest, AnyMemoryOrderGivesTheSameNumbers) {
  forward(true);
  const std::vector<float> expected = o_;
  // [b, s, h, d] in memory.
  std::vector<float> q(q_.size()), o(o_.size());
  const TensorView packed_q = view(q, {kB, kRowsQ, kHeadsQ, kDimQk}).swap_axes(1, 2);
  const TensorView packed_o = view(o, {kB, kRowsQ, kHeadsQ, kDimV}).swap_axes(1, 2);
  const auto offset = [](const TensorView& tensor, std::int64_t b, std::int64_t h, std::int64_t i) {
    return static_cast<std::size_t>(b * tensor.strides[0] + h * tensor.strides[1] + i * tensor.strides[2]);
  };
  for (std::int64_t b = 0; b < kB; ++b) {
    for (std::int64_t h = 0; h < kHeadsQ; ++h) {
      for (std::int64_t i = 0; i < kRowsQ; ++i) {
        std::copy_n(q_.begin() + static_cast<std::ptrdiff_t>(offset(inputs_.q, b, h, i)), kDimQk,
                    q.begin() + static_cast<std::ptrdiff_t>(offset(packed_q, b, h, i)));
      }
    }
  }
  attention(true).forward({packed_q, inputs_.k, inputs_.v}, {packed_o, {}});
  for (std::int64_t b = 0; b < kB; ++b) {
    for (std::int64_t h = 0; h < kHeadsQ; ++h) {
      for (std::int64_t i = 0; i < kRowsQ; ++i) {
        for (std::size_t c = 0; c < kDimV; ++c) {
          EXPECT_EQ(o[offset(packed_o, b, h, i) + c], expected[offset(outputs_.o, b, h, i) + c]);
        }
      }
    }
  }
}

TEST_F(ForwardTest, InterleavedOutputsOfOnePackedBufferAreAccepted) {
  forward();
  const std::vector<float> expected_o = o_, expected_lse = lse_;
  // One buffer holds, for every row, the row of o and then its lse.
  constexpr std::int64_t kPitch = kDimV + 1;
  std::vector<float> packed(kB * kHeadsQ * kRowsQ * kPitch, kUntouched);
  outputs_.o.data = packed.data();
  outputs_.lse.data = packed.data() + kDimV;
  for (std::size_t axis = 0; axis < 3; ++axis) {
    outputs_.o.strides[axis] = outputs_.o.strides[axis] / kDimV * kPitch;
    outputs_.lse.strides[axis] *= kPitch;
  }
  forward();
  for (std::size_t row = 0; row < expected_lse.size(); ++row) {
    EXPECT_EQ(packed[row * kPitch + kDimV], expected_lse[row]);
    for (std::size_t c = 0; c < kDimV; ++c) {
      EXPECT_EQ(packed[row * kPitch + c], expected_o[row * kDimV + c]);
    }
  }
}

TEST_F(ForwardTest, BroadcastAndReversedInputsAreAccepted) {
  inputs_.k.strides[0] = 0;
  inputs_.v.strides[0] = 0;
  EXPECT_NO_THROW(forward());
  inputs_.q.data = q_.data() + (kRowsQ - 1) * kDimQk;
  inputs_.q.strides[2] = -kDimQk;
  EXPECT_NO_THROW(forward());
}

TEST_F(ForwardTest, ThreeAxesAreOneHead) {
  std::vector<float> lse(kB * kRowsQ);
  const ForwardInputs inputs{view(q_, {kB, kRowsQ, kDimQk}), view(k_, {kB, kRowsKv, kDimQk}),
                             view(v_, {kB, kRowsKv, kDimV})};
  attention().forward(inputs, {view(o_, {kB, kRowsQ, kDimV}), view(lse, {kB, kRowsQ})});
  const std::vector<float> o = o_;
  std::vector<float> lse4(lse.size());
  attention().forward(
      {view(q_, {kB, 1, kRowsQ, kDimQk}), view(k_, {kB, 1, kRowsKv, kDimQk}), view(v_, {kB, 1, kRowsKv, kDimV})},
      {view(o_, {kB, 1, kRowsQ, kDimV}), view(lse4, {kB, 1, kRowsQ})});
  EXPECT_EQ(o, o_);
  EXPECT_EQ(lse, lse4);
}

TEST_F(ForwardTest, NoQueriesIsSuccess) {
  for (const std::int64_t b : {std::int64_t{0}, kB}) {
    const std::int64_t rows = b == 0 ? kRowsQ : 0;
    inputs_ = {view(q_, {b, kHeadsQ, rows, kDimQk}), view(k_, {b, kHeadsKv, kRowsKv, kDimQk}),
               view(v_, {b, kHeadsKv, kRowsKv, kDimV})};
    outputs_ = {view(o_, {b, kHeadsQ, rows, kDimV}), view(lse_, {b, kHeadsQ, rows})};
    inputs_.q.data = outputs_.o.data = outputs_.lse.data = nullptr;
    EXPECT_NO_THROW(forward());
  }
  inputs_ = {view(q_, {kB, 0, kRowsQ, kDimQk}), view(k_, {kB, 0, kRowsKv, kDimQk}), view(v_, {kB, 0, kRowsKv, kDimV})};
  outputs_ = {view(o_, {kB, 0, kRowsQ, kDimV}), {}};
  EXPECT_NO_THROW(forward());
  EXPECT_EQ(o_, std::vector<float>(o_.size(), kUntouched));
}

TEST_F(ForwardTest, NoKeysGivesZeroAndMinusInfinity) {
  inputs_.k = view(k_, {kB, kHeadsKv, 0, kDimQk});
  inputs_.v = view(v_, {kB, kHeadsKv, 0, kDimV});
  forward();
  EXPECT_EQ(o_, std::vector<float>(o_.size(), 0.0f));
  EXPECT_EQ(lse_, std::vector<float>(lse_.size(), -std::numeric_limits<float>::infinity()));
}

TEST_F(ForwardTest, RowsWithoutKeysUnderTheMaskAreZero) {
  // s_q > s_kv, bottom-right: the first s_q - s_kv rows keep nothing.
  inputs_.k = view(k_, {kB, kHeadsKv, 1, kDimQk});
  inputs_.v = view(v_, {kB, kHeadsKv, 1, kDimV});
  forward(true);
  for (std::size_t row = 0; row < lse_.size(); ++row) {
    const bool masked = row % kRowsQ != kRowsQ - 1;
    EXPECT_EQ(std::isinf(lse_[row]), masked);
    EXPECT_EQ(o_[row * kDimV] == 0.0f, masked);
  }
}

TEST_F(ForwardTest, WorkspaceMayBeGiven) {
  std::vector<std::byte> scratch(256);
  EXPECT_NO_THROW(attention().forward(inputs_, outputs_, nullptr, {scratch.data(), scratch.size()}));
}

}  // namespace
}  // namespace fa
