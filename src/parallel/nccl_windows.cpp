#include "parallel/nccl_windows.hpp"

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <utility>

#include "parallel/errors.hpp"

namespace fa::parallel {
namespace {

constexpr int kMostRanks = 8;  // each plans for all
constexpr unsigned char kReleased = 0x7f;
constexpr auto kReleaseTime = std::chrono::seconds(1);

std::vector<int> peers_of(std::span<const Communicator::Transfer> group, bool sends) {
  std::vector<int> peers;
  for (const Communicator::Transfer& transfer : group) {
    const bool is_new = std::ranges::find(peers, transfer.peer) == peers.end();
    if (transfer.sends == sends && is_new) peers.push_back(transfer.peer);
  }
  return peers;
}

}  // namespace

NcclWindows::NcclWindows(Nccl::Comm comm, int rank, int size, const CudaContext& context, Group group)
    : comm_(comm), rank_(rank), size_(size), context_(context), group_(std::move(group)) {
  sent_.assign(kWords * static_cast<std::size_t>(size), 0);
  awaited_ = sent_;
  cuda_check(cuda().cuStreamCreateWithPriority(&releasing_, CU_STREAM_NON_BLOCKING, 0), "cuStreamCreateWithPriority");
}

NcclWindows::~NcclWindows() {
  for (const Part& part : parts_) free(part);
  if (words_.memory != nullptr) free(words_);
  cuda().cuStreamDestroy(releasing_);
}

bool NcclWindows::can_be_used(Nccl::Comm comm, int size) {
  if (!nccl().has_puts || size < 2 || size > kMostRanks) return false;
  Nccl::Properties properties;
  if (nccl().query_properties(comm, &properties) != Nccl::kSuccess) return false;
  return properties.host_rma && properties.lsa_teams == 1;
}

NcclWindows::Part NcclWindows::allocate(std::size_t bytes) {
  Part part{nullptr, bytes, nullptr};
  void* memory = nullptr;
  nccl_check(nccl().allocate(&memory, std::max<std::size_t>(bytes, 1)), "ncclMemAlloc", comm_);
  part.memory = static_cast<std::byte*>(memory);
  // Words are 0 before another rank can write one.
  cuda_check(cuda().cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(memory), 0, bytes, releasing_), "cuMemsetD8Async");
  cuda_check(cuda().cuStreamSynchronize(releasing_), "cuStreamSynchronize");
  const int result = group_([&](const Keep& keep) {
    keep(nccl().register_window(comm_, memory, std::max<std::size_t>(bytes, 1), &part.window, Nccl::kSymmetric));
  });
  if (result != Nccl::kSuccess) nccl().free(memory);
  nccl_check(result, "ncclCommWindowRegister", comm_);
  return part;
}

void NcclWindows::free(const Part& part) noexcept {
  if (is_released_) return;
  cuda().cuCtxSynchronize();
  nccl().deregister_window(comm_, part.window);
  nccl().free(part.memory);
}

void* NcclWindows::share(std::size_t bytes) {
  if (words_.memory == nullptr) {
    words_ = allocate(2 * sent_.size() * sizeof(std::uint64_t));
    awaited_words_ = words_.memory;
  }
  parts_.push_back(allocate(bytes));
  return parts_.back().memory;
}

bool NcclWindows::is_shared(const void* data, std::size_t bytes) const noexcept {
  const auto* const first = static_cast<const std::byte*>(data);
  return std::ranges::any_of(
      parts_, [&](const Part& part) { return part.memory <= first && first + bytes <= part.memory + part.bytes; });
}

void NcclWindows::unshare(void* memory) noexcept {
  const auto found = std::ranges::find(parts_, memory, &Part::memory);
  if (found == parts_.end()) return;
  free(*found);
  parts_.erase(found);
}

const NcclWindows::Part& NcclWindows::part_of(const void* data) const {
  for (const Part& part : parts_) {
    if (part.has(data)) return part;
  }
  throw_internal("memory that is not shared");
}

std::size_t NcclWindows::word_at(Word word, int peer) const noexcept {
  return word * static_cast<std::size_t>(size_) + static_cast<std::size_t>(peer);
}

CUdeviceptr NcclWindows::address(std::size_t offset) const noexcept {
  return reinterpret_cast<CUdeviceptr>(words_.memory + offset * sizeof(std::uint64_t));
}

void NcclWindows::prepare_word(Word word, int peer, Stream stream) {
  const std::size_t at = word_at(word, peer);
  cuda_check(cuda().cuStreamWriteValue64(stream, address(sent_.size() + at), ++sent_[at], 0), "cuStreamWriteValue64");
}

int NcclWindows::put_word(Word word, int peer, Stream stream) const {
  const auto* const from = words_.memory + (sent_.size() + word_at(word, peer)) * sizeof(std::uint64_t);
  return nccl().put(from, sizeof(std::uint64_t), Nccl::kInt8, peer, words_.window,
                    word_at(word, rank_) * sizeof(std::uint64_t), 0, 0, 0, comm_, stream);
}

void NcclWindows::wait_for_word(Word word, int peer, Stream stream) {
  const std::size_t at = word_at(word, peer);
  cuda_check(cuda().cuStreamWaitValue64(stream, address(at), ++awaited_[at], CU_STREAM_WAIT_VALUE_GEQ),
             "cuStreamWaitValue64");
}

void NcclWindows::check(const Communicator::Transfer& transfer) const {
  const std::size_t bytes = size_of(transfer.dtype) * static_cast<std::size_t>(transfer.count);
  if (!is_shared(transfer.data, bytes)) throw_invalid("data", "memory that is not shared", "memory of `share`");
  if (!is_shared(transfer.place, bytes)) {
    throw_invalid("place", transfer.place == nullptr ? "null" : "memory that is not shared",
                  "memory of `share`, in all transfers of a group");
  }
}

int NcclWindows::queue(std::span<const Communicator::Transfer> group, Stream stream) {
  for (const Communicator::Transfer& transfer : group) check(transfer);
  const std::vector<int> sources = peers_of(group, false), targets = peers_of(group, true);
  for (const int source : sources) prepare_word(kReady, source, stream);
  for (const int target : targets) prepare_word(kArrived, target, stream);
  if (!sources.empty()) {
    const int result = group_([&](const Keep& keep) {
      for (const int source : sources) keep(put_word(kReady, source, stream));
    });
    if (result != Nccl::kSuccess) return result;
  }
  for (const int target : targets) wait_for_word(kReady, target, stream);
  if (!targets.empty()) {
    // Puts to a peer keep their order: the word comes behind the data.
    const int result = group_([&](const Keep& keep) {
      for (const Communicator::Transfer& transfer : group) {
        if (!transfer.sends || transfer.count == 0) continue;
        const auto bytes = static_cast<std::size_t>(transfer.count) * size_of(transfer.dtype);
        const Part& part = part_of(transfer.place);
        const auto offset = static_cast<std::size_t>(static_cast<const std::byte*>(transfer.place) - part.memory);
        keep(nccl().put(transfer.data, bytes, Nccl::kInt8, transfer.peer, part.window, offset, 0, 0, 0, comm_, stream));
      }
      for (const int target : targets) keep(put_word(kArrived, target, stream));
    });
    if (result != Nccl::kSuccess) return result;
  }
  for (const int source : sources) wait_for_word(kArrived, source, stream);
  return Nccl::kSuccess;
}

void NcclWindows::release(Stream stream) noexcept {
  is_released_ = true;
  std::byte* const words = awaited_words_;
  if (words == nullptr) return;
  const CudaScope scope(context_);
  const auto until = std::chrono::steady_clock::now() + kReleaseTime;
  do {
    // Again and again: a word of another rank may come meanwhile.
    cuda().cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(words), kReleased, sent_.size() * sizeof(std::uint64_t),
                           releasing_);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  } while (cuda().cuStreamQuery(stream) == CUDA_ERROR_NOT_READY && std::chrono::steady_clock::now() < until);
}

}  // namespace fa::parallel
