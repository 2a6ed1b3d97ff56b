#include <vector>

#include <fa/attention.hpp>

#include "api/build.hpp"
#include "api/packed.hpp"
#include "api/problem.hpp"
#include "api/validate.hpp"
#include "api/variants.hpp"
#include "plan/arch.hpp"
#include "plan/planner.hpp"

namespace fa {

std::vector<KernelInfo> find_kernels(const AttentionConfig& config, const AttentionShape& shape,
                                     const std::string& arch) {
  api::validate(config, false);
  const api::Functions functions = api::read_functions(config, false);
  const plan::Problem problem =
      api::make_problem(config, api::checked(config, shape), plan::parse_arch(arch), &functions.variants);
  if (problem.b == 0 || problem.h_q == 0 || problem.s_q == 0) return {};
  const KernelOverride fixed = config.kernel.value_or(KernelOverride{});
  const plan::ForwardPlan planned = plan::plan_forward(problem, fixed);
  const std::shared_ptr<cache::Store> store = api::open_store(config.cache);
  api::Supply supply(config);
  supply.command = [&] { return api::remedy(problem, config); };
  std::vector<KernelInfo> kernels{api::kernel_info(api::choose_kernel(planned, *store, supply, config.deterministic))};
  if (planned.kernel.split) {
    kernels.push_back(api::kernel_info({planned.combine, api::get_kernel(planned.combine, *store, supply)}));
  }
  for (const plan::KernelSpec& spec : api::padding_specs(config, problem.arch)) {
    kernels.push_back(api::kernel_info({spec, api::get_kernel(spec, *store, supply)}));
  }
  return kernels;
}

}  // namespace fa
