#ifndef FA_TESTS_EMULATOR_SM90_BACKWARD_VARIANTS_HPP_
#define FA_TESTS_EMULATOR_SM90_BACKWARD_VARIANTS_HPP_

#include <string>
#include <vector>

#include "emulator/backward_run.hpp"
#include "support/variant_case.hpp"

namespace emulator {

/// A Hopper backward kernel with functions, windows, chunks, sinks, packed batches or dropout.
struct Sm90BackwardVariant {
  std::string choice;  ///< of fa::test::variant_choices(), or "plain"
  fa::DType dtype = fa::DType::bf16;
  int d_qk = 64;
  int d_v = 64;
  bool causal = false;
  int tile_m = 64;
  int tile_n = 64;
  bool varlen = false;
  bool dropout = false;
  int splits = 1;
  int split_blocks = 1;
  bool in_turns = false;
  bool deterministic = false;
  float scale = 0;  ///< 0: the default
  fa::Gradients wanted = {};
};

/// Every choice, then combinations of all of it drawn at random.
const std::vector<Sm90BackwardVariant>& sm90_backward_variants();

/// The configuration of a kernel for a case, whatever the lengths are.
fa::test::VariantCase variant_case(const Sm90BackwardVariant& variant, const fa::test::AttentionCase& attention);

/// What the planner makes of it.
BackwardSpecs backward_specs_of(const Sm90BackwardVariant& variant);

}  // namespace emulator

#endif  // FA_TESTS_EMULATOR_SM90_BACKWARD_VARIANTS_HPP_
