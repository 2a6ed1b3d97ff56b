#ifndef FA_TEMPLATES_COMMON_AFFINE_REACH_CUH_
#define FA_TEMPLATES_COMMON_AFFINE_REACH_CUH_

#include <common/constants.cuh>
#include <common/forward_schedule.cuh>
#include <common/variant.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>

namespace fa::kernel {

/// Keys [begin, end).
struct KeySpan {
  int begin;
  int end;
};

/// Of an affine score function, which takes from the score by distance: keys so far that their weight is lost when
/// numbers are rounded need not be looked at.
///
/// Raw scores of a head lie within |q| |k| of 0, by the greatest norms of its rows (row_norms.cuh). So a key whose bias
/// is less than that of a row's best visible key by 2 |q| |k| and the logarithm of 2^kLostBits * s_kv besides has less
/// than 2^-kLostBits / s_kv of the row's sum, and all of these together less than 2^-kLostBits. NaNs and infinities
/// among the norms leave nothing out.
template <class Variant, bool kCausal>
struct AffineReach {
  static constexpr float kLostBits = 30.f;
  static constexpr float kFarthest = static_cast<float>(1 << 30);

  /// The keys that count for any of the rows from `first` to `last` of a query head; both exist.
  template <class Params>
  static FA_DEVICE KeySpan of(const Params& params, int batch, int head, int first, int last) {
    Place at{batch, head, first, 0, 0, 0, params.s_q, params.s_kv, params.variant.scale};
    const AffineRow of_first = Variant::affine(params.variant, at);
    at.q = last;
    const AffineRow of_last = Variant::affine(params.variant, at);  // x is affine in the row, too, and the factor fixed
    const float growth = of_first.factor * Variant::kAffineStep;    // of the raw score, from key to key
    const KeySpan all{0, params.s_kv};
    if (Variant::kAffineAbs && of_first.factor >= 0.f) return all;
    const uint32_t* norms = params.variant.norms;
    const float q = ptx::from_bits(ptx::ld_global(norms + batch * params.h_q + head));
    const float k =
        ptx::from_bits(ptx::ld_global(norms + params.b * params.h_q + batch * params.h_kv + head / params.group));
    const float bits = kLostBits + ptx::lg2(static_cast<float>(params.s_kv));
    const float keys =
        (2.f * root(q) * root(k) + bits * inverse(params.scale_log2)) * inverse(ptx::abs(growth)) * kRounded;
    if (!(keys < kFarthest)) return all;
    const float limits[2] = {limit(params, first), limit(params, last)};
    float lowest, highest;
    if constexpr (Variant::kAffineAbs) {
      constexpr float kInverseStep = 1.f / Variant::kAffineStep;
      const float a = of_first.base * -kInverseStep;  // the key of x = 0
      const float b = of_last.base * -kInverseStep;
      lowest = ptx::min(farthest_below(a, limits[0]), farthest_below(b, limits[1])) - keys;
      highest = ptx::max(farthest_above(a, limits[0]), farthest_above(b, limits[1])) + keys;
    } else {
      lowest = growth > 0.f ? ptx::min(limits[0], limits[1]) - 1.f - keys : 0.f;
      highest = growth > 0.f ? kFarthest : keys;
    }
    return {key_of(lowest * (2.f - kRounded) - 2.f, params.s_kv), key_of(highest * kRounded + 2.f, params.s_kv)};
  }

 private:
  static constexpr float kRounded = 1.00001f;  // for what rounding takes from a bound

  /// Bounds from above: instructions that take subnormal numbers for 0 are given none, nor return one. The least that
  /// is added to a squared norm is more than what it has lost by squares that are no floats.
  static FA_DEVICE float root(float squared_norm) {
    constexpr float kLost = 2.3509887e-38f;  // 2^-125
    return ptx::sqrt(squared_norm + kLost);
  }
  static FA_DEVICE float inverse(float x) { return ptx::rcp(0.25f * x) * 0.25f; }

  template <class Params>
  static FA_DEVICE float limit(const Params& params, int row) {
    return static_cast<float>(key_limit<kCausal>(params, row));
  }

  /// The best of the keys from 0 to before `end` is the nearest to x = 0. As far from it on the other side lies the
  /// last key that is as good. Over the rows of a tile the lowest such key is at its first or its last row, for these
  /// are minima of what is affine in the row; likewise the highest.
  static FA_DEVICE float farthest_below(float turn, float end) {
    return ptx::min(ptx::min(turn, 2.f * turn), end - 1.f);
  }
  static FA_DEVICE float farthest_above(float turn, float end) {
    return ptx::max(ptx::max(turn, 0.f), 2.f * turn - end + 1.f);
  }

  static FA_DEVICE int key_of(float key, int s_kv) {
    return static_cast<int>(ptx::max(ptx::min(key, static_cast<float>(s_kv)), 0.f));
  }
};

/// The KV tiles of `range` that hold one of the keys.
template <int kTileN>
FA_DEVICE KvRange within(KvRange range, const KeySpan& keys) {
  const int begin = keys.begin / kTileN;
  const int end = ceil_div(keys.end, kTileN);
  const KvRange clipped{range.begin < begin ? begin : range.begin, range.plain_end, range.end < end ? range.end : end};
  return clipped.begin < clipped.end ? clipped : range;
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_AFFINE_REACH_CUH_
