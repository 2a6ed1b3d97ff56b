#include "support/dynamic_library.hpp"

#include <filesystem>
#include <system_error>

#include "support/platform.hpp"

namespace fa::support {

DynamicLibrary& DynamicLibrary::operator=(DynamicLibrary&& other) noexcept {
  std::swap(handle_, other.handle_);
  return *this;
}

DynamicLibrary::~DynamicLibrary() {
  if (handle_ != nullptr) platform::close_library(handle_);
}

DynamicLibrary DynamicLibrary::open(const std::string& name, std::string* problem) {
  // The loader would wait for who writes to a FIFO.
  std::error_code error;
  const bool is_path = name.find_first_of("/\\") != std::string::npos;
  if (is_path && std::filesystem::exists(name, error) && !std::filesystem::is_regular_file(name, error)) {
    if (problem != nullptr) *problem = name + ": is not a regular file";
    return {};
  }
  return DynamicLibrary(platform::open_library(name, problem));
}

DynamicLibrary DynamicLibrary::open_loaded(const std::string& name) {
  return DynamicLibrary(platform::open_loaded_library(name));
}

void* DynamicLibrary::symbol(const char* name) const noexcept {
  return handle_ == nullptr ? nullptr : platform::find_symbol(handle_, name);
}

std::string DynamicLibrary::path() const {
  return handle_ == nullptr ? std::string() : platform::library_path(handle_);
}

}  // namespace fa::support
