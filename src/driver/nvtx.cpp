#include "driver/nvtx.hpp"

#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define FA_HAS_NVTX 1
#else
#define FA_HAS_NVTX 0
#endif

namespace fa::driver {

#if FA_HAS_NVTX

namespace {

nvtxDomainHandle_t domain() noexcept {
  static const nvtxDomainHandle_t made = nvtxDomainCreateA("fa");
  return made;
}

}  // namespace

NvtxRange::NvtxRange(const char* name) noexcept {
  nvtxEventAttributes_t event{};
  event.version = NVTX_VERSION;
  event.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  event.messageType = NVTX_MESSAGE_TYPE_ASCII;
  event.message.ascii = name;
  nvtxDomainRangePushEx(domain(), &event);
}

NvtxRange::~NvtxRange() {
  nvtxDomainRangePop(domain());
}

#else  // a toolkit without its headers

NvtxRange::NvtxRange(const char*) noexcept {}
NvtxRange::~NvtxRange() = default;

#endif

}  // namespace fa::driver
