// Random combinations of functions, windows, chunks and sinks with dtypes, head dims, GQA, lengths and masks on a GPU,
// forward and backward, against the float64 reference.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "gpu/backward_case.hpp"
#include "gpu/packed_case.hpp"
#include "plan/kernel_spec.hpp"
#include "support/random_variant.hpp"
#include "support/variant_case.hpp"

namespace fa::test {
namespace {

constexpr std::size_t kKernels = 52;  // combinations of what is compiled
constexpr std::size_t kLaunches = 4;  // of each

/// What a combination compiles: a choice of variants, a dtype, head dims, a causal mask.
struct Kernel {
  VariantChoice choice;
  DType dtype;
  std::int64_t d_qk, d_v;
  bool causal;
  std::optional<float> scale;
};

template <class Values>
auto pick(std::mt19937_64& engine, const Values& values) {
  return values[engine() % std::size(values)];
}

Kernel listed_kernel(std::size_t index) {
  std::mt19937_64 engine(1000 + index);
  const std::vector<VariantChoice> choices = variant_choices();
  Kernel kernel{choices[index % choices.size()],
                pick(engine, std::array{DType::bf16, DType::f16, DType::f32}),
                0,
                0,
                engine() % 2 == 0,
                std::nullopt};
  kernel.d_qk = pick(engine, std::array{32, 64, 64, 128, 40, 96, 256});
  kernel.d_v = engine() % 4 == 0 ? pick(engine, std::array{64, 72}) : kernel.d_qk;
  if (engine() % 5 == 0) kernel.scale = -0.1f;
  return kernel;
}

AttentionCase random_case(const Kernel& kernel, std::size_t kernel_index, std::size_t launch) {
  std::mt19937_64 engine(kernel_index * 16 + launch + 5);
  AttentionCase c;
  c.dtype = kernel.dtype;
  c.d_qk = kernel.d_qk;
  c.d_v = kernel.d_v;
  c.causal = kernel.causal;
  c.scale = kernel.scale;
  c.b = 1 + static_cast<std::int64_t>(engine() % 2);
  const auto heads = pick(engine, std::array<std::array<std::int64_t, 2>, 4>{{{1, 1}, {4, 2}, {6, 1}, {3, 3}}});
  c.h_q = heads[0];
  c.h_kv = heads[1];
  c.s_q = pick(engine, std::array{1, 3, 64, 100, 257, 300});
  c.s_kv = pick(engine, std::array{1, 33, 128, 257, 300, 600});
  c.causal_align = engine() % 3 == 0 ? CausalAlign::top_left : CausalAlign::bottom_right;
  c.layout = engine() % 2 == 0 ? Layout::bhsd : Layout::bshd;
  c.seed = kernel_index * 16 + launch + 1;
  return c;
}

/// What an error may be of the largest element: rounding of P, dS and results; a fast tanh three times that.
double tolerance(const VariantCase& c) {
  const bool tanh = c.config.score.expression.find("tanh") != std::string::npos;
  const double plain = c.attention.dtype == DType::bf16 ? 1.5e-2 : c.attention.dtype == DType::f16 ? 2e-3 : 2e-5;
  return tanh ? 3 * plain : plain;
}

void expect_near(const std::string& name, HostTensor& actual, const HostTensor& expected, double terms, double bound) {
  EXPECT_LE(compare(std::as_const(actual).view(), expected.view()).max_abs, bound * std::max(largest(expected), terms))
      << name;
}

void run(const VariantCase& c, const Attention& attention) {
  SCOPED_TRACE(testing::PrintToString(c));
  DeviceVariant variant(c);
  DeviceCase device(c.attention);
  ForwardInputs in = device.inputs();
  in.captures = variant.given;
  in.sink = variant.sink_view;
  attention.forward(in, device.outputs());
  driver::check(driver::api().cuCtxSynchronize(), "cuCtxSynchronize");
  device.o.read(device.host_outputs.o);
  device.lse.read(device.host_outputs.lse);
  const AttentionOutputs expected = reference_f64(c, device.host_inputs);
  const double bound = tolerance(c);
  expect_near("o", device.host_outputs.o, expected.o, 1, bound);
  EXPECT_LE(lse_max_abs_error(std::as_const(device.host_outputs.lse).view(), expected.lse.view()),
            c.attention.dtype == DType::f32 ? 1e-4 : 5e-3);

  HostTensor host_dout = make_dout(c.attention);
  HostTensor host_dlse = make_dlse(c.attention);
  AttentionGradients actual = make_gradients(c.attention);
  DeviceTensor dout(host_dout), dlse(host_dlse), dq(actual.dq), dk(actual.dk), dv(actual.dv);
  BackwardInputs all;
  all.q = in.q;
  all.k = in.k;
  all.v = in.v;
  all.o = device.o.const_view();
  all.lse = device.lse.const_view();
  all.dout = dout.const_view();
  all.dlse = dlse.const_view();
  all.captures = variant.given;
  all.sink = variant.sink_view;
  attention.backward(all, {dq.view(), dk.view(), dv.view(), variant.wanted, variant.dsink_view});
  driver::check(driver::api().cuCtxSynchronize(), "cuCtxSynchronize");
  dq.read(actual.dq);
  dk.read(actual.dk);
  dv.read(actual.dv);
  const VariantGradients gradients =
      reference_gradients_f64(c, device.host_inputs, std::as_const(host_dout).view(), std::as_const(host_dlse).view());
  const double dp = std::sqrt(static_cast<double>(c.attention.d_v));  // dout V^T and rowsum(dout o O)
  const double scale = std::abs(static_cast<double>(c.attention.softmax_scale()));
  expect_near("dq", actual.dq, gradients.usual.dq, dp * scale, bound);
  expect_near("dk", actual.dk, gradients.usual.dk, dp * scale, bound);
  expect_near("dv", actual.dv, gradients.usual.dv, 1, bound);
  for (std::size_t i = 0; i < c.captures.size(); ++i) {
    if (!c.captures[i].requires_grad) continue;
    expect_near("gradient of " + c.captures[i].name, variant.gradients[i], gradients.captures[i],
                gradients.bounds.captures[i]);
  }
  if (c.config.sink) expect_near("dsink", variant.dsink, gradients.dsink, gradients.bounds.dsink);
  for (const DeviceTensor* tensor : {&dq, &dk, &dv, &device.o, &device.lse}) {
    EXPECT_TRUE(tensor->buffer.guards_intact()) << "written outside of a tensor";
  }
}

class VariantsGpu : public GpuTest, public testing::WithParamInterface<std::size_t> {};

TEST_P(VariantsGpu, ForwardAndBackwardMatchTheReference) {
  const Kernel kernel = listed_kernel(GetParam());
  for (std::size_t launch = 0; launch < kLaunches; ++launch) {
    const VariantCase c(random_case(kernel, GetParam(), launch), kernel.choice);
    run(c, Attention::create(c.config));
  }
}

INSTANTIATE_TEST_SUITE_P(Random, VariantsGpu, testing::Range<std::size_t>(0, kKernels));
static_assert(kKernels * kLaunches >= 200);

using SlopesGpu = GpuTest;

/// Splits that the blocks of a cluster merge, of scores to which the product adds.
TEST_F(SlopesGpu, AreMergedInClusters) {
  if (driver::device_info(0).arch != plan::parse_arch("sm_90a")) GTEST_SKIP() << "GPU 0 is no Hopper";
  AttentionConfig config;
  config.score = functions::alibi();
  for (const int blocks : {2, 4, 8}) {
    config.kernel = KernelOverride{"sm90", fmt::format("affine_product=1 splits=2 split_blocks={}", blocks)};
    for (const std::int64_t d : {64, 128}) {
      AttentionCase attention{.b = 3, .h_q = 8, .h_kv = 2, .s_q = 3, .s_kv = 2345, .d_qk = d, .d_v = d};
      attention.dtype = d == 64 ? DType::f16 : DType::bf16;
      const VariantCase c(attention, VariantChoice{"alibi", config});
      run(c, Attention::create(c.config));
    }
  }
}

/// All variants at once: in packed batches, with dropout, deterministic or not.
class Combinations : public GpuTest, public testing::WithParamInterface<std::size_t> {};

TEST_P(Combinations, MatchTheReference) {
  const RandomKernel kernel = random_kernel(GetParam());
  const AttentionConfig& config = kernel.choice.config;
  for (std::size_t launch = 0; launch < kRandomLaunches; ++launch) {
    const RandomProblem problem = random_problem(kernel, GetParam(), launch);
    PackedCase c{problem.attention, problem.cu_q,    problem.cu_kv,    problem.used_q,
                 problem.used_kv,   problem.max_s_q, problem.max_s_kv, config.dropout};
    c.zero_padding = config.zero_padding;
    c.deterministic = config.deterministic;
    c.dlse = problem.dlse;
    if (kernel.pack_gqa) c.kernel.text = "pack_gqa=1";
    c.variant = std::make_shared<const VariantCase>(problem.variant(kernel));
    SCOPED_TRACE(testing::PrintToString(c));
    DevicePackedCase device(c);
    const Attention attention = Attention::create(c.config());
    attention.forward(device.inputs(), device.outputs());
    device.expect_forward();
    attention.backward(device.backward_inputs(), device.backward_outputs());
    device.expect_backward();
  }
}

INSTANTIATE_TEST_SUITE_P(Random, Combinations, testing::Range<std::size_t>(0, kRandomKernels));

/// Loads behind tests of random functions, which name a number that has no memory: every second of a packed batch.
class RandomFunctions : public GpuTest, public testing::WithParamInterface<std::tuple<plan::Family, std::size_t>> {};

/// Two functions whose loads a compiler has executed in front of their tests, then random ones.
ScoreFunction guarded_function(std::size_t index) {
  if (index == 0) {
    return {
        "((floor_mod(kv - q, 5) > q) && (kv >= 0)) ? clamp(log(abs((score - 0.5 * number)) + 1.0), -8.0, 8.0) : "
        "-infinity",
        {{"number", DType::f32}}};
  }
  if (index == 1) {
    return {
        "(q >= ((kv - q) % 3)) ? clamp(((kv != floor_div(q - kv, 16)) ? (3.0 * tanh(log(abs(row[b, q]) + 1.0) / 3.0)) "
        ": sin((3.0 * tanh(number / 3.0)))), -8.0, 8.0) : -infinity",
        {{"number", DType::f32}, {"row", DType::f32}}};
  }
  return random_function(index);
}

TEST_P(RandomFunctions, MatchTheReference) {
  const auto [family, index] = GetParam();
  if (family == plan::Family::sm90 && driver::device_info(0).arch != plan::parse_arch("sm_90a")) {
    GTEST_SKIP() << "GPU 0 is no Hopper";
  }
  PackedCase c;
  c.attention = {.b = 2, .h_q = 4, .h_kv = 2, .s_q = 111, .s_kv = 130, .d_qk = 64, .d_v = 64, .dtype = DType::bf16};
  if (index == 1) c.attention.d_qk = 112, c.attention.d_v = 192;
  if (index % 3 == 1) c.attention.dtype = DType::f16;
  c.attention.causal = index % 4 == 0;
  c.attention.causal_align = CausalAlign::top_left;
  c.attention.seed = index + 1;
  if (index == 3 || index == 6) c.dropout = 0.25f;
  c.kernel.kernel = to_string(family);
  AttentionConfig config;
  config.score = guarded_function(index);
  config.sink = index % 5 == 2;
  if (family == plan::Family::sm80) config.kernel_backward = KernelOverride{to_string(family)};
  const bool packed = index % 2 == 0;
  if (packed) {
    c.attention.layout = Layout::bshd;
    c.attention.s_q = c.attention.s_kv = 150;
    c.cu_q = c.cu_kv = {0, 111, 150};
  }
  c.variant = std::make_shared<const VariantCase>(c.attention, VariantChoice{"random_function", config});
  if (packed) c.attention.b = 1;
  SCOPED_TRACE(testing::PrintToString(c));
  DevicePackedCase device(c);
  const Attention attention = Attention::create(c.config());
  attention.forward(device.inputs(), device.outputs());
  device.expect_forward();
  attention.backward(device.backward_inputs(), device.backward_outputs());
  device.expect_backward();
}

INSTANTIATE_TEST_SUITE_P(Guarded, RandomFunctions,
                         testing::Combine(testing::Values(plan::Family::sm80, plan::Family::sm90),
                                          testing::Range<std::size_t>(0, 10)));

/// A row that a mask function hides: exact zeros and -inf, or the sink's logit.
class HiddenRows : public GpuTest, public testing::WithParamInterface<bool> {};

TEST_P(HiddenRows, AreZeroWithoutGradients) {
  constexpr std::int64_t kHidden = 70;
  AttentionConfig config;
  config.mask = MaskFunction{"q != 70"};
  config.sink = GetParam();
  AttentionCase a{.b = 1, .h_q = 4, .h_kv = 2, .s_q = 130, .s_kv = 200, .d_qk = 64, .d_v = 64, .dtype = DType::f16};
  PackedCase c{.attention = a};
  c.variant = std::make_shared<const VariantCase>(a, VariantChoice{"hidden", config});
  DevicePackedCase device(c);
  const Attention attention = Attention::create(c.config());
  attention.forward(device.inputs(), device.outputs());
  device.expect_forward();
  attention.backward(device.backward_inputs(), device.backward_outputs());
  device.expect_backward();
  HostTensor o = make_outputs(a).o, lse = make_outputs(a).lse, dq = make_gradients(a).dq;
  device.o.read(o);
  device.lse.read(lse);
  device.dq.read(dq);
  for (std::int64_t h = 0; h < a.h_q; ++h) {
    float sink = -INFINITY;
    if (GetParam()) std::memcpy(&sink, c.variant->sink.bytes.data() + h * sizeof sink, sizeof sink);
    if (GetParam()) {
      EXPECT_NEAR(lse.at(0, h, kHidden), sink, 1e-6) << h;
    } else {
      EXPECT_EQ(lse.at(0, h, kHidden), sink) << h;
    }
    for (std::int64_t d = 0; d < a.d_v; ++d) {
      EXPECT_EQ(o.at(0, h, kHidden, d), 0);
      EXPECT_EQ(dq.at(0, h, kHidden, d), 0);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Sink, HiddenRows, testing::Bool());

/// Rows see a few keys anywhere in a tile, then others far away, or scores whose exponentials are 0 in float.
class LateKeys : public GpuTest, public testing::WithParamInterface<std::tuple<DType, bool>> {};

TEST_P(LateKeys, CountInFull) {
  const auto [dtype, deep] = GetParam();
  AttentionConfig config;
  if (deep) {
    config.score = ScoreFunction{"score - 100.0"};
    config.window_left = 3;
  } else {
    config.mask = MaskFunction{"kv >= s_kv - q - 6 && kv < s_kv - q || kv < 5"};
  }
  const AttentionCase a{
      .b = 1, .h_q = 4, .h_kv = 2, .s_q = 330, .s_kv = 400, .d_qk = 64, .d_v = 64, .dtype = dtype, .causal = deep};
  const VariantCase c(a, {"late_keys", config});
  run(c, Attention::create(c.config));
}

INSTANTIATE_TEST_SUITE_P(All, LateKeys,
                         testing::Combine(testing::Values(DType::bf16, DType::f16, DType::f32), testing::Bool()));

/// More query tiles than multiprocessors, which see from none to most of the keys: blocks of several waves.
class UnequalTiles : public GpuTest, public testing::WithParamInterface<std::tuple<std::int64_t, bool>> {};

TEST_P(UnequalTiles, MatchTheReference) {
  const auto [d, causal] = GetParam();
  AttentionConfig config;
  config.mask = MaskFunction{"kv < q - 400 && q / 90 % 4 != 1 || q / 300 == kv / 200"};
  const AttentionCase a{.b = 1,
                        .h_q = 16,
                        .h_kv = 4,
                        .s_q = 1300,
                        .s_kv = 800,
                        .d_qk = d,
                        .d_v = d,
                        .dtype = DType::bf16,
                        .causal = causal,
                        .causal_align = CausalAlign::top_left};
  const VariantCase c(a, {"unequal_tiles", config});
  run(c, Attention::create(c.config));
}

INSTANTIATE_TEST_SUITE_P(All, UnequalTiles, testing::Combine(testing::Values<std::int64_t>(64, 128), testing::Bool()));

/// Of rows so long that the kernels leave out keys that distance makes lose, where heads differ in how many these are.
class LongDistances : public GpuTest,
                      public testing::WithParamInterface<std::tuple<const char*, std::int64_t, bool, DType>> {};

TEST_P(LongDistances, MatchTheReference) {
  const auto [score, d, causal, dtype] = GetParam();
  AttentionConfig config;
  config.score = ScoreFunction{score, {{"slope", DType::f32}}};
  for (const auto& [s_q, s_kv] : {std::pair<std::int64_t, std::int64_t>(1030, 2051), {2048, 2048}}) {
    const AttentionCase a{
        .b = 1, .h_q = 4, .h_kv = 2, .s_q = s_q, .s_kv = s_kv, .d_qk = d, .d_v = d, .dtype = dtype, .causal = causal};
    const VariantCase c(a, {"long_distances", config});
    run(c, Attention::create(c.config));
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, LongDistances,
    testing::Combine(
        testing::Values("score - exp2(-float(h)) * abs(float(q + s_kv - s_q - kv)) * (1.0 + 0.1 * slope[h])",
                        "score + (0.3 + 0.1 * slope[h]) * float(kv - q)",
                        "score - (0.3 + 0.1 * slope[h]) * abs(float(2 * kv - q))"),
        testing::Values<std::int64_t>(64, 128, 256), testing::Bool(), testing::Values(DType::bf16)));

}  // namespace
}  // namespace fa::test
