#ifndef FA_TOOLS_FA_RUN_VERIFY_HPP_
#define FA_TOOLS_FA_RUN_VERIFY_HPP_

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include <fa/attention.hpp>

#include "run_tensors.hpp"

namespace fa::cli {

/// One tensor against float64.
struct Deviation {
  double max = 0;
  double mean = 0;
  double relative = 0;  ///< root mean square, over that of float64
  double allowed = 0;
  std::size_t elements = 0;
  std::size_t nans = 0;  ///< in both: they agree, and nothing is known of the values

  /// Whether no element tells anything.
  bool empty() const noexcept { return elements != 0 && nans == elements; }
  bool passes() const noexcept { return max <= allowed && !empty(); }
};

/// The tensors by name: "o", "lse" and, where there are gradients, "dq", "dk", "dv".
using Verdict = std::vector<std::pair<std::string, Deviation>>;

/// Computes everything again in float64 on the host, of codes times their scales, and compares. Rounding error of the
/// element type is allowed, of o and lse that of `products`, which Q and K, and P and V, are multiplied as.
Verdict verify(const AttentionConfig& config, const RunInputs& inputs, const RunOutputs& outputs, DType products);

/// The distance of o and lse from float64 of the originals that there are, which nothing bounds; empty without any.
Verdict compare_originals(const AttentionConfig& config, const RunInputs& inputs, const RunOutputs& outputs);

bool passes(const Verdict& verdict) noexcept;

}  // namespace fa::cli

#endif  // FA_TOOLS_FA_RUN_VERIFY_HPP_
