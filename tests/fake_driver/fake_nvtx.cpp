#include <nvtx3/nvToolsExt.h>

#include <string>
#include <vector>

#include "fake_driver/fake_nvtx.hpp"

// A profiler that NVTX loads (NVTX_INJECTION64_PATH): it writes down which ranges begin and end.
namespace {

std::vector<std::string>& ranges() {
  static auto* const instance = new std::vector<std::string>;
  return *instance;
}

int push(nvtxDomainHandle_t, const nvtxEventAttributes_t* event) {
  ranges().emplace_back(event->message.ascii);
  return 0;
}

int pop(nvtxDomainHandle_t) {
  ranges().emplace_back("end");
  return 0;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) std::vector<std::string>& fa_fake_nvtx_ranges() {
  return ranges();
}

extern "C" __attribute__((visibility("default"))) int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t tables) {
  const auto* const callbacks = static_cast<const NvtxExportTableCallbacks*>(tables(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable functions = nullptr;
  unsigned size = 0;
  if (callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &functions, &size) == 0) return 0;
  *functions[NVTX_CBID_CORE2_DomainRangePushEx] = reinterpret_cast<NvtxFunctionPointer>(push);
  *functions[NVTX_CBID_CORE2_DomainRangePop] = reinterpret_cast<NvtxFunctionPointer>(pop);
  return 1;
}
