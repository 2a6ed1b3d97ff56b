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
  double allowed = 0;
  std::size_t elements = 0;
  std::size_t nans = 0;  ///< in both: they agree, and nothing is known of the values

  /// Whether no element tells anything.
  bool empty() const noexcept { return elements != 0 && nans == elements; }
  bool passes() const noexcept { return max <= allowed && !empty(); }
};

/// The tensors by name: "o", "lse" and, where there are gradients, "dq", "dk", "dv".
using Verdict = std::vector<std::pair<std::string, Deviation>>;

/// Computes everything again in float64 on the host and compares: rounding error of the element type is allowed.
Verdict verify(AttentionConfig config, const RunInputs& inputs, const RunOutputs& outputs);

bool passes(const Verdict& verdict) noexcept;

}  // namespace fa::cli

#endif  // FA_TOOLS_FA_RUN_VERIFY_HPP_
