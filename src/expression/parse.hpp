#ifndef FA_SRC_EXPRESSION_PARSE_HPP_
#define FA_SRC_EXPRESSION_PARSE_HPP_

#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fa/tensor.hpp>

#include "expression/graph.hpp"

namespace fa::expression {

/// A captured tensor, as a function declares it.
struct Capture {
  std::string name;
  DType dtype = DType::f32;
  int rank = 0;  ///< how many indices it takes; 0: a scalar
  bool requires_grad = false;

  friend bool operator==(const Capture&, const Capture&) = default;
};

/// Reads `text` into `graph` and returns its root, of type `result`. `argument` names the function in messages; ranks
/// of the captures are taken from how they are used (`rank` -1: not used yet) and then held to it. Throws
/// fa::Error(invalid_argument) with the column, counted from 1, and what was expected there.
NodeId parse(std::string_view argument, std::string_view text, Type result, std::vector<Capture>* captures,
             Graph* graph);

/// The tokens of a text without the spaces between them: equal texts of equal functions but for their layout.
std::string without_spaces(std::string_view argument, std::string_view text);

/// `text` with other text in the place of every name that is first of a pair.
std::string with_names(std::string_view argument, std::string_view text,
                       std::span<const std::pair<std::string_view, std::string_view>> names);

/// `text` with `score` in parentheses in the place of every score.
std::string with_score(std::string_view argument, std::string_view text, std::string_view score);

/// Whether the name stands somewhere in `text`.
bool mentions(std::string_view argument, std::string_view text, std::string_view name);

/// Whether `name` may be that of a capture: an identifier that means nothing else.
bool is_free_name(std::string_view name);

}  // namespace fa::expression

#endif  // FA_SRC_EXPRESSION_PARSE_HPP_
