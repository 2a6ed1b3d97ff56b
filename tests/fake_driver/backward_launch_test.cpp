#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "fake_driver/launches_test.hpp"

// Which kernels a backward launches, in what order, and which of them before the one in front is complete.
namespace fa {
namespace {

class BackwardLaunches : public LaunchesTest {
 protected:
  BackwardLaunches() { config_.head_dim = 64; }

  /// "name" of what is launched in order, "+name" of what is early.
  std::vector<std::string> launches_of_a_call(const AttentionShape& shape) {
    const Attention attention = Attention::create(config_);
    std::uintptr_t next = std::uintptr_t{1} << 40;
    const auto tensor = [&](std::int64_t h, std::int64_t s) {
      next += std::uintptr_t{1} << 32;
      return TensorView(reinterpret_cast<void*>(next), DType::bf16, {shape.b, h, s, 64});
    };
    BackwardInputs inputs;
    inputs.q = tensor(shape.h_q, shape.s_q);
    inputs.k = tensor(shape.h_kv, shape.s_kv);
    inputs.v = tensor(shape.h_kv, shape.s_kv);
    inputs.o = tensor(shape.h_q, shape.s_q);
    inputs.dout = tensor(shape.h_q, shape.s_q);
    inputs.lse =
        TensorView(reinterpret_cast<void*>(std::uintptr_t{1} << 40), DType::f32, {shape.b, shape.h_q, shape.s_q});
    const BackwardOutputs outputs{tensor(shape.h_q, shape.s_q), tensor(shape.h_kv, shape.s_kv),
                                  tensor(shape.h_kv, shape.s_kv)};
    const Workspace workspace{reinterpret_cast<void*>(std::uintptr_t{1} << 41),
                              attention.backward_workspace_size(shape)};
    std::vector<std::string> names;
    for (int call = 0; call < 2; ++call) {
      launches_().clear();
      attention.backward(inputs, outputs, nullptr, workspace);
      std::vector<std::string> now;
      for (const fake_driver::Launch& launch : launches_()) now.push_back((launch.early ? "+" : "") + launch.kernel);
      if (call == 1) {
        EXPECT_EQ(now, names) << "the second call";
      }
      names = now;
    }
    return names;
  }
};

using Names = std::vector<std::string>;

constexpr AttentionShape kShort{.b = 4, .h_q = 16, .h_kv = 16, .s_q = 512, .s_kv = 512};

TEST_F(BackwardLaunches, OverlapBehindTheFirst) {
  EXPECT_EQ(launches_of_a_call(kShort), (Names{"fa_backward_preprocess", "+fa_sm90_backward", "+fa_backward_convert"}));
}

TEST_F(BackwardLaunches, OverlapWithTheSumOfSplits) {
  EXPECT_EQ(launches_of_a_call({.b = 1, .h_q = 4, .h_kv = 1, .s_q = 2000, .s_kv = 500}),
            (Names{"fa_backward_preprocess", "+fa_sm90_backward", "+fa_backward_reduce", "+fa_backward_convert"}));
}

TEST_F(BackwardLaunches, WithoutRowsOrKeysTheFirstIsInOrderToo) {
  EXPECT_EQ(launches_of_a_call({.b = 4, .h_q = 16, .h_kv = 16, .s_q = 0, .s_kv = 512}), (Names{"fa_sm80_backward"}));
  EXPECT_EQ(launches_of_a_call({.b = 4, .h_q = 16, .h_kv = 16, .s_q = 512, .s_kv = 0}),
            (Names{"fa_backward_preprocess", "+fa_backward_convert"}));
}

TEST_F(BackwardLaunches, ADeterministicCallHasTheSame) {
  config_.deterministic = true;
  EXPECT_EQ(launches_of_a_call(kShort), (Names{"fa_backward_preprocess", "+fa_sm90_backward", "+fa_backward_convert"}));
}

TEST_F(BackwardLaunches, ThePassForDqStartsInOrder) {
  config_.deterministic = true;
  config_.mask = MaskFunction{"q % 3 != kv % 3", {}};
  const Names names = launches_of_a_call(kShort);
  ASSERT_EQ(names.size(), 5U);
  EXPECT_EQ(names[2], "fa_sm90_backward");
  EXPECT_EQ(names[4], "fa_sm80_backward_dq");
}

TEST_F(BackwardLaunches, TileListsAreCompleteBeforeTheyAreRead) {
  config_.mask = MaskFunction{"q % 3 != kv % 3", {}};
  const Names names = launches_of_a_call(kShort);
  ASSERT_EQ(names.size(), 4U);
  EXPECT_EQ(names[0], "fa_backward_preprocess");
  EXPECT_EQ(names[1].front(), 'f');
  EXPECT_EQ(names[2], "fa_sm90_backward");
  EXPECT_EQ(names[3], "+fa_backward_convert");
}

}  // namespace
}  // namespace fa
