// What has to be in memory after an append, beside what is.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "reference/elements.hpp"
#include "reference/u4.hpp"
#include "support/append_case.hpp"
#include "support/half_unit.hpp"
#include "support/packed_codes.hpp"

namespace fa::test {
namespace {

using At = std::array<std::int64_t, 4>;

/// What a kernel's cosines, sines and products may be off by, relative to the numbers that it turns (docs/numerics.md),
/// with the rounding of its result to f32.
constexpr double kComputed = 0x1.2p-22;

}  // namespace

double AppendData::number(AppendPart part, const std::vector<std::byte>& bytes, At place) const {
  double value = 0;
  const TensorView one(bytes.data() + offset(part, place), views_[static_cast<std::size_t>(part)].dtype, {1});
  reference::load(one, 0, 1, 1, &value);
  return value;
}

/// Cosine and sine, by an angle in long double.
std::array<double, 2> AppendData::turn(std::int64_t position, std::int64_t pair) const {
  if (c_.table) {
    const TensorView& view = views_[static_cast<std::size_t>(AppendPart::cos)];
    const At place{std::clamp<std::int64_t>(position, 0, view.shape[0] - 1), pair};
    return {number(AppendPart::cos, at(AppendPart::cos).bytes, place),
            number(AppendPart::sin, at(AppendPart::sin).bytes, place)};
  }
  const long double exponent = -2.0L * static_cast<long double>(pair) / static_cast<long double>(c_.rotary_dims);
  const long double angle = static_cast<long double>(position) * std::pow(static_cast<long double>(c_.base), exponent);
  return {static_cast<double>(std::cos(angle)), static_cast<double>(std::sin(angle))};
}

AppendData::Wanted AppendData::wanted(AppendPart from, At source, const Row& row, std::int64_t column) const {
  const std::vector<std::byte>& before = at(from).bytes;
  At in = source;
  in[3] = column;
  const double x = number(from, before, in);
  const std::int64_t first = first_turned(from);
  column -= first;
  if (from == AppendPart::v || column < 0 || column >= c_.rotary_dims) return {x, 0};
  const std::int64_t pairs = c_.rotary_dims / 2;
  const bool second = c_.interleaved ? column % 2 != 0 : column >= pairs;
  At other = in;
  other[3] = first + (c_.interleaved ? column ^ 1 : second ? column - pairs : column + pairs);
  const auto [cosine, sine] = turn(row.position, c_.interleaved ? column / 2 : column % pairs);
  const double y = number(from, before, other);
  // Angles of the reference are doubles.
  const double angles = c_.table ? 0 : 0x1p-50 * std::abs(static_cast<double>(row.position));
  return {x * cosine + (second ? y : -y) * sine, (std::abs(x) + std::abs(y)) * (kComputed + angles)};
}

/// Holds a row of 8 bits to what it was made of, and its scale to the greatest of them.
std::string AppendData::compare_stored_row(AppendPart from, At source, AppendPart to, At target, const Row& row,
                                           const std::array<std::vector<std::byte>, kAppendParts>& after,
                                           std::array<std::vector<std::byte>, kAppendParts>& expected) const {
  const AppendPart scales = from == AppendPart::k ? AppendPart::k_scale : AppendPart::v_scale;
  const auto of_scales = static_cast<std::size_t>(scales);
  const std::int64_t d = views_[static_cast<std::size_t>(from)].shape[3];
  At scale_at = target;
  scale_at[3] = 0;
  const double scale = number(scales, after[of_scales], scale_at);
  if (!c_.scales_given) {
    std::memcpy(expected[of_scales].data() + offset(scales, scale_at),
                after[of_scales].data() + offset(scales, scale_at), sizeof(float));
  }
  return compare_codes(from, source, to, target, row, 0, d, scale, after, expected);
}

std::string AppendData::compare_codes(AppendPart from, At source, AppendPart to, At target, const Row& row,
                                      std::int64_t first, std::int64_t count, double scale,
                                      const std::array<std::vector<std::byte>, kAppendParts>& after,
                                      std::array<std::vector<std::byte>, kAppendParts>& expected) const {
  const bool shared = to == AppendPart::v_cache && at(to).bytes.empty();
  const auto memory = static_cast<std::size_t>(shared ? AppendPart::k_cache : to);
  const double greatest = dtype_of(to) == DType::e4m3 ? 448 : 127;
  double most = 0, computed = 0;
  for (std::int64_t i = first; i < first + count; ++i) {
    const Wanted one = wanted(from, source, row, i);
    most = std::max(most, std::abs(one.value));
    computed = std::max(computed, one.computed);
  }
  if (!c_.scales_given && !(std::abs(scale - most / greatest) <= (computed + most * 0x1p-22) / greatest)) {
    return fmt::format("the scale of [{}] is {}, not {}", fmt::join(target, ", "), scale, most / greatest);
  }
  for (std::int64_t i = first; i < first + count; ++i) {
    At out = target;
    out[3] = i;
    expected[memory][offset(to, out)] = after[memory][offset(to, out)];
    const double value = std::clamp(wanted(from, source, row, i).value, -greatest * scale, greatest * scale);
    const double magnitude = scale == 0 ? 0 : std::abs(value) / scale;
    const double half =
        dtype_of(to) == DType::i8 ? 0.5 : std::ldexp(1.0, std::max(magnitude > 0 ? std::ilogb(magnitude) : -6, -6) - 4);
    const double got = number(to, after[memory], out) * scale;
    const double allowed = computed + scale * (half + 0x1p-20 * greatest);
    if (std::abs(got - value) <= allowed) continue;
    return fmt::format("[{}] of a row at position {} is {} by a scale of {}, not {} +- {}", fmt::join(out, ", "),
                       row.position, got, scale, value, allowed);
  }
  return {};
}

/// Holds a latent row to what it was made of: groups of codes with scales, and columns of bf16 behind them.
std::string AppendData::compare_latent_row(At source, At target, const Row& row,
                                           const std::array<std::vector<std::byte>, kAppendParts>& after,
                                           std::array<std::vector<std::byte>, kAppendParts>& expected) const {
  constexpr auto kFrom = AppendPart::k, kTo = AppendPart::k_cache;
  constexpr auto kMemory = static_cast<std::size_t>(kTo);
  const std::size_t start = offset(kTo, target), rotary = start + kLatentCodes + 16;
  std::memcpy(expected[kMemory].data() + rotary, after[kMemory].data() + rotary, kLatentBytes - kLatentCodes - 16);
  for (std::int64_t group = 0; group < kLatentCodes / kLatentGroup; ++group) {
    const std::size_t scale_at = start + kLatentCodes + 4 * static_cast<std::size_t>(group);
    float scale = 0;
    std::memcpy(&scale, after[kMemory].data() + scale_at, sizeof scale);
    if (!c_.scales_given) std::memcpy(expected[kMemory].data() + scale_at, &scale, sizeof scale);
    std::string problem = compare_codes(kFrom, source, kTo, target, row, group * kLatentGroup, kLatentGroup,
                                        static_cast<double>(scale), after, expected);
    if (!problem.empty()) return problem;
  }
  for (std::int64_t i = 0; i < c_.d_qk - kLatentCodes; ++i) {
    const Wanted one = wanted(kFrom, source, row, kLatentCodes + i);
    const bool copied = i >= c_.rotary_dims && c_.dtype == DType::bf16;
    const double allowed = copied ? 0 : one.computed + half_unit(DType::bf16, std::abs(one.value) + one.computed, 2);
    double got = 0;
    reference::load(TensorView(after[kMemory].data() + rotary, DType::bf16, {c_.d_qk - kLatentCodes}), i, 1, 1, &got);
    if (std::abs(got - one.value) <= allowed) continue;
    return fmt::format("column {} of bf16 of a row at position {} is {}, not {} +- {}", i, row.position, got, one.value,
                       allowed);
  }
  return {};
}

/// Holds the groups of a row of 4 bits to what they were made of: their scales and offsets, and each code.
std::string AppendData::compare_u4_row(AppendPart from, At source, AppendPart to, At target, const Row& row,
                                       const std::array<std::vector<std::byte>, kAppendParts>& after,
                                       std::array<std::vector<std::byte>, kAppendParts>& expected) const {
  const bool shared = to == AppendPart::v_cache && at(to).bytes.empty();
  const auto memory = static_cast<std::size_t>(shared ? AppendPart::k_cache : to);
  const AppendPart pairs = from == AppendPart::k ? AppendPart::k_scale : AppendPart::v_scale;
  const auto of_pairs = static_cast<std::size_t>(pairs);
  const std::int64_t d = views_[static_cast<std::size_t>(from)].shape[3];
  const std::size_t start = offset(to, target);
  std::memcpy(expected[memory].data() + start, after[memory].data() + start, static_cast<std::size_t>(d / 2));
  for (std::int64_t first = 0; first < d; first += c_.group_size) {
    double low = HUGE_VAL, high = -HUGE_VAL, computed = 0;
    for (std::int64_t i = first; i < first + c_.group_size; ++i) {
      const Wanted one = wanted(from, source, row, i);
      low = std::min(low, one.value);
      high = std::max(high, one.value);
      computed = std::max(computed, one.computed);
    }
    At pair = target;
    pair[3] = 2 * (first / c_.group_size);
    const double scale = number(pairs, after[of_pairs], pair);
    if (!c_.scales_given) {
      std::memcpy(expected[of_pairs].data() + offset(pairs, pair), after[of_pairs].data() + offset(pairs, pair), 4);
    }
    ++pair[3];
    const double zero = number(pairs, after[of_pairs], pair);
    if (!c_.scales_given) {
      const double offset_slack = computed + half_unit(c_.dtype, std::abs(low) + computed, 2);
      const double step = (high - zero) / 15;
      if (!(std::abs(zero - low) <= offset_slack)) {
        return fmt::format("the offset of [{}] at {} is {}, not {}", fmt::join(target, ", "), first, zero, low);
      }
      const double units = c_.extreme ? 2 : 1;  // rounded down where code 15 would be infinite
      if (!(std::abs(scale - step) <=
            computed + units * half_unit(c_.dtype, std::abs(step) + computed, 2) + step * 0x1p-20)) {
        return fmt::format("the scale of [{}] at {} is {}, not {}", fmt::join(target, ", "), first, scale, step);
      }
    }
    for (std::int64_t i = first; i < first + c_.group_size; ++i) {
      const double value = std::clamp(wanted(from, source, row, i).value, zero, zero + 15 * scale);
      if (!c_.scales_given && !std::isfinite(reference::round_to(c_.dtype, zero + 15 * scale))) {
        return fmt::format("code 15 of [{}] at {} is not finite", fmt::join(target, ", "), first);
      }
      const int code = packed_code(after[memory].data() + start, i);
      const double allowed = computed + scale * (0.5 + 0x1p-16);
      if (std::abs(code * scale + zero - value) <= allowed) continue;
      return fmt::format("code {} of column {} of [{}] at position {} is {}, not {} +- {}", code, i,
                         fmt::join(target, ", "), row.position, code * scale + zero, value, allowed);
    }
  }
  return {};
}

/// Holds a row to what it was made of, and marks it in `expected` as seen.
std::string AppendData::compare_row(AppendPart from, At source, AppendPart to, At target, const Row& row,
                                    const std::array<std::vector<std::byte>, kAppendParts>& after,
                                    std::array<std::vector<std::byte>, kAppendParts>& expected) const {
  if (c_.latent && to == AppendPart::k_cache) return compare_latent_row(source, target, row, after, expected);
  if (dtype_of(to) == DType::u4x2) return compare_u4_row(from, source, to, target, row, after, expected);
  if (size_of(dtype_of(to)) == 1) return compare_stored_row(from, source, to, target, row, after, expected);
  const bool shared = to == AppendPart::v_cache && at(to).bytes.empty();
  const auto memory = static_cast<std::size_t>(shared ? AppendPart::k_cache : to);
  const std::vector<std::byte>& before = at(from).bytes;
  const std::size_t size = size_of(c_.dtype);
  const std::int64_t first = first_turned(from), end = first + (from == AppendPart::v ? 0 : c_.rotary_dims);
  const std::int64_t d = views_[static_cast<std::size_t>(from)].shape[3];
  for (std::int64_t i = 0; i < d; ++i) {
    At in = source, out = target;
    in[3] = out[3] = i;
    const std::byte* const found = after[memory].data() + offset(to, out);
    std::memcpy(expected[memory].data() + offset(to, out), found, size);
    if (i < first || i >= end) {
      if (std::memcmp(found, before.data() + offset(from, in), size) == 0) continue;
      return fmt::format("{} [{}] is not a copy", at(to).name, fmt::join(out, ", "));
    }
    const Wanted one = wanted(from, source, row, i);
    const double allowed = one.computed + half_unit(c_.dtype, std::abs(one.value) + one.computed, 2);
    const double got = number(to, after[memory], out);
    if (std::abs(got - one.value) <= allowed) continue;
    return fmt::format("[{}] of a row at position {} is {}, not {} +- {}", fmt::join(out, ", "), row.position, got,
                       one.value, allowed);
  }
  return {};
}

std::string AppendData::judge(const std::array<std::vector<std::byte>, kAppendParts>& after) const {
  std::array<std::vector<std::byte>, kAppendParts> expected{};
  for (std::size_t i = 0; i < kAppendParts; ++i) expected[i] = buffers_[i].bytes;
  const std::int64_t s_new = views_[static_cast<std::size_t>(AppendPart::k)].shape[2];
  for (std::size_t token = 0; token < rows_.size(); ++token) {
    const Row& row = rows_[token];
    const auto number = static_cast<std::int64_t>(token);
    for (std::int64_t h = 0; row.known && h < c_.h_q; ++h) {
      const At place{number / s_new, h, number % s_new, 0};
      const AppendPart to = c_.in_place ? AppendPart::q : AppendPart::q_out;
      if (std::string problem = compare_row(AppendPart::q, place, to, place, row, after, expected); !problem.empty()) {
        return "q: " + problem;
      }
    }
    for (std::int64_t h = 0; row.known && row.page >= 0 && h < c_.h_kv; ++h) {
      const At from{number / s_new, h, number % s_new, 0}, to{row.page, h, row.row, 0};
      for (const auto& [source, target] :
           {std::pair{AppendPart::k, AppendPart::k_cache}, {AppendPart::v, AppendPart::v_cache}}) {
        if (c_.latent && source == AppendPart::v) continue;
        if (std::string problem = compare_row(source, from, target, to, row, after, expected); !problem.empty()) {
          return (source == AppendPart::k ? "k: " : "v: ") + problem;
        }
      }
    }
  }
  for (std::size_t i = 0; i < kAppendParts; ++i) {
    if (buffers_[i].written && after[i] != expected[i]) {
      const auto differs = std::ranges::mismatch(after[i], expected[i]);
      return fmt::format("byte {} of {} has changed", differs.in1 - after[i].begin(), buffers_[i].name);
    }
  }
  return {};
}

}  // namespace fa::test
