#ifndef FA_SRC_REFERENCE_VARIANT_HPP_
#define FA_SRC_REFERENCE_VARIANT_HPP_

#include <cstdint>
#include <span>

#include <fa/tensor.hpp>

#include "expression/program.hpp"
#include "expression/ranges.hpp"

namespace fa::reference {

/// What a call computes besides plain attention.
struct VariantArgs {
  const expression::Program* program = nullptr;  ///< null: no functions
  std::span<const expression::CapturedView> captures = {};
  TensorView sink = {};           ///< [h_q]; optional
  TensorView dsink = {};          ///< [h_q], of backward; optional
  std::int64_t window_left = -1;  ///< -1: unbounded
  std::int64_t window_right = -1;
  std::int64_t chunk = 0;   ///< 0: none
  bool accumulate = false;  ///< dsink and gradients of captures are added to

  /// Where a part of a larger problem stands in it, and that one's lengths (0: those of the tensors), for functions.
  struct Part {
    std::int64_t b = 0, h = 0, q = 0, kv = 0;
    expression::Lengths whole = {};
  } part = {};

  bool has_score() const { return program != nullptr && program->score.has_value(); }
  bool has_mask() const { return program != nullptr && program->mask.has_value(); }
};

}  // namespace fa::reference

#endif  // FA_SRC_REFERENCE_VARIANT_HPP_
