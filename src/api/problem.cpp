#include "api/problem.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string_view>
#include <utility>

#include "api/build.hpp"
#include "api/validate.hpp"
#include "plan/backward.hpp"
#include "plan/catalogue.hpp"
#include "plan/fixed.hpp"
#include "plan/planner.hpp"
#include "support/text.hpp"

namespace fa::api {
namespace {

/// As a shell takes it.
std::string quoted_for_shell(std::string_view text) {
  std::string result = "'";
  for (const char c : text) {
    if (c == '\'') {
      result += "'\\''";
    } else {
      result += c;
    }
  }
  return result + "'";
}

void add_variants(const plan::Problem& problem, std::string* command) {
  const plan::Variants& variants = *problem.variants;
  if (!variants.score.empty()) *command += " --score " + quoted_for_shell(variants.score);
  if (!variants.mask.empty()) *command += " --mask " + quoted_for_shell(variants.mask);
  for (const expression::Capture& capture : variants.captures) {
    *command +=
        fmt::format(" --capture {}:{}{}", capture.name, to_string(capture.dtype), capture.requires_grad ? ":grad" : "");
  }
  if (variants.left_window) *command += fmt::format(" --window-left {}", problem.window_left);
  if (variants.chunked) *command += fmt::format(" --chunk {}", problem.chunk);
  if (variants.sink) *command += " --sink";
}

void add_statistics(const Statistics& wanted, std::string* command) {
  if (wanted.max_logit != MaxLogit::none) {
    *command += wanted.max_logit == MaxLogit::scaled ? " --max-logit scaled" : " --max-logit softmax";
    if (wanted.max_logit_by_head) *command += " --max-logit-by-head";
  }
  if (wanted.entropy) *command += " --entropy";
  if (wanted.column_sums != ColumnSums::none) {
    *command += wanted.column_sums == ColumnSums::kv_heads ? " --column-sums kv_heads" : " --column-sums query_heads";
  }
  if (wanted.top_keys != 0) *command += fmt::format(" --top-keys {}", wanted.top_keys);
}

void add_gradients(const Statistics& wanted, std::string* command) {
  Statistics rows = wanted;
  if (!wanted.max_logit_gradient) rows.max_logit = MaxLogit::none;
  rows.entropy = wanted.entropy_gradient;
  if (!wanted.column_sums_gradient) rows.column_sums = ColumnSums::none;
  rows.top_keys = 0;
  add_statistics(rows, command);
  if (wanted.entropy_gradient) *command += " --entropy-gradient";
  if (wanted.max_logit_gradient) *command += " --max-logit-gradient";
  if (wanted.column_sums_gradient) *command += " --column-sums-gradient";
}

}  // namespace

plan::Problem make_problem(const AttentionConfig& config, const AttentionShape& shape, plan::Arch arch,
                           const plan::Variants* variants) noexcept {
  plan::Problem problem;
  problem.arch = arch;
  problem.dtype = config.dtype;
  problem.d_qk = config.head_dim;
  problem.d_v = d_v_of(config);
  const std::int64_t right = window_of(config.window_right);
  problem.causal = config.causal || right >= 0;
  problem.window_right = config.causal ? 0 : std::max<std::int64_t>(right, 0);
  problem.window_left = std::max<std::int64_t>(window_of(config.window_left), 0);
  problem.chunk = config.chunk;
  if (variants != nullptr && variants->any()) problem.variants = variants;
  problem.causal_align = config.causal_align;
  const float scale = config.scale.value_or(1.0f);
  problem.positive_scale = scale > 0 && std::isfinite(1 / scale);
  problem.aligned = shape.aligned;
  problem.b = shape.b;
  problem.h_q = shape.h_q;
  problem.h_kv = shape.h_kv;
  problem.s_q = shape.s_q;
  problem.s_kv = shape.s_kv;
  problem.varlen = config.varlen;
  problem.dropout = config.dropout > 0;
  problem.page_size = static_cast<int>(config.page_size);
  problem.accumulate = config.accumulate;
  problem.value_in_key = config.value_in_key > 0;
  problem.k_dtype = config.k_dtype.value_or(config.dtype);
  problem.v_dtype = config.v_dtype.value_or(config.dtype);
  problem.group_size = group_size_of(config);
  problem.o_dtype = config.o_dtype.value_or(DType::bf16);
  problem.key_scales = config.key_scales;
  problem.value_scales = config.value_scales;
  problem.precise = config.precise;
  problem.invariance = config.invariance;
  problem.statistics = config.statistics;
  problem.sum_buffers = plan::sum_buffers(config.kernel);
  problem.portable = plan::names_portable(config.kernel);
  problem.gradients = shape.gradients;
  problem.placed = shape.placed;
  problem.place_in_memory = shape.place_in_memory;
  problem.bounded = shape.bounded;
  problem.total_q = shape.total_q;
  problem.total_kv = shape.total_kv;
  return problem;
}

plan::Fixed read_override(const AttentionConfig& config, Operation op) {
  return op == Operation::backward ? plan::read_override(config.kernel_backward, plan::Op::backward, "kernel_backward")
                                   : plan::read_override(config.kernel, plan::Op::forward, "kernel");
}

std::string compile_command(const plan::Problem& problem, const plan::Fixed& given, const std::string& directory,
                            Operation op, bool deterministic) {
  const plan::Fixed fixed = op == Operation::backward ? plan::followed_backward(problem, given, deterministic)
                                                      : plan::followed_forward(problem, given);
  std::string command = fmt::format("fa compile --arch {} --dtype {} --head-dim {}", to_string(problem.arch),
                                    to_string(problem.dtype), problem.d_qk);
  const auto add = [&command]<typename... Values>(fmt::format_string<Values...> format, Values&&... values) {
    support::append_format(command, format, std::forward<Values>(values)...);
  };
  if (op == Operation::backward) command += deterministic ? " --op backward --deterministic" : " --op backward";
  if (op == Operation::backward && problem.gradients != Gradients{}) {
    const auto [dq, dk, dv] = problem.gradients;
    const std::string_view names = !dq && !dk && !dv ? "none" : "";
    add(" --outputs {}{}{}{}", names, dq ? "dq" : "", dk ? "dk" : "", dv ? "dv" : "");
  }
  if (problem.d_v != problem.d_qk && !problem.value_in_key) add(" --head-dim-v {}", problem.d_v);
  // A mask behind the diagonal is a window with its end there, which compiles the same kernel.
  add(" --causal {}", problem.causal ? "yes" : "no");
  if (problem.causal && problem.causal_align == CausalAlign::top_left) add(" --causal-align top-left");
  add(" --batch {} --heads {} --heads-kv {} --seq {} --seq-kv {}", problem.b, problem.h_q, problem.h_kv, problem.s_q,
      problem.s_kv);
  if (problem.variants != nullptr) add_variants(problem, &command);
  if (!problem.positive_scale) add(" --scale -1");
  if (problem.varlen) add(" --varlen --total {}", problem.total_q);
  if (problem.varlen && !problem.paged()) add(" --total-kv {}", problem.total_kv);
  if (problem.paged()) add(" --page-size {}", problem.page_size);
  if (problem.value_in_key) add(" --value-in-key {}", problem.d_v);
  if (problem.accumulate && op == Operation::forward) command += " --accumulate";
  if (problem.fp8() && problem.o_dtype != DType::bf16) add(" --o-dtype {}", to_string(problem.o_dtype));
  if (problem.key_scales) command += " --key-scales";
  if (problem.value_scales) command += " --value-scales";
  if (problem.precise) command += " --precise";
  if (problem.stored() && size_of(problem.k_dtype) == 1) add(" --k-dtype {}", to_string(problem.k_dtype));
  if (problem.stored() && size_of(problem.v_dtype) == 1) add(" --v-dtype {}", to_string(problem.v_dtype));
  if (problem.group_size != 0) add(" --group-size {}", problem.group_size);
  if (problem.invariance != Invariance::none && op == Operation::forward) {
    add(" --invariance {}", to_string(problem.invariance));
  }
  if (op == Operation::forward) add_statistics(problem.statistics, &command);
  if (op == Operation::backward && problem.statistics_gradients()) add_gradients(problem.statistics, &command);
  if (problem.sum_buffers != 0 && op == Operation::forward)
    add(" --kernel 'column_sums row_buffers={}'", problem.sum_buffers);
  if (problem.placed) command += problem.variants != nullptr && problem.variants->strided ? " --strided" : " --placed";
  if (problem.place_in_memory) command += " --place-in-memory";
  if (problem.bounded) command += " --bounded";
  if (problem.dropout) add(" --dropout 0.5");  // which one it is, no kernel depends on
  if (!problem.aligned) add(" --unaligned");
  // The command's tensors are ones that the copy engine can describe.
  const plan::Family family = problem.tensor_maps ? fixed.family : plan::last_forward_family(problem).family;
  if (family != plan::Family::automatic) add(" --family {}", to_string(family));
  for (const auto& [name, value] : fixed.fields()) {
    std::string option(name);
    std::ranges::replace(option, '_', '-');
    add(" --{} {}", option, value);
  }
  if (!directory.empty()) add(" --directory {}", quoted_for_shell(directory));
  return command;
}

namespace {

/// Where `config` looks for what `command` puts into its directory.
std::string brought(std::string command, const AttentionConfig& config) {
  const CachePolicy& cache = config.cache;
  if (cache.mode == CachePolicy::Mode::disk || cache.packs.empty()) return command;
  command += " && fa cache export " + quoted_for_shell(cache.packs.front());
  if (!cache.directory.empty()) command += " --directory " + quoted_for_shell(cache.directory);
  return command;
}

}  // namespace

std::string remedy(const plan::Problem& problem, const AttentionConfig& config, Operation op) {
  const std::string& directory = config.cache.directory;
  std::string command = compile_command(problem, read_override(config, op), directory, op, config.deterministic);
  if (config.zero_padding) command += " --zero-padding";
  if (wants_debug_kernels(config)) command += " --debug";
  return brought(std::move(command), config);
}

std::string remedy(plan::KernelSpec spec, const AttentionConfig& config) {
  spec.debug |= wants_debug_kernels(config);
  std::string command = "fa compile --spec " + quoted_for_shell(canonical(spec));
  if (!config.cache.directory.empty()) command += " --directory " + quoted_for_shell(config.cache.directory);
  return brought(std::move(command), config);
}

}  // namespace fa::api
