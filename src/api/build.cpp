#include "api/build.hpp"

#include <fmt/format.h>

#include <chrono>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "cache/digest.hpp"
#include "compile/compiler.hpp"
#include "plan/planner.hpp"
#include "render/source.hpp"
#include "support/log.hpp"

namespace fa::api {
namespace {

using Clock = std::chrono::steady_clock;

double milliseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

cache::Key key_of(const plan::KernelSpec& spec, const render::Source& source) {
  cache::Key key;
  // The unit is written by code of the library, not by a template: it is part of what is digested.
  key.templates = cache::digest(render::templates_digest() + source.unit);
  key.spec = canonical(spec);
  key.options = compile::code_options(spec.arch);
  key.target = to_string(spec.arch);
  return key;
}

cache::Entry build(const plan::KernelSpec& spec, const render::Source& source, const cache::Key& key) {
  compile::Cubin cubin = compile::compile(source, spec.arch);
  support::logf(LogLevel::info, "compiled {} in {:.0f} ms: {} registers, {} bytes of local memory", key.spec,
                cubin.milliseconds, cubin.facts.registers, cubin.facts.local_bytes);
  cache::Entry entry;
  entry.key = key;
  entry.kernel_name = source.kernel_name;
  entry.compiler = cubin.compiler;
  entry.registers = cubin.facts.registers;
  entry.local_bytes = cubin.facts.local_bytes;
  entry.shared_bytes = plan::shared_bytes(spec) + cubin.facts.static_shared;
  entry.threads = spec.threads();
  entry.compile_ms = cubin.milliseconds;
  entry.cubin = std::move(cubin.bytes);
  return entry;
}

const char* origin_name(cache::Origin origin) {
  switch (origin) {
    case cache::Origin::memory:
      return "memory";
    case cache::Origin::disk:
      return "disk";
    case cache::Origin::built:
      return "compiled";
  }
  return "unknown";
}

/// Loaded kernels by spec and device ordinal. Never destroyed: the driver may be gone when static objects are.
struct Registry {
  std::mutex mutex;
  std::map<std::pair<std::string, int>, std::shared_ptr<const driver::LoadedKernel>> kernels;
};

Registry& registry() {
  static auto* const instance = new Registry;
  return *instance;
}

}  // namespace

std::shared_ptr<cache::Store> open_store(const CachePolicy& policy) {
  cache::StoreOptions options;
  if (policy.mode == CachePolicy::Mode::disk) {
    options.directory = policy.directory.empty() ? cache::default_directory() : std::filesystem::path(policy.directory);
  }
  options.warn = [](const std::string& message) { support::log(LogLevel::warning, message); };
  return cache::Store::shared(options);
}

cache::Key cache_key(const plan::KernelSpec& spec) {
  return key_of(spec, render::render(spec));
}

cache::Lookup get_kernel(const plan::KernelSpec& spec, cache::Store& store, CompilePolicy policy) {
  const render::Source source = render::render(spec);
  const cache::Key key = key_of(spec, source);
  cache::Store::Build builder;
  if (policy == CompilePolicy::allow) builder = [&] { return build(spec, source, key); };
  cache::Lookup lookup = store.get(key, builder);
  if (lookup.entry == nullptr) {
    throw Error(ErrorCode::cache_miss,
                fmt::format("no stored kernel for {}, and CompilePolicy::never forbids compiling it", key.spec),
                {{"kernel", key.spec}, {"key", key.digest()}});
  }
  return lookup;
}

ChosenKernel choose_kernel(const plan::ForwardPlan& plan, cache::Store& store, CompilePolicy policy,
                           bool deterministic) {
  std::vector<plan::KernelSpec> specs{plan.kernel};
  specs.insert(specs.end(), plan.alternatives.begin(), plan.alternatives.end());
  return choose_kernel(std::span<const plan::KernelSpec>(specs), store, policy, deterministic);
}

ChosenKernel choose_kernel(std::span<const plan::KernelSpec> specs, cache::Store& store, CompilePolicy policy,
                           bool deterministic) {
  std::optional<ChosenKernel> best;
  std::optional<Error> miss;
  for (const plan::KernelSpec& spec : specs) {
    try {
      ChosenKernel chosen{spec, get_kernel(spec, store, policy)};
      const int spilled = chosen.lookup.entry->local_bytes;
      if (!best || spilled < best->lookup.entry->local_bytes) best = std::move(chosen);
      if (spilled == 0 || deterministic) break;
    } catch (const Error& error) {
      if (best) break;  // a spilling kernel is slower, and right
      if (error.code() != ErrorCode::cache_miss || deterministic) throw;
      if (!miss) miss = error;
    }
  }
  if (!best) throw *miss;
  return *best;
}

std::shared_ptr<const driver::LoadedKernel> load_kernel(const ChosenKernel& chosen, const driver::ContextRef& device,
                                                        KernelInfo* info) {
  const cache::Lookup& lookup = chosen.lookup;
  const plan::KernelSpec& spec = chosen.spec;
  const cache::Entry& entry = *lookup.entry;
  const auto start = Clock::now();
  std::shared_ptr<const driver::LoadedKernel> kernel;
  {
    const std::pair<std::string, int> id{entry.key.digest(), device.info().ordinal};
    const std::lock_guard lock(registry().mutex);
    auto& slot = registry().kernels[id];
    if (slot == nullptr) {
      slot = std::make_shared<const driver::LoadedKernel>(entry.cubin, entry.kernel_name, plan::shared_bytes(spec),
                                                          device.context());
    }
    kernel = slot;
  }
  if (info != nullptr) {
    info->name = entry.kernel_name;
    info->spec = entry.key.spec;
    info->origin = origin_name(lookup.origin);
    info->compile_ms = lookup.origin == cache::Origin::built ? entry.compile_ms : 0;
    info->load_ms = milliseconds_since(start);
    info->registers = kernel->registers();
    info->local_bytes = kernel->local_bytes();
    info->shared_bytes = plan::shared_bytes(spec);
    info->threads = spec.threads();
  }
  return kernel;
}

}  // namespace fa::api
