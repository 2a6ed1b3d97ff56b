#ifndef FA_SRC_REFERENCE_QUANTIZE_HPP_
#define FA_SRC_REFERENCE_QUANTIZE_HPP_

#include <fa/tensor.hpp>

namespace fa::reference {

/// Rows of x as codes and scales, or with `means` what is subtracted from them before. Those that are not given are not
/// defined.
struct QuantizeArgs {
  TensorView x;      ///< [b, h, s, d]
  TensorView codes;  ///< likewise
  TensorView scale;  ///< [b, h, s]
  TensorView mean;   ///< [b, heads, d]
  TensorView bias;   ///< [b, h, s]: x times the mean, which is not subtracted then
  bool scale_given = false;
  bool means = false;
};

/// Means are summed up in double, and rounded once.
void quantize(const QuantizeArgs& args);

}  // namespace fa::reference

#endif  // FA_SRC_REFERENCE_QUANTIZE_HPP_
