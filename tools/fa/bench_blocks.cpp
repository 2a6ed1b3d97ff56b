#include "bench_blocks.hpp"

#include <cstring>
#include <random>

#include "api/validate.hpp"
#include "elements.hpp"

namespace fa::cli {
namespace {

constexpr std::size_t kBlockElements = 1048573;  // the greatest prime below 2^20

}  // namespace

std::vector<std::byte> normal_block(DType dtype, std::uint64_t seed) {
  std::mt19937_64 generator(seed);
  std::normal_distribution<double> normal;
  std::vector<std::byte> block(kBlockElements * size_of(dtype));
  const double scale = scale_of_block(dtype);
  for (std::size_t i = 0; i < kBlockElements; ++i) {
    if (dtype == DType::u4x2) {
      block[i] = static_cast<std::byte>(generator());
      continue;
    }
    store_element(block.data(), dtype, i, normal(generator) / scale);
  }
  return block;
}

std::vector<std::byte> latent_rows(std::uint64_t seed) {
  constexpr std::size_t kRows = 64, kCodes = 512, kScales = 4, kRotary = 64, kRow = api::kLatentRowBytes;
  static_assert(kCodes + kScales * sizeof(float) + 2 * kRotary == kRow);
  std::mt19937_64 generator(seed);
  std::normal_distribution<double> normal;
  std::vector<std::byte> block(kRows * kRow);
  for (std::size_t row = 0; row < kRows; ++row) {
    std::byte* const begin = block.data() + row * kRow;
    const float one = 1;
    for (std::size_t i = 0; i < kCodes; ++i) store_element(begin, DType::e4m3, i, normal(generator));
    for (std::size_t i = 0; i < kScales; ++i) std::memcpy(begin + kCodes + i * sizeof one, &one, sizeof one);
    std::byte* const rotary = begin + kCodes + kScales * sizeof one;
    for (std::size_t i = 0; i < kRotary; ++i) store_element(rotary, DType::bf16, i, normal(generator));
  }
  return block;
}

float scale_of_block(DType dtype) {
  return dtype == DType::i8 ? 1.F / 32 : 1.F;
}

}  // namespace fa::cli
