#ifndef FA_SRC_API_BUILD_HPP_
#define FA_SRC_API_BUILD_HPP_

#include <memory>
#include <span>

#include <fa/attention.hpp>

#include "cache/store.hpp"
#include "driver/driver.hpp"
#include "plan/kernel_spec.hpp"
#include "plan/planner.hpp"

namespace fa::api {

/// The store that `policy` names; its warnings go to the log.
std::shared_ptr<cache::Store> open_store(const CachePolicy& policy);

/// What `spec` is stored under.
cache::Key cache_key(const plan::KernelSpec& spec);

/// The cubin of `spec`: stored, or compiled now if `policy` allows. Throws fa::Error: no_compiler, compile_failed,
/// cache_miss.
cache::Lookup get_kernel(const plan::KernelSpec& spec, cache::Store& store, CompilePolicy policy);

/// The first of a plan's kernels that does not spill, else the one that spills least; with `deterministic` the first,
/// whatever it spills. With CompilePolicy::never the stored ones compete; throws like get_kernel when there is none.
struct ChosenKernel {
  plan::KernelSpec spec;
  cache::Lookup lookup;
};
ChosenKernel choose_kernel(std::span<const plan::KernelSpec> specs, cache::Store& store, CompilePolicy policy,
                           bool deterministic = false);
ChosenKernel choose_kernel(const plan::ForwardPlan& plan, cache::Store& store, CompilePolicy policy,
                           bool deterministic = false);

/// A kernel loaded for `device`, once a process. Kernels stay loaded until the process ends, because queued work may
/// need them. `info`, if given, is filled with what it took.
std::shared_ptr<const driver::LoadedKernel> load_kernel(const ChosenKernel& chosen, const driver::ContextRef& device,
                                                        KernelInfo* info);

}  // namespace fa::api

#endif  // FA_SRC_API_BUILD_HPP_
