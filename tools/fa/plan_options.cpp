#include "plan_options.hpp"

#include <CLI/CLI.hpp>

#include <utility>

#include "api/append.hpp"
#include "api/build.hpp"
#include "api/packed.hpp"
#include "api/validate.hpp"
#include "api/variants.hpp"
#include "choice.hpp"
#include "gpu.hpp"
#include "options.hpp"
#include "plan/append.hpp"
#include "plan/backward.hpp"
#include "plan/mask_tiles.hpp"
#include "plan/planner.hpp"

namespace fa::cli {
namespace {

AttentionConfig config_of(const PlanOptions& options, const PlanPoint& point) {
  AttentionConfig config;
  config.head_dim = point.head_dim;
  config.head_dim_v = options.head_dim_v;
  config.dtype = point.dtype;
  config.scale = options.scale;
  config.causal = point.causal;
  config.causal_align = options.causal_align;
  options.packed.apply(&config);
  config.page_size = options.page_size;
  config.accumulate = options.accumulate;
  config.value_in_key = options.value_in_key;
  config.k_dtype = options.k_dtype;
  config.v_dtype = options.v_dtype;
  config.group_size = options.group_size;
  config.o_dtype = options.o_dtype;
  config.key_scales = options.key_scales;
  config.value_scales = options.value_scales;
  config.precise = options.precise;
  config.invariance = options.invariance;
  config.statistics = options.statistics;
  apply(options.variant, &config);
  config.deterministic = options.deterministic;
  config.debug = options.debug;
  (options.op == api::Operation::backward ? config.kernel_backward : config.kernel) = options.kernel;
  return config;
}

/// `functions` are those of the configuration, and outlive the problem.
plan::Problem problem_of(const PlanOptions& options, const PlanPoint& point, const api::Functions& functions) {
  AttentionShape shape = options.shape;
  shape = api::checked(config_of(options, point), shape);
  shape.aligned = !options.unaligned;
  return api::make_problem(config_of(options, point), shape, point.arch, &functions.of(shape));
}

/// Where debug kernels are wanted, the first choices as such: checks alone make kernels spill.
std::vector<plan::Alternatives> debugged(const AttentionConfig& config, std::vector<plan::Alternatives> kernels) {
  if (!api::wants_debug_kernels(config)) return kernels;
  for (plan::Alternatives& specs : kernels) {
    plan::KernelSpec first = specs.front();
    first.debug = true;
    specs = {first};
  }
  return kernels;
}

}  // namespace

void add_plan_options(CLI::App& command, PlanOptions* options) {
  const std::string group = "Problem";
  command.add_option("--head-dim-v", options->head_dim_v, "d_v (default: d_qk)")->group(group);
  command.add_option("--scale", options->scale, "Factor of the scores; only its sign picks a kernel")->group(group);
  command.add_option("--batch", options->shape.b, "b")->group(group);
  command.add_option("--heads", options->shape.h_q, "h_q")->group(group);
  command.add_option("--heads-kv", options->shape.h_kv, "h_kv (default: h_q)")->group(group);
  command.add_option("--seq", options->shape.s_q, "s_q")->group(group);
  command.add_option("--seq-kv", options->shape.s_kv, "s_kv")->group(group);
  command.add_flag("--unaligned", options->unaligned, "Rows need not start at multiples of 16 bytes")->group(group);
  command.add_option("--total", options->shape.total_q, "Varlen: rows of the packed q (default: b * s_q)")
      ->group(group);
  command.add_option("--total-kv", options->shape.total_kv, "Varlen: rows of the packed k and v (default: b * s_kv)")
      ->group(group);
  command
      .add_option("--page-size", options->page_size,
                  "Keys of a page that k and v are in; -1: a contiguous KV cache; 0: none")
      ->group(group);
  command.add_option("--value-in-key", options->value_in_key, "V is the first so many columns of K; 0: of its own")
      ->group(group);
  add_stored_options(command, &options->k_dtype, &options->v_dtype, &options->group_size);
  add_o_dtype_option(command, &options->o_dtype);
  add_key_scales_options(command, &options->key_scales, &options->value_scales, &options->precise);
  command.add_flag("--accumulate", options->accumulate, "Forward: add to the state that o and lse hold")->group(group);
  command.add_flag("--placed", options->shape.placed, "Calls have places in larger attentions")->group(group);
  command.add_flag("--strided", options->shape.strided, "With steps between rows, or keys")->group(group);
  command.add_flag("--place-in-memory", options->shape.place_in_memory, "Which kernels read when they run")
      ->group(group);
  command.add_flag("--bounded", options->shape.bounded, "Calls leave multiprocessors to others")->group(group);
  add_invariance_option(command, &options->invariance);
  add_statistics_options(command, &options->statistics);
  add_statistics_gradient_options(command, &options->statistics);
  add_packed_options(command, &options->packed);
  add_causal_align_option(command, &options->causal_align);
  add_variant_options(command, &options->variant);
  const Choices<api::Operation> operations{{"forward", api::Operation::forward},
                                           {"backward", api::Operation::backward}};
  add_choice(command, "--op", &options->op, operations, "The call that is planned")->group(group);
  command.add_flag("--deterministic", options->deterministic, "backward: dq bitwise repeatable")->group(group);
  add_outputs_option(command, &options->shape.gradients)->group(group);
  command.add_flag("--debug", options->debug, "Kernels that check themselves, as FA_DEBUG_KERNELS=1")->group(group);
  add_kernel_options(command, &options->kernel);
}

std::vector<plan::Alternatives> plan_kernels(const PlanOptions& options, const PlanPoint& point) {
  const AttentionConfig config = config_of(options, point);
  api::validate(config, false);
  if (options.append) {
    plan::AppendProblem append = api::append_problem(config, *options.append);
    append.arch = point.arch;
    return debugged(config, {plan::append_specs(append)});
  }
  const api::Functions functions = api::read_functions(config, false);
  const plan::Problem problem = problem_of(options, point, functions);
  std::vector<plan::Alternatives> kernels =
      options.op == api::Operation::backward
          ? plan::kernels_of(
                plan::plan_backward(problem, api::read_override(config, options.op), options.deterministic))
          : plan::kernels_of(plan::plan_forward(problem, api::read_override(config, options.op)));
  kernels = plan::with_mask_tiles(problem, kernels);
  for (const plan::KernelSpec& spec : api::padding_specs(config_of(options, point), point.arch)) {
    kernels.push_back({spec});
  }
  return debugged(config, std::move(kernels));
}

plan::Arch default_arch() {
  std::string ignored;
  const std::optional<driver::DeviceInfo> gpu = find_gpu(&ignored);
  return gpu ? gpu->arch : plan::parse_arch("sm_90a");
}

}  // namespace fa::cli
