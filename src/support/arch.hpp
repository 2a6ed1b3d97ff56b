#ifndef FA_SRC_SUPPORT_ARCH_HPP_
#define FA_SRC_SUPPORT_ARCH_HPP_

#include <string>

namespace fa::support {

/// A compilation target: compute capability and, for code that runs on exactly that capability, the suffix 'a'.
struct Arch {
  int major = 0;
  int minor = 0;
  char suffix = '\0';

  constexpr int sm() const noexcept { return major * 10 + minor; }
  friend bool operator==(const Arch&, const Arch&) = default;
};

/// "sm_90a".
std::string to_string(Arch arch);

/// What kernels for a GPU of that compute capability are compiled for and looked up by.
Arch device_target(int major, int minor) noexcept;

}  // namespace fa::support

#endif  // FA_SRC_SUPPORT_ARCH_HPP_
