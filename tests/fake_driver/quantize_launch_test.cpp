#include <gtest/gtest.h>

#include <cstdint>
#include <fa/error.hpp>
#include <string>
#include <vector>

#include "fake_driver/launches_test.hpp"

// What calls that make codes queue: means of k before what reads them, and rows of each tensor.
namespace fa {
namespace {

void* at(std::uintptr_t page) {
  return reinterpret_cast<void*>((std::uintptr_t{1} << 40) + (page << 32));
}

class QuantizeLaunches : public LaunchesTest {
 protected:
  QuantizeLaunches() {
    config_.head_dim = 128;
    config_.dtype = DType::i8;
  }

  static QuantizeInputs inputs(std::int64_t s = 1000) {
    QuantizeInputs in;
    in.q = TensorView(at(1), DType::bf16, {2, 8, s, 128});
    in.k = TensorView(at(2), DType::bf16, {2, 2, s, 128});
    in.v = TensorView(at(3), DType::f16, {2, 2, s, 128});
    in.q_codes = TensorView(at(4), DType::i8, {2, 8, s, 128});
    in.k_codes = TensorView(at(5), DType::i8, {2, 2, s, 128});
    in.v_codes = TensorView(at(6), DType::e4m3, {2, 2, s, 128});
    in.q_scale = TensorView(at(7), DType::f32, {2, 8, s});
    in.k_scale = TensorView(at(8), DType::f32, {2, 2, s});
    in.v_scale = TensorView(at(9), DType::f32, {2, 2, s});
    in.k_mean = TensorView(at(10), DType::f32, {2, 2, 128});
    in.row_bias = TensorView(at(11), DType::f32, {2, 8, s});
    return in;
  }
};

TEST_F(QuantizeLaunches, MeansThenRows) {
  const Attention attention = Attention::create(config_);
  launches_().clear();
  attention.prepare_quantize(inputs());
  EXPECT_TRUE(launches_().empty());
  const std::uint64_t compiles = attention.cache_counters().compiles;
  EXPECT_EQ(compiles, 3U);  // q and k share theirs
  attention.quantize(inputs());
  EXPECT_EQ(attention.cache_counters().compiles, compiles);
  ASSERT_EQ(launches_().size(), 4U);
  // 8 blocks of 16 columns of each of 4 heads; 16 rows a block.
  constexpr unsigned kGrids[] = {32, 1000, 250, 250}, kThreads[] = {512, 256, 256, 256};
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(launches_()[i].kernel, "fa_quantize");
    EXPECT_EQ(launches_()[i].grid, kGrids[i]) << i;
    EXPECT_EQ(launches_()[i].threads, kThreads[i]) << i;
    EXPECT_EQ(launches_()[i].shared_bytes, i == 0 ? 1024U : 0U) << i;
    EXPECT_FALSE(launches_()[i].early) << i;
  }
}

TEST_F(QuantizeLaunches, WhatIsNotAskedForIsNotRun) {
  const Attention attention = Attention::create(config_);
  QuantizeInputs in = inputs();
  in.mean_given = true;
  launches_().clear();
  attention.quantize(in);
  EXPECT_EQ(launches_().size(), 3U);
  in.v = in.v_codes = in.v_scale = {};
  launches_().clear();
  attention.quantize(in);
  EXPECT_EQ(launches_().size(), 2U);
  launches_().clear();
  attention.quantize({});
  EXPECT_TRUE(launches_().empty());
  in = inputs(0);
  attention.quantize(in);
  EXPECT_EQ(launches_().size(), 1U);  // means of no keys are 0
}

TEST_F(QuantizeLaunches, NeverMeansNoCompiler) {
  config_.compile = CompilePolicy::never;
  const Attention attention = Attention::create(config_);
  launches_().clear();
  EXPECT_THROW(attention.quantize(inputs()), Error);
  EXPECT_TRUE(launches_().empty());
}

}  // namespace
}  // namespace fa
