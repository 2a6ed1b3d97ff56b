#ifndef FA_SRC_PLAN_ROW_ARITHMETIC_HPP_
#define FA_SRC_PLAN_ROW_ARITHMETIC_HPP_

#include <algorithm>

#include <fa/tensor.hpp>

#include "plan/problem.hpp"

namespace fa::plan {

/// All that the arithmetic of a row may depend on with a fixed split size. Nothing of a batch, a call or a layout is
/// here, so that no rule can ask for it.
struct RowFacts {
  DType dtype;
  int d_qk;
  int d_v;

  static constexpr RowFacts of(const Problem& problem) noexcept { return {problem.dtype, problem.d_qk, problem.d_v}; }
};

/// Which additions a row's scores, sums and O are made of, and in which order. The rest of a tile changes no bit: its
/// rows, warps, stages, packed heads, and how blocks share the splits.
struct RowArithmetic {
  int tile_n;      ///< keys of a step, from multiples of it on
  int split_keys;  ///< keys of a split, likewise: a multiple of tile_n
};

/// Keys of a split, about: few enough for a lone decode of 8k keys to fill a GPU, and so many that merging costs a long
/// prefill little.
inline constexpr int kUsualSplitKeys = 512;

constexpr RowArithmetic row_arithmetic(const RowFacts& facts) noexcept {
  const int d = std::max(facts.d_qk, facts.d_v);
  const bool wide = facts.dtype == DType::f32;
  // What leaves two tiles of 16 rows a warp their registers up to d 128.
  const int tile_n = wide ? (d <= 192 ? 32 : 16) : d <= 64 ? 64 : d <= 128 ? 48 : 32;
  return {tile_n, kUsualSplitKeys / tile_n * tile_n};
}

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_ROW_ARITHMETIC_HPP_
