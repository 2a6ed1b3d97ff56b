#ifndef FA_TEMPLATES_SM90_SM90_SOFTMAX_CUH_
#define FA_TEMPLATES_SM90_SM90_SOFTMAX_CUH_

#include <common/constants.cuh>
#include <common/log_sum.cuh>
#include <common/row_entropy.cuh>
#include <common/types.cuh>
#include <ptx/math.cuh>
#include <ptx/thread.cuh>

namespace fa::sm90 {

using kernel::kInfinity;
using kernel::kLargestOffset;
using kernel::LogSum;

/// A sum of P that is less can be divided by a power of two, in floats or in pairs of T, to be what it would have been.
template <class T>
struct LeastLost {
  static constexpr float kOfFloats = 1e30f;
  static constexpr float kOfPairs = kOfFloats;
};
template <>
struct LeastLost<kernel::f16> : LeastLost<float> {
  static constexpr float kOfPairs = 32768.f;
};

/// What a thread keeps of the two rows (lane / 4 and lane / 4 + 8 of a warp's 16) that it shares with the other three
/// lanes of its quad. Accumulator register 4j + 2r + e belongs to row r.
struct RowStatistics {
  float sum[2] = {0.f, 0.f};     // of this thread's columns
  float factor[2] = {1.f, 1.f};  // what O has to be multiplied with after `update` returned true

  /// 1 / sum, and 0 for a row without keys. A NaN sum stays NaN.
  FA_DEVICE float inverse_sum(int r) const { return sum[r] == 0.f ? 0.f : ptx::rcp(sum[r]); }

 protected:
  static constexpr int kBitsBelowAll = -0x7fffffff - 1;
  static constexpr int kChains = 4;  // of dependent maxima

  /// P of n8 tile j to the sums of even and odd columns,
  template <int kCount>
  FA_DEVICE static void add_tile(const float (&p)[kCount], int j, float (&total)[2][2]) {
    FA_UNROLL
    for (int i = 0; i < 4; ++i) total[i / 2][i % 2] += p[4 * j + i];
  }

  /// or to those of all.
  template <int kCount>
  FA_DEVICE static void add_tile(const float (&p)[kCount], int j, float (&total)[2]) {
    FA_UNROLL
    for (int r = 0; r < 2; ++r) total[r] += p[4 * j + 2 * r] + p[4 * j + 2 * r + 1];
  }

  /// The greatest of a row's bits as integers: those of its greatest score where that is positive.
  FA_DEVICE static int quad_max(int bits) {
    bits = ptx::max3(bits, ptx::shfl_xor(bits, 1), kBitsBelowAll);
    return ptx::max3(bits, ptx::shfl_xor(bits, 2), kBitsBelowAll);
  }

  FA_DEVICE static float quad_sum(float x) {
    x += ptx::shfl_xor(x, 1);
    return x + ptx::shfl_xor(x, 2);
  }

  FA_DEVICE static float quad_max(float x) {
    x = ptx::max(x, ptx::shfl_xor(x, 1));
    return ptx::max(x, ptx::shfl_xor(x, 2));
  }

  template <int kCount>
  FA_DEVICE static float lane_max(const float (&s)[kCount], int r, int end = kCount) {
    float all = -kInfinity;
    FA_UNROLL
    for (int i = 2 * r; i < end; i += 4) all = ptx::max(all, ptx::max(s[i], s[i + 1]));
    return all;
  }

  template <int kCount>
  FA_DEVICE static float row_max(const float (&s)[kCount], int r) {
    return quad_max(lane_max(s, r));
  }
};

/// P = exp2(scale_log2 * S + shift - offset), where the offset trails the row's true maximum. Exponentials take the old
/// offset at once, and that a score passes it by much shows in the sums that are taken anyway. P and its sums are then
/// divided by a power of two, which changes no bit of them, unless a score passed the offset by so much that P is lost:
/// the caller makes the scores again, and `rebase` takes their greatest.
///
/// A row's first offset is its greatest score. Where no float is near enough to that (`is_far`), the row's scores are
/// made again in every KV tile, and their greatest is subtracted before the scale, as in any softmax in float.
///
/// kShifts: there are shifts, whose difference to a large offset is no float. Rows are far earlier then.
///
/// With kEntropy the rows' entropy is taken along: by the same formula, as that is of P relative to any offset.
///
/// With kAlone what becomes of a row follows from its own scores: the others of a warp whose P is lost keep theirs.
template <bool kShifts, bool kEntropy = false, bool kAlone = false>
struct SummedSoftmax : RowStatistics, kernel::RowEntropy<1, kEntropy> {
  static constexpr float kSlack = 256.f;  // of a lane's sum of a KV tile's P
  static constexpr int kFirstTiles = 1;   // n8 tiles whose keys are searched with kAlone

  float offset[2] = {0.f, 0.f};  // log2 units, or a mark of far rows; of a row without keys it says nothing
  float own[2] = {0.f, 0.f};     // sums of the last KV tile, not yet in `sum`
  [[maybe_unused]] float own_weighted[2] = {0.f, 0.f};  // likewise of P log2 P, with kEntropy

  /// Whether rows of the lane have seen no key; of other lanes of the row they may have.
  FA_DEVICE bool may_lack_offset() const { return sum[0] == 0.f || sum[1] == 0.f; }

  /// Rows without an offset take their greatest score for it. With kAlone that of the tile's first keys, of which a row
  /// sees one where it sees any: an offset for each split has to be found soon, and trails all the same.
  template <int kCount>
  FA_DEVICE void take_greatest(const float (&s)[kCount], float scale_log2, const float (&shift)[2]) {
    constexpr int kSearched = kAlone && 4 * kFirstTiles < kCount ? 4 * kFirstTiles : kCount;
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      float best = lane_max(s, r, kSearched);
      const bool first = quad_sum(sum[r]) == 0.f && !is_far(r);
      float greatest;
      if constexpr (kAlone) {  // without shifts
        best = quad_max(best);
        greatest = ptx::fma(best, scale_log2, 0.f);
      } else {
        greatest = quad_max(ptx::fma(best, scale_log2, shift[r]));  // shifts are the lanes' own
        best = quad_max(best);
      }
      if (first && best != -kInfinity) offset[r] = fits(greatest) ? greatest : mark(greatest);
    }
  }

  /// Turns scores into P in place; `before(n)` is called before n8 tile n is taken and `each(n)` when it is done.
  /// shift: what is to be added to all scaled scores of a row, in log2 units. With kPartial only the first `visible` of
  /// kChunks pieces hold keys that the warp sees, and at least one does: P of the others is 0. True when a score has
  /// passed its offset: then `lost` and `raise` have to be asked.
  template <int kChunks, bool kPartial, int kCount, class Before, class Each>
  FA_DEVICE bool exponentiate(float (&s)[kCount], float scale_log2, const float (&shift)[2],
                              [[maybe_unused]] int visible, const Before& before, const Each& each) {
    constexpr int kTiles = kCount / 4;  // n8 tiles
    const float subtracted[2] = {offset[0] - shift[0], offset[1] - shift[1]};
    float total[2][2] = {};
    if constexpr (kEntropy) own_weighted[0] = own_weighted[1] = 0.f;
    [[maybe_unused]] int seen = kCount;  // elements of pieces that hold keys
    FA_UNROLL
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int begin = kTiles * chunk / kChunks;
      const int end = kTiles * (chunk + 1) / kChunks;
      if (kPartial && chunk > 0 && chunk >= visible) {
        add_tile(s, begin - 1, total);
        if constexpr (kEntropy) seen = 4 * begin;
        break;
      }
      FA_UNROLL
      for (int j = 0; j < kTiles; ++j) {
        if (j < begin || j >= end) continue;
        before(j);
        FA_UNROLL
        for (int i = 4 * j; i < 4 * j + 4; ++i) {
          const float lower = ptx::fma(s[i], scale_log2, -subtracted[i / 2 % 2]);
          s[i] = ptx::ex2(lower);
          if constexpr (kEntropy) own_weighted[i / 2 % 2] = ptx::fma(s[i], lower, own_weighted[i / 2 % 2]);
        }
        each(j);
        // A tile behind: no sum waits for an exponential.
        if (j > 0) add_tile(s, j - 1, total);
      }
      if (end == kTiles) add_tile(s, kTiles - 1, total);
    }
    FA_UNROLL
    for (int r = 0; r < 2; ++r) own[r] = total[r][0] + total[r][1];
    if constexpr (kEntropy) this->mend(s, seen, own_weighted);
    return ptx::vote_any(ptx::max3(bits_of(own[0]), bits_of(own[1]), kBitsBelowAll) > bits_of(kSlack));
  }

  /// Whether P of a row of the warp is lost: a sum is `least_lost` or more, or the row is far. With kExactSteps also
  /// where an offset could not rise by whole steps, and under shifts. A NaN is not lost.
  template <bool kExactSteps>
  FA_DEVICE bool lost(float least_lost) const {
    bool any = false;
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      any = any || own[r] >= least_lost || is_far(r);
      if (kExactSteps || kShifts) any = any || !(ptx::abs(offset[r]) <= kLargestOfSteps);
    }
    return ptx::vote_any(any);
  }

  /// Of which rows the scores are made again where `lost` is true; without kAlone of all.
  struct LostRows {
    static constexpr bool kAll = !kAlone;
    bool is[kAlone ? 2 : 1];
  };
  FA_DEVICE LostRows lost_rows([[maybe_unused]] float least_lost) const {
    LostRows rows = {};
    if constexpr (kAlone) {
      FA_UNROLL
      for (int r = 0; r < 2; ++r) rows.is[r] = quad_max(own[r]) >= least_lost || is_far(r);
    }
    return rows;
  }

  /// Whether P, made under the row's offset, is of a key that the row sees, unless that P is negligible: of far rows P
  /// is infinite then. `score` is that of the key: a NaN is one of both.
  FA_DEVICE static bool is_seen(float p, float score) { return p > 0.f || (p != p && score != score); }

  /// Turns scores that have been made again, -inf where no key is seen, into P relative to the greatest of their row
  /// where that is greater than its reference. O has to be multiplied with `factor`.
  /// `each(i)` is called when elements 2i and 2i + 1 are done.
  template <int kCount, class Each>
  FA_DEVICE void rebase(float (&s)[kCount], float scale_log2, [[maybe_unused]] const LostRows& lost, const Each& each) {
    FA_UNROLL
    for (int r = 0; r < 2; ++r) take_reference(r, row_max(s, r), scale_log2, lost);
    ptx::sync_warp();  // one thing after the other: fewer registers
    float score[2], subtracted[2];
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      const float held = ptx::shfl_quad(sum[r], kScoreLane);
      score[r] = is_far(r) ? held : 0.f;
      subtracted[r] = is_far(r) ? 0.f : offset[r];
    }
    float total[2] = {0.f, 0.f};
    if constexpr (kEntropy) own_weighted[0] = own_weighted[1] = 0.f;
    FA_UNROLL
    for (int j = 0; j < kCount / 4; ++j) {
      FA_UNROLL
      for (int i = 4 * j; i < 4 * j + 4; ++i) {
        const float lower = ptx::fma(s[i] - score[i / 2 % 2], scale_log2, -subtracted[i / 2 % 2]);
        if constexpr (!kAlone) s[i] = ptx::ex2(lower);
        if constexpr (kAlone) s[i] = lost.is[i / 2 % 2] ? ptx::ex2(lower) : s[i];
        if constexpr (kEntropy) own_weighted[i / 2 % 2] = ptx::fma(s[i], lower, own_weighted[i / 2 % 2]);
      }
      add_tile(s, j, total);
      each(j);
    }
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      if constexpr (kAlone) total[r] = lost.is[r] ? total[r] : own[r];
      const float all = quad_sum(total[r]);
      own[r] = !is_far(r) ? total[r] : ptx::lane_index() % 4 == kSumLane ? all : 0.f;
    }
    if constexpr (kEntropy) this->mend(s, kCount, own_weighted);
  }

  /// Raises the offsets of rows of which a lane's sum is above the slack; `shrink(r, step)` multiplies P.
  template <class Shrink>
  FA_DEVICE void raise(const Shrink& shrink) {
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int bits = quad_max(bits_of(own[r]));
      const bool moves = bits > bits_of(kSlack) && bits < bits_of(kInfinity);  // a NaN stays what it is
      const int steps = moves ? bits / (1 << kMantissaBits) - kBias : 0;
      const float raised = offset[r] + static_cast<float>(steps);
      const float rounding = static_cast<float>(steps) - (raised - offset[r]);  // 0 but of large offsets
      const float power = ptx::from_bits(static_cast<uint32_t>(kBias - steps) << kMantissaBits);
      const float step = moves ? power * ptx::ex2(rounding) : 1.f;  // of a mark that is infinite nothing can be taken
      if (moves) offset[r] = raised;
      if constexpr (kEntropy) {
        this->shrink_entropy(0, r, sum[r], step);
        own_weighted[r] = this->shrunk(own_weighted[r], own[r], step);
      }
      factor[r] *= step;
      sum[r] *= step;
      own[r] *= step;
      shrink(r, step);
    }
  }

  /// Of a KV tile.
  FA_DEVICE void see_nothing() {
    own[0] = own[1] = 0.f;
    if constexpr (kEntropy) own_weighted[0] = own_weighted[1] = 0.f;
  }

  FA_DEVICE void add_own() {
    FA_UNROLL
    for (int r = 0; r < 2; ++r) sum[r] += own[r];
    if constexpr (kEntropy) this->add_of_tile(own_weighted);
  }

  /// Sums over the quad; afterwards `sum` is the softmax denominator, and `own` of far rows their greatest score.
  FA_DEVICE void finish() {
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      const float total = quad_sum(sum[r]);
      if (ptx::vote_any(is_far(r))) {
        own[r] = ptx::shfl_quad(sum[r], kScoreLane);
        const float far_total = ptx::shfl_quad(sum[r], kSumLane);
        sum[r] = is_far(r) ? far_total : total;
      } else {
        sum[r] = total;
      }
    }
    if constexpr (kEntropy) this->add_lanes();
  }

  /// The natural log-sum-exp of the scaled scores; -inf for a row without keys.
  template <class Sum = LogSum>
  FA_DEVICE Sum log_sum(int r, float scale_log2) const {
    if (sum[r] == 0.f) return Sum::of_no_keys();
    if (is_far(r)) return Sum::of(own[r], scale_log2 * kernel::kLn2, sum[r]);
    return Sum::of(offset[r], kernel::kLn2, sum[r]);
  }

 private:
  static constexpr int kMantissaBits = 23;  // of float
  static constexpr int kBias = 127;
  static constexpr float kLargestOfSteps = 4096.f;  // a step is off by less than 2^-13 up to here

  FA_DEVICE static bool fits(float reference) {
    return ptx::abs(reference) <= (kShifts ? kLargestOfSteps : kLargestOffset);
  }

  // Marks of far rows in `offset`: P of any key that is seen is infinite, that of others 0. Under the second, for
  // scores that the first would hide, that of others is NaN.
  static constexpr float kFar = -3.40282347e38f;
  static constexpr float kLowest = -1e38f;  // scaled score that the first mark is for

  // Lanes of a quad whose `sum` holds all of a far row: its sum, and its greatest score.
  static constexpr int kSumLane = 0;
  static constexpr int kScoreLane = 1;

  FA_DEVICE bool is_far(int r) const { return offset[r] <= kFar; }
  FA_DEVICE static float mark(float greatest) { return greatest < kLowest ? -kInfinity : kFar; }

  /// A row's reference becomes `best`, before the scale, if that is greater: a score where it is far, else an offset,
  /// behind the scale.
  FA_DEVICE void take_reference(int r, float best, float scale_log2, [[maybe_unused]] const LostRows& lost) {
    const bool was_far = is_far(r);
    const float score_before = ptx::shfl_quad(sum[r], kScoreLane);
    const float score = was_far ? score_before : 0.f;
    const float subtracted = was_far ? 0.f : offset[r];
    const float sum_of_far = ptx::shfl_quad(sum[r], kSumLane);
    const float sum_of_near = quad_sum(sum[r]);
    const bool first = (was_far ? sum_of_far : sum_of_near) == 0.f;
    const float scaled = ptx::multiply(best, scale_log2);  // as it is subtracted from itself
    bool moves = first ? best != -kInfinity : was_far ? best > score : scaled > subtracted;
    if constexpr (kAlone) moves = moves && lost.is[r];
    const bool far = moves ? !fits(scaled) : was_far;
    const float next_score = !far ? 0.f : moves ? best : score;
    const float next_subtracted = far ? 0.f : moves ? scaled : subtracted;
    // Of both kinds of reference the same formula, in which nothing large is rounded.
    const float step = first ? 1.f : ptx::ex2(ptx::fma(score - next_score, scale_log2, subtracted - next_subtracted));
    offset[r] = far ? mark(next_score * scale_log2) : next_subtracted;
    const int place = ptx::lane_index() % 4;
    if (was_far) sum[r] = place == kSumLane ? sum_of_far : 0.f;
    if (far && !was_far) sum[r] = place == kSumLane ? sum_of_near : 0.f;
    if constexpr (kEntropy) this->shrink_entropy(0, r, sum[r], step);
    sum[r] *= step;
    factor[r] *= step;
    if (far && place == kScoreLane) sum[r] = next_score;
  }

  FA_DEVICE static int bits_of(float x) { return static_cast<int>(ptx::bits(x)); }
};

/// P = exp2(scale_log2 * (S - greatest)) for the exact maximum so far: the P that weighs most is 1, which
/// no rounding changes. A step waits for the search over its whole KV tile, and most steps of short rows raise a
/// maximum. With kEntropy the rows' entropy is taken along. With kLogSlack P is relative to a maximum that stays until
/// a P would be above 2^kLogSlack, as FlashAttention-4 has it: O is rarely multiplied.
template <bool kEntropy = false, int kLogSlack = 0>
struct ExactSoftmax : RowStatistics, kernel::RowEntropy<1, kEntropy> {
  // Score of the row, before the scale, that P is relative to; -inf: it has seen no key.
  float greatest[2] = {-kInfinity, -kInfinity};

  /// Turns scores into P in place. True when O must be rescaled by `factor`.
  template <int kCount>
  FA_DEVICE bool update(float (&s)[kCount], float scale_log2) {
    constexpr int kTiles = kCount / 4;
    float score[2];
    const bool rare = find_greatest(score, s, scale_log2);
    bool rises = false;
    float subtracted[2];
    float before[2];
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      before[r] = greatest[r];
      // The first score is infinitely above; a difference that is no number raises too.
      const bool stays = kLogSlack > 0 && (score[r] - greatest[r]) * scale_log2 <= static_cast<float>(kLogSlack);
      if (!stays) greatest[r] = ptx::max(score[r], greatest[r]);
      rises = rises || greatest[r] > before[r];
      subtracted[r] = reference(greatest[r], scale_log2);
      // From the very numbers that P was and will be computed with: exactly 1 for a row whose maximum stayed.
      factor[r] = ptx::ex2(reference(before[r], scale_log2) - subtracted[r]);
    }
    if (rare) subtract_first(s, subtracted, before, scale_log2);
    if constexpr (kEntropy) {
      if (ptx::vote_any(rises)) {
        FA_UNROLL
        for (int r = 0; r < 2; ++r) this->shrink_entropy(0, r, sum[r], factor[r]);
      }
    }
    float total[2][2] = {};
    [[maybe_unused]] float of_tile[2] = {0.f, 0.f};  // sums of P t of this KV tile
    FA_UNROLL
    for (int r = 0; r < 2; ++r) sum[r] *= factor[r];
    FA_UNROLL
    for (int j = 0; j < kTiles; ++j) {
      FA_UNROLL
      for (int i = 4 * j; i < 4 * j + 4; ++i) {
        [[maybe_unused]] const float lower = ptx::fma(s[i], scale_log2, -subtracted[i / 2 % 2]);
        s[i] = ptx::ex2(lower);
        if constexpr (kEntropy) of_tile[i / 2 % 2] = ptx::fma(s[i], lower, of_tile[i / 2 % 2]);
      }
      if (j > 0) add_tile(s, j - 1, total);  // a tile behind: no sum waits for an exponential
    }
    FA_UNROLL
    for (int r = 0; r < 2; ++r) sum[r] += total[r][0] + total[r][1];
    add_tile(s, kTiles - 1, sum);
    if constexpr (kEntropy) {
      this->mend(s, kCount, of_tile);
      this->add_of_tile(of_tile);
    }
    return ptx::vote_any(rises);
  }

  /// Sums over the quad; afterwards `sum` is the softmax denominator.
  FA_DEVICE void finish() {
    FA_UNROLL
    for (int r = 0; r < 2; ++r) sum[r] = quad_sum(sum[r]);
    if constexpr (kEntropy) this->add_lanes();
  }

  /// The natural log-sum-exp of the scaled scores; -inf for a row without keys.
  template <class Sum = LogSum>
  FA_DEVICE Sum log_sum(int r, float scale_log2) const {
    if (sum[r] == 0.f) return Sum::of_no_keys();
    const float scaled = reference(greatest[r], scale_log2);
    if (!fits(scaled)) return Sum::of(greatest[r], scale_log2 * kernel::kLn2, sum[r]);
    return Sum::of(scaled, kernel::kLn2, sum[r]);
  }

 private:
  static constexpr float kLeast = -3.4e38f;  // finite: a row without keys subtracts it from -inf

  /// Whether a reference in log2 units is a float that P may be relative to: no further than one step from the product
  /// that it stands for.
  FA_DEVICE static bool fits(float reference) { return ptx::abs(reference) <= kLargestOffset; }

  // Scaled scores from here on are looked at: far ones, and all whose P counts beside them.
  static constexpr float kLarge = kLargestOffset / 2;

  FA_DEVICE static float reference(float score, float scale_log2) { return ptx::max(score * scale_log2, kLeast); }

  /// In rows whose scaled maximum no float is near enough to, the maximum is subtracted before the scale.
  template <int kCount>
  FA_DEVICE void subtract_first(float (&s)[kCount], float (&subtracted)[2], const float (&before)[2],
                                float scale_log2) {
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      const bool was_far = before[r] != -kInfinity && !fits(reference(before[r], scale_log2));
      const bool far = greatest[r] != -kInfinity && !fits(subtracted[r]);
      if (far && before[r] != -kInfinity) factor[r] = ptx::ex2((before[r] - greatest[r]) * scale_log2);
      if (far && !was_far && before[r] != -kInfinity) {
        factor[r] = ptx::ex2(ptx::fma(-greatest[r], scale_log2, reference(before[r], scale_log2)));
      }
      if (was_far && !far) factor[r] = ptx::ex2(ptx::fma(before[r], scale_log2, -subtracted[r]));
      const float base = far ? greatest[r] : 0.f;
      if (far) subtracted[r] = 0.f;
      FA_UNROLL
      for (int i = 2 * r; i < kCount; i += (i % 2 == 0 ? 1 : 3)) s[i] -= base;
    }
  }

  /// Of a KV tile's rows, or what is less than `greatest`. True where scores are large: `subtract_first` has to look.
  template <int kCount>
  FA_DEVICE bool find_greatest(float (&score)[2], const float (&s)[kCount], float scale_log2) const {
    int highest[kChains];
    FA_UNROLL
    for (int i = 0; i < kChains; ++i) highest[i] = kBitsBelowAll;
    FA_UNROLL
    for (int i = 0; i < kCount; i += 2) {
      int& chain = highest[i / 2 % kChains];  // of row i / 2 % 2
      chain = ptx::max3(chain, static_cast<int>(ptx::bits(s[i])), static_cast<int>(ptx::bits(s[i + 1])));
    }
    // A lane's scores may all be negative, and those of its rows so far: asked before the quad's answer is there.
    bool rare = false;
    int bits[2];
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      bits[r] = ptx::max3(highest[r], highest[r + 2], kBitsBelowAll);
      rare = rare || (bits[r] <= 0 && greatest[r] < 0.f);
      rare = rare || ptx::from_bits(static_cast<uint32_t>(bits[r])) * scale_log2 > kLarge;
    }
    FA_UNROLL
    for (int r = 0; r < 2; ++r) score[r] = ptx::from_bits(static_cast<uint32_t>(quad_max(bits[r])));
    rare = ptx::vote_any(rare);
    if (rare) {
      FA_UNROLL
      for (int r = 0; r < 2; ++r) score[r] = row_max(s, r);
    }
    return rare;
  }
};

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_SOFTMAX_CUH_
