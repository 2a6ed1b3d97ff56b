#ifndef FA_TEMPLATES_COMMON_DEBUG_REPORT_CUH_
#define FA_TEMPLATES_COMMON_DEBUG_REPORT_CUH_

#include <common/types.cuh>

namespace fa::kernel {

/// What a debug kernel that stops says, in memory of the host, which can be read when the kernel's context cannot.
struct DebugReport {
  uint32_t written;  // 1 behind the rest
  uint32_t block, thread;
  char text[500];  // ends with a 0
};

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_DEBUG_REPORT_CUH_
