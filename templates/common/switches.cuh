#ifndef FA_TEMPLATES_COMMON_SWITCHES_CUH_
#define FA_TEMPLATES_COMMON_SWITCHES_CUH_

#include <ptx/language.cuh>

namespace fa::kernel {

// What a kernel's Config asks for beyond plain attention. A Config that leaves a switch out says no, and its kernel has
// no trace of it.

template <class Config>
FA_DEVICE constexpr bool wants_varlen() {
  if constexpr (requires { Config::kVarlen; }) return Config::kVarlen;
  return false;
}
template <class Config>
FA_DEVICE constexpr bool wants_dropout() {
  if constexpr (requires { Config::kDropout; }) return Config::kDropout;
  return false;
}

template <class Config>
FA_DEVICE constexpr bool wants_to_skip_hidden() {
  if constexpr (requires { Config::kSkipsHidden; }) return Config::kSkipsHidden;
  return false;
}

template <class Config>
FA_DEVICE constexpr bool wants_own_ends() {
  if constexpr (requires { Config::kOwnEnds; }) return Config::kOwnEnds;
  return false;
}

template <class Config>
FA_DEVICE constexpr bool wants_dynamic_tiles() {
  if constexpr (requires { Config::kDynamic; }) return Config::kDynamic;
  return false;
}

template <class Config>
FA_DEVICE constexpr bool wants_affine_product() {
  if constexpr (requires { Config::kAffineProduct; }) return Config::kAffineProduct;
  return false;
}

template <class Config>
FA_DEVICE constexpr bool wants_affine_reach() {
  if constexpr (requires { Config::kAffineReach; }) return Config::kAffineReach;
  return false;
}

template <class Config>
FA_DEVICE constexpr bool wants_exact_max() {
  if constexpr (requires { Config::kExactMax; }) return Config::kExactMax;
  return false;
}

template <class Config>
FA_DEVICE constexpr int warps_n_of() {
  if constexpr (requires { Config::kWarpsN; }) return Config::kWarpsN;
  return 1;
}

template <class Config>
FA_DEVICE constexpr bool wants_value_in_key() {
  if constexpr (requires { Config::kValueInKey; }) return Config::kValueInKey;
  return false;
}

template <class Config>
FA_DEVICE constexpr int page_size_of() {
  if constexpr (requires { Config::kPageSize; }) return Config::kPageSize;
  return 0;
}

template <class Config>
FA_DEVICE constexpr int split_keys_of() {
  if constexpr (requires { Config::kSplitKeys; }) return Config::kSplitKeys;
  return 0;
}

template <class Config>
FA_DEVICE constexpr bool wants_schedule() {
  if constexpr (requires { Config::kScheduled; }) return Config::kScheduled;
  return false;
}

template <class Config>
FA_DEVICE constexpr int length_keys_of() {
  if constexpr (requires { Config::kLengthKeys; }) return Config::kLengthKeys;
  return 0;
}

template <class Config>
FA_DEVICE constexpr bool wants_whole_tiles() {
  if constexpr (requires { Config::kWholeTiles; }) return Config::kWholeTiles;
  return false;
}

template <class Config>
FA_DEVICE constexpr bool wants_folded_splits() {
  if constexpr (requires { Config::kFoldsSplits; }) return Config::kFoldsSplits;
  return false;
}

template <class Config>
FA_DEVICE constexpr bool wants_wide_boxes() {
  if constexpr (requires { Config::kWideBoxes; }) return Config::kWideBoxes;
  return false;
}

template <class Config>
FA_DEVICE constexpr bool wants_own_parts() {
  if constexpr (requires { Config::kOwnParts; }) return Config::kOwnParts;
  return false;
}

template <class Config>
FA_DEVICE constexpr bool wants_overlap() {
  if constexpr (requires { Config::kOverlaps; }) return Config::kOverlaps;
  return false;
}

template <class Config>
FA_DEVICE constexpr int wants_whole_items() {
  if constexpr (requires { Config::kWholeItems; }) return Config::kWholeItems;
  return 0;
}

template <class Config>
FA_DEVICE constexpr bool wants_ordered_dq() {
  if constexpr (requires { Config::kOrderedDq; }) return Config::kOrderedDq;
  return false;
}

template <class Config>
FA_DEVICE constexpr bool wants_two_blocks() {
  if constexpr (requires { Config::kTwoBlocks; }) return Config::kTwoBlocks;
  return false;
}

template <class Config>
FA_DEVICE constexpr bool has_rows_without_keys() {
  if constexpr (requires { Config::kRowsWithoutKeys; }) return Config::kRowsWithoutKeys;
  return false;
}

template <class Config>
FA_DEVICE constexpr bool wants_to_be_bounded() {
  if constexpr (requires { Config::kBounded; }) return Config::kBounded;
  return false;
}

template <class Config>
FA_DEVICE constexpr bool wants_place_in_memory() {
  if constexpr (requires { Config::kPlaceInMemory; }) return Config::kPlaceInMemory;
  return false;
}

template <class Config>
FA_DEVICE constexpr bool wants_dk() {
  if constexpr (requires { Config::kWithoutDk; }) return !Config::kWithoutDk;
  return true;
}

template <class Config>
FA_DEVICE constexpr bool wants_dv() {
  if constexpr (requires { Config::kWithoutDv; }) return !Config::kWithoutDv;
  return true;
}

template <class Config>
FA_DEVICE constexpr bool wants_multicast() {
  if constexpr (requires { Config::kMulticast; }) return Config::kMulticast;
  return false;
}

template <class Config>
FA_DEVICE constexpr int split_blocks_of() {
  if constexpr (requires { Config::kSplitBlocks; }) return Config::kSplitBlocks;
  return 1;
}

template <class Config>
FA_DEVICE constexpr bool wants_turns() {
  if constexpr (requires { Config::kInTurns; }) return Config::kInTurns;
  return false;
}

template <class Config>
FA_DEVICE constexpr bool is_given_entropy_gradient() {
  if constexpr (requires { Config::kEntropyGradient; }) return Config::kEntropyGradient;
  return false;
}

template <class Config>
FA_DEVICE constexpr int given_max_logit_gradient() {
  if constexpr (requires { Config::kMaxLogitGradient; }) return Config::kMaxLogitGradient;
  return 0;
}

template <class Config>
FA_DEVICE constexpr bool is_given_column_sums_gradient() {
  if constexpr (requires { Config::kColumnSumsGradient; }) return Config::kColumnSumsGradient;
  return false;
}

template <class Config>
inline constexpr bool kVarlen = wants_varlen<Config>();
template <class Config>
inline constexpr bool kDropout = wants_dropout<Config>();
template <class Config>
inline constexpr bool kSkipsHidden = wants_to_skip_hidden<Config>();
template <class Config>
inline constexpr bool kOwnEnds = wants_own_ends<Config>();  // of each warpgroup's KV tiles
template <class Config>
inline constexpr bool kDynamic = wants_dynamic_tiles<Config>();  // query tiles come from a counter
template <class Config>
inline constexpr bool kAffineProduct = wants_affine_product<Config>();
template <class Config>
inline constexpr bool kAffineReach = wants_affine_reach<Config>();  // limits the KV tiles
template <class Config>
inline constexpr bool kExactMax = wants_exact_max<Config>();  // of a row's scores
template <class Config>
inline constexpr int kWarpsN = warps_n_of<Config>();  // warps that share the rows of a forward kernel
template <class Config>
inline constexpr bool kValueInKey = wants_value_in_key<Config>();  // V is the first columns of K
template <class Config>
inline constexpr int kPageSize = page_size_of<Config>();  // keys of a page; 0: k and v are plain tensors
template <class Config>
inline constexpr int kSplitKeys = split_keys_of<Config>();  // of a fixed split size; 0: splits follow from the call
template <class Config>
inline constexpr bool kScheduled = wants_schedule<Config>();  // thread blocks take their parts of a schedule
template <class Config>
inline constexpr int kLengthKeys = length_keys_of<Config>();  // of a split, at least: its request's length decides
template <class Config>
inline constexpr bool kWholeTiles = wants_whole_tiles<Config>();  // a block folds all such splits of a query tile
template <class Config>
inline constexpr bool kFoldsSplits = wants_folded_splits<Config>();  // one by one, as such a block does
template <class Config>
inline constexpr bool kOwnParts = wants_own_parts<Config>();  // and find these without a schedule
template <class Config>
inline constexpr bool kWideBoxes = wants_wide_boxes<Config>();  // of pages: all columns of their rows
template <class Config>
inline constexpr bool kOverlaps = wants_overlap<Config>();
template <class Config>
inline constexpr int kWholeItems = wants_whole_items<Config>();  // of a schedule, where items are equal: their cost
template <class Config>
inline constexpr bool kMulticast = wants_multicast<Config>();  // of keys, to the two blocks of a cluster
template <class Config>
inline constexpr int kSplitBlocks = split_blocks_of<Config>();  // of a cluster, which share the steps of a key tile
template <class Config>
inline constexpr bool kInTurns = wants_turns<Config>();  // blocks that share a key tile add to one dK and one dV
template <class Config>
inline constexpr bool kOrderedDq = wants_ordered_dq<Config>();  // additions to dQ's accumulator
template <class Config>
inline constexpr bool kTwoBlocks = wants_two_blocks<Config>();  // share a multiprocessor's registers
template <class Config>
inline constexpr bool kRowsWithoutKeys = has_rows_without_keys<Config>();  // in front of a dense causal diagonal
template <class Config>
inline constexpr bool kBounded = wants_to_be_bounded<Config>();  // no grid of waves: all blocks run at once
template <class Config>
inline constexpr bool kPlaceInMemory = wants_place_in_memory<Config>();  // where the call stands in a larger attention
template <class Config>
inline constexpr bool kEntropyGradient = is_given_entropy_gradient<Config>();
template <class Config>
inline constexpr int kMaxLogitGradient = given_max_logit_gradient<Config>();  // 2: of the scaled scores
template <class Config>
inline constexpr bool kColumnSumsGradient = is_given_column_sums_gradient<Config>();
template <class Config>
inline constexpr bool kStatisticsGradients =
    kEntropyGradient<Config> || kMaxLogitGradient<Config> != 0 || kColumnSumsGradient<Config>;
template <class Config>
inline constexpr bool kWantsDk = wants_dk<Config>();
template <class Config>
inline constexpr bool kWantsDv = wants_dv<Config>();

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_SWITCHES_CUH_
