#ifndef FA_TEMPLATES_COMMON_VARIANTS_CUH_
#define FA_TEMPLATES_COMMON_VARIANTS_CUH_

namespace fa::kernel {

/// What a kernel's Config asks for beyond plain attention. A Config that leaves a switch out says no, and its kernel
/// has no trace of it.
template <class Config>
inline constexpr bool kVarlen = requires {
  requires Config::kVarlen;
};
template <class Config>
inline constexpr bool kDropout = requires {
  requires Config::kDropout;
};

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_VARIANTS_CUH_
