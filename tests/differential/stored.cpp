#include "differential/stored.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>

#include "reference/convert.hpp"
#include "support/packed_codes.hpp"

namespace fa::differential {
namespace {

struct Row {
  std::int64_t b, h, s;
};

double code_of(DType dtype, double x) {
  if (dtype == DType::i8) return std::clamp(std::nearbyint(x), -127.0, 127.0);
  return static_cast<double>(reference::decode_e4m3(reference::encode_e4m3(x)));
}

/// A power of two by which the row fits, now and then a greater one.
double scale_of(const Tensor& values, Row row, DType dtype, Random& random) {
  double most = 0;
  for (std::int64_t d = 0; d < values.shape()[3]; ++d)
    most = std::max(most, std::abs(values.at(row.b, row.h, row.s, d)));
  const double greatest = dtype == DType::i8 ? 127 : 448;
  // The least step of e4m3, 2^-9 of a scale, has to be one of f16 too.
  const int least = values.dtype() != DType::f16 ? -100 : dtype == DType::i8 ? -24 : -15;
  int exponent = most == 0 ? 0 : std::max(static_cast<int>(std::ceil(std::log2(most / greatest))), least);
  if (random.percent(10)) ++exponent;
  return std::ldexp(random.percent(10) ? -1 : 1, exponent);
}

void store_row(Tensor& values, Row row, DType dtype, Stored& to, Random& random) {
  const std::int64_t d_count = values.shape()[3];
  if (std::isnan(values.at(row.b, row.h, row.s, 0))) return to.scales.set(std::nan(""), row.b, row.h, row.s);
  const double scale = scale_of(values, row, dtype, random);
  to.scales.set(scale, row.b, row.h, row.s);
  for (std::int64_t d = 0; d < d_count; ++d) {
    const double code = code_of(dtype, values.at(row.b, row.h, row.s, d) / scale);
    to.codes.set(code, row.b, row.h, row.s, d);
    values.set(code * scale, row.b, row.h, row.s, d);
  }
}

void store_u4_row(Tensor& values, Row row, int group, Stored& to) {
  const std::int64_t d_count = values.shape()[3];
  std::array<std::byte, 256> bytes{};
  for (std::int64_t first = 0; first < d_count; first += group) {
    double low = HUGE_VAL, high = -HUGE_VAL;
    for (std::int64_t d = first; d < first + group; ++d) {
      low = std::min(low, values.at(row.b, row.h, row.s, d));
      high = std::max(high, values.at(row.b, row.h, row.s, d));
    }
    const bool nan = std::isnan(values.at(row.b, row.h, row.s, first));
    const double scale = nan ? std::nan("") : to.scales.rounded((high - low) / 15), offset = nan ? scale : low;
    to.scales.set(scale, row.b, row.h, row.s, 2 * (first / group));
    to.scales.set(offset, row.b, row.h, row.s, 2 * (first / group) + 1);
    for (std::int64_t d = first; d < first + group && !nan; ++d) {
      const double steps = scale == 0 ? 7 : std::nearbyint((values.at(row.b, row.h, row.s, d) - offset) / scale);
      const double code = std::clamp(steps, 0.0, 15.0);
      test::set_packed_code(bytes.data(), d, static_cast<int>(code));
      values.set(scale * code + offset, row.b, row.h, row.s, d);
    }
  }
  for (std::int64_t i = 0; i < d_count / 2; ++i) {
    to.codes.set(static_cast<double>(bytes[static_cast<std::size_t>(i)]), row.b, row.h, row.s, i);
  }
}

/// Of f16: what a code may be rounded up to is finite.
void limit(Tensor& values, Row row) {
  constexpr double kMost = 57344;
  if (values.dtype() != DType::f16) return;
  for (std::int64_t d = 0; d < values.shape()[3]; ++d) {
    const double x = values.at(row.b, row.h, row.s, d);
    if (std::abs(x) > kMost) values.set(std::copysign(kMost, x), row.b, row.h, row.s, d);
  }
}

}  // namespace

Layout with_aligned_rows(const Layout& like) {
  Layout layout;
  layout.order = like.order;
  layout.row_padding = like.row_padding / 16 * 16;
  layout.negative = like.negative;
  return layout;
}

Stored store(Tensor& values, const std::optional<DType>& dtype, int group_size, const Layout& layout, Random& random) {
  if (!dtype) return {};
  const auto& shape = values.shape();
  const bool u4 = *dtype == DType::u4x2;
  const int group = group_size == 0 ? 32 : group_size;
  Stored result;
  result.codes =
      Tensor(*dtype, {shape[0], shape[1], shape[2], u4 ? shape[3] / 2 : shape[3]}, with_aligned_rows(layout));
  if (u4) {
    result.scales =
        Tensor(values.dtype(), {shape[0], shape[1], shape[2], 2 * shape[3] / group}, with_aligned_rows(layout));
  } else {
    result.scales = Tensor(DType::f32, {shape[0], shape[1], shape[2]}, layout);
  }
  for (std::int64_t b = 0; b < shape[0]; ++b) {
    for (std::int64_t h = 0; h < shape[1]; ++h) {
      for (std::int64_t s = 0; s < shape[2]; ++s) {
        limit(values, {b, h, s});
        u4 ? store_u4_row(values, {b, h, s}, group, result) : store_row(values, {b, h, s}, *dtype, result, random);
      }
    }
  }
  return result;
}

}  // namespace fa::differential
