#include "tune/bucket.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cassert>

namespace fa::tune {
namespace {

constexpr int kMostLengths = 32;  // 65536
constexpr int kMostHeads = 12;    // 4096
// Fields of a code, from its lowest bit on. The highest bit is set in every code.
constexpr int kSlotBits = std::bit_width(static_cast<unsigned>(kSlots - 1));
constexpr int kLengths = kMostLengths + 1, kHeads = kMostHeads + 1;
constexpr int kClassBits = std::bit_width(static_cast<unsigned>(kLengths * kLengths * kHeads - 1));
constexpr int kGroupBits = 31;  // of a number of heads
constexpr int kFactBits = 4;
constexpr int kCodeBit = 63;
static_assert(kSlotBits + kClassBits + kGroupBits + kFactBits <= kCodeBit, "fields of a code overlap");
// Multiply-adds and bytes that take a data-centre GPU some 10 us.
constexpr double kWorthMultiplyAdds = 2e9;
constexpr double kWorthBytes = 32e6;
// Some 4 ms, and what a program that fills most of its GPU may still spare.
constexpr double kMostMultiplyAdds = 1.2e12;
constexpr std::int64_t kMostBytes = std::int64_t{1} << 30;
constexpr std::int64_t kEnoughTiles = 1024;
constexpr std::int64_t kTileRows = 128;

int octave(std::int64_t n) noexcept {
  return n <= 1 ? 0 : std::bit_width(static_cast<std::uint64_t>(n - 1));
}

int length_class(std::int64_t n) noexcept {
  const int k = octave(n);
  const bool lower_half = k >= 2 && n <= (std::int64_t{3} << (k - 2));
  return std::min(2 * k - (lower_half ? 1 : 0), kMostLengths);
}

double multiply_adds(const plan::Problem& problem, bool backward) noexcept {
  const double area = double(problem.b) * double(problem.h_q) * double(problem.s_q) * double(problem.s_kv);
  return area * (problem.d_qk + problem.d_v) * (backward ? 2.5 : 1) / (problem.causal ? 2 : 1);
}

std::string length_text(int length_class) {
  return length_class == kMostLengths ? "any" : fmt::format("{}", length_limit(length_class));
}

}  // namespace

std::int64_t length_limit(int length_class) noexcept {
  const int k = (length_class + 1) / 2;
  return length_class % 2 == 0 ? std::int64_t{1} << k : std::int64_t{3} << (k - 2);
}

Bucket bucket_of(const plan::Problem& problem) noexcept {
  return {length_class(problem.s_q), length_class(problem.s_kv), std::min(octave(problem.b * problem.h_q), kMostHeads),
          problem.h_kv == 0 ? 1 : problem.h_q / problem.h_kv};
}

unsigned call_facts(const plan::Problem& problem) noexcept {
  const bool strided = problem.variants != nullptr && problem.variants->strided;
  return (problem.placed ? 1U : 0U) | (strided ? 2U : 0U) | (problem.bounded ? 4U : 0U) |
         (problem.place_in_memory ? 8U : 0U);
}

std::uint64_t bucket_code(const plan::Problem& problem, int slot) noexcept {
  const Bucket bucket = bucket_of(problem);
  std::uint64_t code = 0;
  int used = 0;
  const auto append = [&](std::int64_t value, int bits) {
    assert(value >= 0 && static_cast<int>(std::bit_width(static_cast<std::uint64_t>(value))) <= bits);
    code |= static_cast<std::uint64_t>(value) << used;
    used += bits;
  };
  append(slot, kSlotBits);
  append((bucket.s_q * kLengths + bucket.s_kv) * kHeads + bucket.heads, kClassBits);
  append(bucket.group, kGroupBits);
  append(call_facts(problem), kFactBits);
  return code | std::uint64_t{1} << kCodeBit;
}

std::string bucket_text(const plan::Problem& problem, const plan::KernelSpec& planned) {
  const Bucket bucket = bucket_of(problem);
  const bool top_left = problem.causal && problem.causal_align == CausalAlign::top_left;
  const std::string heads = bucket.heads == kMostHeads ? "any" : fmt::format("{}", std::int64_t{1} << bucket.heads);
  return fmt::format("s_q={} s_kv={} heads={} group={}{} planned: {}", length_text(bucket.s_q),
                     length_text(bucket.s_kv), heads, bucket.group, top_left ? " top_left" : "", canonical(planned));
}

bool worth_tuning(const plan::Problem& problem, bool backward) noexcept {
  return multiply_adds(problem, backward) >= kWorthMultiplyAdds ||
         double(tensor_bytes(problem, backward)) >= kWorthBytes;
}

std::int64_t tensor_bytes(const plan::Problem& problem, bool backward) noexcept {
  const auto element = static_cast<std::int64_t>(size_of(problem.dtype));
  const std::int64_t d = problem.d_qk + problem.d_v;
  const std::int64_t queries = problem.b * problem.h_q * problem.s_q;
  const std::int64_t keys = problem.b * problem.h_kv * problem.s_kv;
  const std::int64_t once = (queries + keys) * d * element + queries * std::int64_t{sizeof(float)};
  return backward ? 2 * once : once;
}

plan::Problem representative(const plan::Problem& problem, bool backward) noexcept {
  plan::Problem result = problem;
  const std::int64_t group = problem.h_kv == 0 ? 1 : problem.h_q / problem.h_kv;
  const auto tiles = [&](const plan::Problem& p) {
    return p.b * p.h_q * ((std::max(p.s_q, backward ? p.s_kv : p.s_q) + kTileRows - 1) / kTileRows);
  };
  const auto too_much = [&](const plan::Problem& p) {
    return multiply_adds(p, backward) > kMostMultiplyAdds || tensor_bytes(p, backward) > kMostBytes;
  };
  while (too_much(result)) {
    plan::Problem less = result;
    if (less.b > 1) {
      less.b = (less.b + 1) / 2;
    } else {
      less.h_kv = (less.h_kv + 1) / 2;
      less.h_q = less.h_kv * group;
    }
    if (tiles(less) < kEnoughTiles || tiles(less) == tiles(result)) break;
    result = less;
  }
  return result;
}

}  // namespace fa::tune
