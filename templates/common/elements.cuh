#ifndef FA_TEMPLATES_COMMON_ELEMENTS_CUH_
#define FA_TEMPLATES_COMMON_ELEMENTS_CUH_

#include <common/constants.cuh>
#include <common/types.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>

namespace fa::kernel {

/// Elements of a 16-byte piece of a row.
template <class T>
inline constexpr int kPieceElements = kChunkBytes / static_cast<int>(sizeof(T));

FA_DEVICE float to_float(f16 x) {
  return ptx::convert_to_float(x);
}
FA_DEVICE float to_float(bf16 x) {
  return ptx::convert_to_float(x);
}
FA_DEVICE float to_float(float x) {
  return x;
}

/// Both elements of a pair.
template <class T>
FA_DEVICE void unpack(float (&values)[2], uint32_t pair) {
  values[0] = to_float(T{static_cast<uint16_t>(pair & 0xffffu)});
  values[1] = to_float(T{static_cast<uint16_t>(pair >> 16)});
}

FA_DEVICE constexpr uint32_t exponent_of(f16) {
  return 0x7c00u;
}
FA_DEVICE constexpr uint32_t exponent_of(bf16) {
  return 0x7f80u;
}
FA_DEVICE constexpr uint32_t exponent_of(float) {
  return 0x7f800000u;
}

/// What 0 may be multiplied with: a register of elements with 0 in the place of infinities and NaNs.
template <class T>
struct Finite {
  FA_DEVICE uint32_t operator()(uint32_t word) const {
    if constexpr (sizeof(T) == 4) {
      return is_finite<kExponent>(word) ? word : 0u;
    } else {
      return (is_finite<kExponent>(word) ? word & 0xffffu : 0u) |
             (is_finite<(kExponent << 16)>(word) ? word & 0xffff0000u : 0u);
    }
  }

 private:
  static constexpr uint32_t kExponent = exponent_of(T{});
  template <uint32_t kMask>
  static FA_DEVICE bool is_finite(uint32_t word) {
    return (word & kMask) != kMask;
  }
};

/// The same register.
struct AsIs {
  FA_DEVICE uint32_t operator()(uint32_t word) const { return word; }
};

/// 0, or NaN where one of the numbers is infinite or NaN.
template <int kCount>
FA_DEVICE float zero_of(const float (&x)[kCount], float zero = 0.f) {
  FA_UNROLL
  for (int i = 0; i < kCount; ++i) zero = ptx::fma(x[i], 0.f, zero);
  return zero;
}
/// Likewise of fragments.
template <int kMTiles, int kNTiles>
FA_DEVICE float zero_of(const float (&x)[kMTiles][kNTiles][4]) {
  float zero = 0.f;
  FA_UNROLL
  for (int m = 0; m < kMTiles; ++m) {
    FA_UNROLL
    for (int n = 0; n < kNTiles; ++n) zero = zero_of(x[m][n], zero);
  }
  return zero;
}
/// Whether one of a warp's numbers is.
template <class Numbers>
FA_DEVICE bool any_infinite(const Numbers& x) {
  return ptx::vote_any(zero_of(x) != 0.f);
}

/// 16 bytes of a row as floats; one access when kAligned.
template <bool kAligned, class T>
FA_DEVICE void load_piece(float (&values)[kPieceElements<T>], const T* source) {
  if constexpr (!kAligned) {
    FA_UNROLL
    for (int i = 0; i < kPieceElements<T>; ++i) values[i] = to_float(ptx::ld_global(source + i));
  } else {
    const Chunk chunk = ptx::ld_global_chunk(source);
    FA_UNROLL
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(T) == 2) {
        values[2 * i] = to_float(T{static_cast<uint16_t>(chunk.word[i] & 0xffffu)});
        values[2 * i + 1] = to_float(T{static_cast<uint16_t>(chunk.word[i] >> 16)});
      } else {
        values[i] = ptx::from_bits(chunk.word[i]);
      }
    }
  }
}

/// The other way, rounding.
template <bool kAligned, class T>
FA_DEVICE void store_piece(T* target, const float (&values)[kPieceElements<T>]) {
  if constexpr (!kAligned) {
    FA_UNROLL
    for (int i = 0; i < kPieceElements<T>; ++i) ptx::st_global(target + i, ptx::convert<T>(values[i]));
  } else {
    Chunk chunk;
    FA_UNROLL
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(T) == 2) {
        chunk.word[i] = ptx::convert_pair<T>(values[2 * i], values[2 * i + 1]);
      } else {
        chunk.word[i] = ptx::bits(values[i]);
      }
    }
    ptx::st_global_chunk(target, chunk);
  }
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_ELEMENTS_CUH_
