#ifndef FA_TESTS_SUPPORT_ERROR_BOUNDS_HPP_
#define FA_TESTS_SUPPORT_ERROR_BOUNDS_HPP_

#include <span>
#include <vector>

#include <fa/attention.hpp>

#include "reference/backward.hpp"

namespace fa::test {

/// How far gradients of captures and of sinks may be from float64, element by element.
///
/// Such a gradient is a sum of dS[i, j] * slope[i, j], slope being the score's derivative by the captured value, with
/// dS = P (Z dP - D), dP = dout V^T, D = rowsum(dout o O) - dLSE, and Z what dropout multiplies P with. Kernels keep P,
/// dP and dS in f32. What is rounded to the element type, whose unit roundoff is u, enters through D alone: P before it
/// is multiplied with V, and O. With independent roundings x (1 + d), |d| <= u, of variance u^2 / 3,
///
///     D's error:   e[i] = sum_j d1[j] P Z dP + sum_c d2[c] dout O
///     the sum's:   sum_i e[i] r[i],   r[i] = sum_j P slope over the elements of row i that read the captured value
///
/// since e is common to a row. Its bound is the lesser of the worst case, where all roundings conspire, and five
/// standard deviations. To this comes f32: each term's relative error (of the exponent of P, which grows with the
/// score and the LSE, and of the dot products), taken as common to a row and independent between rows, and the sum of
/// n terms in any order: sqrt(n) roundings of a partial sum. A fast tanh (2^-11) moves scores
/// and P; slopes are made of a precise one (2^-21, its derivative 2^-16 of itself).
struct ErrorBounds {
  std::vector<std::vector<double>> captures;  ///< as VariantGradients; empty where no gradient is required
  std::vector<double> dsink;
};

/// `args` are those of the float64 reference, with its O and LSE; `dtype` that of the kernel's elements.
/// Without gradients of captures or sinks there is nothing to do.
ErrorBounds error_bounds(const reference::BackwardArgs& args, DType dtype, const PackedSequences* sequences = nullptr);

/// The greatest error, in units of its bound; infinite for a NaN.
double worst_ratio(std::span<const float> actual, std::span<const double> expected, std::span<const double> bounds);

}  // namespace fa::test

#endif  // FA_TESTS_SUPPORT_ERROR_BOUNDS_HPP_
