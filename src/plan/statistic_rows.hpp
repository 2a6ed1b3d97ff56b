#ifndef FA_SRC_PLAN_STATISTIC_ROWS_HPP_
#define FA_SRC_PLAN_STATISTIC_ROWS_HPP_

#include <cstdint>

#include <common/variant_params.cuh>

#include "plan/backward.hpp"
#include "plan/kernel_spec.hpp"
#include "plan/problem.hpp"

namespace fa::plan {

/// The kernel in front of a backward that is given gradients of max_logit or of column sums: it finds where the
/// greatest logits of rows are, and sums P of each row times the gradient of the columns' sums. Throws
/// fa::Error(unsupported) where none fits.
KernelSpec statistic_rows_spec(const Problem& problem);

/// Fills in what it is launched with, and its thread blocks. The place in the workspace stays null.
std::int64_t statistic_rows_params(const Problem& problem, const KernelSpec& spec, const BackwardTensors& tensors,
                                   double scale, const PackedArgs& packed,
                                   kernel::StatisticRowsParams& params) noexcept;

/// Query heads whose columns a sum is of.
int heads_of_a_sum(const Problem& problem) noexcept;

/// The rows that it tells of: of a packed batch all.
std::int64_t statistic_rows(const Problem& problem) noexcept;

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_STATISTIC_ROWS_HPP_
