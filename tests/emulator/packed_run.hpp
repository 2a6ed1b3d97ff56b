#ifndef FA_TESTS_EMULATOR_PACKED_RUN_HPP_
#define FA_TESTS_EMULATOR_PACKED_RUN_HPP_

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <string>
#include <vector>

#include "emulator/backward_run.hpp"
#include "emulator/forward_run.hpp"
#include "plan/kernel_spec.hpp"
#include "reference/dropout.hpp"
#include "support/attention_case.hpp"
#include "support/gradient_bounds.hpp"
#include "support/variant_case.hpp"

/// Packed batches and dropout on the emulator: the kernels of packed_specs(), launched as the library launches them.
namespace emulator {

/// Cumulative lengths, as a call has them.
struct Sequences {
  std::vector<std::int32_t> cu_q, cu_kv, used_q, used_kv;  ///< used ones may be empty

  std::int64_t count() const { return static_cast<std::int64_t>(cu_q.size()) - 1; }
  fa::PackedSequences view() const;
};

struct PackedCase {
  /// Of a packed batch b is 1, and s_q and s_kv are the rows of the packed tensors.
  fa::test::AttentionCase attention;
  std::optional<Sequences> sequences;
  std::int64_t max_s_q = 0;  ///< 0: as many as there are rows
  std::int64_t max_s_kv = 0;
  float dropout = 0;
  std::uint64_t seed = 0x123456789abcdef0;
  std::uint64_t offset = 0xfffffffffffffff0;  ///< wraps
  bool state_in_memory = false;               ///< of seed and offset
  bool clear = false;                         ///< with a kernel for the rows of no sequence
  bool trust = true;  ///< rows of no sequence can be neither read nor, without `clear`, written; else all can
  bool dlse = false;
  int splits = 1;
  std::uint64_t schedule = 1;
  std::int64_t main_blocks = 0;  ///< of backward's main kernel of the sm90 family, if not those of the library
  std::string main_kernel = {};  ///< registered name of the forward or the main backward kernel, if not its spec's
  /// What is computed besides, if anything; its b counts the sequences.
  const fa::test::VariantCase* variant = nullptr;

  fa::reference::DropoutMask mask() const { return {double{dropout}, seed, offset}; }
};
void PrintTo(const PackedCase& c, std::ostream* out);

/// What the kernels make of `inputs`; without `clear` rows of no sequence keep the NaNs of make_outputs.
fa::test::AttentionOutputs run_packed(const fa::plan::KernelSpec& spec, const PackedCase& c,
                                      const fa::test::AttentionInputs& inputs);
fa::test::AttentionGradients run_packed(const BackwardSpecs& specs, const PackedCase& c, const BackwardData& data,
                                        VariantResults* extra = nullptr);

/// The same in float64 on the host.
fa::test::AttentionOutputs expected_of(const PackedCase& c, const fa::test::AttentionInputs& inputs);
/// `extra`: gradients of captures and sinks.
fa::test::AttentionGradients expected_of(const PackedCase& c, const BackwardData& data,
                                         fa::test::VariantGradients* extra = nullptr);

/// How far the gradients of a call without functions may be from those.
fa::test::GradientBounds bounds_of(const PackedCase& c, const BackwardData& data);

/// Inputs, the rounded O and LSE of float64, and gradients of these.
BackwardData make_data(const PackedCase& c);

}  // namespace emulator

#endif  // FA_TESTS_EMULATOR_PACKED_RUN_HPP_
