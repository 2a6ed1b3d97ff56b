#ifndef FA_TEMPLATES_SM80_SM80_FP8_FORWARD_CUH_
#define FA_TEMPLATES_SM80_SM80_FP8_FORWARD_CUH_

#include <common/fp8_params.cuh>
#include <ptx/language.cuh>
#include <sm80/sm80_forward.cuh>

namespace fa::sm80 {

/// What a forward of 8-bit floats has of every Config.
template <class Config>
struct Fp8Config : Config {
  static constexpr bool kAligned = true;
  static constexpr bool kConditionalRescale = Config::kHeadDimV <= 128;
  static constexpr int kLoopBodies = 1;
  static constexpr bool kPositiveScale = false;  // signs of scales are the device's
};

/// The mma.sync forward with q, k and v in e4m3 or e5m2 (sm80_fp8.cuh). Config has besides: kHalfOutput, optionally
/// kByteOutput, kKeyScales, kValueScales (common/fp8.cuh) and kSingleLevel.
template <class Config>
using Fp8Forward = Forward<Fp8Config<Config>>;

template <class Config>
FA_DEVICE void fp8_forward(const kernel::ForwardFp8Params& params) {
  forward<Fp8Config<Config>>(params);
}

}  // namespace fa::sm80

#endif  // FA_TEMPLATES_SM80_SM80_FP8_FORWARD_CUH_
