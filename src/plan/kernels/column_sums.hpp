#ifndef FA_SRC_PLAN_KERNELS_COLUMN_SUMS_HPP_
#define FA_SRC_PLAN_KERNELS_COLUMN_SUMS_HPP_

namespace fa::plan {

struct Kernel;

/// P summed over rows, by the log-sum-exp of a forward.
struct ColumnSumsPass {
  bool one_buffer = false;  ///< of query rows, so that twice as many warps find room
  int k_storage = 0;        ///< what K is stored as: storage_of its dtype

  /// Whether tiles in shared memory are of what K is stored as.
  bool stored() const noexcept;

  static const Kernel& kernel() noexcept;
  friend bool operator==(const ColumnSumsPass&, const ColumnSumsPass&) = default;
};

/// The keys of the greatest column sums.
struct TopKeys {
  bool requests = false;  ///< rows are of requests over a KV cache

  static const Kernel& kernel() noexcept;
  friend bool operator==(const TopKeys&, const TopKeys&) = default;
};

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_KERNELS_COLUMN_SUMS_HPP_
