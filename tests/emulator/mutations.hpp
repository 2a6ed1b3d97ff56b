#ifndef FA_TESTS_EMULATOR_MUTATIONS_HPP_
#define FA_TESTS_EMULATOR_MUTATIONS_HPP_

#include <cstddef>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "emulator/fault.hpp"
#include "emulator/sm90_backward_variants.hpp"
#include "plan/kernel_spec.hpp"
#include "support/append_case.hpp"
#include "support/merge_case.hpp"

namespace emulator {

/// What else a causal backward mutant is given: NaN in a row that keeps no key, or in a key that no row keeps.
enum class Spoilt { nothing, row, key };

/// A kernel to put a mistake into, and what it is given.
struct Subject {
  Subject(fa::plan::KernelSpec of);             // NOLINT(google-explicit-constructor): most are kernels alone
  Subject(const Sm90BackwardVariant& variant);  // NOLINT(google-explicit-constructor)
  Subject(fa::test::AppendCase kind);           // NOLINT(google-explicit-constructor)
  Subject(fa::test::MergeCase kind);            // NOLINT(google-explicit-constructor)

  fa::plan::KernelSpec spec;
  std::string choice = {};  ///< of fa::test::variant_choices(), which `spec` computes; empty: plain attention
  /// Whose main kernel `spec` is, with functions, windows, packed batches or dropout.
  std::optional<Sm90BackwardVariant> hopper_backward = {};
  std::optional<fa::test::AppendCase> append = {};  ///< what `spec` appends
  std::optional<fa::test::MergeCase> merge = {};    ///< what `spec` merges
  float scale = 2.f;  ///< of scores, with an sm90 kernel: maxima of rows grow by more than the slack
  int entries = 1;    ///< of the batch, and KV heads
  Spoilt spoilt = Spoilt::nothing;
};

/// A deliberate mistake in the kernel text, and the faults that may name it. The generator writes the changed header
/// and fails when `before` does not occur exactly `count` times, so a mutation cannot silently stop applying. Spaces
/// and line ends of `before` stand for any others: text may be indented and wrapped anew.
struct Mutation {
  std::string name;  ///< an identifier
  std::string before;
  std::string after;
  Subject subject;
  std::set<FaultKind> faults;  ///< empty: no rule of the machine is broken, the results are wrong
  int count = 1;
  std::string header = {};  ///< "sm80/sm80_forward.cuh", which the list says
};

const std::vector<Mutation>& mutations();
/// Places in that list of those that this build compiles: all, or without its option FA_EVERY_MUTANT every third one.
const std::vector<std::size_t>& built_mutations();

bool is_backward(const Mutation& mutation);
/// Whether it changes the kernel that writes schedules, not the one that reads them.
bool is_of_schedule(const Mutation& mutation);

}  // namespace emulator

#endif  // FA_TESTS_EMULATOR_MUTATIONS_HPP_
