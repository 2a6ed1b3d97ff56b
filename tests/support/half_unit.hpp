#ifndef FA_TESTS_SUPPORT_HALF_UNIT_HPP_
#define FA_TESTS_SUPPORT_HALF_UNIT_HPP_

#include <algorithm>
#include <cmath>

#include <fa/tensor.hpp>

namespace fa::test {

/// Half of the distance of two neighbours of a dtype at a magnitude. Of f64 that many units more, as a power of two:
/// what is computed in it rounds more than once.
inline double half_unit(DType dtype, double magnitude, int more_of_f64) {
  const auto digits = [&](int count, int least) {
    return std::ldexp(1.0, std::max(magnitude > 0 ? std::ilogb(magnitude) : least, least) - count);
  };
  switch (dtype) {
    case DType::f16:
      return digits(11, -14);
    case DType::bf16:
      return digits(8, -126);
    case DType::f32:
      return digits(24, -126);
    default:
      return digits(53 - more_of_f64, -1022);
  }
}

}  // namespace fa::test

#endif  // FA_TESTS_SUPPORT_HALF_UNIT_HPP_
