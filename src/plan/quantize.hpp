#ifndef FA_SRC_PLAN_QUANTIZE_HPP_
#define FA_SRC_PLAN_QUANTIZE_HPP_

#include <cstdint>

#include <common/quantize_params.cuh>
#include <fa/tensor.hpp>

#include "plan/kernel_spec.hpp"

namespace fa::plan {

/// One kernel of a call: rows of `x`, or with `means` what is subtracted from them before. The tensors have passed
/// checks (api::check_quantize); those that are not given are not defined.
struct QuantizePass {
  TensorView x;      ///< [b, h, s, d]
  TensorView codes;  ///< likewise
  TensorView scale;  ///< [b, h, s]
  TensorView mean;   ///< [b, heads, d], the last axis without gaps
  TensorView bias;   ///< [b, h, s]: x times the mean, which is not subtracted then
  bool scale_given = false;
  bool means = false;
};

/// Throws fa::Error(unsupported) for a dtype that the GPU does not have.
KernelSpec quantize_spec(const QuantizePass& pass, Arch arch);

/// What the kernel is launched with; returns the thread blocks. Throws fa::Error(invalid_argument) for more rows than
/// are counted in 31 bits.
std::int64_t quantize_params(const QuantizePass& pass, const KernelSpec& spec, kernel::QuantizeParams& params);

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_QUANTIZE_HPP_
