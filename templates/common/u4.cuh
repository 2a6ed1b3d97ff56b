#ifndef FA_TEMPLATES_COMMON_U4_CUH_
#define FA_TEMPLATES_COMMON_U4_CUH_

#include <common/types.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/packed_math.cuh>

namespace fa::kernel {

/// Two codes from 0 to 15. A row's groups of kGroupColumns columns have a scale and an offset each, of the queries'
/// type T. A code stands for scale * code + offset, or for the number of T that is nearest to that.
///
/// Eight columns are a word whose lower half has the even ones in order, from the lowest bits on, and whose upper half
/// has the odd ones. So a mask finds two columns side by side in the halves of a register, as an mma takes them; and
/// the lane of a quad that ldmatrix gives the columns from 8t on finds all of them in one word.
template <int kGroupColumns>
struct u4x2 {
  static constexpr int kGroup = kGroupColumns;
  unsigned char bits;
};

template <class Element>
inline constexpr bool kIsU4 = false;
template <int kGroup>
inline constexpr bool kIsU4<u4x2<kGroup>> = true;

/// Elements in memory that a row of `columns` takes.
template <class Element>
FA_DEVICE constexpr int row_elements(int columns) {
  return kIsU4<Element> ? columns / 2 : columns;
}

/// Words that a row has of scales: f32, or a scale and an offset of each group.
template <class Element>
FA_DEVICE constexpr int scale_words(int columns) {
  if constexpr (kIsU4<Element>) return columns / Element::kGroup;
  return 1;
}

template <class T>
struct NibblePairs;  // of T: the codes of a word two at a time, exactly
template <>
struct NibblePairs<bf16> {
  /// 128 + a code has it in its lowest bits.
  template <int kPair>
  static FA_DEVICE uint32_t codes(uint32_t word) {
    return ptx::fma_pair<bf16>((word >> 4 * kPair & 0x000f000fu) | 0x43004300u, 0x3f803f80u, 0xc300c300u);
  }
};
template <>
struct NibblePairs<f16> {
  /// 1024 + a code, or 16 times a code, which saves every other shift.
  template <int kPair>
  static FA_DEVICE uint32_t codes(uint32_t word) {
    const uint32_t near = kPair < 2 ? word : word >> 8;
    if constexpr (kPair % 2 == 0) {
      return ptx::fma_pair<f16>((near & 0x000f000fu) | 0x64006400u, 0x3c003c00u, 0xe400e400u);
    } else {
      return ptx::fma_pair<f16>((near & 0x00f000f0u) | 0x64006400u, 0x2c002c00u, 0xd400d400u);
    }
  }
};

/// The numbers of a word's halves: `pairs[i]` has those of the nibbles i of the lower and the upper half, of which
/// `scale` and `offset` have a number each.
template <class T>
FA_DEVICE void numbers_of(uint32_t (&pairs)[4], uint32_t word, uint32_t scale, uint32_t offset) {
  pairs[0] = ptx::fma_pair<T>(NibblePairs<T>::template codes<0>(word), scale, offset);
  pairs[1] = ptx::fma_pair<T>(NibblePairs<T>::template codes<1>(word), scale, offset);
  pairs[2] = ptx::fma_pair<T>(NibblePairs<T>::template codes<2>(word), scale, offset);
  pairs[3] = ptx::fma_pair<T>(NibblePairs<T>::template codes<3>(word), scale, offset);
}

/// The codes of a word's halves as f16, which has subnormal numbers of them: `pairs[i]` has nibbles i, times 2^-24
/// where i is even, and times 2^-20 where it is odd.
FA_DEVICE void codes_of(uint32_t (&pairs)[4], uint32_t word) {
  pairs[0] = word & 0x000f000fu;
  pairs[1] = word & 0x00f000f0u;
  word >>= 8;
  pairs[2] = word & 0x000f000fu;
  pairs[3] = word & 0x00f000f0u;
}

/// The scale, or the offset, of a word that has both.
template <class T>
FA_DEVICE float scale_of(uint32_t word) {
  return ptx::convert_to_float(T{static_cast<unsigned short>(word)});
}
template <class T>
FA_DEVICE float offset_of(uint32_t word) {
  return ptx::convert_to_float(T{static_cast<unsigned short>(word >> 16)});
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_U4_CUH_
