#ifndef FA_TESTS_EMULATOR_BACKWARD_SPECS_HPP_
#define FA_TESTS_EMULATOR_BACKWARD_SPECS_HPP_

#include <vector>

#include "emulator/backward_run.hpp"

namespace emulator {

/// A cover of every pair of: dtype, head dims, tile, grids of warps, stages, flags; the backward's covering_specs.
const std::vector<BackwardSpecs>& covering_backward_specs();

/// Hopper kernels: the head dims and tiles that are special in one way or another, with their flags. Those that do not
/// write dQ come with a pass for it.
const std::vector<BackwardSpecs>& sm90_backward_specs();

/// Problems whose kernels the planner chooses: full-size tiles.
std::vector<fa::plan::Problem> planned_backward_problems();
BackwardSpecs planned_backward_specs(const fa::plan::Problem& problem, bool deterministic);

/// The kernels among which a mutant takes the place of one.
struct Mutation;
BackwardSpecs backward_specs_of(const Mutation& mutation);

/// All of the above.
std::vector<BackwardSpecs> all_backward_specs();

}  // namespace emulator

#endif  // FA_TESTS_EMULATOR_BACKWARD_SPECS_HPP_
