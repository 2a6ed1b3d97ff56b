#include "compile/nvrtc.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <fa/compiler.hpp>
#include <fa/error.hpp>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <sstream>
#include <utility>

#include "support/dynamic_library.hpp"
#include "support/log.hpp"
#include "support/platform.hpp"
#include "support/text.hpp"

namespace fa::compile {
namespace {

namespace fs = std::filesystem;
using support::DynamicLibrary;

std::mutex g_mutex;  // guards g_host_path and the opening
std::string g_host_path;
std::atomic<const Nvrtc*> g_nvrtc{nullptr};

/// What was tried and why it was refused, one line each.
using Attempts = std::vector<std::string>;

bool has_entry(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

bool has_directory(const fs::path& path) {
  std::error_code ignored;
  return fs::is_directory(path, ignored);
}

/// Subdirectories of `parent` whose names start with `prefix`, newest version first.
std::vector<fs::path> children(const fs::path& parent, const std::string& prefix) {
  std::vector<fs::path> found;
  std::error_code error;
  for (fs::directory_iterator it(parent, error), end; !error && it != end; it.increment(error)) {
    if (it->path().filename().string().starts_with(prefix)) found.push_back(it->path());
  }
  const auto newer = [](const fs::path& a, const fs::path& b) {
    const auto length = [](const fs::path& path) { return path.native().size(); };
    return length(a) != length(b) ? length(a) > length(b) : a.native() > b.native();
  };
  std::sort(found.begin(), found.end(), newer);
  return found;
}

/// What "$NAME" of a pattern stands for.
std::vector<fs::path> values_of(const std::string& variable) {
  const std::string value = support::environment(variable.c_str());
  if (variable != "PATH") return value.empty() ? std::vector<fs::path>() : std::vector<fs::path>{value};
  std::vector<fs::path> directories;
  std::istringstream list(value);
  for (std::string directory; std::getline(list, directory, support::platform::list_separator());) {
    if (fs::path(directory).is_absolute()) directories.emplace_back(directory);
  }
  return directories;
}

/// The directories that a pattern of support::platform stands for.
std::vector<fs::path> expand(std::string_view pattern) {
  std::vector<fs::path> roots{fs::path()};
  if (pattern.starts_with('$')) {
    const std::size_t end = std::min(pattern.find('/'), pattern.size());
    roots = values_of(std::string(pattern.substr(1, end - 1)));
    pattern.remove_prefix(std::min(end + 1, pattern.size()));
  }
  for (const fs::path& part : fs::path(pattern)) {
    const std::string name = part.string();
    std::vector<fs::path> next;
    for (const fs::path& root : roots) {
      if (!name.ends_with('*')) {
        next.push_back(root / part);
        continue;
      }
      for (fs::path& child : children(root, name.substr(0, name.size() - 1))) next.push_back(std::move(child));
    }
    roots = std::move(next);
  }
  return roots;
}

std::vector<fs::path> known_directories() {
  std::vector<fs::path> directories;
  for (const char* pattern : support::platform::compiler_directories()) {
    for (fs::path& directory : expand(pattern)) directories.push_back(std::move(directory));
  }
  return directories;
}

template <class Function>
bool resolve(const DynamicLibrary& library, const char* name, Function& function) {
  function = library.function<Function>(name);
  return function != nullptr;
}

bool resolve_all(const DynamicLibrary& library, Nvrtc& api) {
  return resolve(library, "nvrtcVersion", api.version) && resolve(library, "nvrtcGetErrorString", api.error_string) &&
         resolve(library, "nvrtcGetNumSupportedArchs", api.num_supported_archs) &&
         resolve(library, "nvrtcGetSupportedArchs", api.supported_archs) &&
         resolve(library, "nvrtcCreateProgram", api.create_program) &&
         resolve(library, "nvrtcDestroyProgram", api.destroy_program) &&
         resolve(library, "nvrtcCompileProgram", api.compile_program) &&
         resolve(library, "nvrtcGetProgramLogSize", api.log_size) && resolve(library, "nvrtcGetProgramLog", api.log) &&
         resolve(library, "nvrtcGetCUBINSize", api.cubin_size) && resolve(library, "nvrtcGetCUBIN", api.cubin);
}

/// NVRTC opens its builtins by bare name, which the loader does not find beside an NVRTC that was opened by path.
void open_builtins(const Nvrtc& api) {
  const std::string name = support::platform::compiler_builtins(api.major, api.minor);
  std::error_code error;
  const fs::path resolved = fs::canonical(api.path, error);
  for (const fs::path& directory : {fs::path(api.path).parent_path(), resolved.parent_path()}) {
    const fs::path file = directory / name;
    if (directory.empty() || !has_entry(file)) continue;
    if (DynamicLibrary builtins = DynamicLibrary::open(file.string())) {
      builtins.keep_loaded();
      return;
    }
  }
}

void query_architectures(Nvrtc& api) {
  int count = 0;
  if (api.num_supported_archs(&count) != NVRTC_SUCCESS || count <= 0) return;
  api.architectures.resize(static_cast<std::size_t>(count));
  if (api.supported_archs(api.architectures.data()) != NVRTC_SUCCESS) api.architectures.clear();
}

/// Turns an opened library into a usable NVRTC, or says in `attempts` why it is none.
std::unique_ptr<Nvrtc> adopt(DynamicLibrary library, const std::string& name, Attempts& attempts) {
  auto api = std::make_unique<Nvrtc>();
  api->path = library.path().empty() ? name : library.path();
  if (!resolve_all(library, *api) || api->version(&api->major, &api->minor) != NVRTC_SUCCESS) {
    attempts.push_back(api->path + ": is not an NVRTC that can be used");
    return nullptr;
  }
  if (api->major < 12) {
    attempts.push_back(api->path + ": is NVRTC " + api->version_text() + ", at least 12.0 is needed");
    return nullptr;
  }
  resolve(library, "nvrtcGetPTXSize", api->ptx_size);
  resolve(library, "nvrtcGetPTX", api->ptx);
  library.keep_loaded();
  open_builtins(*api);
  query_architectures(*api);
  return api;
}

std::unique_ptr<Nvrtc> open(const std::string& name, Attempts& attempts) {
  std::string problem;
  DynamicLibrary library = DynamicLibrary::open(name, &problem);
  if (library) return adopt(std::move(library), name, attempts);
  attempts.push_back(problem.find(name) == std::string::npos ? name + ": " + problem : problem);
  return nullptr;
}

std::unique_ptr<Nvrtc> open_in(const fs::path& directory, Attempts& attempts) {
  for (const char* soname : support::platform::compiler_libraries()) {
    const fs::path file = directory / soname;
    if (!has_entry(file)) continue;
    if (auto api = open(file.string(), attempts)) return api;
  }
  return nullptr;
}

/// A file or directory that the user named.
std::unique_ptr<Nvrtc> open_ordered(const std::string& path, Attempts& attempts) {
  if (!has_directory(path)) return open(path, attempts);
  auto api = open_in(path, attempts);
  if (!api && attempts.empty())
    attempts.push_back(
        fmt::format("{}: holds neither {}", path, fmt::join(support::platform::compiler_libraries(), " nor ")));
  return api;
}

std::unique_ptr<Nvrtc> search(Attempts& attempts) {
  for (const char* soname : support::platform::compiler_libraries()) {
    DynamicLibrary loaded = DynamicLibrary::open_loaded(soname);
    if (!loaded) continue;
    if (auto api = adopt(std::move(loaded), soname, attempts)) return api;
  }
  for (const char* soname : support::platform::compiler_libraries()) {
    if (auto api = open(soname, attempts)) return api;
  }
  for (const fs::path& directory : known_directories()) {
    if (auto api = open_in(directory, attempts)) return api;
  }
  return nullptr;
}

[[noreturn]] void throw_unavailable(const std::string& orderer, const Attempts& attempts) {
  std::string tried;
  for (const std::string& attempt : attempts) tried += "\n  " + attempt;
  const std::string remedy =
      orderer.empty() ? "install NVRTC of CUDA 12 or 13 (its library and that of its builtins), or name its file in "
                        "FA_NVRTC_PATH"
                      : "correct or clear " + orderer;
  throw Error(ErrorCode::no_compiler,
              "a kernel has to be compiled and NVRTC cannot be opened; " + remedy + ". Tried:" + tried,
              {{"tried", tried}, {"remedy", remedy}});
}

std::unique_ptr<Nvrtc> find(const std::string& host_path) {
  Attempts attempts;
  std::string orderer;
  std::unique_ptr<Nvrtc> api;
  if (const std::string variable = support::environment("FA_NVRTC_PATH"); !host_path.empty()) {
    orderer = "the path given to fa::set_nvrtc_path";
    api = open_ordered(host_path, attempts);
  } else if (!variable.empty()) {
    orderer = "FA_NVRTC_PATH";
    api = open_ordered(variable, attempts);
  } else {
    api = search(attempts);
  }
  if (!api) throw_unavailable(orderer, attempts);
  return api;
}

}  // namespace

const Nvrtc& nvrtc() {
  if (const Nvrtc* opened = g_nvrtc.load(std::memory_order_acquire)) return *opened;
  const std::lock_guard<std::mutex> lock(g_mutex);
  if (const Nvrtc* opened = g_nvrtc.load(std::memory_order_acquire)) return *opened;
  const Nvrtc* opened = find(g_host_path).release();  // for the life of the process, like the library itself
  g_nvrtc.store(opened, std::memory_order_release);
  support::logf(LogLevel::info, "opened NVRTC {} from {}", opened->version_text(), opened->path);
  return *opened;
}

}  // namespace fa::compile

namespace fa {

void set_nvrtc_path(std::string path) {
  const std::lock_guard<std::mutex> lock(compile::g_mutex);
  compile::g_host_path = std::move(path);
}

}  // namespace fa
