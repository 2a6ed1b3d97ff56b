#ifndef FA_TESTS_DIFFERENTIAL_FUNCTIONS_HPP_
#define FA_TESTS_DIFFERENTIAL_FUNCTIONS_HPP_

#include "differential/configuration.hpp"
#include "differential/random.hpp"

namespace fa::differential {

/// A score function, a mask function, both or none: usual ones and random trees, with captures as they need.
void choose_functions(Random& random, Configuration& configuration, Where where, bool gradients);

}  // namespace fa::differential

#endif  // FA_TESTS_DIFFERENTIAL_FUNCTIONS_HPP_
