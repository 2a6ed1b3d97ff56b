#ifndef FA_TEMPLATES_COMMON_DROPOUT_PLACE_CUH_
#define FA_TEMPLATES_COMMON_DROPOUT_PLACE_CUH_

#include <common/shard_place.cuh>
#include <common/variant.cuh>
#include <ptx/language.cuh>

namespace fa::kernel {

// Where dropout draws for an element of a call. Of a placed kernel that is where it stands in the whole, whose rows and
// keys begin at multiples of 32 of it, so that calls of the generator (dropout.cuh) are whole.

/// Query heads in front of those of batch entry `batch`.
template <class Variant, class Params>
FA_DEVICE int64_t heads_before(const Params& params, int batch) {
  if constexpr (kPlaced<Variant>) {
    // The host has added the first head to an offset that it knows.
    const uint64_t first = params.dropout.state != nullptr ? params.dropout.offset : 0;
    return static_cast<int64_t>(batch) * params.dropout.heads + static_cast<int64_t>(first);
  } else {
    return static_cast<int64_t>(batch) * params.h_q;
  }
}

template <class Variant, class Params>
FA_DEVICE int row_of_whole(const Params& params, int row) {
  if constexpr (kPlaced<Variant>) return row + place_entry(params.variant, PlaceEntry::q);
  return row;
}

template <class Variant, class Params>
FA_DEVICE int key_of_whole(const Params& params, int key) {
  if constexpr (kPlaced<Variant>) return key + place_entry(params.variant, PlaceEntry::kv);
  return key;
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_DROPOUT_PLACE_CUH_
