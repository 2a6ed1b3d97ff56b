#ifndef FA_SRC_PLAN_PARSE_SPEC_HPP_
#define FA_SRC_PLAN_PARSE_SPEC_HPP_

#include <string_view>

#include "plan/kernel_spec.hpp"

namespace fa::plan {

/// The kernel that a canonical text means. Throws fa::Error(invalid_argument) for a text that is none of this version:
/// an unknown kernel or field, a value that cannot be built, functions that do not parse.
KernelSpec parse_spec(std::string_view text);

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_PARSE_SPEC_HPP_
