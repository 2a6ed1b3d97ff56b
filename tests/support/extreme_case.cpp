#include "support/extreme_case.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "reference/geometry.hpp"
#include "support/softmax_judge.hpp"

namespace fa::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

double greatest_code(DType dtype) {
  return dtype == DType::e4m3 ? 448 : 57344;
}

/// Sets every element by its indices.
template <class Value>
void set_all(HostTensor& tensor, const Value& value) {
  const TensorView view = tensor.view();
  for (std::int64_t b = 0; b < view.shape[0]; ++b) {
    for (std::int64_t h = 0; h < view.shape[1]; ++h) {
      for (std::int64_t s = 0; s < view.shape[2]; ++s) {
        for (std::int64_t d = 0; d < (view.rank == 4 ? view.shape[3] : 1); ++d) {
          tensor.set(b, h, s, d, value(b, h, s, d));
        }
      }
    }
  }
}

double sign_of(std::int64_t a, std::int64_t b) {
  return (a * 7 + b * 3 + a / 5) % 2 == 0 ? 1 : -1;
}

/// Keys that the first half of the rows do not see, in a causal case aligned at the bottom right.
void spoil_late_keys(const AttentionCase& c, AttentionInputs& inputs, double value) {
  fill(inputs.k, {c.s_kv - c.s_q / 2, c.s_q / 2}, value);
}

void subnormal_scores(const AttentionCase& c, AttentionInputs& inputs) {
  const double least = c.dtype == DType::f16 ? 0x1p-24 : 0x1p-133;
  set_all(inputs.q, [&](auto, auto, std::int64_t s, std::int64_t d) { return sign_of(s, d) * 3 * least; });
}

void subnormal_values(const AttentionCase& c, AttentionInputs& inputs) {
  const double least = c.dtype == DType::f16 ? 0x1p-24 : 0x1p-133;
  set_all(inputs.v, [&](auto, auto, std::int64_t s, std::int64_t d) { return sign_of(s, d) * 5 * least; });
}

/// All scores are one great number: O is the mean of what a row sees.
void equal_great_scores(const AttentionCase& c, AttentionInputs& inputs) {
  const double great = c.dtype == DType::f16 ? 65504 : 0x1p50;
  set_all(inputs.q, [&](auto, auto, auto, auto) { return great; });
  set_all(inputs.k, [&](auto, auto, auto, auto) { return great; });
}

/// One key outweighs all others by more than any float holds.
void one_great_key(const AttentionCase& c, AttentionInputs& inputs) {
  const double great = c.dtype == DType::f16 ? 4096 : 0x1p40;
  set_all(inputs.q, [&](auto, auto, auto, auto) { return great; });
  set_all(inputs.k, [&](auto, auto, std::int64_t s, auto) { return s == 1 ? great : -great; });
}

/// Of keys that one float hardly tells apart: their scores are 4 apart near 2^25, with a scale that has all 24 digits.
/// Which keys are ahead differs from tile to tile.
void neighbouring_great_scores(const AttentionCase& c, AttentionInputs& inputs) {
  const double sign = c.softmax_scale() < 0 ? -1 : 1;
  set_all(inputs.q, [&](auto, auto, auto, std::int64_t d) { return d == 0 ? 4096.0 : d == 1 ? 4.0 : 0.0; });
  set_all(inputs.k, [&](auto, auto, std::int64_t s, std::int64_t d) {
    return sign * (d == 0 ? 8192.0 : d == 1 ? static_cast<double>(s % 3 - (s / 16) % 4) : 0.0);
  });
}

/// Keys of no score beside others of great ones below 0, in whole tiles.
void far_beside_near(const AttentionCase& c, AttentionInputs& inputs) {
  const double sign = c.softmax_scale() < 0 ? -1 : 1;
  const double great = c.dtype == DType::f16 ? 65504 : 0x1p50;
  set_all(inputs.q, [&](auto, auto, auto, auto) { return great; });
  set_all(inputs.k, [&](auto, auto, std::int64_t s, auto) { return s / 16 % 4 == 1 ? 0 : -sign * great; });
}

void great_values(const AttentionCase& c, AttentionInputs& inputs) {
  const double great = c.dtype == DType::f16 ? 30000 : 0x1p120;
  set_all(inputs.v, [&](auto, auto, std::int64_t s, std::int64_t d) { return sign_of(s, d) * great; });
}

void nan_in_late_keys(const AttentionCase& c, AttentionInputs& inputs) {
  spoil_late_keys(c, inputs, kNan);
}
void infinity_in_late_keys(const AttentionCase& c, AttentionInputs& inputs) {
  spoil_late_keys(c, inputs, kInfinity);
}

/// Rows 3, 6, 9 and so on have a NaN; nobody else may see it.
void nan_in_rows(const AttentionCase& c, AttentionInputs& inputs) {
  for (std::int64_t b = 0; b < c.b; ++b) {
    for (std::int64_t h = 0; h < c.h_q; ++h) {
      for (std::int64_t s = 3; s < c.s_q; s += 3) inputs.q.set(b, h, s, s % c.d_qk, kNan);
    }
  }
}

float two_thirds(const AttentionCase&) {
  return 2.f / 3;
}

float great_scale(const AttentionCase&) {
  return 0x1p100f;
}

// ---- 8 bits ----

void scale_all(const AttentionCase& c, AttentionInputs& inputs, double q, double k, double v) {
  add_scales(c, inputs);
  set_all(inputs.q_scale, [&](auto, auto, auto, auto) { return q; });
  set_all(inputs.k_scale, [&](auto, auto, auto, auto) { return k; });
  set_all(inputs.v_scale, [&](auto, auto, auto, auto) { return v; });
}

/// Sums of products of whole numbers are exact.
void great_scales(const AttentionCase& c, AttentionInputs& inputs) {
  scale_all(c, inputs, 0x1p30, 0x1p20, 1);
  make_whole(inputs.q, 2);
  make_whole(inputs.k, 2);
}

void all_greatest(const AttentionCase& c, AttentionInputs& inputs) {
  for (HostTensor* tensor : {&inputs.q, &inputs.k, &inputs.v}) {
    set_all(*tensor, [&](auto, auto, auto, auto) { return greatest_code(c.dtype); });
  }
}

void greatest_of_both_signs(const AttentionCase& c, AttentionInputs& inputs) {
  const double great = greatest_code(c.dtype);
  set_all(inputs.q, [&](auto, auto, std::int64_t s, auto) { return s % 2 == 0 ? great : -great; });
  set_all(inputs.k, [&](auto, auto, std::int64_t s, auto) { return s % 3 == 0 ? great : -great; });
}

void least_codes(const AttentionCase& c, AttentionInputs& inputs) {
  const double least = c.dtype == DType::e4m3 ? 0x1p-9 : 0x1p-16;
  for (HostTensor* tensor : {&inputs.q, &inputs.k, &inputs.v}) {
    set_all(*tensor, [&](auto, auto, std::int64_t s, std::int64_t d) { return sign_of(s, d) * least; });
  }
}

}  // namespace

const std::vector<Extreme>& extremes() {
  static const std::vector<Extreme> list{
      {"subnormal_scores", subnormal_scores},
      {"subnormal_values", subnormal_values},
      {"equal_great_scores", equal_great_scores},
      {"equal_great_scores_times_2_100",
       [](const AttentionCase& c, AttentionInputs& inputs) {
         set_all(inputs.q, [](auto, auto, auto, auto) { return 3.0; });
         set_all(inputs.k, [](auto, auto, auto, auto) { return 2.0; });
         (void)c;
       },
       great_scale},
      {"one_great_key", one_great_key},
      {"neighbouring_great_scores", neighbouring_great_scores, two_thirds},
      {"far_beside_near", far_beside_near},
      {"great_values", great_values},
      {"nan_in_late_keys", nan_in_late_keys, nullptr, true},
      {"infinity_in_late_keys", infinity_in_late_keys, nullptr, true},
      {"nan_in_rows", nan_in_rows},
  };
  return list;
}

const std::vector<Extreme>& fp8_extremes() {
  static const std::vector<Extreme> list{
      {"zero_scales_of_q", [](const auto& c, auto& inputs) { scale_all(c, inputs, 0, 1, 1); }},
      {"zero_scales_of_k", [](const auto& c, auto& inputs) { scale_all(c, inputs, 1, 0, 1); }},
      {"zero_scales_of_v", [](const auto& c, auto& inputs) { scale_all(c, inputs, 1, 1, 0); }},
      {"subnormal_scales_of_q", [](const auto& c, auto& inputs) { scale_all(c, inputs, 0x1p-140, 1, 1); }},
      {"subnormal_scales_of_k", [](const auto& c, auto& inputs) { scale_all(c, inputs, 1, 0x1p-149, 1); }},
      {"subnormal_scales_of_v", [](const auto& c, auto& inputs) { scale_all(c, inputs, 1, 1, 0x1p-140); }},
      {"great_scales", great_scales},
      {"great_and_small_scales", [](const auto& c, auto& inputs) { scale_all(c, inputs, 0x1p100, 0x1p-100, 1); }},
      {"great_scales_of_v", [](const auto& c, auto& inputs) { scale_all(c, inputs, 1, 1, 0x1p100); }},
      {"all_greatest", all_greatest},
      {"greatest_of_both_signs", greatest_of_both_signs},
      {"least_codes", least_codes},
      {"nan_in_late_keys", nan_in_late_keys, nullptr, true},
      {"nan_in_rows", nan_in_rows},
  };
  return list;
}

double extreme_error(const AttentionCase& c, const AttentionInputs& inputs, const AttentionOutputs& expected,
                     const AttentionOutputs& actual, const ExtremeBounds& bounds) {
  double worst = 0;
  const auto hold = [&](double got, double wanted, double allowed) {
    if (std::isfinite(wanted)) {
      const double error = std::abs(got - wanted);
      worst = std::isfinite(error) ? std::max(worst, error / allowed) : kInfinity;
    } else if (std::isinf(wanted) ? got != wanted : std::isfinite(got)) {
      worst = kInfinity;
    }
  };
  const std::int64_t group = c.h_q / c.h_kv;
  for (std::int64_t b = 0; b < c.b; ++b) {
    for (std::int64_t h = 0; h < c.h_q; ++h) {
      double scale = 1;
      if (!inputs.v_scale.bytes().empty()) scale = std::abs(inputs.v_scale.at(b, h / group, 0));
      double largest = 0;
      for (std::int64_t s = 0; s < c.s_kv; ++s) {
        for (std::int64_t d = 0; d < c.d_v; ++d) {
          const double value = std::abs(inputs.v.at(b, h / group, s, d));
          if (std::isfinite(value)) largest = std::max(largest, value);
        }
      }
      for (std::int64_t s = 0; s < c.s_q; ++s) {
        for (std::int64_t d = 0; d < c.d_v; ++d) {
          hold(actual.o.at(b, h, s, d), expected.o.at(b, h, s, d),
               std::max(bounds.relative * scale * largest, bounds.least));
        }
        const double lse = expected.lse.at(b, h, s);
        hold(actual.lse.at(b, h, s), lse, bounds.lse * (std::isfinite(lse) ? 16 + std::abs(lse) : 16));
        if (std::isinf(worst)) return worst;
      }
    }
  }
  return worst;
}

void put_equal_scores(AttentionInputs& inputs, double great, int sign) {
  set_all(inputs.q, [&](auto, auto, auto, std::int64_t d) { return d == 0 ? great : 0; });
  set_all(inputs.k, [&](auto, auto, auto, std::int64_t d) { return d == 0 ? sign * great : 1; });
}

void make_extreme(VariantCase& c) {
  const auto set = [](NamedTensor& tensor, auto value) {
    TensorView view = tensor.view();
    view.data = tensor.bytes.data();
    for (std::int64_t i = 0; i < tensor.elements(); ++i) {
      reference::store_element(view, i, value(i));
    }
  };
  for (NamedTensor& capture : c.captures) {
    if (capture.name == "slope") set(capture, [](std::int64_t) { return 1e20; });
    const std::int64_t keys = capture.shape.back();
    if (capture.name != "bias") continue;
    set(capture, [keys](std::int64_t i) { return i % keys % 3 == 1 ? -3e38 : 0.25 * static_cast<double>(i % 5); });
  }
  if (c.config.sink) set(c.sink, [](std::int64_t i) { return i == 0 ? kNan : 0.5; });
}

}  // namespace fa::test
