#include "unit/parallel/parallel_case.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <ostream>
#include <random>
#include <sstream>
#include <stdexcept>
#include <thread>

namespace fa::test {
namespace {

/// A tensor in host memory, of doubles or floats.
class Tensor {
 public:
  Tensor() = default;
  Tensor(DType dtype, std::array<std::int64_t, 4> shape, int rank, bool rows_first) {
    view_.dtype = dtype;
    view_.rank = rank;
    std::int64_t count = 1;
    for (int axis = 0; axis < rank; ++axis) {
      view_.shape[static_cast<std::size_t>(axis)] = shape[static_cast<std::size_t>(axis)];
      count *= shape[static_cast<std::size_t>(axis)];
    }
    std::int64_t stride = 1;
    const std::array<std::size_t, 4> order =
        rows_first && rank == 4 ? std::array<std::size_t, 4>{3, 1, 2, 0} : std::array<std::size_t, 4>{3, 2, 1, 0};
    for (const std::size_t axis : order) {
      if (axis >= static_cast<std::size_t>(rank)) continue;
      view_.strides[axis] = stride;
      stride *= view_.shape[axis];
    }
    // What nobody writes is seen.
    memory_.assign(static_cast<std::size_t>(count) * size_of(dtype), std::byte{0xff});
    view_.data = memory_.data();
  }
  Tensor(Tensor&&) = default;
  Tensor& operator=(Tensor&&) = default;

  void fill(std::mt19937_64& random, double scale = 1.0) {
    std::normal_distribution<double> normal(0.0, scale);
    for (std::size_t i = 0; i < count(); ++i) set(i, normal(random));
  }
  std::size_t count() const { return memory_.size() / size_of(view_.dtype); }
  double get(std::size_t i) const {
    if (view_.dtype == DType::f64) return number<double>(i);
    return static_cast<double>(number<float>(i));
  }
  void set(std::size_t i, double value) {
    if (view_.dtype == DType::f64) {
      std::memcpy(memory_.data() + i * 8, &value, 8);
    } else {
      const auto narrow = static_cast<float>(value);
      std::memcpy(memory_.data() + i * 4, &narrow, 4);
    }
  }
  const TensorView& view() const { return view_; }
  std::size_t bytes() const { return memory_.size(); }
  /// The same elements elsewhere.
  TensorView copied_to(void* data) const {
    std::memcpy(data, memory_.data(), memory_.size());
    TensorView copy = view_;
    copy.data = data;
    return copy;
  }
  void show(const TensorView& view) { view_ = view; }

 private:
  template <class T>
  T number(std::size_t i) const {
    T value;
    std::memcpy(&value, memory_.data() + i * sizeof(T), sizeof(T));
    return value;
  }
  std::vector<std::byte> memory_;
  TensorView view_;
};

double difference(const Tensor& a, const Tensor& b) {
  double greatest = 0, scale = 1e-3;
  for (std::size_t i = 0; i < a.count(); ++i) {
    const double x = a.get(i), y = b.get(i);
    if (std::isinf(x) && x == y) continue;
    const double off = std::abs(x - y);
    greatest = std::isnan(off) ? HUGE_VAL : std::max(greatest, off);
    scale = std::max(scale, std::abs(y));
  }
  return greatest / scale;
}

/// Tensors of the whole, or of a rank.
struct Tensors {
  Tensor q, k, v, o, lse, dout, dlse, dq, dk, dv, dsink;

  Tensors(const ParallelCase& c, int ranks) {
    const bool packed = !c.lengths.empty();
    std::int64_t rows = 0;
    for (const std::int64_t length : c.lengths) rows += length;
    const DType statistic = c.dtype == DType::f64 ? DType::f64 : DType::f32;
    const auto make = [&](std::int64_t heads, std::int64_t s, std::int64_t d) {
      return packed ? Tensor(c.dtype, {rows / ranks, heads, d, 0}, 3, false)
                    : Tensor(c.dtype, {c.b, heads, s / ranks, d}, 4, c.rows_first);
    };
    const auto make_rows = [&] {
      return packed ? Tensor(statistic, {c.h_q, rows / ranks, 0, 0}, 2, false)
                    : Tensor(statistic, {c.b, c.h_q, c.s_q / ranks, 0}, 3, false);
    };
    q = make(c.h_q, c.s_q, c.d_qk);
    k = make(c.h_kv, c.s_kv, c.d_qk);
    v = make(c.h_kv, c.s_kv, c.d_v);
    o = make(c.h_q, c.s_q, c.d_v);
    dout = make(c.h_q, c.s_q, c.d_v);
    dq = make(c.h_q, c.s_q, c.d_qk);
    dk = make(c.h_kv, c.s_kv, c.d_qk);
    dv = make(c.h_kv, c.s_kv, c.d_v);
    lse = make_rows();
    dlse = make_rows();
    dsink = Tensor(statistic, {c.h_q, 0, 0, 0}, 1, false);
  }
};

/// What functions of a case capture, and the sink.
struct Extras {
  Tensor sink, slope;
  std::vector<std::int32_t> doc;
  std::vector<std::int32_t> cu;

  Extras(const ParallelCase& c, std::mt19937_64& random) {
    const DType statistic = c.dtype == DType::f64 ? DType::f64 : DType::f32;
    sink = Tensor(statistic, {c.h_q, 0, 0, 0}, 1, false);
    sink.fill(random);
    slope = Tensor(DType::f32, {c.h_q, 0, 0, 0}, 1, false);
    for (std::size_t i = 0; i < slope.count(); ++i) slope.set(i, 0.1 + 0.05 * static_cast<double>(i));
    for (std::int64_t i = 0; i < std::max(c.s_q, c.s_kv); ++i) doc.push_back(static_cast<std::int32_t>(i / 11));
    cu.push_back(0);
    for (const std::int64_t length : c.lengths) cu.push_back(cu.back() + static_cast<std::int32_t>(length));
  }

  Captures captures(const ParallelCase& c) const {
    Captures captures;
    if (c.alibi) captures.add({"slope", slope.view()});
    if (c.documents) {
      captures.add({"doc", TensorView(doc.data(), DType::i32, {static_cast<std::int64_t>(doc.size())})});
    }
    return captures;
  }

  PackedSequences sequences(const ParallelCase& c) const {
    if (c.lengths.empty()) return {};
    return {static_cast<std::int64_t>(c.lengths.size()), cu.data(), cu.data(), nullptr, nullptr, 0, 0};
  }
};

template <class Inputs>
void set_inputs(const ParallelCase& c, const Tensors& t, const Extras& extras, Inputs& inputs) {
  inputs.q = t.q.view();
  inputs.k = t.k.view();
  inputs.v = t.v.view();
  inputs.captures = extras.captures(c);
  if (c.sink) inputs.sink = extras.sink.view();
  if (c.dropout > 0) inputs.dropout = {.seed = 77, .offset = 5};
}

BackwardInputs backward_inputs(const ParallelCase& c, const Tensors& t, const Extras& extras) {
  BackwardInputs inputs;
  set_inputs(c, t, extras, inputs);
  inputs.o = t.o.view();
  inputs.lse = t.lse.view();
  inputs.dout = t.dout.view();
  if (c.dlse) inputs.dlse = t.dlse.view();
  return inputs;
}

BackwardOutputs backward_outputs(const ParallelCase& c, const Tensors& t) {
  BackwardOutputs outputs{t.dq.view(), t.dk.view(), t.dv.view()};
  if (c.sink) outputs.dsink = t.dsink.view();
  return outputs;
}

void run_whole(const ParallelCase& c, Tensors& t, const Extras& extras) {
  const Attention attention = Attention::create(c.attention(), Device::host());
  ForwardInputs inputs;
  set_inputs(c, t, extras, inputs);
  inputs.sequences = extras.sequences(c);
  attention.forward(inputs, {t.o.view(), t.lse.view()});
  BackwardInputs back = backward_inputs(c, t, extras);
  back.sequences = inputs.sequences;
  attention.backward(back, backward_outputs(c, t));
}

ShardCopy copy_of(const ParallelCase& c, int rank, bool statistics) {
  return {c.layout, c.ranks, rank, c.lengths, statistics, Device::host()};
}

void run_rank(const ParallelCase& c, Tensors& t, const Extras& extras, ContextParallel& parallel) {
  ForwardInputs inputs;
  set_inputs(c, t, extras, inputs);
  parallel.forward(inputs, {t.o.view(), t.lse.view()}, nullptr, c.lengths);
  parallel.backward(backward_inputs(c, t, extras), backward_outputs(c, t), nullptr, c.lengths);
}

struct Outcome {
  std::vector<Tensors> ranks;
  std::unique_ptr<Extras> extras;
  std::unique_ptr<Tensors> whole;
};

Outcome run_all(const ParallelCase& c, const LocalGroupOptions& options) {
  std::mt19937_64 random(c.seed);
  Outcome outcome;
  outcome.whole = std::make_unique<Tensors>(c, 1);
  Tensors& whole = *outcome.whole;
  for (Tensor* const tensor : {&whole.q, &whole.k, &whole.v, &whole.dout, &whole.dlse}) tensor->fill(random);
  outcome.extras = std::make_unique<Extras>(c, random);
  const auto group = make_local_group(c.ranks, options);
  for (int rank = 0; rank < c.ranks; ++rank) {
    Tensors& own = outcome.ranks.emplace_back(c, c.ranks);
    for (const auto& [from, to] :
         {std::pair{&whole.q, &own.q}, {&whole.k, &own.k}, {&whole.v, &own.v}, {&whole.dout, &own.dout}}) {
      shard(copy_of(c, rank, false), from->view(), to->view());
    }
    shard(copy_of(c, rank, true), whole.dlse.view(), own.dlse.view());
  }
  const std::vector<std::string> problems = run_ranks(c.ranks, [&](int rank) {
    const auto i = static_cast<std::size_t>(rank);
    ContextParallel parallel = ContextParallel::create(c.config(), group[i], c.layout);
    if (c.late) parallel.set_speeds({.flops = 1, .backward_flops = 1});
    const bool has_lanes = parallel.describe(c.shape(), false, c.lengths).find("two lanes") != std::string::npos;
    const bool may_differ = c.layout == ShardLayout::contiguous && c.expects_lanes();  // where no keys travel
    if (has_lanes != c.expects_lanes() && !may_differ) throw std::runtime_error("another plan than the case is of");
    Tensors& own = outcome.ranks[i];
    if (!options.shares_memory) return run_rank(c, own, *outcome.extras, parallel);
    // K and V of some ranks lie in shared memory, those of others do not.
    void* const parts[] = {group[i]->share(own.k.bytes()), group[i]->share(own.v.bytes())};
    if (rank % 2 == 0) own.k.show(own.k.copied_to(parts[0]));
    if (rank % 4 == 0) own.v.show(own.v.copied_to(parts[1]));
    run_rank(c, own, *outcome.extras, parallel);
    for (void* const part : parts) group[i]->unshare(part);
  });
  for (const std::string& problem : problems) {
    if (!problem.empty()) throw std::runtime_error(problem);
  }
  return outcome;
}

}  // namespace

AttentionConfig ParallelCase::attention() const {
  AttentionConfig config;
  config.head_dim = d_qk;
  config.head_dim_v = d_v;
  config.dtype = dtype;
  config.causal = causal;
  config.causal_align = align;
  config.window_left = window_left;
  config.window_right = window_right;
  config.chunk = chunk;
  if (alibi) config.score = functions::alibi();
  if (documents) config.mask = functions::documents();
  config.dropout = dropout;
  config.sink = sink;
  config.varlen = !lengths.empty();
  return config;
}

ContextParallelConfig ParallelCase::config() const {
  ContextParallelConfig config;
  config.attention = attention();
  config.scheme = scheme;
  config.ulysses = ulysses;
  config.head_groups = head_groups;
  config.gradients = gradients;
  return config;
}

bool ParallelCase::expects_lanes() const {
  const int shared = scheme == Scheme::ulysses ? ranks : std::max(ulysses, 1);
  return late && scheme == Scheme::ring && !lengths.empty() && ranks > shared && h_kv / shared > 1;
}

ContextShape ParallelCase::shape() const {
  return {b, h_q, h_kv, s_q, s_kv};
}

std::string to_string(const ParallelCase& c) {
  std::ostringstream text;
  text << c.ranks << " ranks " << fa::to_string(c.layout) << " " << fa::to_string(c.scheme) << " ulysses " << c.ulysses
       << " groups " << c.head_groups << " [" << c.b << ", " << c.h_q << "/" << c.h_kv << ", " << c.s_q << "/" << c.s_kv
       << ", " << c.d_qk << "/" << c.d_v << "] packed " << c.lengths.size() << " causal " << c.causal << " align "
       << static_cast<int>(c.align) << " window " << c.window_left << "," << c.window_right << " chunk " << c.chunk
       << " alibi " << c.alibi << " documents " << c.documents << " dropout " << c.dropout << " sink " << c.sink
       << " dlse " << c.dlse << " late " << c.late << " rows first " << c.rows_first << " native "
       << static_cast<int>(c.gradients) << " " << fa::to_string(c.dtype) << " seed " << c.seed;
  return std::move(text).str();
}

void PrintTo(const ParallelCase& c, std::ostream* out) {
  *out << to_string(c);
}

std::vector<std::string> run_ranks(int ranks, const std::function<void(int)>& body) {
  std::vector<std::string> problems(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (const std::exception& problem) {
        problems[static_cast<std::size_t>(rank)] = problem.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return problems;
}

double Differences::greatest() const {
  return std::max({o, lse, dq, dk, dv, dsink});
}

Differences run_case(const ParallelCase& c, const LocalGroupOptions& options) {
  Outcome outcome = run_all(c, options);
  run_whole(c, *outcome.whole, *outcome.extras);
  Tensors is(c, 1);
  Differences off;
  for (int rank = 0; rank < c.ranks; ++rank) {
    const Tensors& own = outcome.ranks[static_cast<std::size_t>(rank)];
    for (const auto& [from, to] : {std::pair{&own.o, &is.o}, {&own.dq, &is.dq}, {&own.dk, &is.dk}, {&own.dv, &is.dv}}) {
      unshard(copy_of(c, rank, false), from->view(), to->view());
    }
    unshard(copy_of(c, rank, true), own.lse.view(), is.lse.view());
    if (c.sink) off.dsink = std::max(off.dsink, difference(own.dsink, outcome.whole->dsink));
  }
  off.o = difference(is.o, outcome.whole->o);
  off.lse = difference(is.lse, outcome.whole->lse);
  off.dq = difference(is.dq, outcome.whole->dq);
  off.dk = difference(is.dk, outcome.whole->dk);
  off.dv = difference(is.dv, outcome.whole->dv);
  return off;
}

std::vector<double> outputs_of(const ParallelCase& c, const LocalGroupOptions& options) {
  const Outcome outcome = run_all(c, options);
  std::vector<double> all;
  for (const Tensors& own : outcome.ranks) {
    for (const Tensor* const tensor : {&own.o, &own.lse, &own.dq, &own.dk, &own.dv}) {
      for (std::size_t i = 0; i < tensor->count(); ++i) all.push_back(tensor->get(i));
    }
  }
  return all;
}

}  // namespace fa::test
