#ifndef FA_COMPILER_HPP_
#define FA_COMPILER_HPP_

#include <string>

#include <fa/export.hpp>

namespace fa {

/// Where NVRTC, the run-time compiler of CUDA 12 or 13, is: its file, or the directory that holds it. It is opened when
/// the first kernel has to be compiled; a call after that has no effect. An empty path restores the search:
///
///   FA_NVRTC_PATH (a file or a directory), an NVRTC that the process has loaded already, the dynamic loader, the
///   directories where CUDA toolkits and Python packages install it.
///
/// A path given here or in FA_NVRTC_PATH is an order: when it cannot be used, compiling fails with
/// ErrorCode::no_compiler and no other place is tried.
FA_API void set_nvrtc_path(std::string path);

}  // namespace fa

#endif  // FA_COMPILER_HPP_
