#ifndef FA_DEBUG_HPP_
#define FA_DEBUG_HPP_

#include <cstdint>

#include <fa/tensor.hpp>

namespace fa {

/// P of one query head, for a look inside (docs/kernels/debugging.md). A kernel behind the forward makes it anew from
/// q, k and the log-sum-exp, with all masks, functions and dropout: O = P V.
struct ProbabilityDump {
  /// [s_q, s_kv], f32 (f64 for f64), any strides. Of packed batches and over pages any [rows, keys], with 0 where the
  /// sequence has none.
  TensorView p = {};
  std::int64_t b = 0;  ///< batch entry, sequence or request
  std::int64_t h = 0;  ///< query head
};

}  // namespace fa

#endif  // FA_DEBUG_HPP_
