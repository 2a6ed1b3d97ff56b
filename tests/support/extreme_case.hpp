#ifndef FA_TESTS_SUPPORT_EXTREME_CASE_HPP_
#define FA_TESTS_SUPPORT_EXTREME_CASE_HPP_

#include <string>
#include <vector>

#include "support/attention_case.hpp"
#include "support/variant_case.hpp"

namespace fa::test {

/// Inputs at the ends of what a dtype, or a scale, has. What float64 makes of them is what any kernel has to make.
struct Extreme {
  std::string name;
  void (*change)(const AttentionCase& c, AttentionInputs& inputs);
  /// The case's scale as it is changed for them; null: as it is.
  float (*scale)(const AttentionCase& c) = nullptr;
  bool causal = false;  ///< keys that no row sees are looked for in causal cases alone
};

/// Of f16, bf16 and f32.
const std::vector<Extreme>& extremes();

/// Makes all scores, before the scale, `sign` times the square of `great`: by their first columns.
void put_equal_scores(AttentionInputs& inputs, double great, int sign);

/// Of 8-bit floats, with scales of rows of q and of heads of k and v.
const std::vector<Extreme>& fp8_extremes();

/// How far outputs are from float64's where that is a number, as a multiple of `relative` of the greatest |v| that a
/// row sees, and at least `least`; infinite where they are NaN or infinite and float64's are not, or the other way
/// round. LSE counts by `lse` of 16 and its own magnitude.
struct ExtremeBounds {
  double relative, least, lse;
};
double extreme_error(const AttentionCase& c, const AttentionInputs& inputs, const AttentionOutputs& expected,
                     const AttentionOutputs& actual, const ExtremeBounds& bounds);

/// What a case captures, at the ends of float: slopes of 1e20, a bias of -3e38 for every third key, and a sink of NaN
/// in the first head.
void make_extreme(VariantCase& c);

}  // namespace fa::test

#endif  // FA_TESTS_SUPPORT_EXTREME_CASE_HPP_
