#ifndef FA_TEMPLATES_COMMON_ACCUMULATE_CUH_
#define FA_TEMPLATES_COMMON_ACCUMULATE_CUH_

#include <common/constants.cuh>
#include <common/elements.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>

namespace fa::kernel {

template <class Config>
FA_DEVICE constexpr bool wants_accumulate() {
  if constexpr (requires { Config::kAccumulate; }) return Config::kAccumulate;
  return false;
}

/// Whether a forward adds its keys to the state that o and lse hold: what attention over other keys came to.
template <class Config>
inline constexpr bool kAccumulate = wants_accumulate<Config>();

/// The log-sum-exp of a row of the state. Of a row without keys it is -inf: it may be given as +inf.
FA_DEVICE float state_lse(const float* address) {
  const float lse = ptx::ld_global(address);
  return lse == kInfinity ? -kInfinity : lse;
}

/// What the keys of a call and a state come to together.
struct Joined {
  float lse;
  float keys;   // what O of the keys counts
  float state;  // what O of the state counts; below 0: nothing, whatever it holds
};

/// From the logarithms of both; NaN of a NaN. A part that is alone keeps its bits.
FA_DEVICE Joined join(float keys, float state) {
  const float largest = ptx::max(keys, state);
  const float base = largest == -kInfinity ? 0.f : largest;
  const float keys_weight = ptx::ex2((keys - base) * kLog2e);
  const float state_weight = ptx::ex2((state - base) * kLog2e);
  const float sum = keys_weight + state_weight;
  const float inverse = sum == 0.f ? 0.f : 1.f / sum;
  return {sum == 0.f ? -kInfinity : base + kLn2 * ptx::lg2(sum), keys_weight * inverse,
          state == -kInfinity ? -1.f : state_weight * inverse};
}

/// Whether O of a state counts, by Joined::state.
FA_DEVICE bool counts(float state) {
  return !(state < 0.f);
}

/// Adds two neighbouring elements of the state's O; one access when kAligned.
template <bool kAligned, class T>
FA_DEVICE void add_state(float& low, float& high, float state, const T* o) {
  float values[2];
  if constexpr (!kAligned) {
    values[0] = to_float(ptx::ld_global(o));
    values[1] = to_float(ptx::ld_global(o + 1));
  } else if constexpr (sizeof(T) == 2) {
    unpack<T>(values, ptx::ld_global(reinterpret_cast<const uint32_t*>(o)));
  } else {
    const uint64_t pair = ptx::ld_global(reinterpret_cast<const uint64_t*>(o));
    values[0] = ptx::from_bits(static_cast<uint32_t>(pair));
    values[1] = ptx::from_bits(static_cast<uint32_t>(pair >> 32));
  }
  low = ptx::fma(state, values[0], low);
  high = ptx::fma(state, values[1], high);
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_ACCUMULATE_CUH_
