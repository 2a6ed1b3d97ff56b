#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <fa/error.hpp>
#include <string>
#include <vector>

#include "fake_driver/launches_test.hpp"

// What a merge queues: one launch, whatever it is asked for; and what a forward queues that adds to a state.
namespace fa {
namespace {

void* at(std::uintptr_t page) {
  return reinterpret_cast<void*>((std::uintptr_t{1} << 40) + (page << 32));
}

class MergeLaunches : public LaunchesTest {
 protected:
  MergeLaunches() { config_.head_dim = 128; }

  static AttentionState state(std::uintptr_t page, std::int64_t b, DType dtype = DType::bf16) {
    return {TensorView(at(page), dtype, {b, 4, 64, 128}), TensorView(at(page + 1), DType::f32, {b, 4, 64})};
  }

  const fake_driver::Launch& only_launch() {
    EXPECT_EQ(launches_().size(), 1U);
    return launches_().front();
  }
};

TEST_F(MergeLaunches, OneKernelThatStartsEarly) {
  const Attention attention = Attention::create(config_);
  for (const std::size_t count : {2, 16}) {
    std::vector<AttentionState> states;
    for (std::size_t i = 0; i < count; ++i) states.push_back(state(2 * i + 1, 8));
    launches_().clear();
    attention.merge({.states = states}, {states[0].o, states[0].lse});
    EXPECT_EQ(only_launch().kernel, "fa_merge_states");
    EXPECT_TRUE(only_launch().early);
    EXPECT_EQ(only_launch().shared_bytes, 0U);
    EXPECT_EQ(only_launch().threads, 256U);
    EXPECT_EQ(only_launch().grid, 64U);  // 2048 rows, 32 a block
  }
}

TEST_F(MergeLaunches, NothingWithoutRows) {
  const Attention attention = Attention::create(config_);
  const std::vector<AttentionState> states{state(1, 0), state(3, 0)};
  launches_().clear();
  attention.merge({.states = states}, {states[0].o, states[0].lse});
  EXPECT_TRUE(launches_().empty());
}

TEST_F(MergeLaunches, PreparedKernelsAreReady) {
  const Attention attention = Attention::create(config_);
  launches_().clear();
  const KernelInfo info = attention.merge_kernel_info({.mixed = true, .result = DType::f32});
  EXPECT_EQ(info.name, "fa_merge_states");
  EXPECT_EQ(info.spec,
            "merge_states arch=sm_90a dtype=bf16 d_v=128 states=2 float_result=1 aligned=1 warps=8 min_blocks=3");
  EXPECT_TRUE(launches_().empty());
  const std::uint64_t compiles = attention.cache_counters().compiles;
  const std::vector<AttentionState> states{state(1, 2, DType::f32), state(3, 2)};
  attention.merge({.states = states}, {states[0].o, states[0].lse});
  EXPECT_EQ(attention.cache_counters().compiles, compiles);
}

TEST_F(MergeLaunches, NeverMeansNoCompiler) {
  config_.compile = CompilePolicy::never;
  const Attention attention = Attention::create(config_);
  const std::vector<AttentionState> states{state(1, 2), state(3, 2)};
  launches_().clear();
  try {
    attention.merge({.states = states}, {states[0].o, states[0].lse});
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::cache_miss) << error.what();
  }
  EXPECT_TRUE(launches_().empty());
}

// A forward that adds to a state is the forward of the same shape, with other kernels and without tuning.
TEST_F(MergeLaunches, AccumulatingForwards) {
  const auto launched = [&](bool accumulate) {
    AttentionConfig config = config_;
    config.accumulate = accumulate;
    const Attention attention = Attention::create(config);
    const TensorView rows(at(1), DType::bf16, {2, 4, 512, 128});
    launches_().clear();
    attention.forward({rows, rows, rows}, {{at(2), DType::bf16, {2, 4, 512, 128}}, {at(3), DType::f32, {2, 4, 512}}});
    const KernelInfo info = attention.kernel_info({.b = 2, .h_q = 4, .s_q = 512, .s_kv = 512});
    EXPECT_EQ(info.spec.find("accumulate") != std::string::npos, accumulate) << info.spec;
    return launches_().size();
  };
  EXPECT_EQ(launched(true), launched(false));
}

// Debug kernels are other kernels, of which the choice is the planner's first.
TEST_F(MergeLaunches, DebugKernelsAreStoredApart) {
  const std::string spec = Attention::create(config_).merge_kernel_info().spec;
  EXPECT_EQ(spec.find("debug"), std::string::npos);
  config_.debug = true;
  const Attention attention = Attention::create(config_);
  EXPECT_EQ(attention.merge_kernel_info().spec, spec + " debug=1");
  config_.debug = false;
  setenv("FA_DEBUG_KERNELS", "1", 1);
  EXPECT_EQ(Attention::create(config_).merge_kernel_info().spec, spec + " debug=1");
  setenv("FA_DEBUG_KERNELS", "0", 1);
  EXPECT_EQ(Attention::create(config_).merge_kernel_info().spec, spec);
  unsetenv("FA_DEBUG_KERNELS");
}

}  // namespace
}  // namespace fa
