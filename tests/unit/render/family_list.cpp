#include <algorithm>
#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fa/error.hpp>
#include <fa/paged.hpp>

#include "plan/append.hpp"
#include "plan/backward.hpp"
#include "plan/catalogue.hpp"
#include "plan/fixed.hpp"
#include "plan/inspect.hpp"
#include "plan/mask_tiles.hpp"
#include "plan/merge_states.hpp"
#include "plan/planner.hpp"
#include "spec_list.hpp"

namespace fa::render {
namespace {

plan::Problem problem_of(const char* arch, DType dtype, int d_qk, int d_v, bool causal) {
  plan::Problem problem;
  problem.arch = plan::parse_arch(arch);
  problem.dtype = problem.k_dtype = problem.v_dtype = dtype;
  problem.d_qk = d_qk;
  problem.d_v = d_v;
  problem.causal = causal;
  problem.b = 4;
  problem.h_q = 16;
  problem.h_kv = 4;
  problem.s_q = problem.s_kv = 4096;
  return problem;
}

/// 64 requests of one row each.
plan::Problem decode_of(plan::Problem problem, int page_size) {
  problem.page_size = page_size;
  problem.b = 64;
  problem.s_q = 1;
  problem.s_kv = 8192;
  return problem;
}

plan::Problem packed(plan::Problem problem) {
  problem.varlen = true;
  problem.total_q = 3 * problem.s_q;
  problem.total_kv = problem.paged() ? 0 : 3 * problem.s_kv;
  return problem;
}

/// A function, a window and sinks: what a kernel computes besides.
plan::Variants functions() {
  plan::Variants variants;
  variants.left_window = variants.sink = true;
  variants.score = "score+bias[h,q,kv]";
  variants.mask = "doc[q]==doc[kv]";
  variants.captures = {{"bias", DType::f16, 3}, {"doc", DType::i32, 1}};
  return variants;
}

class Families {
 public:
  explicit Families(std::string list) : list_(std::move(list)) {}

  void leave_out(const std::vector<NamedSpec>& specs) {
    for (const NamedSpec& named : specs) texts_.insert(canonical(named.spec));
  }

  void add(const std::string& name, plan::KernelSpec spec, bool debug = false) {
    spec.debug = debug;
    if (!texts_.insert(canonical(spec)).second) return;
    specs_.push_back({fmt::format("{} {} {}", list_, name, kernel_name(spec).substr(3)), std::move(spec)});
  }

  void forward(const std::string& name, const plan::Problem& problem, bool debug = false,
               const KernelOverride& fixed = {}) {
    const plan::Fixed read = plan::read_override(fixed, plan::Op::forward, "kernel");
    bool scheduled = false;  // by the first kernel's schedule; its alternatives have theirs
    for (const plan::Alternatives& kernels : with_mask_tiles(problem, kernels_of(plan_forward(problem, read)))) {
      const bool schedule = kernels.front().op() == plan::Op::schedule;
      if (!(schedule && std::exchange(scheduled, true))) add(name, kernels.front(), debug);
    }
  }

  void backward(const std::string& name, const plan::Problem& problem, bool deterministic, bool debug = false,
                const KernelOverride& fixed = {}) {
    const plan::Fixed read = plan::read_override(fixed, plan::Op::backward, "kernel_backward");
    for (const plan::Alternatives& kernels :
         with_mask_tiles(problem, kernels_of(plan_backward(problem, read, deterministic)))) {
      add(name, kernels.front(), debug);
    }
  }

  std::vector<NamedSpec> take() && { return std::move(specs_); }

 private:
  std::string list_;
  std::set<std::string> texts_;
  std::vector<NamedSpec> specs_;
};

/// Compute capability 7.5: every kind of kernel that it has.
void add_turing(Families& all) {
  const plan::Variants variants = functions();
  for (const DType dtype : {DType::f16, DType::f32}) {
    const std::string name = fmt::format("sm_75 {}", to_string(dtype));
    for (const int d : {24, 64, 128, 256}) {
      const plan::Problem problem = problem_of("sm_75", dtype, d, d, d != 64);
      all.forward(name, problem);
      if (dtype == DType::f16 || d <= 224) all.backward(name, problem, d == 128);
    }
    plan::Problem problem = problem_of("sm_75", dtype, 64, 64, true);
    problem.variants = &variants;
    problem.dropout = true;
    all.forward(name + " functions", packed(problem));
    all.backward(name + " functions", packed(problem), false);
    problem = problem_of("sm_75", dtype, 128, 128, true);
    problem.statistics = {MaxLogit::softmax, false, true, ColumnSums::query_heads, 16};
    all.forward(name + " statistics", problem);
    problem = problem_of("sm_75", dtype, 128, 128, true);
    for (const int page_size : {16, static_cast<int>(kContiguous)}) {
      all.forward(name + " decode", decode_of(problem, page_size));
      all.forward(name + " packed decode", packed(decode_of(problem, page_size)));
    }
    all.add(name, plan::probabilities_spec(problem));
    all.add(name, plan::clear_padding_spec(problem.arch, dtype));
    all.add(name, plan::append_specs({problem.arch, dtype, 128, 128, 16, 64}).front());
    all.add(name, plan::merge_specs({problem.arch, dtype, 128}).front());
  }
  all.add("sm_75", plan::scan_results_spec(plan::parse_arch("sm_75")));
}

/// The Hopper forward of 8-bit floats: dense, packed, over pages, with scales of keys, precise, with functions.
void add_fp8(Families& all) {
  plan::Variants variants;
  variants.score = "50.0000000*tanh(score/50.0000000)";
  variants.left_window = variants.sink = true;
  for (const DType dtype : {DType::e4m3, DType::e5m2}) {
    const std::string name = fmt::format("fp8 {}", to_string(dtype));
    for (const int d : {64, 128, 256}) {
      const bool causal = (d != 128) == (dtype == DType::e4m3);
      plan::Problem problem = problem_of("sm_90a", dtype, d, d, causal);
      all.forward(name, problem);
      problem.key_scales = problem.value_scales = d != 64;
      all.forward(name + " packed", packed(problem));
      for (const int page_size : {16, 64, static_cast<int>(kContiguous)}) {
        plan::Problem paged = problem;
        paged.page_size = page_size;
        paged.precise = page_size == 64;
        all.forward(name + " pages", paged);
        all.forward(name + " packed pages", packed(paged));
      }
    }
    plan::Problem problem = problem_of("sm_90a", dtype, 128, 128, true);
    problem.precise = true;
    all.forward(name + " precise", problem);
    problem.variants = &variants;
    problem.o_dtype = dtype == DType::e4m3 ? DType::f16 : DType::bf16;
    all.forward(name + " functions", problem);
  }
}

/// The same by mma.sync, with mask functions too.
void add_fp8_by_mma(const char* arch, Families& all) {
  const std::string name = fmt::format("{} fp8", arch);
  plan::Variants variants = functions();
  for (const DType dtype : {DType::e4m3, DType::e5m2}) {
    for (const int d : {64, 128, 256}) {
      plan::Problem problem = problem_of(arch, dtype, d, d, (d != 128) == (dtype == DType::e4m3));
      problem.o_dtype = d == 64 ? DType::f16 : d == 128 ? DType::bf16 : DType::e4m3;
      all.forward(name, problem);
      all.forward(name + " decode", decode_of(problem, d == 64 ? 20 : static_cast<int>(kContiguous)));
      problem.key_scales = problem.value_scales = d != 64;
      all.forward(name + " packed", packed(problem));
      problem.b = 1;
      problem.s_q = 1;
      all.forward(name + " splits", problem);
    }
  }
  plan::Problem problem = problem_of(arch, DType::e4m3, 128, 128, true);
  all.forward(name, problem, false, {"sm80_fp8", "single_level=1"});
  problem.variants = &variants;
  all.forward(name + " functions", problem);
  problem.bounded = true;
  all.forward(name + " bounded", packed(problem));
  variants.placed = problem.placed = problem.place_in_memory = true;
  problem.place = ShardPlace{.whole_b = 8, .whole_h_q = 32, .whole_s_q = 8192, .whole_s_kv = 8192};
  all.forward(name + " in memory", problem);
}

/// Caches of 8 and 4 bits, latent rows, and appends into all of them.
void add_caches(const char* arch, Families& all) {
  const std::string name = fmt::format("{} cache", arch);
  constexpr std::pair<DType, DType> kStored[] = {
      {DType::e4m3, DType::e4m3}, {DType::i8, DType::bf16}, {DType::u4x2, DType::u4x2}, {DType::bf16, DType::i8}};
  int turn = 0;
  for (const auto& [k, v] : kStored) {
    plan::Problem problem = problem_of(arch, DType::bf16, 128, turn % 2 == 0 ? 128 : 64, true);
    problem.k_dtype = k;
    problem.v_dtype = v;
    problem.group_size = k == DType::u4x2 ? 32 : 0;
    problem.page_size = 64;
    all.forward(name, problem);
    all.forward(name + " decode", packed(decode_of(problem, turn % 2 == 0 ? 16 : static_cast<int>(kContiguous))));
    plan::AppendProblem append{problem.arch, problem.dtype, problem.d_qk, problem.d_v, 16, 64};
    append.k_storage = plan::storage_of(k, problem.group_size);
    append.v_storage = plan::storage_of(v, problem.group_size);
    append.scales_given = turn == 1;
    all.add(name, plan::append_specs(append).front());
    ++turn;
  }
  plan::Problem latent = decode_of(problem_of(arch, DType::bf16, 576, 512, true), 64);
  latent.h_q = 128;
  latent.h_kv = 1;
  latent.value_in_key = true;
  all.forward(name + " value in key", latent);
  latent.k_dtype = DType::e4m3;
  all.forward(name + " latent", latent);
  all.forward(name + " latent packed", packed(latent));
  plan::AppendProblem append{latent.arch, DType::bf16, 576, 512, 64, 64};
  append.k_storage = plan::kLatentRows;
  all.add(name + " latent", plan::append_specs(append).front());
}

/// Statistics, invariance, wide heads, and the debug kernels of each family.
void add_others(const char* arch, Families& all) {
  plan::Problem problem = problem_of(arch, DType::bf16, 128, 128, true);
  for (const MaxLogit max_logit : {MaxLogit::softmax, MaxLogit::scaled}) {
    problem.statistics = {max_logit, false, max_logit == MaxLogit::softmax, ColumnSums::query_heads};
    problem.statistics.top_keys = max_logit == MaxLogit::softmax ? 16 : 0;
    all.forward(fmt::format("{} statistics", arch), problem);
  }
  problem.statistics = {};
  for (const Invariance invariance : {Invariance::batch, Invariance::rows}) {
    problem.invariance = invariance;
    all.forward(fmt::format("{} invariance", arch), problem);
    all.forward(fmt::format("{} invariance", arch), packed(decode_of(problem, 16)));
  }
  plan::Problem wide = problem_of(arch, DType::f16, 512, 512, true);
  all.forward(fmt::format("{} wide", arch), wide);
  problem = problem_of(arch, DType::f16, 320, 320, true);
  for (const bool deterministic : {false, true}) all.backward(fmt::format("{} wide", arch), problem, deterministic);
  const plan::Variants variants = functions();
  problem = problem_of(arch, DType::f16, 64, 64, true);
  problem.variants = &variants;
  all.forward(fmt::format("{} functions", arch), packed(problem));
  all.backward(fmt::format("{} functions", arch), packed(problem), false);
  const std::string name = fmt::format("{} debug", arch);
  for (const int d : {64, 128}) {
    problem = problem_of(arch, DType::bf16, d, d, true);
    all.forward(name, problem, true);
    all.backward(name, problem, d == 64, true);
  }
  all.forward(name, decode_of(problem, 16), true);
  all.forward(name, wide, true);
  all.add(name, plan::probabilities_spec(problem), true);
  all.add(name, plan::scan_results_spec(problem.arch), true);
}

/// Gradients of statistics, and statistics of heads and of packed batches.
void add_statistics(const char* arch, Families& all) {
  const std::string name = fmt::format("{} statistics", arch);
  plan::Problem problem = problem_of(arch, DType::bf16, 128, 128, true);
  for (const bool of_heads : {false, true}) {
    const ColumnSums sums = of_heads ? ColumnSums::kv_heads : ColumnSums::query_heads;
    problem.statistics = {MaxLogit::softmax, of_heads, true, sums, 16, true, true, true};
    for (const bool deterministic : {false, true}) all.backward(name + " gradients", problem, deterministic);
    all.backward(name + " packed gradients", packed(problem), false);
    all.forward(name + " heads", problem);
    all.forward(name + " packed", packed(problem));
  }
  plan::Problem cache = problem_of(arch, DType::bf16, 128, 128, true);
  cache.statistics = {MaxLogit::none, false, false, ColumnSums::kv_heads, 16};
  for (const int page_size : {16, static_cast<int>(kContiguous)}) {
    for (const DType stored : {DType::bf16, DType::e4m3, DType::u4x2}) {
      cache.page_size = page_size;
      cache.k_dtype = cache.v_dtype = stored;
      cache.group_size = stored == DType::u4x2 ? 64 : 0;
      all.forward(name + " cache", cache);
    }
  }
}

/// Gradients that are not wanted, splits that are merged, places in memory, and bounds of multiprocessors.
void add_parts(const char* arch, Families& all) {
  const std::string name = fmt::format("{} part", arch);
  for (const Gradients gradients : {Gradients{true, false, true}, Gradients{true, true, false}}) {
    for (const int d : {64, 128, 256, 320}) {
      plan::Problem problem = problem_of(arch, DType::bf16, d, d, true);
      problem.gradients = gradients;
      all.backward(name, problem, false);
      problem.b = 1;
      problem.h_q = problem.h_kv = 2;
      all.backward(name + " splits", problem, false, false, {"", "splits=3"});
      all.backward(name + " splits", problem, false, false, {"sm80", "splits=3"});
    }
  }
  plan::Problem problem = problem_of(arch, DType::bf16, 128, 128, false);
  problem.accumulate = true;
  problem.s_q = 1;
  all.forward(name + " splits", problem, false, {"", "splits=3"});
  plan::Variants variants = functions();
  problem = problem_of(arch, DType::f16, 64, 64, true);
  problem.invariance = Invariance::rows;
  problem.variants = &variants;
  all.forward(name + " invariance", problem);
  variants.placed = true;
  problem = problem_of(arch, DType::f16, 64, 64, true);
  problem.variants = &variants;
  problem.placed = problem.place_in_memory = problem.bounded = true;
  problem.place = ShardPlace{.whole_b = 8, .whole_h_q = 32, .whole_s_q = 8192, .whole_s_kv = 8192};
  all.forward(name + " in memory", problem);
  for (const bool deterministic : {false, true}) all.backward(name + " in memory", problem, deterministic);
  problem.variants = nullptr;
  problem.d_qk = problem.d_v = 512;
  all.forward(name + " wide in memory", problem);
  problem = packed(problem_of(arch, DType::f16, 512, 512, true));
  problem.bounded = true;
  all.forward(name + " wide bounded", problem);
  all.forward(name + " wide packed", packed(problem_of(arch, DType::f16, 512, 512, true)));
  problem = packed(problem_of(arch, DType::f16, 64, 64, true));
  problem.dropout = true;
  all.add(name, plan::probabilities_spec(problem));
}

/// Fields of the Hopper kernels that nothing else sets.
void add_hopper_fields(Families& all) {
  const std::string name = "sm_90a";
  plan::Problem problem = decode_of(problem_of("sm_90a", DType::bf16, 128, 128, true), 64);
  for (const char* const text : {"own_parts=1", "split_blocks=4 splits=4", "wide_boxes=1"}) {
    for (const std::int64_t b : {1, 64}) {
      problem.b = b;
      all.forward(name, problem, false, {"sm90", text});
    }
  }
  problem.invariance = Invariance::batch;
  problem.page_size = 16;
  all.forward(name + " splits by length", problem);
  problem = problem_of("sm_90a", DType::bf16, 128, 128, true);
  problem.h_kv = problem.h_q / 2;
  for (const bool deterministic : {false, true}) {
    all.backward(name + " turns", problem, deterministic, false, {"sm90", "in_turns=1"});
  }
  problem = problem_of("sm_90a", DType::e4m3, 128, 128, true);
  problem.o_dtype = DType::e4m3;
  for (const char* const text : {"", "half_bytes=1", "polynomials=2"}) all.forward(name, problem, false, {"", text});
  problem.key_scales = problem.value_scales = true;
  for (const char* const text : {"shared_scales=1", "scales_of_all=1"}) all.forward(name, problem, false, {"", text});
  problem.placed = problem.place_in_memory = problem.bounded = true;
  problem.place = ShardPlace{.whole_b = 8, .whole_h_q = 32, .whole_s_q = 8192, .whole_s_kv = 8192};
  all.forward(name, problem);
  problem = packed(problem_of("sm_90a", DType::e4m3, 64, 64, true));
  problem.bounded = true;
  all.forward(name, problem);
}

/// What overrides alone set: each field in the first kernel of the lists that takes it.
void add_others(const std::vector<NamedSpec>& specs, Families& all) {
  for (const plan::Kernel* const kernel : plan::catalogue()) {
    for (const plan::Field& field : kernel->fields) {
      if (!field.of_override) continue;
      const bool added = std::ranges::any_of(specs, [&](const NamedSpec& named) {
        plan::KernelSpec spec = named.spec;
        if (&spec.kernel() != kernel) return false;
        field.set(spec, 1);
        if (!plan::refusal(spec).empty()) return false;
        all.add(std::string(field.name), spec);
        return true;
      });
      if (!added) throw Error(ErrorCode::internal, fmt::format("no spec of the lists takes {}", field.name));
    }
  }
}

}  // namespace

std::vector<NamedSpec> family_list() {
  Families all("family");
  add_turing(all);
  add_fp8(all);
  for (const char* const arch : {"sm_89", "sm_120a"}) add_fp8_by_mma(arch, all);
  for (const char* const arch : {"sm_80", "sm_90a", "sm_120a"}) {
    add_caches(arch, all);
    add_others(arch, all);
  }
  all.forward("fp8 debug", problem_of("sm_90a", DType::e4m3, 128, 128, true), true);
  return std::move(all).take();
}

std::vector<NamedSpec> field_list() {
  Families all("fields");
  const std::vector<NamedSpec> families = family_list();
  all.leave_out(families);
  for (const char* const arch : {"sm_80", "sm_90a"}) {
    add_statistics(arch, all);
    add_parts(arch, all);
  }
  add_hopper_fields(all);
  std::vector<NamedSpec> specs = golden_list();
  specs.insert(specs.end(), families.begin(), families.end());
  add_others(specs, all);
  return std::move(all).take();
}

}  // namespace fa::render
