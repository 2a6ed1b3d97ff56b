#ifndef FA_TESTS_FAKE_DRIVER_FAKE_DRIVER_HPP_
#define FA_TESTS_FAKE_DRIVER_FAKE_DRIVER_HPP_

#include <string>
#include <vector>

namespace fake_driver {

/// A launch that was asked for.
struct Launch {
  std::string kernel;
  bool early = false;  ///< with the attribute for it
};

/// What the library exports under kLaunches: all launches so far, which the caller may clear.
using Launches = std::vector<Launch>& (*)();
inline constexpr const char* kLaunches = "fa_fake_driver_launches";

}  // namespace fake_driver

#endif  // FA_TESTS_FAKE_DRIVER_FAKE_DRIVER_HPP_
