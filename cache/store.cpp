#include "cache/store.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <map>
#include <mutex>
#include <system_error>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "cache/disk.hpp"
#include "cache/entry.hpp"

namespace fa::cache {
namespace {

enum class Cause : std::uint8_t { directory, damage, lock, publish, count };

/// Tells each cause once, with no lock held, and lets no exception of the callback out.
class Warnings {
 public:
  explicit Warnings(std::function<void(const std::string&)> warn) : warn_(std::move(warn)) {}

  void once(Cause cause, const std::string& message) noexcept {
    if (!warn_ || told_.at(static_cast<std::size_t>(cause)).exchange(true)) return;
    try {
      warn_(message);
    } catch (...) {  // NOLINT(bugprone-empty-catch): a warning costs speed, never the call
    }
  }

 private:
  std::function<void(const std::string&)> warn_;
  std::array<std::atomic<bool>, static_cast<std::size_t>(Cause::count)> told_{};
};

/// One key on its way into memory. Guarded by the mutex of the store.
struct Flight {
  std::condition_variable landed;
  bool finished = false;
  std::shared_ptr<const Entry> entry;
  std::exception_ptr error;
};

}  // namespace

class Store::Impl {
 public:
  explicit Impl(const StoreOptions& options) : warnings_(options.warn), lock_wait_(options.lock_wait) {
    if (!options.directory.empty()) disk_ = Disk::open(options.directory, &opening_problem_);
  }

  /// Apart from the constructor, so that `shared` can tell it after letting go of its mutex.
  void tell_opening_problem() {
    if (opening_problem_.empty() || disk_) return;
    warnings_.once(Cause::directory, fmt::format("Compiled kernels stay in memory: {}.", opening_problem_));
  }

  Lookup get(const Key& key, const Build& build);

  Counters counters() const {
    const std::scoped_lock lock(mutex_);
    return counters_;
  }

  const std::filesystem::path& directory() const noexcept {
    static const std::filesystem::path none;
    return disk_ ? disk_->root() : none;
  }

 private:
  Lookup lead(const std::string& id, Flight& flight, const Key& key, const Build& build);
  Lookup build_or_load(const std::string& id, Flight& flight, const Key& key, const Build& build);
  std::shared_ptr<const Entry> load(const Key& key, bool* damaged);
  BuildLock lock(const Key& key);
  void publish(const Entry& entry) noexcept;
  void land(const std::string& id, Flight& flight, std::shared_ptr<const Entry> entry, std::exception_ptr error);
  void count(std::uint64_t Counters::*counter) {
    const std::scoped_lock lock(mutex_);
    ++(counters_.*counter);
  }

  Warnings warnings_;
  std::chrono::milliseconds lock_wait_;
  std::string opening_problem_;
  std::optional<Disk> disk_;

  mutable std::mutex mutex_;  ///< never held while building or touching a file
  Counters counters_;
  // By the encoded key rather than its digest, so that a collision of digests cannot hand out the wrong kernel.
  std::unordered_map<std::string, std::shared_ptr<const Entry>> entries_;
  std::unordered_map<std::string, std::shared_ptr<Flight>> flights_;
};

Lookup Store::Impl::get(const Key& key, const Build& build) {
  const std::string id = encode_key(key);
  while (true) {
    std::unique_lock lock(mutex_);
    if (const auto known = entries_.find(id); known != entries_.end()) {
      ++counters_.memory_hits;
      return {known->second, Origin::memory};
    }
    const auto [slot, first] = flights_.try_emplace(id, std::make_shared<Flight>());
    const std::shared_ptr<Flight> flight = slot->second;
    if (first) {
      lock.unlock();
      return lead(id, *flight, key, build);
    }
    flight->landed.wait(lock, [&flight] { return flight->finished; });
    if (flight->error) std::rethrow_exception(flight->error);
    if (flight->entry) {
      ++counters_.memory_hits;
      return {flight->entry, Origin::memory};
    }
    if (!build) return {};
    // The flight only looked and found nothing; this call can build.
  }
}

Lookup Store::Impl::lead(const std::string& id, Flight& flight, const Key& key, const Build& build) {
  try {
    return build_or_load(id, flight, key, build);
  } catch (...) {
    land(id, flight, nullptr, std::current_exception());
    throw;
  }
}

Lookup Store::Impl::build_or_load(const std::string& id, Flight& flight, const Key& key, const Build& build) {
  bool damaged = false;
  std::shared_ptr<const Entry> entry = load(key, &damaged);
  const BuildLock held = entry || !build ? BuildLock() : lock(key);
  if (!entry && build) entry = load(key, &damaged);  // another process may have published it meanwhile
  if (damaged) count(&Counters::damaged);
  if (entry) {
    count(&Counters::disk_hits);
    land(id, flight, entry, nullptr);
    return {std::move(entry), Origin::disk};
  }
  if (!build) {
    land(id, flight, nullptr, nullptr);
    return {};
  }
  Entry built = build();
  built.key = key;
  entry = std::make_shared<const Entry>(std::move(built));
  count(&Counters::builds);
  land(id, flight, entry, nullptr);
  publish(*entry);
  return {std::move(entry), Origin::built};
}

std::shared_ptr<const Entry> Store::Impl::load(const Key& key, bool* damaged) {
  if (!disk_) return nullptr;
  Disk::Found found = disk_->load(key);
  if (found.entry) return std::make_shared<const Entry>(std::move(*found.entry));
  if (!found.damage.empty()) {
    *damaged = true;
    warnings_.once(Cause::damage, fmt::format("A stored kernel failed its check and is not used: {}.", found.damage));
  }
  return nullptr;
}

BuildLock Store::Impl::lock(const Key& key) {
  if (!disk_) return {};
  std::string problem;
  BuildLock held = disk_->lock(key, lock_wait_, &problem);
  if (!problem.empty()) {
    warnings_.once(Cause::lock, fmt::format("Kernels may be compiled more than once: {}.", problem));
  }
  return held;
}

void Store::Impl::publish(const Entry& entry) noexcept {
  if (!disk_ || entry.cubin.empty()) return;
  try {
    std::string problem;
    if (disk_->publish(entry, &problem)) return;
    count(&Counters::publish_failures);
    warnings_.once(Cause::publish, fmt::format("Compiled kernels stay in memory: {} refused one ({}).",
                                               disk_->root().string(), problem));
  } catch (...) {
    count(&Counters::publish_failures);
  }
}

void Store::Impl::land(const std::string& id, Flight& flight, std::shared_ptr<const Entry> entry,
                       std::exception_ptr error) {
  const std::scoped_lock lock(mutex_);
  if (entry && !entry->cubin.empty()) entries_.insert_or_assign(id, entry);
  flights_.erase(id);
  flight.entry = std::move(entry);
  flight.error = std::move(error);
  flight.finished = true;
  flight.landed.notify_all();
}

Store::Store(const StoreOptions& options) : Store(std::make_unique<Impl>(options)) {
  impl_->tell_opening_problem();
}

Store::Store(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Store::~Store() = default;

Lookup Store::get(const Key& key, const Build& build) {
  return impl_->get(key, build);
}

Counters Store::counters() const {
  return impl_->counters();
}

const std::filesystem::path& Store::directory() const noexcept {
  return impl_->directory();
}

namespace {

/// One spelling for each directory. Its own last component stays as given: a root must not be a symbolic link.
std::filesystem::path canonical_directory(const std::filesystem::path& directory) {
  if (!directory.is_absolute()) return directory;
  std::filesystem::path normal = directory.lexically_normal();
  if (!normal.has_filename()) normal = normal.parent_path();
  std::error_code error;
  const std::filesystem::path parent = std::filesystem::weakly_canonical(normal.parent_path(), error);
  return error ? normal : parent / normal.filename();
}

}  // namespace

std::shared_ptr<Store> Store::shared(const StoreOptions& options) {
  static std::mutex mutex;
  static std::map<std::filesystem::path, std::weak_ptr<Store>> stores;
  const std::filesystem::path directory = canonical_directory(options.directory);
  std::shared_ptr<Store> store;
  {
    const std::scoped_lock lock(mutex);
    std::erase_if(stores, [](const auto& item) { return item.second.expired(); });
    std::weak_ptr<Store>& slot = stores[directory];
    if (std::shared_ptr<Store> existing = slot.lock()) return existing;
    store.reset(new Store(std::make_unique<Impl>(options)));
    slot = store;
  }
  store->impl_->tell_opening_problem();
  return store;
}

std::vector<Entry> list_entries(const std::filesystem::path& directory, int* damaged) {
  if (damaged != nullptr) *damaged = 0;
  std::vector<Entry> entries = Disk::list(directory, damaged);
  std::ranges::sort(entries, [](const Entry& a, const Entry& b) {
    return std::tie(a.key.target, a.key.spec, a.key.options, a.key.templates) <
           std::tie(b.key.target, b.key.spec, b.key.options, b.key.templates);
  });
  return entries;
}

std::filesystem::path default_directory() {
  const auto absolute = [](const char* name) {
    const char* value = std::getenv(name);  // NOLINT(concurrency-mt-unsafe): read only, as every program does
    std::filesystem::path path = value == nullptr ? "" : value;
    return path.is_absolute() ? path : std::filesystem::path();
  };
  if (std::filesystem::path own = absolute("FA_CACHE_DIR"); !own.empty()) return own;
  if (const std::filesystem::path caches = absolute("XDG_CACHE_HOME"); !caches.empty()) return caches / "fa";
  if (const std::filesystem::path home = absolute("HOME"); !home.empty()) return home / ".cache" / "fa";
  return {};
}

}  // namespace fa::cache
