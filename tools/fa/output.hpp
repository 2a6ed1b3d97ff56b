#ifndef FA_TOOLS_FA_OUTPUT_HPP_
#define FA_TOOLS_FA_OUTPUT_HPP_

#include <string>
#include <vector>

namespace fa::cli {

/// Looks at what an option names to be written, before anything is computed: throws fa::Error(io) where it cannot be,
/// and fa::Error(invalid_argument) where it is one of `inputs`, unless `force`.
void check_output(const std::string& output, const std::vector<std::string>& inputs, bool force);

}  // namespace fa::cli

#endif  // FA_TOOLS_FA_OUTPUT_HPP_
