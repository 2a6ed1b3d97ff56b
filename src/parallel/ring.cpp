#include <algorithm>

#include "parallel/builder.hpp"
#include "parallel/layout.hpp"

namespace fa::parallel {
namespace {

/// How far keys travel: of each member, to how many members behind it they have to go.
std::vector<int> reach_of(const Problem& problem, const Local& local) {
  std::vector<int> reach;
  const int n = local.size();
  for (int from = 0; from < n; ++from) {
    int farthest = 0;
    for (int hops = 1; hops < n; ++hops) {
      const auto at = static_cast<std::size_t>((from + hops) % n);
      if (any_visible(problem, local.q_pieces[at], local.kv_pieces[static_cast<std::size_t>(from)])) farthest = hops;
    }
    reach.push_back(farthest);
  }
  return reach;
}

/// The way of K and V around the ring, of two buffers.
class Ring {
 public:
  Ring(Builder& builder, const Local& local)
      : builder_(builder), local_(local), reach_(reach_of(builder.problem(), local)) {
    const Problem& problem = builder.problem();
    held_ = {local.k, local.v, 0, local.h_kv, 0};
    sent_ = held_;
    std::int64_t rows = 0;
    for (const Pieces& pieces : local.kv_pieces) rows = std::max(rows, rows_of(pieces));
    if (receives_any()) {
      for (KeyTensors& buffer : buffers_) {
        buffer.k = builder.tensor("k in flight", Element::own, local.h_kv, rows, problem.d_qk, true);
        buffer.v = builder.tensor("v in flight", Element::own, local.h_kv, rows, problem.d_v, true);
        buffer.heads = local.h_kv;
      }
    }
    if (reach(local.me) > 0 && !local.dense_kv) {
      sent_.k = builder.tensor("k to send", Element::own, local.h_kv, rows_of(local.kv_rows()), problem.d_qk);
      sent_.v = builder.tensor("v to send", Element::own, local.h_kv, rows_of(local.kv_rows()), problem.d_v);
      builder.add(Copy{builder.whole(sent_.k), builder.whole(local.k)});
      builder.add(Copy{builder.whole(sent_.v), builder.whole(local.v)});
    }
  }

  int member(int hops) const { return ((local_.me + hops) % local_.size() + local_.size()) % local_.size(); }
  int rank(int hops) const { return local_.members[static_cast<std::size_t>(member(hops))]; }
  int reach(int of) const { return reach_[static_cast<std::size_t>(of)]; }
  /// Whether this rank gets the keys of the member `hops` in front of it.
  bool has(int hops) const { return hops <= reach(member(-hops)); }
  const KeyTensors& held() const noexcept { return held_; }

  /// Keys of step `hops` go on, those of the next one come.
  void send_on(int hops) {
    std::vector<PlanTransfer> transfers;
    const KeyTensors& from = hops == 0 ? sent_ : held_;
    if (has(hops) && hops < reach(member(-hops))) {
      transfers.push_back({true, rank(1), builder_.whole(from.k)});
      transfers.push_back({true, rank(1), builder_.whole(from.v)});
    }
    const KeyTensors& next = buffers_[hops % 2];
    comes_ = hops + 1 < local_.size() && has(hops + 1);
    if (comes_) {
      transfers.push_back({false, rank(-1), builder_.whole(next.k)});
      transfers.push_back({false, rank(-1), builder_.whole(next.v)});
    }
    exchange_ = builder_.exchange(std::move(transfers));
  }

  /// The keys that send_on has asked for.
  void take(int hops) {
    if (!comes_) return;
    builder_.wait(exchange_);
    held_ = buffers_[hops % 2];
  }

  std::vector<Call> calls(int hops, const KeyTensors& keys) const {
    if (!has(hops)) return {};
    const Pieces& of_keys = local_.kv_pieces[static_cast<std::size_t>(member(-hops))];
    return calls_of(builder_, local_, keys, blocks_of(builder_.problem(), local_.q_rows(), of_keys));
  }

 private:
  bool receives_any() const {
    for (int hops = 1; hops < local_.size(); ++hops) {
      if (has(hops)) return true;
    }
    return false;
  }

  Builder& builder_;
  const Local& local_;
  std::vector<int> reach_;
  KeyTensors held_, sent_, buffers_[2];
  bool comes_ = false;
  int exchange_ = -1;
};

/// The way of dK and dV, which follow their keys and then go home.
class GradientRing {
 public:
  GradientRing(Builder& builder, const Local& local, const Ring& ring) : builder_(builder), local_(local), ring_(ring) {
    const Problem& problem = builder.problem();
    const Element travels = problem.wide_gradients ? Element::wide : Element::own;
    const std::int64_t rows = rows_of(local.kv_rows());
    const auto pair = [&](const char* dk, const char* dv, Element element) {
      return Pair{builder.tensor(dk, element, local.h_kv, rows, problem.d_qk),
                  builder.tensor(dv, element, local.h_kv, rows, problem.d_v)};
    };
    part_ = pair("dk of a call", "dv of a call", Element::own);
    for (Pair& sum : sums_) sum = pair("dk in the sum", "dv in the sum", travels);
    home_ = sums_[0];  // where keys do not travel
    if (ring.reach(local.me) > 0) home_ = pair("dk come home", "dv come home", travels);
  }

  struct Pair {
    int dk = 0, dv = 0;
  };

  Region part(Region keys, bool is_dv) const {
    keys.tensor = is_dv ? part_.dv : part_.dk;
    return keys;
  }

  /// Sums that come with the keys of step `hops`.
  void take(int hops) {
    if (hops > 0) builder_.wait(exchange_);
    written_ = {};
    if (hops > 0) written_.add(0, builder_.at(part_.dk).rows);
  }

  void add(int hops, const Call& call) {
    const std::int64_t begin = call.k.row, end = begin + call.k.rows;
    const RowSet::Has has = written_.has(begin, end);
    for (const bool is_dv : {false, true}) {
      const Region from = part(call.k, is_dv);
      Region to = from;
      to.tensor = is_dv ? sums_[hops % 2].dv : sums_[hops % 2].dk;
      if (has == RowSet::Has::some) {
        for (const auto& [first, last] : written_.missing(begin, end)) {
          builder_.add(Clear{{to.tensor, to.head, to.heads, first, last - first, 1}});
        }
      }
      builder_.add(has == RowSet::Has::none ? Sum{to, {from}} : Sum{to, {to, from}});
    }
    written_.add(begin, end);
  }

  void send_on(int hops) {
    const Pair& sum = sums_[hops % 2];
    if (ring_.has(hops)) clear_rest_of(sum);
    if (hops == 0 && ring_.reach(local_.me) == 0) add_results();
    std::vector<PlanTransfer> transfers;
    const auto add_both = [&](bool sends, int peer, const Pair& pair) {
      transfers.push_back({sends, peer, builder_.whole(pair.dk)});
      transfers.push_back({sends, peer, builder_.whole(pair.dv)});
    };
    const int of = ring_.member(-hops);
    if (ring_.has(hops) && hops < ring_.reach(of)) add_both(true, ring_.rank(1), sum);
    if (hops > 0 && hops == ring_.reach(of)) add_both(true, ring_.rank(-hops), sum);
    if (hops + 1 < local_.size() && ring_.has(hops + 1)) add_both(false, ring_.rank(-1), sums_[(hops + 1) % 2]);
    if (hops > 0 && hops == ring_.reach(local_.me)) add_both(false, ring_.rank(hops), home_);
    exchange_ = builder_.exchange(std::move(transfers));
  }

  void finish() {
    builder_.wait(builder_.last_exchange());
    if (ring_.reach(local_.me) > 0) add_results();
  }

 private:
  void add_results() {
    builder_.add(Sum{builder_.whole(local_.dk), {builder_.whole(home_.dk)}});
    builder_.add(Sum{builder_.whole(local_.dv), {builder_.whole(home_.dv)}});
  }

  void clear_rest_of(const Pair& sum) {
    for (const auto& [first, last] : written_.missing(builder_.at(part_.dk).rows)) {
      for (const int tensor : {sum.dk, sum.dv}) {
        builder_.add(Clear{{tensor, 0, local_.h_kv, first, last - first, 1}});
      }
    }
  }

  Builder& builder_;
  const Local& local_;
  const Ring& ring_;
  Pair part_, sums_[2], home_;
  RowSet written_;
  int exchange_ = -1;
};

/// A rank that is alone, with one call for all: nothing is to be summed.
bool backward_alone(Builder& builder, const Local& local) {
  if (local.size() > 1) return false;
  const KeyTensors keys{local.k, local.v, 0, local.h_kv, 0};
  const std::vector<Call> calls =
      calls_of(builder, local, keys, blocks_of(builder.problem(), local.q_rows(), local.kv_rows()));
  if (calls.size() != 1 || calls[0].q.rows != rows_of(local.q_rows()) || calls[0].k.rows != rows_of(local.kv_rows())) {
    return false;
  }
  Backward backward = backward_of(local, builder.problem(), calls[0]);
  backward.dq = builder.whole(local.dq);
  backward.dk = builder.whole(local.dk);
  backward.dv = builder.whole(local.dv);
  builder.add(std::move(backward));
  return true;
}

}  // namespace

void ring_forward(Builder& builder, const Local& local) {
  Ring ring(builder, local);
  RowSet written;
  for (int hops = 0; hops < local.size(); ++hops) {
    ring.send_on(hops);
    add_forward(builder, ring.calls(hops, ring.held()), written);
    ring.take(hops);
  }
  clear_rest(builder, local, 0, local.h_q, written);
  builder.wait(builder.last_exchange());
}

void ring_backward(Builder& builder, const Local& local) {
  if (backward_alone(builder, local)) return;
  Ring ring(builder, local);
  std::vector<std::vector<Call>> all;
  for (int hops = 0; hops < local.size(); ++hops) all.push_back(ring.calls(hops, ring.held()));
  QueryGradients queries(builder, local, all);
  GradientRing gradients(builder, local, ring);
  for (int hops = 0; hops < local.size(); ++hops) {
    ring.send_on(hops);
    const std::vector<Call> calls = ring.calls(hops, ring.held());
    bool first = true;
    for (const Call& call : calls) {
      Backward backward = backward_of(local, builder.problem(), call);
      backward.dq = queries.part(call);
      backward.dk = gradients.part(call.k, false);
      backward.dv = gradients.part(call.k, true);
      builder.add(std::move(backward));
      queries.add(call);
      if (first) gradients.take(hops);
      first = false;
      gradients.add(hops, call);
    }
    if (first) gradients.take(hops);
    gradients.send_on(hops);
    ring.take(hops);
  }
  queries.finish();
  gradients.finish();
}

}  // namespace fa::parallel
