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

}  // namespace fa::render

#endif  // FA_TESTS_UNIT_RENDER_SPEC_LIST_HPP_
