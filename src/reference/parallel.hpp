#ifndef FA_SRC_REFERENCE_PARALLEL_HPP_
#define FA_SRC_REFERENCE_PARALLEL_HPP_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <system_error>
#include <thread>
#include <vector>

namespace fa::reference {

/// How many threads this machine runs at once; asked of the system once.
int hardware_threads();

/// How many threads `items` work items of `cost` arithmetic operations each deserve; at least 1.
inline int thread_count(std::int64_t items, double cost) {
  constexpr double kWorthAThread = 1e6;
  const double by_cost = static_cast<double>(items) * cost / kWorthAThread;
  const double hardware = hardware_threads();
  return static_cast<int>(std::clamp(std::min(by_cost, static_cast<double>(items)), 1.0, hardware));
}

/// Calls work(worker, item) once for each item in [0, items), on up to scratch.size() threads, each with a scratch of
/// its own. `work` must not throw. A thread that cannot be started is done without.
template <class Scratch, class Work>
void parallel_for(std::int64_t items, std::vector<Scratch>& scratch, const Work& work) {
  std::atomic<std::int64_t> next{0};
  const auto run = [&](Scratch& own) noexcept {
    for (std::int64_t item = next++; item < items; item = next++) work(own, item);
  };
  std::vector<std::thread> threads;
  threads.reserve(scratch.size());
  try {
    for (std::size_t n = 1; n < scratch.size(); ++n) threads.emplace_back(run, std::ref(scratch[n]));
  } catch (const std::system_error&) {
  }
  run(scratch.front());
  for (std::thread& thread : threads) thread.join();
}

}  // namespace fa::reference

#endif  // FA_SRC_REFERENCE_PARALLEL_HPP_
