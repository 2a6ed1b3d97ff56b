#ifndef FA_LOG_HPP_
#define FA_LOG_HPP_

#include <functional>
#include <string_view>

#include <fa/export.hpp>

namespace fa {

enum class LogLevel : int { debug = 0, info = 1, warning = 2, error = 3, off = 4 };

/// Called with one message, without a line end, from any thread, one call at a time. The text is valid during the call
/// only. It must not call `set_log_callback` itself. Calls that would wait for a kernel that another thread compiles
/// are refused from inside of it.
///
/// A child of fork may log, whatever the threads of its parent did meanwhile.
using LogCallback = std::function<void(LogLevel, std::string_view message)>;

/// Messages below `level` are dropped. The default is warning, or FA_LOG (debug, info, warning, error, off).
FA_API void set_log_level(LogLevel level) noexcept;

/// Where messages go; an empty function restores the default, standard error. The library never writes to standard
/// output.
FA_API void set_log_callback(LogCallback callback);

}  // namespace fa

#endif  // FA_LOG_HPP_
