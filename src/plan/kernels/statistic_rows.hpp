#ifndef FA_SRC_PLAN_KERNELS_STATISTIC_ROWS_HPP_
#define FA_SRC_PLAN_KERNELS_STATISTIC_ROWS_HPP_

namespace fa::plan {

struct Kernel;

/// What gradients of statistics need of whole rows. Its spec is a head alone.
struct StatisticRows {
  static const Kernel& kernel() noexcept;
  friend bool operator==(const StatisticRows&, const StatisticRows&) = default;
};

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_KERNELS_STATISTIC_ROWS_HPP_
