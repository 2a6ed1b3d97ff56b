#include "support/random_variant.hpp"

#include <algorithm>
#include <array>
#include <iterator>
#include <random>
#include <string>

namespace fa::test {
namespace {

namespace f = functions;

template <class Values>
auto pick(std::mt19937_64& engine, const Values& values) {
  return values[engine() % std::size(values)];
}

/// One in `n`.
bool sometimes(std::mt19937_64& engine, unsigned n) {
  return engine() % n == 0;
}

std::int64_t up_to(std::mt19937_64& engine, std::int64_t longest) {
  return static_cast<std::int64_t>(engine() % static_cast<std::uint64_t>(longest + 1));
}

ScoreFunction random_score(std::mt19937_64& engine, bool gradients) {
  constexpr int kDistance = 5;  // as VariantCase fills tables
  const ScoreFunction learned{"score * gain + offset[h, q] * float(kv % 3)",
                              {{"gain", DType::f32, gradients}, {"offset", DType::bf16, gradients}}};
  const std::vector<ScoreFunction> scores{{},
                                          {},
                                          f::softcap(2),
                                          f::alibi(gradients),
                                          f::bias("bhqk", DType::f32, gradients),
                                          f::bias("bk", DType::f32, gradients),
                                          f::relative_table(kDistance, DType::f32, gradients),
                                          learned,
                                          f::compose(f::softcap(3), f::bias("hqk", DType::f16, gradients)),
                                          f::compose(f::alibi(gradients), f::softcap(4))};
  return pick(engine, scores);
}

MaskFunction random_mask(std::mt19937_64& engine) {
  const MaskFunction strided{"(q - kv) % 4 == 0 || kv < 3"};
  const std::vector<MaskFunction> masks{{},
                                        {},
                                        {},
                                        f::documents(),
                                        f::prefix_lm(),
                                        strided,
                                        {"(q + h) % 3 != kv % 3 && kv / 20 != b + h"},
                                        f::both(f::documents(), strided)};
  return pick(engine, masks);
}

std::int64_t longest(const std::vector<std::int32_t>& cu) {
  std::int64_t result = 0;
  for (std::size_t i = 1; i < cu.size(); ++i) result = std::max<std::int64_t>(result, cu[i] - cu[i - 1]);
  return result;
}

/// Lengths from 0 on, and how much of them counts.
void make_packed(std::mt19937_64& engine, bool brief, RandomProblem* problem) {
  const auto count = pick(engine, brief ? std::array{1, 3, 4} : std::array{1, 3, 6});
  const std::int64_t most = brief ? 45 : 250;
  const auto lay_out = [&](std::vector<std::int32_t>* cu, std::vector<std::int32_t>* used) {
    cu->push_back(static_cast<std::int32_t>(up_to(engine, 2)));
    const bool in_part = sometimes(engine, 3);
    for (int i = 0; i < count; ++i) {
      const std::int64_t length = sometimes(engine, 6) ? 0 : up_to(engine, most);
      cu->push_back(cu->back() + static_cast<std::int32_t>(length));
      if (in_part) used->push_back(static_cast<std::int32_t>(up_to(engine, length)));
    }
    return cu->back() + up_to(engine, 3);
  };
  problem->attention.b = 1;
  problem->attention.s_q = lay_out(&problem->cu_q, &problem->used_q);
  problem->attention.s_kv = lay_out(&problem->cu_kv, &problem->used_kv);
  problem->attention.layout = Layout::bshd;
  if (sometimes(engine, 2)) {
    problem->max_s_q = longest(problem->cu_q);
    problem->max_s_kv = longest(problem->cu_kv);
  }
}

/// Text of a random function.
class Writer {
 public:
  explicit Writer(std::mt19937_64& engine) : engine_(engine) {}

  std::string real(int depth) {
    if (depth == 0) {
      return pick(engine_, std::array<std::string, 7>{"score", "score", "number", "(0.5 * number)", "row[b, q]",
                                                      "column[h, kv]", "float(kv % 3)"});
    }
    const std::string a = real(depth - 1);
    switch (engine_() % 6) {
      case 0:
        return "tanh(" + a + ")";
      case 1:
        return "log(" + a + " * " + a + " + 1.0)";
      case 2:
        return "sin(" + a + ")";
      case 3:
        return "(" + condition(1) + " ? " + a + " : " + real(depth - 1) + ")";
      case 4:
        return "(0.5 * " + a + " - number)";
      default:
        return "(0.5 * (" + a + " + " + real(depth - 1) + "))";
    }
  }

  std::string condition(int depth) {
    if (depth == 0) {
      return pick(engine_, std::array<std::string, 6>{"q >= (kv - q) % 3", "floor_mod(kv - q, 5) > q % 4",
                                                      "kv != floor_div(q - kv, 16)", "kv >= 0", "q < s_q / 2 + h",
                                                      "kv % 7 != b"});
    }
    const std::string sign = sometimes(engine_, 2) ? " && " : " || ";
    return "((" + condition(depth - 1) + ")" + sign + "(" + condition(depth - 1) + "))";
  }

 private:
  std::mt19937_64& engine_;
};

}  // namespace

ScoreFunction random_function(std::size_t index) {
  std::mt19937_64 engine(7000 + index);
  Writer writer(engine);
  const std::string value = "clamp(score * 0.5 + " + writer.real(3) + " + number, -8.0, 8.0)";
  ScoreFunction function{"(" + writer.condition(1) + " || kv < 2) ? " + value + " : -infinity", {}};
  for (const auto& [name, dtype] :
       {std::pair("number", DType::f32), std::pair("row", DType::f32), std::pair("column", DType::bf16)}) {
    if (function.expression.find(name) != std::string::npos) function.captures.push_back({name, dtype});
  }
  return function;
}

RandomKernel random_kernel(std::size_t index) {
  std::mt19937_64 engine(90000 + index);
  RandomKernel kernel;
  AttentionConfig& config = kernel.choice.config;
  config.deterministic = sometimes(engine, 4);
  const bool gradients = !config.deterministic && !sometimes(engine, 4);
  config.score = random_score(engine, gradients);
  config.mask = random_mask(engine);
  kernel.attention.causal = sometimes(engine, 2);
  config.window_left = pick(engine, std::array{-1, -1, -1, 0, 7, 20});
  config.window_right = pick(engine, std::array{-1, -1, 0, 5});
  if (kernel.attention.causal && config.window_right > 0) config.window_right = 0;
  config.chunk = pick(engine, std::array{0, 0, 0, 24, 40});
  config.sink = sometimes(engine, 3);
  config.dropout = pick(engine, std::array{0.f, 0.f, 0.1f, 0.3f, 0.5f});
  config.varlen = engine() % 5 < 2;
  config.zero_padding = config.varlen && sometimes(engine, 3);
  kernel.choice.name = "random_" + std::to_string(index);
  kernel.attention.dtype = pick(engine, std::array{DType::bf16, DType::f16, DType::f32});
  kernel.attention.d_qk = pick(engine, std::array{16, 32, 40, 64, 64, 96, 128, 256});
  kernel.attention.d_v = sometimes(engine, 4) ? pick(engine, std::array{8, 64, 72}) : kernel.attention.d_qk;
  if (sometimes(engine, 5)) kernel.attention.scale = -0.1f;
  kernel.pack_gqa = sometimes(engine, 2);
  kernel.splits = config.varlen ? 1 : pick(engine, std::array{1, 2});
  return kernel;
}

std::vector<std::size_t> small_random_kernels(std::size_t count, std::int64_t head_dim) {
  std::vector<std::size_t> indices;
  for (std::size_t index = 0; index < kRandomKernels && indices.size() < count; ++index) {
    const AttentionCase attention = random_kernel(index).attention;
    if (attention.d_qk <= head_dim && attention.d_v <= head_dim) indices.push_back(index);
  }
  return indices;
}

RandomProblem random_problem(const RandomKernel& kernel, std::size_t index, std::size_t launch) {
  std::mt19937_64 engine(500000 + index * kRandomLaunches + launch);
  const bool brief = launch < kShortRandomLaunches;
  RandomProblem problem;
  AttentionCase& c = problem.attention;
  c = kernel.attention;
  c.seed = index * kRandomLaunches + launch + 1;
  const auto heads = pick(engine, std::array<std::array<std::int64_t, 2>, 4>{{{1, 1}, {4, 2}, {3, 1}, {2, 2}}});
  c.h_q = heads[0];
  c.h_kv = heads[1];
  c.causal_align = sometimes(engine, 3) ? CausalAlign::top_left : CausalAlign::bottom_right;
  problem.dlse = sometimes(engine, 2);
  if (kernel.choice.config.varlen) {
    make_packed(engine, brief, &problem);
    return problem;
  }
  c.b = 1 + up_to(engine, 1);
  c.s_q = pick(engine, brief ? std::array{1, 17, 33, 50} : std::array{3, 64, 257, 300});
  c.s_kv = pick(engine, brief ? std::array{1, 20, 40, 70} : std::array{33, 128, 300, 600});
  c.layout = sometimes(engine, 2) ? Layout::bhsd : Layout::bshd;
  return problem;
}

VariantCase RandomProblem::variant(const RandomKernel& kernel) const {
  AttentionCase whole = attention;
  if (!cu_q.empty()) whole.b = static_cast<std::int64_t>(cu_q.size()) - 1;
  return {whole, kernel.choice};
}

}  // namespace fa::test
