#ifndef FA_ERROR_HPP_
#define FA_ERROR_HPP_

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <fa/export.hpp>

namespace fa {

/// What went wrong, in the coarsest terms a program would branch on. The C ABI returns the same numbers.
enum class ErrorCode : int {
  invalid_argument = 1,  ///< an argument breaks its contract; nothing was launched
  unsupported = 2,       ///< valid, but no kernel family of this library or GPU can do it
  no_driver = 3,         ///< the CUDA driver library is missing, too old, or sees no GPU
  no_compiler = 4,       ///< a kernel had to be compiled and NVRTC could not be opened
  compile_failed = 5,    ///< NVRTC refused a kernel; fields: log, options, source
  cuda = 6,              ///< a CUDA driver call failed; fields: call, result
  out_of_memory = 7,     ///< host or device memory ran out, or the given workspace is too small
  io = 8,                ///< a file could not be read or written
  cache_miss = 9,        ///< CompilePolicy::never, and no stored kernel serves the problem
  internal = 10,         ///< a broken invariant of the library: please report it
  not_finite = 11,       ///< a debug call met a NaN or an infinity: Error::location() says where
};

/// The name of `code` as it is spelled in the enumeration ("invalid_argument").
FA_API const char* to_string(ErrorCode code) noexcept;

/// One named fact about a failure, for programs: {"argument", "head_dim"}, {"value", "20"},
/// {"accepted", "a multiple of 8 from 8 to 256"}, {"log", ...}.
struct ErrorField {
  std::string name;
  std::string value;
};

/// Where a debug call met its first NaN or infinity (docs/kernels/debugging.md). Axes that the tensor does not have are
/// -1. Of packed batches b is the sequence, and rows and keys count from its first.
struct ErrorLocation {
  /// An input ("q", "k", the name of a capture), something on the way ("score", "p", "dp", "ds"), or a result.
  std::string tensor;
  double value = 0;
  std::int64_t b = -1;
  std::int64_t h = -1;  ///< a KV head of k, v, their scales, dk, dv and sums of KV heads
  std::int64_t q = -1;
  std::int64_t kv = -1;
  std::int64_t d = -1;
  /// Of a captured tensor, and of its gradient: the element's index. The axes above say for which score it was read.
  std::vector<std::int64_t> index = {};
  std::string result = {};  ///< the first result that it reached
};

/// Every failure of the library. `what()` names the argument, its value and what is accepted; `fields()` holds the
/// same facts separately. Copying never throws.
class FA_API Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message, std::vector<ErrorField> fields = {});
  /// Of not_finite. Its fields have the same facts: tensor, value, result, and the axes that there are.
  explicit Error(const ErrorLocation& location);

  ErrorCode code() const noexcept { return code_; }
  const std::vector<ErrorField>& fields() const noexcept { return *fields_; }

  /// The value of the field called `name`; empty when there is none.
  std::string_view field(std::string_view name) const noexcept;

  /// Of not_finite; else nullptr.
  const ErrorLocation* location() const noexcept { return location_.get(); }

 private:
  ErrorCode code_;
  std::shared_ptr<const std::vector<ErrorField>> fields_;
  std::shared_ptr<const ErrorLocation> location_;
};

}  // namespace fa

#endif  // FA_ERROR_HPP_
