#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <fa/error.hpp>
#include <functional>
#include <string>

#include "fake_driver/launches_test.hpp"

// Whose tile lists memory holds that calls share.
namespace fa {
namespace {

void* at(std::uintptr_t page) {
  return reinterpret_cast<void*>((std::uintptr_t{1} << 40) + (page << 32));
}

class HeldTiles : public LaunchesTest {
 protected:
  HeldTiles() {
    config_.head_dim = 128;
    config_.mask = {"kv - q < ahead && doc[kv] == doc[q]", {{"doc", DType::i32}, {"ahead", DType::i32}}};
  }

  struct Call {
    std::int64_t s = 512;
    bool broadcast = false;  ///< k has a stride of 0, for which sm80 serves
    double ahead = 30;
  };

  static TensorView tensor(std::uintptr_t page, std::int64_t s, bool broadcast = false) {
    const std::array<std::int64_t, 4> strides = {8 * s * 128, broadcast ? 0 : s * 128, 128, 1};
    return {at(page), DType::bf16, std::array<std::int64_t, 4>{2, 8, s, 128}, strides};
  }

  static Captures captures(const Call& call) {
    return {{"doc", TensorView(at(20), DType::i32, {call.s})}, {"ahead", call.ahead}};
  }

  static ForwardInputs inputs(const Call& call) {
    return {tensor(1, call.s), tensor(2, call.s, call.broadcast), tensor(3, call.s), captures(call)};
  }

  /// Kernels that are launched, of which those that list tiles: -1 where the call is refused, and nothing launched.
  int lists_of(const std::function<void()>& call) {
    launches_().clear();
    try {
      call();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument) << error.what();
      EXPECT_EQ(error.field("argument"), "tiles") << error.what();
      EXPECT_TRUE(launches_().empty());
      return -1;
    }
    return static_cast<int>(std::ranges::count_if(launches_(), [](const fake_driver::Launch& launch) {
      return launch.kernel.find("mask") != std::string::npos;
    }));
  }

  int forward(const Attention& attention, const Call& call, void* memory, bool filled) {
    ForwardInputs given = inputs(call);
    given.tiles = {memory, std::size_t{1} << 30, filled};
    return lists_of([&] { attention.forward(given, {tensor(4, call.s), {}}); });
  }

  int backward(const Attention& attention, const Call& call, void* memory, bool filled) {
    BackwardInputs given;
    given.q = tensor(1, call.s);
    given.k = tensor(2, call.s, call.broadcast);
    given.v = tensor(3, call.s);
    given.o = tensor(4, call.s);
    given.dout = tensor(5, call.s);
    given.lse = TensorView(at(6), DType::f32, {2, 8, call.s});
    given.captures = captures(call);
    given.tiles = {memory, std::size_t{1} << 30, filled};
    return lists_of([&] { attention.backward(given, {tensor(7, call.s), tensor(8, call.s), tensor(9, call.s)}); });
  }
};

TEST_F(HeldTiles, AreSharedByCallsOfOneKind) {
  const Attention attention = Attention::create(config_);
  const Attention other = Attention::create(config_);
  EXPECT_EQ(forward(attention, {}, at(30), false), 1);
  EXPECT_EQ(forward(attention, {}, at(30), true), 0);
  EXPECT_EQ(forward(other, {}, at(30), true), 0);
  EXPECT_EQ(backward(attention, {}, at(31), false), 1);
  EXPECT_EQ(backward(other, {}, at(31), true), 0);
}

TEST_F(HeldTiles, OfAnotherFamilyAreRefused) {
  const Attention attention = Attention::create(config_);
  for (const bool first : {false, true}) {
    EXPECT_EQ(forward(attention, {.broadcast = first}, at(32), false), 1);
    EXPECT_EQ(forward(attention, {.broadcast = !first}, at(32), true), -1);
    EXPECT_EQ(forward(attention, {.broadcast = first}, at(32), true), 0) << "the refused one changes nothing";
  }
}

TEST_F(HeldTiles, OfAnotherShapeMaskNumberOrOperationAreRefused) {
  const Attention attention = Attention::create(config_);
  ASSERT_EQ(forward(attention, {}, at(34), false), 1);
  EXPECT_EQ(forward(attention, {.s = 511}, at(34), true), -1);
  EXPECT_EQ(forward(attention, {.ahead = 31}, at(34), true), -1);
  EXPECT_EQ(backward(attention, {}, at(34), true), -1);
  ASSERT_EQ(backward(attention, {}, at(33), false), 1);
  const auto with = [&](const std::function<void(AttentionConfig&)>& change) {
    AttentionConfig changed = config_;
    change(changed);
    return Attention::create(changed);
  };
  const auto refused = [&](const std::function<void(AttentionConfig&)>& change) {
    return forward(with(change), {}, at(34), true) == -1;
  };
  EXPECT_TRUE(refused([](AttentionConfig& c) { c.mask.expression = "kv - q < 2 * ahead && doc[kv] == doc[q]"; }));
  EXPECT_TRUE(refused([](AttentionConfig& c) { c.causal = true; }));
  EXPECT_TRUE(refused([](AttentionConfig& c) { c.window_left = 100; }));
  EXPECT_TRUE(refused([](AttentionConfig& c) { c.window_right = 100; }));
  EXPECT_TRUE(refused([](AttentionConfig& c) { c.chunk = 128; }));
  EXPECT_TRUE(refused([](AttentionConfig& c) { c.kernel = KernelOverride{"", "tile_n=64"}; }));
  EXPECT_EQ(backward(with([](AttentionConfig& c) {
                       c.kernel_backward = KernelOverride{"sm80", "tile_m=32"};
                     }),
                     {}, at(33), true),
            -1);
  EXPECT_EQ(forward(with([](AttentionConfig& c) { c.scale = 0.5f; }), {}, at(34), true), 0) << "of the same mask";
}

TEST_F(HeldTiles, MemoryThatNobodyHasFilledIsRefused) {
  const Attention attention = Attention::create(config_);
  EXPECT_EQ(forward(attention, {}, at(35), true), -1);
  EXPECT_EQ(backward(attention, {}, at(35), true), -1);
}

TEST_F(HeldTiles, TheLastThatFilledMemoryCounts) {
  const Attention attention = Attention::create(config_);
  EXPECT_EQ(forward(attention, {}, at(36), false), 1);
  EXPECT_EQ(forward(attention, {.s = 700}, at(36), false), 1);
  EXPECT_EQ(forward(attention, {}, at(36), true), -1);
  EXPECT_EQ(forward(attention, {.s = 700}, at(36), true), 0);
}

TEST_F(HeldTiles, DeterministicBackwardHasListsOfBothPasses) {
  config_.deterministic = true;
  const Attention attention = Attention::create(config_);
  EXPECT_EQ(backward(attention, {}, at(37), false), 2);
  EXPECT_EQ(backward(attention, {}, at(37), true), 0);
  config_.deterministic = false;
  EXPECT_EQ(backward(Attention::create(config_), {}, at(37), true), -1);
}

}  // namespace
}  // namespace fa
