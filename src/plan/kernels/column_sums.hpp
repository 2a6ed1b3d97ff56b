#ifndef FA_SRC_PLAN_KERNELS_COLUMN_SUMS_HPP_
#define FA_SRC_PLAN_KERNELS_COLUMN_SUMS_HPP_

namespace fa::plan {

struct Kernel;

/// P summed over rows, by the log-sum-exp of a forward.
struct ColumnSumsPass {
  bool one_buffer = false;  ///< of query rows, so that twice as many warps find room

  static const Kernel& kernel() noexcept;
  friend bool operator==(const ColumnSumsPass&, const ColumnSumsPass&) = default;
};

/// The keys of the greatest column sums. Its spec is a head alone.
struct TopKeys {
  static const Kernel& kernel() noexcept;
  friend bool operator==(const TopKeys&, const TopKeys&) = default;
};

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_KERNELS_COLUMN_SUMS_HPP_
