// Forwards of q and k in i8 on a GPU against float64 of the very codes, and what makes codes against the host device.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gpu/device_case.hpp"
#include "plan/arch.hpp"

namespace fa::test {
namespace {

// docs/numerics.md, "i8": scores are exact, so that P's rounding is what is left of the errors of 8-bit floats.
constexpr double kRelative = 0.04;
constexpr double kPrecise = 0.3 * 0.026;
constexpr double kLse = 2e-4;

double relative_error(const HostTensor& actual, const HostTensor& expected) {
  const TensorView t = expected.view();
  double squares = 0, of_all = 0;
  for (std::int64_t i = 0; i < t.shape[0] * t.shape[1] * t.shape[2]; ++i) {
    const std::int64_t b = i / t.shape[2] / t.shape[1], h = i / t.shape[2] % t.shape[1], s = i % t.shape[2];
    for (std::int64_t d = 0; d < t.shape[3]; ++d) {
      const double error = actual.at(b, h, s, d) - expected.at(b, h, s, d);
      if (std::isnan(error)) return HUGE_VAL;
      squares += error * error;
      of_all += expected.at(b, h, s, d) * expected.at(b, h, s, d);
    }
  }
  return squares == 0 ? 0 : std::sqrt(squares / of_all);
}

TensorView of_heads(TensorView view) {
  if (view.shape[2] == 1) view.rank = 2;
  return view;
}

struct Int8Call {
  explicit Int8Call(const AttentionCase& c, bool key_scales = false) : device(c) {
    AttentionInputs& inputs = device.host_inputs;
    add_scales(c, inputs);
    if (key_scales) {
      add_key_scales(c, inputs);
      add_value_scales(c, inputs);
    }
    for (const HostTensor* t : {&inputs.q_scale, &inputs.k_scale, &inputs.v_scale, &inputs.row_bias})
      more.emplace_back(*t);
  }

  ForwardInputs inputs() const {
    ForwardInputs in = device.inputs();
    in.q_scale = more[0].const_view();
    in.k_scale = of_heads(more[1].const_view());
    in.v_scale = of_heads(more[2].const_view());
    in.row_bias = more[3].const_view();
    return in;
  }
  ForwardInputs host() const {
    const AttentionInputs& from = device.host_inputs;
    ForwardInputs in{from.q.view(), from.k.view(), from.v.view()};
    in.q_scale = from.q_scale.view();
    in.k_scale = of_heads(from.k_scale.view());
    in.v_scale = of_heads(from.v_scale.view());
    in.row_bias = from.row_bias.view();
    return in;
  }

  /// The relative error of O beside the host device in double; LSE is held to its bound.
  double run(AttentionConfig config, const std::vector<float>& sink = {}) {
    const DeviceBuffer logits(std::vector<std::byte>(reinterpret_cast<const std::byte*>(sink.data()),
                                                     reinterpret_cast<const std::byte*>(sink.data() + sink.size())));
    ForwardInputs in = inputs(), on_host = host();
    if (!sink.empty()) {
      in.sink = TensorView(static_cast<const void*>(logits.data()), DType::f32, {device.problem.h_q});
      on_host.sink = TensorView(static_cast<const void*>(sink.data()), DType::f32, {device.problem.h_q});
    }
    Attention::create(config, Device::cuda(0)).forward(in, device.outputs());
    driver::check(driver::api().cuCtxSynchronize(), "cuCtxSynchronize");
    device.o.read(device.host_outputs.o);
    device.lse.read(device.host_outputs.lse);
    EXPECT_TRUE(device.o.buffer.guards_intact() && device.lse.buffer.guards_intact());
    AttentionOutputs expected = make_outputs(device.problem);
    config.host_f64 = true;
    Attention::create(config, Device::host()).forward(on_host, {expected.o.view(), expected.lse.view()});
    EXPECT_LE(lse_max_abs_error(std::as_const(device.host_outputs.lse).view(), expected.lse.view()), kLse);
    return relative_error(device.host_outputs.o, expected.o);
  }

  DeviceCase device;
  std::vector<DeviceTensor> more;
};

class Int8Forward : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (!IsSkipped() && driver::device_info(0).arch != plan::parse_arch("sm_90a")) {
      GTEST_SKIP() << "no kernels of i8 for this GPU";
    }
  }
};

TEST_F(Int8Forward, HeadDimsScalesAndPrecision) {
  for (const std::int64_t d : {16, 64, 96, 128, 192, 256}) {
    for (const bool causal : {false, true}) {
      for (const auto& [key_scales, precise] : {std::pair{false, false}, {true, false}, {false, true}, {true, true}}) {
        SCOPED_TRACE("d " + std::to_string(d) + (causal ? ", causal" : "") + (key_scales ? ", scales of keys" : "") +
                     (precise ? ", precise" : ""));
        Int8Call call({.b = 2,
                       .h_q = 4,
                       .h_kv = 2,
                       .s_q = 600,
                       .s_kv = 1111,
                       .d_qk = d,
                       .d_v = d,
                       .dtype = DType::i8,
                       .o_dtype = DType::f16,
                       .causal = causal},
                      key_scales);
        AttentionConfig config = config_of(call.device.problem);
        config.o_dtype = DType::f16;
        config.key_scales = config.value_scales = key_scales;
        config.precise = precise;
        EXPECT_LE(call.run(config), precise ? kPrecise : kRelative);
      }
    }
  }
}

// Few rows over long keys: the bias of a row is in the sums of each split, and a sink joins once.
TEST_F(Int8Forward, SplitsSeeBiasesOfRowsAndSinks) {
  for (const std::int64_t d : {64, 128, 256}) {
    for (const std::int64_t s_q : {1, 40, 120}) {
      for (const bool key_scales : {false, true}) {
        SCOPED_TRACE("d " + std::to_string(d) + ", rows " + std::to_string(s_q) +
                     (key_scales ? ", scales of keys" : ""));
        Int8Call call(
            {.h_q = 4, .h_kv = 2, .s_q = s_q, .s_kv = 4000, .d_qk = d, .d_v = d, .dtype = DType::i8, .causal = true},
            key_scales);
        AttentionConfig config = config_of(call.device.problem);
        config.key_scales = config.value_scales = key_scales;
        EXPECT_LE(call.run(config), kRelative);
        config.sink = true;
        EXPECT_LE(call.run(config, {0.5F, -1, 2, 9}), kRelative);
        config.window_left = 2500;
        config.kernel = KernelOverride{"sm90_fp8", "splits=5"};
        EXPECT_LE(call.run(config, {0.5F, -1, 2, 9}), kRelative);
      }
    }
  }
}

TEST_F(Int8Forward, EveryTileMatchesTheHost) {
  for (const char* const fields :
       {"tile_m=64 take_turns=0", "tile_m=256 tile_n=64", "tile_m=128 ahead=1 take_turns=1", "take_turns=0",
        "stages=2 q_buffers=1", "single_level=1 tile_m=128", "tile_n=96 value_columns=32", "tile_m=128 tile_n=160",
        "half_bytes=1", "half_bytes=1 polynomials=1 tile_m=128"}) {
    SCOPED_TRACE(fields);
    Int8Call call({.b = 2,
                   .h_q = 3,
                   .h_kv = 1,
                   .s_q = 700,
                   .s_kv = 900,
                   .d_qk = 64,
                   .d_v = 64,
                   .dtype = DType::i8,
                   .causal = true});
    AttentionConfig config = config_of(call.device.problem);
    config.kernel = KernelOverride{"sm90_fp8", fields};
    EXPECT_LE(call.run(config), kRelative);
  }
}

TEST_F(Int8Forward, FunctionsWindowsAndSinksSeeBiasesOfRows) {
  for (const bool key_scales : {false, true}) {
    const AttentionCase c{
        .b = 1, .h_q = 4, .h_kv = 2, .s_q = 600, .s_kv = 700, .d_qk = 128, .d_v = 128, .dtype = DType::i8};
    AttentionConfig config = config_of(c);
    config.key_scales = config.value_scales = key_scales;
    AttentionConfig window = config;
    window.causal = true;
    window.window_left = 100;
    EXPECT_LE(Int8Call(c, key_scales).run(window), kRelative);
    AttentionConfig cap = config;
    cap.score = functions::softcap(20);
    EXPECT_LE(Int8Call(c, key_scales).run(cap), kRelative);
    config.sink = true;
    EXPECT_LE(Int8Call(c, key_scales).run(config, {0.5F, -1, 2, 0}), kRelative);
  }
}

// The greatest sums that there are: 256 products of codes of either sign, -128 among them.
TEST_F(Int8Forward, SumsOfAnySizeAreExact) {
  for (const bool key_scales : {false, true}) {
    AttentionCase c{.b = 1,
                    .h_q = 1,
                    .h_kv = 1,
                    .s_q = 64,
                    .s_kv = 256,
                    .d_qk = 256,
                    .d_v = 64,
                    .dtype = DType::i8,
                    .o_dtype = DType::f16,
                    .scale = 0x1p-17F};
    DeviceCase device(c);
    for (std::int64_t s = 0; s < 256; ++s) {
      for (std::int64_t d = 0; d < 256; ++d) {
        if (s < 64) device.host_inputs.q.set(0, 0, s, d, s % 2 == 0 ? -128 : 127);
        device.host_inputs.k.set(0, 0, s, d, d < 2 * s ? -128 : 127);
      }
    }
    // HostTensor::set rounds to at most 127: -128 by its bits.
    const auto lowest = [](HostTensor& tensor) {
      for (std::byte& code : tensor.bytes()) {
        if (static_cast<std::int8_t>(code) == -127) code = std::byte{0x80};
      }
    };
    lowest(device.host_inputs.q);
    lowest(device.host_inputs.k);
    const DeviceTensor q(device.host_inputs.q), k(device.host_inputs.k);
    const std::vector<float> ones(256, 1.F);
    const DeviceBuffer scales(std::vector<std::byte>(reinterpret_cast<const std::byte*>(ones.data()),
                                                     reinterpret_cast<const std::byte*>(ones.data() + 256)));
    AttentionConfig config = config_of(c);
    config.o_dtype = DType::f16;
    config.precise = true;
    config.key_scales = key_scales;
    ForwardInputs in{q.const_view(), k.const_view(), device.v.const_view()};
    if (key_scales) in.k_scale = TensorView(static_cast<const void*>(scales.data()), DType::f32, {1, 1, 256});
    Attention::create(config, Device::cuda(0)).forward(in, device.outputs());
    driver::check(driver::api().cuCtxSynchronize(), "cuCtxSynchronize");
    device.o.read(device.host_outputs.o);
    device.lse.read(device.host_outputs.lse);
    AttentionInputs plain = std::move(device.host_inputs);
    plain.q_scale = plain.k_scale = plain.v_scale = {};
    const AttentionOutputs expected = reference_f64(c, plain);
    EXPECT_LE(relative_error(device.host_outputs.o, expected.o), kPrecise);
    EXPECT_LE(lse_max_abs_error(std::as_const(device.host_outputs.lse).view(), expected.lse.view()), kLse);
  }
}

/// Tensors of 16 or 32 bits and what they become, on the host and on the device.
struct Quantized {
  Quantized(const AttentionCase& c, DType codes, const AttentionInputs& from)
      : q(codes, c.b, c.h_q, c.s_q, c.d_qk, c.layout),
        k(codes, c.b, c.h_kv, c.s_kv, c.d_qk, c.layout),
        v(DType::e4m3, c.b, c.h_kv, c.s_kv, c.d_v, c.layout),
        q_scale(DType::f32, c.b, c.h_q, c.s_q),
        k_scale(DType::f32, c.b, c.h_kv, c.s_kv),
        v_scale(DType::f32, c.b, c.h_kv, c.s_kv),
        mean(DType::f32, c.b, c.h_kv, c.d_qk),
        bias(DType::f32, c.b, c.h_q, c.s_q) {
    for (const HostTensor* t : all()) device.emplace_back(*t);
    for (const HostTensor* t : {&from.q, &from.k, &from.v}) sources.emplace_back(*t);
  }

  std::vector<HostTensor*> all() { return {&q, &k, &v, &q_scale, &k_scale, &v_scale, &mean, &bias}; }
  QuantizeInputs inputs(bool smooths) const {
    QuantizeInputs in;
    in.q = sources[0].const_view(), in.k = sources[1].const_view(), in.v = sources[2].const_view();
    in.q_codes = device[0].view(), in.k_codes = device[1].view(), in.v_codes = device[2].view();
    in.q_scale = device[3].view(), in.k_scale = device[4].view(), in.v_scale = device[5].view();
    if (smooths) in.k_mean = device[6].view(), in.row_bias = device[7].view();
    return in;
  }
  void read() {
    driver::check(driver::api().cuCtxSynchronize(), "cuCtxSynchronize");
    const std::vector<HostTensor*> to = all();
    for (std::size_t i = 0; i < to.size(); ++i) {
      EXPECT_TRUE(device[i].buffer.guards_intact());
      device[i].read(*to[i]);
    }
  }
  HostTensor q, k, v, q_scale, k_scale, v_scale, mean, bias;
  std::vector<DeviceTensor> device, sources;
};

class QuantizeOnGpu : public GpuTest {};

TEST_F(QuantizeOnGpu, MakesWhatTheHostMakes) {
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
    for (const std::int64_t d : {16, 48, 64, 128, 256}) {
      SCOPED_TRACE(std::string(to_string(dtype)) + " d " + std::to_string(d));
      AttentionCase c{.b = 2, .h_q = 4, .h_kv = 2, .s_q = 333, .s_kv = 2500, .d_qk = d, .d_v = d, .dtype = dtype};
      c.layout = d == 64 ? Layout::bshd : Layout::bhsd;
      if (dtype == DType::bf16 && driver::device_info(0).arch.major < 8) continue;
      AttentionInputs from = make_inputs(c);
      const DType codes = d == 128 ? DType::e4m3 : DType::i8;
      Quantized actual(c, codes, from), again(c, codes, from), expected(c, codes, from);
      AttentionConfig config;
      config.head_dim = static_cast<int>(d);
      config.dtype = codes;
      const Attention attention = Attention::create(config, Device::cuda(0));
      attention.quantize(actual.inputs(true));
      attention.quantize(again.inputs(true));
      actual.read();
      again.read();
      EXPECT_EQ(actual.mean.bytes(), again.mean.bytes());
      EXPECT_EQ(actual.bias.bytes(), again.bias.bytes());
      EXPECT_EQ(actual.k.bytes(), again.k.bytes());
      QuantizeInputs on_host;
      on_host.q = from.q.view(), on_host.k = from.k.view(), on_host.v = from.v.view();
      on_host.q_codes = expected.q.view(), on_host.k_codes = expected.k.view(), on_host.v_codes = expected.v.view();
      on_host.q_scale = expected.q_scale.view(), on_host.k_scale = expected.k_scale.view();
      on_host.v_scale = expected.v_scale.view();
      on_host.k_mean = actual.mean.view();  // the very mean: codes are the same then
      on_host.row_bias = expected.bias.view();
      on_host.mean_given = true;
      Attention::create(config, Device::host()).quantize(on_host);
      EXPECT_EQ(actual.q.bytes(), expected.q.bytes());
      EXPECT_EQ(actual.k.bytes(), expected.k.bytes());
      EXPECT_EQ(actual.v.bytes(), expected.v.bytes());
      EXPECT_EQ(actual.q_scale.bytes(), expected.q_scale.bytes());
      EXPECT_EQ(actual.k_scale.bytes(), expected.k_scale.bytes());
      for (std::int64_t i = 0; i < 2 * 2 * d; ++i) {
        double sum = 0;
        for (std::int64_t j = 0; j < c.s_kv; ++j) sum += from.k.at(i / d / 2, i / d % 2, j, i % d);
        EXPECT_NEAR(actual.mean.at(i / d / 2, i / d % 2, i % d), sum / 2500, 1e-6);
      }
      for (std::int64_t s = 0; s < c.s_q; ++s) EXPECT_NEAR(actual.bias.at(1, 3, s), expected.bias.at(1, 3, s), 1e-4);
    }
  }
}

struct Errors {
  double o, lse;
};

/// The relative error of O and the greatest of the log-sum-exps, beside float64 of what was there before any rounding.
Errors errors_of_all(DType codes, bool smooths, bool precise, const AttentionCase& c, const AttentionInputs& from) {
  Quantized data(c, codes, from);
  AttentionConfig config;
  config.head_dim = 128;
  config.dtype = codes;
  config.key_scales = config.value_scales = true;
  config.precise = precise;
  config.o_dtype = DType::f16;
  const Attention attention = Attention::create(config, Device::cuda(0));
  attention.quantize(data.inputs(smooths));
  ForwardInputs in{data.device[0].const_view(), data.device[1].const_view(), data.device[2].const_view()};
  in.q_scale = data.device[3].const_view(), in.k_scale = data.device[4].const_view();
  in.v_scale = data.device[5].const_view();
  if (smooths) in.row_bias = data.device[7].const_view();
  HostTensor o(DType::f16, c.b, c.h_q, c.s_q, 128, c.layout), lse(DType::f32, c.b, c.h_q, c.s_q);
  const DeviceTensor device_o(o), device_lse(lse);
  attention.forward(in, {device_o.view(), device_lse.view()});
  driver::check(driver::api().cuCtxSynchronize(), "cuCtxSynchronize");
  device_o.read(o);
  device_lse.read(lse);
  const AttentionOutputs expected = reference_f64(c, from);
  return {relative_error(o, expected.o), lse_max_abs_error(std::as_const(lse).view(), expected.lse.view())};
}

TEST_F(Int8Forward, SmoothedCodesAreMoreExactThanEightBitFloats) {
  const AttentionCase c{
      .b = 1, .h_q = 2, .h_kv = 1, .s_q = 256, .s_kv = 4096, .d_qk = 128, .d_v = 128, .dtype = DType::bf16};
  for (const int kind : {0, 1, 2}) {
    AttentionInputs from = make_inputs(c);
    std::mt19937 random(7);
    for (HostTensor* const tensor : {&from.q, &from.k}) {
      const TensorView view = tensor->view();
      for (std::int64_t i = 0; i < view.elements(); ++i) {
        const std::int64_t d = i % 128, s = i / 128 % view.shape[2], h = i / 128 / view.shape[2];
        const double x = tensor->at(0, h, s, d);
        if (kind == 1 && random() % 1000 == 0) tensor->set(0, h, s, d, 10 * x);
        if (kind == 2 && tensor == &from.k && d % 32 == 7) tensor->set(0, h, s, d, x + 12);
      }
    }
    for (const bool precise : {false, true}) {
      const Errors fp8 = errors_of_all(DType::e4m3, false, precise, c, from);
      const Errors int8 = errors_of_all(DType::i8, true, precise, c, from);
      const std::string name = std::to_string(kind) + (precise ? "_precise" : "");
      RecordProperty("fp8_" + name, std::to_string(fp8.o));
      RecordProperty("int8_" + name, std::to_string(int8.o));
      EXPECT_LT(int8.o, fp8.o) << name;
      EXPECT_LT(int8.lse, (kind == 1 ? 1.5 : 1) * fp8.lse)
          << name;  // an outlier makes the step of its row's codes long
    }
  }
}

TEST_F(Int8Forward, PackedBatchesMatchTheHost) {
  const std::vector<std::int32_t> cu{0, 700, 700, 701, 1900}, cu_keys{0, 900, 950, 1950, 3149};
  AttentionCase c{.b = 1,
                  .h_q = 4,
                  .h_kv = 2,
                  .s_q = 1900,
                  .s_kv = 3149,
                  .d_qk = 128,
                  .d_v = 128,
                  .dtype = DType::i8,
                  .causal = true,
                  .layout = Layout::bshd};
  Int8Call call(c, true);
  AttentionConfig config = config_of(c);
  config.varlen = config.key_scales = config.value_scales = true;
  config.host_f64 = true;
  const auto bytes = [](const std::vector<std::int32_t>& from) {
    const auto* const begin = reinterpret_cast<const std::byte*>(from.data());
    return std::vector<std::byte>(begin, begin + from.size() * sizeof(std::int32_t));
  };
  const DeviceBuffer device_cu(bytes(cu)), device_cu_keys(bytes(cu_keys));
  const auto rows = [](TensorView view) {  // [1, h, s, d] as [total, h, d]
    view = view.swap_axes(1, 2);
    for (std::size_t axis = 0; axis < 3; ++axis)
      view.shape[axis] = view.shape[axis + 1], view.strides[axis] = view.strides[axis + 1];
    view.rank = 3;
    return view;
  };
  const auto of_rows = [](TensorView view) {  // [1, h, s] as [h, total]
    for (std::size_t axis = 0; axis < 2; ++axis)
      view.shape[axis] = view.shape[axis + 1], view.strides[axis] = view.strides[axis + 1];
    view.rank = 2;
    return view;
  };
  const auto run = [&](ForwardInputs in, const ForwardOutputs& out, const std::int32_t* q, const std::int32_t* kv,
                       Device device) {
    ForwardInputs packed{rows(in.q), rows(in.k), rows(in.v)};
    packed.q_scale = of_rows(in.q_scale), packed.k_scale = of_rows(in.k_scale), packed.v_scale = of_rows(in.v_scale);
    packed.row_bias = of_rows(in.row_bias);
    packed.sequences = {.b = 4, .cu_seqlens_q = q, .cu_seqlens_kv = kv};
    Attention::create(config, device).forward(packed, {rows(out.o), of_rows(out.lse)});
  };
  run(call.inputs(), call.device.outputs(), static_cast<const std::int32_t*>(device_cu.data()),
      static_cast<const std::int32_t*>(device_cu_keys.data()), Device::cuda(0));
  driver::check(driver::api().cuCtxSynchronize(), "cuCtxSynchronize");
  call.device.o.read(call.device.host_outputs.o);
  call.device.lse.read(call.device.host_outputs.lse);
  AttentionOutputs expected = make_outputs(c);
  run(call.host(), {expected.o.view(), expected.lse.view()}, cu.data(), cu_keys.data(), Device::host());
  EXPECT_LE(relative_error(call.device.host_outputs.o, expected.o), kRelative);
  EXPECT_LE(lse_max_abs_error(std::as_const(call.device.host_outputs.lse).view(), expected.lse.view()), kLse);
}

}  // namespace
}  // namespace fa::test
