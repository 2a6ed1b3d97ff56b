#include "spec_list.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <fa/attention.hpp>
#include <fa/error.hpp>

#include "api/problem.hpp"
#include "api/variants.hpp"
#include "emulator/pairwise.hpp"
#include "plan/append.hpp"
#include "plan/backward.hpp"
#include "plan/candidates.hpp"
#include "plan/inspect.hpp"
#include "plan/mask_tiles.hpp"
#include "plan/merge_states.hpp"
#include "plan/planner.hpp"
#include "plan/quantize.hpp"

namespace fa::render {
namespace {

using emulator::Row;

/// A configuration and a shape, of which every kernel is wanted.
struct Case {
  std::string name;
  AttentionConfig config;
  AttentionShape shape;
  plan::Arch arch;
  bool tensor_maps = true;
};

/// How much of a plan is taken besides the kernels that it takes first.
struct Depth {
  std::size_t alternatives = 0;  ///< of those that it falls back to
  std::size_t candidates = 0;    ///< of those that a tuner tries
};

class Collector {
 public:
  void add(const Case& of, const Depth& depth) {
    const bool host = false;
    const api::Functions functions = api::read_functions(of.config, host);
    plan::Problem problem = api::make_problem(of.config, of.shape, of.arch, &functions.of(of.shape));
    problem.tensor_maps = of.tensor_maps;
    add_forward(of, problem, depth);
    add_backward(of, problem, depth);
  }

  void add(const std::string& name, const plan::KernelSpec& spec) {
    if (!texts_.insert(canonical(spec)).second) return;
    specs_.push_back({fmt::format("{} {}", name, kernel_name(spec).substr(3)), spec});
  }

  std::vector<NamedSpec> take() && { return std::move(specs_); }

 private:
  void add_forward(const Case& of, const plan::Problem& problem, const Depth& depth) {
    const plan::Fixed fixed = api::read_override(of.config, api::Operation::forward);
    plan::ForwardPlan planned;
    try {
      planned = plan_forward(problem, fixed);
    } catch (const Error&) {
      return;  // what is refused renders nothing
    }
    const std::string& name = of.name;
    add(name, with_mask_tiles(problem, kernels_of(planned)), depth);
    for (const auto& spec : forward_candidates(problem, fixed, planned.kernel, 1 + depth.candidates)) add(name, spec);
  }

  void add_backward(const Case& of, const plan::Problem& problem, const Depth& depth) {
    const plan::Fixed fixed = api::read_override(of.config, api::Operation::backward);
    plan::BackwardPlan planned;
    try {
      planned = plan_backward(problem, fixed, of.config.deterministic);
    } catch (const Error&) {
      return;
    }
    const std::string& name = of.name;
    add(name, with_mask_tiles(problem, kernels_of(planned)), depth);
    for (const auto& spec : backward_candidates(problem, fixed, planned.main.front(), 1 + depth.candidates))
      add(name, spec);
  }

  void add(const std::string& name, const std::vector<plan::Alternatives>& kernels, const Depth& depth) {
    for (const plan::Alternatives& alternatives : kernels) {
      for (std::size_t i = 0; i < std::min(1 + depth.alternatives, alternatives.size()); ++i)
        add(name, alternatives[i]);
    }
  }

  std::set<std::string> texts_;
  std::vector<NamedSpec> specs_;
};

constexpr std::array<const char*, 5> kArchs = {"sm_90a", "sm_80", "sm_89", "sm_100a", "sm_120a"};
constexpr std::array<DType, 3> kDTypes = {DType::bf16, DType::f16, DType::f32};
constexpr std::array<std::pair<int, int>, 8> kHeadDims{
    {{64, 64}, {128, 128}, {192, 128}, {256, 256}, {72, 72}, {96, 104}, {160, 160}, {40, 200}}};
constexpr std::array<std::int64_t, 4> kQueries = {4096, 1, 300, 1100};
constexpr std::array<std::int64_t, 3> kKeys = {4096, 500, 20000};
constexpr std::array<std::pair<std::int64_t, std::int64_t>, 4> kHeads{{{16, 16}, {16, 2}, {4, 1}, {96, 96}}};
constexpr std::size_t kMasks = 5, kScores = 6, kOverrides = 8;

enum Factor : std::size_t {
  arch,
  dtype,
  head_dims,
  causal,
  queries,
  keys,
  heads,
  mask,
  score,
  override_,
  kind,
  deterministic,
  misfit,
  kFactors
};

/// `hopper`: of the kernels for one GPU, all that its family takes; else of all GPUs.
std::vector<std::size_t> levels(bool hopper) {
  std::vector<std::size_t> all(kFactors);
  all[arch] = hopper ? 1 : kArchs.size();
  all[dtype] = hopper ? 2 : kDTypes.size();
  all[head_dims] = kHeadDims.size();
  all[causal] = 3;
  all[queries] = kQueries.size();
  all[keys] = kKeys.size();
  all[heads] = kHeads.size();
  all[mask] = kMasks;
  all[score] = kScores;
  all[override_] = kOverrides;
  all[kind] = 4;  // dense, dropout, packed, both
  all[deterministic] = 2;
  all[misfit] = hopper ? 2 : 4;  // none, negative scale, unaligned, no tensor maps
  return all;
}

void set_mask(AttentionConfig& config, std::size_t level) {
  if (level == 1) config.window_left = 700;
  if (level == 2) config.chunk = 512;
  if (level == 3) config.sink = true;
  if (level == 4) config.mask = MaskFunction{"doc[q] == doc[kv]", {{"doc", DType::i32}}};
}

void set_score(AttentionConfig& config, std::size_t level) {
  switch (level) {
    case 1:
      config.score = ScoreFunction{"30.0 * tanh(score * 0.1)"};
      break;
    case 2:
      config.score = ScoreFunction{"score + slope[h] * float(kv - q)", {{"slope", DType::f32}}};
      break;
    case 3:
      config.score = ScoreFunction{"score + bias[h, q, kv]", {{"bias", DType::bf16, true}}};
      break;
    case 4:
      config.score = ScoreFunction{"score * gain[h]", {{"gain", DType::f32, true}}};
      break;
    case 5:
      config.score = ScoreFunction{"score - 2.0 * abs(float(q + s_kv - s_q - kv))"};
      break;
    default:
      break;
  }
}

void set_override(AttentionConfig& config, std::size_t level) {
  const KernelOverride choices[kOverrides] = {{},
                                              {"sm80"},
                                              {"", "splits=3"},
                                              {"", "pack_gqa=1"},
                                              {"", "tile_n=64"},
                                              {"", "tile_m=64 tile_n=32 warps=4 stages=2"},
                                              {"", "tile_m=128 take_turns=0 exact_max=1"},
                                              {"", "q_buffers=1"}};
  if (level == 0) return;
  config.kernel = choices[level];
  config.kernel_backward = KernelOverride{choices[level].kernel, level == 2 || level == 4 ? choices[level].text : ""};
}

std::string text_of(const Row& row) {
  std::string text = "pairwise";
  for (const std::size_t level : row) text += fmt::format("{}{}", text == "pairwise" ? " " : ".", level);
  return text;
}

Case case_of(const Row& row) {
  Case result;
  result.name = text_of(row);
  result.arch = plan::parse_arch(kArchs[row[arch]]);
  AttentionConfig& config = result.config;
  config.dtype = kDTypes[row[dtype]];
  config.head_dim = kHeadDims[row[head_dims]].first;
  config.head_dim_v = kHeadDims[row[head_dims]].second;
  config.causal = row[causal] != 0;
  config.causal_align = row[causal] == 2 ? CausalAlign::top_left : CausalAlign::bottom_right;
  config.deterministic = row[deterministic] != 0;
  config.dropout = row[kind] % 2 != 0 ? 0.1f : 0.0f;
  config.varlen = row[kind] >= 2;
  if (row[misfit] == 1) config.scale = -0.5f;
  set_mask(config, row[mask]);
  set_score(config, row[score]);
  set_override(config, row[override_]);
  const auto [h_q, h_kv] = kHeads[row[heads]];
  result.shape = {.b = 4, .h_q = h_q, .h_kv = h_kv, .s_q = kQueries[row[queries]], .s_kv = kKeys[row[keys]]};
  if (config.varlen) {
    result.shape.total_q = 3 * result.shape.s_q;
    result.shape.total_kv = 3 * result.shape.s_kv;
  }
  result.shape.aligned = row[misfit] != 2;
  result.tensor_maps = row[misfit] != 3;
  return result;
}

/// Half of the levels of a few factors make a kernel special; where several meet, only the common ones are left.
bool is_wanted(const Row& row) {
  if (row[deterministic] != 0 && (row[score] == 3 || row[score] == 4)) return false;  // gradients of captures
  const int special = (row[arch] > 1) + (row[dtype] > 1) + (row[mask] > 0) + (row[score] > 0) + (row[kind] > 0) +
                      (row[misfit] > 0) + (row[override_] > 0);
  return special <= 2;
}

/// Calls that have a place in a larger attention, and calls that leave multiprocessors to others.
void add_parts_of_wholes(const char* arch, Collector& specs) {
  Case part;
  part.arch = plan::parse_arch(arch);
  part.config.head_dim = 64;
  part.config.causal = true;
  part.config.dropout = 0.5f;
  part.shape = {.b = 2, .h_q = 8, .h_kv = 4, .s_q = 2048, .s_kv = 2048, .placed = true};
  part.name = fmt::format("golden {} placed dropout", arch);
  specs.add(part, {});
  part.config.dropout = 0;
  part.config.chunk = 256;
  part.name = fmt::format("golden {} placed chunks", arch);
  specs.add(part, {});
  part.config.chunk = 0;
  part.config.score = functions::compose(functions::alibi(true), functions::softcap(4));
  part.config.mask = functions::documents();
  part.shape.bounded = true;
  part.name = fmt::format("golden {} placed functions", arch);
  specs.add(part, {});
  part.config.mask = {};
  part.config.score = functions::bias("bhqk", DType::bf16);
  part.shape.strided = true;
  part.name = fmt::format("golden {} strided", arch);
  specs.add(part, {});
  part.shape.place_in_memory = true;
  part.name = fmt::format("golden {} place in memory", arch);
  specs.add(part, {});
}

/// Forwards of i8, and what makes codes.
void add_int8(Collector& specs) {
  for (const bool key_scales : {false, true}) {
    plan::Problem problem;
    problem.arch = plan::parse_arch("sm_90a");
    problem.dtype = DType::i8;
    problem.d_qk = problem.d_v = 128;
    problem.key_scales = problem.value_scales = key_scales;
    problem.b = 4;
    problem.h_q = problem.h_kv = 8;
    problem.s_q = problem.s_kv = 4096;
    specs.add("golden", plan::plan_forward(problem, {}).kernel);
    plan::Variants sink;
    sink.sink = true;
    problem.variants = &sink;
    specs.add("golden", plan::plan_forward(problem, {}).kernel);
    plan::QuantizePass pass;
    pass.x.dtype = DType::bf16;
    pass.x.shape = {4, 8, 4096, 128};
    pass.x.strides = {1 << 22, 1 << 19, 128, 1};
    pass.codes.dtype = DType::i8;
    pass.means = key_scales;
    specs.add("golden", quantize_spec(pass, plan::parse_arch("sm_90a")));
  }
}

}  // namespace

std::vector<NamedSpec> golden_list() {
  Collector specs;
  for (const char* const arch : {"sm_80", "sm_86", "sm_90a", "sm_100a", "sm_120a"}) {
    specs.add("golden", plan::scan_results_spec(plan::parse_arch(arch)));
    for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
      for (const int d : {64, 128, 256}) {
        for (const bool causal : {false, true}) {
          Case golden;
          golden.name = fmt::format("golden {} {} {} causal={:d}", arch, to_string(dtype), d, causal);
          golden.config.head_dim = d;
          golden.config.dtype = dtype;
          golden.config.causal = causal;
          golden.shape = {.b = 4, .h_q = 32, .h_kv = 8, .s_q = 4096, .s_kv = 4096};
          golden.arch = plan::parse_arch(arch);
          specs.add(golden, {});
        }
      }
      plan::Problem paged;
      paged.arch = plan::parse_arch(arch);
      paged.dtype = dtype;
      paged.d_qk = paged.d_v = 128;
      paged.causal = true;
      paged.page_size = 16;
      paged.h_q = 32;
      paged.h_kv = 8;
      paged.s_kv = 8192;
      for (const std::vector<plan::KernelSpec>& kernels : plan::kernels_of(plan::plan_forward(paged, {}))) {
        specs.add("golden", kernels.front());
      }
      specs.add("golden", plan::probabilities_spec(paged));
      specs.add("golden", plan::clear_padding_spec(plan::parse_arch(arch), dtype));
      for (const int page_size : {0, 16}) {
        plan::AppendProblem problem;
        problem.arch = plan::parse_arch(arch);
        problem.dtype = dtype;
        problem.d_qk = problem.d_v = 128;
        problem.page_size = page_size;
        problem.rotary_dims = page_size * 8;
        specs.add("golden", plan::append_specs(problem).front());
      }
      plan::MergeProblem merge;
      merge.arch = plan::parse_arch(arch);
      merge.dtype = dtype;
      merge.d_v = 128;
      specs.add("golden", plan::merge_specs(merge).front());
      merge.sum = true;
      specs.add("golden", plan::merge_specs(merge).front());
      Case accumulating;
      accumulating.name = fmt::format("golden {} {} accumulate", arch, to_string(dtype));
      accumulating.config.head_dim = 128;
      accumulating.config.dtype = dtype;
      accumulating.config.accumulate = true;
      accumulating.shape = {.b = 4, .h_q = 32, .h_kv = 8, .s_q = 4096, .s_kv = 4096};
      accumulating.arch = plan::parse_arch(arch);
      specs.add(accumulating, {});
    }
    add_parts_of_wholes(arch, specs);
  }
  add_int8(specs);
  return std::move(specs).take();
}

const std::vector<NamedSpec>& pairwise_list() {
  static const std::vector<NamedSpec> list = [] {
    Collector specs;
    for (const Row& row : emulator::pairwise_cover(levels(true), is_wanted)) specs.add(case_of(row), {1, 1});
    for (const Row& row : emulator::pairwise_cover(levels(false), is_wanted)) specs.add(case_of(row), {});
    return std::move(specs).take();
  }();
  return list;
}

}  // namespace fa::render
