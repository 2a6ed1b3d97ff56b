#ifndef FA_SRC_API_CALL_MEMO_HPP_
#define FA_SRC_API_CALL_MEMO_HPP_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>

namespace fa::api {

/// A few entries by a number that calls derive from themselves. Threads share them, and nobody waits: what is in use is
/// not replaced, and what is being written is not found. Nothing is allocated after construction.
template <class Entry>
class CallMemo {
  struct alignas(64) Users {    // a line of the cache each
    std::atomic<int> count{0};  ///< negative while the entry is written
  };

 public:
  static constexpr std::size_t kSlots = 8;

  /// An entry that stays as it is meanwhile, or none.
  class Held {
   public:
    Held() = default;
    Held(Users& users, const Entry& entry) noexcept : users_(&users), entry_(&entry) {}
    Held(Held&& other) noexcept : users_(std::exchange(other.users_, nullptr)), entry_(other.entry_) {}
    Held& operator=(Held&&) = delete;
    ~Held() {
      if (users_ != nullptr) users_->count.fetch_sub(1, std::memory_order_release);
    }

    explicit operator bool() const noexcept { return users_ != nullptr; }
    const Entry& operator*() const noexcept { return *entry_; }
    const Entry* operator->() const noexcept { return entry_; }

   private:
    Users* users_ = nullptr;
    const Entry* entry_ = nullptr;
  };

  /// That of `code`, which is not 0.
  Held find(std::uint64_t code) noexcept {
    for (std::size_t i = 0; i < kSlots; ++i) {
      if (codes_[i].load(std::memory_order_relaxed) != code) continue;
      const bool readable = users_[i].count.fetch_add(1, std::memory_order_acquire) >= 0;
      Held held(users_[i], *at(i));
      if (readable && codes_[i].load(std::memory_order_relaxed) == code) return held;
    }
    return {};
  }

  /// Whether `code` was asked about lately: what comes once is worth no entry.
  bool was_asked(std::uint64_t code) noexcept {
    std::atomic<std::uint64_t>& last = asked_[code % kAsked];
    if (last.load(std::memory_order_relaxed) == code) return true;
    last.store(code, std::memory_order_relaxed);
    return false;
  }

  /// Makes the entry of `code` of what `make()` gives, in the place of the same code's or of an old one that nobody
  /// uses. It does not throw.
  template <class Make>
  void put(std::uint64_t code, const Make& make) noexcept {
    for (std::size_t i = 0; i < kSlots; ++i) {
      if (codes_[i].load(std::memory_order_relaxed) == code && replace(i, code, make)) return;
    }
    for (std::size_t tries = 0; tries < kSlots; ++tries) {
      if (replace(oldest_.fetch_add(1, std::memory_order_relaxed) % kSlots, code, make)) return;
    }
  }

 private:
  static_assert(std::is_trivially_destructible_v<Entry>);
  static constexpr std::size_t kAsked = 32;
  static constexpr int kWriting = -(1 << 30);  // far more than there are threads

  struct Place {
    alignas(Entry) std::byte bytes[sizeof(Entry)];
  };

  Entry* at(std::size_t i) noexcept { return std::launder(reinterpret_cast<Entry*>(places_[i].bytes)); }

  template <class Make>
  bool replace(std::size_t i, std::uint64_t code, const Make& make) noexcept {
    int nobody = 0;
    if (!users_[i].count.compare_exchange_strong(nobody, kWriting, std::memory_order_acquire)) return false;
    ::new (static_cast<void*>(places_[i].bytes)) Entry(make());
    codes_[i].store(code, std::memory_order_relaxed);
    users_[i].count.fetch_sub(kWriting, std::memory_order_release);
    return true;
  }

  std::array<std::atomic<std::uint64_t>, kSlots> codes_{};
  std::array<std::atomic<std::uint64_t>, kAsked> asked_{};
  std::atomic<std::size_t> oldest_{0};
  std::array<Users, kSlots> users_;
  /// Not touched before there are entries.
  std::unique_ptr<Place[]> places_ = std::make_unique_for_overwrite<Place[]>(kSlots);
};

}  // namespace fa::api

#endif  // FA_SRC_API_CALL_MEMO_HPP_
