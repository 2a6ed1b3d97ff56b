#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "gpu/device_case.hpp"
#include "plan/arch.hpp"

namespace fa::test {
namespace {

class ForwardShapes : public GpuTest, public ::testing::WithParamInterface<AttentionCase> {};

TEST_P(ForwardShapes, MatchesFloat64) {
  run_case(GetParam(), config_of(GetParam()));
}

/// What the planner takes on newer GPUs is another family.
TEST_P(ForwardShapes, Sm80MatchesFloat64) {
  if (GetParam().dtype == DType::f32) return;  // has no other
  AttentionConfig config = config_of(GetParam());
  config.kernel = KernelOverride{"sm80"};
  run_case(GetParam(), config);
}

/// b 32, h 8, d 128: the shapes that every attention library is first tried on.
std::vector<AttentionCase> classic_shapes() {
  std::vector<AttentionCase> cases;
  for (const bool causal : {false, true}) {
    for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
      const auto add = [&](std::int64_t b, std::int64_t s_q, std::int64_t s_kv) {
        cases.push_back({.b = b,
                         .h_q = 8,
                         .h_kv = 8,
                         .s_q = s_q,
                         .s_kv = s_kv,
                         .d_qk = 128,
                         .d_v = 128,
                         .dtype = dtype,
                         .causal = causal});
      };
      add(32, 128, 128);
      add(32, 500, 500);
      add(8, 1024, 1024);
      add(2, 1024, 4096);
    }
  }
  return cases;
}
INSTANTIATE_TEST_SUITE_P(Classic, ForwardShapes, ::testing::ValuesIn(classic_shapes()),
                         [](const auto& test) { return to_string(test.param); });

/// Enough rows for tall query tiles on a Hopper GPU, of which the last or the first is nearly empty.
std::vector<AttentionCase> tall_shapes() {
  std::vector<AttentionCase> cases;
  for (const int d : {64, 72, 96, 128, 160}) {
    const AttentionCase c{.b = 3, .h_q = 15, .h_kv = 5, .d_qk = d, .d_v = d, .dtype = DType::bf16};
    cases.push_back(c);
    cases.back().s_q = cases.back().s_kv = 780;
    cases.push_back(c);
    cases.back().s_q = 453;
    cases.back().s_kv = 470;
    cases.back().causal = true;
  }
  return cases;
}
INSTANTIATE_TEST_SUITE_P(Tall, ForwardShapes, ::testing::ValuesIn(tall_shapes()),
                         [](const auto& test) { return to_string(test.param); });

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
    const std::pair<std::int64_t, std::int64_t> unequal[] = {{192, 128}, {8, 256},   {256, 8},   {72, 40},
                                                             {64, 200},  {576, 512}, {512, 512}, {264, 264},
                                                             {320, 8},   {8, 512},   {392, 328}};
    for (const auto& [d_qk, d_v] : unequal) {
      cases.push_back(
          {.h_q = 4, .h_kv = 2, .s_q = 130, .s_kv = 257, .d_qk = d_qk, .d_v = d_v, .dtype = dtype, .causal = true});
    }
  }
  return cases;
}
INSTANTIATE_TEST_SUITE_P(HeadDims, ForwardShapes, ::testing::ValuesIn(head_dims()),
                         [](const auto& test) { return to_string(test.param); });

std::vector<AttentionCase> lengths() {
  std::vector<AttentionCase> cases;
  const std::pair<std::int64_t, std::int64_t> sizes[] = {{1, 1},    {1, 4097}, {63, 500}, {500, 63},  {64, 64},
                                                         {65, 129}, {4097, 1}, {300, 0},  {129, 4097}};
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
                           .d_qk = 64,
                           .d_v = 64,
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
INSTANTIATE_TEST_SUITE_P(Lengths, ForwardShapes, ::testing::ValuesIn(lengths()),
                         [](const auto& test) { return to_string(test.param); });

using Forward = GpuTest;

TEST_F(Forward, ScaleMayBeZeroNegativeOrLarge) {
  for (const float scale : {0.f, -0.25f, 2.f, 1e-20f}) {
    for (const DType dtype : {DType::bf16, DType::f32}) {
      const AttentionCase c{
          .h_q = 2, .h_kv = 2, .s_q = 100, .s_kv = 200, .dtype = dtype, .causal = true, .scale = scale};
      run_case(c, config_of(c));
    }
  }
}

TEST_F(Forward, MakesScoresAgainWhereExponentialsOverflow) {
  constexpr float kDeviation = 50.f;  // of the first keys' scores
  for (const std::int64_t d : {64, 72, 96, 128, 160, 256}) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      for (const bool causal : {false, true}) {
        AttentionCase c{.h_q = 6, .h_kv = 3, .s_q = 1700, .s_kv = 1800, .d_qk = d, .d_v = d, .dtype = dtype};
        c.causal = causal;
        c.scale = kDeviation / std::sqrt(static_cast<float>(d));
        c.early_keys = true;
        SCOPED_TRACE(to_string(c));
        run_case(c, config_of(c));
      }
    }
  }
}

bool on_hopper() {
  return driver::device_info(0).arch == plan::parse_arch("sm_90a");
}

class Overrides : public GpuTest, public ::testing::WithParamInterface<KernelOverride> {};

TEST_P(Overrides, MatchFloat64) {
  if (GetParam().kernel == "sm90" && !on_hopper()) GTEST_SKIP() << "GPU 0 is no Hopper";
  const AttentionCase c{.b = 2, .h_q = 4, .h_kv = 2, .s_q = 333, .s_kv = 777, .d_qk = 64, .d_v = 64, .causal = true};
  AttentionConfig config = config_of(c);
  config.kernel = GetParam();
  run_case(c, config);
}

/// Every field of a kernel override, alone and together.
std::vector<KernelOverride> overrides() {
  std::vector<KernelOverride> overrides;
  const auto add = [&](std::string text) { overrides.push_back({"", std::move(text)}); };
  for (const int stages : {1, 2, 3}) {
    for (const int bodies : {1, 2}) {
      for (const int q_in_registers : {0, 1}) {
        add(fmt::format("tile_m=64 tile_n=32 warps=4 stages={} q_in_registers={} loop_bodies={}", stages,
                        q_in_registers, bodies));
      }
    }
  }
  add("tile_m=128 tile_n=64 warps=4");
  add("tile_m=128 tile_n=128 warps=8");
  for (const int stages : {1, 2}) {
    add(fmt::format("tile_m=64 tile_n=64 warps=4 stages={} warps_n=2", stages));
    add(fmt::format("tile_m=128 tile_n=32 warps=8 stages={} loop_bodies=2 warps_n=2", stages));
    add(fmt::format("tile_m=64 warps=4 stages={} pack_gqa=1 splits=3 warps_n=2", stages));
  }
  add("pack_gqa=1");
  add("splits=3");
  add("pack_gqa=1 splits=5");
  return overrides;
}

/// The first two fields and a number.
std::string name_of(const ::testing::TestParamInfo<KernelOverride>& test) {
  std::string name = test.param.text.substr(0, test.param.text.find(' ', test.param.text.find(' ') + 1));
  std::erase(name, '=');
  std::ranges::replace(name, ' ', '_');
  return name + "_" + std::to_string(test.index);
}
INSTANTIATE_TEST_SUITE_P(Any, Overrides, ::testing::ValuesIn(overrides()), name_of);

std::vector<KernelOverride> hopper_overrides() {
  std::vector<KernelOverride> overrides;
  const auto add = [&](int tile_m, int tile_n, const std::string& rest) {
    overrides.push_back({"sm90", fmt::format("tile_m={} tile_n={}{}", tile_m, tile_n, rest)});
  };
  for (const int tile_m : {64, 128, 192}) {
    for (const int tile_n : {16, 48, 112}) {
      for (const char* const rest : {"", " stages=3 q_buffers=1 take_turns=0", " pack_gqa=1", " splits=3"}) {
        add(tile_m, tile_n, rest);
      }
    }
  }
  for (const int tile_n : {16, 48, 64}) {
    for (const int take_turns : {0, 1}) {
      add(256, tile_n, fmt::format(" take_turns={}", take_turns));
      add(256, tile_n, fmt::format(" stages=3 q_buffers=1 take_turns={}", take_turns));
      add(256, tile_n, fmt::format(" pack_gqa=1 take_turns={}", take_turns));
    }
    add(256, tile_n, " splits=3");
  }
  for (const int tile_m : {64, 128, 192, 256}) {
    add(tile_m, 64, " exact_max=1");
    add(tile_m, 48, " q_buffers=1 take_turns=0 exact_max=1");
    add(tile_m, 32, " pack_gqa=1 exact_max=1");
    add(tile_m, 64, " splits=3 exact_max=1");
  }
  overrides.push_back({"sm90", "pack_gqa=1 splits=5"});
  return overrides;
}
INSTANTIATE_TEST_SUITE_P(Hopper, Overrides, ::testing::ValuesIn(hopper_overrides()), name_of);

/// Of blocks that have keys, and of more blocks than KV tiles.
TEST_F(Forward, ClustersMergeTheSplitsOfFewRows) {
  if (!on_hopper()) GTEST_SKIP() << "GPU 0 is no Hopper";
  for (const int blocks : {2, 4, 8, 16}) {
    for (const std::int64_t d : {40, 64, 128, 256}) {
      AttentionCase c{.b = 3, .h_q = 8, .h_kv = 2, .s_q = 3, .s_kv = 2345, .d_qk = d, .d_v = d, .causal = d != 64};
      if (blocks == 4) c.dtype = DType::f16;
      if (blocks == 16) c.b = 40;  // more clusters than run at once
      AttentionConfig config = config_of(c);
      config.kernel = KernelOverride{"sm90", fmt::format("splits=2 split_blocks={}", blocks)};
      const AttentionShape shape{.b = c.b, .h_q = c.h_q, .h_kv = c.h_kv, .s_q = c.s_q, .s_kv = c.s_kv};
      const std::string spec = Attention::create(config).kernel_info(shape).spec;
      EXPECT_NE(spec.find(fmt::format(" split_blocks={}", blocks)), std::string::npos) << spec;
      run_case(c, config);
      c.s_kv = 130;
      run_case(c, config);
      c.s_kv = 2;
      c.s_q = 5;  // rows without keys
      run_case(c, config);
    }
  }
}

TEST_F(Forward, HopperTakesItsFamilyWhereItCan) {
  if (!on_hopper()) GTEST_SKIP() << "GPU 0 is no Hopper";
  const AttentionShape shape{.b = 2, .h_q = 8, .s_q = 1000, .s_kv = 1000};
  AttentionShape unaligned = shape;
  unaligned.aligned = false;
  AttentionShape without_keys = shape;
  without_keys.s_kv = 0;
  const Attention attention = Attention::create({.head_dim = 64});
  EXPECT_EQ(attention.kernel_info(shape).name, "fa_sm90_forward");
  EXPECT_EQ(attention.kernel_info(unaligned).name, "fa_sm80_forward");
  EXPECT_EQ(attention.kernel_info(without_keys).name, "fa_sm80_forward");
  EXPECT_EQ(Attention::create({.head_dim = 64, .dtype = DType::f32}).kernel_info(shape).name, "fa_sm80_forward");
  const Attention sm80 = Attention::create({.head_dim = 64, .kernel = KernelOverride{"sm80"}});
  EXPECT_EQ(sm80.kernel_info(shape).name, "fa_sm80_forward");
}

TEST_F(Forward, RepeatsBitForBit) {
  const AttentionCase cases[] = {
      {.b = 3, .h_q = 12, .h_kv = 4, .s_q = 1500, .s_kv = 1500, .d_qk = 128, .d_v = 128, .causal = true},
      {.b = 2, .h_q = 8, .h_kv = 8, .s_q = 700, .s_kv = 900, .dtype = DType::f16},
      {.h_q = 8, .h_kv = 1, .s_q = 2, .s_kv = 20000}};  // split
  for (const AttentionCase& c : cases) {
    SCOPED_TRACE(to_string(c));
    DeviceCase device(c);
    const Attention attention = Attention::create(config_of(c));
    std::vector<std::byte> o, lse;
    for (int i = 0; i < 30; ++i) {
      attention.forward(device.inputs(), device.outputs());
      driver::check(driver::api().cuCtxSynchronize(), "cuCtxSynchronize");
      if (i == 0) o = device.o.buffer.read();
      if (i == 0) lse = device.lse.buffer.read();
      ASSERT_EQ(device.o.buffer.read(), o) << "run " << i;
      ASSERT_EQ(device.lse.buffer.read(), lse) << "run " << i;
    }
  }
}

/// Strides that are not multiples of 16 bytes, pointers that are not, and zero strides.
TEST_F(Forward, UnalignedRowsAndBroadcasts) {
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
    const AttentionCase c{
        .b = 2, .h_q = 2, .h_kv = 2, .s_q = 70, .s_kv = 90, .d_qk = 40, .d_v = 24, .dtype = dtype, .causal = true};
    DeviceCase device(c);
    // The same values, moved to rows that start one element late.
    const auto shifted = [&](const DeviceTensor& tensor, const HostTensor& host, std::int64_t d) {
      const std::size_t element = size_of(dtype);
      const std::size_t rows = host.bytes().size() / (static_cast<std::size_t>(d) * element);
      std::vector<std::byte> bytes((rows * static_cast<std::size_t>(d + 1) + 1) * element);
      for (std::size_t row = 0; row < rows; ++row) {
        std::copy_n(host.bytes().begin() + static_cast<std::ptrdiff_t>(row * static_cast<std::size_t>(d) * element),
                    static_cast<std::size_t>(d) * element,
                    bytes.begin() + static_cast<std::ptrdiff_t>((row * static_cast<std::size_t>(d + 1) + 1) * element));
      }
      TensorView view = tensor.const_view();
      for (std::size_t axis = 0; axis < 3; ++axis) view.strides[axis] = view.strides[axis] / d * (d + 1);
      return std::pair{DeviceBuffer(bytes), view};
    };
    auto [q_memory, q] = shifted(device.q, device.host_inputs.q, c.d_qk);
    auto [k_memory, k] = shifted(device.k, device.host_inputs.k, c.d_qk);
    auto [v_memory, v] = shifted(device.v, device.host_inputs.v, c.d_v);
    const std::size_t element = size_of(dtype);
    q.data = static_cast<std::byte*>(q_memory.data()) + element;
    k.data = static_cast<std::byte*>(k_memory.data()) + element;
    v.data = static_cast<std::byte*>(v_memory.data()) + element;
    const Attention attention = Attention::create(config_of(c));
    attention.forward({.q = q, .k = k, .v = v}, device.outputs());
    expect_correct(device);
  }
}

TEST_F(Forward, OneHeadTensorsAndNoLse) {
  const AttentionCase c{.b = 3, .s_q = 100, .s_kv = 100};
  DeviceCase device(c);
  const auto drop_heads = [](TensorView view) {
    for (std::size_t axis = 1; axis + 1 < static_cast<std::size_t>(view.rank); ++axis) {
      view.shape[axis] = view.shape[axis + 1];
      view.strides[axis] = view.strides[axis + 1];
    }
    --view.rank;
    view.shape[static_cast<std::size_t>(view.rank)] = 0;
    return view;
  };
  const Attention attention = Attention::create(config_of(c));
  attention.forward({drop_heads(device.q.view()), drop_heads(device.k.view()), drop_heads(device.v.view())},
                    {drop_heads(device.o.view()), drop_heads(device.lse.view())});
  expect_correct(device);
  attention.forward(device.inputs(), {.o = device.o.view()});
  expect_correct(device);
}

TEST_F(Forward, NanReachesTheOutputAndMaskedKeysDoNot) {
  const AttentionCase c{.s_q = 96, .s_kv = 96, .causal = true};
  DeviceCase device(c);
  device.host_inputs.k.set(0, 0, 95, 3, std::numeric_limits<double>::quiet_NaN());  // seen by the last row only
  device.k.buffer.write(device.host_inputs.k.bytes());
  const Attention attention = Attention::create(config_of(c));
  attention.forward(device.inputs(), device.outputs());
  driver::check(driver::api().cuCtxSynchronize(), "cuCtxSynchronize");
  device.o.read(device.host_outputs.o);
  device.lse.read(device.host_outputs.lse);
  for (std::int64_t row = 0; row < c.s_q; ++row) {
    EXPECT_EQ(std::isnan(device.host_outputs.o.at(0, 0, row, 0)), row == 95) << row;
    EXPECT_EQ(std::isnan(device.host_outputs.lse.at(0, 0, row)), row == 95) << row;
  }
}

TEST_F(Forward, NanBehindTheLastKeyIsNotRead) {
  // Keys 70.. belong to somebody else: a sequence of 70 in memory for 96.
  const AttentionCase c{.s_q = 96, .s_kv = 96};
  DeviceCase device(c);
  for (std::int64_t row = 70; row < 96; ++row) {
    for (std::int64_t d = 0; d < 64; ++d) {
      device.host_inputs.k.set(0, 0, row, d, std::numeric_limits<double>::quiet_NaN());
      device.host_inputs.v.set(0, 0, row, d, std::numeric_limits<double>::infinity());
    }
  }
  device.k.buffer.write(device.host_inputs.k.bytes());
  device.v.buffer.write(device.host_inputs.v.bytes());
  ForwardInputs inputs = device.inputs();
  inputs.k.shape[2] = 70;
  inputs.v.shape[2] = 70;
  Attention::create(config_of(c)).forward(inputs, device.outputs());
  driver::check(driver::api().cuCtxSynchronize(), "cuCtxSynchronize");
  device.o.read(device.host_outputs.o);
  for (std::int64_t row = 0; row < c.s_q; ++row) EXPECT_TRUE(std::isfinite(device.host_outputs.o.at(0, 0, row, 0)));
}

TEST_F(Forward, RandomProblems) {
  std::mt19937_64 random(20);
  for (int i = 0; i < 60; ++i) {
    const AttentionCase c = random_case(random);
    run_case(c, config_of(c));
    if (HasFailure()) break;
  }
}

/// A copy of `host` on the device with its first three axes in a random order and gaps of NaN between them: multiples
/// of `unit` elements. With `reverse` the second axis has a negative stride.
struct Scattered {
  Scattered(const HostTensor& host, std::int64_t unit, bool reverse, std::mt19937_64& random) : layout(host.view()) {
    std::array<std::size_t, 3> order{0, 1, 2};
    std::shuffle(order.begin(), order.end(), random);
    std::int64_t reach = layout.rank == 4 ? layout.shape[3] : 1;
    for (const std::size_t axis : order) {
      reach = (reach + unit - 1) / unit * unit + static_cast<std::int64_t>(random() % 3) * unit;
      layout.strides[axis] = reach;
      reach *= layout.shape[axis];
    }
    if (reverse) {
      first = (layout.shape[1] - 1) * layout.strides[1];
      layout.strides[1] = -layout.strides[1];
    }
    bytes.assign(static_cast<std::size_t>(reach) * size_of(layout.dtype), std::byte{0xff});
    for_each_row(host,
                 [](std::byte* there, const std::byte* here, std::size_t size) { std::memcpy(there, here, size); });
    buffer.emplace(bytes);
  }

  TensorView view() const {
    TensorView result = layout;
    result.data = static_cast<std::byte*>(buffer->data()) + first * static_cast<std::int64_t>(size_of(layout.dtype));
    result.read_only = false;
    return result;
  }

  void read(HostTensor& host) {
    bytes = buffer->read();
    for_each_row(host,
                 [](const std::byte* there, std::byte* here, std::size_t size) { std::memcpy(here, there, size); });
  }

  template <class Host, class Visit>
  void for_each_row(Host& host, const Visit& visit) {
    const auto full = host.view();
    const auto element = static_cast<std::int64_t>(size_of(layout.dtype));
    const std::int64_t columns = layout.rank == 4 ? layout.shape[3] : 1;
    const auto offset = [&](const TensorView& v, std::int64_t i, std::int64_t j, std::int64_t k) {
      return (i * v.strides[0] + j * v.strides[1] + k * v.strides[2]) * element;
    };
    for (std::int64_t i = 0; i < layout.shape[0]; ++i) {
      for (std::int64_t j = 0; j < layout.shape[1]; ++j) {
        for (std::int64_t k = 0; k < layout.shape[2]; ++k) {
          visit(bytes.data() + first * element + offset(layout, i, j, k),
                static_cast<std::byte*>(full.data) + offset(full, i, j, k),
                static_cast<std::size_t>(columns * element));
        }
      }
    }
  }

  TensorView layout;
  std::int64_t first = 0;  ///< element (0, 0, 0)
  std::vector<std::byte> bytes;
  std::optional<DeviceBuffer> buffer;
};

constexpr int kRandomParts = 10;

class RandomForward : public Forward, public ::testing::WithParamInterface<int> {};

TEST_P(RandomForward, ShapesAndStrides) {
  std::mt19937_64 random(static_cast<std::uint64_t>(90 + GetParam()));
  const auto pick = [&](std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(high - low + 1));
  };
  const std::pair<std::int64_t, std::int64_t> dims[] = {{64, 64}, {128, 128}, {72, 40}, {192, 128}, {256, 256}};
  for (int i = 0; i < 1000 / kRandomParts; ++i) {
    AttentionCase c;
    c.b = pick(1, 3);
    c.h_kv = pick(1, 3);
    c.h_q = c.h_kv * pick(1, 4);
    c.s_q = pick(1, i % 2 == 0 ? 20 : 250);
    c.s_kv = pick(1, 300);
    std::tie(c.d_qk, c.d_v) = dims[pick(0, 4)];
    c.dtype = i % 3 == 0 ? DType::f16 : DType::bf16;
    c.causal = pick(0, 1) == 1;
    c.causal_align = static_cast<CausalAlign>(pick(0, 1));
    c.seed = random();
    const AttentionInputs inputs = make_inputs(c);
    AttentionOutputs outputs = make_outputs(c);
    const std::int64_t unit = pick(0, 7) == 0 ? 1 : 8;
    const bool reverse = pick(0, 7) == 0;
    Scattered q(inputs.q, unit, reverse, random), k(inputs.k, unit, reverse, random), v(inputs.v, unit, false, random);
    Scattered o(outputs.o, unit, reverse, random), lse(outputs.lse, 1, reverse, random);
    Attention::create(config_of(c)).forward({q.view(), k.view(), v.view()}, {o.view(), lse.view()});
    driver::check(driver::api().cuCtxSynchronize(), "cuCtxSynchronize");
    o.read(outputs.o);
    lse.read(outputs.lse);
    const AttentionOutputs expected = reference_f64(c, inputs);
    const Bounds bound = bounds(c.dtype);
    ASSERT_LE(compare(std::as_const(outputs.o).view(), std::as_const(expected.o).view()).max_abs_over_max_ref, bound.o)
        << i << ": " << to_string(c);
    ASSERT_LE(lse_max_abs_error(std::as_const(outputs.lse).view(), std::as_const(expected.lse).view()), bound.lse)
        << i << ": " << to_string(c);
    for (const Scattered* tensor : {&q, &k, &v, &o, &lse}) ASSERT_TRUE(tensor->buffer->guards_intact()) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Parts, RandomForward, ::testing::Range(0, kRandomParts));

class HeadDims : public GpuTest, public ::testing::WithParamInterface<int> {};

TEST_P(HeadDims, HaveKernelsThatSpillNothing) {
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
    for (const bool causal : {false, true}) {
      const Attention attention = Attention::create({.head_dim = GetParam(), .dtype = dtype, .causal = causal});
      const KernelInfo info = attention.kernel_info({.b = 4, .h_q = 16, .s_q = 2048, .s_kv = 2048});
      EXPECT_EQ(info.local_bytes, 0) << info.spec;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, HeadDims, ::testing::Range(8, 257, 8));

TEST_F(Forward, BadInputLeavesTheContextUsable) {
  const AttentionCase c{.s_q = 32, .s_kv = 32};
  DeviceCase device(c);
  const Attention attention = Attention::create(config_of(c));
  ForwardOutputs wrong = device.outputs();
  wrong.o.shape[3] = 32;
  EXPECT_THROW(attention.forward(device.inputs(), wrong), Error);
  ForwardInputs inputs = device.inputs();
  inputs.k.data = nullptr;
  EXPECT_THROW(attention.forward(inputs, device.outputs()), Error);
  EXPECT_THROW(Attention::create({.head_dim = 64, .kernel = KernelOverride{"", "tile_m=256 tile_n=256 warps=4"}}),
               Error);
  attention.forward(device.inputs(), device.outputs());
  expect_correct(device);
}

}  // namespace
}  // namespace fa::test
