#ifndef FA_SRC_PARALLEL_ERRORS_HPP_
#define FA_SRC_PARALLEL_ERRORS_HPP_

#include <cstdint>
#include <string>

#include <fa/error.hpp>

/// Failures in the words of the rest of the library (support/text.hpp), by the public API alone.
namespace fa::parallel {

[[noreturn]] inline void throw_refused(ErrorCode code, const std::string& argument, const std::string& value,
                                       const std::string& accepted) {
  throw Error(code, argument + " = " + value + ": accepted is " + accepted,
              {{"argument", argument}, {"value", value}, {"accepted", accepted}});
}

[[noreturn]] inline void throw_invalid(const std::string& argument, const std::string& value,
                                       const std::string& accepted) {
  throw_refused(ErrorCode::invalid_argument, argument, value, accepted);
}

[[noreturn]] inline void throw_invalid(const std::string& argument, std::int64_t value, const std::string& accepted) {
  throw_invalid(argument, std::to_string(value), accepted);
}

[[noreturn]] inline void throw_unsupported(const std::string& argument, const std::string& value,
                                           const std::string& accepted) {
  throw_refused(ErrorCode::unsupported, argument, value, accepted);
}

[[noreturn]] inline void throw_internal(const std::string& what) {
  throw Error(ErrorCode::internal, what + ": please report this");
}

}  // namespace fa::parallel

#endif  // FA_SRC_PARALLEL_ERRORS_HPP_
