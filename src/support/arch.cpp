#include "support/arch.hpp"

namespace fa::support {

std::string to_string(Arch arch) {
  std::string text = "sm_" + std::to_string(arch.sm());
  if (arch.suffix != '\0') text += arch.suffix;
  return text;
}

Arch device_target(int major, int minor) noexcept {
  return {major, minor, major >= 9 ? 'a' : '\0'};
}

}  // namespace fa::support
