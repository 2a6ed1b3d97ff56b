#ifndef FA_SRC_TUNE_TUNED_ROW_HPP_
#define FA_SRC_TUNE_TUNED_ROW_HPP_

#include <optional>
#include <string>

#include "plan/kernel_spec.hpp"
#include "plan/problem.hpp"
#include "tune/record.hpp"

namespace fa::tune {

/// What a row of a table means to this version.
struct TunedRow {
  plan::Problem problem;    ///< one of the bucket, for which the planner chooses as the row says
  plan::KernelSpec kernel;  ///< the row's, a candidate for it
};

/// nullopt with the reason in `*reason` when no call of this version takes the row's kernel: the text is no bucket's,
/// the planner chooses otherwise, or the kernel is no candidate any more.
std::optional<TunedRow> tuned_row(const Table::Row& row, std::string* reason);

}  // namespace fa::tune

#endif  // FA_SRC_TUNE_TUNED_ROW_HPP_
