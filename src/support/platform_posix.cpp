#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>

#include "support/platform.hpp"

namespace fa::support::platform {

void* open_library(const std::string& name, std::string* problem) {
  void* const library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr && problem != nullptr) {
    const char* reason = dlerror();
    *problem = reason == nullptr ? name + ": cannot be opened" : reason;
  }
  return library;
}

void* open_loaded_library(const std::string& name) {
  return dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
}

void close_library(void* library) {
  dlclose(library);
}

void* find_symbol(void* library, const char* name) {
  return dlsym(library, name);
}

std::string library_path(void* library) {
  link_map* map = nullptr;
  return dlinfo(library, RTLD_DI_LINKMAP, &map) != 0 || map == nullptr ? "" : map->l_name;
}

std::span<const char* const> driver_libraries() {
  static constexpr std::array kNames = {"libcuda.so.1", "/usr/lib/wsl/lib/libcuda.so.1"};
  return kNames;
}

std::span<const char* const> compiler_libraries() {
  static constexpr std::array kNames = {"libnvrtc.so.13", "libnvrtc.so.12"};
  return kNames;
}

std::string compiler_builtins(int major, int minor) {
  return "libnvrtc-builtins.so." + std::to_string(major) + "." + std::to_string(minor);
}

std::span<const char* const> compiler_directories() {
  static constexpr std::array kDirectories = {
      "$CUDA_HOME/lib64",
      "$CUDA_HOME/lib",
      "$CUDA_PATH/lib64",
      "$CUDA_PATH/lib",
      "$VIRTUAL_ENV/lib/python*/site-packages/nvidia/cu13/lib",
      "$VIRTUAL_ENV/lib/python*/site-packages/nvidia/cuda_nvrtc/lib",
      "$VIRTUAL_ENV/lib",
      "$CONDA_PREFIX/lib/python*/site-packages/nvidia/cu13/lib",
      "$CONDA_PREFIX/lib/python*/site-packages/nvidia/cuda_nvrtc/lib",
      "$CONDA_PREFIX/lib",
      "/usr/local/cuda/lib64",
      "/usr/local/cuda/lib",
      "/usr/local/cuda-*/lib64",
      "/usr/local/cuda-*/lib",
      "/usr/lib/x86_64-linux-gnu",
      "/usr/lib/aarch64-linux-gnu",
      "/usr/lib64",
  };
  return kDirectories;
}

bool around_fork(void (*before)(), void (*after)()) {
  return pthread_atfork(before, after, after) == 0;
}

int run_with_stack(std::size_t bytes, const std::function<void()>& work) {
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, bytes);
  const auto entry = [](void* function) -> void* {
    (*static_cast<const std::function<void()>*>(function))();
    return nullptr;
  };
  pthread_t thread;
  const int result = pthread_create(&thread, &attributes, entry, const_cast<void*>(static_cast<const void*>(&work)));
  pthread_attr_destroy(&attributes);
  if (result == 0) pthread_join(thread, nullptr);
  return result;
}

bool append_line(const std::string& file, std::string_view line) {
  const int descriptor = ::open(file.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (descriptor < 0) return false;
  ssize_t written = 0;
  do {
    written = ::write(descriptor, line.data(), line.size());
  } while (written < 0 && errno == EINTR);
  const int problem = written < 0 ? errno : ENOSPC;
  ::close(descriptor);
  if (written == static_cast<ssize_t>(line.size())) return true;
  errno = problem;
  return false;
}

char list_separator() {
  return ':';
}

unsigned long process_id() {
  return static_cast<unsigned long>(getpid());
}

std::string environment(const char* name) {
  const char* value = std::getenv(name);  // NOLINT(concurrency-mt-unsafe): read only, as every program does
  return value == nullptr ? "" : value;
}

}  // namespace fa::support::platform
