#ifndef FA_TESTS_EMULATOR_PAGED_SPECS_HPP_
#define FA_TESTS_EMULATOR_PAGED_SPECS_HPP_

#include <string>
#include <vector>

#include "plan/kernel_spec.hpp"
#include "plan/problem.hpp"
#include "support/paged_case.hpp"
#include "support/variant_case.hpp"

namespace emulator {

/// A forward kernel over pages, and what it computes.
struct PagedKernel {
  fa::plan::KernelSpec spec;
  fa::test::VariantChoice choice;
};

/// Small kernels for pages of 1, 3, 8, 12, 16, 40, 64 and 256 keys, and contiguous caches, of dense and of packed
/// queries.
const std::vector<PagedKernel>& paged_kernels();

/// The first of a family without a schedule that computes a choice.
const PagedKernel& paged_kernel(const std::string& choice, fa::plan::Family family);
/// The problem of a case's call, of the spec's architecture. `variant` is the case's, and outlives the problem.
fa::plan::Problem problem_of(const fa::plan::KernelSpec& spec, const fa::test::PagedCase& c,
                             const fa::test::PagedData& data, const fa::test::VariantCase& variant);

/// Tells a case what the spec's K and V are stored as, and whether V is in K.
void set_storage(const fa::plan::KernelSpec& spec, fa::test::PagedCase& c);

/// One with tiles of 32 rows and 32 keys, for pages of 8 keys.
fa::plan::KernelSpec sm80_paged();

/// The same with a schedule; and one that is launched before the kernel in front is complete.
fa::plan::KernelSpec sm80_scheduled();
fa::plan::KernelSpec sm80_scheduled_early();
fa::plan::KernelSpec sm80_own_parts();
fa::plan::KernelSpec sm90_scheduled();
fa::plan::KernelSpec sm90_own_parts();
fa::plan::KernelSpec sm90_splits_request();
/// Of contiguous caches, with a schedule; and one of the Hopper forward.
fa::plan::KernelSpec sm80_contiguous();
fa::plan::KernelSpec sm90_contiguous();
/// K and V in 4 bits, two groups a row.
fa::plan::KernelSpec sm80_u4();
fa::plan::KernelSpec sm80_u4_in_place();
/// Over e4m3, with products of f16: each of four warps copies the keys that it has of a tile.
fa::plan::KernelSpec sm80_own_keys();
/// The same in tiles of 8 rows. The keys of a warp are in four pages.
fa::plan::KernelSpec sm80_half_tile();
fa::plan::KernelSpec sm80_half_tile_contiguous();
fa::plan::KernelSpec sm80_u4_half_tile();
/// The same over latent rows.
fa::plan::KernelSpec sm80_latent();
/// Of the Hopper forward for wide heads, whose V is in K.
fa::plan::KernelSpec sm90_wide_scheduled();
/// The same by clusters of two blocks, which copy keys for each other.
fa::plan::KernelSpec sm90_wide_multicast();

/// One of the Hopper forward with tiles of 64 rows and 32 keys, likewise.
fa::plan::KernelSpec sm90_paged();
fa::plan::KernelSpec sm90_paged_dynamic();
/// With boxes of all columns, two slabs of V, and tiles of 128 rows and 48 keys in pages of 16.
fa::plan::KernelSpec sm90_wide_boxes();
/// Hopper forward over pages whose causal tiles end with the last row.
fa::plan::KernelSpec sm90_paged_own_ends();

/// Each of them once, and the kernels that write schedules.
std::vector<fa::plan::KernelSpec> all_paged_specs();

}  // namespace emulator

#endif  // FA_TESTS_EMULATOR_PAGED_SPECS_HPP_
