#ifndef FA_TEMPLATES_COMMON_KEPT_KEYS_CUH_
#define FA_TEMPLATES_COMMON_KEPT_KEYS_CUH_

#include <common/constants.cuh>
#include <common/variant.cuh>
#include <ptx/language.cuh>

namespace fa::kernel {

/// Whether a mask function is known to keep all keys before one that batch entries have: Variant::kept_keys.
template <class Variant>
inline constexpr bool kKeepsFirst = false;
template <class Variant>
requires(Variant::kKeepsFirst) inline constexpr bool kKeepsFirst<Variant> = true;

/// KV tiles of batch entry `batch`, from the first on, that need no mask function.
template <class Variant, int kTileN, class Params, class Lengths>
FA_DEVICE int kept_tiles(const Params& params, const Lengths& lengths, int batch) {
  const Place at{batch, 0, 0, 0, 0, 0, lengths.s_q, lengths.s_kv, 0.f};
  return maximum(Variant::kept_keys(params.variant, at), 0) / kTileN;
}

/// Scores of a tile behind kept_keys that the mask function hides become -inf. Few tiles come here: what is kept is
/// found in a loop, a bit an element, so that a function's arithmetic takes no registers from the main loop.
template <class Variant, int kNTiles, class Scores>
FA_DEVICE void apply_mask_by_bits(const VariantParams& variant, Place at, Scores score) {
  constexpr int kTogether = 16;  // n8 tiles, of two keys each, in a word
  FA_UNROLL
  for (int first = 0; first < kNTiles; first += kTogether) {
    uint32_t kept = 0;
    FA_UNROLL_BY(1)
    for (int n = 0; n < kTogether && first + n < kNTiles; ++n) {
      FA_UNROLL
      for (int e = 0; e < 2; ++e) {
        at.kv_step = 8 * (first + n) + e;
        kept |= (Variant::keep(variant, at) ? 1u : 0u) << (2 * n + e);
      }
    }
    FA_UNROLL
    for (int n = 0; n < kTogether && first + n < kNTiles; ++n) {
      FA_UNROLL
      for (int e = 0; e < 2; ++e) {
        if ((kept >> (2 * n + e) & 1u) == 0u) score(first + n, e) = -kInfinity;
      }
    }
  }
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_KEPT_KEYS_CUH_
