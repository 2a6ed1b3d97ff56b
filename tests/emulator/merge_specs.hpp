#ifndef FA_TESTS_EMULATOR_MERGE_SPECS_HPP_
#define FA_TESTS_EMULATOR_MERGE_SPECS_HPP_

#include <vector>

#include "plan/merge_states.hpp"
#include "support/merge_case.hpp"

namespace emulator {

/// Kinds of merge: dtypes of states and of the result, head dims, alignment.
const std::vector<fa::test::MergeCase>& merge_kinds();

/// The kernel of a case.
fa::plan::KernelSpec merge_spec(const fa::test::MergeCase& c, fa::plan::Arch arch = {9, 0, 'a'});

/// Those of all kinds and mutations, each once.
std::vector<fa::plan::KernelSpec> all_merge_specs();

}  // namespace emulator

#endif  // FA_TESTS_EMULATOR_MERGE_SPECS_HPP_
