#ifndef FA_TESTS_EMULATOR_APPEND_SPECS_HPP_
#define FA_TESTS_EMULATOR_APPEND_SPECS_HPP_

#include <vector>

#include "plan/append.hpp"
#include "support/append_case.hpp"

namespace emulator {

/// Kinds of append: page sizes, a contiguous cache, rotary embeddings, tables, dtypes, alignment.
const std::vector<fa::test::AppendCase>& append_kinds();

/// The kernel of a case.
fa::plan::KernelSpec append_spec(const fa::test::AppendCase& c, fa::plan::Arch arch = {9, 0, 'a'});

/// Those of all kinds and mutations, each once.
std::vector<fa::plan::KernelSpec> all_append_specs();

}  // namespace emulator

#endif  // FA_TESTS_EMULATOR_APPEND_SPECS_HPP_
