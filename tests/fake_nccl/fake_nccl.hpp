#ifndef FA_TESTS_FAKE_NCCL_FAKE_NCCL_HPP_
#define FA_TESTS_FAKE_NCCL_FAKE_NCCL_HPP_

#include <atomic>
#include <cstddef>
#include <mutex>
#include <string>
#include <vector>

/// A stand-in of NCCL that moves nothing and remembers what was asked of it.
namespace fake_nccl {

struct Call {
  std::string what;  ///< "start", "send", "receive", "end", "abort", "register", "deregister", "put"
  const void* data = nullptr;
  std::size_t count = 0;
  int type = 0;
  int peer = 0;
  const void* stream = nullptr;
  const void* window = nullptr;
  std::size_t offset = 0;
};

/// A communicator, and how it behaves.
struct Communicator {
  int rank = 0;
  int size = 2;
  std::atomic<int> async_error{0};  ///< an ncclResult_t
  std::atomic<int> end_result{0};   ///< of ncclGroupEnd
  std::atomic<int> start_result{0}, send_result{0}, count_result{0}, device_result{0};
  std::atomic<int> register_result{0}, put_result{0};
  bool host_rma = true;             ///< of its properties
  int lsa_teams = 1;                ///< likewise
  std::atomic<int> allocations{0};  ///< of ncclMemAlloc that there are, in all
  std::atomic<int> polls_in_progress{0};
  std::atomic<int> aborts{0};
  std::atomic<int> after_abort{0};  ///< calls of a communicator that was aborted, which NCCL has freed
  std::mutex mutex;
  std::vector<Call> calls;  ///< guarded by mutex
};

/// The version that the library says it is; ncclGroupEnd has no communicator of its own and ends for this one.
struct Library {
  int version = 22800;
  Communicator* current = nullptr;
};
using GetLibrary = Library& (*)();
inline constexpr const char* kLibrary = "fa_fake_nccl_library";

}  // namespace fake_nccl

#endif  // FA_TESTS_FAKE_NCCL_FAKE_NCCL_HPP_
