#ifndef FA_TEMPLATES_SM90_SM90_SOFTMAX_CUH_
#define FA_TEMPLATES_SM90_SM90_SOFTMAX_CUH_

#include <common/constants.cuh>
#include <common/types.cuh>
#include <ptx/math.cuh>
#include <ptx/thread.cuh>

namespace fa::sm90 {

using kernel::kInfinity;

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

  /// Sums over the quad; afterwards `sum` is the softmax denominator.
  FA_DEVICE void finish() {
    FA_UNROLL
    for (int r = 0; r < 2; ++r) sum[r] = quad_sum(sum[r]);
  }

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

  template <int kCount>
  FA_DEVICE static float row_max(const float (&s)[kCount], int r, int begin, int end) {
    float all = -kInfinity;
    FA_UNROLL
    for (int j = 0; j < kCount / 4; ++j) {
      if (j >= begin && j < end) all = ptx::max(all, ptx::max(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
    }
    all = ptx::max(all, ptx::shfl_xor(all, 1));
    return ptx::max(all, ptx::shfl_xor(all, 2));
  }
};

/// P = exp2(scale_log2 * S - offset), where the offset trails the row's true maximum by up to kSlack: it is raised, and
/// O rescaled, only when a score passes it by more, which is rare. P <= 2^kSlack then, and neither the rounding of P
/// (floating point) nor the sums in float lose anything by it. What every step has to do is find out that no score did,
/// by an integer maximum of three (floats above the slack are positive, and positive floats order as integers do).
struct TrailingSoftmax : RowStatistics {
  static constexpr float kSlack = 8.f;

  float offset[2] = {-kInfinity, -kInfinity};  // log2 units; -inf: the row has seen no key

  /// Turns scores into P in place, in kChunks pieces so that the search of one piece fills the gaps between the
  /// exponentials of the one before. True when O must be rescaled by `factor`. shift: what is to be added to all scaled
  /// scores of a row, in log2 units. With kPartial only the first `visible` pieces hold keys that the warp sees, and at
  /// least one does: P of the others is 0.
  ///
  /// Exponentials of the first kEarly n8 tiles fill the gaps of the first search. They have registers of their own:
  /// should the search find a score above the slack, they are void.
  ///
  /// A row's first visible key gives it its offset. Without kHoles a tile that a row sees any of shows it its first
  /// key, so that only the first piece looks for rows without an offset.
  template <int kChunks, int kEarly, bool kHoles, bool kPartial, int kCount>
  FA_DEVICE bool update(float (&s)[kCount], float scale_log2, const float (&shift)[2], [[maybe_unused]] int visible) {
    constexpr int kTiles = kCount / 4;  // n8 tiles
    static_assert(kEarly > 0 && kEarly <= kTiles / kChunks);
    bool rescale = false;
    int least = lacks_offset() ? kBitsAboveAll : kBitsBelowAll;
    int highest[kChains];
    FA_UNROLL
    for (int i = 0; i < kChains; ++i) highest[i] = kBitsBelowAll;
    float early[4 * kEarly];
    FA_UNROLL
    for (int j = 0; j < kTiles / kChunks; ++j) {
      if (j == kEarly) start_early(early, s);
      scale_tile<kChains>(s, j, scale_log2, shift, highest);
    }
    if (kEarly == kTiles / kChunks) start_early(early, s);
    bool above = is_above(highest, least);
    FA_UNROLL
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int begin = kTiles * chunk / kChunks;
      const int end = kTiles * (chunk + 1) / kChunks;
      const int next = kTiles * (chunk + 2 > kChunks ? kChunks : chunk + 2) / kChunks;
      if (kPartial && chunk > 0 && chunk >= visible) {
        add_tile(s, begin - 1, sum);
        break;
      }
      if (above) {
        if (!rescale) factor[0] = factor[1] = 1.f;
        rescale = true;
        raise(s, begin, end, highest);
        if (chunk == 0) start_early(early, s);
      }
      FA_UNROLL
      for (int i = 0; i < kChains; ++i) highest[i] = kBitsBelowAll;
      least = kHoles && lacks_offset() ? kBitsAboveAll : kBitsBelowAll;
      float total[2][2] = {};
      FA_UNROLL
      for (int j = 0; j < kTiles; ++j) {
        if (j < begin || j >= end) continue;
        // The next piece's scores, two n8 tiles for one of this piece's, so that the answer is there when it begins.
        const int ahead = end + 2 * (j - begin);
        if (ahead < next) scale_tile<2>(s, ahead, scale_log2, shift, highest);
        if (ahead + 1 < next) scale_tile<2>(s, ahead + 1, scale_log2, shift, highest);
        if (ahead < next && ahead + 2 >= next) above = is_above(highest, least);
        FA_UNROLL
        for (int i = 4 * j; i < 4 * j + 4; ++i) s[i] = j < kEarly ? early[i] : ptx::ex2(s[i]);
        // A tile behind: no sum waits for an exponential at the end of a piece.
        if (j > 0) add_tile(s, j - 1, total);
      }
      FA_UNROLL
      for (int r = 0; r < 2; ++r) sum[r] += total[r][0] + total[r][1];
      if (end == kTiles) add_tile(s, kTiles - 1, sum);
    }
    return rescale;
  }

  /// The natural log-sum-exp of the scaled scores; -inf for a row without keys.
  FA_DEVICE float lse(int r, float /*scale_log2*/) const {
    if (sum[r] == 0.f) return -kInfinity;
    return kernel::kLn2 * ((offset[r] == -kInfinity ? 0.f : offset[r]) + ptx::lg2(sum[r]));
  }

 private:
  static constexpr int kBitsAboveAll = 0x7fffffff;

  // The offset of a row that has none yet, so that its scores are positive as a rule, and the search finds the
  // greatest.
  static constexpr float kFirstOffset = -16.f;

  FA_DEVICE bool lacks_offset() const { return offset[0] == -kInfinity || offset[1] == -kInfinity; }

  /// Scores of n8 tile j relative to the offsets; the greatest so far.
  template <int kUsed, int kCount>
  FA_DEVICE void scale_tile(float (&s)[kCount], int j, float scale_log2, const float (&shift)[2],
                            int (&highest)[kChains]) const {
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      const float subtracted = (offset[r] == -kInfinity ? kFirstOffset : offset[r]) - shift[r];
      float& a = s[4 * j + 2 * r];
      float& b = s[4 * j + 2 * r + 1];
      a = ptx::fma(a, scale_log2, -subtracted);
      b = ptx::fma(b, scale_log2, -subtracted);
      int& chain = highest[2 * j % kUsed + r];
      chain = ptx::max3(chain, static_cast<int>(ptx::bits(a)), static_cast<int>(ptx::bits(b)));
    }
  }

  /// Whether a row of the warp has a score above the slack, or a lane `least` above it.
  FA_DEVICE static bool is_above(const int (&highest)[kChains], int least) {
    const int greatest = ptx::max3(highest[0], highest[1], ptx::max3(highest[2], highest[3], least));
    return ptx::vote_any(greatest > static_cast<int>(ptx::bits(kSlack)));
  }

  template <int kEarlyCount, int kCount>
  FA_DEVICE static void start_early(float (&early)[kEarlyCount], const float (&s)[kCount]) {
    FA_UNROLL
    for (int i = 0; i < kEarlyCount; ++i) early[i] = ptx::ex2(s[i]);
  }

  /// Raises the offsets of rows that need it to their highest score in n8 tiles begin to end, and corrects what was
  /// computed with the old ones: P before `begin` and the scaled scores of these tiles.
  template <int kCount>
  FA_DEVICE void raise(float (&s)[kCount], int begin, int end, const int (&highest)[kChains]) {
    float score[2];
    bool unknown = false;  // the greatest score of a row that has no offset yet
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int bits = quad_max(ptx::max3(highest[r], highest[r + 2], kBitsBelowAll));
      score[r] = ptx::from_bits(static_cast<uint32_t>(bits));
      unknown = unknown || (offset[r] == -kInfinity && bits <= 0);
    }
    if (ptx::vote_any(unknown)) {
      FA_UNROLL
      for (int r = 0; r < 2; ++r) score[r] = row_max(s, r, begin, end);
    }
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      const bool first = offset[r] == -kInfinity;
      const bool moves = first ? score[r] != -kInfinity : score[r] > kSlack;
      const float step = moves ? score[r] : 0.f;
      const float shrink = !moves ? 1.f : first ? 0.f : ptx::ex2(-step);
      if (moves) offset[r] = (first ? kFirstOffset : offset[r]) + step;
      factor[r] *= shrink;
      sum[r] *= shrink;
      FA_UNROLL
      for (int i = 2 * r; i < kCount; i += (i % 2 == 0 ? 1 : 3)) {
        if (i / 4 < begin) s[i] *= shrink;
        if (i / 4 >= begin && i / 4 < end) s[i] -= step;
      }
    }
  }
};

/// The same without a search in every step: exponentials take the old offset at once, and that a score passes it by
/// much shows in the sums that are taken anyway. P and its sums are then divided by a power of two, which changes no
/// bit of them, unless a score passed the offset by so much that P is lost: the caller makes the scores again.
///
/// A row's first offset is its greatest score.
struct SummedSoftmax : RowStatistics {
  static constexpr float kSlack = 256.f;  // of a lane's sum of a KV tile's P

  float offset[2] = {0.f, 0.f};  // log2 units; of a row without keys it says nothing
  float own[2] = {0.f, 0.f};     // sums of the last KV tile, not yet in `sum`

  /// Whether rows of the lane have seen no key; of other lanes of the row they may have.
  FA_DEVICE bool may_lack_offset() const { return sum[0] == 0.f || sum[1] == 0.f; }

  /// Rows without an offset take their greatest score for it; with kRises others do so too where it is greater, and
  /// O has to be multiplied with `factor`.
  template <bool kRises, int kCount>
  FA_DEVICE void take_greatest(const float (&s)[kCount], float scale_log2) {
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      const float greatest = row_max(s, r, 0, kCount / 4) * scale_log2;
      const bool first = quad_sum(sum[r]) == 0.f;
      const bool moves = first ? greatest != -kInfinity : kRises && greatest > offset[r];
      if constexpr (kRises) {
        const float step = moves && !first ? ptx::ex2(offset[r] - greatest) : 1.f;
        factor[r] *= step;
        sum[r] *= step;
      }
      if (moves) offset[r] = greatest;
    }
  }

  /// Turns scores into P in place; `before(n)` is called before n8 tile n is taken and `each(n)` when it is done. With
  /// kPartial only the first `visible` of kChunks pieces hold keys that the warp sees, and at least one does: P of the
  /// others is 0. True when a score has passed its offset: then `lost` and `raise` have to be asked.
  template <int kChunks, bool kPartial, int kCount, class Before, class Each>
  FA_DEVICE bool exponentiate(float (&s)[kCount], float scale_log2, [[maybe_unused]] int visible, const Before& before,
                              const Each& each) {
    constexpr int kTiles = kCount / 4;  // n8 tiles
    float total[2][2] = {};
    FA_UNROLL
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int begin = kTiles * chunk / kChunks;
      const int end = kTiles * (chunk + 1) / kChunks;
      if (kPartial && chunk > 0 && chunk >= visible) {
        add_tile(s, begin - 1, total);
        break;
      }
      FA_UNROLL
      for (int j = 0; j < kTiles; ++j) {
        if (j < begin || j >= end) continue;
        before(j);
        FA_UNROLL
        for (int i = 4 * j; i < 4 * j + 4; ++i) s[i] = ptx::ex2(ptx::fma(s[i], scale_log2, -offset[i / 2 % 2]));
        each(j);
        // A tile behind: no sum waits for an exponential.
        if (j > 0) add_tile(s, j - 1, total);
      }
      if (end == kTiles) add_tile(s, kTiles - 1, total);
    }
    FA_UNROLL
    for (int r = 0; r < 2; ++r) own[r] = total[r][0] + total[r][1];
    return ptx::vote_any(ptx::max3(bits_of(own[0]), bits_of(own[1]), kBitsBelowAll) > bits_of(kSlack));
  }

  /// Whether P of a row of the warp is lost: a sum is `least_lost` or more. A NaN is not.
  FA_DEVICE bool lost(float least_lost) const { return ptx::vote_any(own[0] >= least_lost || own[1] >= least_lost); }

  /// Raises the offsets of rows of which a lane's sum is above the slack; `shrink(r, step)` multiplies P.
  template <class Shrink>
  FA_DEVICE void raise(const Shrink& shrink) {
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int bits = quad_max(bits_of(own[r]));
      const bool moves = bits > bits_of(kSlack) && bits < bits_of(kInfinity);  // a NaN stays what it is
      const int steps = moves ? bits / (1 << kMantissaBits) - kBias : 0;
      const float step = ptx::from_bits(static_cast<uint32_t>(kBias - steps) << kMantissaBits);
      offset[r] += static_cast<float>(steps);
      factor[r] *= step;
      sum[r] *= step;
      own[r] *= step;
      shrink(r, step);
    }
  }

  FA_DEVICE void add_own() {
    FA_UNROLL
    for (int r = 0; r < 2; ++r) sum[r] += own[r];
  }

  /// The natural log-sum-exp of the scaled scores; -inf for a row without keys.
  FA_DEVICE float lse(int r, float /*scale_log2*/) const {
    if (sum[r] == 0.f) return -kInfinity;
    return kernel::kLn2 * (offset[r] + ptx::lg2(sum[r]));
  }

 private:
  static constexpr int kMantissaBits = 23;  // of float
  static constexpr int kBias = 127;

  FA_DEVICE static int bits_of(float x) { return static_cast<int>(ptx::bits(x)); }
};

/// P = exp2(scale_log2 * (S - greatest)) for the exact maximum so far: the P that weighs most is 1, which
/// no rounding changes. A step waits for the search over its whole KV tile, and most steps of short rows raise a
/// maximum.
struct ExactSoftmax : RowStatistics {
  float greatest[2] = {-kInfinity, -kInfinity};  // score of the row, before the scale; -inf: it has seen no key

  /// As TrailingSoftmax::update, in one piece. Scores are searched as they come from the product.
  template <int kChunks, int kEarly, bool kHoles, bool kPartial, int kCount>
  FA_DEVICE bool update(float (&s)[kCount], float scale_log2, const float (&/*shift*/)[2], int /*visible*/) {
    static_assert(!kPartial);
    constexpr int kTiles = kCount / 4;
    float score[2];
    find_greatest(score, s);
    bool rises = false;
    float subtracted[2];
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      const float next = ptx::max(score[r], greatest[r]);
      rises = rises || next > greatest[r];
      subtracted[r] = ptx::max(next * scale_log2, kLeast);
      factor[r] = ptx::ex2(ptx::fma(greatest[r], scale_log2, -subtracted[r]));
      sum[r] *= factor[r];
      greatest[r] = next;
    }
    float total[2][2] = {};
    FA_UNROLL
    for (int j = 0; j < kTiles; ++j) {
      FA_UNROLL
      for (int i = 4 * j; i < 4 * j + 4; ++i) s[i] = ptx::ex2(ptx::fma(s[i], scale_log2, -subtracted[i / 2 % 2]));
      if (j > 0) add_tile(s, j - 1, total);  // a tile behind: no sum waits for an exponential
    }
    FA_UNROLL
    for (int r = 0; r < 2; ++r) sum[r] += total[r][0] + total[r][1];
    add_tile(s, kTiles - 1, sum);
    return ptx::vote_any(rises);
  }

  /// The natural log-sum-exp of the scaled scores; -inf for a row without keys.
  FA_DEVICE float lse(int r, float scale_log2) const {
    if (sum[r] == 0.f) return -kInfinity;
    return kernel::kLn2 * (greatest[r] * scale_log2 + ptx::lg2(sum[r]));
  }

 private:
  static constexpr float kLeast = -3.4e38f;  // finite: a row without keys subtracts it from -inf

  /// Of a KV tile's rows, or what is less than `greatest`.
  template <int kCount>
  FA_DEVICE void find_greatest(float (&score)[2], const float (&s)[kCount]) const {
    constexpr int kTiles = kCount / 4;
    int highest[kChains];
    FA_UNROLL
    for (int i = 0; i < kChains; ++i) highest[i] = kBitsBelowAll;
    FA_UNROLL
    for (int i = 0; i < kCount; i += 2) {
      int& chain = highest[i / 2 % kChains];  // of row i / 2 % 2
      chain = ptx::max3(chain, static_cast<int>(ptx::bits(s[i])), static_cast<int>(ptx::bits(s[i + 1])));
    }
    // A lane's scores may all be negative, and those of its rows so far: asked before the quad's answer is there.
    bool negative = false;
    int bits[2];
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      bits[r] = ptx::max3(highest[r], highest[r + 2], kBitsBelowAll);
      negative = negative || (bits[r] <= 0 && greatest[r] < 0.f);
    }
    FA_UNROLL
    for (int r = 0; r < 2; ++r) score[r] = ptx::from_bits(static_cast<uint32_t>(quad_max(bits[r])));
    if (ptx::vote_any(negative)) {
      FA_UNROLL
      for (int r = 0; r < 2; ++r) score[r] = row_max(s, r, 0, kTiles);
    }
  }
};

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_SOFTMAX_CUH_
