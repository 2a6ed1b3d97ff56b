#ifndef FA_TESTS_EMULATOR_VARIANT_RUN_HPP_
#define FA_TESTS_EMULATOR_VARIANT_RUN_HPP_

#include <vector>

#include "emulator/memory.hpp"
#include "plan/kernel_spec.hpp"
#include "plan/problem.hpp"
#include "plan/variant_launch.hpp"
#include "support/variant_case.hpp"

namespace emulator {

/// The tensors that a case's functions name, and its sinks, in the emulator's memory; with gradients of them, zero.
struct PlacedVariant {
  PlacedVariant(Memory& memory, const fa::test::VariantCase& c, bool gradients);

  fa::plan::VariantTensors tensors() const { return {views, sink, dsink}; }

  std::vector<fa::expression::CapturedView> views;
  fa::TensorView sink, dsink;
};

/// The elements of a gradient in the emulator's memory; none if it is undefined.
std::vector<float> floats_of(const fa::TensorView& view);

/// What the case adds to a problem.
void add_variant(fa::plan::Problem& problem, const fa::test::VariantCase& c);

/// Has kernels read the place of a call in the emulator's memory: `given`, or without it the one that the problem has.
void put_place_in_memory(Memory& memory, const std::vector<std::int64_t>& given, fa::plan::Problem& problem);

}  // namespace emulator

#endif  // FA_TESTS_EMULATOR_VARIANT_RUN_HPP_
