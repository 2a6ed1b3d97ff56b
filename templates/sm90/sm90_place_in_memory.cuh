#ifndef FA_TEMPLATES_SM90_SM90_PLACE_IN_MEMORY_CUH_
#define FA_TEMPLATES_SM90_SM90_PLACE_IN_MEMORY_CUH_

#include <common/place_in_memory.cuh>
#include <ptx/language.cuh>
#include <sm90/sm90_placed_params.cuh>

namespace fa::kernel {

template <class Config, class Base>
FA_DEVICE Sm90PlacedForward<Base> placed(const Sm90ForwardParamsWith<Base>& given, const PlaceParams& place) {
  return {given.map_q, given.map_k, given.map_v, given.map_o, placed<Config>(given.base, place)};
}

template <class Config>
FA_DEVICE Sm90PlacedFp8 placed(const Sm90Fp8Params& given, const PlaceParams& place) {
  return {{given.map_q, given.map_k, given.map_v, given.map_o, placed<Config>(given.base, place)}, given.scales};
}

template <class Config>
FA_DEVICE Sm90PlacedInt8 placed(const Sm90Int8Params& given, const PlaceParams& place) {
  return {placed<Config>(static_cast<const Sm90Fp8Params&>(given), place), given.row_bias};
}

template <class Config>
FA_DEVICE Sm90PlacedBackward<BackwardParams> placed(const Sm90BackwardParams& given, const PlaceParams& place) {
  return {given.map_q, given.map_k, given.map_v, given.map_dout, placed<Config>(given.base, place)};
}

template <class Config>
FA_DEVICE Sm90PlacedBackward<BackwardVariantParams> placed(const Sm90BackwardVariantParams& given,
                                                           const PlaceParams& place) {
  return {given.map_q, given.map_k, given.map_v, given.map_dout, placed<Config>(given.base, place)};
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_SM90_SM90_PLACE_IN_MEMORY_CUH_
