#ifndef FA_TOOLS_FA_BENCH_BLOCKS_HPP_
#define FA_TOOLS_FA_BENCH_BLOCKS_HPP_

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <fa/tensor.hpp>

namespace fa::cli {

/// A seeded block of standard normal numbers, encoded as `dtype`. Its length is prime, so that no two rows of a tensor
/// that is tiled with it are equal.
std::vector<std::byte> normal_block(DType dtype, std::uint64_t seed);

/// Latent rows of standard normal numbers.
std::vector<std::byte> latent_rows(std::uint64_t seed);

/// What elements of normal_block are times of: 1 but for i8.
float scale_of_block(DType dtype);
/// What a code of u4x2 stands for there: scale and offset.
inline constexpr std::array<double, 2> kPairOfBlock{0.375, -2.8125};

}  // namespace fa::cli

#endif  // FA_TOOLS_FA_BENCH_BLOCKS_HPP_
