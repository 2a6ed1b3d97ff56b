#ifndef FA_TESTS_UNIT_CACHE_LATCH_HPP_
#define FA_TESTS_UNIT_CACHE_LATCH_HPP_

#include <condition_variable>
#include <mutex>

namespace fa::cache::testing {

/// As std::latch, whose waits may miss the last count in libstdc++ 12 for Windows, and then never end.
class Latch {
 public:
  explicit Latch(int count) : count_(count) {}

  void count_down() {
    const std::scoped_lock lock(mutex_);
    if (--count_ == 0) down_.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    down_.wait(lock, [this] { return count_ == 0; });
  }
  void arrive_and_wait() {
    count_down();
    wait();
  }

 private:
  std::mutex mutex_;
  std::condition_variable down_;
  int count_;
};

}  // namespace fa::cache::testing

#endif  // FA_TESTS_UNIT_CACHE_LATCH_HPP_
