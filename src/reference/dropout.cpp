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
constexpr int kRoundsOfCommon = 3;  // in front of which a call's common byte is read
constexpr double kDraws = 65536;

std::uint32_t high(std::uint64_t x) {
  return static_cast<std::uint32_t>(x >> 32);
}
std::uint32_t low(std::uint64_t x) {
  return static_cast<std::uint32_t>(x);
}

Words rounds(Words counter, std::uint64_t key, int begin, int end) noexcept {
  for (int round = begin; round < end; ++round) {
    const auto step = static_cast<std::uint32_t>(round);
    const std::uint64_t product0 = std::uint64_t{0xd2511f53} * counter[0];
    const std::uint64_t product1 = std::uint64_t{0xcd9e8d57} * counter[2];
    counter = {high(product1) ^ counter[1] ^ (low(key) + step * 0x9e3779b9), low(product1),
               high(product0) ^ counter[3] ^ (high(key) + step * 0xbb67ae85), low(product0)};
  }
  return counter;
}

}  // namespace

Words philox(Words counter, std::uint64_t key) noexcept {
  return rounds(counter, key, 0, kRounds);
}

Call::Call(Words counter, std::uint64_t key) noexcept {
  counter = rounds(counter, key, 0, kRoundsOfCommon);
  common_ = (counter[1] ^ counter[3]) >> 24;
  const Words words = rounds(counter, key, kRoundsOfCommon, kRounds);
  const Words added = added_bits(words);
  std::copy(added.begin(), added.end(), bits_.begin());
  std::copy(words.begin(), words.end(), bits_.begin() + added.size());
}

Words added_bits(const Words& words) noexcept {
  constexpr std::array<int, 4> kFirst{12, 11, 15, 16}, kSecond{11, 12, 7, 20};
  const std::uint32_t first = words[0] ^ std::rotl(words[1], 6);
  const std::uint32_t second = words[2] ^ std::rotl(words[3], 6);
  Words added{};
  for (std::size_t i = 0; i < added.size(); ++i) added[i] = std::rotl(first, kFirst[i]) ^ std::rotl(second, kSecond[i]);
  return added;
}

std::uint32_t Call::draw(int place) const noexcept {
  std::uint32_t draw = common_;
  for (std::size_t bit = 0; bit < bits_.size(); ++bit) {
    draw |= (bits_[bit] >> static_cast<std::size_t>(place) & 1) << (8 + bit);
  }
  return draw;
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
  const auto row_word = static_cast<std::uint32_t>(row / 32 * 4 + row % 8 / 2);
  for (std::int64_t j = 0; j < count; ++j) {
    const std::int64_t key = first_key_ + first_key + j;
    const auto key_word = static_cast<std::uint32_t>(key / 16 * 4 + key % 8 / 2);
    const Call call({low(stream), key_word, high(stream), row_word}, seed_);
    const std::int64_t place =
        row % 32 / 16 * 16 + (row + key / 16) % 2 * 8 + key % 2 * 4 + key % 16 / 8 * 2 + row % 16 / 8;
    keep[j] = call.draw(static_cast<int>(place)) >= dropped_ ? 1 : 0;
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
