#include "emulator/registry.hpp"

#include <map>
#include <stdexcept>

namespace emulator {
namespace {

std::map<std::string, RegisteredKernel>& kernels() {
  static std::map<std::string, RegisteredKernel> instance;
  return instance;
}

}  // namespace

Registration::Registration(const std::string& name, ErasedKernel entry, int threads, int min_blocks) {
  kernels()[name] = {entry, threads, min_blocks};
}

const RegisteredKernel& registered_kernel(const std::string& name) {
  const auto found = kernels().find(name);
  if (found == kernels().end()) throw std::out_of_range("no such kernel was generated: " + name);
  return found->second;
}

}  // namespace emulator
