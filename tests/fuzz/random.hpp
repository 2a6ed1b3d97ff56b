#ifndef FA_TESTS_FUZZ_RANDOM_HPP_
#define FA_TESTS_FUZZ_RANDOM_HPP_

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace fa::fuzz {

/// Numbers that follow from a seed and an index alone, on every platform (SplitMix64).
class Random {
 public:
  explicit Random(std::uint64_t seed, std::uint64_t index = 0) : state_(mix(mix(seed) + index)) {}

  std::uint64_t next() { return mix(state_ += 0x9e3779b97f4a7c15); }

  /// From 0 to before `count`.
  std::uint64_t below(std::uint64_t count) { return next() % count; }
  std::size_t index(std::size_t count) { return static_cast<std::size_t>(below(count)); }
  std::int64_t between(std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(below(static_cast<std::uint64_t>(high - low) + 1));
  }
  bool one_in(std::uint64_t count) { return below(count) == 0; }

  template <class Item, std::size_t kCount>
  Item pick(const Item (&items)[kCount]) {
    return items[index(kCount)];
  }

  /// Mostly values at which something ends.
  std::int64_t wild() {
    constexpr std::int64_t kEdges[] = {0, 1, 2, 3, 5, 7, 8, 64, 99, 255, 256, 257, 4096, 65535, 65536, 1000000};
    if (one_in(3)) return one_in(3) ? -pick(kEdges) : pick(kEdges);
    const std::uint64_t power = std::uint64_t{1} << below(64);
    const std::uint64_t near = power + below(5) - 2;
    return std::bit_cast<std::int64_t>(one_in(3) ? next() >> below(64) : one_in(3) ? ~near : near);
  }
  std::int32_t wild32() { return static_cast<std::int32_t>(static_cast<std::uint32_t>(wild())); }

 private:
  static std::uint64_t mix(std::uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
  }

  std::uint64_t state_;
};

}  // namespace fa::fuzz

#endif  // FA_TESTS_FUZZ_RANDOM_HPP_
