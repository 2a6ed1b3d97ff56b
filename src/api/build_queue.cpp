#include "api/build_queue.hpp"

#include <system_error>
#include <utility>

namespace fa::api {

std::shared_future<void> BuildQueue::start(std::function<void()> work) {
  std::packaged_task<void()> task(std::move(work));
  std::shared_future<void> done = task.get_future().share();
  if (!has_thread()) {
    task();
    return done;
  }
  {
    const std::scoped_lock lock(mutex_);
    waiting_.push_back(std::move(task));
  }
  changed_.notify_one();
  return done;
}

bool BuildQueue::has_thread() {
  const std::scoped_lock lock(mutex_);
  try {
    if (!thread_.joinable()) thread_ = std::jthread([this](const std::stop_token& stop) { run(stop); });
    return true;
  } catch (const std::system_error&) {
    return false;
  }
}

void BuildQueue::run(const std::stop_token& stop) {
  while (true) {
    std::packaged_task<void()> task;
    {
      std::unique_lock lock(mutex_);
      if (!changed_.wait(lock, stop, [this] { return !waiting_.empty(); }) || stop.stop_requested()) return;
      task = std::move(waiting_.front());
      waiting_.pop_front();
    }
    task();
  }
}

}  // namespace fa::api
