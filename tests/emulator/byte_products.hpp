#ifndef FA_TESTS_EMULATOR_BYTE_PRODUCTS_HPP_
#define FA_TESTS_EMULATOR_BYTE_PRODUCTS_HPP_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "emulator/instructions.hpp"

namespace emulator {

inline constexpr std::size_t kByteDepth = 32;  ///< of a product of 8-bit elements

/// d [rows, columns] += a [rows, 32] b [32, columns], as Hopper's tensor cores add up: the products of an instruction
/// and the accumulator are aligned to the greatest exponent among them, cut off 13 bits below its one, and summed. The
/// sum is cut to 13 bits of fraction too. (The report on DeepSeek-V3, section 3.5.2, speaks of 14 bits.)
void multiply_bytes(Half half_a, Half half_b, const std::vector<std::uint8_t>& a, const std::vector<std::uint8_t>& b,
                    std::vector<float>& d);

/// Likewise of signed bytes. `d` has the bits of sums of 32 bits, which wrap around.
void multiply_whole(const std::vector<std::uint8_t>& a, const std::vector<std::uint8_t>& b, std::vector<float>& d);

}  // namespace emulator

#endif  // FA_TESTS_EMULATOR_BYTE_PRODUCTS_HPP_
