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

/// The most keys that are told of a row. A thread block has that many in shared memory while it sorts them.
inline constexpr int kMaxTopKeys = 1024;

/// What is computed. Each costs nothing unless it is asked for. P is that before dropout, and with a sink: its rows sum
/// to less than 1 then.
struct Statistics {
  MaxLogit max_logit = MaxLogit::none;
  bool max_logit_by_head = false;  ///< one number for each query head, over batch entries and rows, as QK-clip needs
  bool entropy = false;            ///< of each row of P: the sum of -P log P over its keys, in nats
  ColumnSums column_sums = ColumnSums::none;
  /// The keys with the greatest column sums, so many of each head: of those that column_sums says, else of query heads.
  int top_keys = 0;  ///< up to kMaxTopKeys, and any number of keys that there are; 0: none
  /// Whether backward is given gradients of the entropy, of column_sums, and of max_logit. The greatest logit of a row,
  /// or of a head, has its gradient: of equal ones that of the first row, and of the first key in it.
  bool entropy_gradient = false;
  bool max_logit_gradient = false;
  bool column_sums_gradient = false;

  /// Of which heads P is summed.
  ColumnSums summed_heads() const noexcept {
    return top_keys != 0 && column_sums == ColumnSums::none ? ColumnSums::query_heads : column_sums;
  }
  bool any() const noexcept { return max_logit != MaxLogit::none || entropy || summed_heads() != ColumnSums::none; }
  bool gradient_of_heads() const noexcept { return max_logit_gradient && max_logit_by_head; }
  bool any_gradient() const noexcept { return entropy_gradient || max_logit_gradient || column_sums_gradient; }
  friend bool operator==(const Statistics&, const Statistics&) = default;
};

/// Where it goes: f32 (f64 for f64) but for top_keys, row-major without gaps. What is asked for is given, and nothing
/// else.
struct StatisticsOutputs {
  /// [b, h_q, s_q], or [h_q] with max_logit_by_head; of packed batches [h_q, total_q], or [h_q]. -inf without keys.
  TensorView max_logit = {};
  TensorView entropy = {};  ///< [b, h_q, s_q], or [h_q, total_q]; 0 of a row without keys
  /// [b, h_q, s_kv], or [b, h_kv, s_kv] of KV heads; of packed batches [h, total_kv]. Over a KV cache [b, h, s_kv], of
  /// packed queries too: s_kv is max_s_kv, or without it as many positions as a table row, or the cache, has room for.
  /// Positions that do not count for a request have 0. With top_keys it may be left out: the sums are in the workspace
  /// then.
  TensorView column_sums = {};
  /// i32 [b, h, top_keys], also of packed batches, whose keys count from 0 in each sequence. Over a KV cache positions
  /// of the request, from seq_begin on. The greatest sum comes first, of equal ones the smaller index. NaNs are greater
  /// than any number, and equal. -1 behind the last key, and everywhere without rows.
  TensorView top_keys = {};
};

/// What backward is given of them, as the configuration says: f32 (f64 for f64), row-major without gaps, of the shapes
/// that forward has.
struct StatisticsGradients {
  TensorView entropy = {};       ///< of forward; with dentropy
  TensorView dentropy = {};      ///< gradient of the entropy
  TensorView dmax_logit = {};    ///< gradient of max_logit
  TensorView dcolumn_sums = {};  ///< gradient of column_sums
};

}  // namespace fa

#endif  // FA_STATISTICS_HPP_
