#include "support/log.hpp"

#include <spdlog/details/null_mutex.h>
#include <spdlog/logger.h>
#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/base_sink.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <iterator>
#include <memory>
#include <mutex>
#include <string>

#include "support/platform.hpp"
#include "support/text.hpp"

namespace fa {
namespace {

constexpr int kUnset = -1;
std::atomic<int> g_level{kUnset};
thread_local bool t_inside_callback = false;

int level_from_environment() {
  const std::string text = support::environment("FA_LOG");
  if (text == "debug") return static_cast<int>(LogLevel::debug);
  if (text == "info") return static_cast<int>(LogLevel::info);
  if (text == "error") return static_cast<int>(LogLevel::error);
  if (text == "off") return static_cast<int>(LogLevel::off);
  return static_cast<int>(LogLevel::warning);
}

/// Said by who reads the environment first: logging is no place to fail.
void tell_unknown_level() noexcept {
  constexpr std::string_view kAccepted[] = {"", "debug", "info", "warning", "error", "off"};
  try {
    const std::string text = support::environment("FA_LOG");
    if (std::ranges::find(kAccepted, text) != std::end(kAccepted)) return;
    support::logf(LogLevel::warning, "FA_LOG = {}: accepted is debug, info, warning, error or off", text);
  } catch (...) {  // out of memory
  }
}

int current_level() noexcept {
  int level = g_level.load(std::memory_order_relaxed);
  if (level != kUnset) return level;
  const int initial = level_from_environment();
  if (!g_level.compare_exchange_strong(level, initial, std::memory_order_relaxed)) return level;
  tell_unknown_level();
  return initial;
}

spdlog::level::level_enum to_spdlog(LogLevel level) noexcept {
  switch (level) {
    case LogLevel::debug:
      return spdlog::level::debug;
    case LogLevel::info:
      return spdlog::level::info;
    case LogLevel::warning:
      return spdlog::level::warn;
    case LogLevel::error:
      return spdlog::level::err;
    case LogLevel::off:
      break;
  }
  return spdlog::level::off;
}

LogLevel from_spdlog(spdlog::level::level_enum level) noexcept {
  if (level <= spdlog::level::debug) return LogLevel::debug;
  if (level == spdlog::level::info) return LogLevel::info;
  return level == spdlog::level::warn ? LogLevel::warning : LogLevel::error;
}

/// Makes calls of the callback one at a time. There from the start to the end of the process, so that fork finds it.
std::mutex& log_mutex() {
#if defined(_WIN32)
  static auto* const mutex = new std::mutex;  // which no constant initialises there, and no process forks
  return *mutex;
#else
  constinit static std::mutex mutex;
  return mutex;
#endif
}

/// A child of fork has the locks of its parent as they were, and of its threads only the one that forked: so that one
/// takes the lock before. Inside of the callback it has it.
void lock_for_fork() {
  if (!t_inside_callback) log_mutex().lock();
}
void unlock_after_fork() {
  if (!t_inside_callback) log_mutex().unlock();
}
[[maybe_unused]] const bool kAtFork = support::platform::around_fork(lock_for_fork, unlock_after_fork);

/// Standard error until a callback is set. Not spdlog's own: on Windows that keeps the file which standard error was at
/// the start, and fails when it is replaced.
class Sink final : public spdlog::sinks::base_sink<spdlog::details::null_mutex> {
 public:
  void set_callback(LogCallback& callback) { callback_.swap(callback); }

 protected:
  void sink_it_(const spdlog::details::log_msg& message) override {
    if (!callback_) {
      spdlog::memory_buf_t line;
      formatter_->format(message, line);
      std::fwrite(line.data(), 1, line.size(), stderr);
      std::fflush(stderr);
      return;
    }
    t_inside_callback = true;
    try {
      callback_(from_spdlog(message.level), std::string_view(message.payload.data(), message.payload.size()));
    } catch (...) {  // the callback's failure is not the library's
    }
    t_inside_callback = false;
  }

  void flush_() override { std::fflush(stderr); }

 private:
  LogCallback callback_;
};

struct Logger {
  std::shared_ptr<Sink> sink = std::make_shared<Sink>();
  spdlog::logger logger{"fa", sink};

  Logger() {
    logger.set_level(spdlog::level::trace);  // g_level decides
    logger.set_formatter(std::make_unique<spdlog::pattern_formatter>("%Y-%m-%d %H:%M:%S.%e %n %l: %v",
                                                                     spdlog::pattern_time_type::local, "\n"));
  }
};

/// Ours alone: never registered, so that a host application's own spdlog neither sees nor changes it. Never destroyed,
/// so that static destructors may still log. Under log_mutex, which a fork waits for; the guard of a static it would
/// not.
Logger& logger() {
  constinit static Logger* instance = nullptr;
  if (instance == nullptr) instance = new Logger;
  return *instance;
}

}  // namespace

void set_log_level(LogLevel level) noexcept {
  g_level.store(static_cast<int>(level), std::memory_order_relaxed);
}

void set_log_callback(LogCallback callback) {
  const std::lock_guard lock(log_mutex());
  logger().sink->set_callback(callback);
}

namespace support {

bool log_enabled(LogLevel level) noexcept {
  return level != LogLevel::off && static_cast<int>(level) >= current_level();
}

bool inside_log_callback() noexcept {
  return t_inside_callback;
}

void log(LogLevel level, std::string_view message) noexcept {
  if (t_inside_callback || !log_enabled(level)) return;
  try {
    const std::lock_guard lock(log_mutex());
    logger().logger.log(to_spdlog(level), spdlog::string_view_t(message.data(), message.size()));
  } catch (...) {  // logging never fails a call
  }
}

}  // namespace support
}  // namespace fa
