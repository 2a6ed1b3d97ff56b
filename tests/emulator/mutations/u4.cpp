// Mistakes in what reads and writes caches of 4 bits.

#include "emulator/mutations/pieces.hpp"
#include "emulator/mutations/subjects.hpp"
#include "emulator/paged_specs.hpp"

namespace emulator {

std::vector<Mutation> u4_mutations() {
  return in(
      "sm80/sm80_u4.cuh",
      {
          {"u4_depth_of_q_not_permuted",
           "Tile::offset(lane / 4, 8 * (lane % 4)) + Tile::offset(row, k / 2 * 32 + k % 2 * 4)",
           "Tile::offset(lane / 4, 4 * (lane % 4)) + Tile::offset(row, 16 * k)",
           sm80_u4(),
           {}},
          {"u4_scale_of_another_key",
           "const uint32_t own = scales + lane / 4 * kWord;",
           "const uint32_t own = scales + lane % 4 * kWord;",
           sm80_u4(),
           {}},
          {"u4_values_of_one_group",
           "multiply(o, 4 * c + 4, a, b[2], b[3], own + group_of(c + 1) * kPitch * kWord);",
           "multiply(o, 4 * c + 4, a, b[2], b[3], own + group_of(c) * kPitch * kWord);",
           sm80_u4(),
           {}},
          {"u4_values_of_the_lower_keys",
           "numbers(second, high, scales + 8 * kWord);",
           "numbers(second, high, scales);",
           sm80_u4(),
           {}},
          {"u4_columns_of_o_not_restored", "exchange(o[m][n + 1][r], o[m][n + 3][r], lane, 2);", "", sm80_u4(), {}},
      });
}

std::vector<Mutation> u4_number_mutations() {
  return in("common/u4.cuh",
            {
                {"u4_codes_in_the_order_of_bytes", "word >> 4 * kPair", "word >> 4 * (kPair ^ 1)", sm80_u4(), {}},
                {"u4_codes_without_offsets",
                 "pairs[3] = ptx::fma_pair<T>(NibblePairs<T>::template codes<3>(word), scale, offset);",
                 "pairs[3] = ptx::fma_pair<T>(NibblePairs<T>::template codes<3>(word), scale, 0u);",
                 sm80_u4(),
                 {}},
            });
}

}  // namespace emulator
