#ifndef FA_TESTS_UNIT_EXPRESSION_EVALUATE_HPP_
#define FA_TESTS_UNIT_EXPRESSION_EVALUATE_HPP_

#include <array>
#include <string>

#include "reference/evaluator.hpp"

namespace fa::expression {

inline constexpr Lengths kLengths{.b = 2, .h_q = 3, .s_q = 10, .s_kv = 12};

/// The value of a score function without captures.
inline double score_of(const std::string& text, const reference::Point& point) {
  const Program program = Program::parse(text, "", {});
  const std::array root{*program.score};
  reference::Evaluator evaluator(program, root, {}, kLengths);
  evaluator.run(point);
  return evaluator[root[0]].real;
}

inline bool mask_of(const std::string& text, const reference::Point& point) {
  const Program program = Program::parse("", text, {});
  const std::array root{*program.mask};
  reference::Evaluator evaluator(program, root, {}, kLengths);
  evaluator.run(point);
  return evaluator[root[0]].integer != 0;
}

}  // namespace fa::expression

#endif  // FA_TESTS_UNIT_EXPRESSION_EVALUATE_HPP_
