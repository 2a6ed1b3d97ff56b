#include "differential/bytes.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>

#include "reference/convert.hpp"

namespace fa::differential {
namespace {

using Group = std::array<std::int64_t, 3>;
constexpr std::int64_t kBlockRows = 16;

double greatest_of(DType dtype) {
  return dtype == DType::i8 ? 127 : dtype == DType::e4m3 ? 448 : 57344;
}

double code_of(DType dtype, double x) {
  if (dtype == DType::i8) return std::isnan(x) ? 127 : std::clamp(std::nearbyint(x), -127.0, 127.0);
  if (std::isnan(x)) return x;
  const double most = greatest_of(dtype), held = std::clamp(x, -most, most);
  return static_cast<double>(dtype == DType::e4m3 ? reference::decode_e4m3(reference::encode_e4m3(held))
                                                  : reference::decode_e5m2(reference::encode_e5m2(held)));
}

/// The sequence of each row of a packed tensor; rows of none count for the first.
std::vector<std::int64_t> sequences_of_rows(const std::vector<std::int32_t>& cu, std::int64_t rows) {
  std::vector<std::int64_t> result(static_cast<std::size_t>(rows), 0);
  for (std::size_t i = 0; i + 1 < cu.size(); ++i) {
    std::fill(result.begin() + cu[i], result.begin() + cu[i + 1], static_cast<std::int64_t>(i));
  }
  return result;
}

class Storage {
 public:
  /// `of_rows`: whether scales are [b, h, s], whatever shares one.
  Storage(Tensor& values, DType dtype, ScaleOf of, bool of_rows, std::vector<std::int64_t> sequences,
          std::int64_t count, const Layout& layout)
      : values_(values), dtype_(dtype), of_(of), of_rows_(of_rows), sequences_(std::move(sequences)) {
    const auto& shape = values.shape();
    stored_.codes = Tensor(dtype, shape, layout);
    if (of == ScaleOf::none) return;
    Layout scales;
    scales.order = layout.order;
    if (of == ScaleOf::tensor) scales.expanded = 7;
    stored_.scales = of_rows ? Tensor(DType::f32, {shape[0], shape[1], shape[2]}, scales)
                             : Tensor(DType::f32, {count, shape[1], 1}, scales);
  }

  Stored make(Random& random) {
    each_row([&](std::int64_t b, std::int64_t h, std::int64_t s) {
      double& most = scale_[group_of(b, h, s)];
      for (std::int64_t d = 0; d < values_.shape()[3]; ++d) {
        const double x = std::abs(values_.at(b, h, s, d));
        if (!std::isnan(x)) most = std::max(most, x);
      }
    });
    for (auto& [group, scale] : scale_) scale = of_ == ScaleOf::none ? 1 : draw(scale, random);
    each_row([&](std::int64_t b, std::int64_t h, std::int64_t s) { store(b, h, s); });
    return std::move(stored_);
  }

 private:
  template <class Visit>
  void each_row(const Visit& visit) const {
    for (std::int64_t b = 0; b < values_.shape()[0]; ++b) {
      for (std::int64_t h = 0; h < values_.shape()[1]; ++h) {
        for (std::int64_t s = 0; s < values_.shape()[2]; ++s) visit(b, h, s);
      }
    }
  }

  std::int64_t sequence_of(std::int64_t b, std::int64_t s) const {
    return sequences_.empty() ? b : sequences_[static_cast<std::size_t>(s)];
  }

  Group group_of(std::int64_t b, std::int64_t h, std::int64_t s) const {
    switch (of_) {
      case ScaleOf::none:
      case ScaleOf::tensor:
        return {0, 0, 0};
      case ScaleOf::head:
        return {sequence_of(b, s), h, 0};
      case ScaleOf::block:
        return {b, h, s / kBlockRows};
      case ScaleOf::row:
        return {b, h, s};
    }
    return {};
  }

  /// By which the greatest fits, or now and then does not; seldom negative, or 0.
  double draw(double most, Random& random) const {
    const double spare = random.percent(15) ? 0.5 : 1 + random.uniform();
    const double scale = most == 0 ? 1 : most / greatest_of(dtype_) * spare;
    if (random.percent(4)) return 0;
    return static_cast<double>(static_cast<float>(random.percent(12) ? -scale : scale));
  }

  void store(std::int64_t b, std::int64_t h, std::int64_t s) {
    double scale = scale_.at(group_of(b, h, s));
    const bool nan = std::isnan(values_.at(b, h, s, 0));
    if (nan && dtype_ == DType::i8 && of_ == ScaleOf::row) scale = std::nan("");
    if (stored_.scales.defined()) {
      if (of_rows_) {
        stored_.scales.set(scale, b, h, s);
      } else {
        stored_.scales.set(scale, sequence_of(b, s), h, 0);
      }
    }
    for (std::int64_t d = 0; d < values_.shape()[3]; ++d) {
      const double x = values_.at(b, h, s, d);
      const double code = code_of(dtype_, scale == 0 || std::isnan(scale) ? 100 * x : x / scale);
      stored_.codes.set(code, b, h, s, d);
      values_.set(code * scale, b, h, s, d);
    }
  }

  Tensor& values_;
  DType dtype_;
  ScaleOf of_;
  bool of_rows_;
  std::vector<std::int64_t> sequences_;
  std::map<Group, double> scale_;  // at first the greatest magnitude
  Stored stored_;
};

}  // namespace

void store_bytes(const Configuration& c, const Call& call, Random& random, Inputs& in) {
  const AttentionConfig& config = c.config;
  const bool packed = config.varlen;
  const DType v_dtype = config.dtype == DType::i8 ? DType::e4m3 : config.dtype;
  const std::int64_t count = call.sequences(packed);
  const auto of = [&](const std::vector<std::int32_t>& cu, std::int64_t rows) {
    return packed ? sequences_of_rows(cu, rows) : std::vector<std::int64_t>{};
  };
  const bool of_q_rows = packed || (call.q_scale != ScaleOf::head && call.q_scale != ScaleOf::tensor);
  in.stored_q =
      Storage(in.q, config.dtype, call.q_scale, of_q_rows, of(call.cu_q, call.s_q), count, call.q).make(random);
  in.stored_k = Storage(in.k, config.dtype, call.k_scale, config.key_scales, of(call.cu_kv, call.s_kv), count, call.k)
                    .make(random);
  in.stored_v =
      Storage(in.v, v_dtype, call.v_scale, config.value_scales, of(call.cu_kv, call.s_kv), count, call.v).make(random);
  if (!call.row_bias) return;
  in.row_bias = Tensor(DType::f32, {call.b, call.h_q, call.s_q}, {});
  for (std::int64_t b = 0; b < call.b; ++b) {
    for (std::int64_t h = 0; h < call.h_q; ++h) {
      for (std::int64_t s = 0; s < call.s_q; ++s) in.row_bias.set(3 * random.normal(), b, h, s);
    }
  }
}

}  // namespace fa::differential
