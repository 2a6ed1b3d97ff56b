// Score and mask functions, windows, chunks and sinks through the public API, on the host in float64: against attention
// written out, and every gradient against finite differences.

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <fa/attention.hpp>

#include "api/problem.hpp"
#include "api/validate.hpp"
#include "api/variants.hpp"
#include "plan/planner.hpp"

namespace fa {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr std::int64_t kLargest = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kLongest = (std::int64_t{1} << 31) - 65536;  // of a call

struct Sizes {
  std::int64_t b = 2, h_q = 4, h_kv = 2, s_q = 5, s_kv = 7, d_qk = 8, d_v = 8;
};

std::vector<double> random_values(std::int64_t count, std::uint64_t seed) {
  std::mt19937_64 engine(seed);
  std::vector<double> values(static_cast<std::size_t>(count));
  for (double& value : values) value = static_cast<double>(engine() >> 11) * 0x1p-52 - 1;
  return values;
}

TensorView view(std::vector<double>& values, std::initializer_list<std::int64_t> shape) {
  return TensorView(static_cast<void*>(values.data()), DType::f64, shape);
}

/// A problem in f64, its inputs, and what a loss sum(o * dout) + sum(lse * dlse) needs.
struct Problem {
  explicit Problem(const AttentionConfig& wanted, Sizes sizes = {}) : n(sizes), config(wanted) {
    config.head_dim = static_cast<int>(n.d_qk);
    config.head_dim_v = static_cast<int>(n.d_v);
    config.dtype = DType::f64;
    q = random_values(n.b * n.h_q * n.s_q * n.d_qk, 1);
    k = random_values(n.b * n.h_kv * n.s_kv * n.d_qk, 2);
    v = random_values(n.b * n.h_kv * n.s_kv * n.d_v, 3);
    dout = random_values(n.b * n.h_q * n.s_q * n.d_v, 4);
    dlse = random_values(n.b * n.h_q * n.s_q, 5);
    sink = random_values(n.h_q, 6);
    o.resize(dout.size());
    lse.resize(dlse.size());
  }

  ForwardInputs inputs() {
    ForwardInputs in;
    in.q = view(q, {n.b, n.h_q, n.s_q, n.d_qk});
    in.k = view(k, {n.b, n.h_kv, n.s_kv, n.d_qk});
    in.v = view(v, {n.b, n.h_kv, n.s_kv, n.d_v});
    in.captures = captures;
    if (config.sink) in.sink = view(sink, {n.h_q});
    return in;
  }
  void forward() {
    Attention::create(config, Device::host())
        .forward(inputs(), {view(o, {n.b, n.h_q, n.s_q, n.d_v}), view(lse, {n.b, n.h_q, n.s_q})});
  }
  double loss() {
    forward();
    double sum = 0;
    for (std::size_t i = 0; i < o.size(); ++i) sum += o[i] * dout[i];
    for (std::size_t i = 0; i < lse.size(); ++i) sum += std::isinf(lse[i]) ? 0 : lse[i] * dlse[i];
    return sum;
  }
  void backward(const BackwardOutputs& outputs) {
    forward();
    const ForwardInputs in = inputs();
    BackwardInputs all;
    all.q = in.q;
    all.k = in.k;
    all.v = in.v;
    all.captures = in.captures;
    all.sink = in.sink;
    all.o = view(o, {n.b, n.h_q, n.s_q, n.d_v});
    all.lse = view(lse, {n.b, n.h_q, n.s_q});
    all.dout = view(dout, {n.b, n.h_q, n.s_q, n.d_v});
    all.dlse = view(dlse, {n.b, n.h_q, n.s_q});
    Attention::create(config, Device::host()).backward(all, outputs);
  }

  Sizes n;
  AttentionConfig config;
  Captures captures;
  std::vector<double> q, k, v, dout, dlse, sink, o, lse;
};

/// o and lse from their definition; `score` gives what becomes of a scaled score, -infinity where it is hidden.
using Score = std::function<double(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j, double s)>;
void expect_defined_by(Problem& p, const Score& score) {
  p.forward();
  const Sizes& n = p.n;
  for (std::int64_t row = 0; row < n.b * n.h_q * n.s_q; ++row) {
    const std::int64_t i = row % n.s_q, h = row / n.s_q % n.h_q, b = row / n.s_q / n.h_q;
    const std::int64_t head = b * n.h_kv + h * n.h_kv / n.h_q;
    std::vector<double> weights;
    double sum = p.config.sink ? std::exp(p.sink[h]) : 0;
    for (std::int64_t j = 0; j < n.s_kv; ++j) {
      double s = 0;
      for (std::int64_t c = 0; c < n.d_qk; ++c) s += p.q[row * n.d_qk + c] * p.k[(head * n.s_kv + j) * n.d_qk + c];
      const double scale = p.config.scale ? double{*p.config.scale} : 1 / std::sqrt(double(n.d_qk));
      weights.push_back(std::exp(score(b, h, i, j, s * scale)));
      sum += weights.back();
    }
    ASSERT_NEAR(p.lse[row] == -kInfinity ? 0 : std::exp(p.lse[row]), sum, 1e-12 * std::max(sum, 1.0)) << "row " << row;
    for (std::int64_t c = 0; c < n.d_v; ++c) {
      double o = 0;
      for (std::int64_t j = 0; j < n.s_kv; ++j) o += weights[j] * p.v[(head * n.s_kv + j) * n.d_v + c];
      ASSERT_NEAR(p.o[row * n.d_v + c], sum == 0 ? 0 : o / sum, 1e-12) << "row " << row;
    }
  }
}

void expect_gradient(Problem& p, std::vector<double>& values, const std::vector<double>& gradient, const char* name) {
  constexpr double kStep = 1e-5;
  for (std::size_t i = 0; i < values.size(); i += 1 + values.size() / 40) {
    const double value = values[i];
    const auto loss = [&](double by) {
      values[i] = value + by;
      return p.loss();
    };
    const double expected = (8 * (loss(kStep) - loss(-kStep)) - (loss(2 * kStep) - loss(-2 * kStep))) / (12 * kStep);
    values[i] = value;
    EXPECT_NEAR(gradient[i], expected, 2e-8) << name << " " << i;
  }
}

/// Every gradient of a problem, those of `captured` included, against finite differences.
void expect_gradients(Problem& p, std::vector<double>* captured = nullptr, const char* name = "",
                      std::initializer_list<std::int64_t> shape = {}) {
  std::vector<double> dq(p.q.size()), dk(p.k.size()), dv(p.v.size()), dsink(p.sink.size());
  std::vector<double> dcaptured(captured != nullptr ? captured->size() : 0, 7.0);
  const Sizes& n = p.n;
  BackwardOutputs outputs;
  outputs.dq = view(dq, {n.b, n.h_q, n.s_q, n.d_qk});
  outputs.dk = view(dk, {n.b, n.h_kv, n.s_kv, n.d_qk});
  outputs.dv = view(dv, {n.b, n.h_kv, n.s_kv, n.d_v});
  if (p.config.sink) outputs.dsink = view(dsink, {n.h_q});
  if (captured != nullptr) outputs.captures.add({name, view(dcaptured, shape)});
  p.backward(outputs);
  expect_gradient(p, p.q, dq, "dq");
  expect_gradient(p, p.k, dk, "dk");
  expect_gradient(p, p.v, dv, "dv");
  if (p.config.sink) expect_gradient(p, p.sink, dsink, "dsink");
  if (captured != nullptr) expect_gradient(p, *captured, dcaptured, name);
}

AttentionConfig with_score(const ScoreFunction& score) {
  AttentionConfig config;
  config.score = score;
  return config;
}

/// Places of a table, read one by one.
AttentionConfig sum_of_places(int count, bool requires_grad) {
  AttentionConfig config;
  config.score.expression = "score";
  for (int i = 0; i < count; ++i) config.score.expression += " + t[" + std::to_string(i) + "]";
  config.score.captures = {{"t", DType::f32, requires_grad}};
  return config;
}

TEST(Variants, FunctionsThatCompileForMinutesAreRefusedOnAGpu) {
  EXPECT_NO_THROW(api::read_functions(sum_of_places(32, false), false));
  EXPECT_NO_THROW(api::read_functions(sum_of_places(16, true), false));
  EXPECT_NO_THROW(api::read_functions(sum_of_places(200, true), true)) << "the host compiles nothing";
  const auto message_of = [](const AttentionConfig& config) -> std::string {
    try {
      api::read_functions(config, false);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      return error.what();
    }
    return {};
  };
  EXPECT_NE(message_of(sum_of_places(33, false)).find("read at 33 different places"), std::string::npos);
  EXPECT_NE(message_of(sum_of_places(17, true)).find("at most 16 places with requires_grad"), std::string::npos);
}

TEST(Variants, Softcap) {
  Problem p(with_score(functions::softcap(0.7)));
  expect_defined_by(p, [](auto, auto, auto, auto, double s) { return 0.7 * std::tanh(s / 0.7); });
  expect_gradients(p);
}

TEST(Variants, Alibi) {
  ScoreFunction score = functions::alibi(true);
  score.captures[0].dtype = DType::f64;
  Problem p(with_score(score));
  std::vector<double> slope{0.1, 0.5, 0.3, 0.9};
  p.captures = {{"slope", view(slope, {4})}};
  expect_defined_by(p, [&](auto, std::int64_t h, std::int64_t i, std::int64_t j, double s) {
    return s - slope[h] * std::abs(static_cast<double>(i + 2 - j));
  });
  expect_gradients(p, &slope, "slope", {4});
}

TEST(Variants, BiasOfAnyBroadcast) {
  for (const auto& [b, h, q, k] : {std::array{2, 4, 5, 7}, std::array{1, 4, 5, 7}, std::array{2, 1, 1, 7},
                                   std::array{1, 1, 5, 1}, std::array{1, 1, 1, 1}}) {
    Problem p(with_score(functions::bias("bhqk", DType::f64, true)));
    std::vector<double> bias = random_values(b * h * q * k, 9);
    p.captures = {{"bias", view(bias, {b, h, q, k})}};
    expect_defined_by(
        p, [&, b = b, h = h, q = q, k = k](std::int64_t ib, std::int64_t ih, std::int64_t i, std::int64_t j, double s) {
          return s + bias[((ib % b * h + ih % h) * q + i % q) * k + j % k];
        });
    expect_gradients(p, &bias, "bias", {b, h, q, k});
  }
}

TEST(Variants, RelativeTable) {
  Problem p(with_score(functions::relative_table(2, DType::f64, true)));
  std::vector<double> table = random_values(4 * 5, 9);
  p.captures = {{"table", view(table, {4, 5})}};
  expect_defined_by(p, [&](auto, std::int64_t h, std::int64_t i, std::int64_t j, double s) {
    return s + table[h * 5 + std::clamp<std::int64_t>(j - i - 2, -2, 2) + 2];
  });
  expect_gradients(p, &table, "table", {4, 5});
}

TEST(Variants, ComposedFunctionsAndALearnedNumber) {
  const ScoreFunction gain{"score * gain", {{"gain", DType::f64, true}}};
  Problem p(with_score(functions::compose(gain, functions::softcap(2))));
  std::vector<double> number{1.3};
  p.captures = {{"gain", view(number, {1})}};
  expect_defined_by(p, [&](auto, auto, auto, auto, double s) { return 2 * std::tanh(s * number[0] / 2); });
  expect_gradients(p, &number, "gain", {1});
  p.forward();
  const std::vector<double> before = p.o;
  p.captures = {{"gain", 1.3}};
  p.forward();
  EXPECT_EQ(p.o, before) << "by value";
}

TEST(Variants, MasksByFunction) {
  std::vector<std::int32_t> doc{0, 0, 1, 1, 1, 2, 2};
  AttentionConfig config;
  config.mask = functions::both(functions::documents(), MaskFunction{"q >= kv"});
  Problem p(config);
  p.captures = {{"doc", TensorView(static_cast<void*>(doc.data()), DType::i32, {7})}};
  expect_defined_by(p, [&](auto, auto, std::int64_t i, std::int64_t j, double s) {
    return doc[i] == doc[j] && i >= j ? s : -kInfinity;
  });
  expect_gradients(p);
}

/// Children may be in front of what they hang on: a full mask, which is none of causality.
TEST(Variants, Trees) {
  const std::vector<std::int32_t> parents{4, -1, 1, 1, 1};
  const bool sees[5][5] = {{true, true, false, false, true},
                           {false, true, false, false, false},
                           {false, true, true, false, false},
                           {false, true, false, true, false},
                           {false, true, false, false, true}};
  std::vector<std::int32_t> words = functions::tree_words(parents);
  AttentionConfig config;
  config.mask = functions::tree(false);
  Problem p(config);
  p.captures = {{"tree", TensorView(static_cast<void*>(words.data()), DType::i32, {5, 1})}};
  const auto expected = [&](auto, auto, std::int64_t i, std::int64_t j, double s) {
    return j < 2 || sees[i][j - 2] ? s : -kInfinity;
  };
  expect_defined_by(p, expected);
  expect_gradients(p);
  config.mask = functions::tree();
  Problem each(config);
  std::vector<std::int32_t> both = words;
  both.insert(both.end(), {1, 2, 4, 8, 16});  // entry 1: nobody hangs on anybody
  each.captures = {{"tree", TensorView(static_cast<void*>(both.data()), DType::i32, {2, 5, 1})}};
  expect_defined_by(each, [&](std::int64_t b, auto, std::int64_t i, std::int64_t j, double s) {
    return j < 2 || (b == 0 ? sees[i][j - 2] : i == j - 2) ? s : -kInfinity;
  });
}

/// Drafts 31 to 33, and 63 to 65, are in words of their own, of 32 bits and of 64.
TEST(Variants, TreesOfManyWords) {
  constexpr std::int64_t kDrafts = 70;
  std::vector<std::int32_t> parents(kDrafts);
  for (std::int32_t i = 0; i < kDrafts; ++i) parents[static_cast<std::size_t>(i)] = i % 3 == 0 ? i / 2 - 1 : i - 1;
  const auto sees = [&](std::int64_t row, std::int64_t draft) {
    std::int64_t at = row;
    while (at > draft) at = parents[static_cast<std::size_t>(at)];
    return at == draft;
  };
  std::vector<std::int32_t> words = functions::tree_words(parents, 4);
  std::vector<std::int64_t> wide(2 * kDrafts);
  for (std::int64_t i = 0; i < kDrafts; ++i) {
    for (std::int64_t j = 0; j < kDrafts; ++j) {
      if (sees(i, j))
        wide[static_cast<std::size_t>(2 * i + j / 64)] |= static_cast<std::int64_t>(std::uint64_t{1} << j % 64);
    }
  }
  for (const TensorView& tree : {TensorView(static_cast<void*>(words.data()), DType::i32, {1, kDrafts, 4}),
                                 functions::tree_view(wide.data(), std::array<std::int64_t, 3>{1, kDrafts, 2})}) {
    AttentionConfig config;
    config.mask = functions::tree();
    Problem p(config, {.b = 2, .h_q = 2, .h_kv = 1, .s_q = kDrafts, .s_kv = kDrafts + 3});
    p.captures = {{"tree", tree}};
    expect_defined_by(p, [&](auto, auto, std::int64_t i, std::int64_t j, double s) {
      return j < 3 || sees(i, j - 3) ? s : -kInfinity;
    });
  }
}

TEST(Variants, WordsOfTreesAreChecked) {
  const auto refused = [](const std::vector<std::int32_t>& parents, int words, const std::string& text) {
    try {
      functions::tree_words(parents, words);
      ADD_FAILURE() << "accepted: " << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      EXPECT_EQ(std::string(error.what()).find(text), 0U) << error.what();
    }
  };
  refused({-1, 2}, 0, "parents = 2");
  refused({1, 2, 0}, 0, "parents[0] = a circle");
  refused({-1, 1}, 0, "parents[1] = a circle");
  refused(std::vector<std::int32_t>(33, -1), 1, "words = 1");
  refused({-1}, -1, "words = -1");
  EXPECT_TRUE(functions::tree_words({}).empty());
  EXPECT_EQ(functions::tree_words(std::vector<std::int32_t>{-1, 0}, 2), (std::vector<std::int32_t>{1, 0, 3, 0}));
}

TEST(Variants, PrefixLm) {
  std::vector<std::int32_t> prefix{3, 0};
  AttentionConfig config;
  config.mask = functions::prefix_lm();
  Problem p(config);
  p.captures = {{"prefix", TensorView(static_cast<void*>(prefix.data()), DType::i32, {2})}};
  expect_defined_by(p, [&](std::int64_t b, auto, std::int64_t i, std::int64_t j, double s) {
    return j < prefix[b] || j <= i + 2 ? s : -kInfinity;
  });
  expect_gradients(p);
}

TEST(Variants, WindowsAndChunks) {
  struct Case {
    std::int64_t left, right, chunk;
    bool causal;
  };
  for (const Case& c :
       {Case{1, -1, 0, false}, Case{-1, 1, 0, false}, Case{2, 1, 0, false}, Case{0, 0, 0, false}, Case{1, -1, 0, true},
        Case{2, 0, 0, true}, Case{-1, -1, 3, false}, Case{1, 2, 3, true}, Case{1000, 1000, 1000, false},
        Case{kLargest, -1, 0, false}, Case{-1, kLargest, 0, false}, Case{kLargest, kLargest, kLargest, false},
        Case{kLargest - 1, 0, 0, true}, Case{kLongest, kLongest, kLongest, false}, Case{kLongest - 1, 1, 0, false},
        Case{kLongest - 1, kLongest - 1, 2, false}}) {
    if (c.causal && c.right > 0) continue;
    for (const CausalAlign align : {CausalAlign::bottom_right, CausalAlign::top_left}) {
      for (const Sizes& sizes : {Sizes{}, Sizes{.b = 1, .h_q = 2, .h_kv = 1, .s_q = 9, .s_kv = 4}}) {
        AttentionConfig config;
        config.window_left = c.left;
        config.window_right = c.right;
        config.chunk = c.chunk;
        config.causal = c.causal;
        config.causal_align = align;
        Problem p(config, sizes);
        const std::int64_t shift = align == CausalAlign::bottom_right ? sizes.s_kv - sizes.s_q : 0;
        expect_defined_by(p, [&](auto, auto, std::int64_t row, std::int64_t j, double s) {
          const std::int64_t i = row + shift;
          const auto chunk_of = [&](std::int64_t n) { return std::floor(static_cast<double>(n) / double(c.chunk)); };
          const bool kept = (c.left < 0 || i - j <= c.left) && (c.right < 0 || j - i <= c.right) &&
                            (!c.causal || j <= i) && (c.chunk == 0 || chunk_of(i) == chunk_of(j));
          return kept ? s : -kInfinity;
        });
        expect_gradients(p);
      }
    }
  }
}

/// What a program writes for "unbounded" has the kernels, the splits and the scratch of no window.
TEST(Variants, WindowsThatReachEverywhereArePlannedAsNone) {
  AttentionConfig config;
  config.head_dim = 64;
  for (const std::int64_t window : {kLargest, kLargest - 1, std::int64_t{1} << 31, kLongest}) {
    for (const std::int64_t other : {std::int64_t{-1}, std::int64_t{5}}) {
      for (const bool left : {false, true}) {
        AttentionConfig wide = config, none = config;
        wide.window_left = left ? window : other;
        wide.window_right = left ? other : window;
        none.window_left = left ? -1 : other;
        none.window_right = left ? other : -1;
        EXPECT_EQ(api::is_plain(wide), api::is_plain(none));
        const api::Functions wide_functions = api::read_functions(wide, false);
        const api::Functions functions = api::read_functions(none, false);
        EXPECT_EQ(canonical(wide_functions.variants), canonical(functions.variants));
        const AttentionShape shape = api::checked(config, {.b = 1, .h_q = 8, .s_q = 1, .s_kv = 65536});
        const plan::Problem planned =
            api::make_problem(wide, shape, plan::parse_arch("sm_90a"), &wide_functions.variants);
        const plan::Problem expected = api::make_problem(none, shape, plan::parse_arch("sm_90a"), &functions.variants);
        EXPECT_EQ(canonical(plan::plan_forward(planned, {}).kernel),
                  canonical(plan::plan_forward(expected, {}).kernel));
        EXPECT_EQ(plan::choose(planned, {}).splits, plan::choose(expected, {}).splits);
      }
    }
  }
  // One that is within the lengths of some call stays a window, and splits the keys of those that it reaches.
  config.window_left = kLongest - 1;
  const api::Functions functions = api::read_functions(config, false);
  EXPECT_TRUE(functions.variants.left_window);
  const AttentionShape shape = api::checked(config, {.b = 1, .h_q = 8, .s_q = 1, .s_kv = 65536});
  const plan::Problem problem = api::make_problem(config, shape, plan::parse_arch("sm_90a"), &functions.variants);
  plan::Problem plain = problem;
  plain.variants = nullptr;
  EXPECT_GT(plan::choose(plain, {}).splits, 1);
  EXPECT_EQ(plan::choose(problem, {}).splits, plan::choose(plain, {}).splits);
  plan::Problem unchecked = problem;
  unchecked.window_left = kLargest;
  EXPECT_EQ(plan::choose(unchecked, {}).splits, plan::choose(plain, {}).splits);
}

TEST(Variants, AWindowThatReachesEverywhereGoesWithCausal) {
  AttentionConfig config;
  config.head_dim = 8;
  config.causal = true;
  config.window_right = kLargest;
  EXPECT_NO_THROW(Attention::create(config, Device::host()));
}

TEST(Variants, Sinks) {
  AttentionConfig config;
  config.sink = true;
  config.causal = true;
  for (const Sizes& sizes : {Sizes{}, Sizes{.b = 1, .h_q = 2, .h_kv = 1, .s_q = 6, .s_kv = 3}, Sizes{.s_kv = 0}}) {
    Problem p(config, sizes);
    expect_defined_by(p, [&](auto, auto, std::int64_t i, std::int64_t j, double s) {
      return j <= i + sizes.s_kv - sizes.s_q ? s : -kInfinity;
    });
    expect_gradients(p);
  }
  Problem hidden(config, {.b = 1, .h_q = 2, .h_kv = 2, .s_q = 2, .s_kv = 1});
  hidden.forward();
  EXPECT_EQ(hidden.lse[0], hidden.sink[0]) << "a row without keys";
  EXPECT_EQ(hidden.o[0], 0);
}

TEST(Variants, AHiddenRowIsZero) {
  AttentionConfig config;
  config.mask = MaskFunction{"q != 2"};
  Problem p(config);
  expect_defined_by(p, [](auto, auto, std::int64_t i, auto, double s) { return i == 2 ? -kInfinity : s; });
  EXPECT_EQ(p.lse[2], -kInfinity);
  for (int c = 0; c < 8; ++c) EXPECT_EQ(p.o[2 * 8 + c], 0);
  std::vector<double> dq(p.q.size(), 1), dk(p.k.size()), dv(p.v.size());
  p.backward({view(dq, {2, 4, 5, 8}), view(dk, {2, 2, 7, 8}), view(dv, {2, 2, 7, 8})});
  for (int c = 0; c < 8; ++c) EXPECT_EQ(dq[2 * 8 + c], 0);
}

/// With everything that could leave a trace of it: a sink, a gradient of a capture, dlse.
TEST(Variants, AHiddenRowGivesNothingButItsSink) {
  AttentionConfig config;
  config.score = functions::bias("hqk", DType::f64, true);
  config.mask = functions::both({"q != 2"}, {"q > 0"});
  config.window_left = 3;
  config.sink = true;
  Problem p(config);
  std::vector<double> bias = random_values(4 * 5 * 7, 9), dbias(bias.size(), 7.0);
  p.captures = {{"bias", view(bias, {4, 5, 7})}};
  std::vector<double> dq(p.q.size(), 1), dk(p.k.size(), 1), dv(p.v.size(), 1);
  BackwardOutputs outputs{view(dq, {2, 4, 5, 8}), view(dk, {2, 2, 7, 8}), view(dv, {2, 2, 7, 8})};
  outputs.captures.add({"bias", view(dbias, {4, 5, 7})});
  p.backward(outputs);
  for (const std::int64_t row : {0, 2}) {
    for (std::int64_t head = 0; head < 2 * 4; ++head) {
      const std::int64_t at = head * 5 + row;
      EXPECT_EQ(p.lse[at], p.sink[head % 4]);
      for (std::int64_t c = 0; c < 8; ++c) {
        EXPECT_EQ(p.o[at * 8 + c], 0);
        EXPECT_EQ(dq[at * 8 + c], 0);
      }
    }
    for (std::int64_t h = 0; h < 4; ++h) {
      for (std::int64_t j = 0; j < 7; ++j) EXPECT_EQ(dbias[(h * 5 + row) * 7 + j], 0);
    }
  }
  expect_gradients(p, &bias, "bias", {4, 5, 7});
}

TEST(Variants, AScoreOfMinusInfinityHidesARowToo) {
  Problem p(with_score({"q == 1 ? -infinity : score"}));
  expect_defined_by(p, [](auto, auto, std::int64_t i, auto, double s) { return i == 1 ? -kInfinity : s; });
  EXPECT_EQ(p.lse[1], -kInfinity);
  EXPECT_EQ(p.o[1 * 8], 0);
  std::vector<double> dq(p.q.size(), 1), dk(p.k.size()), dv(p.v.size());
  p.backward({view(dq, {2, 4, 5, 8}), view(dk, {2, 2, 7, 8}), view(dv, {2, 2, 7, 8})});
  for (int c = 0; c < 8; ++c) EXPECT_EQ(dq[1 * 8 + c], 0);
}

// ---- what is refused ----

void expect_refused(const AttentionConfig& wanted, const std::string& text) {
  AttentionConfig config = wanted;
  config.head_dim = 8;
  try {
    Attention::create(config, Device::host());
    ADD_FAILURE() << "accepted: " << text;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
  }
}

TEST(VariantErrors, Configurations) {
  AttentionConfig config;
  config.window_left = -2;
  expect_refused(config, "window_left = -2");
  config = {};
  config.window_right = -7;
  expect_refused(config, "window_right = -7");
  config.window_right = 3;
  config.causal = true;
  expect_refused(config, "window_right = 3: accepted is 0 or -1");
  config = {};
  config.chunk = -1;
  expect_refused(config, "chunk = -1");
  expect_refused(with_score({"score +", {}}), "score, column 8: expected");
  expect_refused(with_score({"score + slope[h]", {}}), "column 9");
  expect_refused(with_score({"score", {{"slope"}}}), "captures[slope]");
  expect_refused(with_score({"score + q1", {{"q1"}, {"q1"}}}), "two declarations");
  expect_refused(with_score({"score + float(i[q])", {{"i", DType::i32, true}}}), "requires_grad");
  expect_refused(with_score({"score", {{"kv"}}}), "captures[kv]");
  config = {};
  config.mask = MaskFunction{"score > 0", {}};
  expect_refused(config, "mask, column 1");
  config.mask = MaskFunction{"m[q] > 0", {{"m", DType::f32, true}}};
  expect_refused(config, "requires_grad");
  config = with_score({"score + a[h]", {{"a", DType::f32}}});
  config.mask = MaskFunction{"a[q] > 0.", {{"a", DType::f16}}};
  expect_refused(config, "two declarations");
  config = with_score({"score + a + b1 + c + d + e", {{"a"}, {"b1"}, {"c"}, {"d"}, {"e"}}});
  config.mask = MaskFunction{"f + g + i + j > 0.", {{"f"}, {"g"}, {"i"}, {"j"}}};
  expect_refused(config, "at most 8");
}

/// The column is that of what the caller wrote, whatever it becomes part of.
TEST(VariantErrors, ColumnsAreOfTheTextThatWasGiven) {
  const auto refused = [](const std::function<void()>& make, const std::string& text) {
    try {
      make();
      ADD_FAILURE() << "accepted: " << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      EXPECT_EQ(std::string(error.what()).find(text), 0U) << error.what();
    }
  };
  refused([] { functions::both(functions::documents(), {"q - kv <"}); }, "mask, column 9: expected");
  refused([] { functions::both({"q - kv < slop[h]"}, functions::documents()); }, "mask, column 10: expected");
  refused([] { functions::compose(functions::softcap(3), {"score * (2"}); }, "score, column 11: expected");
  refused([] { functions::compose({"score + gain"}, functions::softcap(3)); }, "score, column 9: expected");
  const ScoreFunction twice{"score * gain", {}};  // declared by the other part
  EXPECT_NO_THROW(functions::compose({"score + gain", {{"gain"}}}, twice));
}

TEST(VariantErrors, Calls) {
  Problem p(with_score(functions::bias("hk", DType::f64, true)));
  std::vector<double> bias(100);
  const auto refused = [&](const Captures& captures, const std::string& text) {
    p.captures = captures;
    try {
      p.forward();
      ADD_FAILURE() << "accepted: " << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    }
  };
  std::vector<float> narrow(100);
  refused({}, "captures[bias] = nothing");
  refused({{"bias", 1.0}}, "a tensor of rank 2");
  refused({{"bias", view(bias, {28})}}, "rank 2");
  refused({{"bias", TensorView(static_cast<void*>(narrow.data()), DType::f32, {4, 7})}}, "dtype f64");
  refused({{"bias", view(bias, {4, 6})}}, "index 1 from 0 to 6, into an axis of 6");
  refused({{"bias", view(bias, {3, 7})}}, "index 0 from 0 to 3");
  refused({{"bias", view(bias, {4, 7})}, {"bais", 1.0}}, "captures[bais]");
  refused({{"bias", view(bias, {4, 7})}, {"bias", view(bias, {4, 7})}}, "given twice");
  p.captures = {{"bias", view(bias, {4, 7})}};
  std::vector<double> dq(p.q.size()), dk(p.k.size()), dv(p.v.size()), gradient(100);
  const auto backward_refused = [&](const Captured& captured, const std::string& text) {
    BackwardOutputs outputs{view(dq, {2, 4, 5, 8}), view(dk, {2, 2, 7, 8}), view(dv, {2, 2, 7, 8}), {captured}, {}};
    try {
      p.backward(outputs);
      ADD_FAILURE() << "accepted: " << text;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    }
  };
  backward_refused({"bias", view(gradient, {7, 4})}, "shape");
  backward_refused({"bias", 1.0}, "a number");
  backward_refused({"bias", view(bias, {4, 7})}, "memory shared");
  const std::array<std::int64_t, 2> shape{4, 7}, gaps{8, 1};
  backward_refused({"bias", TensorView(static_cast<void*>(gradient.data()), DType::f64, shape, gaps)}, "without gaps");

  AttentionConfig config;
  Problem unasked(config);
  const auto with_sink = [&](const TensorView& sink) {
    ForwardInputs in = unasked.inputs();
    in.sink = sink;
    Attention::create(unasked.config, Device::host())
        .forward(in, {view(unasked.o, {2, 4, 5, 8}), view(unasked.lse, {2, 4, 5})});
  };
  EXPECT_NO_THROW(with_sink({}));
  EXPECT_THROW(with_sink(view(unasked.sink, {4})), Error);
  unasked.config.sink = true;
  EXPECT_NO_THROW(with_sink(view(unasked.sink, {4})));
  EXPECT_THROW(with_sink({}), Error);
  EXPECT_THROW(with_sink(TensorView(static_cast<void*>(narrow.data()), DType::f32, {4})), Error) << "dtype";
  Problem sinkless(config);
  sinkless.config.sink = true;
  sinkless.n.h_q = 4;
  sinkless.sink.resize(3);
  EXPECT_THROW(
      {
        ForwardInputs in = sinkless.inputs();
        in.sink = view(sinkless.sink, {3});
        Attention::create(sinkless.config, Device::host())
            .forward(in, {view(sinkless.o, {2, 4, 5, 8}), view(sinkless.lse, {2, 4, 5})});
      },
      Error);
}

/// What a number would lose on its way to the scalar's dtype.
TEST(VariantErrors, NumbersThatAScalarCannotHold) {
  const auto call = [](DType dtype, double number) {
    const std::string text = dtype == DType::i32 ? "score + float(x)" : "score + x";
    Problem p(with_score({text, {{"x", dtype}}}));
    p.captures = {{"x", number}};
    p.forward();
  };
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const double number : {0.0, -0.0, 7.0, -2147483648.0, 2147483647.0}) EXPECT_NO_THROW(call(DType::i32, number));
  for (const double number : {nan, kInfinity, -kInfinity, 1e300, 2.7, -0.5, 2147483648.0, -2147483649.0}) {
    EXPECT_THROW(call(DType::i32, number), Error) << number;
  }
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
    for (const double number : {0.5, 1e30, -3e38, nan, kInfinity}) EXPECT_NO_THROW(call(dtype, number));
    for (const double number : {1e300, -4e38}) EXPECT_THROW(call(dtype, number), Error) << number;
  }
  EXPECT_NO_THROW(call(DType::f64, 1e300));
}

TEST(VariantErrors, TileLists) {
  alignas(256) static std::byte memory[1024];
  EXPECT_NO_THROW(api::check_tiles({}, 0));
  EXPECT_NO_THROW(api::check_tiles({}, 512)) << "the workspace has room for them";
  EXPECT_NO_THROW(api::check_tiles({memory, 512, true}, 512));
  const auto refused = [](const MaskTiles& tiles, std::size_t needed, ErrorCode code) {
    try {
      api::check_tiles(tiles, needed);
      ADD_FAILURE() << "accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code) << error.what();
      EXPECT_EQ(error.field("argument"), "tiles");
    }
  };
  refused({nullptr, 0, true}, 512, ErrorCode::invalid_argument);
  refused({memory, 1024, false}, 0, ErrorCode::invalid_argument);
  refused({memory + 8, 512, false}, 512, ErrorCode::invalid_argument);
  refused({memory, 511, false}, 512, ErrorCode::out_of_memory);
}

TEST(VariantErrors, Builders) {
  EXPECT_THROW(functions::softcap(0), Error);
  EXPECT_THROW(functions::bias("bhx"), Error);
  EXPECT_THROW(functions::relative_table(0), Error);
  EXPECT_THROW(functions::compose(functions::bias("hk", DType::f16), functions::bias("hk", DType::f32)), Error);
  EXPECT_EQ(functions::bias("").expression, "score + bias");
  Captures captures;
  for (std::size_t i = 0; i < Captures::kMax; ++i) captures.add({"x", 1.0});
  EXPECT_THROW(captures.add({"x", 1.0}), Error);
}

}  // namespace
}  // namespace fa
