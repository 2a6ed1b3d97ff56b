#ifndef FA_TESTS_EMULATOR_SM90_BACKWARD_CASES_HPP_
#define FA_TESTS_EMULATOR_SM90_BACKWARD_CASES_HPP_

#include <cstddef>

#include "emulator/packed_run.hpp"
#include "emulator/sm90_backward_variants.hpp"

namespace emulator {

/// What the kernels of sm90_backward_variants() are run on: lengths, heads and sequences of every kind.
constexpr std::size_t kSm90BackwardCases = 3;
PackedCase sm90_backward_case(const Sm90BackwardVariant& variant, std::size_t index);

/// The functions of a case; captures have an entry for every sequence.
fa::test::VariantCase variant_of(const Sm90BackwardVariant& variant, const PackedCase& c);

}  // namespace emulator

#endif  // FA_TESTS_EMULATOR_SM90_BACKWARD_CASES_HPP_
