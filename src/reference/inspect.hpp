#ifndef FA_SRC_REFERENCE_INSPECT_HPP_
#define FA_SRC_REFERENCE_INSPECT_HPP_

#include <cstdint>
#include <optional>
#include <vector>

#include <fa/error.hpp>

#include "reference/evaluator.hpp"
#include "reference/forward.hpp"

namespace fa::reference {

/// A call that has run, or a sequence of it: what a forward read, or a backward.
struct InspectedCall {
  ForwardArgs args;      ///< o and lse: of a backward
  TensorView dout = {};  ///< defined: it is a backward
  TensorView dlse = {};
  TensorView entropy = {};       ///< [b, h_q, s_q], of forward; with dentropy
  TensorView dentropy = {};      ///< [b, h_q, s_q]
  TensorView dmax_logit = {};    ///< [b, h_q, s_q]; of heads [h_q]
  TensorView dcolumn_sums = {};  ///< [b, h_q, s_kv] or [b, h_kv, s_kv]
  bool of_scaled = false;        ///< the greatest logits are of scores in front of the score function
  /// Of heads, [h_q]: what raise_greatest has left. A row with lower logits has no part in dmax_logit.
  std::vector<double> greatest = {};
  const Fetch* fetch = nullptr;  ///< reads all of these tensors; nullptr: the host can
};

/// What a result is made of.
enum class Made : std::uint8_t {
  of_row,       ///< a query row, and the keys that it sees: o, lse, dq, statistics of rows
  of_key,       ///< a key, and the rows that see it: dk
  of_p,         ///< likewise, without V and O: dv, column sums
  of_all_rows,  ///< the rows of a query head, without their keys: dsink
  of_anything,  ///< not asked for
};

/// An element of a result.
struct BrokenResult {
  Made made = Made::of_anything;
  std::int64_t b = 0;
  std::int64_t first_h = 0;  ///< query heads that it is made of
  std::int64_t end_h = 0;
  std::int64_t at = 0;  ///< the row, or the key
};

/// The first NaN or infinity in what a result is made of: of q, k, v and their scales, row_bias, the sink, captured
/// tensors, o, lse, dout, dlse, entropy, gradients of statistics, scores, P, dP and dS, in this order, then by b, h, q,
/// kv and d. A score of -inf, or a captured -inf or bias that leads to one, is none. Nothing: what the result is made
/// of is finite. `result` of the location stays empty.
std::optional<ErrorLocation> find_cause(const InspectedCall& call, const BrokenResult& result);

/// Of dmax_logit of heads: raises `greatest` [h_q] to the greatest logits of the call in the heads [first_h, end_h)
/// whose gradient can break anything. A sequence is a call.
void raise_greatest(const InspectedCall& call, std::int64_t first_h, std::int64_t end_h, std::vector<double>& greatest);

/// The lowest element of a tensor [b, h, s, d], or [b, h, s], that is NaN, +inf, or without `minus` -inf, as a location
/// whose q is the row. `name`: its tensor.
std::optional<ErrorLocation> first_not_finite(const TensorView& view, bool minus);

/// P of query head `h` of batch entry `b`, as V is multiplied by it: behind dropout. `p` [rows, keys] is written whole:
/// 0 where there is no such row or key.
void probabilities(const ForwardArgs& args, std::int64_t b, std::int64_t h, const TensorView& p);

}  // namespace fa::reference

#endif  // FA_SRC_REFERENCE_INSPECT_HPP_
