#ifndef FA_TEMPLATES_COMMON_PLACE_IN_MEMORY_CUH_
#define FA_TEMPLATES_COMMON_PLACE_IN_MEMORY_CUH_

#include <common/place_params.cuh>
#include <common/shard_place.cuh>
#include <common/switches.cuh>
#include <common/variant.cuh>
#include <ptx/language.cuh>
#include <ptx/memory.cuh>
#include <ptx/placed_kernel.cuh>

namespace fa::kernel {

FA_DEVICE void set_entry(VariantParams& variant, PlaceEntry entry, int64_t value) {
  variant.captures[static_cast<int>(entry)].place = static_cast<int32_t>(value);
}

/// The parameters of a kernel whose place comes from memory, as the host would have written them if it knew the place.
/// No address of them is taken, so that what is not changed stays where parameters are.
template <class Config, class Params>
FA_DEVICE Params placed(const Params& given, const PlaceParams& place) {
  using Variant = VariantOf<Config>;
  const PlaceBegin begin = place_inside(place, {ptx::ld_global(place.begin), ptx::ld_global(place.begin + 1),
                                                ptx::ld_global(place.begin + 2), ptx::ld_global(place.begin + 3)});
  const PlacedMasks masks = placed_masks(place, begin);
  Params params = given;
  params.causal_shift = static_cast<int32_t>(masks.causal_shift);
  if constexpr (kHasVariant<Config>) {
    params.variant.diagonal = static_cast<int32_t>(masks.diagonal);
    params.variant.window_left = static_cast<int32_t>(masks.window_left);
    params.variant.chunk = static_cast<int32_t>(masks.chunk);
    params.variant.chunk_keys = static_cast<int32_t>(masks.chunk_keys);
    if constexpr (kPlaced<Variant>) {
      set_entry(params.variant, PlaceEntry::b, begin.b);
      set_entry(params.variant, PlaceEntry::h, begin.h_q);
      set_entry(params.variant, PlaceEntry::q, begin.q);
      set_entry(params.variant, PlaceEntry::kv, begin.kv);
      params.variant.b = place.b + static_cast<int32_t>(begin.b);  // captures are the whole's
    }
  }
  if constexpr (kDropout<Config>) {
    params.dropout.offset += static_cast<uint64_t>(begin.b * place.whole_h_q + begin.h_q);
  }
  return params;
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_PLACE_IN_MEMORY_CUH_
