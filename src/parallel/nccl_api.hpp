#ifndef FA_SRC_PARALLEL_NCCL_API_HPP_
#define FA_SRC_PARALLEL_NCCL_API_HPP_

#include <cstddef>
#include <string>

#include <fa/device.hpp>

struct ncclComm;
struct ncclWindow_vidmem;

namespace fa::parallel {

/// What this library calls of NCCL, declared as nccl.h has it since 2.18: the header is not needed. A test holds the
/// numbers against the header where there is one.
struct Nccl {
  using Comm = ncclComm*;
  enum Result : int { kSuccess = 0, kSystemError = 2, kInvalidArgument = 4, kRemoteError = 6, kInProgress = 7 };
  enum Type : int { kInt8 = 0, kInt32 = 2, kHalf = 6, kFloat = 7, kDouble = 8, kBfloat16 = 9 };

  int version = 0;  ///< 21803 for 2.18.3
  std::string path;
  int (*get_version)(int* version) = nullptr;
  const char* (*error_string)(int result) = nullptr;
  const char* (*last_error)(Comm comm) = nullptr;
  int (*comm_count)(Comm comm, int* count) = nullptr;
  int (*comm_rank)(Comm comm, int* rank) = nullptr;
  int (*comm_device)(Comm comm, int* device) = nullptr;
  int (*comm_async_error)(Comm comm, int* error) = nullptr;
  int (*comm_abort)(Comm comm) = nullptr;
  int (*group_start)() = nullptr;
  int (*group_end)() = nullptr;
  int (*send)(const void* data, std::size_t count, int type, int peer, Comm comm, Stream stream) = nullptr;
  int (*receive)(void* data, std::size_t count, int type, int peer, Comm comm, Stream stream) = nullptr;

  /// Windows and puts into them, of 2.30.7 and later: before, a signal could come in front of its data.
  static constexpr int kHasPuts = 23007;
  static constexpr int kSymmetric = 1;  ///< NCCL_WIN_COLL_SYMMETRIC
  using Window = ncclWindow_vidmem*;
  /// ncclCommProperties of nccl_device/core.h, of version kHasPuts.
  struct Properties {
    std::size_t size = sizeof(Properties);
    unsigned magic = 0xcafebeef, version = kHasPuts;
    int rank = 0, ranks = 0, cuda_device = 0, nvml_device = 0;
    bool device_api = false, multimem = false;
    int gin_type = 0, lsa_teams = 0;
    bool host_rma = false;
    int railed_gin_type = 0;
  };
  bool has_puts = false;  ///< the functions that follow are there
  int (*query_properties)(Comm comm, Properties* properties) = nullptr;
  int (*allocate)(void** memory, std::size_t bytes) = nullptr;
  int (*free)(void* memory) = nullptr;
  int (*register_window)(Comm comm, void* memory, std::size_t bytes, Window* window, int flags) = nullptr;
  int (*deregister_window)(Comm comm, Window window) = nullptr;
  int (*put)(const void* data, std::size_t count, int type, int peer, Window window, std::size_t offset, int signal,
             int context, unsigned flags, Comm comm, Stream stream) = nullptr;
};

/// Opens NCCL once: FA_NCCL_PATH, else the libnccl.so.2 that the process has loaded, else the loader's. A failed
/// attempt is not remembered. Throws fa::Error(unsupported) with what was tried.
const Nccl& nccl();

/// What NCCL says of a result, and of the communicator's last error unless that is null.
std::string nccl_text(int result, Nccl::Comm comm);
/// Throws fa::Error(cuda) naming the call and what NCCL says.
void nccl_check(int result, const char* call, Nccl::Comm comm);

}  // namespace fa::parallel

#endif  // FA_SRC_PARALLEL_NCCL_API_HPP_
