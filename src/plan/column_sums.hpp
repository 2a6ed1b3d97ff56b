#ifndef FA_SRC_PLAN_COLUMN_SUMS_HPP_
#define FA_SRC_PLAN_COLUMN_SUMS_HPP_

#include <cstdint>

#include <common/variant_params.cuh>

#include "plan/kernel_spec.hpp"
#include "plan/problem.hpp"

namespace fa::plan {

/// The kernel that sums P over rows behind a forward of the problem. Throws fa::Error(unsupported) where none fits.
KernelSpec column_sums_spec(const Problem& problem);

/// Fills in what it is launched with from the parameters of the forward, and its thread blocks.
std::int64_t column_sums_params(const Problem& problem, const KernelSpec& spec,
                                const kernel::ForwardVariantParams& forward, float* sums,
                                kernel::ForwardVariantParams& params) noexcept;

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_COLUMN_SUMS_HPP_
