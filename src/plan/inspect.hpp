#ifndef FA_SRC_PLAN_INSPECT_HPP_
#define FA_SRC_PLAN_INSPECT_HPP_

#include <cstdint>
#include <span>

#include <common/probabilities_params.cuh>
#include <common/scan_results_params.cuh>
#include <fa/tensor.hpp>

#include "plan/forward_launch.hpp"
#include "plan/kernel_spec.hpp"
#include "plan/problem.hpp"

namespace fa::plan {

/// A result of a call that may hold NaNs and infinities. It has elements.
struct ScannedResult {
  TensorView view;     ///< [b, h, s, d], or [b, h, s]; of a packed batch with b = 1
  bool minus = false;  ///< -inf is legal
  // Of a packed batch: its sequences, and the most rows of one.
  std::int64_t b = 0;
  const std::int32_t* cu = nullptr;
  const std::int32_t* used = nullptr;
  std::int64_t longest = 0;
};

KernelSpec scan_results_spec(Arch arch) noexcept;

/// What it is launched with over at most kernel::kMostResults results, whose places `found` holds behind it; returns
/// the thread blocks.
std::int64_t scan_results_params(std::span<const ScannedResult> results, std::uint64_t* found,
                                 kernel::ScanResultsParams& params) noexcept;

/// An element by its place in `found`.
struct FoundElement {
  std::int64_t b, h, s, d;
};
FoundElement found_element(const ScannedResult& result, std::uint64_t place) noexcept;

KernelSpec probabilities_spec(const Problem& problem);

/// Likewise of P of query head `h` of batch entry `b`, which `p` [rows, keys] gets.
std::int64_t probabilities_params(const Problem& problem, const KernelSpec& spec, const ForwardTensors& tensors,
                                  double scale, const PackedArgs& packed, const TensorView& p, std::int64_t b,
                                  std::int64_t h, kernel::ProbabilitiesParams& params) noexcept;

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_INSPECT_HPP_
