#ifndef FA_SRC_PLAN_VARIANTS_HPP_
#define FA_SRC_PLAN_VARIANTS_HPP_

#include <string>
#include <vector>

#include "expression/program.hpp"

namespace fa::plan {

/// What makes a kernel compute more than plain attention. Window sizes, chunk lengths and captured tensors are launch
/// parameters.
struct Variants {
  bool left_window = false;  ///< keys far before the diagonal are hidden
  bool chunked = false;      ///< keys of another chunk are hidden
  bool sink = false;         ///< one logit a head takes part in every sum
  bool placed = false;       ///< functions, chunks and dropout see positions of a whole that the call is a part of
  bool strided = false;      ///< with steps between its rows and between its keys
  std::string score;         ///< the functions, without spaces
  std::string mask;
  std::vector<expression::Capture> captures;
  bool mask_on_batch = false;  ///< what the text of the mask says: it depends on b, on h
  bool mask_on_head = false;
  bool constant_slopes = false;  ///< of the score function, by the score and by captures
  bool loads_ahead = false;      ///< what that of the score says: a tile of a captured tensor may lie in registers
  bool affine = false;           ///< likewise: it adds a product that is affine in the key

  bool any() const noexcept { return left_window || chunked || sink || placed || !score.empty() || !mask.empty(); }

  /// Whether keys are hidden that causality does not hide.
  bool hides_keys() const noexcept { return left_window || chunked || !mask.empty(); }

  friend bool operator==(const Variants&, const Variants&) = default;
};

/// What follows from the functions themselves: mask_on_batch to affine.
void describe_functions(const expression::Program& program, Variants* variants);

/// " left_window=1 ... captures=slope:f32:1:grad"; empty without any.
std::string canonical(const Variants& variants);

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_VARIANTS_HPP_
