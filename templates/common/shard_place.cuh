#ifndef FA_TEMPLATES_COMMON_SHARD_PLACE_CUH_
#define FA_TEMPLATES_COMMON_SHARD_PLACE_CUH_

#include <common/variant.cuh>
#include <ptx/language.cuh>

namespace fa::kernel {

/// Where the tensors of a call stand in the whole that it is a part of, in the order of VariantParams::captures, which
/// have room for it: its first batch entry, query head, row and key, the steps between rows and between keys, and the
/// whole's lengths.
enum class PlaceEntry : int { b, h, q, kv, q_step, kv_step, s_q, s_kv };

FA_DEVICE int place_entry(const VariantParams& params, PlaceEntry entry) {
  return params.captures[static_cast<int>(entry)].place;
}

/// An element of the call as one of the whole. Without kStrided steps are 1.
template <bool kStrided>
FA_DEVICE Place in_whole(const VariantParams& params, const Place& at) {
  Place whole = at;
  if constexpr (kStrided) {
    const int q_step = place_entry(params, PlaceEntry::q_step);
    const int kv_step = place_entry(params, PlaceEntry::kv_step);
    whole.q *= q_step;
    whole.kv *= kv_step;
    whole.q_step *= q_step;
    whole.kv_step *= kv_step;
  }
  whole.b += place_entry(params, PlaceEntry::b);
  whole.h += place_entry(params, PlaceEntry::h);
  whole.q += place_entry(params, PlaceEntry::q);
  whole.kv += place_entry(params, PlaceEntry::kv);
  whole.s_q = place_entry(params, PlaceEntry::s_q);
  whole.s_kv = place_entry(params, PlaceEntry::s_kv);
  return whole;
}

/// Steps of the whole's rows and keys as those of the call's.
template <bool kStrided, class T>
FA_DEVICE CapturedSteps<T> steps_of_call(const VariantParams& params, CapturedSteps<T> steps) {
  if constexpr (kStrided) {
    steps.q *= place_entry(params, PlaceEntry::q_step);
    steps.kv *= place_entry(params, PlaceEntry::kv_step);
  }
  return steps;
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_SHARD_PLACE_CUH_
