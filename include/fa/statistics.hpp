#ifndef FA_STATISTICS_HPP_
#define FA_STATISTICS_HPP_

#include <cstdint>

#include <fa/tensor.hpp>

/// Statistics of scores and of P that forward computes besides (docs/statistics.md).
namespace fa {

/// Of which logits forward tells the greatest of a row. Hidden keys never count.
enum class MaxLogit : std::uint8_t {
  none,
  softmax,  ///< of those that the softmax takes: scaled, behind the score function. Without the sink
  scaled,   ///< of the scaled scores, in front of the score function
};

/// Whether forward sums P over the rows, and to what the sums belong.
enum class ColumnSums : std::uint8_t {
  none,
  query_heads,  ///< a sum for each query head and key
  kv_heads,     ///< summed over the query heads of a KV head, too
};

/// What is computed. Each costs nothing unless it is asked for. P is that before dropout, and with a sink: its rows sum
/// to less than 1 then.
struct Statistics {
  MaxLogit max_logit = MaxLogit::none;
  bool max_logit_by_head = false;  ///< one number for each query head, over batch entries and rows, as QK-clip needs
  bool entropy = false;            ///< of each row of P: the sum of -P log P over its keys, in nats
  ColumnSums column_sums = ColumnSums::none;

  bool any() const noexcept { return max_logit != MaxLogit::none || entropy || column_sums != ColumnSums::none; }
  friend bool operator==(const Statistics&, const Statistics&) = default;
};

/// Where it goes: f32 (f64 for f64), row-major without gaps. What is asked for is given, and nothing else.
struct StatisticsOutputs {
  /// [b, h_q, s_q], or [h_q] with max_logit_by_head; of packed batches [h_q, total_q], or [h_q]. -inf without keys.
  TensorView max_logit = {};
  TensorView entropy = {};  ///< [b, h_q, s_q], or [h_q, total_q]; 0 of a row without keys
  /// [b, h_q, s_kv], or [b, h_kv, s_kv] of KV heads; of packed batches [h, total_kv].
  TensorView column_sums = {};
};

}  // namespace fa

#endif  // FA_STATISTICS_HPP_
