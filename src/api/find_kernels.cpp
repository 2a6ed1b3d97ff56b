#include <vector>

#include <fa/attention.hpp>

#include "api/append.hpp"
#include "api/build.hpp"
#include "api/merge_states.hpp"
#include "api/packed.hpp"
#include "api/paged.hpp"
#include "api/problem.hpp"
#include "api/validate.hpp"
#include "api/variants.hpp"
#include "plan/arch.hpp"
#include "plan/backward.hpp"
#include "plan/inspect.hpp"
#include "plan/mask_tiles.hpp"
#include "plan/planner.hpp"
#include "plan/schedule.hpp"

namespace fa {
namespace {

std::vector<KernelInfo> find(const std::vector<plan::Alternatives>& kernels, const plan::Problem& problem,
                             const AttentionConfig& config, api::Operation op) {
  const std::shared_ptr<cache::Store> store = api::open_store(config.cache);
  api::Supply supply(config);
  supply.command = [&] { return api::remedy(problem, config, op); };
  std::vector<KernelInfo> found;
  bool reaches = true;
  plan::KernelSpec attention;
  for (const plan::Alternatives& specs : kernels) {
    if (specs.front().op() == plan::Op::row_norms && !reaches) continue;  // not with what is taken
    const bool schedules = specs.front().op() == plan::Op::schedule;
    if (schedules && specs.front() != plan::schedule_spec(attention)) continue;
    const bool first = config.deterministic || config.invariance != Invariance::none;
    const api::ChosenKernel chosen = api::choose_kernel(specs, *store, supply, first);
    if (plan::needs_tile_lists(problem) && plan::reads_tile_lists(chosen.spec.op())) {
      const plan::KernelSpec lists = plan::mask_tiles_spec(chosen.spec);
      found.push_back(api::kernel_info(api::choose_kernel({&lists, 1}, *store, supply)));
    }
    found.push_back(api::kernel_info(chosen));
    if (chosen.spec.op() == plan::Op::forward) {
      attention = chosen.spec;
      reaches = attention.affine_reach();
    }
  }
  for (const plan::KernelSpec& spec : api::padding_specs(config, problem.arch)) {
    found.push_back(api::kernel_info(api::choose_kernel({&spec, 1}, *store, supply)));
  }
  if (supply.debug) {
    const plan::KernelSpec scan = plan::scan_results_spec(problem.arch);
    found.push_back(api::kernel_info(api::choose_kernel({&scan, 1}, *store, supply)));
  }
  return found;
}

/// That of a call of one kernel.
KernelInfo find(const plan::Alternatives& specs, const AttentionConfig& config) {
  const std::shared_ptr<cache::Store> store = api::open_store(config.cache);
  api::Supply supply(config);
  supply.command = [&] { return api::remedy(specs.front(), config); };
  return api::kernel_info(api::choose_kernel(specs, *store, supply, config.deterministic));
}

}  // namespace

std::vector<KernelInfo> find_kernels(const AttentionConfig& config, const AttentionShape& shape,
                                     const std::string& arch) {
  api::validate(config, false);
  const api::Functions functions = api::read_functions(config, false);
  plan::Problem problem =
      api::make_problem(config, api::checked(config, shape), plan::parse_target(arch), &functions.of(shape));
  if (problem.b == 0 || problem.h_q == 0 || problem.s_q == 0) return {};
  const plan::Fixed fixed = api::read_override(config, api::Operation::forward);
  const plan::ForwardPlan planned = plan::plan_forward(problem, fixed);
  std::vector<KernelInfo> found = find(plan::kernels_of(planned), problem, config, api::Operation::forward);
  if (!problem.paged() || !planned.kernel.own_parts()) return found;
  problem.given_schedule = true;  // calls that bring one have another kernel
  const std::vector<KernelInfo> more =
      find(plan::kernels_of(plan::plan_forward(problem, fixed)), problem, config, api::Operation::forward);
  found.insert(found.end(), more.begin(), more.end());
  return found;
}

KernelInfo find_append_kernel(const AttentionConfig& config, const AppendShape& shape, const std::string& arch) {
  api::validate(config, false);
  plan::AppendProblem problem = api::append_problem(config, shape);
  problem.arch = plan::parse_target(arch);
  return find(plan::append_specs(problem), config);
}

KernelInfo find_merge_kernel(const AttentionConfig& config, const MergeShape& shape, const std::string& arch) {
  api::validate(config, false);
  plan::MergeProblem problem = api::merge_problem(config, shape);
  problem.arch = plan::parse_target(arch);
  return find(plan::merge_specs(problem), config);
}

std::vector<KernelInfo> find_backward_kernels(const AttentionConfig& config, const AttentionShape& shape,
                                              const std::string& arch) {
  api::validate(config, false);
  api::check_has_backward(config);
  const api::Functions functions = api::read_functions(config, false);
  const plan::Problem problem =
      api::make_problem(config, api::checked(config, shape), plan::parse_target(arch), &functions.of(shape));
  if (problem.b == 0 || problem.h_q == 0 || (problem.s_q == 0 && problem.s_kv == 0)) return {};
  const plan::BackwardPlan planned =
      plan::plan_backward(problem, api::read_override(config, api::Operation::backward), config.deterministic);
  return find(plan::kernels_of(planned), problem, config, api::Operation::backward);
}

}  // namespace fa
