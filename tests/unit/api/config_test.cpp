#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include <fa/attention.hpp>

#include "expect_error.hpp"

namespace fa {
namespace {

using test::expect_invalid;

AttentionConfig config_f32() {
  AttentionConfig config;
  config.head_dim = 64;
  config.dtype = DType::f32;
  return config;
}

void create(const AttentionConfig& config) {
  Attention::create(config, Device::host());
}

TEST(ConfigTest, HeadDimsAreMultiplesOfEightUpToTheirMost) {
  for (const int head_dim : {8, 16, 72, 128, 256, 264, 512}) {
    AttentionConfig config = config_f32();
    config.head_dim = head_dim;
    EXPECT_NO_THROW(create(config)) << head_dim;
    config.head_dim_v = 520 - head_dim;
    EXPECT_NO_THROW(create(config)) << head_dim;
  }
  for (const int head_dim : {520, 576}) {
    AttentionConfig config = config_f32();
    config.head_dim = head_dim;
    expect_invalid("head_dim_v", [&] { create(config); });
    config.head_dim_v = 512;
    EXPECT_NO_THROW(create(config)) << head_dim;
  }
  for (const int head_dim : {-8, 0, 4, 20, 584, std::numeric_limits<int>::max()}) {
    AttentionConfig config = config_f32();
    config.head_dim = head_dim;
    expect_invalid("head_dim", [&] { create(config); });
  }
  for (const int head_dim : {-8, 4, 20, 520}) {
    AttentionConfig config = config_f32();
    config.head_dim_v = head_dim;
    expect_invalid("head_dim_v", [&] { create(config); });
  }
}

TEST(ConfigTest, ValueInKeyIsOfTheColumnsOfK) {
  AttentionConfig config = config_f32();
  config.head_dim = 72;
  for (const int columns : {8, 64, 72}) {
    config.value_in_key = columns;
    EXPECT_NO_THROW(create(config)) << columns;
  }
  for (const int columns : {-8, 4, 20, 80}) {
    config.value_in_key = columns;
    expect_invalid("value_in_key", [&] { create(config); });
  }
  config.value_in_key = 64;
  config.head_dim_v = 64;
  EXPECT_NO_THROW(create(config));
  config.head_dim_v = 72;
  expect_invalid("head_dim_v", [&] { create(config); });
  config.head_dim = 576;
  config.head_dim_v = 0;
  config.value_in_key = 520;
  expect_invalid("value_in_key", [&] { create(config); });
  config.value_in_key = 512;
  EXPECT_NO_THROW(create(config));
}

TEST(ConfigTest, ScaleIsAnyFiniteNumber) {
  AttentionConfig config = config_f32();
  for (const float scale : {0.0f, -1.0f, 1e30f, -0.0f, std::numeric_limits<float>::denorm_min()}) {
    config.scale = scale;
    EXPECT_NO_THROW(create(config)) << scale;
  }
  for (const float scale :
       {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(), std::nanf("")}) {
    config.scale = scale;
    expect_invalid("scale", [&] { create(config); });
  }
}

TEST(ConfigTest, EnumerationsAreChecked) {
  AttentionConfig config = config_f32();
  config.dtype = static_cast<DType>(17);
  expect_invalid("dtype", [&] { create(config); });
  config = config_f32();
  config.causal_align = static_cast<CausalAlign>(2);
  expect_invalid("causal_align", [&] { create(config); });
  config = config_f32();
  config.cache.mode = static_cast<CachePolicy::Mode>(99);
  expect_invalid("cache.mode", [&] { create(config); });
  config = config_f32();
  config.compile = static_cast<CompilePolicy>(99);
  expect_invalid("compile", [&] { create(config); });
  config = config_f32();
  config.tune = static_cast<TunePolicy>(99);
  expect_invalid("tune", [&] { create(config); });
  config = config_f32();
  config.kernel = KernelOverride{"sm70"};
  expect_invalid("kernel.kernel", [&] { create(config); });
  config.kernel.reset();
  config.kernel_backward = KernelOverride{"sm90_forward"};
  expect_invalid("kernel_backward.kernel", [&] { create(config); });
}

TEST(ConfigTest, KeepsWhatItWasGiven) {
  AttentionConfig config = config_f32();
  config.causal = true;
  config.scale = 0.25f;
  Attention first = Attention::create(config, Device::host());
  const Attention attention = std::move(first);
  EXPECT_EQ(attention.device(), Device::host());
  EXPECT_EQ(attention.config().head_dim, 64);
  EXPECT_EQ(attention.config().scale, 0.25f);
  EXPECT_TRUE(attention.config().causal);
}

TEST(ConfigTest, ShapesAreChecked) {
  const Attention attention = Attention::create(config_f32(), Device::host());
  AttentionShape shape{.b = 2, .h_q = 6, .h_kv = 2, .s_q = 3, .s_kv = 4};
  EXPECT_NO_THROW(attention.prepare(shape));
  EXPECT_EQ(attention.workspace_size(shape), 0u);
  EXPECT_EQ(attention.kernel_info(shape).origin, "host");
  shape.h_kv = 0;  // as many as query heads
  EXPECT_NO_THROW(attention.prepare(shape));
  shape.h_kv = 4;
  expect_invalid("h_q", [&] { attention.prepare(shape); });
  expect_invalid("h_q", [&] { (void)attention.workspace_size(shape); });
  expect_invalid("h_q", [&] { (void)attention.kernel_info(shape); });
  const std::pair<const char*, std::int64_t AttentionShape::*> sizes[] = {{"b", &AttentionShape::b},
                                                                          {"h_q", &AttentionShape::h_q},
                                                                          {"h_kv", &AttentionShape::h_kv},
                                                                          {"s_q", &AttentionShape::s_q},
                                                                          {"s_kv", &AttentionShape::s_kv}};
  for (const auto& [name, member] : sizes) {
    for (const std::int64_t size : {std::int64_t{-1}, std::int64_t{1} << 40}) {
      AttentionShape wrong{.b = 2, .h_q = 2, .h_kv = 2, .s_q = 3, .s_kv = 4};
      wrong.*member = size;
      expect_invalid(name, [&] { attention.prepare(wrong); });
    }
  }
}

TEST(ConfigTest, ShapesOfBackwardAreChecked) {
  const Attention attention = Attention::create(config_f32(), Device::host());
  AttentionShape shape{.b = 2, .h_q = 6, .h_kv = 2, .s_q = 3, .s_kv = 4};
  EXPECT_NO_THROW(attention.prepare_backward(shape));
  EXPECT_EQ(attention.backward_workspace_size(shape), 0u);
  EXPECT_EQ(attention.backward_kernel_info(shape).origin, "host");
  EXPECT_EQ(attention.backward_kernel_info(shape).name, "fa_reference_backward");
  shape.h_kv = 4;
  expect_invalid("h_q", [&] { attention.prepare_backward(shape); });
  expect_invalid("h_q", [&] { (void)attention.backward_workspace_size(shape); });
  expect_invalid("h_q", [&] { (void)attention.backward_kernel_info(shape); });
}

TEST(ConfigTest, OverridesAreCheckedEachByItsName) {
  const struct {
    const char* text;
    const char* argument;
  } cases[] = {{"splits=65", "splits"}, {"splits=-1", "text"}, {"tile_m", "text"}, {"tile_q=64", "text"}};
  for (const auto& wrong : cases) {
    AttentionConfig config = config_f32();
    config.kernel = KernelOverride{"", wrong.text};
    expect_invalid(std::string("kernel.") + wrong.argument, [&] { create(config); });
    config = config_f32();
    config.kernel_backward = KernelOverride{"", wrong.text};
    expect_invalid(std::string("kernel_backward.") + wrong.argument, [&] { create(config); });
  }
}

TEST(ConfigTest, ClustersOfBackwardHaveAtMostEightBlocks) {
  AttentionConfig config = config_f32();
  config.kernel_backward = KernelOverride{"", "split_blocks=9"};
  expect_invalid("kernel_backward.split_blocks", [&] { create(config); });
  config.kernel_backward = KernelOverride{"", "split_blocks=8"};
  EXPECT_NO_THROW(create(config));
}

TEST(ConfigTest, VersionIsThatOfTheProject) {
  EXPECT_STREQ(version(), "0.1.0");
}

}  // namespace
}  // namespace fa
