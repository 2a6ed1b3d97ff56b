// Forwards of 8-bit floats on a GPU against float64 of the very inputs.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "gpu/fp8_case.hpp"
#include "plan/arch.hpp"

namespace fa::test {
namespace {

bool is_hopper() {
  return driver::device_info(0).arch == plan::parse_arch("sm_90a");
}

class Fp8Forward : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (!IsSkipped() && !is_hopper()) GTEST_SKIP() << "no kernels of 8-bit floats for this GPU";
  }
};

class Fp8Shapes : public Fp8Forward, public ::testing::WithParamInterface<AttentionCase> {};

TEST_P(Fp8Shapes, MatchesFloat64) {
  Fp8Call call(GetParam());
  const Fp8Error error = call.run(config_of(GetParam()));
  EXPECT_LE(error.relative, kRelative);
  EXPECT_LE(error.greatest, kGreatest);
}

TEST_P(Fp8Shapes, MatchesFloat64WithScales) {
  Fp8Call call(GetParam(), true);
  const Fp8Error error = call.run(config_of(GetParam()), false);
  EXPECT_LE(error.relative, kRelative);
}

std::vector<AttentionCase> shapes() {
  std::vector<AttentionCase> cases;
  for (const DType dtype : {DType::e4m3, DType::e5m2}) {
    for (const bool causal : {false, true}) {
      for (const std::int64_t d : {64, 128, 256}) {
        const AttentionCase c{.b = 2, .h_q = 4, .h_kv = 2, .d_qk = d, .d_v = d, .dtype = dtype, .causal = causal};
        const auto add = [&](std::int64_t s_q, std::int64_t s_kv, DType o_dtype, Layout layout) {
          cases.push_back(c);
          cases.back().s_q = s_q;
          cases.back().s_kv = s_kv;
          cases.back().o_dtype = o_dtype;
          cases.back().layout = layout;
        };
        add(1024, 1024, DType::bf16, Layout::bshd);
        add(500, 777, DType::f16, Layout::bhsd);
        add(33, 2049, DType::bf16, Layout::bhsd);
        add(130, 100, DType::bf16, Layout::bshd);
        add(1, 300, DType::f16, Layout::bshd);
      }
    }
  }
  const std::pair<std::int64_t, std::int64_t> unequal[] = {{16, 16},  {80, 80},   {96, 96},   {112, 112}, {192, 128},
                                                           {64, 128}, {256, 144}, {160, 176}, {32, 256}};
  for (const auto& [d_qk, d_v] : unequal) {
    cases.push_back({.b = 1,
                     .h_q = 6,
                     .h_kv = 3,
                     .s_q = 400,
                     .s_kv = 600,
                     .d_qk = d_qk,
                     .d_v = d_v,
                     .dtype = DType::e4m3,
                     .causal = d_qk % 32 != 0});
  }
  return cases;
}
INSTANTIATE_TEST_SUITE_P(Shapes, Fp8Shapes, ::testing::ValuesIn(shapes()), [](const auto& test) {
  return to_string(test.param) + "_" + std::string(to_string(test.param.o_dtype));
});

TEST_F(Fp8Forward, RowsWithoutKeysAreZero) {
  for (const std::int64_t s_kv : {0, 40}) {
    Fp8Call call({.b = 2, .h_q = 2, .h_kv = 2, .s_q = 300, .s_kv = s_kv, .dtype = DType::e4m3, .causal = true});
    EXPECT_LE(call.run(config_of(call.device.problem)).relative, kRelative) << s_kv;
  }
}

TEST_F(Fp8Forward, KeysHaveScalesOfTheirOwn) {
  for (const std::int64_t d : {64, 96, 128, 192, 256}) {
    for (const bool causal : {false, true}) {
      Fp8Call call({.b = 2,
                    .h_q = 4,
                    .h_kv = 2,
                    .s_q = 400,
                    .s_kv = 733,
                    .d_qk = d,
                    .d_v = d,
                    .dtype = d == 96 ? DType::e5m2 : DType::e4m3,
                    .causal = causal},
                   true, true);
      AttentionConfig config = config_of(call.device.problem);
      config.key_scales = config.value_scales = true;
      EXPECT_LE(call.run(config).relative, kRelative) << "d " << d << (causal ? ", causal" : "");
    }
  }
}

TEST_F(Fp8Forward, ScalesOfKeysReachThreadsEitherWay) {
  for (const std::int64_t d : {64, 96, 128, 192}) {
    for (const bool precise : {false, true}) {
      for (const char* const fields : {"shared_scales=1", "scales_of_all=1", "shared_scales=1 scales_of_all=1"}) {
        if (precise && std::string(fields) != "shared_scales=1") continue;
        Fp8Call call({.b = 2,
                      .h_q = 4,
                      .h_kv = 2,
                      .s_q = 400,
                      .s_kv = 733,
                      .d_qk = d,
                      .d_v = d,
                      .dtype = DType::e4m3,
                      .causal = d == 128},
                     true, true);
        AttentionConfig config = config_of(call.device.problem);
        config.key_scales = config.value_scales = true;
        config.precise = precise;
        config.kernel = KernelOverride{"sm90_fp8", fields};
        EXPECT_LE(call.run(config).relative, precise ? 0.3 * 0.026 : kRelative) << "d " << d << ", " << fields;
      }
    }
  }
}

// AttentionConfig::precise: at most 0.3 of the error.
TEST_F(Fp8Forward, PreciseIsAsExactAsSixteenBits) {
  for (const std::int64_t d : {64, 96, 128, 192, 256}) {
    for (const bool causal : {false, true}) {
      for (const bool key_scales : {false, true}) {
        Fp8Call call({.b = 2,
                      .h_q = 4,
                      .h_kv = 2,
                      .s_q = 600,
                      .s_kv = 1111,
                      .d_qk = d,
                      .d_v = d,
                      .dtype = d == 96 ? DType::e5m2 : DType::e4m3,
                      .causal = causal},
                     key_scales, key_scales);
        AttentionConfig config = config_of(call.device.problem);
        config.key_scales = config.value_scales = key_scales;
        const double plain = call.run(config).relative;
        config.precise = true;
        const double precise = call.run(config).relative;
        EXPECT_LE(precise, 0.3 * plain) << "d " << d << (causal ? ", causal" : "");
        EXPECT_LE(precise, 0.3 * 0.026) << "d " << d << (causal ? ", causal" : "");
      }
    }
  }
}

TEST_F(Fp8Forward, EveryPreciseTileMatchesFloat64) {
  for (const char* const fields : {"tile_m=64 take_turns=0", "tile_m=128 tile_n=128", "tile_m=192 tile_n=80 ahead=0",
                                   "tile_m=128 tile_n=48 stages=4", "stages=1 q_buffers=1 take_turns=0"}) {
    for (const std::int64_t d : {64, 128}) {
      Fp8Call call({.b = 2,
                    .h_q = 3,
                    .h_kv = 1,
                    .s_q = 700,
                    .s_kv = 900,
                    .d_qk = d,
                    .d_v = d,
                    .dtype = DType::e4m3,
                    .causal = d == 64});
      AttentionConfig config = config_of(call.device.problem);
      config.precise = true;
      config.kernel = KernelOverride{"sm90_fp8", fields};
      EXPECT_LE(call.run(config).relative, 0.3 * 0.026) << fields;
    }
  }
}

/// Requests over pages, and of a contiguous cache.
TEST_F(Fp8Forward, PagesMatchFloat64) {
  for (const std::int64_t page_size :
       {std::int64_t{8}, std::int64_t{16}, std::int64_t{24}, std::int64_t{64}, std::int64_t{256}, kContiguous}) {
    for (const std::int64_t d : {64, 128, 256}) {
      for (const auto& [key_scales, precise] : {std::pair{false, false}, {true, false}, {false, true}, {true, true}}) {
        PagedCase c = fp8_paged_case(page_size, d, !precise);
        c.indexed = key_scales;
        c.key_scales = c.value_scales = key_scales;
        SCOPED_TRACE(testing::PrintToString(c));
        DevicePaged device(c);
        AttentionConfig config = config_of(c);
        config.precise = precise;
        Attention::create(config).forward(device.inputs(), device.outputs());
        EXPECT_LE(relative_error(c, device.host, device.results()), precise ? 0.3 * 0.026 : kRelative);
      }
    }
  }
}

/// Groups whose heads share no whole number of tiles.
TEST_F(Fp8Forward, DecodesOfAnyGroup) {
  for (const std::int64_t group : {3, 5, 7, 10}) {
    for (const std::int64_t d : {64, 128, 256}) {
      Fp8Call call({.b = 2,
                    .h_q = 2 * group,
                    .h_kv = 2,
                    .s_q = 3,
                    .s_kv = 900,
                    .d_qk = d,
                    .d_v = d,
                    .dtype = DType::e4m3,
                    .causal = true});
      EXPECT_LE(call.run(config_of(call.device.problem)).relative, kRelative) << group << ", d " << d;
    }
  }
}

// Few rows over long keys: blocks share these.
TEST_F(Fp8Forward, SplitsMatchFloat64) {
  for (const std::int64_t d : {64, 96, 128, 192, 256}) {
    for (const std::int64_t s_q : {1, 17, 64, 128}) {
      for (const auto& [key_scales, precise] : {std::pair{false, false}, {true, false}, {false, true}, {true, true}}) {
        Fp8Call call({.b = 1,
                      .h_q = 8,
                      .h_kv = 2,
                      .s_q = s_q,
                      .s_kv = 5000,
                      .d_qk = d,
                      .d_v = d,
                      .dtype = d == 96 ? DType::e5m2 : DType::e4m3,
                      .o_dtype = s_q == 17 ? DType::f16 : DType::bf16,
                      .causal = s_q > 1},
                     true, key_scales);
        AttentionConfig config = config_of(call.device.problem);
        config.key_scales = config.value_scales = key_scales;
        config.precise = precise;
        SCOPED_TRACE(
            fmt::format("d {}, {} rows{}{}", d, s_q, key_scales ? ", key scales" : "", precise ? ", precise" : ""));
        EXPECT_LE(call.run(config).relative, precise ? 0.3 * 0.026 : kRelative);
        for (const char* const fields : {"splits=1", "splits=7", "splits=64"}) {
          config.kernel = KernelOverride{"sm90_fp8", fields};
          EXPECT_LE(call.run(config).relative, precise ? 0.3 * 0.026 : kRelative) << fields;
        }
      }
    }
  }
}

TEST_F(Fp8Forward, SplitsOfBytesSaturateNowhere) {
  Fp8Call call({.b = 1,
                .h_q = 4,
                .h_kv = 4,
                .s_q = 5,
                .s_kv = 3000,
                .dtype = DType::e4m3,
                .o_dtype = DType::e4m3,
                .causal = true});
  EXPECT_LE(call.run(config_of(call.device.problem)).relative, 0.06);
}

TEST_F(Fp8Forward, SplitsOfARequestMatchFloat64) {
  for (const std::int64_t page_size : {std::int64_t{16}, std::int64_t{64}, kContiguous}) {
    for (const std::int64_t d : {64, 128, 256}) {
      for (const std::int32_t keys : {4000, 600, 1, 0}) {
        PagedCase c;
        c.attention = {.h_q = 8, .h_kv = 2, .d_qk = d, .d_v = d, .dtype = DType::e4m3, .causal = true};
        c.page_size = page_size;
        c.packed = false;
        c.scaled = c.key_scales = c.value_scales = true;
        c.keys = {keys};
        c.rows = {4};
        SCOPED_TRACE(testing::PrintToString(c));
        DevicePaged device(c);
        AttentionConfig config = config_of(c);
        config.kernel = KernelOverride{"sm90_fp8", "splits=6"};
        Attention::create(config).forward(device.inputs(), device.outputs());
        const AttentionOutputs actual = device.results();
        const AttentionOutputs expected = reference_f64(c, device.host);
        EXPECT_LE(error_of(actual.o, expected.o).relative, kRelative);
      }
    }
  }
}

// Two-level accumulation: 128k keys are as exact as 1k.
TEST_F(Fp8Forward, LongRowsAreAsExactAsShortOnes) {
  const double of_short = error_of_long_rows("sm90_fp8", 1 << 10, "", false);
  const double of_long = error_of_long_rows("sm90_fp8", 1 << 17, "", false);
  RecordProperty("short", fmt::format("{}", of_short));
  RecordProperty("long", fmt::format("{}", of_long));
  EXPECT_LE(of_long, 1.1 * of_short);
  const double mean_of_short = error_of_long_rows("sm90_fp8", 1 << 10, "", true);
  const double mean_of_long = error_of_long_rows("sm90_fp8", 1 << 17, "", true);
  EXPECT_LE(mean_of_long, std::max(1.1 * mean_of_short, 0.004));
  const double single = error_of_long_rows("sm90_fp8", 1 << 17, "single_level=1", true);
  EXPECT_GE(single, 4 * mean_of_long) << "the tensor cores of this GPU keep more bits";
}

TEST_F(Fp8Forward, OutputsOfBytesMatchFloat64) {
  for (const std::int64_t d : {64, 96, 128, 256}) {
    for (const DType dtype : {DType::e4m3, DType::e5m2}) {
      Fp8Call call({.b = 2,
                    .h_q = 4,
                    .h_kv = 2,
                    .s_q = 500,
                    .s_kv = 700,
                    .d_qk = d,
                    .d_v = d,
                    .dtype = dtype,
                    .o_dtype = DType::e4m3,
                    .causal = d % 128 == 0});
      const Fp8Error error = call.run(config_of(call.device.problem));
      EXPECT_LE(error.relative, 0.06) << d;  // O is rounded to e4m3, besides P
      EXPECT_LE(error.greatest, kGreatest + 0x1p-4) << d;
    }
  }
}

/// Sequences of a packed batch against the host's.
TEST_F(Fp8Forward, PackedBatchesMatchTheHost) {
  const std::vector<std::int32_t> cu{0, 700, 700, 701, 1900}, cu_keys{0, 900, 950, 1950, 1950 + 1199};
  for (const std::int64_t d : {64, 128, 256}) {
    for (const auto& [key_scales, precise] : {std::pair{false, false}, {true, false}, {false, true}, {true, true}}) {
      const bool causal = key_scales == (d == 128);
      AttentionCase c{.b = 1,
                      .h_q = 4,
                      .h_kv = 2,
                      .s_q = cu.back(),
                      .s_kv = cu_keys.back(),
                      .d_qk = d,
                      .d_v = d,
                      .dtype = DType::e4m3,
                      .causal = causal,
                      .layout = Layout::bshd};
      DeviceCase device(c);
      AttentionInputs& inputs = device.host_inputs;
      add_scales(c, inputs);
      AttentionCase of_sequences = c;
      of_sequences.b = 4;
      AttentionInputs heads;
      add_scales(of_sequences, heads);
      if (key_scales) {
        add_key_scales(c, heads);
        add_value_scales(c, heads);
      }
      const DeviceTensor q_scale(inputs.q_scale), k_scale(heads.k_scale), v_scale(heads.v_scale);
      const auto bytes_of = [](const std::vector<std::int32_t>& numbers) {
        std::vector<std::byte> bytes(numbers.size() * 4);
        std::memcpy(bytes.data(), numbers.data(), bytes.size());
        return bytes;
      };
      const DeviceBuffer on_cu(bytes_of(cu)), on_keys(bytes_of(cu_keys));
      const auto total = [](const TensorView& view) {
        const std::array<std::int64_t, 3> shape{view.shape[2], view.shape[1], view.shape[3]};
        const std::array<std::int64_t, 3> strides{view.strides[2], view.strides[1], view.strides[3]};
        return TensorView(view.data, view.dtype, shape, strides);
      };
      const auto call = [&](const ForwardInputs& from, const ForwardOutputs& to, const std::int32_t* rows,
                            const std::int32_t* keys, const TensorView(&scales)[3], const Device& where) {
        AttentionConfig config = config_of(c);
        config.varlen = true;
        config.key_scales = config.value_scales = key_scales;
        config.precise = precise;
        config.tune = TunePolicy::off;
        config.host_f64 = true;
        ForwardInputs in{total(from.q), total(from.k), total(from.v)};
        in.sequences.b = 4;
        in.sequences.cu_seqlens_q = rows;
        in.sequences.cu_seqlens_kv = keys;
        in.q_scale = scales[0];
        in.q_scale.rank = 2;
        in.q_scale.shape = {c.h_q, c.s_q};
        in.q_scale.strides = {c.s_q, 1};
        in.k_scale = scales[1];
        in.v_scale = scales[2];
        in.k_scale.rank = in.v_scale.rank = 2;
        if (key_scales) {
          for (TensorView* const scale : {&in.k_scale, &in.v_scale}) {
            scale->shape = {c.h_kv, c.s_kv};
            scale->strides = {c.s_kv, 1};
          }
        }
        Attention::create(config, where)
            .forward(in, {total(to.o), TensorView(to.lse.data, DType::f32, {c.h_q, c.s_q})});
      };
      call(device.inputs(), device.outputs(), static_cast<const std::int32_t*>(on_cu.data()),
           static_cast<const std::int32_t*>(on_keys.data()),
           {q_scale.const_view(), k_scale.const_view(), v_scale.const_view()}, Device::cuda(0));
      driver::check(driver::api().cuCtxSynchronize(), "cuCtxSynchronize");
      device.o.read(device.host_outputs.o);
      device.lse.read(device.host_outputs.lse);
      AttentionOutputs expected = make_outputs(c);
      call({inputs.q.view(), inputs.k.view(), inputs.v.view()}, {expected.o.view(), expected.lse.view()}, cu.data(),
           cu_keys.data(), {inputs.q_scale.view(), heads.k_scale.view(), heads.v_scale.view()}, Device::host());
      EXPECT_LE(error_of(device.host_outputs.o, expected.o).relative, precise ? 0.3 * 0.026 : kRelative) << d;
      EXPECT_LE(lse_max_abs_error(std::as_const(device.host_outputs.lse).view(), expected.lse.view()), kLse) << d;
    }
  }
}

TEST_F(Fp8Forward, EveryTileMatchesFloat64) {
  for (const char* const fields :
       {"tile_m=64", "tile_m=256 tile_n=64", "tile_m=128 ahead=1 take_turns=1", "tile_n=64", "take_turns=1",
        "stages=2 q_buffers=1", "single_level=1 tile_m=128", "tile_n=96 value_columns=32", "tile_m=128 tile_n=160",
        "half_bytes=1", "half_bytes=1 polynomials=1", "polynomials=2 tile_m=128 ahead=1",
        "half_bytes=1 polynomials=2 take_turns=1"}) {
    for (const bool causal : {false, true}) {
      AttentionCase c{.b = 2,
                      .h_q = 3,
                      .h_kv = 1,
                      .s_q = 700,
                      .s_kv = 900,
                      .d_qk = 64,
                      .d_v = 64,
                      .dtype = DType::e4m3,
                      .causal = causal};
      Fp8Call call(c);
      AttentionConfig config = config_of(c);
      config.kernel = KernelOverride{"sm90_fp8", fields};
      EXPECT_LE(call.run(config).relative, kRelative) << fields;
    }
  }
}

TEST_F(Fp8Forward, WindowsFunctionsAndSinks) {
  AttentionCase c{.b = 1, .h_q = 4, .h_kv = 2, .s_q = 600, .s_kv = 700, .d_qk = 128, .d_v = 128, .dtype = DType::e4m3};
  const auto run = [&](const AttentionConfig& config, bool sink) {
    Fp8Call call(c, true);
    const DeviceBuffer logits(std::vector<std::byte>(static_cast<std::size_t>(c.h_q) * sizeof(float)));
    const std::vector<float> zeros(static_cast<std::size_t>(c.h_q), 0.f);
    ForwardInputs in = call.device.inputs();
    in.q_scale = call.scales[0].const_view();
    in.k_scale = Fp8Call::of_heads(call.scales[1]);
    in.v_scale = Fp8Call::of_heads(call.scales[2]);
    if (sink) in.sink = TensorView(static_cast<const void*>(logits.data()), DType::f32, {c.h_q});
    Attention::create(config, Device::cuda(0)).forward(in, call.device.outputs());
    driver::check(driver::api().cuCtxSynchronize(), "cuCtxSynchronize");
    call.device.o.read(call.device.host_outputs.o);
    // The host device computes the same of the same configuration.
    AttentionConfig on_host = config;
    on_host.host_f64 = true;
    AttentionOutputs expected = make_outputs(c);
    ForwardInputs host;
    host.q = std::as_const(call.device.host_inputs.q).view();
    host.k = std::as_const(call.device.host_inputs.k).view();
    host.v = std::as_const(call.device.host_inputs.v).view();
    host.q_scale = std::as_const(call.device.host_inputs.q_scale).view();
    host.k_scale = std::as_const(call.device.host_inputs.k_scale).view();
    host.v_scale = std::as_const(call.device.host_inputs.v_scale).view();
    host.k_scale.rank = host.v_scale.rank = 2;
    if (sink) host.sink = TensorView(static_cast<const void*>(zeros.data()), DType::f32, {c.h_q});
    Attention::create(on_host, Device::host()).forward(host, {expected.o.view(), expected.lse.view()});
    EXPECT_LE(error_of(call.device.host_outputs.o, expected.o).relative, kRelative);
  };
  AttentionConfig window = config_of(c);
  window.causal = true;
  window.window_left = 100;
  run(window, false);
  AttentionConfig cap = config_of(c);
  cap.score = functions::softcap(20);
  run(cap, false);
  AttentionConfig sinks = config_of(c);
  sinks.sink = true;
  run(sinks, true);
}

TEST_F(Fp8Forward, RefusesWhatItHasNot) {
  AttentionConfig config;
  config.head_dim = 128;
  config.dtype = DType::e4m3;
  EXPECT_THROW(Attention::create(AttentionConfig(config), Device::cuda(0)).prepare_backward({.s_q = 64, .s_kv = 64}),
               Error);
  config.kernel = KernelOverride{"sm80"};
  EXPECT_THROW(Attention::create(config, Device::cuda(0)), Error);
  config.kernel = KernelOverride{"sm90_fp8", "value_columns=48"};
  EXPECT_THROW(Attention::create(config, Device::cuda(0)), Error);
}

}  // namespace
}  // namespace fa::test
