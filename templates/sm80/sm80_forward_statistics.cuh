#ifndef FA_TEMPLATES_SM80_SM80_FORWARD_STATISTICS_CUH_
#define FA_TEMPLATES_SM80_SM80_FORWARD_STATISTICS_CUH_

#include <common/constants.cuh>
#include <common/row_statistics.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>

namespace fa::sm80 {

using namespace kernel;

/// What a Forward (sm80_forward.cuh) stores of its rows besides O and the log-sum-exp.
template <class Forward>
struct ForwardStatistics {
  using Config = typename Forward::Settings;
  using Variant = typename Forward::Variant;
  using Softmax = typename Forward::Softmax;
  static constexpr int kMTiles = Forward::kMTiles;
  static constexpr bool kTracksScaled = kernel::kTracksScaled<Config>;

  const Forward& f;

  /// The statistics of all warps that share rows; all have left the main loop, and exchanged their sums.
  FA_DEVICE void exchange(Softmax& softmax) const {
    if constexpr (kTracksScaled) softmax.join_lanes();
    if constexpr (Forward::kPairs) {
      static_assert(!kTracksScaled, "pairs have no room to exchange it in");
      if constexpr (kEntropy<Config>) {
        f.meet();  // both have read the other's sums, in whose place these go
        f.pair().add_sums(softmax.weighted);
      }
    }
    if constexpr (Forward::kGroups) {
      if constexpr (kEntropy<Config>) {
        f.meet();  // all have read the sums, in whose place these go
        f.group().add_sums(softmax.weighted);
      }
      if constexpr (kTracksScaled) {
        f.meet();  // likewise
        f.group().publish(softmax.scaled);
        f.meet();  // the maxima are in shared memory
        f.group().maxima(softmax.scaled);
      }
    }
  }

  /// Of fragment row r of m tile `m`. `weight`: what its keys are beside its sink; 1 without one. `greatest`: of the
  /// rows so far, for raise.
  FA_DEVICE void store_row(const Softmax& softmax, int m, int r, float weight, float& greatest) const {
    const int row = f.fragment_row(m, r);
    if (row >= f.row_count) return;
    if constexpr (kGathers) greatest = ptx::max(greatest, max_of(softmax, m, r));
    if (f.half != 0 || f.lane % 4 != 0) return;  // each row once: by the first lane of a quad, of one warp
    if constexpr (kMaxLogit<Config> && !kMaxLogitByHead<Config>) {
      ptx::st_global(f.params.max_logit + place(row), max_of(softmax, m, r));
    } else if constexpr (kMaxLogit<Config> && !kGathers) {
      raise_max(f.params.max_logit + f.rows.query_head(row), max_of(softmax, m, r));
    }
    if constexpr (kEntropy<Config>) {
      ptx::st_global(f.params.entropy + place(row), softmax.entropy(m, r, softmax.sum[m][r], weight));
    }
  }

  /// Where all rows are of one head.
  FA_DEVICE void raise([[maybe_unused]] float greatest) const {
    if constexpr (kGathers) {
      FA_UNROLL
      for (int lanes = 4; lanes < kWarpSize; lanes *= 2) greatest = ptx::max(greatest, ptx::shfl_xor(greatest, lanes));
      if (f.half == 0 && f.lane == 0) raise_max(f.params.max_logit + f.tile.head, greatest);
    }
  }

 private:
  static constexpr bool kGathers = kMaxLogit<Config> && kMaxLogitByHead<Config> && !Config::kPackGqa;

  FA_DEVICE float max_of(const Softmax& softmax, int m, int r) const {
    if constexpr (kTracksScaled) return softmax.scaled[m][r];
    if constexpr (Variant::kScore) return natural_max(softmax.max[m][r], Variant::kFactor);
    return natural_max(softmax.max[m][r], Config::kPositiveScale ? f.params.scale : ptx::abs(f.params.scale));
  }

  FA_DEVICE int64_t place(int row) const {
    const int64_t entry = static_cast<int64_t>(f.params.h_q) * f.params.s_q;
    return statistic_of_row<Forward::kVarlen>(f.params, f.first_row(entry, 1), f.rows.query_head(row),
                                              f.rows.position(row));
  }
};

}  // namespace fa::sm80

#endif  // FA_TEMPLATES_SM80_SM80_FORWARD_STATISTICS_CUH_
