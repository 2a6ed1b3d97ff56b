#include "support/dynamic_library.hpp"

#include <dlfcn.h>
#include <link.h>
#include <sys/stat.h>

namespace fa::support {

DynamicLibrary& DynamicLibrary::operator=(DynamicLibrary&& other) noexcept {
  std::swap(handle_, other.handle_);
  return *this;
}

DynamicLibrary::~DynamicLibrary() {
  if (handle_ != nullptr) dlclose(handle_);
}

DynamicLibrary DynamicLibrary::open(const std::string& name, std::string* problem) {
  // The loader would wait for who writes to a FIFO.
  struct stat status {};
  if (name.find('/') != std::string::npos && stat(name.c_str(), &status) == 0 && !S_ISREG(status.st_mode)) {
    if (problem != nullptr) *problem = name + ": is not a regular file";
    return {};
  }
  void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr && problem != nullptr) {
    const char* reason = dlerror();
    *problem = reason == nullptr ? name + ": cannot be opened" : reason;
  }
  return DynamicLibrary(handle);
}

DynamicLibrary DynamicLibrary::open_loaded(const std::string& name) {
  return DynamicLibrary(dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD));
}

void* DynamicLibrary::symbol(const char* name) const noexcept {
  return handle_ == nullptr ? nullptr : dlsym(handle_, name);
}

std::string DynamicLibrary::path() const {
  link_map* map = nullptr;
  if (handle_ == nullptr || dlinfo(handle_, RTLD_DI_LINKMAP, &map) != 0 || map == nullptr) return {};
  return map->l_name;
}

}  // namespace fa::support
