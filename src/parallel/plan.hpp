#ifndef FA_SRC_PARALLEL_PLAN_HPP_
#define FA_SRC_PARALLEL_PLAN_HPP_

#include <cstddef>
#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "parallel/geometry.hpp"
#include "parallel/problem.hpp"

namespace fa::parallel {

/// What a tensor's elements are.
enum class Element : std::uint8_t {
  own,        ///< the configuration's dtype
  wide,       ///< f32 (f64 for f64): sums of gradients
  statistic,  ///< f32 (f64 for f64): the log-sum-exp, sinks
};

/// Tensors of the caller, by number; scratch tensors follow.
enum Given : int { kQ, kK, kV, kO, kLse, kDout, kDlse, kDq, kDk, kDv, kSink, kDsink, kGivenCount };

/// A tensor [b, heads, rows, columns]. Scratch ones lie in the order of heads, b, rows, columns, without gaps: some of
/// the heads are one piece of memory, which a transfer takes. Those that are `by_rows` lie in the order of rows, heads,
/// columns, as packed tensors do, and transfers take all of them.
struct PlanTensor {
  std::string name;
  Element element = Element::own;
  std::int64_t b = 0;
  std::int64_t heads = 0;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  bool is_kv_in_flight = false;  ///< holds keys and values of other ranks
  bool by_rows = false;          ///< b is 1
  std::int64_t elements() const noexcept { return b * heads * rows * columns; }
};

/// Some heads and rows of a tensor.
struct Region {
  int tensor = 0;
  std::int64_t head = 0;
  std::int64_t heads = 0;
  std::int64_t row = 0;
  std::int64_t rows = 0;
  std::int64_t row_step = 1;
  friend bool operator==(const Region&, const Region&) = default;
};

struct Copy {
  Region to, from;
};

/// Zeros, or of a log-sum-exp minus infinity.
struct Clear {
  Region to;
};

/// to = the sum of all, in the order of the list.
struct Sum {
  Region to;
  std::vector<Region> from;
};

/// o and lse of every row get the sink of its head.
struct AddSink {
  Region o, lse, sink;
};

/// Transfers of one group, which may run while calls do.
struct PlanTransfer {
  bool sends = false;
  int peer = 0;
  Region region;  ///< all rows of some heads of a scratch tensor, or of a dense one of the caller
};
struct Exchange {
  int number = 0;  ///< from 0 on, in order
  std::vector<PlanTransfer> transfers;
  unsigned lanes = 1;  ///< it begins when the operations so far of these have run: bit i, lane i
};

/// What follows on its lane comes behind exchange `number` and all before it.
struct Wait {
  int number = 0;
};

/// One call of attention, of one block, or of blocks of many sequences of a packed batch.
struct Call {
  Region q, k, v, o, lse;  ///< rows of q, o and lse, and of k and v, are the same ones
  BlockMask mask = BlockMask::none;
  bool packed = false;                        ///< the regions are packed, and where sequences lie is told by
  std::vector<std::int32_t> cu_q, cu_kv;      ///< these, relative to the regions
  std::vector<std::int32_t> used_q, used_kv;  ///< and how many of their rows count; empty: all
  std::int64_t max_q = 0, max_kv = 0;         ///< the longest
  std::int64_t head_offset = 0;               ///< of the whole, for placed blocks
  std::vector<Block> blocks;                  ///< what is computed
};

struct Forward {
  Call call;
  bool accumulate = false;  ///< o and lse hold the state of other keys
};

/// The part of a call in the gradients; outputs are written, whole.
struct Backward {
  Call call;
  Region dout, dlse, dq, dk, dv;
};

/// dsink of all rows: what they leave of P belongs to it.
struct SinkGradient {
  Region q, k, v, o, lse, dout, dlse, sink, dsink;
};

/// The first elements of `from`, in order, to dsink.
struct TakeSink {
  Region to, from;
};

/// Two lanes from here on: lane 1 begins behind what lane 0 has, and runs beside it.
struct Fork {};

inline constexpr int kLanes = 2;

/// The operations that follow are of this lane.
struct Lane {
  int number = 0;
};

/// One lane again, lane 0, behind all of both.
struct Join {};

using Op = std::variant<Copy, Clear, Sum, AddSink, Exchange, Wait, Forward, Backward, SinkGradient, TakeSink, Fork,
                        Lane, Join>;

/// What one rank does, in order. Operations of a lane run one after the other: of lane 0 on the caller's stream, of
/// lane 1 on another. Exchanges run likewise on a stream of their own. The order of all is one in which they could run
/// alone.
struct Plan {
  std::vector<PlanTensor> tensors;  ///< the caller's first
  std::vector<Op> ops;
  int exchanges = 0;

  std::int64_t scratch_elements(Element element) const;
  /// Of keys and values of other ranks, in elements.
  std::int64_t kv_in_flight() const;
  bool has_lanes() const noexcept;
};

Plan forward_plan(const Problem& problem, int rank);
Plan backward_plan(const Problem& problem, int rank);

/// The plan as text, one line an operation.
std::string to_string(const Plan& plan);

/// How many calls share the heads of a ring's last backward step, so that dK and dV of the first go home beside the
/// next.
std::int64_t last_step_calls(std::int64_t h_kv);

/// Heads of K and V per query head do not divide among ranks, and the like. Throws fa::Error(invalid_argument).
void check(const Problem& problem);

}  // namespace fa::parallel

#endif  // FA_SRC_PARALLEL_PLAN_HPP_
