#ifndef FA_TOOLS_FA_RUN_WIDE_HPP_
#define FA_TOOLS_FA_RUN_WIDE_HPP_

#include <cstddef>
#include <optional>

#include <fa/attention.hpp>

#include "run_tensors.hpp"

namespace fa::cli {

/// Element `index` as a number, exact; the NaN codes of e4m3 are NaN.
double number_at(const tools::Tensor& tensor, std::size_t index);

/// What q, k and v of a wide call are.
enum class Of {
  codes,      ///< what the call's tensors stand for: codes times their scales, and numbers as they are
  originals,  ///< the originals that the file has, else as codes
};

/// A call in float64 of the numbers of another call, which the library has taken.
struct WideCall {
  WideCall(const AttentionConfig& config, const RunInputs& inputs, Of of);

  /// On the host.
  RunOutputs run();

  AttentionConfig config;
  RunInputs inputs;
  /// [b, h_kv], what values are times of. O is multiplied instead: requests may share pages, but not these.
  std::optional<tools::Tensor> v_heads = std::nullopt;
};

}  // namespace fa::cli

#endif  // FA_TOOLS_FA_RUN_WIDE_HPP_
