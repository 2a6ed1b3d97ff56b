#ifndef FA_SRC_REFERENCE_VARIANT_HPP_
#define FA_SRC_REFERENCE_VARIANT_HPP_

#include <cstdint>
#include <span>

#include <fa/tensor.hpp>
#include <fa/types.hpp>

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

  ShardPlace place = {};

  bool has_score() const { return program != nullptr && program->score.has_value(); }
  bool has_mask() const { return program != nullptr && program->mask.has_value(); }
};

}  // namespace fa::reference

#endif  // FA_SRC_REFERENCE_VARIANT_HPP_
