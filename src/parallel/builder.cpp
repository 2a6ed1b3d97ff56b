#include "parallel/builder.hpp"

#include <algorithm>

#include "parallel/layout.hpp"

namespace fa::parallel {
namespace {

/// Blocks of a packed batch that one call computes: rows and keys of each lie behind those of the one before.
struct Batch {
  std::vector<Block> blocks;
  bool takes(const Block& block) const {
    const Block& last = blocks.back();
    return block.mask == last.mask && block.row >= last.row + last.rows && block.key >= last.key + last.keys;
  }
};

bool is_batchable(const Block& block) {
  return block.mask != BlockMask::placed && block.key_step == 1;
}

std::vector<Batch> batches_of(const Problem& problem, const std::vector<Block>& blocks) {
  std::vector<Batch> batches;
  std::size_t open = 0;  // batches from here on take more
  for (const Block& block : blocks) {
    if (!problem.packed || !is_batchable(block)) {
      batches.insert(batches.begin() + static_cast<std::ptrdiff_t>(open++), Batch{{block}});
      continue;
    }
    const auto found = std::find_if(batches.begin() + static_cast<std::ptrdiff_t>(open), batches.end(),
                                    [&block](const Batch& batch) { return batch.takes(block); });
    if (found == batches.end()) {
      batches.push_back({{block}});
    } else {
      found->blocks.push_back(block);
    }
  }
  return batches;
}

/// Where the rows of a batch's blocks begin, and how many of those up to the next begin are a block's.
void list_rows(const Batch& batch, std::int64_t Block::*begin, std::int64_t Block::*rows, std::vector<std::int32_t>& cu,
               std::vector<std::int32_t>& used) {
  const std::int64_t first = batch.blocks.front().*begin;
  bool has_gaps = false;
  std::int64_t end = first;
  for (const Block& block : batch.blocks) {
    has_gaps = has_gaps || block.*begin > end;
    end = block.*begin + block.*rows;
    cu.push_back(static_cast<std::int32_t>(block.*begin - first));
    used.push_back(static_cast<std::int32_t>(block.*rows));
  }
  cu.push_back(static_cast<std::int32_t>(end - first));
  if (!has_gaps) used.clear();
}

/// Lists a batch's blocks as sequences. What lies between them is padding, which no kernel visits.
void list_sequences(const Batch& batch, Call& call) {
  list_rows(batch, &Block::row, &Block::rows, call.cu_q, call.used_q);
  list_rows(batch, &Block::key, &Block::keys, call.cu_kv, call.used_kv);
  for (const Block& block : batch.blocks) {
    call.max_q = std::max(call.max_q, block.rows);
    call.max_kv = std::max(call.max_kv, block.keys);
  }
  call.packed = true;
}

}  // namespace

RowSet::Has RowSet::has(std::int64_t begin, std::int64_t end) const {
  const auto gaps = missing(begin, end);
  std::int64_t rows = 0;
  for (const auto& [from, to] : gaps) rows += to - from;
  return rows == 0 ? Has::all : rows == end - begin ? Has::none : Has::some;
}

void RowSet::add(std::int64_t begin, std::int64_t end) {
  if (begin >= end) return;
  std::vector<std::pair<std::int64_t, std::int64_t>> kept;
  for (const auto& [from, to] : ranges_) {
    if (to < begin || from > end) {
      kept.emplace_back(from, to);
    } else {
      begin = std::min(begin, from);
      end = std::max(end, to);
    }
  }
  kept.emplace_back(begin, end);
  std::ranges::sort(kept);
  ranges_ = std::move(kept);
}

std::vector<std::pair<std::int64_t, std::int64_t>> RowSet::missing(std::int64_t begin, std::int64_t end) const {
  std::vector<std::pair<std::int64_t, std::int64_t>> gaps;
  std::int64_t at = begin;
  for (const auto& [from, to] : ranges_) {
    if (to <= at) continue;
    if (from >= end) break;
    if (from > at) gaps.emplace_back(at, from);
    at = to;
  }
  if (at < end) gaps.emplace_back(at, end);
  return gaps;
}

Builder::Builder(const Problem& problem, std::int64_t rows_q, std::int64_t rows_kv) : problem_(problem) {
  const Problem& p = problem;
  const auto add = [this, &p](const char* name, Element element, std::int64_t heads, std::int64_t rows,
                              std::int64_t columns) {
    plan_.tensors.push_back({name, element, p.b, heads, rows, columns, false, false});
  };
  add("q", Element::own, p.h_q, rows_q, p.d_qk);
  add("k", Element::own, p.h_kv, rows_kv, p.d_qk);
  add("v", Element::own, p.h_kv, rows_kv, p.d_v);
  add("o", Element::own, p.h_q, rows_q, p.d_v);
  add("lse", Element::statistic, p.h_q, rows_q, 1);
  add("dout", Element::own, p.h_q, rows_q, p.d_v);
  add("dlse", Element::statistic, p.h_q, rows_q, 1);
  add("dq", Element::own, p.h_q, rows_q, p.d_qk);
  add("dk", Element::own, p.h_kv, rows_kv, p.d_qk);
  add("dv", Element::own, p.h_kv, rows_kv, p.d_v);
  for (const char* const name : {"sink", "dsink"}) {
    plan_.tensors.push_back({name, Element::statistic, 1, 1, p.h_q, 1, false, false});
  }
}

int Builder::tensor(std::string name, Element element, std::int64_t heads, std::int64_t rows, std::int64_t columns,
                    bool kv_in_flight) {
  plan_.tensors.push_back({std::move(name), element, problem_.b, heads, rows, columns, kv_in_flight, false});
  return static_cast<int>(plan_.tensors.size()) - 1;
}

int Builder::travelling(std::string name, const Local& local, std::int64_t rows, std::int64_t columns,
                        bool kv_in_flight) {
  const int made = tensor(std::move(name), Element::own, local.h_kv, rows, columns, kv_in_flight);
  plan_.tensors.back().by_rows = local.by_rows;
  return made;
}

int Builder::flat(std::string name, std::int64_t rows, std::int64_t columns) {
  plan_.tensors.push_back({std::move(name), Element::statistic, 1, 1, rows, columns, false, false});
  return static_cast<int>(plan_.tensors.size()) - 1;
}

int Builder::hold(std::vector<PlanTransfer> transfers) {
  if (transfers.empty()) return last_exchange();
  held_.insert(held_.end(), transfers.begin(), transfers.end());
  return plan_.exchanges;
}

int Builder::exchange(std::vector<PlanTransfer> transfers) {
  return exchange_behind(forked_ ? 3 : 1, std::move(transfers));
}

int Builder::exchange_of_lane() {
  return exchange_behind(1U << lane_, {});
}

int Builder::exchange_behind(unsigned lanes, std::vector<PlanTransfer> transfers) {
  transfers.insert(transfers.end(), held_.begin(), held_.end());
  held_.clear();
  if (!transfers.empty()) add(Exchange{plan_.exchanges++, std::move(transfers), lanes});
  return last_exchange();
}

void Builder::wait(int number) {
  int& waited = waited_[lane_];
  if (number <= waited) return;
  add(Wait{number});
  waited = number;
}

void Builder::fork() {
  add(Fork{});
  forked_ = true;
  waited_[1] = waited_[0];
}

void Builder::lane(int number) {
  if (!forked_ || number == lane_) return;
  add(Lane{number});
  lane_ = number;
}

void Builder::join() {
  if (!forked_) return;
  add(Join{});
  forked_ = false;
  lane_ = 0;
  waited_[0] = std::max(waited_[0], waited_[1]);
}

std::vector<Call> calls_of(const Builder& builder, const Local& local, const KeyTensors& keys,
                           const std::vector<Block>& blocks) {
  const std::int64_t group = local.group();
  std::vector<Call> calls;
  for (const Batch& batch : batches_of(builder.problem(), blocks)) {
    Call call;
    const Block& first = batch.blocks.front();
    const Block& last = batch.blocks.back();
    const std::int64_t rows = last.row + last.rows - first.row;
    const std::int64_t key_rows = batch.blocks.size() > 1 ? last.key + last.keys - first.key : first.keys;
    const std::int64_t head = keys.own_head * group, heads = keys.heads * group;
    call.q = {local.q, head, heads, first.row, rows, 1};
    call.o = {local.o, head, heads, first.row, rows, 1};
    call.lse = {local.lse, head, heads, first.row, rows, 1};
    call.k = {keys.k, keys.head, keys.heads, first.key, key_rows, first.key_step};
    call.v = {keys.v, keys.head, keys.heads, first.key, key_rows, first.key_step};
    call.mask = first.mask;
    call.head_offset = local.head_offset + head;
    call.blocks = batch.blocks;
    call.max_q = rows;
    call.max_kv = key_rows;
    if (batch.blocks.size() > 1) {
      call.max_q = call.max_kv = 0;
      list_sequences(batch, call);
    }
    calls.push_back(std::move(call));
  }
  return calls;
}

void add_forward(Builder& builder, std::vector<Call> calls, RowSet& written) {
  for (Call& call : calls) {
    bool accumulates = false;
    for (const Block& block : call.blocks) {
      accumulates = accumulates || written.has(block.row, block.row + block.rows) != RowSet::Has::none;
    }
    for (const Block& block : call.blocks) {
      if (!accumulates) break;
      for (const auto& [from, to] : written.missing(block.row, block.row + block.rows)) {
        Region region = call.lse;  // without keys, whatever o holds
        region.row = from;
        region.rows = to - from;
        builder.add(Clear{region});
      }
    }
    for (const Block& block : call.blocks) written.add(block.row, block.row + block.rows);
    builder.add(Forward{std::move(call), accumulates});
  }
}

void clear_rest(Builder& builder, const Local& local, std::int64_t head, std::int64_t heads, const RowSet& written) {
  for (const auto& [from, to] : written.missing(rows_of(local.q_rows()))) {
    builder.add(Clear{{local.o, head, heads, from, to - from, 1}});
    builder.add(Clear{{local.lse, head, heads, from, to - from, 1}});
  }
}

Backward backward_of(const Local& local, const Problem& problem, const Call& call) {
  Backward backward;
  backward.call = call;
  backward.dout = call.o;
  backward.dout.tensor = local.dout;
  if (problem.dlse) {
    backward.dlse = call.lse;
    backward.dlse.tensor = local.dlse;
  }
  return backward;
}

}  // namespace fa::parallel
