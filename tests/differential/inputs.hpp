#ifndef FA_TESTS_DIFFERENTIAL_INPUTS_HPP_
#define FA_TESTS_DIFFERENTIAL_INPUTS_HPP_

#include <vector>

#include "differential/configuration.hpp"
#include "differential/dense.hpp"

namespace fa::differential {

/// The dtype of LSE, and of what else is a sum.
DType statistics(const Configuration& configuration);

/// Which captures the functions read.
std::vector<bool> used_captures(const Configuration& configuration);

/// The values of a call, and what hostile ones stand where nothing may see them.
Inputs make_inputs(const Configuration& configuration, const Call& call);

}  // namespace fa::differential

#endif  // FA_TESTS_DIFFERENTIAL_INPUTS_HPP_
