#ifndef FA_TOOLS_FA_TUNE_CARRY_HPP_
#define FA_TOOLS_FA_TUNE_CARRY_HPP_

#include <string>

namespace fa::cli {

struct CarryOptions {
  std::string from;    ///< directory of the templates that the table was measured with
  std::string table;   ///< cache/tuned/*.json
  std::string output;  ///< empty: the table itself
  int jobs = 0;
};

/// Carries the rows of a table over to the templates in use, where the kernel has the very same instructions as with
/// those that it was measured with; others are left out, and told with the reason. Needs NVRTC and no GPU. An exit
/// code.
int carry_table(const CarryOptions& options);

}  // namespace fa::cli

#endif  // FA_TOOLS_FA_TUNE_CARRY_HPP_
