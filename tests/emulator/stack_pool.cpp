#include "emulator/stack_pool.hpp"

#include <sys/mman.h>

#include <cstddef>
#include <mutex>
#include <new>
#include <vector>

namespace emulator {
namespace {

constexpr std::size_t kPageBytes = 4096;
constexpr std::size_t kStackBytes = std::size_t{128} << 10;
constexpr std::size_t kColourBytes = 5 * 64;

struct Pool {
  std::mutex mutex;
  std::vector<void*> free;
};

Pool& pool() {
  static Pool instance;
  return instance;
}

void* map_stack() {
  void* base = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED || mprotect(base, kPageBytes, PROT_NONE) != 0) throw std::bad_alloc();
  return base;
}

}  // namespace

boost::context::stack_context StackPool::allocate() {
  boost::context::stack_context stack;
  stack.size = kStackBytes;
  const std::lock_guard lock(pool().mutex);
  std::vector<void*>& free = pool().free;
  void* base = free.empty() ? map_stack() : free.back();
  if (!free.empty()) free.pop_back();
  stack.sp = static_cast<std::byte*>(base) + kStackBytes;
  return stack;
}

void StackPool::deallocate(boost::context::stack_context& stack) noexcept {
  const std::lock_guard lock(pool().mutex);
  pool().free.push_back(static_cast<std::byte*>(stack.sp) - kStackBytes);
}

boost::context::preallocated StackPool::place(const boost::context::stack_context& stack, int lane) {
  const std::size_t offset = static_cast<std::size_t>(lane) * kColourBytes;
  return {static_cast<std::byte*>(stack.sp) - offset, stack.size - offset, stack};
}

}  // namespace emulator
