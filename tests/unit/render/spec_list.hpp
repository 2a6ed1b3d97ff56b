#ifndef FA_TESTS_UNIT_RENDER_SPEC_LIST_HPP_
#define FA_TESTS_UNIT_RENDER_SPEC_LIST_HPP_

#include <string>
#include <vector>

#include "plan/kernel_spec.hpp"

// Kernels that stand for all: what a refactoring is held to.
namespace fa::render {

struct NamedSpec {
  std::string name;
  plan::KernelSpec spec;
};

/// The kernels that the planner takes first, for every kind of GPU.
std::vector<NamedSpec> golden_list();

/// A pairwise cover of what configurations, shapes and overrides may be.
const std::vector<NamedSpec>& pairwise_list();

/// What neither has: compute capability 7.5, 8-bit floats, caches of 8 and 4 bits and of latent rows, statistics,
/// invariance, and debug kernels.
std::vector<NamedSpec> family_list();

/// What sets the fields that no kernel of these has: gradients of statistics, gradients that are not wanted, places in
/// memory, bounds of multiprocessors, and overrides.
std::vector<NamedSpec> field_list();

}  // namespace fa::render

#endif  // FA_TESTS_UNIT_RENDER_SPEC_LIST_HPP_
