#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <fa/attention.hpp>

#include "api/build.hpp"
#include "cache/pack.hpp"
#include "cache/store.hpp"
#include "commands.hpp"
#include "compile/compiler.hpp"
#include "driver/driver.hpp"
#include "plan/arch.hpp"
#include "render/source.hpp"
#include "terminal.hpp"

namespace fa::cli {
namespace {

struct CacheState {
  std::string directory;  ///< empty: memory only
  std::size_t entries = 0;
  std::size_t bytes = 0;
  int damaged = 0;
  std::vector<std::string> packs;  ///< "PATH: 170 kernels" for each of FA_CACHE_PACKS
};

/// What this machine offers, and in `advice` what it lacks and what to do about it.
struct Report {
  std::string templates;
  int driver_version = 0;
  std::vector<driver::DeviceInfo> devices;
  compile::CompilerInfo compiler;
  CacheState cache;
  std::vector<std::string> advice;
};

void look_for_gpus(Report* report) {
  try {
    report->driver_version = driver::api().version;
    report->devices = driver::list_devices();
    if (report->devices.empty()) {
      report->advice.emplace_back("No GPU is visible (is CUDA_VISIBLE_DEVICES set?). `fa run --device host` works.");
    }
  } catch (const Error& error) {
    report->advice.push_back(std::string(error.what()) + ". Until then `fa run --device host` and `fa compile` work.");
  }
}

void look_for_compiler(Report* report) {
  report->compiler = compile::compiler_info();
  if (!report->compiler.available) {
    report->advice.push_back(report->compiler.problem + ". Kernels that are in the cache run without it.");
  }
}

void look_at_packs(Report* report) {
  for (const std::filesystem::path& file : api::cache_packs({})) {
    std::string problem;
    if (const std::optional<cache::Pack> pack = cache::Pack::open(file, &problem)) {
      report->cache.packs.push_back(fmt::format("{}: {} kernels", file.string(), pack->size()));
    } else {
      report->advice.push_back(fmt::format("A pack that FA_CACHE_PACKS names is not used: {}.", problem));
    }
  }
}

void look_at_cache(Report* report) {
  look_at_packs(report);
  CacheState& cache = report->cache;
  const std::filesystem::path directory = cache::default_directory();
  cache.directory = directory.string();
  if (directory.empty()) {
    report->advice.emplace_back(
        "No cache directory: set FA_CACHE_DIR to an absolute path, or kernels are compiled anew "
        "by every process.");
    return;
  }
  for (const cache::Entry& entry : cache::list_entries(directory, &cache.damaged)) {
    ++cache.entries;
    cache.bytes += entry.cubin.size();
  }
  if (cache.damaged != 0) {
    report->advice.push_back(
        fmt::format("{} damaged cache entries will be recompiled when they are needed.", cache.damaged));
  }
}

Report make_report() {
  Report report;
  report.templates = render::templates_digest();
  look_for_gpus(&report);
  look_for_compiler(&report);
  look_at_cache(&report);
  return report;
}

std::string cuda_version(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

nlohmann::json to_json(const Report& report) {
  nlohmann::json devices = nlohmann::json::array();
  for (const driver::DeviceInfo& device : report.devices) {
    devices.push_back({{"ordinal", device.ordinal},
                       {"name", device.name},
                       {"arch", plan::to_string(device.arch)},
                       {"multiprocessors", device.multiprocessors},
                       {"memory", device.memory}});
  }
  const nlohmann::json driver =
      report.driver_version == 0 ? nlohmann::json() : nlohmann::json(cuda_version(report.driver_version));
  return {{"version", version()},
          {"templates", report.templates},
          {"driver", driver},
          {"devices", devices},
          {"nvrtc",
           {{"available", report.compiler.available},
            {"version", report.compiler.version},
            {"path", report.compiler.path},
            {"architectures", report.compiler.architectures}}},
          {"cache",
           {{"directory", report.cache.directory},
            {"entries", report.cache.entries},
            {"bytes", report.cache.bytes},
            {"damaged", report.cache.damaged},
            {"packs", report.cache.packs}}},
          {"advice", report.advice}};
}

std::string describe_compiler(const compile::CompilerInfo& compiler) {
  return compiler.available ? fmt::format("{} ({})", compiler.version, compiler.path) : "not found";
}

std::string describe_cache(const CacheState& cache) {
  return cache.directory.empty() ? "memory only"
                                 : fmt::format("{}: {} kernels, {}", cache.directory, cache.entries,
                                               format_bytes(static_cast<double>(cache.bytes)));
}

void print(const Report& report) {
  fmt::print("fa         {}\n", version());
  fmt::print("templates  {}\n", report.templates);
  fmt::print("driver     {}\n",
             report.driver_version == 0 ? "not found" : "CUDA " + cuda_version(report.driver_version));
  for (const driver::DeviceInfo& device : report.devices) {
    fmt::print("cuda:{}     {}, {}, {} multiprocessors, {}\n", device.ordinal, device.name,
               plan::to_string(device.arch), device.multiprocessors, format_bytes(static_cast<double>(device.memory)));
  }
  fmt::print("nvrtc      {}\n", describe_compiler(report.compiler));
  fmt::print("cache      {}\n", describe_cache(report.cache));
  for (const std::string& pack : report.cache.packs) {
    fmt::print("pack       {}\n", printable(pack));
  }
  for (const std::string& advice : report.advice) {
    fmt::print("\n! {}\n", printable(advice));
  }
}

}  // namespace

void add_info(CLI::App& app, int* exit_code) {
  CLI::App* command = app.add_subcommand("info", "What this machine offers: GPUs, driver, NVRTC, cache");
  const auto json = std::make_shared<bool>(false);
  command->add_flag("--json", *json, "Print JSON");
  command->callback([json, exit_code] {
    const Report report = make_report();
    if (*json) {
      print_json(to_json(report));
    } else {
      print(report);
    }
    *exit_code = kSuccess;
  });
}

}  // namespace fa::cli
