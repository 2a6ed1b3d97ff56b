#ifndef FA_SRC_API_BUILD_HPP_
#define FA_SRC_API_BUILD_HPP_

#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include <fa/attention.hpp>

#include "cache/store.hpp"
#include "driver/driver.hpp"
#include "plan/kernel_spec.hpp"
#include "plan/planner.hpp"

namespace fa::api {

/// The store that `policy` and the environment name; its warnings go to the log. `driver` is the CUDA version that the
/// driver supports, 0 where nothing will be loaded. Throws fa::Error(invalid_argument) for a policy that makes no
/// sense.
std::shared_ptr<cache::Store> open_store(const CachePolicy& policy, int driver = 0);

/// The directory that `policy` and the environment name; empty: memory only, with the reason in `*problem` unless that
/// was asked for.
std::filesystem::path cache_directory(const CachePolicy& policy, std::string* problem);

/// The caps and the acceptance that `policy` and the environment set.
cache::Limits cache_limits(const CachePolicy& policy);
cache::Acceptance cache_acceptance(const CachePolicy& policy);

/// The packs that `policy` and the environment name.
std::vector<std::filesystem::path> cache_packs(const CachePolicy& policy);

/// The SHA-256 that the first of them must have, in lower case. Throws fa::Error(invalid_argument).
std::vector<std::string> cache_pack_pins(const CachePolicy& policy);

/// How a kernel may be had that is not in memory.
struct Supply {
  Supply(CompilePolicy policy) : compile(policy) {}  // NOLINT(google-explicit-constructor): a policy is a supply
  explicit Supply(const AttentionConfig& config);
  /// The same for several threads: they tell on_compile one at a time.
  Supply serialized() const;

  CompilePolicy compile = CompilePolicy::allow;
  std::function<void(const CompileEvent&)> on_compile = nullptr;
  cache::Acceptance accept = {};
  bool keep_source = false;
  bool exact = false;                              ///< no kernel of another target serves
  bool debug = false;                              ///< debug kernels, which are stored apart
  std::function<std::string()> command = nullptr;  ///< the `fa` command that would build the kernel; asked on a miss
};

/// Whether this thread is in a callback, which must wait for no kernel: whoever compiles it may be waiting for that to
/// return.
bool is_impatient() noexcept;

/// Whether a configuration, or FA_DEBUG_KERNELS in the environment, asks for debug kernels. Throws
/// fa::Error(invalid_argument) for a text there that is neither 0 nor 1.
bool wants_debug_kernels(const AttentionConfig& config);

/// What `spec` is stored under.
cache::Key cache_key(const plan::KernelSpec& spec);

/// What kernels for other targets that can stand in for it in a pack are stored under, the best first.
std::vector<cache::Key> substitute_keys(const plan::KernelSpec& spec);

/// The cubin of `spec`: stored, or compiled now if `supply` allows. Throws fa::Error: no_compiler, compile_failed,
/// cache_miss.
cache::Lookup get_kernel(const plan::KernelSpec& spec, cache::Store& store, const Supply& supply);

/// The first of a plan's kernels that does not spill, else the one that spills least; with `deterministic` the first,
/// whatever it spills. With CompilePolicy::never the stored ones compete; throws like get_kernel when there is none.
struct ChosenKernel {
  plan::KernelSpec spec;
  cache::Lookup lookup;
};
ChosenKernel choose_kernel(std::span<const plan::KernelSpec> specs, cache::Store& store, const Supply& supply,
                           bool deterministic = false);

/// The kernel of exactly `spec`, for a contest: one that spills is refused with fa::Error(unsupported). Throws like
/// get_kernel.
ChosenKernel contestant(const plan::KernelSpec& spec, cache::Store& store, const Supply& supply);

/// Gets kernels on threads of its own, so that who asks for one later finds it, or waits for what is under way. What
/// goes wrong is left to them to find out. Nothing is begun after `seconds`; the destructor waits for what was begun.
class Prefetch {
 public:
  /// `supply` is serialized() with those who ask meanwhile. `store` outlives it.
  Prefetch(std::vector<plan::KernelSpec> specs, cache::Store& store, const Supply& supply, unsigned threads,
           double seconds);

 private:
  std::vector<std::jthread> threads_;
};

/// Facts of a kernel that need no GPU; `load_kernel` adds the rest.
KernelInfo kernel_info(const ChosenKernel& chosen);

/// A kernel loaded for `device`, once a process. Kernels stay loaded until the process ends, because queued work may
/// need them. `info`, if given, is filled with what it took.
std::shared_ptr<const driver::LoadedKernel> load_kernel(const ChosenKernel& chosen, const driver::ContextRef& device,
                                                        KernelInfo* info);

}  // namespace fa::api

#endif  // FA_SRC_API_BUILD_HPP_
