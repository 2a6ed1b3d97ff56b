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
    BackwardOutputs outputs;
    if (shape.gradients.dq) outputs.dq = tensor(shape.h_q, shape.s_q);
    if (shape.gradients.dk) outputs.dk = tensor(shape.h_kv, shape.s_kv);
    if (shape.gradients.dv) outputs.dv = tensor(shape.h_kv, shape.s_kv);
    if (config_.sink) {
      inputs.sink = TensorView(reinterpret_cast<void*>(std::uintptr_t{1} << 39), DType::f32, {shape.h_q});
      outputs.dsink = TensorView(reinterpret_cast<void*>(std::uintptr_t{1} << 38), DType::f32, {shape.h_q});
    }
    const auto rows = [&](bool given, std::uintptr_t at, std::int64_t s) {
      return given ? TensorView(reinterpret_cast<void*>(at), DType::f32, {shape.b, shape.h_q, s}) : TensorView();
    };
    const Statistics& statistics = config_.statistics;
    inputs.statistics = {rows(statistics.entropy_gradient, std::uintptr_t{1} << 42, shape.s_q),
                         rows(statistics.entropy_gradient, std::uintptr_t{2} << 42, shape.s_q),
                         rows(statistics.max_logit_gradient, std::uintptr_t{3} << 42, shape.s_q),
                         rows(statistics.column_sums_gradient, std::uintptr_t{4} << 42, shape.s_kv)};
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

TEST_F(BackwardLaunches, ScanRowsWhereGradientsOfStatisticsNeedIt) {
  config_.statistics = {.entropy = true, .entropy_gradient = true};
  EXPECT_EQ(launches_of_a_call(kShort), (Names{"fa_backward_preprocess", "fa_sm80_backward", "+fa_backward_convert"}));
  config_.statistics = {.column_sums = ColumnSums::query_heads, .column_sums_gradient = true};
  EXPECT_EQ(launches_of_a_call(kShort),
            (Names{"fa_statistic_rows", "fa_backward_preprocess", "fa_sm80_backward", "+fa_backward_convert"}));
  config_.statistics = {.max_logit = MaxLogit::softmax, .max_logit_gradient = true};
  config_.deterministic = true;
  EXPECT_EQ(launches_of_a_call(kShort),
            (Names{"fa_statistic_rows", "fa_backward_preprocess", "fa_sm80_backward", "fa_sm80_backward_dq"}));
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

// Gradients that are not wanted.

AttentionShape with(AttentionShape shape, const Gradients& gradients) {
  shape.gradients = gradients;
  return shape;
}

TEST_F(BackwardLaunches, WithoutDqNothingIsConverted) {
  EXPECT_EQ(launches_of_a_call(with(kShort, {false, true, true})),
            (Names{"fa_backward_preprocess", "+fa_sm90_backward"}));
  config_.deterministic = true;
  EXPECT_EQ(launches_of_a_call(with(kShort, {false, true, false})),
            (Names{"fa_backward_preprocess", "+fa_sm90_backward"}));
}

TEST_F(BackwardLaunches, WithoutDkAndDvNothingIsSummed) {
  const AttentionShape split{.b = 1, .h_q = 4, .h_kv = 1, .s_q = 2000, .s_kv = 500};
  EXPECT_EQ(launches_of_a_call(with(split, {true, false, false})),
            (Names{"fa_backward_preprocess", "+fa_sm90_backward", "+fa_backward_convert"}));
  EXPECT_EQ(launches_of_a_call(with(split, {true, false, true})),
            (Names{"fa_backward_preprocess", "+fa_sm90_backward", "+fa_backward_reduce", "+fa_backward_convert"}));
}

TEST_F(BackwardLaunches, DqAloneOfTheOtherFamilyIsItsPass) {
  config_.kernel_backward = KernelOverride{"sm80", ""};
  EXPECT_EQ(launches_of_a_call(with(kShort, {true, false, false})),
            (Names{"fa_backward_preprocess", "fa_sm80_backward_dq"}));
  EXPECT_EQ(launches_of_a_call(with(kShort, {false, true, true})),
            (Names{"fa_backward_preprocess", "fa_sm80_backward"}));
}

TEST_F(BackwardLaunches, DsinkAloneTakesTheStatistics) {
  config_.sink = true;
  EXPECT_EQ(launches_of_a_call(with(kShort, {false, false, false})),
            (Names{"fa_backward_preprocess", "fa_backward_sink"}));
}

TEST_F(BackwardLaunches, UnwantedGradientsNeedLessMemory) {
  for (const bool lists : {false, true}) {
    if (lists) config_.mask = MaskFunction{"q % 3 != kv % 3", {}};
    for (const bool deterministic : {false, true}) {
      config_.deterministic = deterministic;
      for (const char* const kernel : {"sm90", "sm80"}) {
        config_.kernel_backward = KernelOverride{kernel, ""};
        const Attention attention = Attention::create(config_);
        for (const AttentionShape& shape : {kShort, AttentionShape{.h_q = 4, .h_kv = 1, .s_q = 2000, .s_kv = 500}}) {
          const std::size_t all = attention.backward_workspace_size(shape);
          for (int bits = 0; bits < 7; ++bits) {
            const Gradients gradients{(bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0};
            EXPECT_LE(attention.backward_workspace_size(with(shape, gradients)), all) << kernel << ' ' << bits;
          }
          const auto accumulator = static_cast<std::size_t>(shape.b * shape.h_q * shape.s_q * 64) * sizeof(float);
          if (!lists && !deterministic) {
            EXPECT_LE(attention.backward_workspace_size(with(shape, {false, true, true})), all - accumulator);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace fa
