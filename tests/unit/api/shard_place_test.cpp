// Calls that are parts of a larger attention, on the host in float64: all parts together come to the whole, forward and
// backward, whatever the mask, function or dropout.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <fa/attention.hpp>

#include "expect_error.hpp"

namespace fa {
namespace {

using test::expect_error;
using test::expect_invalid;

constexpr std::int64_t kB = 2, kHeads = 4, kHeadsKv = 2, kRows = 96, kKeys = 128, kD = 8;
constexpr std::int64_t kGroup = kHeads / kHeadsKv;

/// `count` indices of an axis, `step` apart.
struct Run {
  std::int64_t begin, count, step = 1;
};

/// An axis as runs: pieces that end at `cuts`, or with `steps` stripes.
std::vector<Run> cut(std::vector<std::int64_t> cuts) {
  std::vector<Run> runs;
  for (std::size_t i = 1; i < cuts.size(); ++i) runs.push_back({cuts[i - 1], cuts[i] - cuts[i - 1]});
  return runs;
}
std::vector<Run> striped(std::int64_t length, std::int64_t steps) {
  std::vector<Run> runs;
  for (std::int64_t i = 0; i < steps; ++i) runs.push_back({i, (length - i + steps - 1) / steps, steps});
  return runs;
}

/// How the whole is cut: heads are KV heads.
struct Cuts {
  std::string name;
  std::vector<Run> b = cut({0, kB});
  std::vector<Run> heads = cut({0, kHeadsKv});
  std::vector<Run> rows = cut({0, kRows});
  std::vector<Run> keys = cut({0, kKeys});
};

struct Kind {
  std::string name;
  AttentionConfig config;
};

AttentionConfig plain() {
  AttentionConfig config;
  config.head_dim = static_cast<int>(kD);
  config.dtype = DType::f64;
  return config;
}

std::vector<double> random_values(std::int64_t count, std::uint64_t seed) {
  std::mt19937_64 engine(seed);
  std::vector<double> values(static_cast<std::size_t>(count));
  for (double& value : values) value = static_cast<double>(engine() >> 11) * 0x1p-52 - 1;
  return values;
}

/// Row-major numbers of a shape.
struct Array {
  std::array<std::int64_t, 4> shape;
  int rank;
  std::vector<double> values;

  TensorView view() {
    TensorView view(static_cast<void*>(values.data()), DType::f64, {shape[0]});
    view.rank = rank;
    std::int64_t stride = 1;
    for (int axis = rank - 1; axis >= 0; --axis) {
      const auto i = static_cast<std::size_t>(axis);
      view.shape[i] = shape[i];
      view.strides[i] = stride;
      stride *= shape[i];
    }
    return view;
  }
};

Array array(std::initializer_list<std::int64_t> shape, std::uint64_t seed) {
  Array result{};
  result.rank = static_cast<int>(shape.size());
  std::copy(shape.begin(), shape.end(), result.shape.begin());
  std::int64_t count = 1;
  for (const std::int64_t size : shape) count *= size;
  result.values = seed == 0 ? std::vector<double>(static_cast<std::size_t>(count)) : random_values(count, seed);
  return result;
}

TensorView part_of(TensorView view, std::initializer_list<Run> runs) {
  std::size_t axis = 0;
  auto* data = static_cast<double*>(view.data);
  for (const Run& run : runs) {
    data += run.begin * view.strides[axis];
    view.shape[axis] = run.count;
    view.strides[axis] *= run.step;
    ++axis;
  }
  view.data = data;
  return view;
}

Array copy_of(const TensorView& view) {
  Array result{view.shape, view.rank, {}};
  for (std::size_t axis = static_cast<std::size_t>(view.rank); axis < 4; ++axis) result.shape[axis] = 1;
  TensorView from = view;
  for (std::size_t axis = static_cast<std::size_t>(view.rank); axis < 4; ++axis) from.shape[axis] = 1;
  for (std::int64_t a = 0; a < from.shape[0]; ++a) {
    for (std::int64_t b = 0; b < from.shape[1]; ++b) {
      for (std::int64_t c = 0; c < from.shape[2]; ++c) {
        for (std::int64_t d = 0; d < from.shape[3]; ++d) {
          const std::int64_t last = view.rank > 3 ? d * from.strides[3] : 0;
          result.values.push_back(static_cast<const double*>(
              from.data)[a * from.strides[0] + b * from.strides[1] + c * from.strides[2] + last]);
        }
      }
    }
  }
  return result;
}

void add_to(const TensorView& target, const Array& terms) {
  std::size_t at = 0;
  for (std::int64_t a = 0; a < terms.shape[0]; ++a) {
    for (std::int64_t b = 0; b < terms.shape[1]; ++b) {
      for (std::int64_t c = 0; c < terms.shape[2]; ++c) {
        for (std::int64_t d = 0; d < terms.shape[3]; ++d) {
          const std::int64_t last = target.rank > 3 ? d * target.strides[3] : 0;
          static_cast<double*>(
              target.data)[a * target.strides[0] + b * target.strides[1] + c * target.strides[2] + last] +=
              terms.values[at++];
        }
      }
    }
  }
}

struct Results {
  Array o = array({kB, kHeads, kRows, kD}, 0), lse = array({kB, kHeads, kRows}, 0);
  Array dq = array({kB, kHeads, kRows, kD}, 0), dk = array({kB, kHeadsKv, kKeys, kD}, 0),
        dv = array({kB, kHeadsKv, kKeys, kD}, 0);
  Array dbias = array({kB, kHeads, kRows, kKeys}, 0), dslope = array({kHeads}, 0), dsink = array({kHeads}, 0);
};

/// The whole, and what its parts come to.
class Whole {
 public:
  explicit Whole(const AttentionConfig& config) : config_(config) { without_sink_.sink = false; }

  Results at_once() {
    Results r;
    const Attention attention = Attention::create(config_, Device::host());
    ForwardInputs in = inputs(config_);
    in.q = q_.view(), in.k = k_.view(), in.v = v_.view();
    if (config_.sink) in.sink = sink_.view();
    attention.forward(in, {r.o.view(), r.lse.view()});
    BackwardInputs back = backward_inputs(config_, in);
    back.o = r.o.view(), back.lse = r.lse.view(), back.dout = dout_.view(), back.dlse = dlse_.view();
    BackwardOutputs out{r.dq.view(), r.dk.view(), r.dv.view(), gradients(r)};
    if (config_.sink) out.dsink = r.dsink.view();
    attention.backward(back, out);
    return r;
  }

  Results in_parts(const Cuts& cuts) {
    Results r;
    for (const Run& b : cuts.b) {
      for (const Run& heads : cuts.heads) {
        const Run q_heads{heads.begin * kGroup, heads.count * kGroup};
        for (const Run& rows : cuts.rows) forward_rows(cuts, b, q_heads, heads, rows, &r);
        for (const Run& rows : cuts.rows) {
          for (std::size_t i = 0; i < cuts.keys.size(); ++i) {
            backward_part(b, q_heads, heads, rows, cuts.keys[i], i == 0, &r);
          }
        }
      }
    }
    return r;
  }

 private:
  ForwardInputs inputs(const AttentionConfig& config) {
    ForwardInputs in;
    for (const Capture& capture : config.score.captures) in.captures.add({capture.name, captured(capture.name)});
    for (const Capture& capture : config.mask.captures) in.captures.add({capture.name, captured(capture.name)});
    in.dropout = {.seed = 7, .offset = 11};
    return in;
  }
  BackwardInputs backward_inputs(const AttentionConfig& config, const ForwardInputs& in) {
    BackwardInputs back;
    back.q = in.q, back.k = in.k, back.v = in.v;
    back.captures = inputs(config).captures;
    back.sink = in.sink;
    back.dropout = in.dropout;
    back.place = in.place;
    return back;
  }
  TensorView captured(std::string_view name) { return name == "bias" ? bias_.view() : slope_.view(); }
  Captures gradients(Results& r) {
    Captures captures;
    for (const Capture& capture : config_.score.captures) {
      captures.add({capture.name, capture.name == "bias" ? r.dbias.view() : r.dslope.view()});
    }
    return captures;
  }

  static ShardPlace place(const Run& b, const Run& heads, const Run& rows, const Run& keys) {
    return {b.begin, heads.begin, rows.begin, keys.begin, rows.step, keys.step, kB, kHeads, kRows, kKeys};
  }

  ForwardInputs part(const AttentionConfig& config, const Run& b, const Run& q_heads, const Run& heads, const Run& rows,
                     const Run& keys) {
    ForwardInputs in = inputs(config);
    in.q = part_of(q_.view(), {b, q_heads, rows});
    in.k = part_of(k_.view(), {b, heads, keys});
    in.v = part_of(v_.view(), {b, heads, keys});
    if (config.sink) in.sink = part_of(sink_.view(), {q_heads});
    in.place = place(b, q_heads, rows, keys);
    return in;
  }

  /// Parts of the keys are merged.
  void forward_rows(const Cuts& cuts, const Run& b, const Run& q_heads, const Run& heads, const Run& rows, Results* r) {
    std::vector<Array> o, lse;
    for (std::size_t i = 0; i < cuts.keys.size(); ++i) {
      const AttentionConfig& config = i == 0 ? config_ : without_sink_;
      o.push_back(array({b.count, q_heads.count, rows.count, kD}, 0));
      lse.push_back(array({b.count, q_heads.count, rows.count}, 0));
      Attention::create(config, Device::host())
          .forward(part(config, b, q_heads, heads, rows, cuts.keys[i]), {o.back().view(), lse.back().view()});
    }
    std::vector<AttentionState> states;
    for (std::size_t i = 0; i < o.size(); ++i) states.push_back({o[i].view(), lse[i].view()});
    const TensorView o_part = part_of(r->o.view(), {b, q_heads, rows});
    const TensorView lse_part = part_of(r->lse.view(), {b, q_heads, rows});
    Attention::create(without_sink_, Device::host()).merge({.states = states}, {o_part, lse_part});
  }

  void backward_part(const Run& b, const Run& q_heads, const Run& heads, const Run& rows, const Run& keys,
                     bool with_sink, Results* r) {
    const AttentionConfig& config = with_sink ? config_ : without_sink_;
    BackwardInputs in = backward_inputs(config, part(config, b, q_heads, heads, rows, keys));
    in.o = part_of(r->o.view(), {b, q_heads, rows});
    in.lse = part_of(r->lse.view(), {b, q_heads, rows});
    in.dout = part_of(dout_.view(), {b, q_heads, rows});
    in.dlse = part_of(dlse_.view(), {b, q_heads, rows});
    Results own;
    const TensorView dq = part_of(own.dq.view(), {b, q_heads, rows}), dk = part_of(own.dk.view(), {b, heads, keys}),
                     dv = part_of(own.dv.view(), {b, heads, keys}), dsink = part_of(own.dsink.view(), {q_heads});
    BackwardOutputs out{dq, dk, dv, gradients(own)};
    if (config.sink) out.dsink = dsink;
    Attention::create(config, Device::host()).backward(in, out);
    add_to(part_of(r->dq.view(), {b, q_heads, rows}), copy_of(dq));
    add_to(part_of(r->dk.view(), {b, heads, keys}), copy_of(dk));
    add_to(part_of(r->dv.view(), {b, heads, keys}), copy_of(dv));
    for (auto member : {&Results::dbias, &Results::dslope, &Results::dsink}) {
      for (std::size_t i = 0; i < (own.*member).values.size(); ++i) {
        (r->*member).values[i] += (own.*member).values[i];
      }
    }
  }

  AttentionConfig config_;
  AttentionConfig without_sink_ = config_;
  Array q_ = array({kB, kHeads, kRows, kD}, 1), k_ = array({kB, kHeadsKv, kKeys, kD}, 2),
        v_ = array({kB, kHeadsKv, kKeys, kD}, 3);
  Array dout_ = array({kB, kHeads, kRows, kD}, 4), dlse_ = array({kB, kHeads, kRows}, 5);
  Array bias_ = array({kB, kHeads, kRows, kKeys}, 6), slope_ = array({kHeads}, 7), sink_ = array({kHeads}, 8);
};

double distance(const Array& a, const Array& b) {
  double most = 0;
  for (std::size_t i = 0; i < a.values.size(); ++i) {
    const double difference = a.values[i] == b.values[i] ? 0 : std::abs(a.values[i] - b.values[i]);
    most = difference <= most ? most : difference;  // a NaN stays
  }
  return most;
}

struct Named {
  const char* name;
  Array Results::*member;
};
constexpr Named kAll[] = {{"o", &Results::o},           {"lse", &Results::lse},    {"dq", &Results::dq},
                          {"dk", &Results::dk},         {"dv", &Results::dv},      {"dbias", &Results::dbias},
                          {"dslope", &Results::dslope}, {"dsink", &Results::dsink}};

void expect_equal(const Results& parts, const Results& whole, const std::string& what) {
  for (const Named& each : kAll) {
    const Array& expected = whole.*each.member;
    double scale = 1;
    for (const double value : expected.values) scale = std::isfinite(value) ? std::max(scale, std::abs(value)) : scale;
    EXPECT_LE(distance(parts.*each.member, expected), 1e-13 * scale) << what << ": " << each.name;
  }
}

/// Plain attention, and every mask in closed form.
std::vector<Kind> masks() {
  std::vector<Kind> kinds{{"plain", plain()}};
  for (const CausalAlign align : {CausalAlign::bottom_right, CausalAlign::top_left}) {
    const std::string end = align == CausalAlign::top_left ? "_top_left" : "";
    AttentionConfig config = plain();
    config.causal_align = align;
    config.causal = true;
    kinds.push_back({"causal" + end, config});
    config.window_left = 20;
    kinds.push_back({"causal_window" + end, config});
    config.causal = false;
    config.window_right = 9;
    kinds.push_back({"window" + end, config});
    config.window_left = -1;
    config.window_right = -1;
    config.chunk = 24;
    kinds.push_back({"chunk" + end, config});
    config.causal = true;
    config.window_left = 10;
    kinds.push_back({"causal_window_chunk" + end, config});
  }
  return kinds;
}

/// What depends on positions, heads or batch entries otherwise.
std::vector<Kind> functions() {
  std::vector<Kind> kinds;
  AttentionConfig config = plain();
  config.causal = true;
  config.score.expression = "score - slope[h] * abs(q + s_kv - s_q - kv)";
  config.score.captures = {{"slope", DType::f64, true}};
  kinds.push_back({"alibi", config});
  config.causal = false;
  config.score.expression = "score + bias[b, h, q, kv]";
  config.score.captures = {{"bias", DType::f64, true}};
  kinds.push_back({"bias", config});
  config.score = {};
  config.mask.expression = "(q * 3 + kv * 5 + h + b) % 7 != 0";
  kinds.push_back({"mask", config});
  return kinds;
}

std::vector<Cuts> contiguous() {
  return {{.name = "rows", .rows = cut({0, 32, 64, kRows})},
          {.name = "keys", .keys = cut({0, 32, 96, kKeys})},
          {.name = "heads", .heads = cut({0, 1, 2})},
          {.name = "all",
           .b = cut({0, 1, 2}),
           .heads = cut({0, 1, 2}),
           .rows = cut({0, 64, kRows}),
           .keys = cut({0, 64, kKeys})}};
}

TEST(ShardPlace, PartsComeToTheWhole) {
  std::vector<Kind> kinds = masks();
  for (const Kind& kind : functions()) kinds.push_back(kind);
  std::vector<Cuts> all = contiguous();
  all.push_back({.name = "uneven", .rows = cut({0, 1, 50, kRows}), .keys = cut({0, 17, 90, 91, kKeys})});
  for (const Kind& kind : kinds) {
    Whole whole(kind.config);
    const Results expected = whole.at_once();
    for (const Cuts& cuts : all) expect_equal(whole.in_parts(cuts), expected, kind.name + " by " + cuts.name);
  }
}

TEST(ShardPlace, StripesComeToTheWhole) {
  for (const Kind& kind : masks()) {
    Whole whole(kind.config);
    const Results expected = whole.at_once();
    for (const std::int64_t steps : {2, 3}) {
      const Cuts cuts{.name = "stripes", .rows = striped(kRows, steps), .keys = striped(kKeys, steps)};
      expect_equal(whole.in_parts(cuts), expected, kind.name + " by " + std::to_string(steps));
    }
  }
}

// Functions see positions one by one, and take any two steps.
TEST(ShardPlace, FunctionsTakeUnequalSteps) {
  for (Kind& kind : functions()) {
    kind.config.causal = false;
    Whole whole(kind.config);
    const Cuts cuts{.name = "stripes", .rows = striped(kRows, 3), .keys = striped(kKeys, 2)};
    expect_equal(whole.in_parts(cuts), whole.at_once(), kind.name);
  }
}

TEST(ShardPlace, DropoutIsThatOfTheWhole) {
  AttentionConfig config = plain();
  config.dropout = 0.3f;
  config.causal = true;
  Whole whole(config);
  const Results expected = whole.at_once();
  for (const Cuts& cuts : contiguous()) expect_equal(whole.in_parts(cuts), expected, cuts.name);
}

TEST(ShardPlace, ASinkCountsInOnePartOfTheKeys) {
  AttentionConfig config = plain();
  config.sink = true;
  config.causal = true;
  Whole whole(config);
  const Results expected = whole.at_once();
  for (const Cuts& cuts : contiguous()) expect_equal(whole.in_parts(cuts), expected, cuts.name);
}

/// One call of 8 rows and 12 keys, of 2 heads that share one.
struct Call {
  explicit Call(const AttentionConfig& config) : attention(Attention::create(config, Device::host())) {
    in.q = q.view(), in.k = k.view(), in.v = v.view();
  }
  void run() { attention.forward(in, {o.view(), lse.view()}); }
  void run_backward() {
    BackwardInputs back;
    back.q = in.q, back.k = in.k, back.v = in.v;
    back.o = o.view(), back.lse = lse.view(), back.dout = q.view();
    back.place = in.place;
    back.max_multiprocessors = in.max_multiprocessors;
    attention.backward(back, {.dq = dq.view()});
  }

  Attention attention;
  Array q = array({1, 2, 8, kD}, 1), k = array({1, 1, 12, kD}, 2), v = array({1, 1, 12, kD}, 3);
  Array o = array({1, 2, 8, kD}, 0), lse = array({1, 2, 8}, 0), dq = array({1, 2, 8, kD}, 0);
  ForwardInputs in;
};

TEST(ShardPlace, TheDefaultIsThePlaceOfTheWhole) {
  AttentionConfig config = plain();
  config.causal = true;
  Call none(config);
  none.run();
  for (const ShardPlace& place :
       {ShardPlace{}, ShardPlace{.whole_s_kv = 12}, ShardPlace{.whole_b = 1, .whole_h_q = 2, .whole_s_q = 8}}) {
    Call placed(config);
    placed.in.place = place;
    placed.run();
    EXPECT_EQ(placed.o.values, none.o.values);
    EXPECT_EQ(placed.lse.values, none.lse.values);
  }
  Call moved(config);
  moved.in.place = ShardPlace{.kv = 4, .whole_s_kv = 20};
  moved.run();
  EXPECT_NE(moved.o.values, none.o.values);
}

struct Refusal {
  const char* argument;
  ShardPlace place;
};

// What memory holds when a call runs is where it stands, as if the call had said so.
TEST(ShardPlace, MayBeInMemory) {
  AttentionConfig causal = plain(), chunks = plain(), function = plain(), drops = plain();
  causal.causal = true;
  chunks.chunk = 12;
  chunks.window_left = 9;
  function.score.expression = "score + 0.125 * float(q - kv) + 0.25 * float(h) - 0.5 * float(b) + 0.01 * float(s_kv)";
  drops.dropout = 0.5f;
  constexpr std::array<std::int64_t, 4> kPlaces[] = {{0, 0, 0, 0}, {1, 2, 32, 32}, {0, 4, 64, 32}, {2, 0, 32, 64}};
  for (const AttentionConfig& config : {causal, chunks, function, drops}) {
    std::array<std::int64_t, 4> memory{};
    Call read(config);
    ShardPlace place{.whole_b = 3, .whole_h_q = 6, .whole_s_q = 100, .whole_s_kv = 90};
    read.in.place = place;
    read.in.place->begin = memory.data();
    for (const auto& [b, h_q, q, kv] : kPlaces) {
      memory = {b, h_q, q, kv};
      read.run();
      read.run_backward();
      Call given(config);
      place.b = b, place.h_q = h_q, place.q = q, place.kv = kv;
      given.in.place = place;
      given.run();
      given.run_backward();
      EXPECT_EQ(read.o.values, given.o.values);
      EXPECT_EQ(read.lse.values, given.lse.values);
      EXPECT_EQ(read.dq.values, given.dq.values);
    }
  }
}

// Rounded down to what a place may be, and moved into the whole.
TEST(ShardPlace, InMemoryIsWithinTheWhole) {
  AttentionConfig config = plain();
  config.dropout = 0.5f;
  config.score.expression = "score + 0.125 * float(q - kv) + 0.25 * float(h) - 0.5 * float(b)";
  std::array<std::int64_t, 4> memory{-1, 3, std::numeric_limits<std::int64_t>::max(), 47};
  Call read(config), given(config);
  read.in.place = ShardPlace{.whole_b = 3, .whole_h_q = 6, .whole_s_q = 100, .whole_s_kv = 90};
  given.in.place = read.in.place;
  read.in.place->begin = memory.data();
  given.in.place->h_q = 2;
  given.in.place->q = 64;  // of at most 92
  given.in.place->kv = 32;
  read.run();
  given.run();
  EXPECT_EQ(read.o.values, given.o.values);
}

TEST(ShardPlace, RefusesInMemoryWhatIsNotKnown) {
  const std::array<std::int64_t, 5> memory{};
  const ShardPlace whole{.whole_b = 1, .whole_h_q = 2, .whole_s_q = 8, .whole_s_kv = 12, .begin = memory.data()};
  const auto changed = [&](auto set) {
    ShardPlace place = whole;
    set(place);
    return place;
  };
  const Refusal refusals[] = {
      {"place.b", changed([](ShardPlace& p) { p.b = 1; })},
      {"place.h_q", changed([](ShardPlace& p) { p.h_q = 2; })},
      {"place.q", changed([](ShardPlace& p) { p.q = 1; })},
      {"place.kv", changed([](ShardPlace& p) { p.kv = 1; })},
      {"place.whole_b", changed([](ShardPlace& p) { p.whole_b = 0; })},
      {"place.whole_h_q", changed([](ShardPlace& p) { p.whole_h_q = 0; })},
      {"place.whole_s_q", changed([](ShardPlace& p) { p.whole_s_q = 0; })},
      {"place.whole_s_kv", changed([](ShardPlace& p) { p.whole_s_kv = 0; })},
      {"place.begin", changed([&](ShardPlace& p) {
         p.begin = reinterpret_cast<const std::int64_t*>(reinterpret_cast<const char*>(memory.data()) + 4);
       })}};
  for (const Refusal& refusal : refusals) {
    Call call(plain());
    call.in.place = refusal.place;
    expect_invalid(refusal.argument, [&] { call.run(); });
    expect_invalid(refusal.argument, [&] { call.run_backward(); });
  }
  Call taken(plain());
  taken.in.place = whole;
  taken.run();
  std::array<std::byte, 256> tiles{};
  AttentionConfig masked = plain();
  masked.mask.expression = "q >= kv";
  Call filled(masked);
  filled.in.place = whole;
  filled.in.tiles = {tiles.data(), tiles.size(), true};
  expect_error(ErrorCode::unsupported, "tiles", [&] { filled.run(); });
}

// A part whose keys are all behind its rows: no key for any.
TEST(ShardPlace, RowsMayKeepNoKeyOfAPart) {
  AttentionConfig config = plain();
  config.causal = true;
  Call call(config);
  call.in.place = ShardPlace{.kv = 100, .whole_s_q = 200, .whole_s_kv = 200};
  call.run();
  for (const double o : call.o.values) EXPECT_EQ(o, 0);
  for (const double lse : call.lse.values) EXPECT_EQ(lse, -std::numeric_limits<double>::infinity());
  call.run_backward();
  for (const double dq : call.dq.values) EXPECT_EQ(dq, 0);
}

// Positions near the greatest leave no arithmetic of 64 bits, whatever windows and chunks are.
TEST(ShardPlace, TakesGreatPositionsAndWindows) {
  constexpr std::int64_t kEnd = (std::int64_t{1} << 28) - 12;
  AttentionConfig config = plain();
  config.window_left = (std::int64_t{1} << 31) - 1;
  config.window_right = 3;
  config.chunk = std::numeric_limits<std::int64_t>::max();
  Call far(config);
  far.in.place = ShardPlace{.q = kEnd, .kv = kEnd};
  far.run();
  Call near(config);
  near.run();
  EXPECT_EQ(far.o.values, near.o.values);  // as far from each other
}

TEST(ShardPlace, RefusesWhatLeavesTheWhole) {
  constexpr std::int64_t kTooMany = std::int64_t{1} << 31;
  const Refusal refusals[] = {{"place.b", {.b = -1}},
                              {"place.b", {.b = 2, .whole_b = 2}},
                              {"place.h_q", {.h_q = 2, .whole_h_q = 3}},
                              {"place.h_q", {.h_q = 1}},
                              {"place.q", {.q = -3}},
                              {"place.q", {.q = 93, .whole_s_q = 100}},
                              {"place.q", {.q = 2, .q_step = 14, .whole_s_q = 100}},
                              {"place.q", {.q_step = std::int64_t{1} << 30}},
                              {"place.q", {.q = kTooMany}},
                              {"place.kv", {.kv = 1, .whole_s_kv = 12}},
                              {"place.q_step", {.q_step = 0}},
                              {"place.kv_step", {.kv_step = -1}},
                              {"place.whole_s_kv", {.whole_s_kv = kTooMany}},
                              {"place.whole_b", {.whole_b = -1}}};
  for (const Refusal& refusal : refusals) {
    Call call(plain());
    call.in.place = refusal.place;
    expect_invalid(refusal.argument, [&] { call.run(); });
    expect_invalid(refusal.argument, [&] { call.run_backward(); });
  }
  Call call(plain());
  call.in.max_multiprocessors = -1;
  expect_invalid("max_multiprocessors", [&] { call.run(); });
  expect_invalid("max_multiprocessors", [&] { call.run_backward(); });
}

TEST(ShardPlace, RefusesWhatHasNoForm) {
  const auto expect = [](const char* argument, const ShardPlace& place,
                         const std::function<void(AttentionConfig&)>& set) {
    AttentionConfig config = plain();
    set(config);
    Call call(config);
    call.in.place = place;
    expect_error(ErrorCode::unsupported, argument, [&] { call.run(); });
    if (config.invariance == Invariance::none) {
      expect_error(ErrorCode::unsupported, argument, [&] { call.run_backward(); });
    }
  };
  expect("place.q_step", {.q_step = 2}, [](AttentionConfig& c) { c.causal = true; });
  expect("place.q_step", {.kv_step = 2}, [](AttentionConfig& c) { c.window_left = 3; });
  expect("place.q_step", {.kv_step = 2}, [](AttentionConfig& c) { c.window_right = 3; });
  expect("place.q_step", {.q_step = 2, .kv_step = 3}, [](AttentionConfig& c) { c.chunk = 6; });
  expect("place.q_step", {.q_step = 4, .kv_step = 4}, [](AttentionConfig& c) { c.chunk = 6; });
  expect("place.q_step", {.q_step = 2}, [](AttentionConfig& c) { c.dropout = 0.5f; });
  expect("place.kv_step", {.kv_step = 2}, [](AttentionConfig& c) { c.dropout = 0.5f; });
  expect("place.q", {.q = 16}, [](AttentionConfig& c) { c.dropout = 0.5f; });
  expect("place.kv", {.kv = 33}, [](AttentionConfig& c) { c.dropout = 0.5f; });
  expect("invariance", {.q = 1}, [](AttentionConfig& c) { c.invariance = Invariance::rows; });
}

TEST(ShardPlace, PackedBatchesAndPagesHaveNone) {
  AttentionConfig config = plain();
  config.varlen = true;
  const Attention attention = Attention::create(config, Device::host());
  Array q = array({8, 2, kD}, 1), k = array({12, 1, kD}, 2), o = array({8, 2, kD}, 0);
  const std::vector<std::int32_t> cu_q{0, 8}, cu_kv{0, 12};
  ForwardInputs in;
  in.q = q.view(), in.k = k.view(), in.v = k.view();
  in.sequences = {.b = 1, .cu_seqlens_q = cu_q.data(), .cu_seqlens_kv = cu_kv.data()};
  in.place = ShardPlace{};
  attention.forward(in, {o.view()});
  in.place->q = 8;
  expect_error(ErrorCode::unsupported, "varlen", [&] { attention.forward(in, {o.view()}); });
}

// Captured tensors are the whole's: one of the call's own sizes is too small.
TEST(ShardPlace, CapturesAreThoseOfTheWhole) {
  AttentionConfig config = plain();
  config.score = {"score + bias[q]", {{"bias", DType::f64}}};
  Call call(config);
  Array bias = array({8}, 9), whole = array({24}, 9);
  call.in.captures = Captures{{"bias", bias.view()}};
  call.run();
  call.in.place = ShardPlace{.q = 16};
  expect_invalid("captures[bias]", [&] { call.run(); });
  call.in.captures = Captures{{"bias", whole.view()}};
  call.run();
}

}  // namespace
}  // namespace fa
