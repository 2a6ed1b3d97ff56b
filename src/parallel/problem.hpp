#ifndef FA_SRC_PARALLEL_PROBLEM_HPP_
#define FA_SRC_PARALLEL_PROBLEM_HPP_

#include <cstdint>
#include <vector>

#include <fa/parallel.hpp>

namespace fa::parallel {

/// Which calls of a whole attention are made by which rank, as far as numbers go: without tensors, devices or streams.
struct Problem {
  int ranks = 1;
  ShardLayout layout = ShardLayout::zigzag;
  Scheme scheme = Scheme::ring;  ///< of the outer dimension, never automatic
  int ulysses = 1;               ///< ranks that share heads, next to each other; divides `ranks`
  int head_groups = 1;           ///< all_gather: how many pieces K and V come in; divides the KV heads of a rank
  bool wide_gradients = true;    ///< dK and dV travel in f32, not in the dtype
  /// Ring: of so many of a rank's KV heads, the last ones, its own keys are computed behind those of all other ranks.
  /// 0: of none, and a step is one call. Else a step has two, of these heads and of the others, which run side by side.
  std::int64_t late_heads = 0;
  std::int64_t late_gradient_heads = 0;  ///< likewise of backward

  std::int64_t b = 1;
  std::int64_t h_q = 1;
  std::int64_t h_kv = 1;
  std::int64_t d_qk = 0;
  std::int64_t d_v = 0;
  std::vector<std::int64_t> lengths_q;   ///< of each sequence, whole; dense: one
  std::vector<std::int64_t> lengths_kv;  ///< likewise
  bool packed = false;                   ///< lengths are of a packed batch; b is 1

  bool causal = false;
  bool bottom_right = true;
  std::int64_t window_left = -1;  ///< negative: unbounded
  std::int64_t window_right = -1;
  std::int64_t chunk = 0;
  bool functions = false;  ///< scores depend on positions: every call is told its own
  bool sink = false;
  bool dlse = false;        ///< backward is given a gradient of lse
  bool dense_kv = false;    ///< the caller's K and V lie as transfers take them: heads, b, rows, columns
  bool dense_rows = false;  ///< of packed batches: rows, heads, columns, which transfers of all heads take

  friend bool operator==(const Problem&, const Problem&) = default;
};

/// Rows of one sequence that a rank has: the sequence's positions begin, begin + step, … and where they lie.
struct Piece {
  int sequence = 0;
  std::int64_t begin = 0;
  std::int64_t count = 0;
  std::int64_t step = 1;
  std::int64_t row = 0;       ///< of the first, in the tensor that has them
  std::int64_t row_step = 1;  ///< rows from one to the next

  std::int64_t last() const noexcept { return begin + (count - 1) * step; }
  friend bool operator==(const Piece&, const Piece&) = default;
};
using Pieces = std::vector<Piece>;

}  // namespace fa::parallel

#endif  // FA_SRC_PARALLEL_PROBLEM_HPP_
