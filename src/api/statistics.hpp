#ifndef FA_SRC_API_STATISTICS_HPP_
#define FA_SRC_API_STATISTICS_HPP_

#include <cstdint>

#include <fa/attention.hpp>

namespace fa::api {

/// What a call's statistics are written to.
struct CheckedStatistics {
  StatisticsOutputs outputs;  ///< as they are given
  // Of rows, [b, h_q, s_q], and of keys, [b, h, s_kv]; of packed batches with b = 1. Undefined where they are not.
  TensorView max_logit_rows;
  TensorView entropy_rows;
  TensorView column_sums;
  TensorView top_keys;     ///< [b, h, k], of packed batches too
  std::int64_t heads = 0;  ///< of max_logit, where it is of heads

  /// [h_q], of heads.
  TensorView max_logit_heads() const { return heads > 0 ? outputs.max_logit : TensorView(); }
};

/// Throws fa::Error for statistics that a configuration cannot have.
void validate_statistics(const AttentionConfig& config);

/// `shape`: the axes of q and k, of a packed batch those of one entry, and `b` its sequences. `rank3`: q has no axis of
/// heads. Throws fa::Error(invalid_argument).
CheckedStatistics check_statistics(const AttentionConfig& config, const ForwardOutputs& outputs,
                                   const AttentionShape& shape, std::int64_t b, bool rank3);

/// Likewise what backward is given of them, as views of rank 3.
StatisticsGradients check_statistics_gradients(const AttentionConfig& config, const BackwardInputs& inputs,
                                               const AttentionShape& shape, bool rank3);

/// Throws fa::Error(invalid_argument) for statistics that are given to what computes none.
void check_without_statistics(const StatisticsOutputs& outputs, const char* accepted);

}  // namespace fa::api

#endif  // FA_SRC_API_STATISTICS_HPP_
