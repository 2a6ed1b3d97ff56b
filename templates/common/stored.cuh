#ifndef FA_TEMPLATES_COMMON_STORED_CUH_
#define FA_TEMPLATES_COMMON_STORED_CUH_

#include <common/stored_params.cuh>
#include <common/types.cuh>
#include <common/u4.cuh>
#include <common/variant.cuh>
#include <ptx/e4m3.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/packed_math.cuh>

namespace fa::kernel {

using uint8_t = unsigned char;

/// Two bytes of a register, the first of which becomes the lower half of a pair.
enum class Bytes { first, last, even, odd };  // 0 and 1, 2 and 3, 0 and 2, 1 and 3

template <class T>
FA_DEVICE constexpr bool is_half(T) {
  return false;
}
FA_DEVICE constexpr bool is_half(f16) {
  return true;
}

/// OCP E4M3. The codes 0x7f and 0xff, which are NaNs there, are read as 480 and -480.
struct e4m3 {
  uint8_t bits;

  /// The values of two bytes, exactly.
  template <class T, Bytes kBytes>
  static FA_DEVICE uint32_t pair(uint32_t word) {
    constexpr uint32_t kSelector = kBytes == Bytes::first ? 0x1404 : kBytes == Bytes::last ? 0x3424 : 0x2404;
    const uint32_t high = kBytes == Bytes::odd ? word : ptx::prmt(word, 0, kSelector);  // in the upper bytes of halves
    // Exponents and mantissas move to where T has them. A product makes up for its greater bias, of normal and of
    // subnormal numbers alike.
    constexpr int kShift = is_half(T{}) ? 1 : 4;
    constexpr uint32_t kMagnitude = (0x7f00u >> kShift) * 0x10001u;
    constexpr uint32_t kFactor = (is_half(T{}) ? 0x5c00u : 0x7b80u) * 0x10001u;  // 2^8 or 2^120
    return ptx::fma_pair<T>((high & 0x80008000u) | (high >> kShift & kMagnitude), kFactor, 0x80008000u);
  }
};

/// The same where an instruction converts it, to f16. There its NaN codes are NaN.
struct ConvertedE4m3 {
  uint8_t bits;
};

template <class Stored>
FA_DEVICE constexpr bool is_converted(Stored) {
  return false;
}
FA_DEVICE constexpr bool is_converted(ConvertedE4m3) {
  return true;
}

/// Two's complement.
struct i8 {
  uint8_t bits;

  template <class T, Bytes kBytes>
  static FA_DEVICE uint32_t pair(uint32_t word) {
    constexpr uint32_t kSelector = kBytes == Bytes::first  ? 0x4140
                                   : kBytes == Bytes::last ? 0x4342
                                   : kBytes == Bytes::even ? 0x4240
                                                           : 0x4341;
    if constexpr (is_half(T{})) {
      // 1024 + (x + 128) has x + 128 in its lowest bits.
      const uint32_t shifted = ptx::prmt(word ^ 0x80808080u, 0x64646464u, kSelector);
      return ptx::fma_pair<f16>(shifted, 0x3c003c00u, 0xe480e480u);  // - 1152
    } else {
      // 128 + the lowest seven bits, less 128, or 256 where the sign is set.
      const uint32_t whole = ptx::prmt(word, 0x43434343u, kSelector);
      return ptx::fma_pair<bf16>((whole & 0x00800080u) | 0x43004300u, 0xbf80bf80u, whole & 0xff7fff7fu);
    }
  }
};

/// The values of a word's bytes, two at a time: of 0 and 1 and of 2 and 3, or of 0 and 2 and of 1 and 3.
template <class Stored, class T>
FA_DEVICE void neighbours(uint32_t& low, uint32_t& high, uint32_t word) {
  if constexpr (is_converted(Stored{})) {
    static_assert(is_half(T{}), "what the instruction converts to");
    ptx::widen_e4m3_pairs(low, high, word);
  } else {
    low = Stored::template pair<T, Bytes::first>(word);
    high = Stored::template pair<T, Bytes::last>(word);
  }
}
template <class Stored, class T>
FA_DEVICE void alternates(uint32_t& even, uint32_t& odd, uint32_t word) {
  if constexpr (is_converted(Stored{})) {
    static_assert(is_half(T{}), "what the instruction converts to");
    ptx::widen_e4m3_pairs(even, odd, ptx::prmt(word, 0, 0x3120));
  } else {
    even = Stored::template pair<T, Bytes::even>(word);
    odd = Stored::template pair<T, Bytes::odd>(word);
  }
}

/// A byte of a latent row (sm80/sm80_latent.cuh).
struct LatentByte {
  uint8_t bits;
};

template <int kStorage, class T>
struct StoredElement {
  using type = T;
};
template <class T>
struct StoredElement<1, T> {
  using type = e4m3;
};
template <class T>
struct StoredElement<2, T> {
  using type = i8;
};
template <class T>
struct StoredElement<3, T> {
  using type = LatentByte;
};
template <int kGroup, class T>
requires(kGroup >= 32) struct StoredElement<kGroup, T> {
  using type = u4x2<kGroup>;
};

template <class Config>
FA_DEVICE constexpr int key_storage_of() {
  if constexpr (requires { Config::kKeyStorage; }) return Config::kKeyStorage;
  return 0;
}
template <class Config>
FA_DEVICE constexpr int value_storage_of() {
  if constexpr (requires { Config::kValueStorage; }) return Config::kValueStorage;
  return 0;
}

/// Whether products of 8-bit elements are of f16 (sm80/sm80_half_products.cuh).
template <class Config>
FA_DEVICE constexpr bool has_half_products(int storage) {
  if constexpr (requires { Config::kHalfProducts; }) return Config::kHalfProducts && (storage == 1 || storage == 2);
  return false;
}
template <class Config>
inline constexpr bool kHalfKeys = has_half_products<Config>(key_storage_of<Config>());
template <class Config>
inline constexpr bool kHalfValues = has_half_products<Config>(value_storage_of<Config>());

/// What K and V are stored as: the queries' type, 8 bits and a scale a row, or 4 bits and a scale and an offset a
/// group.
template <class Config>
inline constexpr bool kLatentRows = key_storage_of<Config>() == 3;  // of which shared memory has wide ones
template <class Config>
inline constexpr bool kStoredKeys = key_storage_of<Config>() != 0 && !kLatentRows<Config>;
template <class Config>
inline constexpr bool kStoredValues = value_storage_of<Config>() != 0;
template <int kStorage, class T, bool kHalf>
using ElementOf =
    typename Either<ConvertedE4m3, typename StoredElement<kStorage, T>::type, kHalf && kStorage == 1>::type;
template <class Config>
using KeyElement = ElementOf<key_storage_of<Config>(), typename Config::Element, kHalfKeys<Config>>;
template <class Config>
using ValueElement = ElementOf<value_storage_of<Config>(), typename Config::Element, kHalfValues<Config>>;

template <class Config>
using StoredForwardParamsOf =
    typename Either<ForwardStoredParams, ForwardParamsOf<Config>, kStoredKeys<Config> || kStoredValues<Config>>::type;

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_STORED_CUH_
