#include <algorithm>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "parallel/builder.hpp"
#include "parallel/gradient_sum.hpp"
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

/// KV heads that calls of a step have, and the lane of these.
struct Share {
  std::int64_t head = 0, heads = 0;
  int lane = 0;
};

/// Of every step: the heads whose own keys come last, and then the others. Their calls alternate, so that the last
/// thread blocks of one and the first of the next share the GPU.
std::vector<Share> shares_of(const Local& local, std::int64_t late) {
  const std::int64_t early = local.h_kv - late;
  if (late == 0 || local.size() == 1) return {{0, local.h_kv, 0}};
  return {{early, late, 1}, {0, early, 0}};
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
        buffer.k = builder.travelling("k in flight", local, rows, problem.d_qk, true);
        buffer.v = builder.travelling("v in flight", local, rows, problem.d_v, true);
        buffer.heads = local.h_kv;
      }
    }
    if (reach(local.me) > 0 && !local.dense_kv) copy_own();
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

  /// The keys that send_on has asked for, on the lanes of these.
  void take(int hops, std::span<const Share> shares) {
    if (!comes_) return;
    for (const Share& share : shares) {
      builder_.lane(share.lane);
      builder_.wait(exchange_);
    }
    held_ = buffers_[hops % 2];
  }

  std::vector<Call> calls(int hops, const KeyTensors& keys) const {
    if (!has(hops)) return {};
    return calls_of(local_.me, member(-hops), keys);
  }

  /// Whether calls of a member over the keys that it gets first have no key in common: their dK and dV are no sums.
  bool has_one_part(int of) const {
    const int owner = (of + local_.size() - 1) % local_.size();
    RowSet written;
    for (const Call& call : calls_of(of, owner, held_)) {
      if (written.has(call.k.row, call.k.row + call.k.rows) != RowSet::Has::none) return false;
      written.add(call.k.row, call.k.row + call.k.rows);
    }
    return true;
  }

 private:
  /// Where transfers take K and V from. The buffer of the second step serves until then.
  void copy_own() {
    const Problem& problem = builder_.problem();
    const std::int64_t rows = rows_of(local_.kv_rows());
    const KeyTensors& second = buffers_[1];
    const bool has_room = receives_any() && builder_.at(second.k).rows == rows;
    sent_.k = has_room ? second.k : builder_.travelling("k to send", local_, rows, problem.d_qk, false);
    sent_.v = has_room ? second.v : builder_.travelling("v to send", local_, rows, problem.d_v, false);
    builder_.add(Copy{builder_.whole(sent_.k), builder_.whole(local_.k)});
    builder_.add(Copy{builder_.whole(sent_.v), builder_.whole(local_.v)});
  }

  std::vector<Call> calls_of(int rows, int of_keys, const KeyTensors& keys) const {
    const Pieces& of_rows = local_.q_pieces[static_cast<std::size_t>(rows)];
    const Pieces& those = local_.kv_pieces[static_cast<std::size_t>(of_keys)];
    return parallel::calls_of(builder_, local_, keys, blocks_of(builder_.problem(), of_rows, those));
  }

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

/// The way of dK and dV. What a rank computes for its own keys stays with it. What others compute follows the keys from
/// the first of them on, and comes home behind the last.
///
///   hop 1: a part            ──> hop 2: + a part ──> … ──> home: + the own part
///   a call's own dtype, exact    f32
class GradientRing {
 public:
  GradientRing(Builder& builder, const Local& local, const Ring& ring)
      : builder_(builder),
        local_(local),
        ring_(ring),
        travels_(builder.problem().wide_gradients ? Element::wide : Element::own),
        own_{GradientSum(builder, "dk", {.first = local.dk}), GradientSum(builder, "dv", {.first = local.dv})} {
    const int reach = ring.reach(local.me);
    if (reach == 0) return;
    home_ = pair("come home", reach == 1 && ring.has_one_part(ring.member(1)) ? Element::own : travels_);
  }

  /// Where a call of step `hops` writes.
  Region part(int hops, const Region& keys, bool is_dv) { return sums(hops)[is_dv ? 1 : 0].part(keys); }

  /// Before the calls of a step, which are on the lanes of these.
  void begin(int hops, std::span<const Share> shares) {
    comes_ = exchange_;
    if (hops == 0 || !ring_.has(hops)) return;
    const auto half = static_cast<std::size_t>(hops % 2);
    for (const Share& share : shares) {
      builder_.lane(share.lane);
      builder_.wait(sent_parts_[half]);
    }
    if (!parts_[half]) parts_[half] = pair("of a call", Element::own);
    travelling_.clear();
    for (const bool is_dv : {false, true}) {
      GradientSum::Places places{.first = of(*parts_[half], is_dv), .sums = travels_};
      if (hops > 1 || !ring_.has_one_part(local_.me)) places.sum = of(sum(half), is_dv);
      places.second = second_[is_dv ? 1 : 0];
      travelling_.emplace_back(builder_, is_dv ? "dv" : "dk", places);
    }
  }

  /// Sums of these heads that come with the keys of step `hops`.
  void take(int hops, std::int64_t head, std::int64_t heads) {
    if (hops < 2) return;
    builder_.wait(comes_);
    if (!ring_.has(hops)) return;
    for (const bool is_dv : {false, true}) travelling_[is_dv ? 1 : 0].add(of(incoming(hops), is_dv), head, heads);
  }

  void add(int hops, const Region& dk, const Region& dv) {
    sums(hops)[0].add(dk);
    sums(hops)[1].add(dv);
  }

  /// These heads of step `hops` are complete: they leave with the next exchange.
  void send_on(int hops, std::int64_t head, std::int64_t heads) {
    if (hops == 0) return;
    std::vector<PlanTransfer> transfers;
    const auto add_both = [&](bool sends, int peer, const Pair& pair) {
      transfers.push_back({sends, peer, builder_.heads_of(pair.dk, head, heads)});
      transfers.push_back({sends, peer, builder_.heads_of(pair.dv, head, heads)});
    };
    const auto half = static_cast<std::size_t>(hops % 2);
    const bool is_part = hops == 1 && ring_.has_one_part(local_.me);
    if (ring_.has(hops)) {
      const Pair& to = is_part ? *parts_[half] : sum(half);
      for (const bool is_dv : {false, true}) travelling_[is_dv ? 1 : 0].write(of(to, is_dv), head, heads);
      const bool is_last = hops == ring_.reach(ring_.member(-hops));
      add_both(true, is_last ? ring_.rank(-hops) : ring_.rank(1), to);
      for (const bool is_dv : {false, true}) second_[is_dv ? 1 : 0] = travelling_[is_dv ? 1 : 0].places().second;
    }
    if (hops + 1 < local_.size() && ring_.has(hops + 1)) add_both(false, ring_.rank(-1), incoming(hops + 1));
    if (hops == ring_.reach(local_.me)) add_both(false, ring_.rank(hops), *home_);
    exchange_ = builder_.hold(std::move(transfers));
    if (is_part && ring_.has(hops)) sent_parts_[half] = exchange_;
    if (hops == ring_.reach(local_.me)) comes_home_.push_back({exchange_, head, heads});
  }

  /// dK and dV of the heads of a share, which are all that leave with one of its calls.
  void finish(const Share& share) {
    if (!home_) return write_home({-1, share.head, share.heads});
    for (const Home& home : comes_home_) {
      if (home.head >= share.head && home.head + home.heads <= share.head + share.heads) write_home(home);
    }
  }

 private:
  struct Pair {
    int dk = 0, dv = 0;
  };
  struct Home {
    int exchange = -1;
    std::int64_t head = 0, heads = 0;
  };

  void write_home(const Home& home) {
    if (home_) {
      builder_.wait(home.exchange);
      for (const bool is_dv : {false, true}) own_[is_dv ? 1 : 0].add(of(*home_, is_dv), home.head, home.heads);
    }
    own_[0].write(local_.dk, home.head, home.heads);
    own_[1].write(local_.dv, home.head, home.heads);
  }

  static int of(const Pair& pair, bool is_dv) { return is_dv ? pair.dv : pair.dk; }

  Pair pair(const std::string& what, Element element) {
    const Problem& problem = builder_.problem();
    const std::int64_t rows = rows_of(local_.kv_rows());
    const int dk = builder_.tensor("dk " + what, element, local_.h_kv, rows, problem.d_qk);
    return {dk, builder_.tensor("dv " + what, element, local_.h_kv, rows, problem.d_v)};
  }

  std::span<GradientSum> sums(int hops) {
    return hops == 0 ? std::span<GradientSum>(own_) : std::span<GradientSum>(travelling_);
  }

  const Pair& sum(std::size_t half) {
    if (!sums_[half]) sums_[half] = pair("in the sum", travels_);
    return *sums_[half];
  }

  /// What comes with the keys of step `hops`, from 2 on.
  const Pair& incoming(int hops) {
    if (hops > 2 || !ring_.has_one_part(ring_.member(-1))) return sum(static_cast<std::size_t>(hops % 2));
    if (!first_) first_ = pair("of the rank behind", Element::own);
    return *first_;
  }

  Builder& builder_;
  const Local& local_;
  const Ring& ring_;
  Element travels_;
  GradientSum own_[2];                      ///< of dk and dv
  std::vector<GradientSum> travelling_;     ///< likewise, of the keys of a step
  std::optional<Pair> parts_[2], sums_[2];  ///< by steps in turn
  std::optional<Pair> first_, home_;
  int second_[2] = {-1, -1};
  int sent_parts_[2] = {-1, -1};  ///< exchanges
  int exchange_ = -1;
  int comes_ = -1;  ///< the exchange of what comes for a step
  std::vector<Home> comes_home_;
};

KeyTensors some_heads(KeyTensors keys, std::int64_t head, std::int64_t heads) {
  keys.head += head;
  keys.own_head += head;
  keys.heads = heads;
  return keys;
}

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

std::int64_t last_step_calls(std::int64_t h_kv) {
  return h_kv % 2 == 0 ? 2 : 1;
}

void ring_forward(Builder& builder, const Local& local) {
  Ring ring(builder, local);
  const std::vector<Share> shares = shares_of(local, builder.problem().late_heads);
  std::vector<RowSet> written(shares.size());
  const auto compute = [&](int hops, const KeyTensors& keys, std::size_t i) {
    builder.lane(shares[i].lane);
    add_forward(builder, ring.calls(hops, some_heads(keys, shares[i].head, shares[i].heads)), written[i]);
  };
  const KeyTensors own = ring.held();
  const std::size_t last = shares.size() - 1;
  if (last > 0) builder.fork();
  for (int hops = 0; hops < local.size(); ++hops) {
    ring.send_on(hops);
    for (std::size_t i = hops == 0 ? last : 0; i <= last; ++i) compute(hops, ring.held(), i);
    ring.take(hops, shares);
  }
  if (last > 0) compute(0, own, 0);
  for (std::size_t i = 0; i <= last; ++i) {
    builder.lane(shares[i].lane);
    clear_rest(builder, local, shares[i].head * local.group(), shares[i].heads * local.group(), written[i]);
  }
  builder.join();
  builder.wait(builder.last_exchange());
}

namespace {

/// The calls of a ring's backward, and where what they come to is summed.
class RingBackward {
 public:
  RingBackward(Builder& builder, const Local& local)
      : builder_(builder),
        local_(local),
        ring_(builder, local),
        queries_(builder, "dq", {.first = local.dq}),
        gradients_(builder, local, ring_),
        shares_(shares_of(local, builder.problem().late_gradient_heads)),
        own_(ring_.held()) {}

  void build() {
    const bool is_split = shares_.size() > 1;
    if (is_split) builder_.fork();
    for (int hops = 0; hops < local_.size(); ++hops) {
      ring_.send_on(hops);
      gradients_.begin(hops, shares_);
      for (const Share& share : shares_) {
        builder_.lane(share.lane);
        if (hops > 0 || share.lane == 0) step(hops, share);
      }
      ring_.take(hops, shares_);
    }
    // What others have computed comes home meanwhile.
    builder_.lane(shares_.front().lane);
    if (is_split) compute(0, own_, shares_.front().head, shares_.front().heads);
    for (const Share& share : shares_) {
      builder_.lane(share.lane);
      queries_.write(local_.dq, share.head * local_.group(), share.heads * local_.group());
      gradients_.finish(share);
    }
    builder_.join();
    builder_.wait(builder_.last_exchange());
  }

 private:
  /// Where nothing follows the last step, what its first heads come to goes home while others are computed.
  void step(int hops, const Share& share) {
    const bool is_last = hops > 0 && hops + 1 == local_.size();
    const std::int64_t parts = is_last && shares_.size() == 1 ? last_step_calls(share.heads) : 1;
    const std::int64_t heads = share.heads / parts;
    for (std::int64_t head = share.head; head < share.head + share.heads; head += heads) {
      compute(hops, ring_.held(), head, heads);
      gradients_.send_on(hops, head, heads);
      if (is_last) builder_.exchange_of_lane();
    }
  }

  void compute(int hops, const KeyTensors& keys, std::int64_t head, std::int64_t heads) {
    bool taken = false;
    for (const Call& call : ring_.calls(hops, some_heads(keys, head, heads))) {
      Backward backward = backward_of(local_, builder_.problem(), call);
      // Own keys write all rows, and need no copy where they are the only ones.
      backward.dq = queries_.part(call.q, shares_.size() > 1 && head == shares_.front().head && hops > 0);
      backward.dk = gradients_.part(hops, call.k, false);
      backward.dv = gradients_.part(hops, call.v, true);
      const Region dq = backward.dq, dk = backward.dk, dv = backward.dv;
      builder_.add(std::move(backward));
      queries_.add(dq);
      if (!taken) gradients_.take(hops, head, heads);
      taken = true;
      gradients_.add(hops, dk, dv);
    }
    if (!taken) gradients_.take(hops, head, heads);
  }

  Builder& builder_;
  const Local& local_;
  Ring ring_;
  GradientSum queries_;
  GradientRing gradients_;
  const std::vector<Share> shares_;
  const KeyTensors own_;
};

}  // namespace

void ring_backward(Builder& builder, const Local& local) {
  if (!backward_alone(builder, local)) RingBackward(builder, local).build();
}

}  // namespace fa::parallel
