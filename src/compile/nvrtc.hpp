#ifndef FA_SRC_COMPILE_NVRTC_HPP_
#define FA_SRC_COMPILE_NVRTC_HPP_

#include <nvrtc.h>

#include <string>
#include <vector>

namespace fa::compile {

/// The NVRTC that this process opened. It stays loaded.
struct Nvrtc {
  int major = 0;
  int minor = 0;
  std::string path;
  std::vector<int> architectures;  ///< 80, 86, ...

  decltype(&::nvrtcVersion) version = nullptr;
  decltype(&::nvrtcGetErrorString) error_string = nullptr;
  decltype(&::nvrtcGetNumSupportedArchs) num_supported_archs = nullptr;
  decltype(&::nvrtcGetSupportedArchs) supported_archs = nullptr;
  decltype(&::nvrtcCreateProgram) create_program = nullptr;
  decltype(&::nvrtcDestroyProgram) destroy_program = nullptr;
  decltype(&::nvrtcCompileProgram) compile_program = nullptr;
  decltype(&::nvrtcGetProgramLogSize) log_size = nullptr;
  decltype(&::nvrtcGetProgramLog) log = nullptr;
  decltype(&::nvrtcGetCUBINSize) cubin_size = nullptr;
  decltype(&::nvrtcGetCUBIN) cubin = nullptr;
  decltype(&::nvrtcGetPTXSize) ptx_size = nullptr;  ///< these two may be absent: no call of attention needs them
  decltype(&::nvrtcGetPTX) ptx = nullptr;

  /// "13.0".
  std::string version_text() const { return std::to_string(major) + "." + std::to_string(minor); }
};

/// Finds and opens NVRTC at first use (fa/compiler.hpp says where it looks). A failed attempt is not remembered.
/// Throws fa::Error(no_compiler) with every place that was tried, and what to do.
const Nvrtc& nvrtc();

}  // namespace fa::compile

#endif  // FA_SRC_COMPILE_NVRTC_HPP_
