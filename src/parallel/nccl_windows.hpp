#ifndef FA_SRC_PARALLEL_NCCL_WINDOWS_HPP_
#define FA_SRC_PARALLEL_NCCL_WINDOWS_HPP_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include <fa/parallel.hpp>

#include "parallel/cuda.hpp"
#include "parallel/nccl_api.hpp"

namespace fa::parallel {

/// Memory of all ranks in windows of NCCL, which puts write to. A put goes by copy engines, behind two words of 8 bytes
/// in a window of their own: counts, which each rank has of each other one. NCCL's own signals are not waited for,
/// since nothing could end such a wait where a rank fails.
///
///   receiver   put ready ──┐                                wait arrived
///   sender                 wait ready │ put data, put arrived ──┘
class NcclWindows {
 public:
  /// Makes NCCL calls, each of whose results goes to `keep`.
  using Keep = std::function<void(int result)>;
  using Body = std::function<void(const Keep& keep)>;
  /// Makes them as a group of NCCL, and returns when they are queued: kSuccess, or the first failure.
  using Group = std::function<int(const Body& body)>;

  NcclWindows(Nccl::Comm comm, int rank, int size, const CudaContext& context, Group group);
  ~NcclWindows();
  NcclWindows(const NcclWindows&) = delete;
  NcclWindows& operator=(const NcclWindows&) = delete;

  /// Whether all ranks reach each other's memory.
  static bool can_be_used(Nccl::Comm comm, int size);

  void* share(std::size_t bytes);
  bool is_shared(const void* data, std::size_t bytes) const noexcept;
  void unshare(void* memory) noexcept;

  /// Queues transfers that have places. A result of NCCL.
  int queue(std::span<const Communicator::Transfer> group, Stream stream);

  /// Ends all waits, those of `stream` among them, before the communicator is aborted. Memory stays from then on:
  /// others may be writing to it.
  void release(Stream stream) noexcept;

 private:
  enum Word : std::size_t { kReady, kArrived, kWords };
  struct Part {
    std::byte* memory = nullptr;
    std::size_t bytes = 0;
    Nccl::Window window = nullptr;
    bool has(const void* data) const noexcept { return memory <= data && data < memory + bytes; }
  };

  Part allocate(std::size_t bytes);
  void free(const Part& part) noexcept;
  const Part& part_of(const void* data) const;
  void check(const Communicator::Transfer& transfer) const;
  /// Which word tells of a peer, and in the peer's window of this rank. What goes out lies sent_.size() words behind
  /// it.
  std::size_t word_at(Word word, int peer) const noexcept;
  CUdeviceptr address(std::size_t offset) const noexcept;
  void prepare_word(Word word, int peer, Stream stream);
  int put_word(Word word, int peer, Stream stream) const;
  void wait_for_word(Word word, int peer, Stream stream);

  const Nccl::Comm comm_;
  const int rank_, size_;
  const CudaContext& context_;
  const Group group_;
  Part words_;  ///< [those that others write, those that go out][word][peer]
  std::vector<Part> parts_;
  std::vector<std::uint64_t> sent_, awaited_;  ///< [word][peer]
  CUstream releasing_ = nullptr;
  std::atomic<bool> is_released_{false};
  std::atomic<std::byte*> awaited_words_{nullptr};  ///< for `release`, of any thread
};

}  // namespace fa::parallel

#endif  // FA_SRC_PARALLEL_NCCL_WINDOWS_HPP_
