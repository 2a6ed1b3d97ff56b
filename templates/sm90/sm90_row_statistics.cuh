#ifndef FA_TEMPLATES_SM90_SM90_ROW_STATISTICS_CUH_
#define FA_TEMPLATES_SM90_SM90_ROW_STATISTICS_CUH_

#include <common/constants.cuh>
#include <common/row_statistics.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>

namespace fa::sm90 {

/// What an Epilogue stores of the two rows of a thread besides O and the log-sum-exp; maxima of exact ones only.
template <class Epilogue>
struct StatisticsOfRows {
  using Config = typename Epilogue::Config;
  using Query = typename Epilogue::Query;
  using Rows = typename Epilogue::Rows;
  using Softmax = typename Epilogue::Softmax;
  static constexpr bool kByHead = kernel::kMaxLogitByHead<Config>;
  static constexpr bool kGathers = kernel::kMaxLogit<Config> && kByHead && !Config::kPackGqa;

  const Epilogue& e;

  /// Of a finished softmax. `weight`: what the keys of a row are beside its sink; 1 without one.
  FA_DEVICE void store(const Softmax& softmax, const Query& query, int first_row, int lane,
                       const float (&weight)[2]) const {
    const Rows rows{e.params.group, query.tile.head};
    [[maybe_unused]] const float factor = Config::kPositiveScale ? e.params.scale : ptx::abs(e.params.scale);
    float greatest = -kernel::kInfinity;  // of the warp's rows
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + 8 * r;
      if (!e.has_row(query, row)) continue;
      [[maybe_unused]] float max = -kernel::kInfinity;
      if constexpr (kernel::kMaxLogit<Config>) max = kernel::natural_max(softmax.greatest[r], factor);
      if constexpr (kGathers) greatest = ptx::max(greatest, max);
      if (lane % 4 != 0) continue;
      const int64_t entry = query.tile.batch * (static_cast<int64_t>(e.params.h_q) * e.params.s_q);
      const int64_t at = kernel::statistic_of_row<false>(e.params, entry, rows.query_head(row), rows.position(row));
      if constexpr (kernel::kMaxLogit<Config> && !kByHead) {
        ptx::st_global(e.params.max_logit + at, max);
      } else if constexpr (kernel::kMaxLogit<Config> && !kGathers) {
        kernel::raise_max(e.params.max_logit + rows.query_head(row), max);
      }
      if constexpr (kernel::kEntropy<Config>) {
        ptx::st_global(e.params.entropy + at, softmax.entropy(0, r, softmax.sum[r], weight[r]));
      }
    }
    if constexpr (kGathers) {
      FA_UNROLL
      for (int lanes = 4; lanes < kernel::kWarpSize; lanes *= 2) {
        greatest = ptx::max(greatest, ptx::shfl_xor(greatest, lanes));
      }
      if (lane == 0) kernel::raise_max(e.params.max_logit + query.tile.head, greatest);
    }
  }
};

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_ROW_STATISTICS_CUH_
