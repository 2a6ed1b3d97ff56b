#ifndef FA_SRC_REFERENCE_INSPECT_HPP_
#define FA_SRC_REFERENCE_INSPECT_HPP_

#include <cstdint>
#include <optional>

#include <fa/error.hpp>

#include "reference/evaluator.hpp"
#include "reference/forward.hpp"

namespace fa::reference {

/// A call that has run, or a sequence of it: what a forward read, or a backward.
struct InspectedCall {
  ForwardArgs args;  ///< o and lse: of a backward
  TensorView dout;   ///< defined: it is a backward
  TensorView dlse;
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

/// The first NaN or infinity in what a result is made of: of q, k, v, the sink, captured tensors, o, lse, dout, dlse,
/// scores, P, dP and dS, in this order, then by b, h, q, kv and d. A score of -inf, or a captured -inf that leads to
/// one, is none. Nothing: what the result is made of is finite. `result` of the location stays empty.
std::optional<ErrorLocation> find_cause(const InspectedCall& call, const BrokenResult& result);

/// The lowest element of a tensor [b, h, s, d], or [b, h, s], that is NaN, +inf, or without `minus` -inf, as a location
/// whose q is the row. `name`: its tensor.
std::optional<ErrorLocation> first_not_finite(const TensorView& view, bool minus);

/// P of query head `h` of batch entry `b`, as V is multiplied by it: behind dropout. `p` [rows, keys] is written whole:
/// 0 where there is no such row or key.
void probabilities(const ForwardArgs& args, std::int64_t b, std::int64_t h, const TensorView& p);

}  // namespace fa::reference

#endif  // FA_SRC_REFERENCE_INSPECT_HPP_
