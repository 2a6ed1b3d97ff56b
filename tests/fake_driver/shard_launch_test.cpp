// The kernels of placed, strided and bounded calls, beside those of other calls of one Attention.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "fake_driver/launches_test.hpp"

namespace fa {
namespace {

using Change = void (*)(AttentionConfig&);
constexpr std::array<std::pair<const char*, Change>, 5> kChanges{{
    {"causal", [](AttentionConfig& config) { config.causal = true; }},
    {"dropout", [](AttentionConfig& config) { config.dropout = 0.1f; }},
    {"score", [](AttentionConfig& config) { config.score.expression = "score + 0.1 * float(q - kv)"; }},
    {"mask", [](AttentionConfig& config) { config.mask.expression = "q % 3 != kv % 5"; }},
    {"chunk", [](AttentionConfig& config) { config.chunk = 64; }},
}};

class ShardLaunches : public LaunchesTest {
 protected:
  static std::vector<AttentionShape> shapes() {
    const AttentionShape whole{.b = 2, .h_q = 4, .h_kv = 4, .s_q = 1024, .s_kv = 1024};
    std::vector<AttentionShape> all(4, whole);
    all[1].placed = true;
    all[2].placed = all[2].strided = true;
    all[3].bounded = true;
    return all;
  }

  static std::string specs(const Attention& attention, const AttentionShape& shape) {
    return attention.kernel_info(shape).spec + ", " + attention.backward_kernel_info(shape).spec;
  }
};

/// Whichever call comes first.
TEST_F(ShardLaunches, KernelsDoNotDependOnTheCallsBefore) {
  config_.head_dim = 64;
  for (const auto& [name, change] : kChanges) {
    AttentionConfig config = config_;
    change(config);
    const std::vector<AttentionShape> all = shapes();
    std::vector<std::string> expected;
    for (const AttentionShape& shape : all) {
      if (config.dropout > 0 && shape.strided) continue;
      expected.push_back(specs(Attention::create(config), shape));
    }
    std::array<std::size_t, 4> order{0, 1, 2, 3};
    do {
      const Attention attention = Attention::create(config);
      for (const std::size_t i : order) {
        if (config.dropout > 0 && all[i].strided) continue;
        const std::size_t at = config.dropout > 0 && i == 3 ? 2 : i;
        EXPECT_EQ(specs(attention, all[i]), expected[at]) << name << ", shape " << i;
      }
    } while (std::ranges::next_permutation(order).found);
  }
}

TEST_F(ShardLaunches, PlacesThatNoParameterHasAreKernelsOfTheirOwn) {
  config_.head_dim = 64;
  config_.dropout = 0.1f;
  const Attention attention = Attention::create(config_);
  EXPECT_EQ(specs(attention, shapes()[0]).find("placed"), std::string::npos);
  const std::string placed = specs(attention, shapes()[1]);
  EXPECT_NE(placed.find("placed=1"), placed.rfind("placed=1")) << placed << ": in forward and backward";
}

// Blocks of the mma.sync kernels go on from tile to tile, as many as the call may take multiprocessors.
TEST_F(ShardLaunches, BoundedMmaSyncGridsHaveNoMoreBlocks) {
  config_.head_dim = 64;
  config_.causal = true;
  config_.dtype = DType::f32;
  for (const bool deterministic : {false, true}) {
    config_.deterministic = deterministic;
    const Attention attention = Attention::create(config_);
    std::uintptr_t next = std::uintptr_t{1} << 40;
    const auto tensor = [&] {
      next += std::uintptr_t{1} << 32;
      return TensorView(reinterpret_cast<void*>(next), DType::f32, {2, 8, 1024, 64});
    };
    const TensorView lse(reinterpret_cast<void*>(std::uintptr_t{1} << 39), DType::f32, {2, 8, 1024});
    ForwardInputs in{tensor(), tensor(), tensor()};
    BackwardInputs all{in.q, in.k, in.v, tensor(), lse, tensor()};
    for (const int multiprocessors : {1, 20, 127}) {
      in.max_multiprocessors = all.max_multiprocessors = multiprocessors;
      launches_().clear();
      attention.forward(in, {tensor(), lse});
      attention.backward(all, {tensor(), tensor(), tensor()});
      int bounded = 0;
      for (const auto& launch : launches_()) {
        if (!launch.kernel.starts_with("fa_sm80")) continue;
        EXPECT_EQ(launch.grid, static_cast<unsigned>(multiprocessors)) << launch.kernel;
        ++bounded;
      }
      EXPECT_EQ(bounded, deterministic ? 3 : 2) << "forward, backward, and a pass for dq";
    }
  }
}

}  // namespace
}  // namespace fa
