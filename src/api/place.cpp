#include "api/place.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "api/validate.hpp"
#include "support/shard_place.hpp"
#include "support/text.hpp"

namespace fa::api {
namespace {

using support::throw_invalid;
using support::throw_unsupported;

constexpr std::int64_t kMostRows = std::int64_t{1} << 29;  // of a call: no sum of a row and a key leaves 32 bits
constexpr std::int64_t kTileRows = 1024;                   // and more than any tile has
constexpr std::int64_t kDropoutStep = 32;                  // rows, and keys, that a call of the generator is shared by

/// One axis of a place: of the call `count` entries, `step` apart, from `begin` on, of `whole` ones.
struct Axis {
  std::string_view begin_name;
  std::int64_t begin;
  std::int64_t count;
  std::string_view whole_name;
  std::int64_t whole;
  std::string_view step_name = {};
  std::int64_t step = 1;
};

void check_range(std::string_view name, std::int64_t value, std::int64_t least) {
  if (value >= least && value <= kMaxLength) return;
  throw_invalid(name, value, fmt::format("{} to {}", least, kMaxLength));
}

void check_axis(const Axis& axis) {
  check_range(axis.begin_name, axis.begin, 0);
  check_range(axis.step_name, axis.step, 1);
  check_range(axis.whole_name, axis.whole, 0);
  const std::int64_t end = support::end_of(axis.begin, axis.count, axis.step);
  const std::int64_t most = axis.whole == 0 ? kMaxLength : axis.whole;
  if (end <= most) return;
  throw_invalid(axis.begin_name, axis.begin,
                fmt::format("a place whose last entry, {}, is within {} = {}", end - 1, axis.whole_name, most));
}

bool has_closed_form_mask(const AttentionConfig& config) noexcept {
  return config.causal || window_of(config.window_left) >= 0 || window_of(config.window_right) >= 0 || config.chunk > 0;
}

/// Behind the last row and key stand those of a tile.
void check_room(std::string_view name, std::int64_t begin, std::int64_t count, std::int64_t step) {
  if (step == 1 || begin + (count + kTileRows) * step <= kMaxLength) return;
  throw_invalid(name, step, fmt::format("a step by which {} more rows, or keys, end before {}", kTileRows, kMaxLength));
}

void check_steps(const AttentionConfig& config, const ShardPlace& place) {
  if (!has_closed_form_mask(config)) return;
  if (place.q_step != place.kv_step) {
    throw_unsupported("place.q_step", place.q_step,
                      fmt::format("place.kv_step = {}, with a causal mask, windows or chunks", place.kv_step));
  }
  if (config.chunk % place.q_step != 0) {
    throw_unsupported("place.q_step", place.q_step, fmt::format("a divisor of chunk = {}", config.chunk));
  }
}

void check_dropout(const ShardPlace& place) {
  const auto check = [](std::string_view name, std::int64_t begin, std::string_view step_name, std::int64_t step) {
    if (step != 1) throw_unsupported(step_name, step, "1 with dropout");
    if (begin % kDropoutStep != 0) {
      throw_unsupported(name, begin, fmt::format("a multiple of {} with dropout", kDropoutStep));
    }
  };
  check("place.q", place.q, "place.q_step", place.q_step);
  check("place.kv", place.kv, "place.kv_step", place.kv_step);
}

/// One that the device reads: the whole says where it may be.
void check_in_memory(const AttentionShape& shape, const ShardPlace& place) {
  constexpr std::string_view kInMemory = "0 with place.begin, where it is read";
  const auto check = [&](std::string_view name, std::int64_t value, std::string_view whole_name, std::int64_t whole,
                         std::int64_t least) {
    if (value != 0) throw_invalid(name, value, kInMemory);
    if (whole < std::max<std::int64_t>(least, 1)) {
      throw_invalid(whole_name, whole, fmt::format("{} and more with place.begin", std::max<std::int64_t>(least, 1)));
    }
  };
  check("place.b", place.b, "place.whole_b", place.whole_b, shape.b);
  check("place.h_q", place.h_q, "place.whole_h_q", place.whole_h_q, shape.h_q);
  check("place.q", place.q, "place.whole_s_q", place.whole_s_q, support::end_of(0, shape.s_q, place.q_step));
  check("place.kv", place.kv, "place.whole_s_kv", place.whole_s_kv, support::end_of(0, shape.s_kv, place.kv_step));
  if (reinterpret_cast<std::uintptr_t>(place.begin) % alignof(std::int64_t) != 0) {
    throw_invalid("place.begin", fmt::format("pointer {}", fmt::ptr(place.begin)), "a multiple of 8 bytes");
  }
}

}  // namespace

void check_has_places(const AttentionConfig& config) {
  constexpr std::string_view kNone = "no place but the default with it";
  if (config.varlen) throw_unsupported("varlen", "true", kNone);
  if (config.page_size != 0) throw_unsupported("page_size", config.page_size, kNone);
  if (config.invariance != Invariance::none) throw_unsupported("invariance", to_string(config.invariance), kNone);
}

std::optional<ShardPlace> checked_place(const AttentionConfig& config, const AttentionShape& shape,
                                        const std::optional<ShardPlace>& given) {
  if (!given || *given == ShardPlace{}) return std::nullopt;
  check_has_places(config);
  ShardPlace place = *given;
  check_axis({"place.b", place.b, shape.b, "place.whole_b", place.whole_b, "", 1});
  check_axis({"place.h_q", place.h_q, shape.h_q, "place.whole_h_q", place.whole_h_q, "", 1});
  check_axis({"place.q", place.q, shape.s_q, "place.whole_s_q", place.whole_s_q, "place.q_step", place.q_step});
  check_axis({"place.kv", place.kv, shape.s_kv, "place.whole_s_kv", place.whole_s_kv, "place.kv_step", place.kv_step});
  if (place.begin != nullptr) check_in_memory(shape, place);
  if (std::max(shape.s_q, shape.s_kv) > kMostRows) {
    throw_invalid("s_q, s_kv", std::max(shape.s_q, shape.s_kv), fmt::format("at most {} with a place", kMostRows));
  }
  const std::int64_t group = shape.h_kv > 0 ? shape.h_q / shape.h_kv : 1;
  if (group > 0 && place.h_q % group != 0) {
    throw_invalid("place.h_q", place.h_q, fmt::format("a multiple of h_q / h_kv = {}", group));
  }
  const support::ShardSizes sizes{shape.b, shape.h_q, shape.s_q, shape.s_kv};
  place = support::resolved(place, sizes);
  // Of one row, or key, the step says nothing.
  if (shape.s_q <= 1) place.q_step = place.kv_step;
  if (shape.s_kv <= 1) place.kv_step = place.q_step;
  if (shape.s_q <= 1 && shape.s_kv <= 1) place.q_step = place.kv_step = 1;
  const bool read = place.begin != nullptr;
  const std::int64_t last_q = place.whole_s_q - support::end_of(0, shape.s_q, place.q_step);
  const std::int64_t last_kv = place.whole_s_kv - support::end_of(0, shape.s_kv, place.kv_step);
  check_room("place.q_step", read ? last_q : place.q, shape.s_q, place.q_step);
  check_room("place.kv_step", read ? last_kv : place.kv, shape.s_kv, place.kv_step);
  check_steps(config, place);
  if (config.dropout > 0) check_dropout(place);
  if (place == support::resolved({}, sizes)) return std::nullopt;
  return place;
}

void check_unscheduled(int max_multiprocessors, const Schedule& schedule) {
  if (max_multiprocessors == 0 || schedule.data == nullptr) return;
  throw_invalid("max_multiprocessors", max_multiprocessors,
                "0 with a schedule, which all multiprocessors take parts of");
}

int checked_multiprocessors(int given) {
  if (given < 0) throw_invalid("max_multiprocessors", given, "1 and more, or 0: all");
  return given;
}

}  // namespace fa::api
