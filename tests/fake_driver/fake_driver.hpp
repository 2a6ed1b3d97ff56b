#ifndef FA_TESTS_FAKE_DRIVER_FAKE_DRIVER_HPP_
#define FA_TESTS_FAKE_DRIVER_FAKE_DRIVER_HPP_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace fake_driver {

/// A launch that was asked for, or memory that was to be set.
struct Launch {
  std::string kernel;  ///< or kMemset
  bool early = false;  ///< with the attribute for it
  std::uintptr_t address = 0;
  std::size_t bytes = 0;
};
inline constexpr const char* kMemset = "memset";

/// What the library exports under kLaunches: all launches so far, which the caller may clear.
using Launches = std::vector<Launch>& (*)();
inline constexpr const char* kLaunches = "fa_fake_driver_launches";

}  // namespace fake_driver

#endif  // FA_TESTS_FAKE_DRIVER_FAKE_DRIVER_HPP_
