#ifndef FA_SRC_PLAN_KERNELS_INSPECT_HPP_
#define FA_SRC_PLAN_KERNELS_INSPECT_HPP_

// What debug calls run besides. Their specs are heads alone.
namespace fa::plan {

struct Kernel;

/// The lowest NaN or infinity of each result of a call.
struct ScanResults {
  static const Kernel& kernel() noexcept;
  friend bool operator==(const ScanResults&, const ScanResults&) = default;
};

/// P of one query head, by the log-sum-exp of a forward.
struct Probabilities {
  static const Kernel& kernel() noexcept;
  friend bool operator==(const Probabilities&, const Probabilities&) = default;
};

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_KERNELS_INSPECT_HPP_
