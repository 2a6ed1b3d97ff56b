#ifndef FA_TESTS_SUPPORT_GRADIENT_BOUNDS_HPP_
#define FA_TESTS_SUPPORT_GRADIENT_BOUNDS_HPP_

#include <fa/attention.hpp>

#include "reference/backward.hpp"
#include "support/attention_case.hpp"

namespace fa::test {

/// How far dq, dk and dv of attention without functions may be from float64, element by element. With unit roundoff u
/// of the element type, Z what dropout multiplies P with (0 or 1 / (1 - p); 1 without), and
/// A[i] = sum_c |dout[i, c]| sum_j P Z |v[j, c]|:
///
///     dv[j, c]:  2 u sum_i P Z |dout[i, c]|
///     dq[i, c]:  4 u |scale| sum_j P (Z |dout v| + A[i] + |dLSE[i]|) |k[j, c]|, and dk likewise over i
///
/// P Z and dS are rounded, the result is, and D is made of an O that is off by u (sum P Z |v| + |O|). To this comes
/// float: P by its exponent, of which each part rounds, and products by their terms, which TF32 takes apart in three.
/// Of f16 subnormal numbers are off by 2^-25.
struct GradientBounds {
  HostTensor dq, dk, dv;  ///< f64, of the shapes of the gradients
};

/// `args` are those of the float64 reference, with its O and LSE; `dtype` that of the kernel's elements.
GradientBounds gradient_bounds(const reference::BackwardArgs& args, DType dtype,
                               const PackedSequences* sequences = nullptr);

/// The greatest error, in units of its bound; infinite for a NaN. Rows that float64 leaves 0 throughout may hold
/// anything if `untouched`.
double worst_ratio(const HostTensor& actual, const HostTensor& expected, const HostTensor& bounds, bool untouched);

}  // namespace fa::test

#endif  // FA_TESTS_SUPPORT_GRADIENT_BOUNDS_HPP_
