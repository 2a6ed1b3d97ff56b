#ifndef FA_TESTS_DIFFERENTIAL_RANDOM_HPP_
#define FA_TESTS_DIFFERENTIAL_RANDOM_HPP_

#include <cstdint>
#include <initializer_list>
#include <random>

namespace fa::differential {

/// The same numbers on every platform.
class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(mix(seed)) {}

  std::uint64_t bits() { return engine_(); }
  std::int64_t below(std::int64_t end) {
    return static_cast<std::int64_t>(engine_() % static_cast<std::uint64_t>(end < 1 ? 1 : end));
  }
  /// Both ends included.
  std::int64_t between(std::int64_t low, std::int64_t high) { return low + below(high - low + 1); }
  bool percent(int share) { return below(100) < share; }
  template <class T>
  T pick(std::initializer_list<T> values) {
    return values.begin()[below(static_cast<std::int64_t>(values.size()))];
  }
  double uniform() { return static_cast<double>(engine_() >> 11) * 0x1p-53; }
  /// Nearly normal, of variance 1: twelve 16-bit uniforms.
  double normal() {
    std::int64_t sum = 0;
    for (int draw = 0; draw < 3; ++draw) {
      const std::uint64_t word = engine_();
      for (int part = 0; part < 4; ++part) sum += static_cast<std::int64_t>(word >> (16 * part) & 0xffff);
    }
    return (static_cast<double>(sum) - 12 * 32767.5) / 65536;
  }

 private:
  static std::uint64_t mix(std::uint64_t x) {  // splitmix64: neighbours become strangers
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
  }

  std::mt19937_64 engine_;
};

}  // namespace fa::differential

#endif  // FA_TESTS_DIFFERENTIAL_RANDOM_HPP_
