#include "fake_nccl/fake_nccl.hpp"

#include <cstdint>

namespace {

using fake_nccl::Communicator;

fake_nccl::Library& library() {
  static fake_nccl::Library one;
  return one;
}

Communicator& of(void* comm) {
  return *static_cast<Communicator*>(comm);
}

void remember(Communicator& comm, fake_nccl::Call call) {
  const std::scoped_lock lock(comm.mutex);
  comm.calls.push_back(std::move(call));
}

/// ncclCommProperties of 2.30.7.
struct Properties {
  std::size_t size;
  unsigned magic, version;
  int numbers[4];
  bool device_api, multimem;
  int gin_type, lsa_teams;
  bool host_rma;
  int railed_gin_type;
};

}  // namespace

#define FAKE extern "C" __attribute__((visibility("default")))

FAKE fake_nccl::Library& fa_fake_nccl_library() {
  return library();
}
FAKE int ncclGetVersion(int* version) {
  *version = library().version;
  return 0;
}
FAKE const char* ncclGetErrorString(int result) {
  return result == 6 ? "remote process exited" : "internal error";
}
FAKE const char* ncclGetLastError(void*) {
  return "";
}
FAKE int ncclCommCount(void* comm, int* count) {
  *count = of(comm).size;
  return of(comm).count_result;
}
FAKE int ncclCommUserRank(void* comm, int* rank) {
  *rank = of(comm).rank;
  return 0;
}
FAKE int ncclCommCuDevice(void* comm, int* device) {
  *device = 0;
  return of(comm).device_result;
}
FAKE int ncclCommGetAsyncError(void* comm, int* error) {
  Communicator& c = of(comm);
  if (c.aborts > 0) ++c.after_abort;
  if (c.polls_in_progress > 0) {
    --c.polls_in_progress;
    *error = 7;
    return 0;
  }
  *error = c.async_error;
  return 0;
}
FAKE int ncclCommQueryProperties(void* comm, Properties* properties) {
  if (properties->magic != 0xcafebeef) return 5;
  properties->host_rma = of(comm).host_rma;
  properties->lsa_teams = of(comm).lsa_teams;
  return 0;
}
FAKE int ncclMemAlloc(void** memory, std::size_t) {
  static std::atomic<std::uintptr_t> next{std::uintptr_t{1} << 52};
  *memory = reinterpret_cast<void*>(next.fetch_add(std::uintptr_t{1} << 32));
  ++library().current->allocations;
  return 0;
}
FAKE int ncclMemFree(void*) {
  --library().current->allocations;
  return 0;
}
FAKE int ncclCommWindowRegister(void* comm, void* memory, std::size_t bytes, void** window, int flags) {
  remember(of(comm), {"register", memory, bytes, flags});
  *window = memory;
  return of(comm).register_result;
}
FAKE int ncclCommWindowDeregister(void* comm, void* window) {
  if (of(comm).aborts > 0) ++of(comm).after_abort;
  remember(of(comm), {"deregister", window});
  return 0;
}
FAKE int ncclPutSignal(const void* data, std::size_t count, int type, int peer, void* window, std::size_t offset, int,
                       int, unsigned, void* comm, void* stream) {
  if (of(comm).aborts > 0) ++of(comm).after_abort;
  remember(of(comm), {"put", data, count, type, peer, stream, window, offset});
  return of(comm).put_result;
}
FAKE int ncclCommAbort(void* comm) {
  ++of(comm).aborts;
  remember(of(comm), {"abort"});
  return 0;
}
FAKE int ncclGroupStart() {
  remember(*library().current, {"start"});
  return library().current->start_result;
}
FAKE int ncclGroupEnd() {
  remember(*library().current, {"end"});
  return library().current->end_result;
}
FAKE int ncclSend(const void* data, std::size_t count, int type, int peer, void* comm, void* stream) {
  if (of(comm).aborts > 0) ++of(comm).after_abort;
  remember(of(comm), {"send", data, count, type, peer, stream});
  return of(comm).send_result;
}
FAKE int ncclRecv(void* data, std::size_t count, int type, int peer, void* comm, void* stream) {
  if (of(comm).aborts > 0) ++of(comm).after_abort;
  remember(of(comm), {"receive", data, count, type, peer, stream});
  return 0;
}
