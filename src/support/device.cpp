#include <fa/device.hpp>

namespace fa {

std::string to_string(Device device) {
  switch (device.kind()) {
    case Device::Kind::host:
      return "host";
    case Device::Kind::cuda:
      return "cuda:" + std::to_string(device.ordinal());
    case Device::Kind::current:
      break;
  }
  return "current";
}

}  // namespace fa
