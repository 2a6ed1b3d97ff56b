#ifndef FA_SRC_REFERENCE_ELEMENTS_HPP_
#define FA_SRC_REFERENCE_ELEMENTS_HPP_

#include <cstdint>

#include <fa/tensor.hpp>

namespace fa::reference {

/// Reads `count` elements of `t` from element `offset` on, `stride` apart, as `Acc`, float or double.
template <class Acc>
void load(const TensorView& t, std::int64_t offset, std::int64_t stride, std::int64_t count, Acc* to);

/// Writes one element of `t`, rounded to nearest even.
void store_element(const TensorView& t, std::int64_t offset, double value);

}  // namespace fa::reference

#endif  // FA_SRC_REFERENCE_ELEMENTS_HPP_
