#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "fake_driver/launches_test.hpp"

// What a forward queues, in what order.
namespace fa {
namespace {

constexpr int kHeadDim = 128;

class ForwardLaunches : public LaunchesTest {
 protected:
  ForwardLaunches() {
    config_.head_dim = kHeadDim;
    config_.causal = true;
  }

  static AttentionShape shape_of(std::int64_t s) { return {.b = 4, .h_q = 16, .h_kv = 16, .s_q = s, .s_kv = s}; }

  static TensorView slope() { return {reinterpret_cast<void*>(std::uintptr_t{1} << 42), DType::f32, {16}}; }

  void call(const Attention& attention, std::int64_t s, const Workspace& workspace, const Captures& captures = {}) {
    std::uintptr_t next = std::uintptr_t{1} << 40;
    const auto tensor = [&] {
      next += std::uintptr_t{1} << 32;
      return TensorView(reinterpret_cast<void*>(next), DType::bf16, {4, 16, s, kHeadDim});
    };
    launches_().clear();
    attention.forward({tensor(), tensor(), tensor(), captures}, {tensor(), {}}, nullptr, workspace);
  }
};

void* const kMemory = reinterpret_cast<void*>(std::uintptr_t{1} << 41);

TEST_F(ForwardLaunches, ShortTilesNeedNothingElse) {
  const Attention attention = Attention::create(config_);
  call(attention, 512, {});
  ASSERT_EQ(launches_().size(), 1U);
  EXPECT_EQ(launches_()[0].kernel, "fa_sm90_forward");
}

// Not once and for all: the counter is left as the kernel before has it.
TEST_F(ForwardLaunches, TheCounterOfLongTilesIsClearedBeforeEveryCall) {
  const Attention attention = Attention::create(config_);
  const std::size_t bytes = attention.workspace_size(shape_of(4096));
  for (int i = 0; i < 2; ++i) {
    call(attention, 4096, {kMemory, bytes});
    ASSERT_EQ(launches_().size(), 2U);
    EXPECT_EQ(launches_()[0].kernel, fake_driver::kMemset);
    EXPECT_EQ(launches_()[0].address, reinterpret_cast<std::uintptr_t>(kMemory));
    EXPECT_EQ(launches_()[0].bytes, sizeof(std::int32_t));
    EXPECT_EQ(launches_()[1].kernel, "fa_sm90_forward");
    EXPECT_FALSE(launches_()[1].early) << "before the counter is cleared";
  }
}

// Without a causal mask such a batch comes in waves, and takes no workspace.
TEST_F(ForwardLaunches, AnOverrideGivesPackedBatchesACounter) {
  config_.causal = false;
  constexpr std::int64_t kRows = 4 * 4096;
  const AttentionShape shape{
      .b = 4, .h_q = 16, .h_kv = 16, .s_q = 4096, .s_kv = 4096, .total_q = kRows, .total_kv = kRows};
  const auto at = [](int i) { return reinterpret_cast<void*>(std::uintptr_t(i) << 40); };
  ForwardInputs in;
  in.q = in.k = in.v = TensorView(at(3), DType::bf16, {1, 16, kRows, kHeadDim});
  in.sequences.b = 4;
  in.sequences.cu_seqlens_q = in.sequences.cu_seqlens_kv = static_cast<const std::int32_t*>(at(4));
  const TensorView o(at(5), DType::bf16, {1, 16, kRows, kHeadDim});
  config_.varlen = true;
  EXPECT_EQ(Attention::create(config_).workspace_size(shape), 0U);
  config_.kernel = KernelOverride{"sm90", "dynamic=1"};
  const Attention attention = Attention::create(config_);
  const Workspace workspace{kMemory, attention.workspace_size(shape)};
  for (const int blocks : {132, 24}) {
    if (blocks < 132) in.max_multiprocessors = blocks;
    launches_().clear();
    attention.forward(in, {o, {}}, nullptr, workspace);
    ASSERT_EQ(launches_().size(), 2U);
    EXPECT_EQ(launches_()[0].kernel, fake_driver::kMemset);
    EXPECT_EQ(launches_()[0].address, reinterpret_cast<std::uintptr_t>(kMemory));
    EXPECT_EQ(launches_()[0].bytes, sizeof(std::int32_t));
    EXPECT_EQ(launches_()[1].kernel, "fa_sm90_forward");
    EXPECT_EQ(launches_()[1].grid, static_cast<unsigned>(blocks));
    EXPECT_FALSE(launches_()[1].early);
  }
  config_.dropout = 0.5f;
  EXPECT_THROW(Attention::create(config_), Error);
}

// The maxima of norms start from zeros, too.
TEST_F(ForwardLaunches, NormsAreLookedForBeforeKeysAreLeftOut) {
  for (const bool causal : {false, true}) {
    config_.causal = causal;
    config_.score = fa::functions::alibi();
    const Attention attention = Attention::create(config_);
    const std::size_t bytes = attention.workspace_size(shape_of(4096));
    EXPECT_EQ(bytes, 256 + 4 * (16 + 16) * sizeof(float));
    for (int i = 0; i < 2; ++i) {
      call(attention, 4096, {kMemory, bytes}, {{"slope", slope()}});
      ASSERT_EQ(launches_().size(), 3U);
      EXPECT_EQ(launches_()[0].kernel, fake_driver::kMemset);
      EXPECT_EQ(launches_()[0].address, reinterpret_cast<std::uintptr_t>(kMemory));
      EXPECT_EQ(launches_()[0].bytes, bytes);
      EXPECT_EQ(launches_()[1].kernel, "fa_row_norms");
      EXPECT_FALSE(launches_()[1].early);
      EXPECT_EQ(launches_()[2].kernel, "fa_sm90_forward");
      EXPECT_FALSE(launches_()[2].early);
    }
    launches_().clear();
    EXPECT_THROW(call(attention, 4096, {kMemory, bytes - 1}, {{"slope", slope()}}), Error);
    EXPECT_TRUE(launches_().empty());
    call(attention, 512, {kMemory, attention.workspace_size(shape_of(512))}, {{"slope", slope()}});
    EXPECT_EQ(launches_().back().kernel, "fa_sm90_forward");
    EXPECT_EQ(launches_().size(), 1U);
  }
}

TEST_F(ForwardLaunches, TopKeysComeBehindTheSumsOfTheirHeads) {
  config_.statistics.top_keys = 6;
  const Attention attention = Attention::create(config_);
  const std::size_t sums = sizeof(float) * 4 * 16 * 512;
  const std::size_t bytes = attention.workspace_size(shape_of(512));
  EXPECT_GE(bytes, sums);
  const auto call_with = [&](std::int64_t s_q, const Workspace& workspace) {
    const TensorView rows(kMemory, DType::bf16, {4, 16, s_q, kHeadDim}),
        keys(kMemory, DType::bf16, {4, 16, 512, kHeadDim});
    const auto at = [](int place) {
      return reinterpret_cast<void*>((std::uintptr_t{1} << 42) +
                                     (std::uintptr_t{1} << 32) * static_cast<unsigned>(place));
    };
    ForwardOutputs to{TensorView(at(0), DType::bf16, {4, 16, s_q, kHeadDim}),
                      TensorView(at(1), DType::f32, {4, 16, s_q})};
    to.statistics.top_keys = TensorView(at(2), DType::i32, {4, 16, 6});
    launches_().clear();
    attention.forward({rows, keys, keys}, to, nullptr, workspace);
  };
  call_with(512, {reinterpret_cast<void*>(std::uintptr_t{1} << 43), bytes});
  ASSERT_EQ(launches_().size(), 3U);
  EXPECT_EQ(launches_()[1].kernel, "fa_column_sums");
  EXPECT_EQ(launches_()[2].kernel, "fa_top_keys");
  EXPECT_EQ(launches_()[2].grid, 4U * 16);
  EXPECT_FALSE(launches_()[2].early);
  EXPECT_THROW(call_with(512, {reinterpret_cast<void*>(std::uintptr_t{1} << 43), sums - 1}), Error);
  EXPECT_TRUE(launches_().empty());
  call_with(0, {});  // no rows, no keys: -1
  ASSERT_EQ(launches_().size(), 1U);
  EXPECT_EQ(launches_()[0].kernel, fake_driver::kMemset);
  EXPECT_EQ(launches_()[0].bytes, sizeof(std::int32_t) * 4 * 16 * 6);
}

// Five stages are more than the family has that serves what the copy engine cannot.
TEST_F(ForwardLaunches, AnOverrideThatWasAcceptedRefusesNoCall) {
  config_.causal = false;
  config_.kernel = KernelOverride{"", "tile_n=64 stages=5"};
  const Attention attention = Attention::create(config_);
  call(attention, 512, {});
  EXPECT_EQ(launches_().back().kernel, "fa_sm90_forward");
  TensorView broadcast(reinterpret_cast<void*>(std::uintptr_t{1} << 40), DType::bf16, {4, 16, 512, kHeadDim});
  broadcast.strides[0] = 0;
  const TensorView o(reinterpret_cast<void*>(std::uintptr_t{1} << 41), DType::bf16, {4, 16, 512, kHeadDim});
  launches_().clear();
  attention.forward({broadcast, broadcast, broadcast}, {o, {}});
  ASSERT_EQ(launches_().size(), 1U);
  EXPECT_EQ(launches_().back().kernel, "fa_sm80_forward");
  config_.kernel->text = "stages=9";
  EXPECT_THROW(Attention::create(config_), Error);
}

TEST_F(ForwardLaunches, WithoutRoomForTheCounterNothingIsQueued) {
  const Attention attention = Attention::create(config_);
  const std::size_t bytes = attention.workspace_size(shape_of(4096));
  ASSERT_GT(bytes, 0U);
  EXPECT_THROW(call(attention, 4096, {kMemory, bytes - 1}), Error);
  EXPECT_TRUE(launches_().empty());
}

}  // namespace
}  // namespace fa
