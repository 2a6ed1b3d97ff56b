#include "emulator/emulator.hpp"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "emulator/machine.hpp"

namespace emulator {
namespace {

constexpr int kMaxThreads = 1024;
constexpr int kMaxClusterThreads = 2048;
constexpr int kMaxSharedBytes = 227 << 10;
constexpr int kMaxCluster = 8;
constexpr int kWarpgroup = 128;

void validate(const LaunchOptions& options) {
  if (options.grid < 1) throw std::invalid_argument(fmt::format("launch: a grid of {} blocks", options.grid));
  if (options.threads < kWarpSize || options.threads > kMaxThreads || options.threads % kWarpSize != 0) {
    throw std::invalid_argument(fmt::format("launch: {} threads a block", options.threads));
  }
  if (options.shared_bytes < 0 || options.shared_bytes > kMaxSharedBytes) {
    throw std::invalid_argument(fmt::format("launch: {} bytes of shared memory", options.shared_bytes));
  }
  if (options.cluster < 1 || options.cluster > kMaxCluster || options.grid % options.cluster != 0) {
    throw std::invalid_argument(fmt::format("launch: {} blocks in clusters of {}", options.grid, options.cluster));
  }
  // More than this the emulator cannot tell apart.
  if (options.cluster > 1 &&
      (options.cluster * options.threads > kMaxClusterThreads || options.threads % kWarpgroup != 0)) {
    throw std::invalid_argument(
        fmt::format("launch: clusters of {} blocks of {} threads; up to {} threads in whole "
                    "warpgroups are modelled",
                    options.cluster, options.threads, kMaxClusterThreads));
  }
}

/// What the OS threads of a launch share.
struct Progress {
  std::atomic<int> next_block{0};
  std::atomic<std::uint64_t> instructions{0};
  std::atomic<bool> failed{false};
  std::atomic<int> at_rest{0};  ///< with last_first: clusters that have waited for another one, or have left
  std::mutex mutex;
  int faulty_block = 0;
  std::exception_ptr fault;  // of the lowest cluster, so that it does not depend on the OS
};

/// The clusters before this one, in the order of their starts, have come as far as they can without it.
void await_lower_blocks(Machine& machine, Progress& progress, int place) {
  while (progress.at_rest < place) {
    machine.check_others();
    std::this_thread::yield();
  }
  machine.on_wait([&progress, told = false]() mutable {
    if (!std::exchange(told, true)) ++progress.at_rest;
  });
}

void run_blocks(ErasedKernel kernel, const void* params, Memory& memory, const LaunchOptions& options,
                Progress& progress) noexcept {
  int block = 0;
  try {
    Machine machine(options.threads, options.shared_bytes, options.grid, options.cluster, memory, options.resident);
    machine.start_early(options.early, options.early_inputs);
    machine.watch(&progress.failed);
    int taken = 0;
    while ((taken = progress.next_block.fetch_add(options.cluster)) < options.grid) {
      block = options.last_first ? options.grid - options.cluster - taken : taken;
      if (options.last_first) await_lower_blocks(machine, progress, taken / options.cluster);
      machine.run_cluster(kernel, params, block, options.seed);
      machine.tell_wait();
    }
    progress.instructions += machine.instructions();
  } catch (const OtherBlockFailed&) {
    return;  // that one tells
  } catch (...) {
    const std::lock_guard lock(progress.mutex);
    progress.failed = true;
    if (!progress.fault || block < progress.faulty_block) {
      progress.fault = std::current_exception();
      progress.faulty_block = block;
    }
    progress.next_block = options.grid;
  }
}

}  // namespace

LaunchStatistics launch(ErasedKernel kernel, const void* params, Memory& memory, const LaunchOptions& options) {
  validate(options);
  Progress progress;
  std::vector<std::thread> threads;
  const int clusters = options.grid / options.cluster;
  const int workers = options.last_first ? clusters : std::min(options.workers, clusters);
  for (int i = 1; i < workers; ++i) {
    threads.emplace_back([&] { run_blocks(kernel, params, memory, options, progress); });
  }
  run_blocks(kernel, params, memory, options, progress);
  for (std::thread& thread : threads) thread.join();
  if (progress.fault) std::rethrow_exception(progress.fault);
  return {progress.instructions};
}

}  // namespace emulator
