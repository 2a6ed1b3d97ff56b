#ifndef FA_TESTS_EMULATOR_FORWARD_RUN_HPP_
#define FA_TESTS_EMULATOR_FORWARD_RUN_HPP_

#include <cstdint>
#include <iosfwd>
#include <string>

#include "emulator/emulator.hpp"
#include "emulator/placement.hpp"
#include "plan/kernel_spec.hpp"
#include "support/attention_case.hpp"
#include "support/variant_case.hpp"

namespace emulator {

/// One forward call on one kernel (and the combine kernel, if the kernel splits the keys).
struct ForwardCase {
  fa::plan::KernelSpec spec;
  fa::test::AttentionCase attention;
  Placement placement = Placement::bhsd;
  bool lse = true;
  int splits = 1;
  int heads_in_flight = 1;
  int blocks = 0;                                     ///< of the persistent grid of an sm90 kernel
  const fa::test::AttentionOutputs* state = nullptr;  ///< that the kernel adds to
  const fa::test::VariantCase* variant = nullptr;     ///< what the kernel computes besides, if anything
  std::vector<std::int64_t> place_words = {};         ///< where the place is in memory: instead of the variant's
  bool state_in_memory = false;                       ///< of dropout: seed and offset, 0
};
void PrintTo(const ForwardCase& c, std::ostream* out);

/// Inputs as the case places them: with equal heads when they are broadcast.
fa::test::AttentionInputs make_inputs(const ForwardCase& c);

/// What O and LSE of other keys might be: some rows of them have none, NaN in O.
fa::test::AttentionOutputs make_state(const ForwardCase& c);

/// Both together, in float64; `keys` is.
fa::test::AttentionOutputs joined(const fa::test::AttentionOutputs& keys, const fa::test::AttentionOutputs& state);

/// What a mutant changes about a run.
struct ForwardKernels {
  std::string attention;  ///< registered names
  std::string combine;
};
ForwardKernels kernels_of(const ForwardCase& c);

/// Runs the case and returns O and LSE in row-major tensors. Throws the first Fault, and global_uninitialised for an
/// element of O or LSE that was never written.
fa::test::AttentionOutputs run_forward(const ForwardCase& c, const fa::test::AttentionInputs& inputs,
                                       const ForwardKernels& kernels, std::uint64_t seed);

}  // namespace emulator

#endif  // FA_TESTS_EMULATOR_FORWARD_RUN_HPP_
