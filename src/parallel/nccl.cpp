#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include <fa/parallel.hpp>

#include "parallel/cuda.hpp"
#include "parallel/errors.hpp"
#include "parallel/nccl_api.hpp"
#include "parallel/nccl_windows.hpp"
#include "parallel/timeout.hpp"

namespace fa {
namespace {

using parallel::cuda;
using parallel::cuda_check;
using parallel::CudaContext;
using parallel::CudaScope;
using parallel::Nccl;
using parallel::nccl;
using parallel::nccl_check;
using parallel::nccl_text;
using Clock = std::chrono::steady_clock;

constexpr std::size_t kEvents = 64;  // groups whose ends can be waited for apart
constexpr auto kPoll = std::chrono::milliseconds(5);

int type_of(DType dtype) {
  switch (dtype) {
    case DType::f16:
      return Nccl::kHalf;
    case DType::bf16:
      return Nccl::kBfloat16;
    case DType::f32:
      return Nccl::kFloat;
    case DType::f64:
      return Nccl::kDouble;
    case DType::i32:
      return Nccl::kInt32;
    default:
      return Nccl::kInt8;  // one byte
  }
}

[[noreturn]] void throw_failed(const std::string& problem) {
  throw Error(ErrorCode::cuda, "communication of the group has failed: " + problem, {{"problem", problem}});
}

int ordinal_of(Nccl::Comm comm) {
  if (comm == nullptr) parallel::throw_invalid("comm", "null", "a communicator of NCCL");
  int device = 0, error = Nccl::kSuccess;
  const int result = nccl().comm_async_error(comm, &error);
  if (result != Nccl::kSuccess || (error != Nccl::kSuccess && error != Nccl::kInProgress)) {
    parallel::throw_invalid("comm", nccl_text(result != Nccl::kSuccess ? result : error, nullptr),
                            "a communicator that has not failed or been aborted");
  }
  if (const int failed = nccl().comm_device(comm, &device); failed != Nccl::kSuccess) {
    parallel::throw_invalid("comm", nccl_text(failed, nullptr), "a communicator of NCCL");
  }
  return device;
}

/// Transfers on a stream of their own, ordered against the caller's by events. What was queued is watched.
class NcclCommunicator final : public Communicator {
 public:
  /// Once the other constructor is done, the destructor gives back what this one has made before it fails.
  NcclCommunicator(Nccl::Comm comm, const NcclOptions& options)
      : NcclCommunicator(comm, options, Device::cuda(ordinal_of(comm))) {
    nccl_check(nccl().comm_count(comm, &size_), "ncclCommCount", comm);
    nccl_check(nccl().comm_rank(comm, &rank_), "ncclCommUserRank", comm);
    const CudaScope scope(context_);
    int lowest = 0, highest = 0;
    cuda_check(cuda().cuCtxGetStreamPriorityRange(&lowest, &highest), "cuCtxGetStreamPriorityRange");
    cuda_check(cuda().cuStreamCreateWithPriority(&stream_, CU_STREAM_NON_BLOCKING, highest),
               "cuStreamCreateWithPriority");
    for (auto* events : {&ready_, &done_}) {
      for (CUevent& event : *events) cuda_check(cuda().cuEventCreate(&event, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
    }
    use_windows();
    if (options.watch) watch_ = std::thread([this] { watch(); });
  }

  ~NcclCommunicator() override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ends_ = true;
      changed_.notify_all();
    }
    if (watch_.joinable()) watch_.join();
    // Queued work keeps what it needs; CUDA may be gone already when this runs at exit.
    const CudaScope scope(context_);
    windows_.reset();
    for (auto* events : {&ready_, &done_}) {
      for (CUevent const event : *events) {
        if (event != nullptr) cuda().cuEventDestroy(event);
      }
    }
    if (stream_ != nullptr) cuda().cuStreamDestroy(stream_);
  }
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return size_; }
  Device device() const noexcept override { return Device::cuda(context_.ordinal()); }

  std::uint64_t exchange(std::span<const Transfer> group, Stream stream) override {
    check();
    const CudaScope scope(context_);
    const std::uint64_t number = queued_++;
    const std::size_t slot = number % kEvents;
    const bool captured = parallel::cuda_is_capturing(stream);
    cuda_check(cuda().cuEventRecord(ready_[slot], stream), "cuEventRecord");
    cuda_check(cuda().cuStreamWaitEvent(stream_, ready_[slot], 0), "cuStreamWaitEvent");
    const bool puts = !group.empty() && group.front().place != nullptr && !captured;
    const int result = puts ? windows().queue(group, stream_) : queue(group);
    if (result != Nccl::kSuccess) {
      abort(problem_of(result));
      check();
    }
    cuda_check(cuda().cuEventRecord(done_[slot], stream_), "cuEventRecord");
    if (captured) {
      forget(slot);  // whose event says nothing from now on
    } else {
      expect(slot);
    }
    return number;
  }

  void wait(std::uint64_t group, Stream stream) override {
    const CudaScope scope(context_);
    // An event that a later group has taken comes later, which does as well.
    cuda_check(cuda().cuStreamWaitEvent(stream, done_[group % kEvents], 0), "cuStreamWaitEvent");
  }

  void synchronize(Stream stream) override {
    const CudaScope scope(context_);
    const auto until = Clock::now() + options_.timeout;
    for (CUstream const waited : {stream, stream_}) {
      for (;;) {
        check();
        const CUresult result = cuda().cuStreamQuery(waited);
        if (result == CUDA_SUCCESS) break;
        if (result != CUDA_ERROR_NOT_READY) cuda_check(result, "cuStreamQuery");
        if (is_late(until)) abort(late());
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
    }
    check();
  }

  void check() override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!problem_.empty()) throw_failed(problem_);
    }
    if (const int found = state(); found != Nccl::kSuccess && found != Nccl::kInProgress) abort(problem_of(found));
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!problem_.empty()) throw_failed(problem_);
  }

  /// NCCL ends what it has queued on this rank; the others find that they wait in vain.
  void abort(const std::string& problem) noexcept override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!problem_.empty()) return;
      problem_ = problem.empty() ? "unknown" : problem;
      expected_.clear();
    }
    if (windows_) windows_->release(stream_);
    nccl().comm_abort(comm_);
  }

  bool shares_memory() const noexcept override { return windows_ != nullptr; }
  void* share(std::size_t bytes) override {
    check();
    const CudaScope scope(context_);
    return windows().share(bytes);
  }
  bool is_shared(const void* data, std::size_t bytes) const override {
    return windows_ != nullptr && windows_->is_shared(data, bytes);
  }
  void unshare(void* memory) noexcept override {
    const CudaScope scope(context_);
    if (windows_) windows_->unshare(memory);
  }

 private:
  NcclCommunicator(Nccl::Comm comm, const NcclOptions& options, Device device)
      : comm_(comm),
        options_{parallel::checked_timeout(options.timeout), options.watch, options.transfers},
        context_(device) {}

  void use_windows() {
    if (options_.transfers == NcclTransfers::messages) return;
    wait_until_ready();
    if (parallel::NcclWindows::can_be_used(comm_, size_)) {
      windows_ = std::make_unique<parallel::NcclWindows>(
          comm_, rank_, size_, context_, [this](const parallel::NcclWindows::Body& body) { return queue(body); });
    } else if (options_.transfers == NcclTransfers::puts) {
      parallel::throw_unsupported("transfers", "puts",
                                  "puts with NCCL 2.30.7 or later, of 2 to 8 ranks that reach each other's memory");
    }
  }

  parallel::NcclWindows& windows() {
    if (!windows_) parallel::throw_unsupported("share", "called", "nothing over messages: see NcclOptions::transfers");
    return *windows_;
  }

  /// A group that is queued. The bound counts from when the device has come to it.
  struct Expected {
    std::size_t slot = 0;
    std::optional<Clock::time_point> since;
  };

  std::string late() const {
    return "rank " + std::to_string(rank_) + " has waited for other ranks for " +
           std::to_string(options_.timeout.count()) + " ms";
  }

  int queue(std::span<const Transfer> group) {
    return queue([&](const parallel::NcclWindows::Keep& keep) {
      for (const Transfer& transfer : group) {
        if (transfer.count == 0) continue;
        if (has_failed()) break;
        const auto count = static_cast<std::size_t>(transfer.count);
        const int type = type_of(transfer.dtype);
        keep(transfer.sends ? nccl().send(transfer.data, count, type, transfer.peer, comm_, stream_)
                            : nccl().receive(transfer.data, count, type, transfer.peer, comm_, stream_));
      }
    });
  }

  /// One group; a communicator that does not block is waited for, within the bound.
  int queue(const parallel::NcclWindows::Body& body) {
    busy_since_ = Clock::now().time_since_epoch().count();
    int first = nccl().group_start();
    const auto keep = [&first](int result) {
      if (first == Nccl::kSuccess && result != Nccl::kInProgress) first = result;
    };
    if (!has_failed()) body(keep);
    const int ended = nccl().group_end();
    keep(ended);
    if (ended == Nccl::kInProgress) {
      const int state = wait_until_ready();
      if (first == Nccl::kSuccess) first = state;
    }
    busy_since_ = 0;
    return first;
  }

  /// What NCCL says of a communicator that does not block, once it is ready, within the bound.
  int wait_until_ready() {
    const auto until = Clock::now() + options_.timeout;
    int state = this->state();
    while (state == Nccl::kInProgress && Clock::now() < until) {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
      state = this->state();
    }
    if (state == Nccl::kInProgress) abort(late());
    return state;
  }

  void expect(std::size_t slot) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::erase_if(expected_, [slot](const Expected& other) { return other.slot == slot; });
    expected_.push_back({slot, std::nullopt});
    changed_.notify_all();
  }

  void forget(std::size_t slot) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::erase_if(expected_, [slot](const Expected& other) { return other.slot == slot; });
    has_captured_ = true;
  }

  /// Of `synchronize`. Groups of graphs cannot be seen: where there are some, all that is waited for is bounded.
  bool is_late(Clock::time_point until) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return front_is_late() || (has_captured_ && Clock::now() > until);
  }

  bool has_failed() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return !problem_.empty();
  }

  /// What NCCL says of the communicator; kSystemError of one that was aborted, which nothing is asked of any more: the
  /// lock keeps an abort of another thread away meanwhile.
  int state() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return state_locked();
  }
  int state_locked() {
    if (!problem_.empty()) return Nccl::kSystemError;
    int error = Nccl::kSuccess;
    const int result = nccl().comm_async_error(comm_, &error);
    return result != Nccl::kSuccess ? result : error;
  }

  std::string problem_of(int result) const {
    return "rank " + std::to_string(rank_) + ": " + nccl_text(result, nullptr);
  }

  /// Whether the first group that is not done has taken longer than the bound, since what is before it was done.
  bool front_is_late() {
    std::erase_if(expected_,
                  [this](const Expected& group) { return cuda().cuEventQuery(done_[group.slot]) == CUDA_SUCCESS; });
    if (expected_.empty()) return false;
    Expected& front = expected_.front();
    const auto now = Clock::now();
    if (!front.since && cuda().cuEventQuery(ready_[front.slot]) == CUDA_SUCCESS) front.since = now;
    return front.since && now - *front.since > options_.timeout;
  }

  /// Until the end of this object: ends what is late, and what NCCL has found to fail.
  void watch() {
    const CudaScope scope(context_);
    // Queries must not break a capture of another thread.
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    cuda().cuThreadExchangeStreamCaptureMode(&mode);
    std::unique_lock<std::mutex> lock(mutex_);
    while (!ends_ && problem_.empty()) {
      const std::int64_t busy_since = busy_since_;
      if (expected_.empty() && busy_since == 0) {
        changed_.wait_for(lock, std::chrono::milliseconds(100));
        continue;
      }
      const auto busy_for = Clock::now() - Clock::time_point(Clock::duration(busy_since));
      const bool is_late = front_is_late() || (busy_since != 0 && busy_for > options_.timeout);
      const int found = is_late || busy_since != 0 ? Nccl::kSuccess : state_locked();
      if (is_late || (found != Nccl::kSuccess && found != Nccl::kInProgress)) {
        lock.unlock();
        abort(is_late ? late() : problem_of(found));
        lock.lock();
      }
      changed_.wait_for(lock, kPoll);
    }
  }

  const Nccl::Comm comm_;
  const NcclOptions options_;
  CudaContext context_;
  int rank_ = 0, size_ = 0;
  CUstream stream_ = nullptr;
  std::array<CUevent, kEvents> ready_{}, done_{};
  std::unique_ptr<parallel::NcclWindows> windows_;
  std::uint64_t queued_ = 0;
  std::atomic<std::int64_t> busy_since_{0};  ///< a group is being queued since
  std::mutex mutex_;                         ///< guards what follows
  std::condition_variable changed_;
  std::deque<Expected> expected_;  ///< groups that are not known to be done
  std::string problem_;
  bool has_captured_ = false;
  bool ends_ = false;
  std::thread watch_;
};

}  // namespace

std::shared_ptr<Communicator> use_nccl(ncclComm* comm, const NcclOptions& options) {
  return std::make_shared<NcclCommunicator>(comm, options);
}

}  // namespace fa
