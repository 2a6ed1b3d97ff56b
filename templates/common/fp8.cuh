#ifndef FA_TEMPLATES_COMMON_FP8_CUH_
#define FA_TEMPLATES_COMMON_FP8_CUH_

#include <common/stored.cuh>

namespace fa::kernel {

/// OCP E5M2: the upper byte of an f16.
struct e5m2 {
  uint8_t bits;
};

// What a Config of 8-bit floats asks for: O in e4m3, and scales of keys for rows of K, or of V.
template <class Config>
FA_DEVICE constexpr bool writes_bytes() {
  if constexpr (requires { Config::kByteOutput; }) return Config::kByteOutput;
  return false;
}

template <class Config>
FA_DEVICE constexpr bool scales_keys() {
  if constexpr (requires { Config::kKeyScales; }) return Config::kKeyScales;
  return false;
}

template <class Config>
FA_DEVICE constexpr bool scales_values() {
  if constexpr (requires { Config::kValueScales; }) return Config::kValueScales;
  return false;
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_FP8_CUH_
