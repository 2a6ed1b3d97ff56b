#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <new>
#include <random>
#include <string>
#include <thread>
#include <utility>

#include <fa/parallel.hpp>

#include "parallel/errors.hpp"
#include "parallel/layout.hpp"
#include "parallel/timeout.hpp"

namespace fa {
namespace {

using Clock = std::chrono::steady_clock;
using Transfer = Communicator::Transfer;

constexpr auto kAlignment = std::align_val_t{256};

/// A tensor that one rank offers another, until that has copied it.
struct Offer {
  const void* data = nullptr;
  std::int64_t count = 0;
  DType dtype = DType::f32;
  const void* place = nullptr;
  bool taken = false;
};

/// Memory that ranks share, by rank; null where it was given back, or not asked for yet.
struct Shared {
  std::vector<std::byte*> parts;
  std::vector<char> asked;
  std::size_t bytes = 0;
};

/// What the ranks of a group share.
class Hub {
 public:
  Hub(int size, LocalGroupOptions options) : size_(size), options_(std::move(options)) {}

  ~Hub() {
    for (const Shared& shared : shared_) {
      for (std::byte* const part : shared.parts) ::operator delete(part, kAlignment);
    }
  }
  Hub(const Hub&) = delete;
  Hub& operator=(const Hub&) = delete;

  int size() const noexcept { return size_; }
  const LocalGroupOptions& options() const noexcept { return options_; }

  /// The first problem ends the communication of all.
  void fail(const std::string& problem) noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (problem_.empty()) problem_ = problem.empty() ? "unknown" : problem;
    changed_.notify_all();
  }

  void leave(int rank) noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    left_.push_back(rank);
    changed_.notify_all();
  }

  void throw_if_failed() {
    const std::lock_guard<std::mutex> lock(mutex_);
    throw_problem();
  }

  std::shared_ptr<Offer> offer(int from, const Transfer& transfer) {
    const std::lock_guard<std::mutex> lock(mutex_);
    throw_problem();
    auto made = std::make_shared<Offer>(Offer{transfer.data, transfer.count, transfer.dtype, transfer.place, false});
    offers_[{from, transfer.peer}].push_back(made);
    changed_.notify_all();
    return made;
  }

  /// The next tensor that `from` offers.
  std::shared_ptr<Offer> find(int from, int to) {
    std::unique_lock<std::mutex> lock(mutex_);
    std::deque<std::shared_ptr<Offer>>& queue = offers_[{from, to}];
    wait_for(lock, to, from, [&queue] { return !queue.empty(); });
    std::shared_ptr<Offer> found = queue.front();
    queue.pop_front();
    return found;
  }

  /// Copies what `from` offers. Under the lock, which whoever throws for a failure has taken before its tensors go: no
  /// copy is under way then.
  void take(Offer& offer, int from, int rank, void* to) {
    const std::lock_guard<std::mutex> lock(mutex_);
    throw_problem();
    const std::size_t bytes = static_cast<std::size_t>(offer.count) * size_of(offer.dtype);
    if (offer.place != nullptr) to = part_of(offer, from, rank, bytes, to);
    if (offer.count > 0) std::memcpy(to, offer.data, bytes);
    offer.taken = true;
    changed_.notify_all();
  }

  /// The rank's n-th part belongs to the n-th of the others. Returns when all have theirs.
  void* share(int rank, std::size_t bytes) {
    std::unique_lock<std::mutex> lock(mutex_);
    throw_problem();
    const std::size_t number = shares_of_[rank]++;
    if (shared_.size() <= number) shared_.resize(number + 1);
    Shared& shared = shared_[number];
    const auto ranks = static_cast<std::size_t>(size_);
    if (shared.parts.empty()) shared = {std::vector<std::byte*>(ranks), std::vector<char>(ranks), bytes};
    if (shared.bytes != bytes) {
      problem_ = "rank " + std::to_string(rank) + " shares " + std::to_string(bytes) + " bytes, where others share " +
                 std::to_string(shared.bytes);
      changed_.notify_all();
      throw_problem();
    }
    auto* const part = static_cast<std::byte*>(::operator new(std::max<std::size_t>(bytes, 1), kAlignment));
    shared.parts[static_cast<std::size_t>(rank)] = part;
    shared.asked[static_cast<std::size_t>(rank)] = 1;
    changed_.notify_all();
    for (int other = 0; other < size_; ++other) {
      wait_for(lock, rank, other, [&] { return shared_[number].asked[static_cast<std::size_t>(other)] != 0; });
    }
    return part;
  }

  bool is_shared(int rank, const void* data, std::size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::ranges::any_of(shared_, [&](const Shared& shared) {
      const std::byte* const part = shared.parts[static_cast<std::size_t>(rank)];
      const auto* const first = static_cast<const std::byte*>(data);
      return part != nullptr && part <= first && first + bytes <= part + shared.bytes;
    });
  }

  void unshare(int rank, void* memory) noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (Shared& shared : shared_) {
      std::byte*& part = shared.parts[static_cast<std::size_t>(rank)];
      if (part == memory) part = nullptr;
    }
    ::operator delete(memory, kAlignment);
  }

  void wait_until_taken(const Offer& offer, int rank, int by) {
    std::unique_lock<std::mutex> lock(mutex_);
    wait_for(lock, rank, by, [&offer] { return offer.taken; });
  }

 private:
  /// Where an offer goes, which is where its receiver expects it.
  std::byte* part_of(const Offer& offer, int from, int rank, std::size_t bytes, const void* expected) const {
    for (const Shared& shared : shared_) {
      const std::byte* const source = shared.parts[static_cast<std::size_t>(from)];
      std::byte* const target = shared.parts[static_cast<std::size_t>(rank)];
      const auto* const place = static_cast<const std::byte*>(offer.place);
      if (source == nullptr || target == nullptr || place < source || place >= source + shared.bytes) continue;
      const auto offset = static_cast<std::size_t>(place - source);
      if (offset + bytes <= shared.bytes && target + offset == expected) return target + offset;
    }
    throw Error(ErrorCode::invalid_argument,
                "rank " + std::to_string(from) + " writes to shared memory elsewhere than where it is expected");
  }

  void throw_problem() const {
    if (problem_.empty()) return;
    throw Error(ErrorCode::cuda, "communication of the group has failed: " + problem_, {{"problem", problem_}});
  }

  template <class Done>
  void wait_for(std::unique_lock<std::mutex>& lock, int rank, int other, const Done& done) {
    const auto until = Clock::now() + options_.timeout;
    const auto has_left = [&] { return std::ranges::find(left_, other) != left_.end(); };
    changed_.wait_until(lock, until, [&] { return done() || !problem_.empty() || has_left(); });
    throw_problem();
    if (done()) return;
    problem_ = "rank " + std::to_string(rank) + " has waited for rank " + std::to_string(other) +
               (has_left() ? ", which has left" : " for " + std::to_string(options_.timeout.count()) + " ms");
    changed_.notify_all();
    throw_problem();
  }

  const int size_;
  const LocalGroupOptions options_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::pair<int, int>, std::deque<std::shared_ptr<Offer>>> offers_;
  std::vector<int> left_;
  std::vector<Shared> shared_;
  std::map<int, std::size_t> shares_of_;  ///< how many a rank has asked for
  std::string problem_;
};

/// A rank. A thread of its own makes its transfers, one group after the other, as a stream does.
class LocalRank final : public Communicator {
 public:
  LocalRank(std::shared_ptr<Hub> hub, int rank)
      : hub_(std::move(hub)), rank_(rank), random_(hub_->options().seed * 1000003 + static_cast<std::uint64_t>(rank)) {
    worker_ = std::thread([this] { work(); });
  }

  ~LocalRank() override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ends_ = true;
      if (done_ < queued_) hub_->fail("rank " + std::to_string(rank_) + " has left before its transfers were done");
      changed_.notify_all();
    }
    hub_->leave(rank_);
    worker_.join();
  }
  LocalRank(const LocalRank&) = delete;
  LocalRank& operator=(const LocalRank&) = delete;

  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return hub_->size(); }
  Device device() const noexcept override { return Device::host(); }

  std::uint64_t exchange(std::span<const Transfer> group, Stream) override {
    hub_->throw_if_failed();
    for (const Transfer& transfer : group) {
      if (transfer.peer < 0 || transfer.peer >= size() || transfer.peer == rank_) {
        parallel::throw_invalid("peer", transfer.peer, "another rank of " + std::to_string(size()));
      }
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    queue_.emplace_back(group.begin(), group.end());
    changed_.notify_all();
    return queued_++;
  }

  void wait(std::uint64_t group, Stream) override {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      // The worker's own waits have the bound.
      changed_.wait(lock, [&] { return done_ > group || failed_; });
      if (done_ > group) return;
    }
    hub_->throw_if_failed();
  }

  void synchronize(Stream stream) override {
    std::uint64_t groups = 0;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      groups = queued_;
    }
    if (groups > 0) wait(groups - 1, stream);
    hub_->throw_if_failed();
  }

  void check() override { hub_->throw_if_failed(); }

  void abort(const std::string& problem) noexcept override { hub_->fail(problem); }

  bool shares_memory() const noexcept override { return hub_->options().shares_memory; }
  void* share(std::size_t bytes) override {
    return shares_memory() ? hub_->share(rank_, bytes) : Communicator::share(bytes);
  }
  bool is_shared(const void* data, std::size_t bytes) const override { return hub_->is_shared(rank_, data, bytes); }
  void unshare(void* memory) noexcept override { hub_->unshare(rank_, memory); }

 private:
  void work() {
    for (std::uint64_t number = 0;; ++number) {
      std::vector<Transfer> group;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [this] { return ends_ || !queue_.empty(); });
        if (queue_.empty()) return;
        group = std::move(queue_.front());
        queue_.pop_front();
      }
      const bool succeeded = run(group, number);
      const std::lock_guard<std::mutex> lock(mutex_);
      if (succeeded) ++done_;
      failed_ = !succeeded;
      changed_.notify_all();
      if (failed_) return;
    }
  }

  bool run(const std::vector<Transfer>& group, std::uint64_t number) {
    try {
      if (hub_->options().on_exchange) hub_->options().on_exchange(rank_, number);
      std::vector<std::pair<std::shared_ptr<Offer>, int>> offers;
      for (const Transfer& transfer : group) {
        if (transfer.sends) offers.emplace_back(hub_->offer(rank_, transfer), transfer.peer);
      }
      for (const Transfer& transfer : group) {
        if (!transfer.sends) receive(transfer);
      }
      for (const auto& [offer, peer] : offers) hub_->wait_until_taken(*offer, rank_, peer);
      return true;
    } catch (const std::exception& problem) {
      hub_->fail("rank " + std::to_string(rank_) + ": " + problem.what());
    }
    return false;
  }

  void receive(const Transfer& transfer) {
    const std::shared_ptr<Offer> offer = hub_->find(transfer.peer, rank_);
    if (offer->count != transfer.count || offer->dtype != transfer.dtype) {
      throw Error(ErrorCode::invalid_argument, "rank " + std::to_string(transfer.peer) + " sends " +
                                                   std::to_string(offer->count) + " " + to_string(offer->dtype) +
                                                   ", where " + std::to_string(transfer.count) + " " +
                                                   to_string(transfer.dtype) + " are expected");
    }
    const auto limit = hub_->options().max_delay.count();
    if (limit > 0) {
      const auto delay = std::uniform_int_distribution<std::int64_t>(0, limit)(random_);
      std::this_thread::sleep_for(std::chrono::microseconds(delay));
    }
    if ((offer->place == nullptr) != (transfer.place == nullptr)) {
      throw Error(ErrorCode::invalid_argument, "rank " + std::to_string(transfer.peer) +
                                                   (offer->place == nullptr ? " does not write" : " writes") +
                                                   " to shared memory, unlike what is expected");
    }
    hub_->take(*offer, transfer.peer, rank_, transfer.data);
  }

  std::shared_ptr<Hub> hub_;
  const int rank_;
  std::mt19937_64 random_;  // of the worker
  std::mutex mutex_;        // guards what follows
  std::condition_variable changed_;
  std::deque<std::vector<Transfer>> queue_;
  std::uint64_t queued_ = 0, done_ = 0;
  bool failed_ = false;
  bool ends_ = false;
  std::thread worker_;
};

}  // namespace

Communicator::~Communicator() = default;
void* Communicator::share(std::size_t) {
  throw Error(ErrorCode::unsupported, "ranks share no memory over this communicator");
}
bool Communicator::is_shared(const void*, std::size_t) const {
  return false;
}
void Communicator::unshare(void*) noexcept {}

std::vector<std::shared_ptr<Communicator>> make_local_group(int size, const LocalGroupOptions& options) {
  parallel::check_ranks("size", size);
  LocalGroupOptions checked = options;
  checked.timeout = parallel::checked_timeout(options.timeout);
  const auto hub = std::make_shared<Hub>(size, std::move(checked));
  std::vector<std::shared_ptr<Communicator>> ranks;
  for (int rank = 0; rank < size; ++rank) ranks.push_back(std::make_shared<LocalRank>(hub, rank));
  return ranks;
}

}  // namespace fa
