#include "plan/forward_launch.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cstddef>

#include "plan/planner.hpp"
#include "plan/sm90_forward.hpp"
#include "reference/dropout.hpp"
#include "unit/plan/launches.hpp"

namespace fa::plan {
namespace {

// b 2, h_q 8, h_kv 2, s_q 300, s_kv 500, d 128/64, [b, s, h, d] in memory.
struct Call {
  Problem problem;
  ForwardTensors tensors;
};

Call some_call() {
  static std::array<std::byte, 64> memory;
  Call call;
  Problem& p = call.problem;
  p.arch = parse_arch("sm_90a");
  p.d_qk = 128;
  p.d_v = 64;
  p.causal = true;
  p.b = 2;
  p.h_q = 8;
  p.h_kv = 2;
  p.s_q = 300;
  p.s_kv = 500;
  const auto view = [&](std::int64_t heads, std::int64_t s, std::int64_t d) {
    return TensorView(static_cast<void*>(memory.data()), DType::bf16, {p.b, s, heads, d}).swap_axes(1, 2);
  };
  call.tensors.q = view(p.h_q, p.s_q, p.d_qk);
  call.tensors.k = view(p.h_kv, p.s_kv, p.d_qk);
  call.tensors.v = view(p.h_kv, p.s_kv, p.d_v);
  call.tensors.o = view(p.h_q, p.s_q, p.d_v);
  return call;
}

TEST(ForwardLaunch, Sm80HasABlockForEachTile) {
  const Call call = some_call();
  const KernelSpec spec = plan_forward(call.problem, {Family::sm80}).kernel;
  const ForwardLaunch launch = forward_launch(call.problem, call.tensors, 0.5, 3, spec, 132);
  EXPECT_EQ(launch.params.m_blocks, 3);
  EXPECT_EQ(launch.tiles, 3 * 8 * 2 * 3);
  EXPECT_EQ(launch.grid, launch.tiles);
  EXPECT_EQ(launch.params.group, 4);
  EXPECT_EQ(launch.params.causal_shift, 200);
  EXPECT_EQ(launch.params.heads, 8);
  EXPECT_EQ(launch.params.heads_in_flight % 4, 0) << "query heads of a KV head stay together";
  EXPECT_EQ(launch.params.scale, 0.5F);
  EXPECT_NEAR(launch.params.scale_log2, 0.72134752, 1e-6);
  EXPECT_EQ(launch.params.stride_q_s, 8 * 128);
  EXPECT_EQ(launch.params.stride_o_b, 300 * 8 * 64);
  EXPECT_EQ(launch.params.lse, nullptr);
  EXPECT_EQ(launch.params.partial_o, nullptr);
}

TEST(ForwardLaunch, Sm90HasABlockForEachMultiprocessorAtMost) {
  Call call = some_call();
  const KernelSpec spec = plan_forward(call.problem, {}).kernel;
  ASSERT_EQ(spec.family(), Family::sm90);
  EXPECT_EQ(forward_launch(call.problem, call.tensors, 1, 1, spec, 132).grid, 48);
  EXPECT_EQ(forward_launch(call.problem, call.tensors, 1, 1, spec, 20).grid, 20);
  EXPECT_EQ(forward_launch(call.problem, call.tensors, 1, 1, spec, 20).tiles, 48);
  call.problem.causal_align = CausalAlign::top_left;
  EXPECT_EQ(forward_launch(call.problem, call.tensors, 1, 1, spec, 20).params.causal_shift, 0);
}

// Heads whose K and V share the L2 cache, of causal grids of 16 heads a batch entry, d 128.
TEST(ForwardLaunch, CausalHeadsFillTheCache) {
  const auto heads_at = [](int d, std::int64_t b, std::int64_t s, bool exact = true) {
    Call call = some_call();
    Problem& p = call.problem;
    p.d_qk = p.d_v = d;
    p.b = b;
    p.h_q = p.h_kv = 16;
    p.s_q = p.s_kv = s;
    Fixed trailing;
    trailing.set("exact_max", false);
    const KernelSpec spec = plan_forward(p, exact ? Fixed{} : trailing).kernel;
    return forward_launch(p, call.tensors, 1, 1, spec, 132).params.heads_in_flight;
  };
  EXPECT_EQ(heads_at(128, 32, 512), 66) << "balanced: few tiles each";
  EXPECT_EQ(heads_at(128, 16, 1024), 66);
  EXPECT_EQ(heads_at(128, 32, 512, false), 88) << "of 192 rows";
  EXPECT_EQ(heads_at(128, 16, 1024, false), 44);
  EXPECT_EQ(heads_at(128, 8, 2048), 48) << "48 MB";
  EXPECT_EQ(heads_at(128, 4, 4096), 32) << "from a counter, 64 MB";
  EXPECT_EQ(heads_at(128, 2, 8192), 16);
  EXPECT_EQ(heads_at(128, 1, 65536), 8) << "as few as it gets";
  EXPECT_EQ(heads_at(64, 3, 16384), 16);
  EXPECT_EQ(equal_sections(64, 24), 22) << "three of one size";
  EXPECT_EQ(equal_sections(16, 100), 16);
  EXPECT_EQ(equal_sections(0, 0), 1);
}

// A last section of a few heads would start its longest tiles when the others are done.
TEST(ForwardLaunch, CausalHeadsThatFitTheCacheAreOneSection) {
  const auto heads_at = [](std::int64_t h_q, std::int64_t h_kv, std::int64_t s, bool causal = true) {
    Call call = some_call();
    Problem& p = call.problem;
    p.d_qk = p.d_v = 128;
    p.b = 1;
    p.h_q = h_q;
    p.h_kv = h_kv;
    p.s_q = p.s_kv = s;
    p.causal = causal;
    const KernelSpec spec = plan_forward(p, {}).kernel;
    EXPECT_FALSE(spec.dynamic());
    return forward_launch(p, call.tensors, 1, 1, spec, 132).params.heads_in_flight;
  };
  EXPECT_EQ(heads_at(40, 8, 4096), 40) << "16 MB; in 36 and 4 the second one has a round of its own";
  EXPECT_EQ(heads_at(56, 8, 2048), 56);
  EXPECT_EQ(heads_at(72, 8, 4096), 72) << "two sections of 36 fit together";
  EXPECT_EQ(heads_at(56, 56, 2048), 48) << "56 MB do not fit";
  EXPECT_EQ(heads_at(40, 8, 4096, false), 36) << "tiles of one length";
}

/// A packed batch has slots for every tile of any lengths that fit: one more a sequence than full tiles.
TEST(ForwardLaunch, APackedBatchHasABlockForEachSlot) {
  Call call = some_call();
  Problem& p = call.problem;
  p.varlen = true;
  p.total_q = 1000;
  p.total_kv = 1500;
  const KernelSpec spec = plan_forward(p, {}).kernel;
  EXPECT_EQ(spec.family(), Family::sm90);
  EXPECT_TRUE(spec.varlen);
  const std::int32_t cu[3] = {0, 500, 1000};
  PackedArgs variants;
  variants.sequences.cu_q = variants.sequences.cu_kv = cu;
  const ForwardLaunch launch = forward_launch(p, call.tensors, 0.5, 1, spec, 132, variants);
  EXPECT_EQ(launch.params.m_blocks, 1000 / spec.tile_m + 2);
  EXPECT_EQ(launch.tiles, std::int64_t{launch.params.m_blocks} * 8);
  EXPECT_EQ(launch.grid, std::min<std::int64_t>(launch.tiles, 132));
  const ForwardLaunch small = forward_launch(p, call.tensors, 0.5, 1, spec, 8, variants);
  EXPECT_EQ(small.params.sequences.wave, 8);
  EXPECT_EQ(small.grid, 8 * waves((small.tiles + 7) / 8));
  const KernelSpec sm80 = plan_forward(p, {Family::sm80}).kernel;
  EXPECT_EQ(forward_launch(p, call.tensors, 0.5, 1, sm80, 132, variants).grid, (1000 / sm80.tile_m + 2) * 8);
  EXPECT_EQ(launch.params.sequences.cu_q, cu);
  EXPECT_EQ(launch.params.sequences.total_q, 1000);
  EXPECT_EQ(launch.params.sequences.total_kv, 1500);
  EXPECT_EQ(launch.params.sequences.bottom_right, 1);
  EXPECT_LE(launch.params.heads_in_flight, 8);
}

/// So are tiles under a mask function, whose lists differ in length.
TEST(ForwardLaunch, MaskFunctionsHaveWavesOfBlocks) {
  Call call = some_call();
  const ForwardLaunch plain =
      forward_launch(call.problem, call.tensors, 0.5, 1, plan_forward(call.problem, {}).kernel, 8);
  EXPECT_EQ(plain.params.sequences.wave, 0);
  Variants variants;
  variants.mask = "q > kv";
  call.problem.variants = &variants;
  const KernelSpec spec = plan_forward(call.problem, {}).kernel;
  ASSERT_EQ(spec.family(), Family::sm90);
  const ForwardLaunch launch = forward_launch(call.problem, call.tensors, 0.5, 1, spec, 8);
  EXPECT_GT(launch.tiles, 8);
  EXPECT_EQ(launch.params.sequences.wave, 8);
  EXPECT_EQ(launch.grid, 8 * waves((launch.tiles + 7) / 8));
  EXPECT_EQ(forward_launch(call.problem, call.tensors, 0.5, 1, spec, 1000).grid, launch.tiles);
}

/// What a draw of 16 bits has to be less than to drop its element.
std::uint32_t threshold_of(const kernel::DropoutParams& params) {
  std::uint32_t threshold = params.low_threshold >> 24;
  for (std::uint32_t i = 0; i < 8; ++i) {
    EXPECT_TRUE(params.threshold[i] == 0 || params.threshold[i] == ~std::uint32_t{0}) << params.threshold[i];
    threshold |= (params.threshold[i] & 1) << (8 + i);
  }
  return threshold;
}

TEST(ForwardLaunch, DropoutIsRoundedToStepsOfADraw) {
  EXPECT_EQ(dropout_params(0.5).inverse_keep, 2.f);
  EXPECT_EQ(threshold_of(dropout_params(0.1)), 6554U);
  EXPECT_FLOAT_EQ(dropout_params(0.1).keep, 58982.f / 65536);
  EXPECT_EQ(dropout_params(0.9999999).inverse_keep, 65536.f);  // never everything
  EXPECT_EQ(threshold_of(dropout_params(1e-9)), 0U);
  for (std::uint32_t dropped = 0; dropped < 65536; ++dropped) {
    const kernel::DropoutParams params = dropout_params(dropped / 65536.);
    ASSERT_EQ(threshold_of(params), dropped);
    ASSERT_EQ(params.low_threshold << 8, 0U);
  }
}

/// 85 rounds: 43, 21, 11, 5, 3, 1 and 1 in waves that halve what is left.
TEST(ForwardLaunch, WavesOfAPackedBatchHalveItsRounds) {
  EXPECT_EQ(waves(1), 1);
  EXPECT_EQ(waves(2), 2);
  EXPECT_EQ(waves(3), 2);
  EXPECT_EQ(waves(85), 7);
}

TEST(ForwardMaps, DescribeTheTensors) {
  const Call call = some_call();
  const KernelSpec spec = plan_forward(call.problem, {}).kernel;
  const Sm90ForwardMaps maps = sm90_forward_maps(call.tensors, spec);
  using Sizes = std::array<std::uint64_t, 5>;
  using Strides = std::array<std::uint64_t, 4>;
  using Box = std::array<std::uint32_t, 5>;
  EXPECT_EQ(maps.q.rank, 5);
  EXPECT_EQ(maps.q.sizes, (Sizes{128, 4, 300, 2, 2}));
  EXPECT_EQ(maps.q.strides, (Strides{256, 2048, 1024, 614400}));
  EXPECT_EQ(maps.q.box, (Box{64, 1, 128, 1, 1}));
  EXPECT_EQ(maps.k.rank, 4);
  EXPECT_EQ(maps.k.sizes, (Sizes{128, 500, 2, 2, 0}));
  EXPECT_EQ(maps.k.strides, (Strides{512, 256, 256000, 0}));
  EXPECT_EQ(maps.k.box, (Box{64, static_cast<std::uint32_t>(spec.tile_n), 1, 1, 0}));
  EXPECT_EQ(maps.v.sizes, (Sizes{64, 500, 2, 2, 0}));
  EXPECT_EQ(maps.v.strides, (Strides{256, 128, 128000, 0}));
  EXPECT_EQ(maps.o.sizes, (Sizes{64, 4, 300, 2, 2}));
  EXPECT_EQ(maps.o.strides, (Strides{128, 1024, 512, 307200}));
  EXPECT_EQ(maps.o.box, (Box{64, 1, 16, 1, 1}));
  KernelSpec packed = spec;
  packed.pack_gqa = true;
  EXPECT_EQ(sm90_forward_maps(call.tensors, packed).q.box, (Box{64, 4, 32, 1, 1}));
}

// The row of a sequence, and what lies behind its end.
TEST(ForwardMaps, OfAPackedBatchEndWithEverySequence) {
  Call call = some_call();
  call.problem.varlen = true;
  call.problem.total_q = 300;
  call.problem.total_kv = 500;
  for (TensorView* view : {&call.tensors.q, &call.tensors.k, &call.tensors.v, &call.tensors.o}) view->shape[0] = 1;
  const Sm90ForwardMaps maps = sm90_forward_maps(call.tensors, plan_forward(call.problem, {}).kernel);
  for (const TensorMapSpec& map : {maps.k, maps.v, maps.o}) {
    ASSERT_EQ(map.rank, 5);
    EXPECT_EQ(map.sizes[1], std::uint64_t{1} << 30);
    const auto address = [&](std::uint64_t first, std::uint64_t count, std::uint64_t row) {
      const std::uint64_t billion = std::uint64_t{1} << 30;
      EXPECT_LT(first + count, map.sizes[3]);
      EXPECT_LT(billion, map.sizes[4]);
      return (billion - count + row) * map.strides[0] + (first + count) * map.strides[2] + billion * map.strides[3];
    };
    EXPECT_EQ(address(0, 1, 0), 0U);
    EXPECT_EQ(address(17, 200, 3), 20 * map.strides[0]);
    EXPECT_EQ(address(0, 300, 299), 299 * map.strides[0]);
    for (const std::uint64_t stride : map.strides) EXPECT_TRUE(stride % 16 == 0 && stride < std::uint64_t{1} << 40);
  }
  EXPECT_TRUE(sm90_forward_describable(call.tensors, true));
  call.tensors.v.strides[2] = std::int64_t{1} << 34;  // 2^35 bytes
  EXPECT_TRUE(sm90_forward_describable(call.tensors));
  EXPECT_FALSE(sm90_forward_describable(call.tensors, true));
}

// What is not walked along may have any stride.
TEST(ForwardMaps, GiveAxesOfOneALegalStride) {
  Call call = some_call();
  for (TensorView* view : {&call.tensors.q, &call.tensors.k, &call.tensors.v, &call.tensors.o}) {
    view->shape[0] = 1;
    view->strides[0] = -7;
  }
  EXPECT_TRUE(sm90_forward_describable(call.tensors));
  const Sm90ForwardMaps maps = sm90_forward_maps(call.tensors, plan_forward(call.problem, {}).kernel);
  EXPECT_EQ(maps.q.strides[3], 16U);
  EXPECT_EQ(maps.k.strides[2], 16U);
}

TEST(ForwardMaps, AreRefusedStridesThatTheyCannotHold) {
  EXPECT_TRUE(sm90_forward_describable(some_call().tensors));
  const std::int64_t limit = std::int64_t{1} << 39;  // elements of two bytes
  for (const std::int64_t stride : {std::int64_t{0}, std::int64_t{-1024}, limit}) {
    for (std::size_t axis = 0; axis < 3; ++axis) {
      Call call = some_call();
      call.tensors.v.strides[axis] = stride;
      EXPECT_FALSE(sm90_forward_describable(call.tensors)) << stride << " of axis " << axis;
      call.tensors.v.strides[axis] = limit - 8;
      EXPECT_TRUE(sm90_forward_describable(call.tensors));
    }
  }
  Call call = some_call();
  call.tensors.q.strides[1] = limit / 4;  // from one KV head's query heads to the next's
  EXPECT_FALSE(sm90_forward_describable(call.tensors));
}

}  // namespace
}  // namespace fa::plan
