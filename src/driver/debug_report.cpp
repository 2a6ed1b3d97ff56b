#include "driver/debug_report.hpp"

#include <fmt/format.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include <common/debug_report.cuh>

#include "driver/driver.hpp"
#include "support/log.hpp"

namespace fa::driver {
namespace {

constexpr std::size_t kPage = 4096;
constexpr const char* kPlace = "fa_debug_report";

/// Of all kernels of the process: the first that stops is the one to hear of. Its memory outlives the driver.
struct alignas(kPage) Page {
  kernel::DebugReport report;
};
Page g_page;

void write_last_words() {
  const std::string words = take_debug_report();
  if (!words.empty()) std::fprintf(stderr, "fa: a debug kernel has stopped: %s\n", words.c_str());
}

/// The address of the report on devices, 0 without one.
CUdeviceptr registered_report() {
  constexpr unsigned kFlags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
  if (api().cuMemHostRegister(&g_page, sizeof g_page, kFlags) != CUDA_SUCCESS) return 0;
  CUdeviceptr address = 0;
  if (api().cuMemHostGetDevicePointer(&address, &g_page.report, 0) != CUDA_SUCCESS) return 0;
  std::atexit(write_last_words);
  return address;
}

}  // namespace

void listen_to(CUlibrary library) {
  static const CUdeviceptr report = registered_report();
  CUdeviceptr place = 0;
  std::size_t bytes = 0;
  if (report == 0 || api().cuLibraryGetGlobal(&place, &bytes, library, kPlace) != CUDA_SUCCESS ||
      bytes != sizeof report || api().cuMemcpyHtoD(place, &report, sizeof report) != CUDA_SUCCESS) {
    support::logf(LogLevel::debug, "a debug kernel will stop without words");
  }
}

std::string take_debug_report() {
  kernel::DebugReport& report = g_page.report;
  if (std::atomic_ref(report.written).exchange(0, std::memory_order_acquire) == 0) return {};
  const std::string_view text(report.text, sizeof report.text);
  return fmt::format("{}, block {}, thread {}", text.substr(0, text.find('\0')), report.block, report.thread);
}

}  // namespace fa::driver
