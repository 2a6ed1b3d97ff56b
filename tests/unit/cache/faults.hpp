#ifndef FA_TESTS_UNIT_CACHE_FAULTS_HPP_
#define FA_TESTS_UNIT_CACHE_FAULTS_HPP_

#include <functional>
#include <string>

/// What the wrapped system calls do instead of succeeding; all zero: nothing.
namespace fa::cache::testing {

struct Faults {
  int kill_at = 0;            ///< SIGKILL in place of that call, counted from 1
  bool short_writes = false;  ///< a write takes at most half of what it is given
  int write_error = 0;        ///< errno of the call
  int fsync_error = 0;
  int renameat_error = 0;
  int flock_error = 0;
  int calls = 0;               ///< how many there were
  std::function<void()> once;  ///< run before the next call named `at`, and forgotten
  std::string at;
};

Faults& faults();

/// Back to no faults at the end of a scope.
class FaultScope {
 public:
  FaultScope() { faults() = {}; }
  ~FaultScope() { faults() = {}; }
  FaultScope(const FaultScope&) = delete;
  FaultScope& operator=(const FaultScope&) = delete;
};

}  // namespace fa::cache::testing

#endif  // FA_TESTS_UNIT_CACHE_FAULTS_HPP_
