#ifndef FA_SRC_DRIVER_DEBUG_REPORT_HPP_
#define FA_SRC_DRIVER_DEBUG_REPORT_HPP_

#include <cuda.h>

#include <string>

namespace fa::driver {

/// Gives a debug kernel of the current context a place in the host's memory to say in why it stops
/// (templates/ptx/debug.cuh): the context and its memory are lost then. Without one it stops without words.
void listen_to(CUlibrary library);

/// What a debug kernel has said since the last call, with its block and thread; mostly nothing. What nobody takes is
/// written to stderr when the process ends.
std::string take_debug_report();

}  // namespace fa::driver

#endif  // FA_SRC_DRIVER_DEBUG_REPORT_HPP_
