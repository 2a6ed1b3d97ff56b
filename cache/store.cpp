#include "cache/store.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <ctime>
#include <exception>
#include <map>
#include <mutex>
#include <span>
#include <system_error>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "cache/disk.hpp"
#include "cache/entry.hpp"
#include "cache/pack.hpp"
#include "cache/platform.hpp"

namespace fa::cache {
namespace {

enum class Cause : std::uint8_t { directory, packs, damage, lock, publish, count };

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
  std::thread::id leader = std::this_thread::get_id();  ///< that waits for nobody, itself included
  std::condition_variable landed;
  bool finished = false;
  std::shared_ptr<const Entry> entry;
  std::exception_ptr error;
};

std::optional<Pack> open_pack(const std::filesystem::path& file, const std::string& pin, std::string* problem) {
  if (pin.empty()) return Pack::open(file, problem);
  const std::optional<Sha256Bytes> digest = parse_sha256(pin);
  if (digest) return Pack::open(file, problem, digest);
  *problem = fmt::format("{}: its pin is not a SHA-256 of 64 hex digits", file.string());
  return std::nullopt;
}

}  // namespace

class Store::Impl {
 public:
  explicit Impl(const StoreOptions& options)
      : warnings_(options.warn), lock_wait_(options.lock_wait), accept_(options.accept), limits_(options.limits) {
    for (std::size_t i = 0; i < options.packs.size(); ++i) {
      const std::string pin = i < options.pack_sha256.size() ? options.pack_sha256[i] : "";
      std::string problem;
      if (std::optional<Pack> pack = open_pack(options.packs[i], pin, &problem)) {
        packs_.push_back(std::move(*pack));
      } else {
        pack_problems_.push_back(std::move(problem));
      }
    }
    if (!options.directory.empty()) disk_ = Disk::open(options.directory, &opening_problem_);
  }

  /// Apart from the constructor, so that `shared` can tell them after letting go of its mutex.
  void tell_opening_problems() {
    if (!pack_problems_.empty()) {
      warnings_.once(Cause::packs, fmt::format("Packs of kernels are not used: {}.", fmt::join(pack_problems_, "; ")));
    }
    if (opening_problem_.empty() || disk_) return;
    warnings_.once(Cause::directory, fmt::format("Compiled kernels stay in memory: {}.", opening_problem_));
  }

  const std::vector<std::string>& pack_problems() const noexcept { return pack_problems_; }

  Lookup get(const Key& key, const Build& build, const Substitutes& substitutes, Wait wait);

  Counters counters() const {
    const std::scoped_lock lock(mutex_);
    return counters_;
  }

  const std::filesystem::path& directory() const noexcept {
    static const std::filesystem::path none;
    return disk_ ? disk_->root() : none;
  }

 private:
  Lookup lead(const std::string& id, Flight& flight, const Key& key, const Build& build,
              const Substitutes& substitutes);
  Lookup build_or_load(const std::string& id, Flight& flight, const Key& key, const Build& build,
                       const Substitutes& substitutes);
  /// What a look-up does before it has the lock of the key, and again with it: then only the directory can have
  /// changed, and what is refused has been counted.
  enum class Look : std::uint8_t { first, again };
  Lookup load(const Key& key, Look look);
  bool load_from_packs(const Key& key, Lookup* found);
  void load_substitute(const Substitutes& substitutes, Lookup* found);
  std::shared_ptr<const Entry> taken(std::optional<Entry> entry, const std::string& damage, Look look,
                                     std::string* refused);
  BuildLock lock(const Key& key);
  void publish(const Entry& entry) noexcept;
  void keep_within_limits(const Entry& entry);
  void land(const std::string& id, Flight& flight, std::shared_ptr<const Entry> entry, std::exception_ptr error);
  void count(std::uint64_t Counters::*counter) {
    const std::scoped_lock lock(mutex_);
    ++(counters_.*counter);
  }

  Warnings warnings_;
  std::chrono::milliseconds lock_wait_;
  Acceptance accept_;
  Limits limits_;
  std::string opening_problem_;
  std::vector<std::string> pack_problems_;
  std::vector<Pack> packs_;
  std::optional<Disk> disk_;

  std::mutex quota_mutex_;
  Usage usage_;                   ///< of the directory when it was last looked at, and what was published since
  int publishes_until_look_ = 0;  ///< others write there too

  mutable std::mutex mutex_;  ///< never held while building or touching a file
  Counters counters_;
  // By the encoded key rather than its digest, so that a collision of digests cannot hand out the wrong kernel.
  std::unordered_map<std::string, std::shared_ptr<const Entry>> entries_;
  std::unordered_map<std::string, std::shared_ptr<Flight>> flights_;
};

Lookup Store::Impl::get(const Key& key, const Build& build, const Substitutes& substitutes, Wait wait) {
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
      return lead(id, *flight, key, build, substitutes);
    }
    if (wait == Wait::never || flight->leader == std::this_thread::get_id()) return {nullptr, Origin::memory, {}, true};
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

Lookup Store::Impl::lead(const std::string& id, Flight& flight, const Key& key, const Build& build,
                         const Substitutes& substitutes) {
  try {
    return build_or_load(id, flight, key, build, substitutes);
  } catch (...) {
    land(id, flight, nullptr, std::current_exception());
    throw;
  }
}

Lookup Store::Impl::build_or_load(const std::string& id, Flight& flight, const Key& key, const Build& build,
                                  const Substitutes& substitutes) {
  Lookup found = load(key, Look::first);
  if (!found.entry && substitutes) load_substitute(substitutes, &found);
  const BuildLock held = found.entry || !build ? BuildLock() : lock(key);
  if (!found.entry && build) {  // another process may have published it meanwhile
    std::string refused = std::move(found.refused);
    found = load(key, Look::again);
    if (!found.entry && found.refused.empty()) found.refused = std::move(refused);
  }
  if (!found.entry && build) {
    Entry built = build();
    built.key = key;
    found.entry = std::make_shared<const Entry>(std::move(built));
    found.origin = Origin::built;
    count(&Counters::builds);
    land(id, flight, found.entry, nullptr);
    publish(*found.entry);
    return found;
  }
  if (found.entry) count(found.origin == Origin::pack ? &Counters::pack_hits : &Counters::disk_hits);
  land(id, flight, found.entry, nullptr);
  return found;
}

Lookup Store::Impl::load(const Key& key, Look look) {
  Lookup found;
  if (look == Look::first && load_from_packs(key, &found)) return found;
  if (!disk_) return found;
  Disk::Found stored = disk_->load(key);
  found.origin = Origin::disk;
  found.entry = taken(std::move(stored.entry), stored.damage, look, &found.refused);
  return found;
}

bool Store::Impl::load_from_packs(const Key& key, Lookup* found) {
  found->origin = Origin::pack;
  for (const Pack& pack : packs_) {
    Pack::Found stored = pack.load(key);
    found->entry = taken(std::move(stored.entry), stored.damage, Look::first, &found->refused);
    if (found->entry) return true;
  }
  return false;
}

void Store::Impl::load_substitute(const Substitutes& substitutes, Lookup* found) {
  if (packs_.empty()) return;
  for (const Key& key : substitutes()) {
    Lookup substitute;
    if (load_from_packs(key, &substitute)) {
      *found = std::move(substitute);
      return;
    }
    if (found->refused.empty()) found->refused = std::move(substitute.refused);
  }
}

std::shared_ptr<const Entry> Store::Impl::taken(std::optional<Entry> entry, const std::string& damage, Look look,
                                                std::string* refused) {
  if (!damage.empty()) {
    if (look == Look::first) count(&Counters::damaged);
    *refused = damage;
    warnings_.once(Cause::damage, fmt::format("A stored kernel failed its check and is not used: {}.", damage));
  }
  if (!entry) return nullptr;
  std::string refusal = accept_.refusal(*entry);
  if (refusal.empty()) return std::make_shared<const Entry>(std::move(*entry));
  if (look == Look::first) count(&Counters::unaccepted);
  *refused = std::move(refusal);
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
    const std::uint64_t bytes = encoded_size(entry) + entry.source.size();
    if (limits_.bytes != 0 && bytes > limits_.bytes) {
      problem = fmt::format("{} bytes are more than it may hold", bytes);
    } else if (disk_->publish(entry, &problem)) {
      return keep_within_limits(entry);
    }
    count(&Counters::publish_failures);
    warnings_.once(Cause::publish, fmt::format("Compiled kernels stay in memory: {} refused one ({}).",
                                               disk_->root().string(), problem));
  } catch (...) {
    count(&Counters::publish_failures);
  }
}

void Store::Impl::keep_within_limits(const Entry& entry) {
  constexpr int kPublishesBetweenLooks = 64;
  if (limits_ == Limits{}) return;
  const std::scoped_lock lock(quota_mutex_);
  if (publishes_until_look_ <= 0) {
    usage_ = disk_->usage();
    publishes_until_look_ = kPublishesBetweenLooks;
  } else {
    --publishes_until_look_;
    ++usage_.entries;
    usage_.bytes += encoded_size(entry) + entry.source.size();
  }
  const bool full = (limits_.bytes != 0 && usage_.bytes > limits_.bytes) ||
                    (limits_.entries != 0 && usage_.entries > limits_.entries);
  if (!full) return;
  const Collected collected = disk_->collect(limits_);
  usage_ = collected.left;
  const std::scoped_lock counting(mutex_);
  counters_.evictions += collected.removed.entries;
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
  impl_->tell_opening_problems();
}

Store::Store(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Store::~Store() = default;

Lookup Store::get(const Key& key, const Build& build, const Substitutes& substitutes, Wait wait) {
  return impl_->get(key, build, substitutes, wait);
}

Counters Store::counters() const {
  return impl_->counters();
}

const std::vector<std::string>& Store::pack_problems() const noexcept {
  return impl_->pack_problems();
}

const std::filesystem::path& Store::directory() const noexcept {
  return impl_->directory();
}

namespace {

auto sort_key(const Key& key) {
  return std::tie(key.target, key.spec, key.options, key.templates, key.unit);
}

/// Sizes and time of use, from the file system.
void add_file_facts(const std::filesystem::path& path, StoredEntry* item) {
  platform::Status status;
  if (!platform::status_at(platform::kHere, path, &status)) return;
  item->file_bytes = status.bytes;
  item->last_used = std::chrono::system_clock::from_time_t(static_cast<std::time_t>(status.modified.seconds));
  const std::filesystem::path source = std::filesystem::path(path).replace_extension(".cu");
  if (platform::status_at(platform::kHere, source, &status)) item->file_bytes += status.bytes;
}

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
  using Identity = std::tuple<std::filesystem::path, std::vector<std::filesystem::path>, std::vector<std::string>,
                              Acceptance, Limits>;
  static std::map<Identity, std::weak_ptr<Store>> stores;
  const Identity identity(canonical_directory(options.directory), options.packs, options.pack_sha256, options.accept,
                          options.limits);
  std::shared_ptr<Store> store;
  {
    const std::scoped_lock lock(mutex);
    std::erase_if(stores, [](const auto& item) { return item.second.expired(); });
    std::weak_ptr<Store>& slot = stores[identity];
    if (std::shared_ptr<Store> existing = slot.lock()) return existing;
    store.reset(new Store(std::make_unique<Impl>(options)));
    slot = store;
  }
  store->impl_->tell_opening_problems();
  return store;
}

std::vector<Entry> list_entries(const std::filesystem::path& directory, int* damaged) {
  if (damaged != nullptr) *damaged = 0;
  std::vector<Entry> entries;
  Disk::existing(directory).visit([&](const auto&, std::optional<Entry> entry, const std::string&) {
    if (entry) {
      entries.push_back(std::move(*entry));
    } else if (damaged != nullptr) {
      ++*damaged;
    }
  });
  std::ranges::sort(entries, [](const Entry& a, const Entry& b) { return sort_key(a.key) < sort_key(b.key); });
  return entries;
}

std::vector<StoredEntry> list_stored(const std::filesystem::path& directory) {
  std::vector<StoredEntry> stored;
  Disk::existing(directory).visit([&](const auto& path, std::optional<Entry> entry, const std::string& problem) {
    StoredEntry item;
    item.path = path;
    item.problem = problem;
    add_file_facts(path, &item);
    if (entry) {
      item.entry = std::move(*entry);
      item.cubin_bytes = item.entry.cubin.size();
      item.entry.cubin = {};
    }
    stored.push_back(std::move(item));
  });
  std::ranges::sort(
      stored, [](const StoredEntry& a, const StoredEntry& b) { return sort_key(a.entry.key) < sort_key(b.entry.key); });
  return stored;
}

Usage directory_usage(const std::filesystem::path& directory) {
  return Disk::existing(directory).usage();
}

Collected collect_garbage(const std::filesystem::path& directory, const Garbage& garbage) {
  const Disk disk = Disk::existing(directory);
  disk.remove_stale_files();
  if (garbage.other_versions) disk.remove_other_versions();
  Collected result;
  if (garbage.damaged) {
    const Usage before = disk.usage();
    disk.visit([&](const auto& path, const std::optional<Entry>& entry, const std::string&) {
      if (!entry) disk.remove(path);
    });
    const Usage after = disk.usage();
    result.removed = {before.entries - after.entries, before.bytes - after.bytes};
  }
  const Collected collected = disk.collect(garbage.limits);
  result.removed.entries += collected.removed.entries;
  result.removed.bytes += collected.removed.bytes;
  result.left = collected.left;
  return result;
}

std::filesystem::path default_directory(std::string* problem) {
  std::string ignored;
  std::string& passed_over = problem != nullptr ? *problem : ignored;
  passed_over.clear();
  const auto absolute = [&passed_over](const char* name) {
    std::filesystem::path path = platform::environment_path(name);
    if (path.is_absolute()) return path;
    if (!path.empty() && passed_over.empty()) {
      passed_over = fmt::format("{} = {} is not an absolute path", name, path.string());
    }
    return std::filesystem::path();
  };
  if (std::filesystem::path own = absolute("FA_CACHE_DIR"); !own.empty()) return own;
  std::string names = "FA_CACHE_DIR";
  const std::span<const platform::CachePlace> places = platform::cache_places();
  for (const platform::CachePlace& place : places) {
    if (const std::filesystem::path root = absolute(place.variable); !root.empty())
      return (root / place.below).make_preferred();
    names += fmt::format("{}{}", &place == &places.back() ? " and " : ", ", place.variable);
  }
  if (passed_over.empty()) passed_over = fmt::format("none of {} is set", names);
  return {};
}

}  // namespace fa::cache
