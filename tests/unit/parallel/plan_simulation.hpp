#ifndef FA_TESTS_UNIT_PARALLEL_PLAN_SIMULATION_HPP_
#define FA_TESTS_UNIT_PARALLEL_PLAN_SIMULATION_HPP_

#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "parallel/layout.hpp"
#include "parallel/plan.hpp"

namespace fa::test {

/// Which row of the whole, of which head, an element of a rank's memory is. Nothing: not written.
struct Origin {
  int sequence = -1;
  std::int64_t position = -1;
  std::int64_t head = -1;
  friend bool operator==(const Origin&, const Origin&) = default;
};

/// Runs the plans of all ranks on names of rows instead of numbers, and counts which scores are computed.
class PlanSimulation {
 public:
  PlanSimulation(const parallel::Problem& problem, std::vector<parallel::Plan> plans)
      : problem_(problem), plans_(std::move(plans)), ranks_(plans_.size()) {
    for (std::size_t i = 0; i < problem.lengths_q.size(); ++i) {
      counts_.emplace_back(static_cast<std::size_t>(problem.h_q * problem.lengths_q[i] * problem.lengths_kv[i]), 0);
    }
    for (std::size_t rank = 0; rank < plans_.size(); ++rank) begin(static_cast<int>(rank));
  }

  /// What is wrong; "" for nothing.
  std::string run() {
    bool goes_on = true;
    while (goes_on && problem_text_.empty()) {
      goes_on = false;
      for (std::size_t rank = 0; rank < plans_.size(); ++rank) {
        while (ranks_[rank].next < plans_[rank].ops.size() && step(rank)) goes_on = true;
      }
    }
    for (std::size_t rank = 0; rank < plans_.size(); ++rank) {
      if (ranks_[rank].next < plans_[rank].ops.size()) fail("rank " + std::to_string(rank) + " waits for ever");
    }
    return problem_text_;
  }

  int count(int sequence, std::int64_t head, std::int64_t row, std::int64_t key) const {
    return counts_[static_cast<std::size_t>(sequence)][index(sequence, head, row, key)];
  }

 private:
  struct Rank {
    std::size_t next = 0;
    std::vector<std::vector<Origin>> tensors;  ///< [heads][rows]
    std::deque<parallel::Exchange> under_way;
  };

  void fail(const std::string& text) {
    if (problem_text_.empty()) problem_text_ = text;
  }

  std::size_t index(int sequence, std::int64_t head, std::int64_t row, std::int64_t key) const {
    const auto i = static_cast<std::size_t>(sequence);
    return static_cast<std::size_t>((head * problem_.lengths_q[i] + row) * problem_.lengths_kv[i] + key);
  }

  void begin(int rank) {
    Rank& own = ranks_[static_cast<std::size_t>(rank)];
    for (const parallel::PlanTensor& tensor : plans_[static_cast<std::size_t>(rank)].tensors) {
      own.tensors.emplace_back(static_cast<std::size_t>(tensor.heads * tensor.rows));
    }
    for (const int tensor : {parallel::kQ, parallel::kK, parallel::kV}) {
      const bool is_q = tensor == parallel::kQ;
      const auto& lengths = is_q ? problem_.lengths_q : problem_.lengths_kv;
      for (const parallel::Piece& piece : parallel::pieces_of(problem_.layout, problem_.ranks, lengths, rank)) {
        for (std::int64_t h = 0; h < (is_q ? problem_.h_q : problem_.h_kv); ++h) {
          for (std::int64_t i = 0; i < piece.count; ++i) {
            at(rank, tensor, h, piece.row + i) = {piece.sequence, piece.begin + i * piece.step, h};
          }
        }
      }
    }
  }

  Origin& at(int rank, int tensor, std::int64_t head, std::int64_t row) {
    const auto r = static_cast<std::size_t>(rank), t = static_cast<std::size_t>(tensor);
    return ranks_[r].tensors[t].at(static_cast<std::size_t>(head * plans_[r].tensors[t].rows + row));
  }

  /// In the order of memory.
  std::vector<Origin> sent(int rank, const parallel::Region& region) {
    const parallel::PlanTensor& tensor =
        plans_[static_cast<std::size_t>(rank)].tensors[static_cast<std::size_t>(region.tensor)];
    if (region.rows != tensor.rows || region.row_step != 1) fail("some rows are no piece of memory");
    std::vector<Origin> all = content(rank, region);
    if (is_by_rows(region, tensor)) all = transposed(all, region.heads, region.rows);
    return all;
  }
  void receive(int rank, const parallel::Region& region, std::vector<Origin> all) {
    const parallel::PlanTensor& tensor =
        plans_[static_cast<std::size_t>(rank)].tensors[static_cast<std::size_t>(region.tensor)];
    if (is_by_rows(region, tensor)) all = transposed(all, region.rows, region.heads);
    put(rank, region, all);
  }
  bool is_by_rows(const parallel::Region& region, const parallel::PlanTensor& tensor) {
    const bool given = region.tensor < parallel::kGivenCount;
    if (given && !problem_.dense_kv && !problem_.dense_rows) fail("a tensor is sent that has gaps");
    const bool by_rows = given ? problem_.dense_rows : tensor.by_rows;
    if (by_rows && region.heads != tensor.heads) fail("some heads are no piece of memory");
    return by_rows;
  }
  /// Of [rows][columns].
  static std::vector<Origin> transposed(const std::vector<Origin>& all, std::int64_t rows, std::int64_t columns) {
    std::vector<Origin> turned;
    for (std::int64_t column = 0; column < columns; ++column) {
      for (std::int64_t row = 0; row < rows; ++row)
        turned.push_back(all[static_cast<std::size_t>(row * columns + column)]);
    }
    return turned;
  }

  std::vector<Origin> content(int rank, const parallel::Region& region) {
    std::vector<Origin> all;
    for (std::int64_t h = 0; h < region.heads; ++h) {
      for (std::int64_t i = 0; i < region.rows; ++i) {
        all.push_back(at(rank, region.tensor, region.head + h, region.row + i * region.row_step));
      }
    }
    return all;
  }

  void put(int rank, const parallel::Region& region, const std::vector<Origin>& all) {
    std::size_t from = 0;
    if (static_cast<std::int64_t>(all.size()) != region.heads * region.rows) return fail("regions of other sizes");
    for (std::int64_t h = 0; h < region.heads; ++h) {
      for (std::int64_t i = 0; i < region.rows; ++i) {
        at(rank, region.tensor, region.head + h, region.row + i * region.row_step) = all[from++];
      }
    }
  }

  bool step(std::size_t rank) {
    const auto me = static_cast<int>(rank);
    Rank& own = ranks_[rank];
    const parallel::Op& op = plans_[rank].ops[own.next];
    if (const auto* const copy = std::get_if<parallel::Copy>(&op)) {
      put(me, copy->to, content(me, copy->from));
    } else if (const auto* const exchange = std::get_if<parallel::Exchange>(&op)) {
      for (const parallel::PlanTransfer& transfer : exchange->transfers) {
        if (transfer.sends) mail_[{me, transfer.peer}].push_back(sent(me, transfer.region));
      }
      own.under_way.push_back(*exchange);
    } else if (const auto* const wait = std::get_if<parallel::Wait>(&op)) {
      while (!own.under_way.empty() && own.under_way.front().number <= wait->number) {
        if (!take(me, own.under_way.front())) return false;
        own.under_way.pop_front();
      }
    } else if (const auto* const forward = std::get_if<parallel::Forward>(&op)) {
      compute(me, forward->call);
    } else if (const auto* const backward = std::get_if<parallel::Backward>(&op)) {
      compute(me, backward->call);
    }
    ++own.next;
    return problem_text_.empty();
  }

  bool take(int me, const parallel::Exchange& exchange) {
    std::map<int, std::size_t> needed;
    for (const parallel::PlanTransfer& transfer : exchange.transfers) needed[transfer.peer] += transfer.sends ? 0 : 1;
    for (const auto& [peer, count] : needed) {
      if (mail_[{peer, me}].size() < count) return false;
    }
    for (const parallel::PlanTransfer& transfer : exchange.transfers) {
      if (transfer.sends) continue;
      receive(me, transfer.region, mail_[{transfer.peer, me}].front());
      mail_[{transfer.peer, me}].pop_front();
    }
    return true;
  }

  void compute(int me, const parallel::Call& call) {
    const std::int64_t group = problem_.h_q / problem_.h_kv;
    for (const parallel::Block& block : call.blocks) {
      for (std::int64_t h = 0; h < call.q.heads; ++h) {
        for (std::int64_t i = 0; i < block.rows; ++i) {
          const Origin q = at(me, call.q.tensor, call.q.head + h, block.row + i);
          if (q.head != call.head_offset + h) return fail("another query head than the call says");
          for (std::int64_t j = 0; j < block.keys; ++j) {
            add(me, call, block, q, i, j, call.k.head + h / group);
          }
        }
      }
    }
  }

  void add(int me, const parallel::Call& call, const parallel::Block& block, const Origin& q, std::int64_t i,
           std::int64_t j, std::int64_t head) {
    const Origin k = at(me, call.k.tensor, head, block.key + j * block.key_step);
    const Origin v = at(me, call.v.tensor, head, block.key + j * block.key_step);
    if (!(k == v)) return fail("k and v of different rows");
    if (k.sequence != q.sequence || q.sequence < 0) return fail("rows of different sequences, or none");
    if (k.head != q.head / (problem_.h_q / problem_.h_kv)) return fail("another KV head than the query head's");
    if (block.mask == parallel::BlockMask::placed) {
      const bool right = q.position == block.q + i * block.q_step && k.position == block.kv + j * block.kv_step;
      if (!right) return fail("a place that is not the rows'");
    }
    const parallel::KeyRange seen = parallel::keys_of(problem_, q.sequence, q.position);
    const bool is_seen = k.position >= seen.begin && k.position < seen.end;
    const bool kept = block.mask == parallel::BlockMask::none ||
                      (block.mask == parallel::BlockMask::causal && j <= i + block.keys - block.rows) ||
                      (block.mask == parallel::BlockMask::placed && is_seen);
    if (kept != is_seen && kept) return fail("a hidden key is seen");
    if (kept) ++counts_[static_cast<std::size_t>(q.sequence)][index(q.sequence, q.head, q.position, k.position)];
  }

  const parallel::Problem& problem_;
  std::vector<parallel::Plan> plans_;
  std::vector<Rank> ranks_;
  std::map<std::pair<int, int>, std::deque<std::vector<Origin>>> mail_;
  std::vector<std::vector<int>> counts_;
  std::string problem_text_;
};

}  // namespace fa::test

#endif  // FA_TESTS_UNIT_PARALLEL_PLAN_SIMULATION_HPP_
