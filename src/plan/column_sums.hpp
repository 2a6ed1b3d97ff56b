#ifndef FA_SRC_PLAN_COLUMN_SUMS_HPP_
#define FA_SRC_PLAN_COLUMN_SUMS_HPP_

#include <cstdint>

#include <common/top_keys_params.cuh>
#include <common/variant_params.cuh>
#include <fa/tensor.hpp>

#include "plan/kernel_spec.hpp"
#include "plan/problem.hpp"

namespace fa::plan {

/// The kernel that sums P over rows behind a forward of the problem. Throws fa::Error(unsupported) where none fits.
KernelSpec column_sums_spec(const Problem& problem);

/// Fills in what it is launched with from the parameters of the forward, and its thread blocks.
std::int64_t column_sums_params(const Problem& problem, const KernelSpec& spec,
                                const kernel::ForwardVariantParams& forward, float* sums,
                                kernel::ForwardVariantParams& params) noexcept;

/// Whether sums are of a packed tensor's keys, [heads, total_kv], and not of each batch entry's.
bool has_packed_keys(const Problem& problem) noexcept;

/// The heads that sums are of.
std::int64_t summed_heads(const Problem& problem) noexcept;

/// The kernel that finds the greatest sums of each row.
KernelSpec top_keys_spec(const Problem& problem) noexcept;

/// Fills in what it is launched with, and its thread blocks. `sequences`: those of the forward; `begin`: the first
/// positions of requests over a KV cache, or null.
std::int64_t top_keys_params(const Problem& problem, const kernel::SequenceParams& sequences, const std::int32_t* begin,
                             const float* sums, const TensorView& keys, kernel::TopKeysParams& params) noexcept;

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_COLUMN_SUMS_HPP_
