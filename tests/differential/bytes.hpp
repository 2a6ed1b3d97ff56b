#ifndef FA_TESTS_DIFFERENTIAL_BYTES_HPP_
#define FA_TESTS_DIFFERENTIAL_BYTES_HPP_

#include "differential/configuration.hpp"
#include "differential/dense.hpp"
#include "differential/random.hpp"

/// q, k and v of 8 bits, as docs/fp8.md and docs/int8.md describe them.
namespace fa::differential {

/// Makes codes and scales of the values of q, k and v, which become what these stand for; and row biases. Scales are
/// [b, h, s], or of heads [sequences, h, 1].
void store_bytes(const Configuration& configuration, const Call& call, Random& random, Inputs& inputs);

}  // namespace fa::differential

#endif  // FA_TESTS_DIFFERENTIAL_BYTES_HPP_
