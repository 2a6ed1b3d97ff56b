#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "parallel/builder.hpp"
#include "parallel/gradient_sum.hpp"
#include "parallel/layout.hpp"

namespace fa::parallel {
namespace {

bool is_needed(const Problem& problem, const Local& local, int by, int from) {
  return any_visible(problem, local.q_pieces[static_cast<std::size_t>(by)],
                     local.kv_pieces[static_cast<std::size_t>(from)]);
}

/// All stripes of a sequence as one piece, where every row sees every key.
std::optional<Piece> all_of(const Problem& problem, const Piece& q, const Pieces& stripes) {
  if (stripes.empty() || problem.functions) return std::nullopt;
  Piece all = stripes.front();
  if (all.step == 1 || static_cast<std::int64_t>(stripes.size()) != all.step) return std::nullopt;
  for (const Piece& piece : stripes) {
    if (visible(problem, q, piece) != Visible::all) return std::nullopt;
  }
  all.count *= all.step;
  all.step = all.row_step = 1;
  return all;
}

/// Pieces that hold what a piece of queries sees, joined; of stripes, each.
Pieces seen_by(const Problem& problem, const Piece& q, const std::vector<Pieces>& kv) {
  Pieces seen;
  for (const Pieces& pieces : kv) {
    for (const Piece& piece : pieces) {
      if (piece.sequence == q.sequence && visible(problem, q, piece) != Visible::none) seen.push_back(piece);
    }
  }
  std::ranges::sort(seen, {}, &Piece::begin);
  if (const std::optional<Piece> all = all_of(problem, q, seen)) return {*all};
  Pieces joined;
  for (const Piece& piece : seen) {
    const bool meets = !joined.empty() && joined.back().step == 1 && piece.step == 1 &&
                       joined.back().begin + joined.back().count == piece.begin;
    if (meets) {
      joined.back().count += piece.count;
    } else {
      joined.push_back(piece);
    }
  }
  return joined;
}

/// Keys and values of all members in the order of the whole, some heads at a time. Pieces that come are copied to their
/// places while those of the next heads are under way.
class Gather {
 public:
  Gather(Builder& builder, const Local& local) : builder_(builder), local_(local) {
    const Problem& problem = builder.problem();
    groups_ = problem.head_groups;
    heads_ = local.h_kv / groups_;
    for (const Pieces& pieces : local.kv_pieces) in_order_.push_back(in_order(pieces, problem.lengths_kv));
    const std::int64_t rows = total(problem.lengths_kv);
    block_ = {builder.tensor("k of all ranks", Element::own, heads_, rows, problem.d_qk, true),
              builder.tensor("v of all ranks", Element::own, heads_, rows, problem.d_v, true), 0, heads_, 0};
    own_ = {local.k, local.v};
    for (int from = 0; from < local.size(); ++from) {
      stages_[0].push_back(stage_of(from));
      stages_[1].push_back(groups_ > 1 ? stage_of(from) : stages_[0].back());
    }
    bool sends = false;
    for (int to = 0; to < local.size(); ++to)
      sends = sends || (to != local.me && is_needed(problem, local, to, local.me));
    if (!sends || local.dense_kv) return;
    own_ = {builder.tensor("k to send", Element::own, local.h_kv, rows_of(local.kv_rows()), problem.d_qk),
            builder.tensor("v to send", Element::own, local.h_kv, rows_of(local.kv_rows()), problem.d_v)};
    builder.add(Copy{builder.whole(own_.k), builder.whole(local.k)});
    builder.add(Copy{builder.whole(own_.v), builder.whole(local.v)});
  }

  int groups() const noexcept { return groups_; }
  std::int64_t heads() const noexcept { return heads_; }
  const std::vector<Pieces>& order() const noexcept { return in_order_; }

  void start(int group) {
    const std::int64_t head = group * heads_;
    std::vector<PlanTransfer> transfers;
    for (int member = 0; member < local_.size(); ++member) {
      if (member == local_.me) continue;
      const int rank = local_.members[static_cast<std::size_t>(member)];
      if (is_needed(builder_.problem(), local_, member, local_.me)) {
        transfers.push_back({true, rank, builder_.heads_of(own_.k, head, heads_)});
        transfers.push_back({true, rank, builder_.heads_of(own_.v, head, heads_)});
      }
      if (is_needed(builder_.problem(), local_, local_.me, member)) {
        const Stage& stage = stages_[group % 2][static_cast<std::size_t>(member)];
        transfers.push_back({false, rank, builder_.whole(stage.k)});
        transfers.push_back({false, rank, builder_.whole(stage.v)});
      }
    }
    exchanges_[group % 2] = builder_.exchange(std::move(transfers));
  }

  /// The block has the keys of these heads.
  KeyTensors take(int group) {
    builder_.wait(exchanges_[group % 2]);
    for (int member = 0; member < local_.size(); ++member) {
      if (!is_needed(builder_.problem(), local_, local_.me, member)) continue;
      const Stage& stage = stages_[group % 2][static_cast<std::size_t>(member)];
      if (member == local_.me) {
        place(member, local_.k, local_.v, group * heads_);
      } else {
        place(member, stage.k, stage.v, 0);
      }
    }
    KeyTensors keys = block_;
    keys.own_head = group * heads_;
    return keys;
  }

  std::vector<Call> calls(KeyTensors keys) const {
    std::vector<Call> all;
    Pieces rest = local_.q_rows();
    if (rest.empty()) return all;
    // Rows of all sequences that are in the same place of their shard, together.
    while (!rest.empty()) {
      std::vector<Block> blocks;
      Pieces later;
      int before = -1;
      for (const Piece& piece : rest) {
        if (piece.sequence == before) {
          later.push_back(piece);
          continue;
        }
        before = piece.sequence;
        const std::vector<Block> more =
            blocks_of(builder_.problem(), {piece}, seen_by(builder_.problem(), piece, in_order_));
        blocks.insert(blocks.end(), more.begin(), more.end());
      }
      const std::vector<Call> calls = calls_of(builder_, local_, keys, blocks);
      all.insert(all.end(), calls.begin(), calls.end());
      rest = std::move(later);
    }
    return all;
  }

  KeyTensors keys(int group) const {
    KeyTensors keys = block_;
    keys.own_head = group * heads_;
    return keys;
  }

 private:
  struct Stage {
    int k = 0, v = 0;
  };

  Stage stage_of(int from) {
    if (from == local_.me || !is_needed(builder_.problem(), local_, local_.me, from)) return {};
    const std::int64_t rows = rows_of(local_.kv_pieces[static_cast<std::size_t>(from)]);
    return {builder_.tensor("k in flight", Element::own, heads_, rows, builder_.problem().d_qk, true),
            builder_.tensor("v in flight", Element::own, heads_, rows, builder_.problem().d_v, true)};
  }

  void place(int member, int k, int v, std::int64_t head) {
    const Pieces& from = local_.kv_pieces[static_cast<std::size_t>(member)];
    const Pieces& to = in_order_[static_cast<std::size_t>(member)];
    for (std::size_t i = 0; i < from.size(); ++i) {
      for (const auto& [target, source] : {std::pair{block_.k, k}, std::pair{block_.v, v}}) {
        builder_.add(Copy{{target, 0, heads_, to[i].row, to[i].count, to[i].row_step},
                          {source, head, heads_, from[i].row, from[i].count, from[i].row_step}});
      }
    }
  }

  Builder& builder_;
  const Local& local_;
  int groups_ = 1;
  std::int64_t heads_ = 0;
  std::vector<Pieces> in_order_;
  KeyTensors block_;
  Stage own_;
  std::vector<Stage> stages_[2];
  int exchanges_[2] = {-1, -1};
};

/// dK and dV of some heads: what each call leaves of them, summed for each member and sent to it, which sums what all
/// have sent in the order of ranks.
class GradientScatter {
 public:
  GradientScatter(Builder& builder, const Local& local, const Gather& gather, const std::vector<Call>& calls)
      : builder_(builder), local_(local), gather_(gather) {
    const Problem& problem = builder.problem();
    for (const Call& call : calls) place_of_.push_back(place(call));
    const std::int64_t rows = total(problem.lengths_kv);
    for (std::size_t i = 0; i < covered_.size(); ++i) {
      parts_.push_back({builder.tensor("dk of calls", Element::own, gather.heads(), rows, problem.d_qk),
                        builder.tensor("dv of calls", Element::own, gather.heads(), rows, problem.d_v)});
    }
    for (int half = 0; half < 2; ++half) {
      for (int member = 0; member < local.size(); ++member) {
        const bool me = member == local.me;
        // Those of one name lie at equal distances, so that one call sums any number of them.
        incoming_[half].push_back(is_needed(problem, local, member, local.me) ? travelling("come") : Pair{});
        outgoing_[half].push_back(!me && is_needed(problem, local, local.me, member) ? travelling("to send") : Pair{});
      }
    }
  }

  Region part(std::size_t call, Region keys, bool is_dv) const {
    const Pair& pair = parts_[place_of_[call]];
    keys.tensor = is_dv ? pair.dv : pair.dk;
    return keys;
  }

  /// The calls of the heads of `group` have been added: what they come to leaves with the next exchange.
  void send(int group) {
    const int half = group % 2;
    std::vector<PlanTransfer> transfers;
    for (int member = 0; member < local_.size(); ++member) {
      const auto i = static_cast<std::size_t>(member);
      if (is_needed(builder_.problem(), local_, local_.me, member)) {
        const Pair& to = member == local_.me ? incoming_[half][i] : outgoing_[half][i];
        sum_pieces(member, to);
        if (member != local_.me) add_both(transfers, true, member, to);
      }
      if (member != local_.me && is_needed(builder_.problem(), local_, member, local_.me)) {
        add_both(transfers, false, member, incoming_[half][i]);
      }
    }
    exchanges_[half] = builder_.hold(std::move(transfers));
  }

  void take(int group) {
    const int half = group % 2;
    builder_.wait(exchanges_[half]);
    const std::int64_t rows = rows_of(local_.kv_rows());
    for (const bool is_dv : {false, true}) {
      const Region to{is_dv ? local_.dv : local_.dk, group * gather_.heads(), gather_.heads(), 0, rows, 1};
      std::vector<Region> from;
      for (int member = 0; member < local_.size(); ++member) {
        const Pair& pair = incoming_[half][static_cast<std::size_t>(member)];
        if (pair.dk != 0) from.push_back(builder_.whole(is_dv ? pair.dv : pair.dk));
      }
      if (from.empty()) {
        builder_.add(Clear{to});
      } else {
        builder_.add(Sum{to, std::move(from)});
      }
    }
  }

 private:
  struct Pair {
    int dk = 0, dv = 0;
  };

  Pair travelling(const char* which) {
    const Problem& problem = builder_.problem();
    const Element element = problem.wide_gradients ? Element::wide : Element::own;
    const std::int64_t rows = rows_of(local_.kv_rows());
    const int dk = builder_.tensor(std::string("dk ") + which, element, gather_.heads(), rows, problem.d_qk);
    return {dk, builder_.tensor(std::string("dv ") + which, element, gather_.heads(), rows, problem.d_v)};
  }

  /// Whether two sets of keys have a row in common. Sets of different steps are taken to.
  static bool meet(const Region& a, const Region& b) {
    const bool apart = a.row + (a.rows - 1) * a.row_step < b.row || b.row + (b.rows - 1) * b.row_step < a.row;
    return !apart && (a.row_step != b.row_step || (a.row - b.row) % a.row_step == 0);
  }

  /// Which of the tensors for parts a call writes: calls of the same keys need one each.
  std::size_t place(const Call& call) {
    for (std::size_t i = 0;; ++i) {
      if (i == covered_.size()) covered_.emplace_back();
      if (std::ranges::any_of(covered_[i], [&call](const Region& keys) { return meet(keys, call.k); })) continue;
      covered_[i].push_back(call.k);
      return i;
    }
  }

  /// Which keys of a piece a call writes, by their numbers in it.
  static std::pair<std::int64_t, std::int64_t> covered(const Piece& piece, const Region& keys) {
    if (piece.row_step % keys.row_step != 0 || (piece.row - keys.row) % keys.row_step != 0) return {0, 0};
    const std::int64_t last = keys.row + (keys.rows - 1) * keys.row_step;
    const auto number = [&piece](std::int64_t row) {  // keys of the piece in front of a row
      const std::int64_t rows = row - piece.row;
      return rows <= 0 ? 0 : std::min((rows + piece.row_step - 1) / piece.row_step, piece.count);
    };
    return {number(keys.row), number(last + 1)};
  }

  void sum_pieces(int member, const Pair& to) {
    const Pieces& rows = local_.kv_pieces[static_cast<std::size_t>(member)];
    const Pieces& order = gather_.order()[static_cast<std::size_t>(member)];
    for (std::size_t i = 0; i < rows.size(); ++i) {
      // Calls begin and end where they will: each part of the piece has its own list of them.
      std::vector<std::int64_t> ends{0, rows[i].count};
      for (const std::vector<Region>& calls : covered_) {
        for (const Region& keys : calls) {
          const auto [first, last] = covered(order[i], keys);
          if (first < last) ends.insert(ends.end(), {first, last});
        }
      }
      std::ranges::sort(ends);
      for (std::size_t end = 1; end < ends.size(); ++end) {
        if (ends[end - 1] < ends[end]) sum_part(order[i], rows[i].row, ends[end - 1], ends[end], to);
      }
    }
  }

  /// Keys [first, last) of a piece, whose own rows begin at `row`.
  void sum_part(const Piece& piece, std::int64_t row, std::int64_t first, std::int64_t last, const Pair& to) {
    for (const bool is_dv : {false, true}) {
      const Region target{is_dv ? to.dv : to.dk, 0, gather_.heads(), row + first, last - first, 1};
      std::vector<Region> from;
      for (std::size_t part = 0; part < parts_.size(); ++part) {
        const auto holds = [&](const Region& keys) {
          const auto [begin, end] = covered(piece, keys);
          return begin <= first && last <= end;
        };
        if (std::ranges::none_of(covered_[part], holds)) continue;
        from.push_back({is_dv ? parts_[part].dv : parts_[part].dk, 0, gather_.heads(),
                        piece.row + first * piece.row_step, last - first, piece.row_step});
      }
      if (from.empty()) {
        builder_.add(Clear{target});
      } else {
        builder_.add(Sum{target, std::move(from)});
      }
    }
  }

  void add_both(std::vector<PlanTransfer>& transfers, bool sends, int member, const Pair& pair) const {
    const int rank = local_.members[static_cast<std::size_t>(member)];
    transfers.push_back({sends, rank, builder_.whole(pair.dk)});
    transfers.push_back({sends, rank, builder_.whole(pair.dv)});
  }

  Builder& builder_;
  const Local& local_;
  const Gather& gather_;
  std::vector<std::vector<Region>> covered_;  ///< by part: the keys of its calls
  std::vector<std::size_t> place_of_;         ///< by call
  std::vector<Pair> parts_;
  std::vector<Pair> incoming_[2], outgoing_[2];
  int exchanges_[2] = {-1, -1};
};

}  // namespace

void all_gather_forward(Builder& builder, const Local& local) {
  Gather gather(builder, local);
  gather.start(0);
  for (int group = 0; group < gather.groups(); ++group) {
    if (group + 1 < gather.groups()) gather.start(group + 1);
    const KeyTensors keys = gather.take(group);
    RowSet written;
    add_forward(builder, gather.calls(keys), written);
    clear_rest(builder, local, keys.own_head * local.group(), keys.heads * local.group(), written);
  }
  builder.wait(builder.last_exchange());
}

void all_gather_backward(Builder& builder, const Local& local) {
  Gather gather(builder, local);
  std::vector<std::vector<Call>> all;
  for (int group = 0; group < gather.groups(); ++group) all.push_back(gather.calls(gather.keys(group)));
  GradientSum queries(builder, "dq", {.first = local.dq});
  GradientScatter gradients(builder, local, gather, all[0]);
  gather.start(0);
  for (int group = 0; group < gather.groups(); ++group) {
    if (group + 1 < gather.groups()) {
      gather.start(group + 1);
    } else {
      builder.exchange({});
    }
    gather.take(group);
    const std::vector<Call>& calls = all[static_cast<std::size_t>(group)];
    for (std::size_t i = 0; i < calls.size(); ++i) {
      Backward backward = backward_of(local, builder.problem(), calls[i]);
      backward.dq = queries.part(calls[i].q);
      backward.dk = gradients.part(i, calls[i].k, false);
      backward.dv = gradients.part(i, calls[i].v, true);
      const Region dq = backward.dq;
      builder.add(std::move(backward));
      queries.add(dq);
    }
    gradients.send(group);
    if (group > 0) gradients.take(group - 1);
  }
  builder.exchange({});
  gradients.take(gather.groups() - 1);
  queries.write(local.dq, 0, local.h_q);
  builder.wait(builder.last_exchange());
}

}  // namespace fa::parallel
