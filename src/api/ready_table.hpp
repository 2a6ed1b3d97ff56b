#ifndef FA_SRC_API_READY_TABLE_HPP_
#define FA_SRC_API_READY_TABLE_HPP_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace fa::api {

/// What is ready to run, by a number that calls derive from their shapes. Looking up takes no lock and allocates
/// nothing; what was found stays valid for the life of the table, replaced or not.
template <typename Ready>
class ReadyTable {
 public:
  ReadyTable() { grow(kFirstSlots); }

  /// nullptr when there is none. `code` is not 0.
  const Ready* find(std::uint64_t code) const noexcept {
    const Slots& slots = *slots_.load(std::memory_order_acquire);
    for (std::size_t i = slots.start(code);; i = slots.after(i)) {
      const std::uint64_t found = slots.codes[i].load(std::memory_order_acquire);
      if (found == code) return slots.values[i].load(std::memory_order_acquire);
      if (found == 0) return nullptr;
    }
  }

  /// Puts `ready` in the place of what stands there.
  const Ready& put(std::uint64_t code, Ready ready) {
    const std::scoped_lock lock(mutex_);
    return place(code, std::move(ready), true);
  }

  /// All that was ever put, while nothing is.
  template <typename Visit>
  void for_each(const Visit& visit) {
    const std::scoped_lock lock(mutex_);
    for (const Ready& ready : kept_) visit(ready);
  }

  /// Keeps what stands there, if anything does.
  const Ready& put_first(std::uint64_t code, Ready ready) {
    const std::scoped_lock lock(mutex_);
    return place(code, std::move(ready), false);
  }

 private:
  static constexpr std::size_t kFirstSlots = 32;  // a power of two

  struct Slots {
    explicit Slots(std::size_t size) : codes(size), values(size) {}
    std::size_t start(std::uint64_t code) const noexcept {
      return static_cast<std::size_t>(code * 0x9e3779b97f4a7c15u >> 32) & (codes.size() - 1);
    }
    std::size_t after(std::size_t i) const noexcept { return (i + 1) & (codes.size() - 1); }
    std::size_t place_of(std::uint64_t code) const noexcept {
      std::size_t i = start(code);
      while (codes[i].load(std::memory_order_relaxed) != 0 && codes[i].load(std::memory_order_relaxed) != code) {
        i = after(i);
      }
      return i;
    }
    void set(std::uint64_t code, const Ready* value) noexcept {
      const std::size_t i = place_of(code);
      values[i].store(value, std::memory_order_release);  // first: who sees the code sees the value
      codes[i].store(code, std::memory_order_release);
    }
    std::vector<std::atomic<std::uint64_t>> codes;
    std::vector<std::atomic<const Ready*>> values;
  };

  const Ready& place(std::uint64_t code, Ready ready, bool replace) {
    Slots* slots = all_slots_.back().get();
    const std::size_t i = slots->place_of(code);
    const bool is_new = slots->codes[i].load(std::memory_order_relaxed) == 0;
    if (!is_new && !replace) return *slots->values[i].load(std::memory_order_relaxed);
    kept_.push_back(std::move(ready));
    if (is_new && 2 * ++used_ > slots->codes.size()) slots = grow(2 * slots->codes.size());
    slots->set(code, &kept_.back());
    return kept_.back();
  }

  /// Readers may still be in the old slots, which therefore stay.
  Slots* grow(std::size_t size) {
    auto larger = std::make_unique<Slots>(size);
    if (!all_slots_.empty()) {
      const Slots& old = *all_slots_.back();
      for (std::size_t i = 0; i < old.codes.size(); ++i) {
        const std::uint64_t code = old.codes[i].load(std::memory_order_relaxed);
        if (code != 0) larger->set(code, old.values[i].load(std::memory_order_relaxed));
      }
    }
    all_slots_.push_back(std::move(larger));
    slots_.store(all_slots_.back().get(), std::memory_order_release);
    return all_slots_.back().get();
  }

  std::atomic<const Slots*> slots_{nullptr};
  std::mutex mutex_;  ///< guards what follows
  std::vector<std::unique_ptr<Slots>> all_slots_;
  std::deque<Ready> kept_;  ///< never moves its elements
  std::size_t used_ = 0;
};

}  // namespace fa::api

#endif  // FA_SRC_API_READY_TABLE_HPP_
