#ifndef FA_TOOLS_FA_TOLERANCE_HPP_
#define FA_TOOLS_FA_TOLERANCE_HPP_

#include <fa/tensor.hpp>

namespace fa::cli {

/// How far o may be from float64, as a multiple of the greatest |v|. A kernel rounds twice to the element type, the
/// probabilities and the result, each by at most one unit roundoff of a weighted mean of v; float accumulation adds
/// less than the last term.
constexpr double output_tolerance(DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return 2.0 / 256 + 1.0 / 65536;
    case DType::f16:
      return 2.0 / 2048 + 1.0 / 65536;
    case DType::f32:
      return 1.0 / 65536;
    case DType::f64:
      return 1e-12;
    case DType::e4m3:
    case DType::e5m2:
    case DType::i8:
      return 1.0 / 16 + 1.0 / 64;  // probabilities are e4m3, and sums have 13 bits of fraction
    case DType::i32:
    case DType::u4x2:
      break;
  }
  return 0;
}

/// How far dq and dk may be from float64, as a multiple of their sums with every term made positive: what o allows, and
/// one unit roundoff more, of the o that the gradient of the scores is computed from. dv is a sum like o, with the
/// probabilities transposed, and is allowed what o is.
constexpr double score_gradient_tolerance(DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return output_tolerance(dtype) + 1.0 / 256;
    case DType::f16:
      return output_tolerance(dtype) + 1.0 / 2048;
    default:
      return output_tolerance(dtype);
  }
}

/// How far the log-sum-exp may be from float64, as a multiple of max(1, |lse|).
constexpr double lse_tolerance(DType dtype) {
  return dtype == DType::f64 ? 1e-12 : size_of(dtype) == 1 ? 1e-2 : 1e-4;
}

}  // namespace fa::cli

#endif  // FA_TOOLS_FA_TOLERANCE_HPP_
