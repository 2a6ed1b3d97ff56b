#ifndef FA_SRC_SUPPORT_LOG_HPP_
#define FA_SRC_SUPPORT_LOG_HPP_

#include <fmt/format.h>

#include <fa/log.hpp>
#include <string_view>
#include <utility>

namespace fa::support {

/// Whether a message of `level` would be heard: one relaxed load.
bool log_enabled(LogLevel level) noexcept;

/// Hands `message` to the callback or standard error. Never throws; messages logged from inside the callback are
/// dropped.
void log(LogLevel level, std::string_view message) noexcept;

/// Whether this thread is inside of the callback, for which others may be waiting.
bool inside_log_callback() noexcept;

/// Formats only when somebody listens: logf(LogLevel::info, "compiled {} in {:.0f} ms", name, ms).
template <class... Args>
void logf(LogLevel level, fmt::format_string<Args...> format, Args&&... args) noexcept {
  if (!log_enabled(level)) return;
  try {
    log(level, fmt::format(format, std::forward<Args>(args)...));
  } catch (...) {  // out of memory: a lost message must not fail the call that wrote it
  }
}

}  // namespace fa::support

#endif  // FA_SRC_SUPPORT_LOG_HPP_
