#include "fake_nccl/fake_nccl.hpp"

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
