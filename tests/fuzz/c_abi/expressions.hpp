#ifndef FA_TESTS_FUZZ_C_ABI_EXPRESSIONS_HPP_
#define FA_TESTS_FUZZ_C_ABI_EXPRESSIONS_HPP_

#include <cstdint>
#include <string>
#include <vector>

#include "fuzz/random.hpp"

namespace fa::fuzz {

/// What a function names, and what each of its axes must hold: b, h, q or k (keys), or a digit for a length of its own.
struct NamedCapture {
  std::string name;
  std::int32_t dtype = 0;
  std::string axes;  ///< empty: a scalar
  bool requires_grad = false;
};

struct Expression {
  std::string text;
  std::vector<NamedCapture> captures;
};

/// A function as users write them, or one that is put together at random; `text` is mostly valid.
Expression random_expression(Random& random, bool mask);

/// Bytes, tokens and nestings that are hardly ever valid; never empty, without NUL.
std::string hostile_text(Random& random);

}  // namespace fa::fuzz

#endif  // FA_TESTS_FUZZ_C_ABI_EXPRESSIONS_HPP_
