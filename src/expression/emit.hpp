#ifndef FA_SRC_EXPRESSION_EMIT_HPP_
#define FA_SRC_EXPRESSION_EMIT_HPP_

#include <cstdint>
#include <string>

#include "expression/program.hpp"

namespace fa::expression {

/// What a kernel needs of its functions.
enum class Part : std::uint8_t {
  values,     ///< score and keep
  slopes,     ///< and the derivative by the score
  gradients,  ///< and those by captures
};

/// Which indices and lengths functions see.
enum class Positions : std::uint8_t {
  of_call,
  of_whole,           ///< that the call is a part of, at a launch parameter (templates/common/shard_place.cuh)
  of_whole_in_steps,  ///< likewise, with steps between rows and between keys
};

/// The members of a kernel's Variant (templates/common/variant.cuh) that come of its functions, as CUDA C++.
/// `approximate`: hyperbolic tangents may have an error of 2^-11, as 16-bit elements have.
std::string emit(const Program& program, Part part, bool approximate, Positions positions = Positions::of_call);

/// Whether the score function reads one captured tensor of 16-bit elements along the keys, so that a kernel may keep a
/// tile of it in registers.
bool loads_ahead(const Program& program);

/// Whether the score function adds to the score, or takes from it, a product that is affine in the key: ALiBi, and
/// biases by distance.
bool is_affine(const Program& program);

/// Whether a function reads an index or a length.
bool has_positions(const Program& program);

}  // namespace fa::expression

#endif  // FA_SRC_EXPRESSION_EMIT_HPP_
