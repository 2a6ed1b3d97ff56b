#ifndef FA_EXAMPLES_CONTEXT_PARALLEL_RANKS_HPP_
#define FA_EXAMPLES_CONTEXT_PARALLEL_RANKS_HPP_

#include <dlfcn.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <thread>

struct ncclComm;

/// Processes that a launcher has started, one a GPU, and a communicator of NCCL over them.
namespace ranks {

/// The first of these variables that is set.
inline int environment(std::initializer_list<const char*> names, int otherwise) {
  for (const char* const name : names) {
    if (const char* const text = std::getenv(name)) return std::atoi(text);
  }
  return otherwise;
}

/// Who this process is, by the variables of launch.py, torchrun, Open MPI or Slurm.
struct Rank {
  int rank = environment({"RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"}, 0);
  int size = environment({"WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS"}, 1);
  int local = environment({"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"}, 0);
};

/// NCCL, opened at run time, so that this program builds without it. A program that has nccl.h calls it directly.
class NcclGroup {
 public:
  explicit NcclGroup(const Rank& rank) {
    const char* const path = std::getenv("FA_NCCL_PATH");
    library_ = dlopen(path != nullptr ? path : "libnccl.so.2", RTLD_NOW);
    if (library_ == nullptr) throw std::runtime_error(std::string("NCCL: ") + dlerror());
    Id id{};
    if (rank.rank == 0) check(function<int (*)(Id*)>("ncclGetUniqueId")(&id), "ncclGetUniqueId");
    share(rank, id);
    check(function<int (*)(ncclComm**, int, Id, int)>("ncclCommInitRank")(&comm_, rank.size, id, rank.rank),
          "ncclCommInitRank");
  }
  ~NcclGroup() {
    if (std::uncaught_exceptions() > 0) return;  // a failure may have aborted it: it is gone then
    if (comm_ != nullptr) function<int (*)(ncclComm*)>("ncclCommDestroy")(comm_);
  }
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;

  ncclComm* comm() const { return comm_; }
  /// "2.27.5"
  std::string version() const {
    int number = 0;
    check(function<int (*)(int*)>("ncclGetVersion")(&number), "ncclGetVersion");
    return std::to_string(number / 10000) + "." + std::to_string(number / 100 % 100) + "." +
           std::to_string(number % 100);
  }

 private:
  struct Id {
    std::array<char, 128> bytes;
  };

  template <class Function>
  Function function(const char* name) const {
    void* const found = dlsym(library_, name);
    if (found == nullptr) throw std::runtime_error(std::string("NCCL has no ") + name);
    return reinterpret_cast<Function>(found);
  }

  static void check(int result, const char* call) {
    if (result != 0) throw std::runtime_error(std::string(call) + " failed with " + std::to_string(result));
  }

  /// Rank 0 leaves the id in a file, which appears whole; the others wait for it.
  static void share(const Rank& rank, Id& id) {
    const char* const path = std::getenv("FA_RENDEZVOUS");
    if (rank.size > 1 && path == nullptr) throw std::runtime_error("FA_RENDEZVOUS names no file that ranks share");
    if (rank.size == 1) return;
    const std::string file = path;
    if (rank.rank == 0) {
      std::ofstream(file + ".part", std::ios::binary).write(id.bytes.data(), id.bytes.size());
      if (std::rename((file + ".part").c_str(), file.c_str()) != 0) throw std::runtime_error(file + ": not written");
      return;
    }
    for (int tries = 0; tries < 600; ++tries) {
      std::ifstream in(file, std::ios::binary);
      if (in.read(id.bytes.data(), id.bytes.size())) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    throw std::runtime_error(file + ": rank 0 has not written it within a minute");
  }

  void* library_ = nullptr;
  ncclComm* comm_ = nullptr;
};

}  // namespace ranks

#endif  // FA_EXAMPLES_CONTEXT_PARALLEL_RANKS_HPP_
