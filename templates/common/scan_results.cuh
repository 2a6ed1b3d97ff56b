#ifndef FA_TEMPLATES_COMMON_SCAN_RESULTS_CUH_
#define FA_TEMPLATES_COMMON_SCAN_RESULTS_CUH_

#include <common/constants.cuh>
#include <common/scan_results_params.cuh>
#include <common/sequences.cuh>
#include <ptx/atomic_min.cuh>
#include <ptx/language.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>

namespace fa::kernel {

/// The lowest NaN or infinity of each result of a call. kScanBlocks thread blocks share a result's heads, and chunks of
/// rows of a head where those are fewer. What belongs to no sequence of a packed batch is not read.
///
/// Config: kWarps.
template <class Config>
struct ScanResults {
  static constexpr int kThreads = Config::kWarps * kWarpSize;
  static constexpr int kChunkRows = 64;
  static constexpr int kInFlight = 4;  // loads of a thread
  static constexpr uint64_t kNothing = ~uint64_t{0};

  const ScanResultsParams& params;

  FA_DEVICE void run() const {
    const int which = ptx::block_index() / kScanBlocks;
    const int block = ptx::block_index() % kScanBlocks;
    const ScannedResult& result = params.results[which];
    const int heads = result.b * result.h;
    const int parts = heads < kScanBlocks ? kScanBlocks / heads : 1;  // of a head
    const int64_t jobs = static_cast<int64_t>(heads) * parts;
    uint64_t lowest = kNothing;
    for (int64_t job = block; job < jobs; job += kScanBlocks) {
      const uint64_t found = scan_head(result, static_cast<int>(job / parts), static_cast<int>(job % parts), parts);
      if (found < lowest) lowest = found;
    }
    if (lowest != kNothing) ptx::red_min_u64(params.found + which, lowest);
  }

 private:
  /// The lowest index of this thread's elements of every `parts`th chunk of a head, from chunk `part` on.
  static FA_DEVICE uint64_t scan_head(const ScannedResult& result, int head, int part, int parts) {
    const int batch = head / result.h;
    int64_t offset = (head - batch * result.h) * result.stride_h;
    int rows = result.s;
    if (result.cu == nullptr) {
      offset += batch * result.stride_b;
    } else {
      const Span span = span_of(result.cu, result.used, batch, result.total, result.s);
      offset += span.first * result.stride_s;
      rows = span.count;
    }
    const int64_t first_row = static_cast<int64_t>(head) * result.s;
    const int pieces = result.d * result.bytes / kChunkBytes;
    const bool wide = is_wide(result);
    for (int64_t first = int64_t{part} * kChunkRows; first < rows; first += int64_t{parts} * kChunkRows) {
      const int count = rows - first < kChunkRows ? static_cast<int>(rows - first) : kChunkRows;
      const int64_t start = offset + first * result.stride_s;
      const int64_t place = wide ? scan_pieces(result, start, count, pieces) : scan_elements(result, start, count);
      if (place >= 0) return static_cast<uint64_t>((first_row + first) * result.d + place);
    }
    return kNothing;
  }

  /// Whether all rows are made of aligned pieces of 16 bytes.
  static FA_DEVICE bool is_wide(const ScannedResult& result) {
    const int64_t strides = (result.stride_b | result.stride_h | result.stride_s | result.d) * result.bytes;
    return (strides | static_cast<int64_t>(reinterpret_cast<size_t>(result.data))) % kChunkBytes == 0;
  }

  /// The first of this thread's elements in `count` rows from `start` on, counted from there; negative: none is broken.
  static FA_DEVICE int64_t scan_elements(const ScannedResult& result, int64_t start, int count) {
    for (int i = ptx::thread_index(); i < count * result.d; i += kThreads) {
      const int row = i / result.d;
      const int column = i - row * result.d;
      if (is_broken(result, start + row * result.stride_s + column)) return i;
    }
    return -1;
  }

  /// The same by pieces of 16 bytes, of which several are on their way.
  static FA_DEVICE int64_t scan_pieces(const ScannedResult& result, int64_t start, int count, int pieces) {
    const int each = kChunkBytes / result.bytes;
    const int all = count * pieces;
    for (int i = ptx::thread_index(); i < all; i += kInFlight * kThreads) {
      Chunk piece[kInFlight];
      int64_t place[kInFlight];  // of its first element: in memory
      FA_UNROLL
      for (int n = 0; n < kInFlight; ++n) {
        const int which = i + n * kThreads;
        const int row = which / pieces;
        place[n] = start + row * result.stride_s + (which - row * pieces) * each;
        piece[n] = {};
        if (which < all) {
          piece[n] = ptx::ld_global_chunk(static_cast<const char*>(result.data) + place[n] * result.bytes);
        }
      }
      FA_UNROLL
      for (int n = 0; n < kInFlight; ++n) {
        if (!may_be_broken(result, piece[n])) continue;
        for (int e = 0; e < each; ++e) {
          if (is_broken(result, place[n] + e)) return static_cast<int64_t>(i + n * kThreads) * each + e;
        }
      }
    }
    return -1;
  }

  /// Whether an element of a piece has all bits of the exponent: by the trick that finds a zero in a word.
  static FA_DEVICE bool may_be_broken(const ScannedResult& result, const Chunk& piece) {
    uint32_t ones = 1;  // the lowest bits of the elements in a word
    for (int bits = 8 * result.bytes; bits < 32; bits *= 2) ones |= ones << bits;
    const uint32_t exponents = ones * result.exponent;
    uint32_t found = 0;
    FA_UNROLL
    for (int w = 0; w < 4; ++w) {
      const uint32_t missing = ~piece.word[w] & exponents;
      found |= (missing - ones) & ~missing;
    }
    return (found & (ones << (8 * result.bytes - 1))) != 0;
  }

  static FA_DEVICE bool is_broken(const ScannedResult& result, int64_t at) {
    uint32_t bits;
    if (result.bytes == 4) {
      bits = ptx::ld_global(static_cast<const uint32_t*>(result.data) + at);
    } else if (result.bytes == 2) {
      bits = ptx::ld_global(static_cast<const uint16_t*>(result.data) + at);
    } else {
      bits = ptx::ld_global(static_cast<const unsigned char*>(result.data) + at);
    }
    const bool legal = result.minus_infinity != 0 && bits == result.minus_infinity;
    return (bits & result.exponent) == result.exponent && !legal;
  }
};

template <class Config>
FA_DEVICE void scan_results(const ScanResultsParams& params) {
  ScanResults<Config>{params}.run();
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_SCAN_RESULTS_CUH_
