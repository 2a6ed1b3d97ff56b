#ifndef FA_TESTS_GPU_FP8_CASE_HPP_
#define FA_TESTS_GPU_FP8_CASE_HPP_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "gpu/device_case.hpp"
#include "gpu/paged_case.hpp"

namespace fa::test {

// docs/numerics.md, "8-bit floats": the root mean square of the error over that of O, for standard normal inputs, and
// the greatest error over the greatest |O|.
inline constexpr double kRelative = 0.04;
inline constexpr double kGreatest = 1.0 / 16;
inline constexpr double kLse = 5e-3;

struct Fp8Error {
  double relative = 0;
  double greatest = 0;
};

inline Fp8Error error_of(const HostTensor& actual, const HostTensor& expected) {
  const TensorView t = expected.view();
  double squares = 0, of_all = 0, most = 0, greatest = 0;
  for (std::int64_t b = 0; b < t.shape[0]; ++b) {
    for (std::int64_t h = 0; h < t.shape[1]; ++h) {
      for (std::int64_t s = 0; s < t.shape[2]; ++s) {
        for (std::int64_t d = 0; d < t.shape[3]; ++d) {
          const double o = expected.at(b, h, s, d);
          const double error = std::abs(actual.at(b, h, s, d) - o);
          if (std::isnan(error)) return {std::numeric_limits<double>::infinity(), 0};
          squares += error * error;
          of_all += o * o;
          most = std::max(most, error);
          greatest = std::max(greatest, std::abs(o));
        }
      }
    }
  }
  if (squares == 0) return {};
  return {std::sqrt(squares / of_all), most / greatest};
}

struct Fp8Call {
  explicit Fp8Call(const AttentionCase& c, bool scaled = false, bool key_scales = false) : device(c) {
    if (!scaled) return;
    add_scales(c, device.host_inputs);
    if (key_scales) {
      add_key_scales(c, device.host_inputs);
      add_value_scales(c, device.host_inputs);
    }
    for (const HostTensor* scale :
         {&device.host_inputs.q_scale, &device.host_inputs.k_scale, &device.host_inputs.v_scale}) {
      scales.emplace_back(*scale);
    }
  }

  Fp8Error run(const AttentionConfig& config, bool has_lse = true) {
    ForwardInputs in = device.inputs();
    if (!scales.empty()) {
      in.q_scale = scales[0].const_view();
      in.k_scale = of_heads(scales[1]);
      in.v_scale = of_heads(scales[2]);
    }
    ForwardOutputs out = device.outputs();
    if (!has_lse) out.lse = {};
    Attention::create(config, Device::cuda(0)).forward(in, out);
    driver::check(driver::api().cuCtxSynchronize(), "cuCtxSynchronize");
    device.o.read(device.host_outputs.o);
    device.lse.read(device.host_outputs.lse);
    const AttentionOutputs expected = reference_f64(device.problem, device.host_inputs);
    EXPECT_TRUE(device.o.buffer.guards_intact() && device.lse.buffer.guards_intact());
    if (has_lse) {
      EXPECT_LE(lse_max_abs_error(std::as_const(device.host_outputs.lse).view(), expected.lse.view()), kLse * unit());
    }
    return error_of(device.host_outputs.o, expected.o);
  }

  /// What scales make of logits that are as great as those of standard normal inputs, whose sums are cut off in
  /// proportion (docs/numerics.md, "8-bit floats").
  double unit() const {
    double product = 1;
    if (scales.empty()) return product;
    for (const HostTensor* scale : {&device.host_inputs.q_scale, &device.host_inputs.k_scale}) {
      const auto [b, h, s, _] = scale->view().shape;
      double greatest = 0;
      for (std::int64_t row = 0; row < b * h * s; ++row) {
        greatest = std::max(greatest, std::abs(scale->at(row / s / h, row / s % h, row % s, 0)));
      }
      product *= greatest;
    }
    return std::max(product, 1.0);
  }

  static TensorView of_heads(const DeviceTensor& scale) {
    TensorView view = scale.const_view();
    if (view.shape[2] == 1) view.rank = 2;
    return view;
  }

  DeviceCase device;
  std::vector<DeviceTensor> scales;
};

/// The root mean square of the error over that of O, of rows over so many keys.
inline double error_of_long_rows(const char* family, std::int64_t keys, const char* fields, bool positive) {
  AttentionCase c{.s_q = 128, .s_kv = keys, .d_qk = 128, .d_v = 128, .dtype = DType::e4m3};
  Fp8Call call(c);
  if (positive) {  // equal weights, and values of one sign: what the tensor cores lose adds up
    fill(call.device.host_inputs.q, {0, c.s_q}, 0);
    HostTensor& v = call.device.host_inputs.v;
    for (std::int64_t s = 0; s < keys; ++s) {
      for (std::int64_t d = 0; d < c.d_v; ++d) v.set(0, 0, s, d, std::abs(v.at(0, 0, s, d)));
    }
    call.device.q.buffer.write(call.device.host_inputs.q.bytes());
    call.device.v.buffer.write(v.bytes());
  }
  AttentionConfig config = config_of(c);
  config.kernel = KernelOverride{family, std::string(fields) + " splits=1"};
  return call.run(config).relative;
}

/// Requests of many rows, of few and of none; keys of many pages, of one, and none.
inline PagedCase fp8_paged_case(std::int64_t page_size, std::int64_t d, bool packed) {
  PagedCase c;
  c.attention = {.h_q = 8,
                 .h_kv = 2,
                 .d_qk = d,
                 .d_v = d,
                 .dtype = d == 64 ? DType::e5m2 : DType::e4m3,
                 .causal = d != 128,
                 .layout = d == 128 ? Layout::bhsd : Layout::bshd};
  c.page_size = page_size;
  c.packed = packed;
  c.scaled = true;
  c.keys = {700, 33, 0, 1500, 1};
  c.rows = packed ? std::vector<std::int32_t>{700, 5, 1, 300, 1} : std::vector<std::int32_t>(5, 70);
  return c;
}

/// The root mean square of the error over that of O, of all rows of requests over pages.
inline double relative_error(const PagedCase& c, const PagedData& data, const AttentionOutputs& actual) {
  const AttentionOutputs expected = reference_f64(c, data);
  const std::int64_t d = c.attention.d_v;
  double squares = 0, of_all = 0;
  for (std::size_t i = 0; i < c.rows.size(); ++i) {
    const std::int64_t first = c.packed ? data.cu_q[i] : 0;
    const std::int64_t b = c.packed ? 0 : static_cast<std::int64_t>(i);
    for (std::int64_t at = 0; at < c.rows[i] * c.attention.h_q * d; ++at) {
      const std::int64_t h = at / d % c.attention.h_q, s = first + at / d / c.attention.h_q;
      const double o = expected.o.at(b, h, s, at % d), error = actual.o.at(b, h, s, at % d) - o;
      squares += error * error;
      of_all += o * o;
    }
  }
  return std::sqrt(squares / of_all);
}

}  // namespace fa::test

#endif  // FA_TESTS_GPU_FP8_CASE_HPP_
