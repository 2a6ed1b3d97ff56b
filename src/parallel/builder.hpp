#ifndef FA_SRC_PARALLEL_BUILDER_HPP_
#define FA_SRC_PARALLEL_BUILDER_HPP_

#include <string>
#include <utility>
#include <vector>

#include "parallel/plan.hpp"

namespace fa::parallel {

/// Attention as a scheme sees it: a group of ranks, each with rows of all sequences, and this rank's tensors. With
/// Ulysses around it a rank has fewer heads and more rows than the caller gave.
struct Local {
  std::vector<int> members;       ///< ranks of the group
  int me = 0;                     ///< this rank's place among them
  std::vector<Pieces> q_pieces;   ///< of each member
  std::vector<Pieces> kv_pieces;  ///< likewise
  std::int64_t h_q = 0;
  std::int64_t h_kv = 0;
  std::int64_t head_offset = 0;  ///< of this rank's first query head
  bool dense_kv = false;         ///< transfers can take k and v as they lie
  bool by_rows = false;          ///< k and v travel whole, in the order of rows, heads, columns
  int q = kQ, k = kK, v = kV, o = kO, lse = kLse;
  int dout = kDout, dlse = kDlse, dq = kDq, dk = kDk, dv = kDv;

  int size() const noexcept { return static_cast<int>(members.size()); }
  const Pieces& q_rows() const { return q_pieces[static_cast<std::size_t>(me)]; }
  const Pieces& kv_rows() const { return kv_pieces[static_cast<std::size_t>(me)]; }
  std::int64_t group() const noexcept { return h_q / h_kv; }
};

/// Which rows of a tensor have been written, as ordered ranges that do not meet.
class RowSet {
 public:
  enum class Has : std::uint8_t { none, some, all };
  Has has(std::int64_t begin, std::int64_t end) const;
  void add(std::int64_t begin, std::int64_t end);
  /// What is missing of [0, rows).
  std::vector<std::pair<std::int64_t, std::int64_t>> missing(std::int64_t rows) const { return missing(0, rows); }
  std::vector<std::pair<std::int64_t, std::int64_t>> missing(std::int64_t begin, std::int64_t end) const;

 private:
  std::vector<std::pair<std::int64_t, std::int64_t>> ranges_;
};

/// A plan in the making.
class Builder {
 public:
  explicit Builder(const Problem& problem, std::int64_t rows_q, std::int64_t rows_kv);

  const Problem& problem() const noexcept { return problem_; }
  int tensor(std::string name, Element element, std::int64_t heads, std::int64_t rows, std::int64_t columns,
             bool kv_in_flight = false);
  /// What travels as k and v of `local` do.
  int travelling(std::string name, const Local& local, std::int64_t rows, std::int64_t columns, bool kv_in_flight);
  /// Of numbers without b and heads, f32.
  int flat(std::string name, std::int64_t rows, std::int64_t columns);
  const PlanTensor& at(int tensor) const { return plan_.tensors[static_cast<std::size_t>(tensor)]; }
  Region whole(int tensor) const { return {tensor, 0, at(tensor).heads, 0, at(tensor).rows, 1}; }
  Region heads_of(int tensor, std::int64_t head, std::int64_t heads) const {
    return {tensor, head, heads, 0, at(tensor).rows, 1};
  }

  void add(Op op) { plan_.ops.push_back(std::move(op)); }
  /// The exchange's number, or that of the last one where there is nothing to transfer; -1: none. It begins behind both
  /// lanes.
  int exchange(std::vector<PlanTransfer> transfers);
  /// Behind the present lane alone.
  int exchange_of_lane();
  /// Leaves transfers to the next exchange, behind its own: one group runs beside the calls that follow, where a second
  /// would wait for the first. That exchange's number, or that of the last one where there is nothing to transfer.
  int hold(std::vector<PlanTransfer> transfers);
  /// Of the present lane.
  void wait(int number);
  void fork();
  void lane(int number);
  void join();
  int last_exchange() const noexcept { return plan_.exchanges - 1; }
  Plan take() { return std::move(plan_); }

 private:
  const Problem& problem_;
  Plan plan_;
  int exchange_behind(unsigned lanes, std::vector<PlanTransfer> transfers);

  std::vector<PlanTransfer> held_;
  int waited_[2] = {-1, -1};
  int lane_ = 0;
  bool forked_ = false;
};

/// The tensors that a call reads keys from, and the first of the heads that it is about.
struct KeyTensors {
  int k = 0, v = 0;
  std::int64_t head = 0;      ///< of k and v, as of q / group
  std::int64_t heads = 0;     ///< of k and v
  std::int64_t own_head = 0;  ///< the same head in the tensors of this rank
};

/// Calls for blocks: packed batches are computed by few of them.
std::vector<Call> calls_of(const Builder& builder, const Local& local, const KeyTensors& keys,
                           const std::vector<Block>& blocks);

/// Adds forward calls whose rows become one state. `written` are rows of o that have one, of these heads.
void add_forward(Builder& builder, std::vector<Call> calls, RowSet& written);
/// Rows that see nothing.
void clear_rest(Builder& builder, const Local& local, std::int64_t head, std::int64_t heads, const RowSet& written);

/// The inputs of a backward call.
Backward backward_of(const Local& local, const Problem& problem, const Call& call);

void ring_forward(Builder& builder, const Local& local);
void ring_backward(Builder& builder, const Local& local);
void all_gather_forward(Builder& builder, const Local& local);
void all_gather_backward(Builder& builder, const Local& local);

}  // namespace fa::parallel

#endif  // FA_SRC_PARALLEL_BUILDER_HPP_
