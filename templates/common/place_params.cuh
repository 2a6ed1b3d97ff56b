#ifndef FA_TEMPLATES_COMMON_PLACE_PARAMS_CUH_
#define FA_TEMPLATES_COMMON_PLACE_PARAMS_CUH_

#include <common/types.cuh>
#include <ptx/host_device.cuh>

namespace fa::kernel {

/// What masks in closed form, functions and dropout follow from where a call stands in a larger attention, the whole. A
/// kernel whose place comes from memory is launched with it besides its own parameters.
struct PlaceParams {
  const int64_t* begin;  // [4], a PlaceBegin; null where the host knows it
  int32_t b, h_q, s_q, s_kv;
  int32_t group;  // query heads of a KV head
  int32_t whole_b, whole_h_q, whole_s_q, whole_s_kv;
  int32_t q_step, kv_step;    // equal with masks in closed form
  int32_t window_left;        // keys of the whole kept before the diagonal
  int32_t window_right;       // and behind it
  int32_t chunk;              // keys of the whole; 0: none
  int32_t bottom_right;       // 1: the diagonal ends at the whole's last row and key
  int32_t rows_and_keys_are;  // begins of rows and keys are multiples of it
};

/// The call's first batch entry, query head, row and key in the whole.
struct PlaceBegin {
  int64_t b, h_q, q, kv;
};

/// Masks in closed form as they are of the call's own rows and keys.
struct PlacedMasks {
  int64_t causal_shift;
  int64_t diagonal;
  int64_t window_left;
  int64_t chunk;
  int64_t chunk_keys;  // of the first key's chunk that are before it
};

FA_HOST_DEVICE inline int64_t clamped(int64_t value, int64_t least, int64_t most) {
  return value < least ? least : value > most ? most : value;
}

FA_HOST_DEVICE inline int64_t floor_of_steps(int64_t distance, int64_t step) {
  if (step == 1) return distance;
  return distance / step - (distance % step != 0 && distance < 0 ? 1 : 0);
}

/// The nearest begin that leaves the call within `whole` entries, a multiple of `granule`.
FA_HOST_DEVICE inline int64_t begin_inside(int64_t begin, int64_t count, int64_t step, int64_t whole, int64_t granule) {
  const int64_t extent = count == 0 ? 0 : (count - 1) * step + 1;
  const int64_t inside = clamped(begin, 0, whole < extent ? 0 : whole - extent);
  return inside - inside % granule;
}

/// Whatever memory holds, a place within the whole.
FA_HOST_DEVICE inline PlaceBegin place_inside(const PlaceParams& place, const PlaceBegin& given) {
  return {begin_inside(given.b, place.b, 1, place.whole_b, 1),
          begin_inside(given.h_q, place.h_q, 1, place.whole_h_q, place.group),
          begin_inside(given.q, place.s_q, place.q_step, place.whole_s_q, place.rows_and_keys_are),
          begin_inside(given.kv, place.s_kv, place.kv_step, place.whole_s_kv, place.rows_and_keys_are)};
}

FA_HOST_DEVICE inline PlacedMasks placed_masks(const PlaceParams& place, const PlaceBegin& begin) {
  const int64_t longest = place.whole_s_q > place.whole_s_kv ? place.whole_s_q : place.whole_s_kv;
  const int64_t ends = place.bottom_right != 0 ? int64_t{place.whole_s_kv} - place.whole_s_q : 0;
  const int64_t first = begin.q + ends;  // where row 0 stands
  const int64_t step = place.kv_step;
  const int64_t s_q = place.s_q;
  const int64_t s_kv = place.s_kv;
  // What is hidden from all rows, or from none, is so within the call's own lengths.
  PlacedMasks masks;
  masks.causal_shift = clamped(floor_of_steps(first - begin.kv + place.window_right, step), -s_q, s_kv);
  const int64_t keys_begin =
      clamped(-floor_of_steps(place.window_left - (first - begin.kv), step), -s_q, s_kv);  // of row 0
  masks.diagonal = clamped(floor_of_steps(first - begin.kv, step), -s_q, s_kv);
  masks.chunk = 1;
  masks.chunk_keys = 0;
  if (place.chunk > 0) {
    const int64_t of_call = (place.chunk < longest + step - 1 ? place.chunk : longest + step - 1) / step;
    masks.chunk = of_call < 1 ? 1 : of_call;
    const int64_t keys = begin.kv / step;
    masks.chunk_keys = keys % masks.chunk;
    masks.diagonal = clamped(floor_of_steps(first, step) - keys + masks.chunk_keys, -s_q - masks.chunk,
                             s_kv + masks.chunk + masks.chunk_keys);
  }
  masks.window_left = masks.diagonal - keys_begin;
  return masks;
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_PLACE_PARAMS_CUH_
