#ifndef FA_TESTS_UNIT_CACHE_CHILD_PROGRAMS_HPP_
#define FA_TESTS_UNIT_CACHE_CHILD_PROGRAMS_HPP_

#include <string>
#include <vector>

namespace fa::cache::testing {

/// In front of a child program's name and arguments.
inline constexpr const char* kChildOption = "--child";

/// The result of a registered program, or 99 for an exception.
int run_program(const std::string& name, const std::vector<std::string>& arguments);

}  // namespace fa::cache::testing

#endif  // FA_TESTS_UNIT_CACHE_CHILD_PROGRAMS_HPP_
