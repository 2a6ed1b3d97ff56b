#ifndef FA_TEMPLATES_COMMON_ROW_PIECES_CUH_
#define FA_TEMPLATES_COMMON_ROW_PIECES_CUH_

#include <common/constants.cuh>
#include <common/elements.cuh>
#include <common/types.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>

namespace fa::kernel {

/// The greatest power of two, at most `most`, that divides `count`: elements of accesses that start at multiples of it.
FA_DEVICE constexpr int common_width(int count, int most) {
  int width = most;
  while (width > 1 && count % width != 0) width /= 2;
  return width;
}

/// Word `word`, or half of it, of a piece of 16 bytes from memory: kBytes of 2, 4, 8 or 16, and a multiple of them.
template <int kBytes>
FA_DEVICE void load_bytes(Chunk& piece, int at, const void* source) {
  if constexpr (kBytes == 16) {
    piece = ptx::ld_global_chunk(source);
  } else if constexpr (kBytes == 8) {
    const uint64_t value = ptx::ld_global(static_cast<const uint64_t*>(source));
    piece.word[at / 4] = static_cast<uint32_t>(value);
    piece.word[at / 4 + 1] = static_cast<uint32_t>(value >> 32);
  } else if constexpr (kBytes == 4) {
    piece.word[at / 4] = ptx::ld_global(static_cast<const uint32_t*>(source));
  } else {
    const uint32_t value = ptx::ld_global(static_cast<const uint16_t*>(source));
    const uint32_t other = piece.word[at / 4] & (at % 4 == 0 ? 0xffff0000u : 0xffffu);
    piece.word[at / 4] = other | (at % 4 == 0 ? value : value << 16);
  }
}
template <int kBytes>
FA_DEVICE void store_bytes(void* target, const Chunk& piece, int at) {
  if constexpr (kBytes == 16) {
    ptx::st_global_chunk(target, piece);
  } else if constexpr (kBytes == 8) {
    const uint64_t value = static_cast<uint64_t>(piece.word[at / 4 + 1]) << 32 | piece.word[at / 4];
    ptx::st_global(static_cast<uint64_t*>(target), value);
  } else if constexpr (kBytes == 4) {
    ptx::st_global(static_cast<uint32_t*>(target), piece.word[at / 4]);
  } else {
    ptx::st_global(static_cast<uint16_t*>(target), static_cast<uint16_t>(piece.word[at / 4] >> (at % 4 == 0 ? 0 : 16)));
  }
}

/// The first `count` elements of a piece, kWidth in an access; the others stay what they are. `count` is a multiple.
template <int kWidth, class T>
FA_DEVICE void load_columns(Chunk& piece, const T* source, int count) {
  FA_UNROLL
  for (int i = 0; i < kPieceElements<T>; i += kWidth) {
    if (kWidth == kPieceElements<T> || i < count) {
      load_bytes<kWidth* static_cast<int>(sizeof(T))>(piece, i * static_cast<int>(sizeof(T)), source + i);
    }
  }
}
template <int kWidth, class T>
FA_DEVICE void store_columns(T* target, const Chunk& piece, int count) {
  FA_UNROLL
  for (int i = 0; i < kPieceElements<T>; i += kWidth) {
    if (kWidth == kPieceElements<T> || i < count) {
      store_bytes<kWidth* static_cast<int>(sizeof(T))>(target + i, piece, i * static_cast<int>(sizeof(T)));
    }
  }
}

/// Element `i` of a piece.
template <class T>
FA_DEVICE float element_of(const Chunk& piece, int i) {
  if constexpr (sizeof(T) == 4) {
    return ptx::from_bits(piece.word[i]);
  } else {
    return to_float(T{static_cast<uint16_t>(piece.word[i / 2] >> (i % 2 == 0 ? 0 : 16))});
  }
}

/// A piece of these numbers, rounded.
template <class T>
FA_DEVICE Chunk chunk_of(const float (&numbers)[kPieceElements<T>]) {
  Chunk piece;
  FA_UNROLL
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      piece.word[i] = ptx::bits(numbers[i]);
    } else {
      piece.word[i] = ptx::convert_pair<T>(numbers[2 * i], numbers[2 * i + 1]);
    }
  }
  return piece;
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_ROW_PIECES_CUH_
