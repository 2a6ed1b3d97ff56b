#ifndef FA_TOOLS_FA_PARALLEL_HPP_
#define FA_TOOLS_FA_PARALLEL_HPP_

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <thread>
#include <vector>

namespace fa::cli {

/// Calls `body(i)` for every i below `count` on up to `jobs` threads (0: one a CPU). `body` must not throw.
template <typename Body>
void parallel_for(std::size_t count, int jobs, const Body& body) {
  const std::size_t wanted = jobs > 0 ? static_cast<std::size_t>(jobs) : std::thread::hardware_concurrency();
  const std::size_t threads = std::clamp<std::size_t>(wanted, 1, std::max<std::size_t>(count, 1));
  std::atomic<std::size_t> next{0};
  const auto work = [&] {
    for (std::size_t i = next++; i < count; i = next++) {
      body(i);
    }
  };
  std::vector<std::jthread> helpers;
  for (std::size_t i = 1; i < threads; ++i) {
    helpers.emplace_back(work);
  }
  work();
}

}  // namespace fa::cli

#endif  // FA_TOOLS_FA_PARALLEL_HPP_
