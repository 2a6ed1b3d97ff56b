// Hostile tensors: every one that a call can name, with every field that can be wrong, on the host.

#include "api/views.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include <fa/attention.hpp>

#include "api/problem.hpp"
#include "api/validate.hpp"
#include "api/variants.hpp"
#include "expect_error.hpp"
#include "plan/backward.hpp"
#include "plan/mask_tiles.hpp"
#include "plan/planner.hpp"
#include "plan/workspace.hpp"

namespace fa {
namespace {

constexpr std::int64_t kMin = std::numeric_limits<std::int64_t>::min();
constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kB = 2, kHq = 4, kHkv = 2, kSq = 3, kSkv = 5, kD = 8;

/// A backward with every tensor that there is, in f32, and the forward before it.
class EveryTensor : public testing::Test {
 protected:
  struct Slot {
    std::string name;
    TensorView* view;
    bool written;
  };

  EveryTensor() {
    config_.head_dim = kD;
    config_.dtype = DType::f32;
    config_.score = ScoreFunction{"score + bias[h, kv] + gain", {{"bias", DType::f32, true}, {"gain", DType::f32}}};
    config_.sink = true;
  }

  /// Each with memory of its own, of ones.
  TensorView tensor(std::initializer_list<std::int64_t> shape) {
    memory_.emplace_back(512, 1.0f);
    return TensorView(static_cast<void*>(memory_.back().data()), DType::f32, shape);
  }

  /// The tensors of a forward: those of inputs first.
  std::vector<Slot> forward_slots() {
    return {{"q", &q_, false},
            {"k", &k_, false},
            {"v", &v_, false},
            {"sink", &sink_, false},
            {"captures[bias]", &bias_, false},
            {"captures[gain]", &gain_, false},
            {"o", &o_, true},
            {"lse", &lse_, true}};
  }
  std::vector<Slot> backward_slots() {
    return {{"q", &q_, false},
            {"k", &k_, false},
            {"v", &v_, false},
            {"o", &o_, false},
            {"lse", &lse_, false},
            {"dout", &dout_, false},
            {"dlse", &dlse_, false},
            {"sink", &sink_, false},
            {"captures[bias]", &bias_, false},
            {"captures[gain]", &gain_, false},
            {"dq", &dq_, true},
            {"dk", &dk_, true},
            {"dv", &dv_, true},
            {"dsink", &dsink_, true},
            {"gradient of captures[bias]", &dbias_, true}};
  }

  Captures captures() const { return {{"bias", bias_}, {"gain", gain_}}; }
  void forward() const {
    Attention::create(config_, Device::host()).forward({q_, k_, v_, captures(), sink_}, {o_, lse_});
  }
  void backward() const {
    Attention::create(config_, Device::host())
        .backward({q_, k_, v_, o_, lse_, dout_, dlse_, captures(), sink_}, {dq_, dk_, dv_, {{"bias", dbias_}}, dsink_});
  }

  AttentionConfig config_;
  std::vector<std::vector<float>> memory_;
  TensorView q_ = tensor({kB, kHq, kSq, kD}), k_ = tensor({kB, kHkv, kSkv, kD}), v_ = tensor({kB, kHkv, kSkv, kD}),
             o_ = tensor({kB, kHq, kSq, kD}), lse_ = tensor({kB, kHq, kSq}), sink_ = tensor({kHq}),
             bias_ = tensor({kHq, kSkv}), gain_ = tensor({1}), dout_ = tensor({kB, kHq, kSq, kD}),
             dlse_ = tensor({kB, kHq, kSq}), dq_ = tensor({kB, kHq, kSq, kD}), dk_ = tensor({kB, kHkv, kSkv, kD}),
             dv_ = tensor({kB, kHkv, kSkv, kD}), dsink_ = tensor({kHq}), dbias_ = tensor({kHq, kSkv});
};

TEST_F(EveryTensor, IsServedAsItIs) {
  EXPECT_NO_THROW(forward());
  EXPECT_NO_THROW(backward());
}

TEST_F(EveryTensor, IsRefusedWithEachFieldThatCannotBe) {
  const auto check = [&](const std::vector<Slot>& slots, const std::function<void()>& call) {
    for (const Slot& slot : slots) {
      const TensorView good = *slot.view;
      const auto refused = [&](const std::function<void(TensorView&)>& spoil) {
        spoil(*slot.view);
        test::expect_invalid(slot.name, call);
        *slot.view = good;
      };
      for (std::size_t axis = 0; axis < static_cast<std::size_t>(good.rank); ++axis) {
        for (const std::int64_t stride : {kMin, kMin + 1, -(std::int64_t{1} << 62), -(std::int64_t{1} << 58),
                                          std::int64_t{1} << 58, std::int64_t{1} << 61, std::int64_t{1} << 62, kMax}) {
          if (good.shape[axis] > 1) refused([&](TensorView& view) { view.strides[axis] = stride; });
        }
        for (const std::int64_t size : {kMin, std::int64_t{-1}, std::int64_t{1} << 61, kMax}) {
          refused([&](TensorView& view) { view.shape[axis] = size; });
        }
      }
      for (const int rank : {std::numeric_limits<int>::min(), -1, 5, 1'000'000}) {
        refused([&](TensorView& view) { view.rank = rank; });
      }
      refused([](TensorView& view) { view.dtype = static_cast<DType>(99); });
      refused([](TensorView& view) { view.data = nullptr; });
      refused([](TensorView& view) { view.data = static_cast<std::byte*>(view.data) + 1; });
      if (slot.written) refused([](TensorView& view) { view.read_only = true; });
      if (slot.written) refused([](TensorView& view) { view.strides[0] = 0; });
    }
  };
  check(forward_slots(), [this] { forward(); });
  check(backward_slots(), [this] { backward(); });
}

TEST_F(EveryTensor, SharesNoMemoryWithWhatIsWritten) {
  const auto check = [&](const std::vector<Slot>& slots, const std::function<void()>& call) {
    for (const Slot& written : slots) {
      for (const Slot& other : slots) {
        if (!written.written || &written == &other) continue;
        const TensorView good = *written.view;
        // The last element of one is the first of the other.
        written.view->data = static_cast<float*>(other.view->data) + (other.view->elements() - 1);
        try {
          call();
          ADD_FAILURE() << written.name << " over " << other.name;
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
          for (const Slot* slot : {&written, &other}) {
            EXPECT_NE(std::string(error.what()).find(slot->name), std::string::npos) << error.what();
          }
        }
        written.view->data = static_cast<float*>(other.view->data) + other.view->elements();
        EXPECT_NO_THROW(call()) << written.name << " behind " << other.name;
        *written.view = good;
      }
    }
  };
  check(forward_slots(), [this] { forward(); });
  check(backward_slots(), [this] { backward(); });
}

/// A capture that has no axis with more than one element may have any strides, and one that is broadcast is read.
TEST_F(EveryTensor, MayHaveAnyStrideWhereItIsNotUsed) {
  gain_.strides[0] = kMin;
  bias_.shape = {1, 1, 0, 0};
  dbias_.shape = {1, 1, 0, 0};
  bias_.strides = {kMax, kMin, 0, 0};
  EXPECT_NO_THROW(forward());
  q_.shape[0] = k_.shape[0] = v_.shape[0] = o_.shape[0] = lse_.shape[0] = 1;
  for (TensorView* view : {&q_, &k_, &v_, &o_, &lse_}) view->strides[0] = kMax;
  EXPECT_NO_THROW(forward());
}

/// Arrays of lengths are read as well.
TEST(PackedTensors, LengthsShareNoMemoryWithWhatIsWritten) {
  AttentionConfig config;
  config.head_dim = kD;
  config.dtype = DType::f32;
  config.varlen = true;
  std::vector<float> q(4 * kD, 1.0f), o(4 * kD + 8), lse(4);
  const Attention attention = Attention::create(config, Device::host());
  const TensorView in(static_cast<const void*>(q.data()), DType::f32, {4, 1, kD});
  auto* const cu = reinterpret_cast<std::int32_t*>(o.data() + 4 * kD - 2);
  const auto call = [&](std::int32_t* lengths) {
    ForwardInputs inputs{in, in, in};
    lengths[0] = 0, lengths[1] = 2, lengths[2] = 4;
    inputs.sequences = {.b = 2, .cu_seqlens_q = lengths, .cu_seqlens_kv = lengths};
    attention.forward(inputs, {TensorView(static_cast<void*>(o.data()), DType::f32, {4, 1, kD}),
                               TensorView(static_cast<void*>(lse.data()), DType::f32, {1, 4})});
  };
  EXPECT_NO_THROW(call(cu + 2));
  test::expect_invalid("o", [&] { call(cu); });
  test::expect_invalid("lse", [&] { call(reinterpret_cast<std::int32_t*>(lse.data())); });
}

/// The greatest shapes that are accepted, with the most that a plan may do with them.
TEST(Sizes, OfScratchDoNotWrap) {
  constexpr std::int64_t kLength = (std::int64_t{1} << 31) - 65536;
  constexpr std::int64_t kRows = std::int64_t{1} << 44;
  const plan::Arch arch = plan::parse_arch("sm_90a");
  AttentionConfig config;
  config.head_dim = 512;
  config.kernel = config.kernel_backward = KernelOverride{"", "splits=64"};
  config.mask = MaskFunction{"b + h + q > kv"};
  const api::Functions functions = api::read_functions(config, false);
  for (const AttentionShape& wanted : {AttentionShape{.b = kRows >> 31, .h_q = 1, .s_q = kLength, .s_kv = kLength},
                                       AttentionShape{.b = 1, .h_q = kRows >> 31, .s_q = kLength, .s_kv = kLength},
                                       AttentionShape{.b = 1 << 22, .h_q = 1 << 22, .s_q = 1, .s_kv = 1},
                                       AttentionShape{.b = kLength, .h_q = 1 << 13, .s_q = 1, .s_kv = 1},
                                       AttentionShape{.b = 1, .h_q = 1 << 13, .h_kv = 1, .s_q = 1, .s_kv = kLength}}) {
    const AttentionShape shape = api::checked(config, wanted);
    const plan::Problem problem = api::make_problem(config, shape, arch, &functions.variants);
    const double rows = double(shape.b) * double(shape.h_q) * double(shape.s_q);
    const double keys = double(shape.b) * double(shape.h_kv) * double(shape.s_kv);
    EXPECT_DOUBLE_EQ(double(plan::forward_workspace(problem, {.splits = 64}, plan::ForwardNeeds{}).bytes()),
                     64 * rows * (512 + 3) * 4);
    const auto choice = plan::choose_backward(problem, api::read_override(config, api::Operation::backward));
    const double floats = rows * (512 + 2) + 64 * keys * 2 * 512;
    EXPECT_GE(double(plan::backward_workspace(problem, choice, plan::BackwardNeeds{}).bytes()), floats * 4 * 0.999999);
    const plan::KernelSpec kernel =
        plan::plan_forward(problem, api::read_override(config, api::Operation::forward)).kernel;
    const double tiles = rows / kernel.tile_m * double(shape.s_kv) / kernel.tile_n;
    EXPECT_GE(double(plan::mask_tiles_bytes(problem, kernel)), std::min(0x1p60, tiles * 4));
  }
}

TEST(Sizes, BeyondTheseAreRefused) {
  AttentionConfig config;
  config.head_dim = 64;
  const auto refused = [&](const AttentionShape& shape, const char* argument) {
    test::expect_invalid(argument, [&] { api::checked(config, shape); });
  };
  constexpr std::int64_t kLength = (std::int64_t{1} << 31) - 65536;
  refused({.b = kMax}, "b");
  refused({.s_q = kMin}, "s_q");
  refused({.b = kLength, .h_q = kLength, .s_q = kLength}, "b * h_q * s_q");
  refused({.b = 1 << 22, .h_q = 1 << 22, .s_q = 2}, "b * h_q * s_q");
  config.varlen = true;
  refused({.b = 1, .h_q = kLength, .s_q = 1, .total_q = kLength - 16}, "h_q * total_q");
}

TEST(Views, AddressesFarApartDoNotOverlap) {
  const auto at = [](std::uintptr_t address) { return TensorView(reinterpret_cast<void*>(address), DType::f32, {4}); };
  for (const std::uintptr_t a :
       {std::uintptr_t{16}, std::uintptr_t{1} << 62, std::uintptr_t{1} << 63, ~std::uintptr_t{31}}) {
    for (const std::uintptr_t b :
         {std::uintptr_t{16}, std::uintptr_t{1} << 62, std::uintptr_t{1} << 63, ~std::uintptr_t{31}}) {
      EXPECT_EQ(api::overlap(at(a), at(b)), a == b) << a << " " << b;
    }
  }
}

TEST(Views, WhatCannotBeAddressedIsSaidToOverlap) {
  TensorView far(reinterpret_cast<void*>(std::uintptr_t{1} << 20), DType::f16, {2, 4096});
  far.strides = {std::int64_t{1} << 62, 1, 0, 0};
  const TensorView other(reinterpret_cast<void*>(std::uintptr_t{1} << 30), DType::f16, {4});
  EXPECT_TRUE(api::overlaps_itself(far));
  EXPECT_TRUE(api::overlap(far, other));
  EXPECT_TRUE(api::overlap(other, far));
  far.rank = 1'000'000;
  EXPECT_TRUE(api::overlaps_itself(far));
  EXPECT_EQ(far.elements(), 0);
  EXPECT_THROW(far.swap_axes(0, 10), Error);
}

}  // namespace
}  // namespace fa
