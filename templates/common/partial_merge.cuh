#ifndef FA_TEMPLATES_COMMON_PARTIAL_MERGE_CUH_
#define FA_TEMPLATES_COMMON_PARTIAL_MERGE_CUH_

#include <common/constants.cuh>
#include <common/fixed_splits.cuh>
#include <common/log_sum.cuh>
#include <ptx/griddepcontrol.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>

namespace fa::kernel {

/// A sum of the partial results of a query row, in their order: sum_i exp(lse_i - base) O_i, relative to the greatest
/// number that one of their sums is relative to. Done by a warp, of all columns or of 32 times kSlots: a lane reads the
/// log-sum-exp of each 32nd, and O's loads of several are in flight, the first of them together with those: each takes
/// as long as all of the arithmetic. A wide O has no registers for this: its results follow each other.
template <int kHeadDimV, int kColumnsOfLane = ceil_div(kHeadDimV, kWarpSize)>
struct PartialMerge {
  static constexpr int kSlots = kColumnsOfLane;
  static constexpr int kAhead = kSlots == 1 ? 16 : kSlots >= 8 ? 4 : 8;  // partial results whose loads are in flight
  static constexpr bool kWide = kSlots > 8;                              // no register is left for more than one

  int lane = ptx::thread_index() % kWarpSize;
  int first_column = 0;
  SplitSum total = SplitSum::of_no_keys();  // of what is added so far, relative to the base
  float o[kSlots] = {};                     // column_of(slot)

  FA_DEVICE int column_of(int slot) const { return first_column + slot * kWarpSize + lane; }

  /// A log-sum-exp that the base has to be as great as.
  FA_DEVICE void join(const SplitSum& part) {
    if (!part.is_above(total)) return;
    total.high = part.high;
    total.low = part.low;
  }

  /// Those of `count` partial results; `index(i)` is the row of one.
  template <class Index>
  FA_DEVICE void join_all(const float* partial_o, const float* sums, int count, const Index& index) {
    if constexpr (kWide) {
      for (int i = 0; i < count; ++i) join(SplitSum::load(sums, index(i)));
    } else {
      load(partial_o, 0, count, index);
      join_by_lanes(sums, count, index);
    }
  }

  /// All have joined. Without a key the base is 0: -inf has no difference to itself.
  FA_DEVICE void begin() {
    if (total.high == -kInfinity) total.high = 0.f;
  }

  FA_DEVICE float inverse_sum() const { return total.sum == 0.f ? 0.f : 1.f / total.sum; }

  /// What O of a partial result is multiplied with.
  FA_DEVICE float weight_of(const SplitSum& part) const { return part.over(total) * part.sum; }

  template <class Index>
  FA_DEVICE void add_all(const float* partial_o, const float* sums, int count, const Index& index) {
    if constexpr (kWide) {
      add_one_by_one(partial_o, sums, count, index);
    } else {
      add_ahead(partial_o, sums, count, index);
    }
  }

 protected:
  float ahead_[kWide ? 1 : kAhead][kSlots];  // of results whose loads are in flight
  SplitSum own_ = SplitSum::of_no_keys();    // of result `lane`

  template <class Index>
  FA_DEVICE void load(const float* partial_o, int first, int count, const Index& index) {
    FA_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      FA_UNROLL
      for (int slot = 0; slot < kSlots; ++slot) {
        ahead_[i][slot] = 0.f;
        if (first + i < count && column_of(slot) < kHeadDimV)
          ahead_[i][slot] = ptx::ld_global(partial_o + index(first + i) * kHeadDimV + column_of(slot));
      }
    }
  }

  template <class Index>
  FA_DEVICE void join_by_lanes(const float* sums, int count, const Index& index) {
    for (int first = 0; first < count; first += kWarpSize) {
      SplitSum part = SplitSum::of_no_keys();
      if (first + lane < count) part = SplitSum::load(sums, index(first + lane));
      if (first == 0) own_ = part;
      join_lanes(part);
    }
  }

  /// Those of all lanes.
  FA_DEVICE void join_lanes(const SplitSum& part) {
    const float high = warp_max(part.high);
    uint32_t holders = ptx::vote_ballot(part.high == high);
    if ((holders & (holders - 1)) != 0) {  // rare: products that one float does not tell apart
      const float low = part.high == high ? part.low : -kInfinity;
      holders = ptx::vote_ballot(low == warp_max(low));
    }
    const int from = ptx::popc(lowest_below(holders));
    join({shuffled(part.high, from), shuffled(part.low, from), 0.f});
  }

  static FA_DEVICE float warp_max(float value) {
    FA_UNROLL
    for (int mask = 1; mask < kWarpSize; mask *= 2) value = ptx::max(value, ptx::shfl_xor(value, mask));
    return value;
  }

  template <class Index>
  FA_DEVICE void add_one_by_one(const float* partial_o, const float* sums, int count, const Index& index) {
    for (int i = 0; i < count; ++i) {
      const float weight = weight_of(SplitSum::load(sums, index(i)));
      total.sum += weight;
      const float* const partial = partial_o + index(i) * kHeadDimV;
      FA_UNROLL
      for (int slot = 0; slot < kSlots; ++slot) {
        if (column_of(slot) < kHeadDimV) o[slot] += weight * ptx::ld_global(partial + column_of(slot));
      }
    }
  }

  template <class Index>
  FA_DEVICE void add_ahead(const float* partial_o, const float* sums, int count, const Index& index) {
    for (int first = 0; first < count; first += kWarpSize) {
      if (first > 0) own_ = first + lane < count ? SplitSum::load(sums, index(first + lane)) : SplitSum::of_no_keys();
      const float weight_of_lane = weight_of(own_);
      const int end = count - first < kWarpSize ? count - first : kWarpSize;
      for (int at = 0; at < end; at += kAhead) {
        if (first + at > 0) load(partial_o, first + at, count, index);
        FA_UNROLL
        for (int i = 0; i < kAhead; ++i) {
          if (at + i >= end) break;
          const float weight = shuffled(weight_of_lane, at + i);
          total.sum += weight;
          FA_UNROLL
          for (int slot = 0; slot < kSlots; ++slot) o[slot] += weight * ahead_[i][slot];
        }
      }
    }
  }

  static FA_DEVICE float shuffled(float value, int lane) { return ptx::from_bits(ptx::shfl(ptx::bits(value), lane)); }
  /// As many bits as are below the lowest of `mask`; none for an empty one.
  static FA_DEVICE uint32_t lowest_below(uint32_t mask) { return mask == 0 ? 0 : (mask & (0 - mask)) - 1; }
};

/// The same of a column a lane, and results that lie equally far from each other: where they are is found before they
/// may be read, and log-sum-exps and the first columns are on their way together.
template <int kHeadDimV>
struct EvenMerge : PartialMerge<kHeadDimV, 1> {
  using Base = PartialMerge<kHeadDimV, 1>;
  using Base::kAhead, Base::lane, Base::total, Base::o, Base::ahead_, Base::own_;

  const float* sums;             // of the result of this lane's number
  const float* columns[kAhead];  // of the first results
  int64_t rows;                  // of a result
  int count;

  FA_DEVICE EvenMerge(const float* partial_o, const float* partial_sums, int first, int64_t row, int64_t of_each,
                      int results)
      : sums(partial_sums + kSplitSumFloats * (lane * of_each + row)), rows(of_each), count(results) {
    Base::first_column = first;
    ptx::compute_ahead(sums);
    const int own = first + lane;
    FA_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      columns[i] = partial_o + (i * rows + row) * kHeadDimV + (own < kHeadDimV ? own : kHeadDimV - 1);
      ptx::compute_ahead(columns[i]);
    }
  }

  FA_DEVICE void join_all() {
    own_ = sums_of_lane(0);
    load_columns(0);
    Base::join_lanes(own_);
    FA_UNROLL_BY(1)
    for (int first = kWarpSize; first < count; first += kWarpSize) Base::join_lanes(sums_of_lane(first));
  }

  FA_DEVICE void add_all() {
    float weight = Base::weight_of(own_);  // 0 of results that there are not
    add_columns(weight, 0);
    FA_UNROLL_BY(1)
    for (int at = kAhead; at < count; at += kAhead) {
      load_columns(at);
      if (at % kWarpSize == 0) weight = Base::weight_of(sums_of_lane(at));
      add_columns(weight, at);
    }
  }

 protected:
  FA_DEVICE SplitSum sums_of_lane(int first) const {
    if (first + lane >= count) return SplitSum::of_no_keys();
    return SplitSum::load(sums, first * rows);
  }
  FA_DEVICE void load_columns(int first) {
    FA_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      ahead_[i][0] = 0.f;
      if (first + i < count) ahead_[i][0] = ptx::ld_global(columns[i] + first * rows * kHeadDimV);
    }
  }
  FA_DEVICE void add_columns(float weight_of_lane, int first) {
    FA_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      const float weight = Base::shuffled(weight_of_lane, first % kWarpSize + i);
      total.sum += weight;
      o[0] += weight * ahead_[i][0];
    }
  }
};

/// The same sum as a fold over the splits from the last to the first, by the operations of FoldedRow and in their
/// order: the bits are those of a block that has all splits. What O so far and each O are multiplied with follows from
/// the sums alone, which lanes find for 32 splits at once.
template <int kHeadDimV>
struct EvenFold : EvenMerge<kHeadDimV> {
  using Base = EvenMerge<kHeadDimV>;
  using Base::kAhead, Base::lane, Base::o, Base::ahead_, Base::own_, Base::count;

  FoldedRow folded;

  FA_DEVICE EvenFold(const float* partial_o, const float* partial_sums, int first, int64_t row, int64_t of_each,
                     int results)
      : Base(partial_o + (results - 1) * of_each * kHeadDimV, partial_sums + (results - 1) * of_each * kSplitSumFloats,
             first, row, -of_each, results) {}

  /// What comes first.
  FA_DEVICE void load_first() {
    own_ = Base::sums_of_lane(0);
    Base::load_columns(0);
  }

  FA_DEVICE void add_all() {
    FoldedRow::Weights weights = weights_of_lanes();
    add_columns(weights, 0);
    FA_UNROLL_BY(1)
    for (int at = kAhead; at < count; at += kAhead) {
      Base::load_columns(at);
      if (at % kWarpSize == 0) {
        own_ = Base::sums_of_lane(at);
        weights = weights_of_lanes();
      }
      add_columns(weights, at);
    }
  }

 private:
  /// As FoldedRow::add, of the split of each lane behind those of the lanes before and of `folded`.
  FA_DEVICE FoldedRow::Weights weights_of_lanes() {
    SplitSum base = own_;  // the greatest number that a sum up to this lane's is relative to
    if (own_.sum == 0.f) base = SplitSum::of_no_keys();
    if (lane == 0 && folded.total.sum != 0.f && !base.is_above(folded.total)) base = folded.total;
    FA_UNROLL
    for (int step = 1; step < kWarpSize; step *= 2) {
      const SplitSum before = held_before(base, step);
      if (lane >= step && !base.is_above(before)) base = before;
    }
    SplitSum before = held_before(base, 1);
    if (lane == 0) before = folded.total.sum == 0.f ? SplitSum::of_no_keys() : folded.total;
    const SplitSum last = base.of_lane(kWarpSize - 1);
    folded.total.high = last.high;
    folded.total.low = last.low;
    if (own_.sum == 0.f) return {1.f, 0.f};
    return {before.high == -kInfinity ? 0.f : before.over(base), ptx::multiply(own_.over(base), own_.sum)};
  }
  static FA_DEVICE SplitSum held_before(const SplitSum& sum, int lanes) {
    const int from = (ptx::thread_index() - lanes) % kWarpSize;
    return {Base::shuffled(sum.high, from), Base::shuffled(sum.low, from), 0.f};
  }
  FA_DEVICE void add_columns(const FoldedRow::Weights& of_lane, int first) {
    FA_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      const int from = first % kWarpSize + i;
      const FoldedRow::Weights weights{Base::shuffled(of_lane.so_far, from), Base::shuffled(of_lane.split, from)};
      folded.total.sum = ptx::fma(folded.total.sum, weights.so_far, weights.split);
      o[0] = FoldedRow::join(o[0], ahead_[i][0], weights);
    }
  }
};

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_PARTIAL_MERGE_CUH_
