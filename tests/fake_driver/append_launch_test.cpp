#include <gtest/gtest.h>

#include <cstdint>
#include <fa/error.hpp>

#include "fake_driver/launches_test.hpp"

// What an append queues: one launch, whatever it is asked for.
namespace fa {
namespace {

void* at(std::uintptr_t page) {
  return reinterpret_cast<void*>((std::uintptr_t{1} << 40) + (page << 32));
}

class AppendLaunches : public LaunchesTest {
 protected:
  AppendLaunches() {
    config_.head_dim = 128;
    config_.page_size = 16;
  }

  static AppendInputs inputs(std::int64_t b, bool rotary) {
    const auto rows = [&](std::uintptr_t page, std::int64_t heads) {
      return TensorView(at(page), DType::bf16, {b, heads, 1, 128});
    };
    const TensorView k_cache(at(3), DType::bf16, {64, 8, 16, 128}), v_cache(at(4), DType::bf16, {64, 8, 16, 128});
    AppendInputs inputs{rows(1, 8), rows(2, 8), k_cache, v_cache};
    inputs.cache.block_table = TensorView(at(5), DType::i32, {b, 4});
    inputs.seqused_kv = static_cast<const std::int32_t*>(at(6));
    if (!rotary) return inputs;
    inputs.rotary.dims = 128;
    inputs.q = inputs.q_out = rows(7, 32);
    return inputs;
  }

  const fake_driver::Launch& only_launch() {
    EXPECT_EQ(launches_().size(), 1U);
    return launches_().front();
  }
};

TEST_F(AppendLaunches, OneKernelThatStartsEarly) {
  const Attention attention = Attention::create(config_);
  for (const bool rotary : {false, true}) {
    launches_().clear();
    attention.append(inputs(64, rotary));
    EXPECT_EQ(only_launch().kernel, "fa_append");
    EXPECT_TRUE(only_launch().early);
    EXPECT_EQ(only_launch().shared_bytes, 0U);
    EXPECT_EQ(only_launch().threads, 256U);
    // Of a token 2 groups of 4 heads of k and v, in 16 pieces (halves: 8), and 8 groups of q: 64 or 112 items.
    EXPECT_EQ(only_launch().grid, rotary ? 32U : 16U);
  }
}

TEST_F(AppendLaunches, ManyHeadsTakeSeveralBlocksOfAToken) {
  const Attention attention = Attention::create(config_);
  AppendInputs many = inputs(3, true);
  many.q = many.q_out = TensorView(at(7), DType::bf16, {3, 128, 1, 128});
  launches_().clear();
  attention.append(many);
  EXPECT_EQ(only_launch().grid, 6U);  // 304 items
}

TEST_F(AppendLaunches, NothingWithoutRows) {
  const Attention attention = Attention::create(config_);
  launches_().clear();
  attention.append(inputs(0, false));
  EXPECT_TRUE(launches_().empty());
}

// Equal calls are launched alike; another base or table is another launch, and not another kernel.
TEST_F(AppendLaunches, ParametersFollowTheCall) {
  const Attention attention = Attention::create(config_);
  const auto params = [&](const AppendInputs& call) {
    launches_().clear();
    attention.append(call);
    return only_launch().params;
  };
  AppendInputs call = inputs(4, true);
  const std::uint64_t first = params(call);
  EXPECT_EQ(params(call), first);
  call.rotary.base = 500000;
  EXPECT_NE(params(call), first);
  call.rotary.base = 10000;
  EXPECT_EQ(params(call), first);
  call.rotary.dims = 64;
  EXPECT_NE(params(call), first);
  call = inputs(4, true);
  call.cache.block_table.data = at(9);
  EXPECT_NE(params(call), first);
}

TEST_F(AppendLaunches, PreparedKernelsAreReady) {
  const Attention attention = Attention::create(config_);
  launches_().clear();
  const KernelInfo info = attention.append_kernel_info({.rotary_dims = 128});
  EXPECT_EQ(info.name, "fa_append");
  EXPECT_EQ(
      info.spec,
      "append arch=sm_90a dtype=bf16 d_qk=128 d_v=128 page_size=16 rotary_dims=128 interleaved=0 table=0 aligned=1 "
      "warps=8 min_blocks=3");
  EXPECT_TRUE(launches_().empty());
  const std::uint64_t compiles = attention.cache_counters().compiles;
  attention.append(inputs(64, true));
  EXPECT_EQ(attention.cache_counters().compiles, compiles);
}

TEST_F(AppendLaunches, NeverMeansNoCompiler) {
  config_.compile = CompilePolicy::never;
  const Attention attention = Attention::create(config_);
  launches_().clear();
  try {
    attention.append(inputs(4, false));
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::cache_miss) << error.what();
  }
  EXPECT_TRUE(launches_().empty());
}

}  // namespace
}  // namespace fa
