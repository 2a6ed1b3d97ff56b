#include "compile/compiler.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <exception>
#include <fa/error.hpp>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string_view>
#include <utility>

#include "compile/nvrtc.hpp"
#include "support/log.hpp"
#include "support/platform.hpp"
#include "support/text.hpp"

namespace fa::compile {
namespace {

constexpr std::size_t kStackBytes = std::size_t{64} << 20;

// Options that leave the code as it is. Without them, in this order: a file in the working directory may satisfy an
// #include, NVRTC may raise the stack limit of the whole process, and it writes a cache of its own under the home
// directory. An NVRTC that does not know one goes without.
constexpr std::array<const char*, 3> kHousekeeping = {"--no-source-include", "--modify-stack-limit=false",
                                                      "--no-cache"};
std::atomic<unsigned> g_unknown_housekeeping{0};  // a bit for each

/// Runs `work` on a thread with a large stack and waits for it: the front end recurses deeply, and the caller's stack
/// may be small. An exception reaches the caller.
class LargeStackCall {
 public:
  explicit LargeStackCall(std::function<void()> work) : work_(std::move(work)) {}

  void run() {
    const int result = support::platform::run_with_stack(kStackBytes, [this] {
      try {
        work_();
      } catch (...) {
        failure_ = std::current_exception();
      }
    });
    if (result != 0) {
      throw Error(ErrorCode::out_of_memory, std::string("no thread for the compiler: ") + std::strerror(result));
    }
    if (failure_) std::rethrow_exception(failure_);
  }

 private:
  std::function<void()> work_;
  std::exception_ptr failure_;
};

class Program {
 public:
  Program(const Nvrtc& api, const render::Source& source) : api_(api) {
    std::vector<const char*> names;
    std::vector<const char*> texts;
    for (const render::Header& header : source.headers) {
      names.push_back(header.name.c_str());
      texts.push_back(header.text.c_str());
    }
    const std::string file = source.kernel_name + ".cu";
    check(api_.create_program(&program_, source.unit.c_str(), file.c_str(), static_cast<int>(names.size()),
                              texts.data(), names.data()),
          "nvrtcCreateProgram");
  }
  ~Program() { api_.destroy_program(&program_); }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  nvrtcResult compile(const std::vector<std::string>& options) {
    std::vector<const char*> arguments;
    for (const std::string& option : options) arguments.push_back(option.c_str());
    return api_.compile_program(program_, static_cast<int>(arguments.size()), arguments.data());
  }

  std::string log() const {
    std::size_t size = 0;
    if (api_.log_size(program_, &size) != NVRTC_SUCCESS || size == 0) return {};
    std::string text(size, '\0');
    if (api_.log(program_, text.data()) != NVRTC_SUCCESS) return {};
    text.resize(std::strlen(text.c_str()));
    return text;
  }

  std::vector<std::byte> cubin() const {
    std::size_t size = 0;
    check(api_.cubin_size(program_, &size), "nvrtcGetCUBINSize");
    std::vector<std::byte> bytes(size);
    if (size != 0) check(api_.cubin(program_, reinterpret_cast<char*>(bytes.data())), "nvrtcGetCUBIN");
    return bytes;
  }

  std::string ptx() const {
    if (api_.ptx_size == nullptr || api_.ptx == nullptr) {
      throw Error(ErrorCode::no_compiler,
                  fmt::format("NVRTC {} ({}) hands out no PTX", api_.version_text(), api_.path));
    }
    std::size_t size = 0;
    check(api_.ptx_size(program_, &size), "nvrtcGetPTXSize");
    std::string text(size, '\0');
    if (size != 0) check(api_.ptx(program_, text.data()), "nvrtcGetPTX");
    text.resize(std::strlen(text.c_str()));
    return text;
  }

 private:
  void check(nvrtcResult result, const char* call) const {
    if (result == NVRTC_SUCCESS) return;
    const ErrorCode code = result == NVRTC_ERROR_OUT_OF_MEMORY ? ErrorCode::out_of_memory : ErrorCode::internal;
    throw Error(code, fmt::format("{} failed: {}", call, api_.error_string(result)), {{"call", call}});
  }

  const Nvrtc& api_;
  nvrtcProgram program_ = nullptr;
};

std::vector<std::string> all_options(plan::Arch arch, bool fuses, unsigned unknown_housekeeping) {
  std::vector<std::string> options = code_options(arch, fuses);
  for (std::size_t i = 0; i < kHousekeeping.size(); ++i) {
    if ((unknown_housekeeping >> i & 1U) == 0) options.emplace_back(kHousekeeping[i]);
  }
  return options;
}

/// The housekeeping option, not yet left out, that NVRTC's log complains about.
unsigned complained_about(const std::string& log, unsigned unknown_housekeeping) {
  for (std::size_t i = 0; i < kHousekeeping.size(); ++i) {
    const unsigned bit = 1U << i;
    std::string_view name = kHousekeeping[i];
    name = name.substr(0, name.find('='));
    if ((unknown_housekeeping & bit) == 0 && log.find(name) != std::string::npos) return bit;
  }
  return 0;
}

nvrtcResult compile_with_known_options(Program& program, plan::Arch arch, bool fuses) {
  while (true) {
    const unsigned unknown = g_unknown_housekeeping.load(std::memory_order_relaxed);
    const nvrtcResult result = program.compile(all_options(arch, fuses, unknown));
    if (result != NVRTC_ERROR_INVALID_OPTION) return result;
    const unsigned bit = complained_about(program.log(), unknown);
    if (bit == 0) return result;
    g_unknown_housekeeping.fetch_or(bit, std::memory_order_relaxed);
  }
}

std::string_view first_error_line(std::string_view log) {
  const std::size_t error = log.find("error");
  if (error == std::string_view::npos) return log.substr(0, log.find('\n'));
  const std::size_t newline = log.rfind('\n', error);
  const std::size_t begin = newline == std::string_view::npos ? 0 : newline + 1;
  return log.substr(begin, log.find('\n', begin) - begin);
}

/// Writes the unit under FA_KEEP_SOURCE for a look at it; returns its path, or empty.
std::string keep_source(const render::Source& source) {
  const std::string directory = support::environment("FA_KEEP_SOURCE");
  if (directory.empty()) return {};
  const auto digest = std::hash<std::string>{}(source.unit);
  const auto path = std::filesystem::path(directory) / fmt::format("{}_{:016x}.cu", source.kernel_name, digest);
  const std::filesystem::path temporary = path.string() + fmt::format(".{}.tmp", support::platform::process_id());
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  std::ofstream file(temporary, std::ios::binary);
  file << source.unit;
  file.close();
  if (file) std::filesystem::rename(temporary, path, error);
  if (file && !error) return path.string();
  std::filesystem::remove(temporary, error);
  return {};
}

[[noreturn]] void throw_failed(const render::Source& source, plan::Arch arch, std::string message, std::string log) {
  const auto options = all_options(arch, source.fuses, g_unknown_housekeeping.load(std::memory_order_relaxed));
  std::vector<ErrorField> fields = {{"log", std::move(log)},
                                    {"options", fmt::format("{}", fmt::join(options, " "))},
                                    {"source", source.unit},
                                    {"kernel", source.kernel_name},
                                    {"arch", to_string(arch)}};
  if (std::string path = keep_source(source); !path.empty()) {
    message += "; its source is in " + path;
    fields.push_back({"source_path", std::move(path)});
  }
  throw Error(ErrorCode::compile_failed, message, std::move(fields));
}

/// Throws where NVRTC does not know the architecture, or instructions of the kernel.
void check_version(const Nvrtc& api, const render::Source& source, plan::Arch arch) {
  const int first = source.first_nvrtc;
  if (100 * api.major + api.minor < first) {
    throw_failed(
        source, arch,
        fmt::format("NVRTC {} ({}) cannot compile for {} kernel {}, which takes {}.{} or later. Name a newer "
                    "NVRTC in FA_NVRTC_PATH",
                    api.version_text(), api.path, to_string(arch), source.kernel_name, first / 100, first % 100),
        {});
  }
  const auto& known = api.architectures;
  if (known.empty() || std::find(known.begin(), known.end(), arch.sm()) != known.end()) return;
  throw_failed(source, arch,
               fmt::format("NVRTC {} ({}) cannot compile for {}: it knows sm_{}. Name a newer NVRTC in FA_NVRTC_PATH",
                           api.version_text(), api.path, to_string(arch), fmt::join(known, ", sm_")),
               {});
}

bool is_elf(const std::vector<std::byte>& bytes) {
  return bytes.size() > 4 && std::memcmp(bytes.data(),
                                         "\x7f"
                                         "ELF",
                                         4) == 0;
}

/// Throws where NVRTC refuses `program`, which is that of `source`.
void compile_or_throw(const Nvrtc& api, Program& program, const render::Source& source, plan::Arch arch) {
  const nvrtcResult result = compile_with_known_options(program, arch, source.fuses);
  if (result == NVRTC_SUCCESS) return;
  const std::string log = program.log();
  throw_failed(source, arch,
               fmt::format("NVRTC {} refused kernel {} for {} ({}): {}", api.version_text(), source.kernel_name,
                           to_string(arch), api.error_string(result), first_error_line(log)),
               log);
}

Cubin compile_here(const Nvrtc& api, const render::Source& source, plan::Arch arch) {
  const auto begin = std::chrono::steady_clock::now();
  Program program(api, source);
  compile_or_throw(api, program, source, arch);
  Cubin cubin;
  cubin.log = program.log();
  cubin.bytes = program.cubin();
  if (!is_elf(cubin.bytes)) {
    throw_failed(source, arch,
                 fmt::format("NVRTC {} gave no code for kernel {}", api.version_text(), source.kernel_name), cubin.log);
  }
  cubin.facts = read_facts(cubin.bytes, source.kernel_name);
  cubin.compiler = "nvrtc " + api.version_text();
  cubin.min_driver = api.major * 1000;
  cubin.milliseconds = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
  return cubin;
}

}  // namespace

std::vector<std::string> code_options(plan::Arch arch, bool fuses) {
  std::vector<std::string> options{"--gpu-architecture=" + to_string(arch), "--std=c++20"};
  if (!fuses) options.emplace_back("--fmad=false");
  return options;
}

Cubin compile(const render::Source& source, plan::Arch arch) {
  const Nvrtc& api = nvrtc();
  check_version(api, source, arch);
  Cubin cubin;
  LargeStackCall([&] { cubin = compile_here(api, source, arch); }).run();
  support::logf(LogLevel::info, "compiled {} for {} in {:.0f} ms: {} registers, {} bytes of stack", source.kernel_name,
                to_string(arch), cubin.milliseconds, cubin.facts.registers, cubin.facts.local_bytes);
  if (!cubin.log.empty()) support::logf(LogLevel::debug, "{}: {}", source.kernel_name, cubin.log);
  return cubin;
}

std::string compile_to_ptx(const render::Source& source, plan::Arch arch) {
  const Nvrtc& api = nvrtc();
  check_version(api, source, arch);
  std::string ptx;
  LargeStackCall([&] {
    Program program(api, source);
    compile_or_throw(api, program, source, arch);
    ptx = program.ptx();
  }).run();
  return ptx;
}

CompilerInfo compiler_info() {
  CompilerInfo info;
  try {
    const Nvrtc& api = nvrtc();
    info.available = true;
    info.path = api.path;
    info.version = api.version_text();
    info.major = api.major;
    info.minor = api.minor;
    info.architectures = api.architectures;
  } catch (const Error& error) {
    info.problem = error.what();
  }
  return info;
}

}  // namespace fa::compile
