#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <fa/attention.hpp>

#include "expect_error.hpp"

namespace fa {
namespace {

using test::expect_invalid;

constexpr float kUntouched = -777;

using Memory = std::vector<float>;

/// Every tensor of a backward call in its own row-major memory; a test bends one of the views.
class BackwardTest : public testing::Test {
 protected:
  static constexpr std::int64_t kB = 2, kHeadsQ = 4, kHeadsKv = 2, kRowsQ = 3, kRowsKv = 5, kDimQk = 16, kDimV = 8;

  BackwardTest() {
    std::mt19937 generator(1);
    std::normal_distribution<float> normal;
    for (Memory* memory : {&q_, &k_, &v_, &dout_, &dlse_}) {
      for (float& value : *memory) value = normal(generator);
    }
    inputs_ = {of_q(q_), of_k(k_), of_v(v_), of_o(o_), of_rows(lse_), of_o(dout_), of_rows(dlse_)};
    outputs_ = {of_q(dq_), of_k(dk_), of_v(dv_)};
    forward(false);
  }

  static TensorView view(Memory& memory, std::initializer_list<std::int64_t> shape) {
    return TensorView(memory.data(), DType::f32, shape);
  }
  static TensorView of_q(Memory& memory) { return view(memory, {kB, kHeadsQ, kRowsQ, kDimQk}); }
  static TensorView of_k(Memory& memory) { return view(memory, {kB, kHeadsKv, kRowsKv, kDimQk}); }
  static TensorView of_v(Memory& memory) { return view(memory, {kB, kHeadsKv, kRowsKv, kDimV}); }
  static TensorView of_o(Memory& memory) { return view(memory, {kB, kHeadsQ, kRowsQ, kDimV}); }
  static TensorView of_rows(Memory& memory) { return view(memory, {kB, kHeadsQ, kRowsQ}); }

  static Attention attention(bool causal = false) {
    AttentionConfig config;
    config.head_dim = kDimQk;
    config.head_dim_v = kDimV;
    config.dtype = DType::f32;
    config.causal = causal;
    return Attention::create(config, Device::host());
  }

  void forward(bool causal) { attention(causal).forward({inputs_.q, inputs_.k, inputs_.v}, {inputs_.o, inputs_.lse}); }

  void backward(bool causal = false) { attention(causal).backward(inputs_, outputs_); }

  bool untouched() const {
    const auto all = [](const Memory& memory) {
      return std::all_of(memory.begin(), memory.end(), [](float value) { return value == kUntouched; });
    };
    return all(dq_) && all(dk_) && all(dv_);
  }

  /// The call is refused, names `argument` and writes nothing.
  void expect_refused(const std::string& argument) {
    expect_invalid(argument, [&] { backward(); });
    EXPECT_TRUE(untouched()) << argument;
  }

  std::array<std::pair<const char*, TensorView*>, 8> rank4() {
    return {{{"q", &inputs_.q},
             {"k", &inputs_.k},
             {"v", &inputs_.v},
             {"o", &inputs_.o},
             {"dout", &inputs_.dout},
             {"dq", &outputs_.dq},
             {"dk", &outputs_.dk},
             {"dv", &outputs_.dv}}};
  }

  Memory q_ = Memory(kB * kHeadsQ * kRowsQ * kDimQk);
  Memory k_ = Memory(kB * kHeadsKv * kRowsKv * kDimQk);
  Memory v_ = Memory(kB * kHeadsKv * kRowsKv * kDimV);
  Memory o_ = Memory(kB * kHeadsQ * kRowsQ * kDimV);
  Memory lse_ = Memory(kB * kHeadsQ * kRowsQ);
  Memory dout_ = Memory(o_.size());
  Memory dlse_ = Memory(lse_.size());
  Memory dq_ = Memory(q_.size(), kUntouched);
  Memory dk_ = Memory(k_.size(), kUntouched);
  Memory dv_ = Memory(v_.size(), kUntouched);
  BackwardInputs inputs_;
  BackwardOutputs outputs_;
};

TEST_F(BackwardTest, IsTheSlopeOfForward) {
  const auto loss = [&](bool causal) {
    forward(causal);
    double sum = 0;
    for (std::size_t n = 0; n < o_.size(); ++n) sum += double{dout_[n]} * o_[n];
    for (std::size_t n = 0; n < lse_.size(); ++n) sum += double{dlse_[n]} * lse_[n];
    return sum;
  };
  for (const bool causal : {false, true}) {
    forward(causal);
    backward(causal);
    for (const auto& [values, gradient] : {std::pair{&q_, &dq_}, {&k_, &dk_}, {&v_, &dv_}}) {
      for (std::size_t n = 0; n < values->size(); n += 11) {
        // Rounding of f32 sums of order 10 over the step, and the step squared.
        constexpr float kStep = 0x1p-7f;
        const float kept = (*values)[n];
        (*values)[n] = kept + kStep;
        const double up = loss(causal);
        (*values)[n] = kept - kStep;
        const double down = loss(causal);
        (*values)[n] = kept;
        EXPECT_NEAR((up - down) / (2 * kStep), (*gradient)[n], 2e-3) << n;
      }
    }
  }
}

TEST_F(BackwardTest, DlseIsOptional) {
  backward();
  const Memory with = dq_;
  inputs_.dlse = {};
  backward();
  EXPECT_NE(dq_, with);
  std::fill(dlse_.begin(), dlse_.end(), 0.0f);
  const Memory without = dq_;
  inputs_.dlse = of_rows(dlse_);
  backward();
  EXPECT_EQ(dq_, without);
}

TEST_F(BackwardTest, BadTensorsAreNamed) {
  for (const auto& [name, tensor] : rank4()) {
    const TensorView kept = *tensor;
    const auto refused = [&, tensor = tensor, name = name](auto bend) {
      bend(*tensor);
      expect_refused(name);
      *tensor = kept;
    };
    const bool optional = std::string(name) != "dout" && name[0] == 'd';
    if (!optional) refused([](TensorView& t) { t = {}; });
    refused([](TensorView& t) { t.data = nullptr; });
    refused([](TensorView& t) { t.dtype = DType::f16; });
    refused([](TensorView& t) { t.rank = 2; });
    refused([](TensorView& t) { t.strides[3] = 2; });
    refused([](TensorView& t) { t.strides[1] = std::numeric_limits<std::int64_t>::max() / 2; });
    refused([](TensorView& t) { t.shape[3] += 8; });
    refused([](TensorView& t) { t.shape[2] = -1; });
    refused([](TensorView& t) { t.data = static_cast<std::byte*>(t.data) + 1; });
  }
  EXPECT_NO_THROW(backward());
}

TEST_F(BackwardTest, BadStatisticsAreNamed) {
  for (const auto& [name, tensor] : {std::pair{"lse", &inputs_.lse}, {"dlse", &inputs_.dlse}}) {
    const TensorView kept = *tensor;
    const auto refused = [&, tensor = tensor, name = name](auto bend) {
      bend(*tensor);
      expect_refused(name);
      *tensor = kept;
    };
    refused([](TensorView& t) { t.data = nullptr; });
    refused([](TensorView& t) { t.dtype = DType::bf16; });
    refused([](TensorView& t) { t.rank = 4; });
    refused([](TensorView& t) { t.shape[2] -= 1; });
    refused([](TensorView& t) { t.strides[0] = std::numeric_limits<std::int64_t>::max() / 2; });
    refused([](TensorView& t) { t.data = static_cast<std::byte*>(t.data) + 2; });
  }
  inputs_.lse = {};
  expect_refused("lse");
}

TEST_F(BackwardTest, ShapesMustAgree) {
  const auto shrink = [](TensorView& tensor, std::size_t axis) { tensor.shape[axis] -= 1; };
  for (const auto& [name, tensor] : rank4()) {
    if (std::string(name) == "q" || std::string(name) == "k") continue;  // what the others are held against
    for (const std::size_t axis : {0u, 1u, 2u}) {
      const TensorView kept = *tensor;
      shrink(*tensor, axis);
      expect_refused(name);
      *tensor = kept;
    }
  }
  shrink(inputs_.k, 0);
  expect_refused("k");
}

TEST_F(BackwardTest, ReadOnlyTensorsAreInputsOnly) {
  for (const auto& [name, tensor] : rank4()) {
    tensor->read_only = true;
    if (name[0] == 'd' && std::string(name) != "dout") {
      expect_refused(name);
      tensor->read_only = false;
    }
  }
  inputs_.lse.read_only = inputs_.dlse.read_only = true;
  EXPECT_NO_THROW(backward());
}

TEST_F(BackwardTest, GradientsMustNotOverlapAnything) {
  const auto outputs = std::array<std::pair<const char*, TensorView*>, 3>{
      {{"dq", &outputs_.dq}, {"dk", &outputs_.dk}, {"dv", &outputs_.dv}}};
  const std::array<Memory*, 7> inputs = {&q_, &k_, &v_, &o_, &lse_, &dout_, &dlse_};
  for (const auto& [name, tensor] : outputs) {
    const TensorView kept = *tensor;
    for (Memory* memory : inputs) {
      tensor->data = &memory->back();  // the last element of the input is the first of the gradient
      expect_refused(name);
    }
    *tensor = kept;
    tensor->strides[1] = 0;
    expect_refused(name);
    *tensor = kept;
  }
  outputs_.dk.data = &dq_.back();
  expect_refused("dk");
  outputs_.dk = of_k(dk_);
  outputs_.dv.data = &dk_.back();
  expect_refused("dv");
}

TEST_F(BackwardTest, InterleavedGradientsOfOnePackedBufferAreAccepted) {
  backward();
  const Memory dk = dk_, dv = dv_;
  constexpr std::int64_t kPitch = kDimQk + kDimV;  // a row of dk and then its row of dv
  Memory packed(kB * kHeadsKv * kRowsKv * kPitch, kUntouched);
  outputs_.dk.data = packed.data();
  outputs_.dv.data = packed.data() + kDimQk;
  outputs_.dk.strides = outputs_.dv.strides = {kHeadsKv * kRowsKv * kPitch, kRowsKv * kPitch, kPitch, 1};
  backward();
  for (std::size_t row = 0; row < kB * kHeadsKv * kRowsKv; ++row) {
    for (std::size_t d = 0; d < kDimQk; ++d) EXPECT_EQ(packed[row * kPitch + d], dk[row * kDimQk + d]);
    for (std::size_t d = 0; d < kDimV; ++d) EXPECT_EQ(packed[row * kPitch + kDimQk + d], dv[row * kDimV + d]);
  }
}

TEST_F(BackwardTest, UnwantedGradientsAreLeftOut) {
  backward(true);
  const Memory dq = dq_, dk = dk_, dv = dv_;
  for (int bits = 1; bits < 7; ++bits) {
    for (Memory* memory : {&dq_, &dk_, &dv_}) std::fill(memory->begin(), memory->end(), kUntouched);
    const bool wanted[] = {(bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0};
    outputs_ = {};
    if (wanted[0]) outputs_.dq = of_q(dq_);
    if (wanted[1]) outputs_.dk = of_k(dk_);
    if (wanted[2]) outputs_.dv = of_v(dv_);
    backward(true);
    EXPECT_EQ(dq_, wanted[0] ? dq : Memory(dq.size(), kUntouched)) << bits;
    EXPECT_EQ(dk_, wanted[1] ? dk : Memory(dk.size(), kUntouched)) << bits;
    EXPECT_EQ(dv_, wanted[2] ? dv : Memory(dv.size(), kUntouched)) << bits;
  }
}

TEST_F(BackwardTest, OneGradientAtLeastIsWanted) {
  for (Memory* memory : {&dq_, &dk_, &dv_}) std::fill(memory->begin(), memory->end(), kUntouched);
  outputs_ = {};
  expect_refused("dq");
}

TEST_F(BackwardTest, ThreeAxesAreOneHead) {
  inputs_ = {view(q_, {kB, kRowsQ, kDimQk}), view(k_, {kB, kRowsKv, kDimQk}), view(v_, {kB, kRowsKv, kDimV}),
             view(o_, {kB, kRowsQ, kDimV}),  view(lse_, {kB, kRowsQ}),        view(dout_, {kB, kRowsQ, kDimV}),
             view(dlse_, {kB, kRowsQ})};
  outputs_ = {view(dq_, {kB, kRowsQ, kDimQk}), view(dk_, {kB, kRowsKv, kDimQk}), view(dv_, {kB, kRowsKv, kDimV})};
  forward(true);
  backward(true);
  const Memory dq = dq_, dk = dk_, dv = dv_;
  inputs_ = {view(q_, {kB, 1, kRowsQ, kDimQk}), view(k_, {kB, 1, kRowsKv, kDimQk}), view(v_, {kB, 1, kRowsKv, kDimV}),
             view(o_, {kB, 1, kRowsQ, kDimV}),  view(lse_, {kB, 1, kRowsQ}),        view(dout_, {kB, 1, kRowsQ, kDimV}),
             view(dlse_, {kB, 1, kRowsQ})};
  outputs_ = {view(dq_, {kB, 1, kRowsQ, kDimQk}), view(dk_, {kB, 1, kRowsKv, kDimQk}),
              view(dv_, {kB, 1, kRowsKv, kDimV})};
  backward(true);
  EXPECT_EQ(dq_, dq);
  EXPECT_EQ(dk_, dk);
  EXPECT_EQ(dv_, dv);
}

TEST_F(BackwardTest, BroadcastInputsAreAccepted) {
  Memory one(kDimV, 1.0f), zero(1, 0.0f);
  inputs_.dout = TensorView(one.data(), DType::f32, inputs_.dout.shape, std::array<std::int64_t, 4>{0, 0, 0, 1});
  inputs_.dlse.data = zero.data();
  inputs_.dlse.strides = {};
  backward();
  const Memory dv = dv_;
  std::fill(dout_.begin(), dout_.end(), 1.0f);
  inputs_.dout = of_o(dout_);
  inputs_.dlse = {};
  backward();
  EXPECT_EQ(dv_, dv);
}

TEST_F(BackwardTest, NoBatchIsSuccess) {
  for (auto& [name, tensor] : rank4()) tensor->shape[0] = 0;
  inputs_.lse.shape[0] = inputs_.dlse.shape[0] = 0;
  backward();
  EXPECT_TRUE(untouched());
}

TEST_F(BackwardTest, NoQueriesGiveZeroDkAndDv) {
  for (TensorView* tensor : {&inputs_.q, &inputs_.o, &inputs_.dout, &inputs_.lse, &inputs_.dlse, &outputs_.dq}) {
    tensor->shape[2] = 0;
    tensor->data = nullptr;
  }
  backward();
  EXPECT_EQ(dk_, Memory(dk_.size(), 0.0f));
  EXPECT_EQ(dv_, Memory(dv_.size(), 0.0f));
}

TEST_F(BackwardTest, NoKeysGiveZeroDq) {
  for (TensorView* tensor : {&inputs_.k, &inputs_.v, &outputs_.dk, &outputs_.dv}) {
    tensor->shape[2] = 0;
    tensor->data = nullptr;
  }
  forward(false);
  backward();
  EXPECT_EQ(dq_, Memory(dq_.size(), 0.0f));
}

TEST_F(BackwardTest, WorkspaceMayBeGiven) {
  std::vector<std::byte> scratch(256);
  EXPECT_NO_THROW(attention().backward(inputs_, outputs_, nullptr, {scratch.data(), scratch.size()}));
}

}  // namespace
}  // namespace fa
