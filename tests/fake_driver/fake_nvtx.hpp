#ifndef FA_TESTS_FAKE_DRIVER_FAKE_NVTX_HPP_
#define FA_TESTS_FAKE_DRIVER_FAKE_NVTX_HPP_

#include <string>
#include <vector>

namespace fake_driver {

/// "fa_fake_nvtx_ranges": the messages of ranges that began, and "end" for each that ended, in order.
using NvtxRanges = std::vector<std::string>& (*)();

}  // namespace fake_driver

#endif  // FA_TESTS_FAKE_DRIVER_FAKE_NVTX_HPP_
