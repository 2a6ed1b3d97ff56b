#include "api/build.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "api/recording.hpp"
#include "cache/digest.hpp"
#include "compile/compiler.hpp"
#include "plan/catalogue.hpp"
#include "plan/planner.hpp"
#include "render/source.hpp"
#include "support/log.hpp"
#include "support/text.hpp"

namespace fa::api {
namespace {

using Clock = std::chrono::steady_clock;

double milliseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

bool is_debug(const cache::Entry& entry) {
  return entry.key.spec.find(" debug=1") != std::string::npos;
}

/// Calls of on_compile that this thread is in.
thread_local int t_telling = 0;

void tell(const Supply& supply, const CompileEvent& event) {
  if (!supply.on_compile) return;
  struct Telling {
    Telling() { ++t_telling; }
    ~Telling() { --t_telling; }
  } const telling;
  supply.on_compile(event);
}

/// Who runs in this thread and must wait for no kernel, because whoever compiles it may be waiting for that one to
/// return; nullptr: nobody.
const char* impatient() noexcept {
  if (t_telling > 0) return "on_compile";
  return support::inside_log_callback() ? "log callback" : nullptr;
}

[[noreturn]] void throw_busy(const cache::Key& key, const char* who) {
  throw Error(ErrorCode::invalid_argument,
              fmt::format("{} asks for a kernel that is being compiled: accepted are kernels that are ready, or that "
                          "nobody compiles; {}",
                          who, key.spec),
              {{"argument", who}, {"value", key.spec}, {"accepted", "kernels that nobody compiles"}});
}

/// Tells the hook that compiling is over, whatever it makes of that.
void tell_end(const Supply& supply, const CompileEvent& event) noexcept {
  try {
    tell(supply, event);
  } catch (const std::exception& exception) {
    support::logf(LogLevel::warning, "on_compile threw after a compilation: {}", exception.what());
  } catch (...) {
    support::log(LogLevel::warning, "on_compile threw after a compilation");
  }
}

void check_compiler(const cache::Acceptance& accept) {
  if (accept.rule == cache::Acceptance::Rule::any) return;
  const compile::CompilerInfo compiler = compile::compiler_info();
  if (!compiler.available || accept.accepts(compiler.major, compiler.minor)) return;
  throw Error(ErrorCode::no_compiler,
              fmt::format("NVRTC {} ({}) may not compile: CachePolicy::compilers accepts {}{}.{}", compiler.version,
                          compiler.path, accept.rule == cache::Acceptance::Rule::at_least ? ">=" : "", accept.major,
                          accept.minor),
              {{"argument", "compilers"}, {"value", compiler.version}});
}

/// Said once: it costs a compilation in every process.
void warn_of_later_driver(const compile::Cubin& cubin, const cache::Acceptance& accept) {
  static std::atomic<bool> told{false};
  if (accept.driver == 0 || cubin.min_driver <= accept.driver || told.exchange(true)) return;
  support::logf(LogLevel::warning,
                "{} compiles for drivers of CUDA {} and later, and this one is of CUDA {}.{}: what it compiled is not "
                "taken from the cache. Name an older NVRTC in FA_NVRTC_PATH, or update the driver.",
                cubin.compiler, cubin.min_driver / 1000, accept.driver / 1000, accept.driver % 1000 / 10);
}

compile::Cubin compile_told(const plan::KernelSpec& spec, const render::Source& source, const Supply& supply) {
  check_compiler(supply.accept);
  CompileEvent event;
  event.spec = canonical(spec);
  event.target = to_string(spec.arch);
  tell(supply, event);
  try {
    compile::Cubin cubin = compile::compile(source, spec.arch);
    event.phase = CompileEvent::Phase::finished;
    event.milliseconds = cubin.milliseconds;
    tell_end(supply, event);
    warn_of_later_driver(cubin, supply.accept);
    return cubin;
  } catch (const std::exception& exception) {
    event.phase = CompileEvent::Phase::failed;
    event.problem = exception.what();
    tell_end(supply, event);
    throw;
  }
}

cache::Entry build(const plan::KernelSpec& spec, const Supply& supply) {
  const render::Source source = render::render(spec);
  compile::Cubin cubin = compile_told(spec, source, supply);
  cache::Entry entry;
  entry.kernel_name = source.kernel_name;
  entry.compiler = cubin.compiler;
  entry.registers = cubin.facts.registers;
  entry.local_bytes = cubin.facts.local_bytes;
  entry.shared_bytes = plan::shared_bytes(spec) + cubin.facts.static_shared;
  entry.threads = spec.threads();
  entry.min_driver = cubin.min_driver;
  entry.compile_ms = cubin.milliseconds;
  entry.cubin = std::move(cubin.bytes);
  if (supply.keep_source) entry.source = render::flatten(source);
  return entry;
}

[[noreturn]] void throw_miss(const cache::Key& key, const std::string& refused, const cache::Store& store,
                             const Supply& supply) {
  const std::string command = supply.command ? supply.command() : std::string();
  std::string message = fmt::format("no stored kernel for {}, and CompilePolicy::never forbids compiling it", key.spec);
  if (!refused.empty()) message += fmt::format("; what is stored was refused: {}", refused);
  for (const std::string& problem : store.pack_problems()) message += fmt::format("; unusable pack {}", problem);
  if (!command.empty()) message += fmt::format("; to build it: {}", command);
  throw Error(ErrorCode::cache_miss, message,
              {{"kernel", key.spec}, {"key", key.digest()}, {"command", command}, {"refused", refused}});
}

const char* origin_name(cache::Origin origin) {
  switch (origin) {
    case cache::Origin::memory:
      return "memory";
    case cache::Origin::pack:
      return "pack";
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

Supply::Supply(const AttentionConfig& config)
    : compile(config.compile),
      on_compile(config.on_compile),
      accept(cache_acceptance(config.cache)),
      keep_source(config.cache.keep_source),
      debug(wants_debug_kernels(config)) {}

Supply Supply::serialized() const {
  Supply result = *this;
  if (on_compile) {
    result.on_compile = [hook = on_compile, mutex = std::make_shared<std::mutex>()](const CompileEvent& event) {
      const std::scoped_lock lock(*mutex);
      hook(event);
    };
  }
  return result;
}

bool is_impatient() noexcept {
  return impatient() != nullptr;
}

cache::Key cache_key(const plan::KernelSpec& spec) {
  const std::string unit = render::unit_of(spec);
  cache::Key key;
  key.templates = render::templates_digest(unit);
  key.spec = canonical(spec);
  key.options = compile::code_options(spec.arch, spec.split_keys() == 0);
  // NVRTC adds these by itself.
  if (const std::string appended = support::environment("NVRTC_APPEND_FLAGS"); !appended.empty()) {
    key.options.push_back("NVRTC_APPEND_FLAGS=" + appended);
  }
  key.target = to_string(spec.arch);
  key.unit = cache::digest(unit);  // written by code of the library, not by a template
  return key;
}

std::vector<cache::Key> substitute_keys(const plan::KernelSpec& spec) {
  std::vector<cache::Key> keys;
  for (const plan::Arch target : plan::substitute_targets(spec.arch)) {
    keys.push_back(cache_key(plan::retargeted(spec, target)));
  }
  return keys;
}

bool wants_debug_kernels(const AttentionConfig& config) {
  const std::string text = support::environment("FA_DEBUG_KERNELS");
  if (!text.empty() && text != "0" && text != "1") support::throw_invalid("FA_DEBUG_KERNELS", text, "0 or 1");
  return config.debug || text == "1";
}

cache::Lookup get_kernel(const plan::KernelSpec& wanted, cache::Store& store, const Supply& supply) {
  plan::KernelSpec spec = wanted;
  spec.debug |= supply.debug;
  const cache::Key key = cache_key(spec);
  cache::Store::Build builder;
  if (supply.compile != CompilePolicy::never) builder = [&] { return build(spec, supply); };
  cache::Store::Substitutes substitutes;
  if (!supply.exact) substitutes = [&] { return substitute_keys(spec); };
  const char* const who = impatient();
  const cache::Wait wait = who != nullptr ? cache::Wait::never : cache::Wait::allowed;
  cache::Lookup lookup = store.get(key, builder, substitutes, wait);
  if (lookup.busy) throw_busy(key, who != nullptr ? who : "build");
  if (lookup.entry == nullptr) throw_miss(key, lookup.refused, store, supply);
  return lookup;
}

namespace {

int harmless_spill(const plan::KernelSpec& spec) {
  const auto harmless = spec.kernel().harmless_spill;
  return harmless == nullptr ? 0 : harmless(spec);
}

}  // namespace

ChosenKernel choose_kernel(std::span<const plan::KernelSpec> specs, cache::Store& store, const Supply& supply,
                           bool deterministic) {
  if (supply.debug) specs = specs.first(std::min<std::size_t>(specs.size(), 1));  // checks alone make kernels spill
  record_request(deterministic ? specs.first(std::min<std::size_t>(specs.size(), 1)) : specs);
  std::optional<ChosenKernel> best;
  std::optional<Error> miss;
  for (const plan::KernelSpec& spec : specs) {
    try {
      ChosenKernel chosen{spec, get_kernel(spec, store, supply)};
      const int spilled = chosen.lookup.entry->local_bytes;
      if (!best || spilled < best->lookup.entry->local_bytes) best = std::move(chosen);
      if (spilled <= harmless_spill(spec) || deterministic) break;
    } catch (const Error& error) {
      const bool missing = error.code() == ErrorCode::cache_miss;
      if (best && !missing) break;  // a spilling kernel is slower, and right
      if (!missing || deterministic) throw;
      if (!miss) miss = error;
    }
  }
  if (!best) throw *miss;
  return *best;
}

ChosenKernel contestant(const plan::KernelSpec& spec, cache::Store& store, const Supply& supply) {
  ChosenKernel chosen{spec, get_kernel(spec, store, supply)};
  if (const int spilled = chosen.lookup.entry->local_bytes; spilled > harmless_spill(spec)) {
    throw Error(ErrorCode::unsupported, fmt::format("it spills {} bytes a thread", spilled));
  }
  return chosen;
}

Prefetch::Prefetch(std::vector<plan::KernelSpec> specs, cache::Store& store, const Supply& supply, unsigned threads,
                   double seconds) {
  struct Work {
    Work(std::vector<plan::KernelSpec> all, const Supply& from) : specs(std::move(all)), supply(from) {}
    std::vector<plan::KernelSpec> specs;
    Supply supply;
    std::atomic<std::size_t> next{0};
  };
  const std::size_t count = specs.size();
  const auto work = std::make_shared<Work>(std::move(specs), supply);
  const auto run = [work, &store, start = Clock::now(), seconds] {
    for (std::size_t i = work->next++; i < work->specs.size(); i = work->next++) {
      if (milliseconds_since(start) > 1000 * seconds) return;
      try {
        get_kernel(work->specs[i], store, work->supply);
      } catch (...) {  // NOLINT(bugprone-empty-catch): met again by who needs the kernel
      }
    }
  };
  for (std::size_t i = 0; i < std::min<std::size_t>(threads, count); ++i) threads_.emplace_back(run);
}

KernelInfo kernel_info(const ChosenKernel& chosen) {
  const cache::Entry& entry = *chosen.lookup.entry;
  KernelInfo info;
  info.name = entry.kernel_name;
  info.spec = entry.key.spec;
  info.origin = origin_name(chosen.lookup.origin);
  info.compile_ms = chosen.lookup.origin == cache::Origin::built ? entry.compile_ms : 0;
  info.registers = entry.registers;
  info.local_bytes = entry.local_bytes;
  info.shared_bytes = plan::shared_bytes(chosen.spec);
  info.threads = chosen.spec.threads();
  return info;
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
      slot = std::make_shared<const driver::LoadedKernel>(entry.cubin, entry.kernel_name, plan::most_shared_bytes(spec),
                                                          device.context(), is_debug(entry));
    }
    kernel = slot;
  }
  if (info != nullptr) {
    *info = kernel_info(chosen);
    info->load_ms = milliseconds_since(start);
    info->registers = kernel->registers();
    info->local_bytes = kernel->local_bytes();
  }
  return kernel;
}

}  // namespace fa::api
