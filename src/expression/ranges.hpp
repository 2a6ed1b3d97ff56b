#ifndef FA_SRC_EXPRESSION_RANGES_HPP_
#define FA_SRC_EXPRESSION_RANGES_HPP_

#include <cstdint>
#include <span>
#include <vector>

#include <fa/tensor.hpp>

#include "expression/program.hpp"

namespace fa::expression {

/// Lengths of a call, which functions may name.
struct Lengths {
  std::int64_t b = 0, h_q = 0, s_q = 0, s_kv = 0;
  bool packed = false;  ///< s_q and s_kv are the most that any of b sequences has
};

/// A captured tensor of a call; undefined, with `scalar`, when it is a number. Axes of length 1 are broadcast.
struct CapturedView {
  TensorView view;
  double scalar = 0;
  TensorView gradient;  ///< of backward, where it is wanted

  /// The element offset of an index into `of`, which is `view` or `gradient`.
  static std::int64_t offset(const TensorView& of, std::span<const Value> indices);
};

/// Holds every index of every load to the length of its axis, for all points of a call: throws
/// fa::Error(invalid_argument) naming the capture when the lengths alone do not keep an index inside.
void check_indices(const Program& program, std::span<const CapturedView> captures, const Lengths& lengths);

/// The shortest axes of each capture that hold every index of a call of these lengths; 0 where the lengths alone do not
/// bound an index.
std::vector<std::vector<std::int64_t>> smallest_shapes(const Program& program, const Lengths& lengths);

}  // namespace fa::expression

#endif  // FA_SRC_EXPRESSION_RANGES_HPP_
