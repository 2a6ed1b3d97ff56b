#include "emulator/sm90_backward_cases.hpp"

#include <array>
#include <cstdint>
#include <vector>

namespace emulator {
namespace {

/// Sequences of one row, of none, of several tiles, without keys, in part unused, and behind some rows of none.
Sequences sequences_of(std::size_t index) {
  const std::vector<std::int32_t> rows[kSm90BackwardCases] = {{5, 0, 140, 1, 64}, {90, 12, 70}, {150}};
  const std::vector<std::int32_t> keys[kSm90BackwardCases] = {{9, 20, 135, 3, 0}, {70, 0, 150}, {130}};
  Sequences result;
  const auto sum = [](const std::vector<std::int32_t>& lengths, std::int32_t first) {
    std::vector<std::int32_t> sums{first};
    for (const std::int32_t length : lengths) sums.push_back(sums.back() + length);
    return sums;
  };
  result.cu_q = sum(rows[index], index == 1 ? 3 : 0);
  result.cu_kv = sum(keys[index], index == 1 ? 5 : 0);
  if (index == 1) {
    result.used_q = {33, 0, 67};
    result.used_kv = {50, 0, 135};
  }
  return result;
}

}  // namespace

PackedCase sm90_backward_case(const Sm90BackwardVariant& variant, std::size_t index) {
  constexpr std::array<std::array<std::int64_t, 2>, kSm90BackwardCases> kLengths{{{70, 150}, {150, 97}, {129, 129}}};
  PackedCase c;
  c.attention.dtype = variant.dtype;
  c.attention.d_qk = variant.d_qk;
  c.attention.d_v = variant.d_v;
  c.attention.causal = variant.causal;
  if (variant.scale != 0) c.attention.scale = variant.scale;
  c.attention.h_q = 4;
  c.attention.h_kv = index == 0 ? 1 : 2;
  c.attention.seed = 11 + index;
  c.attention.causal_align = index == 2 ? fa::CausalAlign::top_left : fa::CausalAlign::bottom_right;
  c.dropout = variant.dropout ? 0.3f : 0;
  c.dlse = index == 1;
  c.splits = variant.splits;
  if (variant.varlen) {
    c.sequences = sequences_of(index);
    c.attention.s_q = c.sequences->cu_q.back() + 2;
    c.attention.s_kv = c.sequences->cu_kv.back() + 4;
    c.clear = index == 1;
  } else {
    c.attention.b = index == 1 ? 2 : 1;
    c.attention.s_q = kLengths[index][0];
    c.attention.s_kv = kLengths[index][1];
  }
  return c;
}

fa::test::VariantCase variant_of(const Sm90BackwardVariant& variant, const PackedCase& c) {
  fa::test::AttentionCase whole = c.attention;
  if (c.sequences) whole.b = c.sequences->count();
  return variant_case(variant, whole);
}

}  // namespace emulator
