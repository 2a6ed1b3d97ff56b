#ifndef FA_TOOLS_PARALLEL_GPU_HPP_
#define FA_TOOLS_PARALLEL_GPU_HPP_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <fa/parallel.hpp>

namespace bench {

constexpr std::int64_t kColumns = 128;

/// Throws std::runtime_error.
void check(cudaError_t status, const char* call);

struct FreeMemory {
  fa::Communicator* sharing = nullptr;
  void operator()(void* memory) const {
    if (sharing != nullptr) return sharing->unshare(memory);
    cudaFree(memory);
  }
};

/// Memory of the current GPU, or this rank's part of memory that ranks share.
class Memory {
 public:
  explicit Memory(std::size_t bytes, fa::Communicator* sharing = nullptr);
  /// Normal numbers, bf16: some are drawn on the host, the rest repeats them.
  void fill(std::size_t elements, int which);
  void* get() const { return memory_.get(); }

 private:
  std::unique_ptr<void, FreeMemory> memory_;
};

/// q, k, v, o, lse, dout, dq, dk, dv of a call, [1, h, rows, 128] or packed. K and V lie in memory that ranks share,
/// where `sharing` is given.
class Tensors {
 public:
  Tensors(std::int64_t h_q, std::int64_t h_kv, std::int64_t rows, bool packed, fa::Communicator* sharing = nullptr);
  static std::size_t bytes(std::int64_t h_q, std::int64_t h_kv, std::int64_t rows);

  fa::ForwardInputs forward_inputs() const { return {views_[0], views_[1], views_[2]}; }
  fa::ForwardOutputs forward_outputs() const { return {views_[3], lse_}; }
  fa::BackwardInputs backward_inputs() const { return {views_[0], views_[1], views_[2], views_[3], lse_, views_[4]}; }
  fa::BackwardOutputs backward_outputs() const { return {views_[5], views_[6], views_[7]}; }

 private:
  std::vector<std::unique_ptr<Memory>> memory_;
  std::vector<fa::TensorView> views_;
  fa::TensorView lse_;
};

/// How long a measurement goes on.
struct Rounds {
  int most = 10, least = 3;
  double seconds = 4;    ///< then no more begins, once there are `least`
  double round_ms = 20;  ///< calls of a round: as many as fill it
};

/// Milliseconds of a call.
struct Times {
  double forward = 0, both = 0;
  int rounds = 0, calls = 0;  ///< calls of a round
};

/// What transfers of 256 MB reach, in GB/s of a GPU each way, and what a group of 4 bytes takes.
struct LinkSpeeds {
  double one_way = 0;     ///< every other GPU sends, its neighbour receives
  double both_ways = 0;   ///< each GPU sends to its neighbour, as a ring does
  double all_to_all = 0;  ///< each GPU sends to all others, as Ulysses does
  double latency_us = 0;
};

/// All ranks, which make the same calls.
class Ranks {
 public:
  explicit Ranks(std::shared_ptr<fa::Communicator> communicator);
  ~Ranks();
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  fa::Communicator& communicator() const { return *communicator_; }
  std::shared_ptr<fa::Communicator> shared() const { return communicator_; }
  cudaStream_t stream() const { return stream_; }
  int size() const { return communicator_->size(); }
  bool first() const { return communicator_->rank() == 0; }

  /// The greatest of what ranks have. All have come here then.
  double greatest(double own);
  double least(double own) { return -greatest(-own); }

  /// Rounds of calls, forward and backward, that begin together: of the slowest rank in each round, the median. The
  /// first call is a warm-up, unless it takes longer than all rounds may.
  Times time(const Rounds& rounds, const std::function<void()>& forward, const std::function<void()>& backward);

  LinkSpeeds link_speeds();

 private:
  Times round(int calls, const std::function<void()>& forward, const std::function<void()>& backward);
  void barrier();
  /// Milliseconds of a group, of the slowest rank.
  double exchange_ms(const std::vector<fa::Communicator::Transfer>& transfers, int repeats);

  std::shared_ptr<fa::Communicator> communicator_;
  Memory memory_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace bench

#endif  // FA_TOOLS_PARALLEL_GPU_HPP_
