// Packed batches and dropout on the device.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <random>
#include <tuple>
#include <vector>

#include "gpu/captured_graph.hpp"
#include "gpu/packed_case.hpp"
#include "gpu/scoped_stream.hpp"

namespace fa::test {
namespace {

using Packed = GpuTest;

const driver::Api& api() {
  return driver::api();
}

void run(const PackedCase& c) {
  SCOPED_TRACE(::testing::PrintToString(c));
  DevicePackedCase device(c);
  const Attention attention = Attention::create(c.config());
  attention.forward(device.inputs(), device.outputs());
  device.expect_forward();
  attention.backward(device.backward_inputs(), device.backward_outputs());
  device.expect_backward();
}

template <class T, std::size_t kCount>
T pick(std::mt19937& random, const std::array<T, kCount>& values) {
  return values[random() % kCount];
}

/// Sequences with some of length 0, used rows, and rows before, between and behind them.
void make_packed(std::mt19937& random, PackedCase& c) {
  const std::size_t count = pick(random, std::array<std::size_t, 4>{1, 3, 9, 50});
  const int longest = count > 10 ? 60 : 400;
  std::vector<std::int32_t> rows, keys;
  for (std::size_t i = 0; i < count; ++i) {
    rows.push_back(random() % 6 == 0 ? 0 : static_cast<std::int32_t>(random() % static_cast<unsigned>(longest)));
    keys.push_back(random() % 6 == 0 ? 0 : static_cast<std::int32_t>(random() % static_cast<unsigned>(longest)));
  }
  c.cu_q = cumulative(rows, static_cast<std::int32_t>(random() % 3));
  c.cu_kv = cumulative(keys, static_cast<std::int32_t>(random() % 3));
  if (random() % 2 == 0) {
    for (const std::int32_t length : rows) {
      c.used_q.push_back(static_cast<std::int32_t>(random() % static_cast<unsigned>(length + 1)));
    }
  }
  if (random() % 2 == 0) {
    for (const std::int32_t length : keys) {
      c.used_kv.push_back(static_cast<std::int32_t>(random() % static_cast<unsigned>(length + 1)));
    }
  }
  if (random() % 2 == 0) c.max_s_q = c.max_s_kv = longest;
  c.attention.b = 1;
  c.attention.s_q = c.cu_q.back() + static_cast<std::int32_t>(random() % 4);
  c.attention.s_kv = c.cu_kv.back() + static_cast<std::int32_t>(random() % 4);
  c.attention.layout = Layout::bshd;
  c.zero_padding = random() % 3 == 0;
}

PackedCase random_case(std::uint32_t seed) {
  std::mt19937 random(seed);
  PackedCase c;
  AttentionCase& a = c.attention;
  a.seed = seed;
  a.dtype = pick(random, std::array{DType::bf16, DType::f16, DType::f32});
  a.d_qk = pick(random, std::array<std::int64_t, 8>{8, 24, 40, 64, 96, 128, 192, 256});
  a.d_v = random() % 3 == 0 ? pick(random, std::array<std::int64_t, 4>{8, 64, 72, 128}) : a.d_qk;
  a.h_kv = pick(random, std::array<std::int64_t, 2>{1, 2});
  a.h_q = a.h_kv * pick(random, std::array<std::int64_t, 3>{1, 2, 5});
  a.causal = random() % 2 == 0;
  a.causal_align = pick(random, std::array{CausalAlign::bottom_right, CausalAlign::top_left});
  if (random() % 4 == 0) a.scale = pick(random, std::array{-0.2f, 0.05f});
  c.dropout = random() % 3 == 0 ? 0 : pick(random, std::array{0.05f, 0.3f, 0.8f});
  c.deterministic = random() % 2 == 0;
  c.dlse = random() % 2 == 0;
  if (random() % 4 == 0) c.kernel.text = "pack_gqa=1";
  if (c.dropout == 0 || random() % 3 != 0) {
    make_packed(random, c);
  } else {
    a.b = 2;
    a.s_q = pick(random, std::array<std::int64_t, 5>{1, 17, 64, 200, 333});
    a.s_kv = pick(random, std::array<std::int64_t, 5>{0, 1, 64, 255, 700});
    a.layout = pick(random, std::array{Layout::bshd, Layout::bhsd});
  }
  return c;
}

class RandomPacked : public GpuTest, public ::testing::WithParamInterface<std::uint32_t> {};

TEST_P(RandomPacked, MatchFloat64) {
  run(random_case(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomPacked, ::testing::Range(0u, 60u));

TEST_F(Packed, ThousandsOfShortSequences) {
  std::mt19937 random(1);
  std::vector<std::int32_t> rows, keys;
  for (int i = 0; i < 4000; ++i) {
    rows.push_back(static_cast<std::int32_t>(random() % 24));
    keys.push_back(static_cast<std::int32_t>(random() % 40));
  }
  for (const bool known : {false, true}) {
    PackedCase c;
    c.attention = {.h_q = 4, .h_kv = 2, .causal = true, .layout = Layout::bshd};
    c.cu_q = cumulative(rows);
    c.cu_kv = cumulative(keys);
    c.attention.s_q = c.cu_q.back();
    c.attention.s_kv = c.cu_kv.back();
    if (known) c.max_s_q = c.max_s_kv = 40;  // short tiles, packed query heads
    c.dropout = known ? 0.2f : 0.f;
    run(c);
  }
}

/// Of forwards one behind the other, which share a workspace, and of a captured one.
TEST_F(Packed, QueryTilesOfHopperForwardsComeFromACounter) {
  if (driver::device_info(0).arch != plan::parse_arch("sm_90a")) GTEST_SKIP() << "GPU 0 is no Hopper";
  std::mt19937 random(2);
  std::vector<std::int32_t> rows, keys;
  for (int i = 0; i < 60; ++i) {
    rows.push_back(static_cast<std::int32_t>(i % 9 == 4 ? 0 : i == 30 ? 2500 : random() % 500));
    keys.push_back(static_cast<std::int32_t>(i % 11 == 4 ? 0 : i == 30 ? 2500 : random() % 500));
  }
  for (const std::int64_t d : {64, 128, 256}) {
    PackedCase c;
    c.attention = {.h_q = 4, .h_kv = 2, .d_qk = d, .d_v = d, .causal = d != 64, .layout = Layout::bshd};
    c.cu_q = cumulative(rows);
    c.cu_kv = cumulative(keys);
    c.attention.s_q = c.cu_q.back();
    c.attention.s_kv = c.cu_kv.back();
    c.kernel = KernelOverride{"sm90", "dynamic=1"};
    SCOPED_TRACE(::testing::PrintToString(c));
    DevicePackedCase device(c);
    const Attention attention = Attention::create(c.config());
    const AttentionShape shape{.b = 60,
                               .h_q = 4,
                               .h_kv = 2,
                               .s_q = 2500,
                               .s_kv = 2500,
                               .total_q = c.attention.s_q,
                               .total_kv = c.attention.s_kv};
    const std::string spec = attention.kernel_info(shape).spec;
    EXPECT_NE(spec.find(" dynamic=1"), std::string::npos) << spec;
    DeviceBuffer scratch(attention.workspace_size(shape));
    const Workspace workspace{scratch.data(), scratch.size()};
    const ScopedStream stream;
    const auto forward = [&] { attention.forward(device.inputs(), device.outputs(), stream.get(), workspace); };
    for (int i = 0; i < 3; ++i) forward();
    device.expect_forward();
    const std::vector<std::byte> first = device.o.buffer.read();
    const CapturedGraph graph(stream.get(), forward);
    for (int i = 0; i < 3; ++i) graph.replay(stream.get());
    driver::check(api().cuStreamSynchronize(stream.get()), "cuStreamSynchronize");
    EXPECT_EQ(device.o.buffer.read(), first);
  }
}

/// Split keys, and the planner's full-size tiles.
TEST_F(Packed, DropoutOfPlannedKernels) {
  for (const std::int64_t d : {64, 128, 256}) {
    for (const DType dtype : {DType::bf16, DType::f32}) {
      PackedCase c;
      c.dropout = 0.1f;
      c.attention = {.b = 1, .h_q = 4, .h_kv = 2, .s_q = 2, .s_kv = 5000, .d_qk = d, .d_v = d, .dtype = dtype};
      run(c);
      c.attention.b = 2;
      c.attention.s_q = c.attention.s_kv = 515;
      c.attention.causal = true;
      run(c);
    }
  }
}

TEST_F(Packed, DropoutWhereExponentialsOverflow) {
  for (const std::int64_t d : {64, 128, 256}) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      PackedCase c;
      c.dropout = 0.1f;
      c.attention = {.b = 2, .h_q = 4, .h_kv = 2, .s_q = 515, .s_kv = 600, .d_qk = d, .d_v = d, .dtype = dtype};
      c.attention.scale = 50.f / std::sqrt(static_cast<float>(d));
      c.attention.early_keys = true;
      SCOPED_TRACE(::testing::PrintToString(c));
      DevicePackedCase device(c);
      Attention::create(c.config()).forward(device.inputs(), device.outputs());
      device.expect_forward();
    }
  }
}

/// P is 1 / s_kv everywhere: O = P o Z with a unit matrix for V, and dV with one for dout, show the kernel's mask.
TEST_F(Packed, MasksAreThoseOfTheHost) {
  for (const std::int64_t d : {64, 128}) {
    for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
      PackedCase c;
      c.dropout = 0.3f;
      c.attention = {
          .b = 2, .h_q = 3, .h_kv = 3, .s_q = d, .s_kv = d, .d_qk = d, .d_v = d, .dtype = dtype, .scale = 1e-6f};
      SCOPED_TRACE(::testing::PrintToString(c));
      DevicePackedCase device(c);
      HostTensor unit = device.host.v;
      for (std::int64_t b = 0; b < 2; ++b) {
        for (std::int64_t h = 0; h < 3; ++h) {
          for (std::int64_t i = 0; i < d; ++i) {
            for (std::int64_t j = 0; j < d; ++j) unit.set(b, h, i, j, i == j ? 1 : 0);
          }
        }
      }
      device.v.buffer.write(unit.bytes());
      device.dout.buffer.write(unit.bytes());
      const Attention attention = Attention::create(c.config());
      attention.forward(device.inputs(), device.outputs());
      attention.backward(device.backward_inputs(), device.backward_outputs());
      driver::check(api().cuCtxSynchronize(), "cuCtxSynchronize");
      HostTensor o = unit, dv = unit;
      device.o.read(o);
      device.dv.read(dv);
      std::vector<std::uint8_t> keep(static_cast<std::size_t>(2 * 3 * d * d));
      dropout_mask(c.state, c.dropout, 2, 3, d, d, keep.data());
      std::int64_t wrong = 0;
      for (std::int64_t n = 0; n < 2 * 3 * d * d; ++n) {
        const std::int64_t b = n / (3 * d * d), h = n / (d * d) % 3, i = n / d % d, j = n % d;
        const bool kept = keep[static_cast<std::size_t>(n)] != 0;
        wrong += (o.at(b, h, i, j) != 0) != kept;
        wrong += (dv.at(b, h, j, i) != 0) != kept;
      }
      EXPECT_EQ(wrong, 0);
    }
  }
}

/// Clusters of the backward: the blocks that share the query tiles of a key tile.
TEST_F(Packed, ClustersOfBlocks) {
  std::mt19937 random(7);
  for (const int blocks : {2, 3, 8}) {
    for (const float dropout : {0.f, 0.3f}) {
      for (const std::int64_t d : {64, 128}) {
        PackedCase c;
        c.attention = {.h_q = 8, .h_kv = 2, .d_qk = d, .d_v = d, .causal = true};
        make_packed(random, c);
        c.dropout = dropout;
        c.deterministic = blocks == 3;
        c.kernel_backward = KernelOverride{"", fmt::format("split_blocks={}", blocks)};
        run(c);
      }
    }
  }
}

/// The same mask whatever the tiles.
TEST_F(Packed, MasksDoNotDependOnTheKernel) {
  PackedCase c;
  c.dropout = 0.5f;
  c.attention = {.h_q = 2, .h_kv = 1, .s_q = 150, .s_kv = 300, .causal = true};
  for (const KernelOverride& kernel :
       {KernelOverride{"", "tile_m=64 tile_n=48 warps=4"}, KernelOverride{"", "tile_m=16 tile_n=16 warps=1"},
        KernelOverride{"", "pack_gqa=1"}, KernelOverride{"", "splits=3"}}) {
    c.kernel = kernel;
    run(c);
  }
}

TEST_F(Packed, LengthsAndDropoutStateChangeBetweenReplays) {
  PackedCase c;
  c.attention = {.h_q = 4, .h_kv = 2, .s_q = 600, .s_kv = 700, .causal = true, .layout = Layout::bshd};
  c.cu_q = cumulative({100, 200, 300});
  c.cu_kv = cumulative({300, 200, 200});
  c.dropout = 0.25f;
  c.zero_padding = true;
  DevicePackedCase device(c);
  DeviceBuffer state(2 * sizeof(std::uint64_t));
  const auto set_state = [&](std::uint64_t seed, std::uint64_t offset) {
    const std::uint64_t values[2] = {seed, offset};
    std::vector<std::byte> bytes(sizeof values);
    std::memcpy(bytes.data(), values, sizeof values);
    state.write(bytes);
    device.problem.state = {.seed = seed, .offset = offset};
  };
  const Attention attention = Attention::create(c.config());
  attention.prepare(c.shape());
  attention.prepare_backward(c.shape());
  const DeviceBuffer scratch(attention.backward_workspace_size(c.shape()));
  const ScopedStream stream;
  const CapturedGraph graph(stream.get(), [&] {
    ForwardInputs in = device.inputs();
    in.dropout = {.device = static_cast<const std::uint64_t*>(state.data())};
    BackwardInputs backward = device.backward_inputs();
    backward.dropout = in.dropout;
    attention.forward(in, device.outputs(), stream.get());
    attention.backward(backward, device.backward_outputs(), stream.get(), {scratch.data(), scratch.size()});
  });
  const std::vector<std::vector<std::int32_t>> lengths{{100, 200, 300}, {0, 0, 600}, {1, 598, 1}, {64, 64, 64}};
  for (std::size_t replay = 0; replay < lengths.size(); ++replay) {
    SCOPED_TRACE(replay);
    set_state(replay, 1000 * replay);
    device.set_lengths(cumulative(lengths[replay]), cumulative(lengths[lengths.size() - 1 - replay]));
    device.forget();
    graph.replay(stream.get());
    driver::check(api().cuStreamSynchronize(stream.get()), "cuStreamSynchronize");
    device.expect_forward();
    device.expect_backward();
  }
}

/// NaN or infinity in all of one sequence leaves the bits of all others alone, in kernels of both families.
class Neighbours : public GpuTest, public ::testing::WithParamInterface<std::tuple<const char*, double>> {};

TEST_P(Neighbours, KeepTheirResults) {
  const auto [family, value] = GetParam();
  PackedCase c;
  c.attention = {.h_q = 4, .h_kv = 2, .causal = true, .layout = Layout::bshd};
  c.cu_q = cumulative({70, 33, 150, 1, 90});
  c.cu_kv = cumulative({90, 64, 170, 3, 200});
  c.attention.s_q = c.cu_q.back();
  c.attention.s_kv = c.cu_kv.back();
  c.kernel.kernel = family;
  c.deterministic = true;  // dq too has the same bits in every run
  c.dlse = true;
  const Rows rows{c.cu_q[2], c.cu_q[3] - c.cu_q[2]}, keys{c.cu_kv[2], c.cu_kv[3] - c.cu_kv[2]};
  struct Results {
    AttentionOutputs outputs;
    AttentionGradients gradients;
  };
  DevicePackedCase device(c);
  const Attention attention = Attention::create(c.config());
  const auto compute = [&] {
    device.forget();
    attention.forward(device.inputs(), device.outputs());
    attention.backward(device.backward_inputs(), device.backward_outputs());
    driver::check(api().cuCtxSynchronize(), "cuCtxSynchronize");
    Results results{make_outputs(c.attention), make_gradients(c.attention)};
    device.o.read(results.outputs.o);
    device.lse.read(results.outputs.lse);
    device.dq.read(results.gradients.dq);
    device.dk.read(results.gradients.dk);
    device.dv.read(results.gradients.dv);
    return results;
  };
  const Results clean = compute();
  const auto spoil = [&, value = value](HostTensor tensor, DeviceTensor& target, const Rows& of) {
    fill(tensor, of, value);
    target.buffer.write(tensor.bytes());
  };
  spoil(device.host.q, device.q, rows);
  spoil(device.host.k, device.k, keys);
  spoil(device.host.v, device.v, keys);
  spoil(device.host_dout, device.dout, rows);
  spoil(device.host_dlse, device.dlse, rows);
  const Results beside = compute();
  EXPECT_TRUE(equal_outside(beside.outputs.o, clean.outputs.o, rows)) << "o";
  EXPECT_TRUE(equal_outside(beside.outputs.lse, clean.outputs.lse, rows)) << "lse";
  EXPECT_TRUE(equal_outside(beside.gradients.dq, clean.gradients.dq, rows)) << "dq";
  EXPECT_TRUE(equal_outside(beside.gradients.dk, clean.gradients.dk, keys)) << "dk";
  EXPECT_TRUE(equal_outside(beside.gradients.dv, clean.gradients.dv, keys)) << "dv";
  EXPECT_FALSE(equal_outside(beside.outputs.o, clean.outputs.o, {})) << "nothing was spoiled";
}

INSTANTIATE_TEST_SUITE_P(Values, Neighbours,
                         ::testing::Combine(::testing::Values("", "sm80"),
                                            ::testing::Values(std::nan(""), HUGE_VAL, -HUGE_VAL)));

/// NaN in q and dout of rows that keep no key: of causal sequences with fewer keys than rows, some of both unused, and
/// of windows that end before the last rows.
class RowsWithoutKeys : public GpuTest,
                        public ::testing::WithParamInterface<std::tuple<const char*, DType, std::int64_t>> {
 protected:
  static void expect_clean(const PackedCase& c, const std::vector<std::int64_t>& rows) {
    DevicePackedCase device(c);
    const Attention attention = Attention::create(c.config());
    attention.forward(device.inputs(), device.outputs());
    for (const std::int64_t row : rows) {
      for (HostTensor* tensor : {&device.host.q, &device.host_dout}) fill(*tensor, {row, 1}, std::nan(""));
    }
    device.q.buffer.write(device.host.q.bytes());
    device.dout.buffer.write(device.host_dout.bytes());
    attention.backward(device.backward_inputs(), device.backward_outputs());
    device.expect_backward();
  }
  static PackedCase base() {
    const auto [family, dtype, d] = GetParam();
    PackedCase c;
    c.attention = {.h_q = 4, .h_kv = 2, .d_qk = d, .d_v = d, .dtype = dtype, .causal = true, .layout = Layout::bshd};
    c.kernel.kernel = family;
    return c;
  }
};

TEST_P(RowsWithoutKeys, OfSequences) {
  PackedCase c = base();
  c.cu_q = cumulative({70, 33, 300});
  c.cu_kv = cumulative({64, 40, 170});
  c.used_q = {70, 20, 290};
  c.used_kv = {60, 40, 150};
  c.attention.s_q = c.cu_q.back();
  c.attention.s_kv = c.cu_kv.back();
  expect_clean(c, {0, 9, 103, 103 + 139});  // ten and 140 rows before the first key
}

TEST_P(RowsWithoutKeys, OfWindows) {
  PackedCase c = base();
  c.attention.causal = false;
  c.attention.causal_align = CausalAlign::top_left;
  c.attention.s_q = 200;
  c.attention.s_kv = 64;
  AttentionConfig window;
  window.window_left = 20;
  window.window_right = 3;
  c.variant = std::make_shared<VariantCase>(c.attention, VariantChoice{"window", window});
  expect_clean(c, {84, 127, 128, 199});
}

INSTANTIATE_TEST_SUITE_P(Values, RowsWithoutKeys,
                         ::testing::Combine(::testing::Values("", "sm80"), ::testing::Values(DType::f16, DType::bf16),
                                            ::testing::Values(64, 128)));

/// Lengths of every wrong kind: nothing is written outside of the tensors, and the context lives on.
TEST_F(Packed, WrongLengthsDoNoHarm) {
  PackedCase c;
  c.attention = {.h_q = 4, .h_kv = 2, .s_q = 300, .s_kv = 300, .causal = true, .layout = Layout::bshd};
  c.cu_q = c.cu_kv = cumulative({100, 100, 100});
  const std::vector<std::vector<std::int32_t>> wrong{{0, 250, 20, 300},
                                                     {-7, 10, 30, 400},
                                                     {0, 1000000, 2000000000, 2147483647},
                                                     {300, 200, 100, 0},
                                                     {-2147483647 - 1, 2147483647, -5, 64}};
  for (const bool deterministic : {false, true}) {
    c.deterministic = deterministic;
    const Attention attention = Attention::create(c.config());
    for (const std::vector<std::int32_t>& cu : wrong) {
      for (const bool rows : {false, true}) {
        DevicePackedCase device(c);
        std::vector<std::byte> bytes(cu.size() * sizeof(std::int32_t));
        std::memcpy(bytes.data(), cu.data(), bytes.size());
        (rows ? device.cu_q : device.cu_kv).write(bytes);
        attention.forward(device.inputs(), device.outputs());
        attention.backward(device.backward_inputs(), device.backward_outputs());
        ASSERT_EQ(api().cuCtxSynchronize(), CUDA_SUCCESS);
        for (const DeviceTensor* tensor : {&device.o, &device.lse, &device.dq, &device.dk, &device.dv}) {
          EXPECT_TRUE(tensor->buffer.guards_intact());
        }
      }
    }
  }
}

TEST_F(Packed, WrongLengthsAreNamedOnRequest) {
  PackedCase c;
  c.attention = {.h_q = 2, .h_kv = 2, .s_q = 300, .s_kv = 300, .layout = Layout::bshd};
  c.cu_q = c.cu_kv = cumulative({100, 100, 100});
  AttentionConfig config = c.config();
  config.check_sequences = true;
  const Attention attention = Attention::create(config);
  DevicePackedCase device(c);
  EXPECT_NO_THROW(attention.forward(device.inputs(), device.outputs()));
  device.expect_forward();
  const std::vector<std::int32_t> cu{0, 200, 100, 300};
  std::vector<std::byte> bytes(cu.size() * sizeof(std::int32_t));
  std::memcpy(bytes.data(), cu.data(), bytes.size());
  device.cu_kv.write(bytes);
  for (const bool backward : {false, true}) {
    try {
      if (backward) {
        attention.backward(device.backward_inputs(), device.backward_outputs());
      } else {
        attention.forward(device.inputs(), device.outputs());
      }
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      EXPECT_EQ(error.field("argument"), "cu_seqlens_kv[2]");
    }
  }
  const ScopedStream stream;
  driver::check(api().cuStreamBeginCapture(stream.get(), CU_STREAM_CAPTURE_MODE_RELAXED), "cuStreamBeginCapture");
  EXPECT_THROW(attention.forward(device.inputs(), device.outputs(), stream.get()), Error);
  CUgraph graph = nullptr;
  EXPECT_EQ(api().cuStreamEndCapture(stream.get(), &graph), CUDA_SUCCESS) << "the capture must stay valid";
  api().cuGraphDestroy(graph);
}

/// A packed batch of equal lengths is a dense one: the same bits where the tiles are the same.
TEST_F(Packed, EqualLengthsGiveTheDenseResult) {
  AttentionCase dense{.b = 4, .h_q = 4, .h_kv = 2, .s_q = 256, .s_kv = 256, .causal = true, .layout = Layout::bshd};
  PackedCase c;
  c.attention = dense;
  c.attention.b = 1;
  c.attention.s_q = c.attention.s_kv = 4 * 256;
  c.cu_q = c.cu_kv = cumulative({256, 256, 256, 256});
  c.max_s_q = c.max_s_kv = 256;
  c.kernel = {"sm80", "tile_m=64 tile_n=64 warps=4"};
  DevicePackedCase packed(c);
  Attention::create(c.config()).forward(packed.inputs(), packed.outputs());
  AttentionConfig config = config_of(dense);
  config.kernel = c.kernel;
  DeviceCase device(dense);  // [b, s, h, d] memory with the same values is [total, h, d]
  device.q.buffer.write(packed.host.q.bytes());
  device.k.buffer.write(packed.host.k.bytes());
  device.v.buffer.write(packed.host.v.bytes());
  Attention::create(config).forward(device.inputs(), device.outputs());
  driver::check(api().cuCtxSynchronize(), "cuCtxSynchronize");
  EXPECT_EQ(packed.o.buffer.read(), device.o.buffer.read());
}

}  // namespace
}  // namespace fa::test
