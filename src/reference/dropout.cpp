#include "reference/dropout.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <vector>

#include "reference/parallel.hpp"

namespace fa::reference {
namespace {

using Words = std::array<std::uint32_t, 4>;

constexpr int kRounds = 7;
constexpr double kDraws = 65536;

std::uint32_t high(std::uint64_t x) {
  return static_cast<std::uint32_t>(x >> 32);
}
std::uint32_t low(std::uint64_t x) {
  return static_cast<std::uint32_t>(x);
}

/// How many patterns of 16 bits are f16 numbers less than `draw`, itself a number. There are 0x7c00 negative ones, two
/// zeros of the same rank, and as many positive ones.
std::uint32_t rank(std::uint32_t draw) {
  const std::uint32_t magnitude = draw & 0x7fff;
  if (magnitude == 0) return 0x7c00;
  return draw >= 0x8000 ? 0x7c00 - magnitude : 0x7c01 + magnitude;
}

/// Whether the rank of a draw is less than `count`, which holds for `count` of the draws if it is a rank itself.
bool ranks_below(std::uint32_t draw, std::uint32_t count) {
  return (draw & 0x7fff) <= 0x7c00 && rank(draw) < count;
}
bool is_rank(std::uint32_t count) {
  return count <= 0xf801 && count != 0x7c01;
}

}  // namespace

Words philox(Words counter, std::uint64_t key) noexcept {
  std::uint32_t key0 = low(key);
  std::uint32_t key1 = high(key);
  for (int round = 0; round < kRounds; ++round) {
    const std::uint64_t product0 = std::uint64_t{0xd2511f53} * counter[0];
    const std::uint64_t product1 = std::uint64_t{0xcd9e8d57} * counter[2];
    counter = {high(product1) ^ counter[1] ^ key0, low(product1), high(product0) ^ counter[3] ^ key1, low(product0)};
    key0 += 0x9e3779b9;
    key1 += 0xbb67ae85;
  }
  return counter;
}

Words spread(std::uint32_t first, std::uint32_t second) noexcept {
  constexpr std::uint32_t kLow = 0x00ff00ff;
  const std::uint32_t turned_first = std::rotl(first, 8);
  const std::uint32_t turned_second = std::rotl(second, 8);
  return {first ^ (second & kLow), turned_first ^ (turned_second & kLow), second ^ (turned_first & kLow),
          turned_second ^ (first & kLow)};
}

bool keeps(std::uint32_t draw, std::uint32_t dropped) noexcept {
  return is_rank(dropped) ? !ranks_below(draw, dropped) : ranks_below(draw, 65536 - dropped);
}

DropoutMask::DropoutMask(double probability, std::uint64_t seed, std::uint64_t offset) : seed_(seed), offset_(offset) {
  dropped_ = static_cast<std::uint32_t>(std::clamp(std::round(probability * kDraws), 0.0, kDraws - 1));
  scale_ = kDraws / (kDraws - dropped_);
}

DropoutMask DropoutMask::part(std::int64_t first_head, std::int64_t first_row, std::int64_t first_key) const noexcept {
  DropoutMask result = *this;
  result.offset_ += static_cast<std::uint64_t>(first_head);
  result.first_row_ += first_row;
  result.first_key_ += first_key;
  return result;
}

void DropoutMask::row(std::int64_t head, std::int64_t row, std::int64_t first_key, std::int64_t count,
                      std::uint8_t* keep) const {
  const std::uint64_t stream = offset_ + static_cast<std::uint64_t>(head);
  row += first_row_;
  const auto row_word = static_cast<std::uint32_t>(row / 16 * 4 + row % 8 / 2);
  const std::size_t row_half = row % 16 >= 8 ? 1 : 0;
  for (std::int64_t j = 0; j < count; ++j) {
    const std::int64_t key = first_key_ + first_key + j;
    const auto key_word = static_cast<std::uint32_t>(key / 16 * 4 + key % 8 / 2);
    const Words words = philox({low(stream), key_word, high(stream), row_word}, seed_);
    const std::size_t pair = (row + key / 16) % 2 != 0 ? 2 : 0;
    const std::uint32_t both = spread(words[pair], words[pair + 1])[(key % 16 >= 8 ? 2U : 0U) + row_half];
    const std::uint32_t draw = key % 2 == 0 ? both & 0xffff : both >> 16;
    keep[j] = keeps(draw, dropped_) ? 1 : 0;
  }
}

void dropout_mask(const DropoutMask& mask, std::int64_t b, std::int64_t h_q, std::int64_t s_q, std::int64_t s_kv,
                  std::uint8_t* keep) {
  const std::int64_t rows = b * h_q * s_q;
  if (rows == 0 || s_kv == 0) return;
  std::vector<char> workers(static_cast<std::size_t>(thread_count(rows, 20.0 * static_cast<double>(s_kv))));
  parallel_for(rows, workers, [&](char&, std::int64_t index) noexcept {
    mask.row(index / s_q, index % s_q, 0, s_kv, keep + index * s_kv);
  });
}

}  // namespace fa::reference
