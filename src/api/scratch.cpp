#include "api/scratch.hpp"

#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <utility>

#include <fa/error.hpp>

#include "support/text.hpp"

namespace fa::api {
namespace {

constexpr std::uintptr_t kWorkspaceAlignment = 256;

}  // namespace

Scratch::Scratch(const Workspace& workspace, std::size_t needed, Stream stream) : stream_(stream) {
  if (reinterpret_cast<std::uintptr_t>(workspace.data) % kWorkspaceAlignment != 0) {
    support::throw_invalid("workspace", workspace.data, "a multiple of 256 bytes");
  }
  if (workspace.data != nullptr && workspace.size < needed) {
    throw Error(
        ErrorCode::out_of_memory,
        fmt::format("workspace = {} bytes: accepted are {} or more for this shape", workspace.size, needed),
        {{"argument", "workspace"}, {"value", std::to_string(workspace.size)}, {"accepted", std::to_string(needed)}});
  }
  if (workspace.data == nullptr) owned_ = driver::allocate(needed, stream);
  data_ = workspace.data == nullptr ? reinterpret_cast<void*>(owned_) : workspace.data;
}

Scratch::~Scratch() {
  if (owned_ != 0) driver::api().cuMemFreeAsync(owned_, stream_);  // on the way out with an error, the one to report
}

void Scratch::release() {
  if (owned_ != 0) driver::free(std::exchange(owned_, 0), stream_);
}

}  // namespace fa::api
