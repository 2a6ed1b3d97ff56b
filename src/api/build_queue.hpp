#ifndef FA_SRC_API_BUILD_QUEUE_HPP_
#define FA_SRC_API_BUILD_QUEUE_HPP_

#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <mutex>
#include <stop_token>
#include <thread>

namespace fa::api {

/// A thread that makes kernels ready while calls go on, one after the other. The destructor drops what has not begun
/// and waits for what has.
class BuildQueue {
 public:
  BuildQueue() = default;
  ~BuildQueue() = default;
  BuildQueue(const BuildQueue&) = delete;
  BuildQueue& operator=(const BuildQueue&) = delete;

  /// Has `work` done, in this thread where the system has no other. What it throws, the future has.
  std::shared_future<void> start(std::function<void()> work);

 private:
  /// Whether there is a thread that does what waits; starts it where there is none yet.
  bool has_thread();
  void run(const std::stop_token& stop);

  std::mutex mutex_;  ///< guards waiting_ and the start of thread_
  std::condition_variable_any changed_;
  std::deque<std::packaged_task<void()>> waiting_;
  std::jthread thread_;  ///< last: joined before what it uses is gone
};

}  // namespace fa::api

#endif  // FA_SRC_API_BUILD_QUEUE_HPP_
