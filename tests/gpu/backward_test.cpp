#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <random>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "driver/driver.hpp"
#include "gpu/backward_case.hpp"
#include "plan/arch.hpp"

namespace fa::test {
namespace {

class BackwardShapes : public GpuTest, public ::testing::WithParamInterface<AttentionCase> {};

TEST_P(BackwardShapes, MatchesFloat64) {
  AttentionConfig config = config_of(GetParam());
  run_backward_case(GetParam(), config);
  config.deterministic = true;
  run_backward_case(GetParam(), config, true);
}

std::vector<AttentionCase> head_dims() {
  std::vector<AttentionCase> cases;
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
    for (std::int64_t d = 8; d <= 256; d += 8) {
      cases.push_back({.b = 2,
                       .h_q = 2,
                       .h_kv = 1,
                       .s_q = 200,
                       .s_kv = 300,
                       .d_qk = d,
                       .d_v = d,
                       .dtype = dtype,
                       .causal = d % 16 == 0});
    }
    for (const std::int64_t d : {264, 320, 384}) {
      if (dtype == DType::f32) continue;
      cases.push_back({.b = 2,
                       .h_q = 4,
                       .h_kv = 2,
                       .s_q = 201,
                       .s_kv = 333,
                       .d_qk = d,
                       .d_v = d,
                       .dtype = dtype,
                       .causal = d % 128 == 0});
    }
    const std::pair<std::int64_t, std::int64_t> unequal[] = {{192, 128}, {8, 256}, {256, 8}, {72, 40}, {64, 200}};
    for (const auto& [d_qk, d_v] : unequal) {
      cases.push_back(
          {.h_q = 4, .h_kv = 2, .s_q = 130, .s_kv = 257, .d_qk = d_qk, .d_v = d_v, .dtype = dtype, .causal = true});
    }
  }
  return cases;
}
INSTANTIATE_TEST_SUITE_P(HeadDims, BackwardShapes, ::testing::ValuesIn(head_dims()),
                         [](const auto& test) { return to_string(test.param); });

std::vector<AttentionCase> lengths() {
  std::vector<AttentionCase> cases;
  const std::pair<std::int64_t, std::int64_t> sizes[] = {{1, 1},   {1, 2049},   {63, 500},   {500, 63},
                                                         {64, 64}, {65, 129},   {2049, 1},   {300, 0},
                                                         {0, 300}, {129, 2049}, {1000, 1000}};
  for (const auto& [s_q, s_kv] : sizes) {
    for (const CausalAlign align : {CausalAlign::bottom_right, CausalAlign::top_left}) {
      for (const bool causal : {false, true}) {
        if (!causal && align == CausalAlign::top_left) continue;
        for (const std::int64_t h_kv : {1, 6}) {
          cases.push_back({.b = 2,
                           .h_q = 6,
                           .h_kv = h_kv,
                           .s_q = s_q,
                           .s_kv = s_kv,
                           .d_qk = h_kv == 1 ? 64 : 128,
                           .d_v = h_kv == 1 ? 64 : 128,
                           .dtype = h_kv == 1 ? DType::bf16 : DType::f16,
                           .causal = causal,
                           .causal_align = align,
                           .layout = h_kv == 1 ? Layout::bshd : Layout::bhsd});
        }
      }
    }
  }
  return cases;
}
INSTANTIATE_TEST_SUITE_P(Lengths, BackwardShapes, ::testing::ValuesIn(lengths()),
                         [](const auto& test) { return to_string(test.param); });

using Backward = GpuTest;

// Gradients that are not wanted.

constexpr Gradients kSome[] = {{true, false, false}, {false, true, true}, {false, true, false},
                               {false, false, true}, {true, true, false}, {true, false, true}};

class UnwantedGradients : public GpuTest, public ::testing::WithParamInterface<AttentionCase> {};

/// In memory of exactly the size that the shape asks for.
void run_some_gradients(const AttentionCase& c, const AttentionConfig& config) {
  DeviceBackwardCase device(c, true);
  const Attention attention = Attention::create(config);
  for (const Gradients& wanted : kSome) {
    SCOPED_TRACE(fmt::format("{} {}{}{}", to_string(c), wanted.dq, wanted.dk, wanted.dv));
    device.wanted = wanted;
    device.forget();
    AttentionShape shape = shape_of(c);
    shape.gradients = wanted;
    const std::size_t bytes = attention.backward_workspace_size(shape);
    EXPECT_LE(bytes, attention.backward_workspace_size(shape_of(c)));
    attention.prepare_backward(shape);
    const DeviceBuffer memory(bytes);
    attention.backward(device.inputs(), device.outputs(), nullptr, {memory.data(), bytes});
    expect_correct(device);
  }
}

TEST_P(UnwantedGradients, AreLeftOut) {
  AttentionConfig config = config_of(GetParam());
  run_some_gradients(GetParam(), config);
  config.deterministic = true;
  run_some_gradients(GetParam(), config);
}

std::vector<AttentionCase> cases_of_some_gradients() {
  std::vector<AttentionCase> cases;
  for (const std::int64_t d : {40, 64, 96, 128, 192, 256, 320}) {
    for (const bool causal : {false, true}) {
      cases.push_back({.b = 2, .h_q = 4, .h_kv = 2, .s_q = 300, .s_kv = 457, .d_qk = d, .d_v = d, .causal = causal});
      cases.push_back(
          {.h_q = 4, .h_kv = 1, .s_q = 2000, .s_kv = 130, .d_qk = d, .d_v = d, .dtype = DType::f16, .causal = causal});
    }
  }
  cases.push_back({.b = 2, .h_q = 8, .h_kv = 8, .s_q = 2048, .s_kv = 2048, .d_qk = 128, .d_v = 128, .causal = true});
  cases.push_back({.h_q = 2, .h_kv = 1, .s_q = 130, .s_kv = 257, .d_qk = 72, .d_v = 40, .dtype = DType::f32});
  cases.push_back({.h_q = 2, .h_kv = 1, .s_q = 500, .s_kv = 63, .causal = true});
  cases.push_back({.h_q = 2, .h_kv = 1, .s_q = 0, .s_kv = 63});
  cases.push_back({.h_q = 2, .h_kv = 1, .s_q = 63, .s_kv = 0});
  return cases;
}
INSTANTIATE_TEST_SUITE_P(All, UnwantedGradients, ::testing::ValuesIn(cases_of_some_gradients()),
                         [](const auto& test) { return to_string(test.param); });

/// No check of theirs fails, and what they compute is right.
TEST_F(Backward, DebugKernels) {
  for (const std::int64_t d : {64, 128, 256, 320}) {
    const AttentionCase c{.b = 2, .h_q = 4, .h_kv = 2, .s_q = 333, .s_kv = 500, .d_qk = d, .d_v = d, .causal = true};
    AttentionConfig config = config_of(c);
    config.debug = true;
    for (const char* const kernel : {"", "sm80"}) {
      config.kernel = config.kernel_backward = KernelOverride{kernel, ""};
      for (const bool deterministic : {false, true}) {
        config.deterministic = deterministic;
        DeviceBackwardCase device(c);
        const Attention attention = Attention::create(config);
        attention.forward(device.forward.inputs(), device.forward.outputs());
        attention.backward(device.inputs(), device.outputs());
        expect_correct(device);
      }
    }
  }
}

TEST_F(Backward, UnwantedGradientsOfTheOtherFamily) {
  for (const std::int64_t d : {64, 128, 256}) {
    const AttentionCase c{.b = 2, .h_q = 4, .h_kv = 2, .s_q = 333, .s_kv = 500, .d_qk = d, .d_v = d, .causal = true};
    AttentionConfig config = config_of(c);
    for (const char* const text : {"", "splits=3"}) {
      config.kernel_backward = KernelOverride{"sm80", text};
      run_some_gradients(c, config);
    }
  }
}

TEST_F(Backward, ScaleMayBeZeroNegativeOrLarge) {
  for (const float scale : {0.f, -0.25f, 2.f, 1e-20f}) {
    for (const DType dtype : {DType::bf16, DType::f32}) {
      const AttentionCase c{
          .h_q = 2, .h_kv = 2, .s_q = 100, .s_kv = 200, .dtype = dtype, .causal = true, .scale = scale};
      run_backward_case(c, config_of(c));
    }
  }
}

TEST_F(Backward, KernelOverrides) {
  const AttentionCase c{.b = 2, .h_q = 4, .h_kv = 2, .s_q = 333, .s_kv = 777, .d_qk = 64, .d_v = 64, .causal = true};
  for (const KernelOverride& kernel :
       {KernelOverride{"", "tile_m=64 tile_n=64 warps=4 stages=2"}, KernelOverride{"", "tile_m=32 stages=1"},
        KernelOverride{"", "tile_n=32 warps=2 stages=1"}, KernelOverride{"", "splits=3"}}) {
    AttentionConfig config = config_of(c);
    config.kernel_backward = kernel;
    run_backward_case(c, config);
  }
}

/// Strides that are not multiples of 16 bytes, pointers that are not, and zero strides.
TEST_F(Backward, UnalignedRowsAndBroadcasts) {
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
    const AttentionCase c{
        .b = 2, .h_q = 2, .h_kv = 2, .s_q = 70, .s_kv = 90, .d_qk = 40, .d_v = 24, .dtype = dtype, .causal = true};
    DeviceBackwardCase device(c);
    const std::size_t element = size_of(dtype);
    // q again, in rows that start one element late.
    const std::vector<std::byte>& q_bytes = device.forward.host_inputs.q.bytes();
    const std::size_t row = static_cast<std::size_t>(c.d_qk) * element;
    std::vector<std::byte> shifted((q_bytes.size() / row) * (row + element) + element);
    for (std::size_t i = 0; i < q_bytes.size() / row; ++i) {
      std::copy_n(q_bytes.begin() + static_cast<std::ptrdiff_t>(i * row), row,
                  shifted.begin() + static_cast<std::ptrdiff_t>(i * (row + element) + element));
    }
    const DeviceBuffer q_memory(shifted);
    BackwardInputs inputs = device.inputs();
    inputs.q.data = static_cast<std::byte*>(q_memory.data()) + element;
    for (std::size_t axis = 0; axis < 3; ++axis) {
      inputs.q.strides[axis] = inputs.q.strides[axis] / c.d_qk * (c.d_qk + 1);
    }
    Attention::create(config_of(c)).backward(inputs, device.outputs());
    expect_correct(device);

    // One gradient for all heads, batches and rows.
    HostTensor& dout = device.host_dout;
    for (std::int64_t b = 0; b < c.b; ++b) {
      for (std::int64_t h = 0; h < c.h_q; ++h) {
        for (std::int64_t s = 0; s < c.s_q; ++s) {
          for (std::int64_t d = 0; d < c.d_v; ++d) dout.set(b, h, s, d, dout.at(0, 0, 0, d));
        }
      }
    }
    device.dout.buffer.write(dout.bytes());
    inputs = device.inputs();
    for (std::size_t axis = 0; axis < 3; ++axis) inputs.dout.strides[axis] = 0;
    device.forget();
    Attention::create(config_of(c)).backward(inputs, device.outputs());
    expect_correct(device);
  }
}

TEST_F(Backward, RandomProblems) {
  std::mt19937_64 random(21);
  for (int i = 0; i < 40; ++i) {
    const AttentionCase c = random_case(random);
    AttentionConfig config = config_of(c);
    config.deterministic = random() % 2 == 1;
    run_backward_case(c, config, random() % 2 == 1);
    if (HasFailure()) break;
  }
}

/// Random problems for kernels of several blocks a tile: heads, lengths, masks and memory orders, one after the other
/// of `dims`, with the override that `kernel` gives to each. Deterministic ones too.
template <class Kernel>
void run_for_clusters(std::uint64_t seed, int count, std::span<const std::array<std::int64_t, 2>> dims,
                      std::int64_t most_heads, std::int64_t longest, const Kernel& kernel) {
  std::mt19937_64 random(seed);
  const auto pick = [&](std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(high - low + 1));
  };
  for (int i = 0; i < count && !::testing::Test::HasFailure(); ++i) {
    AttentionCase c;
    c.b = pick(1, 3);
    c.h_kv = pick(1, 3);
    c.h_q = c.h_kv * pick(1, most_heads);
    c.s_q = i % 4 == 0 ? pick(1, 64) : pick(1, longest);
    c.s_kv = i % 4 == 1 ? pick(1, 128) : pick(1, longest + 200);
    c.d_qk = dims[static_cast<std::size_t>(i) % dims.size()][0];
    c.d_v = dims[static_cast<std::size_t>(i) % dims.size()][1];
    c.dtype = pick(0, 1) == 1 ? DType::bf16 : DType::f16;
    c.causal = pick(0, 1) == 1;
    c.causal_align = static_cast<CausalAlign>(pick(0, 1));
    c.layout = static_cast<Layout>(pick(0, 1));
    c.seed = random();
    AttentionConfig config = config_of(c);
    config.deterministic = pick(0, 2) == 0;
    config.kernel_backward = KernelOverride{"sm90", kernel(i)};
    run_backward_case(c, config, pick(0, 1) == 1);
  }
}

/// The kernel of two blocks a tile, which the planner leaves aside unless it is asked for.
TEST_F(Backward, PairsOfBlocks) {
  if (driver::device_info(0).arch != plan::parse_arch("sm_90a")) GTEST_SKIP() << "GPU 0 is no Hopper";
  constexpr std::array<std::int64_t, 2> kDims[] = {{256, 256}, {192, 128}, {136, 72}, {80, 256}, {160, 200}};
  run_for_clusters(22, 40, kDims, 4, 1500, [](int i) { return std::string(i % 7 == 0 ? "splits=3" : ""); });
}

/// The kernel of four.
TEST_F(Backward, FourBlocks) {
  if (driver::device_info(0).arch != plan::parse_arch("sm_90a")) GTEST_SKIP() << "GPU 0 is no Hopper";
  constexpr std::array<std::int64_t, 2> kDims[] = {{512, 512}, {320, 320}, {264, 264}, {448, 448}, {392, 392}};
  run_for_clusters(23, 20, kDims, 2, 600, [](int i) { return std::string(i % 7 == 0 ? "splits=3" : ""); });
}

/// Clusters whose blocks share the query tiles of a key tile: every size with all head dims, also where some get none.
TEST_F(Backward, ClustersOfBlocks) {
  if (driver::device_info(0).arch != plan::parse_arch("sm_90a")) GTEST_SKIP() << "GPU 0 is no Hopper";
  constexpr std::array<std::int64_t, 2> kDims[] = {{128, 128}, {64, 64}, {96, 128}, {40, 24},
                                                   {128, 72},  {8, 80},  {72, 8}};
  run_for_clusters(33, 64, kDims, 9, 900, [](int i) { return fmt::format("split_blocks={}", 2 + (i + i / 7) % 7); });
}

/// Blocks that have query heads of their own and add to dK and dV in turns, as many as query heads.
TEST_F(Backward, Turns) {
  if (driver::device_info(0).arch != plan::parse_arch("sm_90a")) GTEST_SKIP() << "GPU 0 is no Hopper";
  constexpr std::array<std::int64_t, 2> kDims[] = {{128, 128}, {64, 64}, {96, 128}, {40, 24}, {72, 8}};
  run_for_clusters(44, 48, kDims, 9, 900, [](int) { return std::string("in_turns=1"); });
}

/// dK and dV that several blocks add up are the same bits each time.
class RepeatableSums : public Backward, public testing::WithParamInterface<const char*> {};

TEST_P(RepeatableSums, OfBlocksThatShareAKeyTile) {
  if (driver::device_info(0).arch != plan::parse_arch("sm_90a")) GTEST_SKIP() << "GPU 0 is no Hopper";
  const AttentionCase c{.b = 2, .h_q = 12, .h_kv = 2, .s_q = 700, .s_kv = 900, .d_qk = 128, .d_v = 128, .causal = true};
  AttentionConfig config = config_of(c);
  config.kernel_backward = KernelOverride{"sm90", GetParam()};
  const Attention attention = Attention::create(config);
  DeviceBackwardCase device(c);
  std::vector<std::byte> dk, dv;
  for (int round = 0; round < 10; ++round) {
    device.forget();
    attention.backward(device.inputs(), device.outputs());
    driver::check(driver::api().cuCtxSynchronize(), "cuCtxSynchronize");
    if (round == 0) {
      dk = device.dk.buffer.read();
      dv = device.dv.buffer.read();
      expect_correct(device);
    } else {
      EXPECT_EQ(device.dk.buffer.read(), dk);
      EXPECT_EQ(device.dv.buffer.read(), dv);
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Kernels, RepeatableSums, testing::Values("split_blocks=4", "in_turns=1"));

// What masks hide may be NaN or infinite.

using HiddenParameter = std::tuple<const char*, DType, std::int64_t, double>;
class HiddenFromBackward : public GpuTest, public ::testing::WithParamInterface<HiddenParameter> {
 protected:
  AttentionCase case_of(std::int64_t s_q, std::int64_t s_kv, CausalAlign align) const {
    const auto [family, dtype, d, value] = GetParam();
    return {.b = 2,
            .h_q = 4,
            .h_kv = 2,
            .s_q = s_q,
            .s_kv = s_kv,
            .d_qk = d,
            .d_v = d,
            .dtype = dtype,
            .causal = true,
            .causal_align = align};
  }
  AttentionConfig config(const AttentionCase& c, bool deterministic) const {
    AttentionConfig config = config_of(c);
    config.deterministic = deterministic;
    config.kernel_backward = KernelOverride{std::get<0>(GetParam())};
    return config;
  }
  /// In a row of every head, on both sides.
  void spoil(HostTensor& host, DeviceTensor& device, std::int64_t row) const {
    fill(host, {row, 1}, std::get<double>(GetParam()));
    device.buffer.write(host.bytes());
  }
};

TEST_P(HiddenFromBackward, RowsWithoutKeysReachNoGradient) {
  for (const bool deterministic : {false, true}) {
    const AttentionCase c = case_of(70, 64, CausalAlign::bottom_right);
    DeviceBackwardCase device(c);
    for (const std::int64_t row : {0, 5}) {
      spoil(device.forward.host_inputs.q, device.forward.q, row);
      spoil(device.host_dout, device.dout, row);
    }
    Attention::create(config(c, deterministic)).backward(device.inputs(), device.outputs());
    expect_correct(device);
  }
}

TEST_P(HiddenFromBackward, KeysThatNoRowKeepsReachNoGradient) {
  for (const bool deterministic : {false, true}) {
    const AttentionCase c = case_of(70, 300, CausalAlign::top_left);
    DeviceBackwardCase device(c);
    for (const std::int64_t key : {70, 127, 128, 299}) spoil(device.forward.host_inputs.k, device.forward.k, key);
    Attention::create(config(c, deterministic)).backward(device.inputs(), device.outputs());
    expect_correct(device);
  }
}

TEST_P(HiddenFromBackward, AKeyReachesTheRowsThatKeepIt) {
  for (const bool deterministic : {false, true}) {
    constexpr std::int64_t kLast = 199;  // which alone keeps the last key
    const AttentionCase c = case_of(kLast + 1, 300, CausalAlign::bottom_right);
    DeviceBackwardCase device(c);
    const Attention attention = Attention::create(config(c, deterministic));
    attention.backward(device.inputs(), device.outputs());
    expect_correct(device);
    const HostTensor clean = device.host_gradients.dq;
    HostTensor zero = clean;
    fill(zero, {0, c.s_q}, 0);
    const double allowed = std::ldexp(compare(clean.view(), std::as_const(zero).view()).max_abs,
                                      c.dtype == DType::bf16 ? -7 : -10);  // what two roundings differ by at most
    spoil(device.forward.host_inputs.k, device.forward.k, 299);
    AttentionConfig forward = config_of(c);
    forward.kernel = KernelOverride{std::get<0>(GetParam())};
    Attention::create(forward).forward(device.forward.inputs(), device.forward.outputs());
    device.forget();
    attention.backward(device.inputs(), device.outputs());
    driver::check(driver::api().cuCtxSynchronize(), "cuCtxSynchronize");
    device.forward.o.read(device.forward.host_outputs.o);
    device.forward.lse.read(device.forward.host_outputs.lse);
    device.dq.read(device.host_gradients.dq);
    for (std::int64_t row = 0; row < kLast; ++row) {
      EXPECT_TRUE(std::isfinite(device.forward.host_outputs.o.at(0, 0, row, 0))) << row;
      EXPECT_TRUE(std::isfinite(device.forward.host_outputs.lse.at(0, 0, row))) << row;
      for (std::int64_t d = 0; d < c.d_qk; ++d) {
        ASSERT_NEAR(device.host_gradients.dq.at(1, 3, row, d), clean.at(1, 3, row, d), allowed) << row;
      }
    }
    if (std::isnan(std::get<double>(GetParam()))) {
      EXPECT_TRUE(std::isnan(device.host_gradients.dq.at(0, 0, kLast, 0)));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Values, HiddenFromBackward,
                         ::testing::Combine(::testing::Values("", "sm80"), ::testing::Values(DType::f16, DType::bf16),
                                            ::testing::Values(64, 128, 256, 320),
                                            ::testing::Values(std::nan(""), HUGE_VAL, -HUGE_VAL)));

/// The last of many batches, past element 2^31 of every tensor and of the accumulator: every batch is a copy.
TEST_F(Backward, FarEndOfManyBatches) {
  const AttentionCase block{.s_q = 64, .s_kv = 64, .d_qk = 128, .d_v = 128, .causal = true};
  const std::int64_t b = (std::int64_t{1} << 31) / (64 * 128) + 3;
  DeviceBackwardCase small(block);
  const std::size_t block_bytes = small.host_dout.bytes().size();
  const auto tiled = [&](const std::vector<std::byte>& bytes) {
    DeviceBuffer buffer(static_cast<std::size_t>(b) * bytes.size());
    const auto base = reinterpret_cast<CUdeviceptr>(buffer.data());
    driver::check(driver::api().cuMemcpyHtoD(base, bytes.data(), bytes.size()), "cuMemcpyHtoD");
    for (std::size_t filled = bytes.size(); filled < buffer.size();) {
      const std::size_t step = std::min(filled, buffer.size() - filled);
      driver::check(driver::api().cuMemcpyDtoD(base + filled, base, step), "cuMemcpyDtoD");
      filled += step;
    }
    return buffer;
  };
  const DeviceBuffer q = tiled(small.forward.host_inputs.q.bytes()), k = tiled(small.forward.host_inputs.k.bytes()),
                     v = tiled(small.forward.host_inputs.v.bytes()), o = tiled(small.forward.o.buffer.read()),
                     dout = tiled(small.host_dout.bytes()), lse = tiled(small.forward.lse.buffer.read());
  const DeviceBuffer dq(q.size()), dk(k.size()), dv(v.size());
  const auto view = [&](const DeviceBuffer& buffer) { return TensorView(buffer.data(), DType::bf16, {b, 1, 64, 128}); };
  Attention::create(config_of(block))
      .backward({view(q), view(k), view(v), view(o), TensorView(lse.data(), DType::f32, {b, 1, 64}), view(dout)},
                {view(dq), view(dk), view(dv)});
  driver::check(driver::api().cuCtxSynchronize(), "cuCtxSynchronize");
  const auto last = [&](const DeviceBuffer& from, const DeviceTensor& to) {
    driver::check(
        driver::api().cuMemcpyDtoD(reinterpret_cast<CUdeviceptr>(to.buffer.data()),
                                   reinterpret_cast<CUdeviceptr>(from.data()) + from.size() - block_bytes, block_bytes),
        "cuMemcpyDtoD");
  };
  last(dq, small.dq);
  last(dk, small.dk);
  last(dv, small.dv);
  expect_correct(small);
  EXPECT_TRUE(dq.guards_intact() && dk.guards_intact() && dv.guards_intact());
}

}  // namespace
}  // namespace fa::test
