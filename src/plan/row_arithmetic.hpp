#ifndef FA_SRC_PLAN_ROW_ARITHMETIC_HPP_
#define FA_SRC_PLAN_ROW_ARITHMETIC_HPP_

#include <algorithm>

#include <fa/tensor.hpp>

#include "plan/problem.hpp"

namespace fa::plan {

/// Whether rows with a fixed split size are computed by wgmma: of every call of a configuration on Hopper, or of none.
constexpr bool has_wgmma_rows(const RequestFacts& request, const DeviceFacts& device) noexcept {
  constexpr int kMostHeadDim = 128;
  if (device.arch.sm() != 90 || device.arch.suffix != 'a') return false;
  if (request.dtype != DType::f16 && request.dtype != DType::bf16) return false;
  if (std::max(request.d_qk, request.d_v) > kMostHeadDim || request.dropout || request.placed) return false;
  if (request.statistics.max_logit != MaxLogit::none || request.statistics.entropy) return false;
  return request.variants == nullptr || (request.variants->score.empty() && !request.variants->hides_keys());
}

/// All that the arithmetic of a row may depend on with a fixed split size. Nothing of a batch, a call or a layout is
/// here, so that no rule can ask for it.
struct RowFacts {
  DType dtype;
  int d_qk;
  int d_v;
  bool wgmma;  ///< of the configuration: has_wgmma_rows, unless an override names another family

  static constexpr RowFacts of(const Problem& problem, bool wgmma) noexcept {
    return {problem.dtype, problem.d_qk, problem.d_v, wgmma};
  }
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
  // Of wgmma what leaves registers for O of the splits before, beside that of the split in the making. A fold costs the
  // more of a step the fewer columns K has.
  if (facts.wgmma) return d <= 64 ? RowArithmetic{80, 720} : RowArithmetic{96, 576};
  const bool wide = facts.dtype == DType::f32;
  // What leaves two tiles of 16 rows a warp their registers up to d 128.
  const int tile_n = wide ? (d <= 192 ? 32 : 16) : d <= 64 ? 64 : d <= 128 ? 48 : 32;
  return {tile_n, kUsualSplitKeys / tile_n * tile_n};
}

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_ROW_ARITHMETIC_HPP_
