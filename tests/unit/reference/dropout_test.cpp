#include "reference/dropout.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bitset>
#include <cmath>
#include <utility>
#include <vector>

namespace fa::reference {
namespace {

constexpr std::int64_t kHeads = 4;
constexpr std::int64_t kRows = 192;
constexpr std::int64_t kKeys = 256;

std::vector<std::uint8_t> draw(const DropoutMask& mask) {
  std::vector<std::uint8_t> keep(kHeads * kRows * kKeys);
  dropout_mask(mask, 1, kHeads, kRows, kKeys, keep.data());
  return keep;
}

/// Correlation of two masks, at places `shift` apart; 0 +- 1 / sqrt(n) for independent ones.
double correlation(const std::vector<std::uint8_t>& a, const std::vector<std::uint8_t>& b, std::size_t shift) {
  const std::size_t n = a.size() - shift;
  double sum_a = 0, sum_b = 0, both = 0;
  for (std::size_t i = 0; i < n; ++i) {
    sum_a += a[i];
    sum_b += b[i + shift];
    both += a[i] * b[i + shift];
  }
  const auto count = static_cast<double>(n);
  const double p = sum_a / count, q = sum_b / count;
  return (both / count - p * q) / std::sqrt(p * (1 - p) * q * (1 - q));
}

/// Test vectors of the generator's authors (Random123, kat_vectors).
TEST(Philox, IsTheGeneratorOfItsAuthors) {
  using Words = std::array<std::uint32_t, 4>;
  EXPECT_EQ(philox({0, 0, 0, 0}, 0), (Words{0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}));
  constexpr std::uint32_t kOnes = 0xffffffff;
  EXPECT_EQ(philox({kOnes, kOnes, kOnes, kOnes}, ~std::uint64_t{0}),
            (Words{0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662}));
}

TEST(Call, EveryBitOfTheGeneratorIsOfOneDraw) {
  using Words = std::array<std::uint32_t, 4>;
  for (std::uint32_t i = 0; i < 100; ++i) {
    const Words counter{i, 3 * i, 7, i << 20};
    const Call call(counter, 11);
    Words words{}, sums{};
    for (int place = 0; place < 32; ++place) {
      const std::uint32_t draw = call.draw(place);
      for (std::size_t bit = 0; bit < 4; ++bit) {
        sums[bit] |= (draw >> (8 + bit) & 1) << place;
        words[bit] |= (draw >> (12 + bit) & 1) << place;
      }
    }
    EXPECT_EQ(words, philox(counter, 11));
    EXPECT_EQ(sums, added_bits(words));
  }
}

/// Sums modulo 2 of a call's 128 bits.
using Sum = std::bitset<128>;

/// Which bits of a call's words those of each high byte are: they are sums of them.
std::array<std::array<Sum, 8>, 32> bits_of_high_bytes() {
  std::array<std::array<Sum, 8>, 32> bits;
  for (std::size_t source = 0; source < 128; ++source) {
    std::array<std::uint32_t, 4> words{};
    words[source / 32] = std::uint32_t{1} << source % 32;
    const std::array<std::uint32_t, 4> sums = added_bits(words);
    for (std::size_t place = 0; place < 32; ++place) {
      for (std::size_t i = 0; i < 4; ++i) {
        bits[place][i][source] = (sums[i] >> place & 1) != 0;
        bits[place][4 + i][source] = (words[i] >> place & 1) != 0;
      }
    }
  }
  return bits;
}

/// Gaussian elimination, a row at a time.
class Elimination {
 public:
  /// Whether none of `rows` is a sum of others and of those before.
  bool adds(const std::array<Sum, 8>& rows) {
    return std::all_of(rows.begin(), rows.end(), [this](const Sum& row) { return adds(row); });
  }

 private:
  bool adds(Sum row) {
    for (const auto& [pivot, reduced] : rows_) {
      if (row[pivot]) row ^= reduced;
    }
    if (row.none()) return false;
    std::size_t pivot = 0;
    while (!row[pivot]) ++pivot;
    rows_.emplace_back(pivot, row);
    return true;
  }

  std::vector<std::pair<std::size_t, Sum>> rows_;
};

/// 32 sums of which none is a sum of others are independent if the bits of a call are.
TEST(Call, AnyFourHighBytesAreIndependent) {
  const auto bits = bits_of_high_bytes();
  int quadruples = 0;
  for (std::size_t a = 0; a < 32; ++a) {
    Elimination one;
    ASSERT_TRUE(one.adds(bits[a]));
    for (std::size_t b = a + 1; b < 32; ++b) {
      Elimination two = one;
      ASSERT_TRUE(two.adds(bits[b])) << a << ' ' << b;
      for (std::size_t c = b + 1; c < 32; ++c) {
        Elimination three = two;
        ASSERT_TRUE(three.adds(bits[c])) << a << ' ' << b << ' ' << c;
        for (std::size_t d = c + 1; d < 32; ++d, ++quadruples) {
          Elimination four = three;
          ASSERT_TRUE(four.adds(bits[d])) << a << ' ' << b << ' ' << c << ' ' << d;
        }
      }
    }
  }
  EXPECT_EQ(quadruples, 35960);
}

/// They are numbers of a lattice that the seed shifts: more even than random ones.
TEST(Call, LowBytesAreFair) {
  constexpr std::uint32_t kCalls = 256;
  std::array<double, 256> counts{};
  double below = 0;
  std::array<double, 2> both{};
  const auto low = [](std::uint32_t row, std::uint32_t column) { return Call({5, column, 0, row}, 99).draw(3) & 255; };
  for (std::uint32_t row = 0; row < kCalls; ++row) {
    for (std::uint32_t column = 0; column < kCalls; ++column) {
      EXPECT_EQ(low(row, column), Call({5, column, 0, row}, 99).draw(28) & 255) << "all elements of a call share it";
      const double sign = low(row, column) < 128 ? 1 : -1;
      ++counts[low(row, column)];
      below += sign;
      both[0] += sign * (low(row, column + 1) < 128 ? 1 : -1);
      both[1] += sign * (low(row + 1, column) < 128 ? 1 : -1);
    }
  }
  const double calls = kCalls * kCalls;
  double chi_squared = 0;
  for (const double count : counts) chi_squared += (count - calls / 256) * (count - calls / 256) / (calls / 256);
  EXPECT_LT(chi_squared, 256 + 4 * std::sqrt(512));
  EXPECT_LT(std::abs(below / calls), 0.01);
  for (const double sum : both) EXPECT_LT(std::abs(sum / calls), 0.25) << "neighbours may share it, but not all do";
}

/// Three at a time, of all that a call decides on: 0 +- 1 / sqrt(n) for independent ones.
TEST(DropoutMask, ThreeOfACallAreNearlyIndependent) {
  const double p = 0.25 + 0.5 / 256;  // between two bytes: the low one counts
  const std::vector<std::uint8_t> keep = draw({p, 5, 0});
  constexpr std::size_t kKey = 1, kKeys8 = 8, kRow = kKeys, kRows8 = 8 * kKeys, kRows16 = 16 * kKeys;
  constexpr std::array<std::size_t, 8> kOfACall{0,      kKey,          kKeys8,  kRow,
                                                kRows8, kRows8 + kKey, kRows16, kRows16 + kKeys8};
  std::array<double, 56> products{};
  double calls = 0;
  for (std::size_t block = 0; block < keep.size() / (32 * kKeys); ++block) {
    for (std::size_t place = 0; place < 8 * kKeys; ++place) {
      if (place / kKeys % 2 != 0 || place % 2 != 0 || place % 16 >= 8) continue;
      std::size_t triple = 0;
      const auto value = [&](std::size_t i) {
        return (1 - keep[block * 32 * kKeys + place + kOfACall[i]] - p) / std::sqrt(p * (1 - p));
      };
      for (std::size_t i = 0; i < 8; ++i) {
        for (std::size_t j = 0; j < i; ++j) {
          for (std::size_t k = 0; k < j; ++k) products[triple++] += value(i) * value(j) * value(k);
        }
      }
      ++calls;
    }
  }
  for (const double product : products) EXPECT_LT(std::abs(product / calls), 4.5 / std::sqrt(calls));
}

TEST(DropoutMask, KeepsAsManyAsItShould) {
  for (const double p : {0.001, 0.1, 0.5, 0.9, 0.999}) {
    const std::vector<std::uint8_t> keep = draw({p, 42, 0});
    const auto n = static_cast<double>(keep.size());
    const double kept = static_cast<double>(std::count(keep.begin(), keep.end(), 1)) / n;
    const double rounded = std::round(p * 65536) / 65536;
    EXPECT_NEAR(kept, 1 - rounded, 4 * std::sqrt(rounded * (1 - rounded) / n)) << p;
    EXPECT_DOUBLE_EQ(DropoutMask(p, 42, 0).scale(), 1 / (1 - rounded)) << p;
  }
}

TEST(DropoutMask, TheSmallestAndTheLargestProbability) {
  EXPECT_FALSE(DropoutMask(0, 1, 1).active());
  EXPECT_FALSE(DropoutMask(1e-6, 1, 1).active());  // less than half a step
  EXPECT_TRUE(DropoutMask(0x1p-16, 1, 1).active());
  EXPECT_EQ(DropoutMask(1 - 1e-9, 1, 1).scale(), 65536);  // not infinite
}

/// Of every row, column and head, and of every place in the generator's words: 32 rows by 32 keys are 32 calls.
TEST(DropoutMask, EveryPartOfItIsFair) {
  const double p = 0.3;
  const std::vector<std::uint8_t> keep = draw({p, 7, 11});
  const auto expect_fair = [&](const char* part, const auto& index_of, std::size_t parts) {
    std::vector<double> kept(parts), count(parts);
    for (std::int64_t h = 0; h < kHeads; ++h) {
      for (std::int64_t i = 0; i < kRows; ++i) {
        for (std::int64_t j = 0; j < kKeys; ++j) {
          const auto index = static_cast<std::size_t>(index_of(h, i, j));
          kept[index] += keep[static_cast<std::size_t>((h * kRows + i) * kKeys + j)];
          ++count[index];
        }
      }
    }
    double chi_squared = 0;
    const double q = 1 - std::round(p * 65536) / 65536;
    for (std::size_t n = 0; n < parts; ++n) {
      chi_squared += (kept[n] - count[n] * q) * (kept[n] - count[n] * q) / (count[n] * q * (1 - q));
    }
    const auto degrees = static_cast<double>(parts);
    EXPECT_NEAR(chi_squared, degrees, 4 * std::sqrt(2 * degrees)) << part;
  };
  expect_fair(
      "head", [](auto h, auto, auto) { return h; }, kHeads);
  expect_fair(
      "row", [](auto, auto i, auto) { return i; }, kRows);
  expect_fair(
      "key", [](auto, auto, auto j) { return j; }, kKeys);
  expect_fair(
      "place", [](auto, auto i, auto j) { return i % 32 * 32 + j % 32; }, 1024);
  expect_fair(
      "block", [](auto, auto i, auto j) { return i / 32 * (kKeys / 16) + j / 16; }, kRows / 32 * kKeys / 16);
}

TEST(DropoutMask, NeighboursOfEveryKindAreIndependent) {
  const std::vector<std::uint8_t> keep = draw({0.5, 3, 0});
  const double bound = 4 / std::sqrt(static_cast<double>(keep.size() / 2));
  // Neighbouring keys, keys and rows of a call, blocks, heads.
  for (const std::size_t shift : {1, 2, 8, 9, 16, 255, 256, 257, 264, 8 * 256, 8 * 256 + 1, 8 * 256 + 8, 9 * 256,
                                  9 * 256 + 9, 16 * 256, 16 * 256 + 16, 192 * 256}) {
    EXPECT_LT(std::abs(correlation(keep, keep, shift)), bound) << shift;
  }
}

TEST(DropoutMask, DependsOnSeedAndOffset) {
  const std::vector<std::uint8_t> keep = draw({0.5, 3, 1000});
  EXPECT_EQ(keep, draw({0.5, 3, 1000}));
  const double bound = 4 / std::sqrt(static_cast<double>(keep.size()));
  for (const auto& [seed, offset] : {std::pair<std::uint64_t, std::uint64_t>{4, 1000},
                                     {3, 1000 + kHeads},
                                     {3 + (std::uint64_t{1} << 32), 1000},
                                     {3, 1000 + (std::uint64_t{1} << 32)}}) {
    EXPECT_LT(std::abs(correlation(keep, draw({0.5, seed, offset}), 0)), bound) << seed << ' ' << offset;
  }
}

/// The same draws decide for every probability: what a small one drops, a larger one drops too.
TEST(DropoutMask, PartsAndProbabilitiesAgree) {
  const DropoutMask mask(0.5, 3, ~std::uint64_t{0} - 1);  // the offset wraps
  const std::vector<std::uint8_t> keep = draw(mask), more = draw({0.25, 3, ~std::uint64_t{0} - 1});
  for (std::size_t i = 0; i < keep.size(); ++i) ASSERT_LE(keep[i], more[i]);
  std::vector<std::uint8_t> row(37);
  mask.part(2, 100, 51).row(1, 5, 3, 37, row.data());
  EXPECT_TRUE(std::equal(row.begin(), row.end(), keep.begin() + (3 * kRows + 105) * kKeys + 54));
}

}  // namespace
}  // namespace fa::reference
