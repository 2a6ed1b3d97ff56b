#ifndef FA_SRC_REFERENCE_GEOMETRY_HPP_
#define FA_SRC_REFERENCE_GEOMETRY_HPP_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include <fa/tensor.hpp>
#include <fa/types.hpp>

#include "reference/elements.hpp"
#include "reference/variant.hpp"
#include "support/shard_place.hpp"

namespace fa::reference {

/// Sizes and mask of one attention call, and what follows from them for a head or a row.
struct Geometry {
  std::int64_t b = 0;
  std::int64_t h_q = 0;
  std::int64_t h_kv = 0;
  std::int64_t s_q = 0;
  std::int64_t s_kv = 0;
  std::int64_t d_qk = 0;
  std::int64_t d_v = 0;
  bool causal = false;
  CausalAlign causal_align = CausalAlign::bottom_right;
  std::int64_t window_left = -1;  ///< -1: unbounded
  std::int64_t window_right = -1;
  std::int64_t chunk = 0;  ///< 0: none
  ShardPlace place = {};   ///< with the sizes of the whole, or none: those of the call
  std::int64_t begin = 0;  ///< keys before it are hidden from all rows

  /// Axes of q [b, h_q, s_q, d_qk], k [b, h_kv, s_kv, d_qk] and v [b, h_kv, s_kv, d_v].
  static Geometry of(const TensorView& q, const TensorView& k, const TensorView& v, bool causal, CausalAlign align,
                     const VariantArgs& variant = {}) {
    return of(q, k, v, k.shape[2], causal, align, variant);
  }
  /// The same of `s_kv` keys, however k and v have them.
  static Geometry of(const TensorView& q, const TensorView& k, const TensorView& v, std::int64_t s_kv, bool causal,
                     CausalAlign align, const VariantArgs& variant) {
    const ShardPlace place = support::resolved(variant.place, {q.shape[0], q.shape[1], q.shape[2], s_kv});
    // Windows that reach from any row to any key hide nothing, whatever their size; nor do chunks of more than both.
    const std::int64_t most = place.whole_s_q + place.whole_s_kv;
    return {q.shape[0],
            q.shape[1],
            k.shape[1],
            q.shape[2],
            s_kv,
            q.shape[3],
            v.dtype == DType::u4x2 ? 2 * v.shape[3] : v.shape[3],
            causal,
            align,
            std::min(variant.window_left, most),
            std::min(variant.window_right, most),
            std::min(variant.chunk, most + 1),
            place};
  }

  /// The KV head that query head `h` reads.
  std::int64_t kv_head(std::int64_t h) const { return h / (h_q / h_kv); }

  /// The number of a query head of the whole, by which dropout draws, less that of the call's first.
  std::int64_t head_of_whole(std::int64_t b_index, std::int64_t h) const {
    return b_index * or_own(place.whole_h_q, h_q) + h;
  }

  /// Row i keeps the keys [first_key(i), visible_keys(i)), if there are any. Neither ever decreases with i.
  std::int64_t first_key(std::int64_t i) const {
    const std::int64_t position = key_position(i);
    std::int64_t first = begin;
    if (window_left >= 0) first = std::max(first, keys_before(position - window_left));
    if (chunk > 0) first = std::max(first, keys_before(chunk_of(position) * chunk));
    return first;
  }
  std::int64_t visible_keys(std::int64_t i) const {
    const std::int64_t position = key_position(i);
    std::int64_t end = s_kv;
    if (causal) end = std::min(end, keys_before(position + 1));
    if (window_right >= 0) end = std::min(end, keys_before(position + window_right + 1));
    if (chunk > 0) end = std::min(end, keys_before((chunk_of(position) + 1) * chunk));
    return std::max<std::int64_t>(end, 0);
  }

  /// Key j is kept by the rows [first_row(j), last_row(j)). Neither ever decreases with j.
  std::int64_t first_row(std::int64_t j) const {
    return first_of([&](std::int64_t i) { return visible_keys(i) > j; });
  }
  std::int64_t last_row(std::int64_t j) const {
    return window_left < 0 && chunk <= 0 ? s_q : first_of([&](std::int64_t i) { return first_key(i) > j; });
  }

  /// The first row for which `holds`, which it does for all after that; else s_q.
  template <class Predicate>
  std::int64_t first_of(const Predicate& holds) const {
    std::int64_t low = 0;
    for (std::int64_t count = s_q; count > 0;) {
      const std::int64_t half = count / 2;
      if (holds(low + half)) {
        count = half;
      } else {
        low += half + 1;
        count -= half + 1;
      }
    }
    return low;
  }

  static std::int64_t or_own(std::int64_t whole, std::int64_t own) { return whole != 0 ? whole : own; }

  std::int64_t chunk_of(std::int64_t key) const { return key / chunk - (key % chunk < 0 ? 1 : 0); }

  /// The key, of the whole, that row i stands at.
  std::int64_t key_position(std::int64_t i) const {
    const bool ends_meet = causal_align == CausalAlign::bottom_right;
    return place.q + i * place.q_step + (ends_meet ? or_own(place.whole_s_kv, s_kv) - or_own(place.whole_s_q, s_q) : 0);
  }

  /// How many of the call's keys, were there ever more on both sides, stand before `position`, a key of the whole.
  std::int64_t keys_before(std::int64_t position) const {
    const std::int64_t distance = position - place.kv;
    if (place.kv_step == 1) return distance;
    return distance > 0 ? (distance - 1) / place.kv_step + 1 : distance / place.kv_step;
  }
};

/// Offset, in elements, of row (b, h, s) of a [b, h, s, d] or [b, h, s] tensor.
inline std::int64_t row_offset(const TensorView& t, std::int64_t b, std::int64_t h, std::int64_t s) {
  return b * t.strides[0] + h * t.strides[1] + s * t.strides[2];
}

}  // namespace fa::reference

#endif  // FA_SRC_REFERENCE_GEOMETRY_HPP_
