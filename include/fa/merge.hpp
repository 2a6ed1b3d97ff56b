#ifndef FA_MERGE_HPP_
#define FA_MERGE_HPP_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include <fa/tensor.hpp>

/// What Attention::merge is given (attention.hpp, docs/merging.md).
namespace fa {

/// What attention over some of the keys came to: enough to go on with the others. A row without keys has lse = -inf (or
/// +inf), and takes no part, whatever its o holds.
struct AttentionState {
  TensorView o;    ///< [b, h_q, s_q, d_v]; with AttentionConfig::varlen packed, [total_q, h_q, d_v]
  TensorView lse;  ///< [b, h_q, s_q], packed [h_q, total_q]; f32 (f64 for f64), natural log
};

/// States whose keys have nothing in common, all on the Attention's device, and unchanged until the queued work has
/// run. Any strides, 0 included. Each o is of the config's dtype, or f32; f64 ones go with f64 alone.
struct MergeInputs {
  static constexpr std::size_t kMaxListed = 16;

  /// Listed: 1 to kMaxListed of them. Stacked: the first of all. Read during the call only.
  std::span<const AttentionState> states = {};
  /// Above 0: how many states lie at equal distances, as slices of tensors [n, b, h_q, s_q, d_v] and [n, b, h_q, s_q]
  /// do. Any number below 2^31.
  std::int64_t stacked = 0;
  std::int64_t stride_o = 0;    ///< stacked: elements from o of a state to that of the next
  std::int64_t stride_lse = 0;  ///< likewise of lse
  /// [h_q], f32 (f64 for f64): a logit that joins the sum of each row of a head, as AttentionConfig::sink does,
  /// whatever that is. It enters once: either here, or in one of the states. Optional.
  TensorView sink = {};
  /// o = sum_i o_i instead, without weights: of gradients that calls over different rows or keys have left. States and
  /// the result have no lse then, and there is no sink.
  bool sum = false;
};

/// What picks the kernel of a merge, besides the configuration.
struct MergeShape {
  std::optional<DType> states = std::nullopt;  ///< of every o, where it is not the config's dtype
  bool mixed = false;                          ///< some of them are f32, the others of the config's dtype
  std::optional<DType> result = std::nullopt;  ///< of the merged o, likewise
  bool aligned = true;                         ///< rows of o, of all, start at multiples of 16 bytes
  bool sum = false;                            ///< MergeInputs::sum
};

}  // namespace fa

#endif  // FA_MERGE_HPP_
