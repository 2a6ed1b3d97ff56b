#ifndef FA_TESTS_EMULATOR_SPECS_HPP_
#define FA_TESTS_EMULATOR_SPECS_HPP_

#include <vector>

#include "plan/kernel_spec.hpp"
#include "plan/problem.hpp"

/// Which kernels the emulator tests run. The generator renders them at build time, the tests launch them.
namespace emulator {

/// Forward kernels of both families that add to a state.
const std::vector<fa::plan::KernelSpec>& accumulating_specs();

/// A cover of every pair of: dtype, head dims, tile, stages, flags. Small tiles, so that short sequences take many
/// steps.
const std::vector<fa::plan::KernelSpec>& covering_specs();

/// Problems whose kernels the planner chooses: full-size tiles.
std::vector<fa::plan::Problem> planned_problems();

/// Hopper kernels: the head dims and tiles that are special in one way or another, and every pair of their flags.
const std::vector<fa::plan::KernelSpec>& sm90_specs();

/// Of a kernel that splits keys `wanted`, or as many as its cluster has blocks; else 1.
int splits_of(const fa::plan::KernelSpec& spec, int wanted);

/// The combine kernel that goes with a split kernel.
fa::plan::KernelSpec combine_spec(const fa::plan::KernelSpec& split);
/// Whether a mutation of `header` is of the kernel that merges the splits of `split`.
bool is_of_merge(const std::string& header, const fa::plan::KernelSpec& split);

/// A small kernel that goes with a backward kernel.
fa::plan::KernelSpec backward_helper_spec(const fa::plan::KernelSpec& main, fa::plan::Op op);

/// The kernel for the gradient of sinks that goes with a backward kernel.
fa::plan::KernelSpec backward_sink_spec(const fa::plan::KernelSpec& main);

/// All of the above and the backward's, each once.
std::vector<fa::plan::KernelSpec> all_specs();

/// Those with functions, windows, chunks or sinks, and what goes with them: a program of their own.
std::vector<fa::plan::KernelSpec> all_variant_specs();

}  // namespace emulator

#endif  // FA_TESTS_EMULATOR_SPECS_HPP_
