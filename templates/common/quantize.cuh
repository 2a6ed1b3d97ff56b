#ifndef FA_TEMPLATES_COMMON_QUANTIZE_CUH_
#define FA_TEMPLATES_COMMON_QUANTIZE_CUH_

#include <common/constants.cuh>
#include <common/elements.cuh>
#include <common/encode.cuh>
#include <common/quantize_params.cuh>
#include <common/row_pieces.cuh>
#include <common/variant.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>

namespace fa::kernel {

/// Rows of 16 or 32 bits as codes of 8 and a scale, or with kMeans the means of columns before it. Of the former lanes
/// have a row, eight columns each. Of the latter a block has 16 columns of a head: a thread adds up eight of them, of
/// every so manieth row, and the order of all sums follows from the shape alone.
///
/// Config: Element, kHeadDim, kE4m3 (codes are e4m3, else i8), kMeans, kAligned, kWarps.
template <class Config>
struct Quantize {
  using T = typename Config::Element;
  using Code = typename Either<e4m3, i8, Config::kE4m3>::type;
  static constexpr int kColumns = 8;  // of a lane
  static constexpr int kPieces = Config::kHeadDim / kColumns;
  static constexpr int kLanes = kPieces <= 2 ? 2 : kPieces <= 4 ? 4 : kPieces <= 8 ? 8 : kPieces <= 16 ? 16 : 32;
  static constexpr int kThreads = Config::kWarps * kWarpSize;
  static constexpr int kRowsOfBlock = kThreads / kLanes;
  static constexpr float kLeastMagnitude = 0x1p-100f;
  static constexpr int kSharedBytes = Config::kMeans ? Config::kWarps * kMeanColumns * 4 : 0;
  static_assert(Config::kHeadDim % 16 == 0 && kPieces <= kWarpSize, "head dims in multiples of 16 up to 256");

  const QuantizeParams& params;
  const int thread = ptx::thread_index();

  FA_DEVICE void run() const {
    if constexpr (Config::kMeans) {
      take_means();
    } else {
      take_rows();
    }
  }

 private:
  FA_DEVICE static void load(float (&x)[kColumns], const T* from) {
    constexpr int kOfPiece = kPieceElements<T>;
    FA_UNROLL
    for (int j = 0; j < kColumns / kOfPiece; ++j) {
      Chunk piece;
      load_columns<(Config::kAligned ? kOfPiece : 1)>(piece, from + j * kOfPiece, kOfPiece);
      FA_UNROLL
      for (int i = 0; i < kOfPiece; ++i) x[j * kOfPiece + i] = element_of<T>(piece, i);
    }
  }

  FA_DEVICE void take_rows() const {
    const int lane = thread % kLanes;
    const uint32_t number = static_cast<uint32_t>(ptx::block_index()) * kRowsOfBlock + thread / kLanes;
    const uint32_t outer = number / params.s, s = number - outer * params.s;
    const uint32_t b = outer / params.h, h = outer - b * params.h;
    const bool has_row = b < params.b, has_piece = has_row && lane < kPieces;
    float x[kColumns] = {}, mean[kColumns] = {};
    if (has_piece) {
      load(x, static_cast<const T*>(params.x) + b * params.stride_x_b + h * params.stride_x_h + s * params.stride_x_s +
                  lane * kColumns);
      if (params.mean != nullptr) {
        const float* const from =
            params.mean + b * params.stride_mean_b + h / params.group * params.stride_mean_h + lane * kColumns;
        FA_UNROLL
        for (int i = 0; i < kColumns; ++i) mean[i] = ptx::ld_global_nc(from + i);
      }
    }
    if (params.bias != nullptr) {
      const float bias = product(x, mean);
      if (has_row && lane == 0) {
        ptx::st_global(params.bias + b * params.stride_bias_b + h * params.stride_bias_h + s * params.stride_bias_s,
                       bias);
      }
    } else {
      FA_UNROLL
      for (int i = 0; i < kColumns; ++i) x[i] -= mean[i];
    }
    float* const scale =
        params.scale + b * params.stride_scale_b + h * params.stride_scale_h + s * params.stride_scale_s;
    const float factor = factor_of(x, scale, has_row, lane);
    if (!has_piece) return;
    uint64_t codes = 0;
    FA_UNROLL
    for (int i = 0; i < kColumns; ++i) {
      codes |= static_cast<uint64_t>(encode(Code{}, ptx::multiply(x[i], factor))) << 8 * i;
    }
    ptx::st_global(reinterpret_cast<uint64_t*>(static_cast<uint8_t*>(params.codes) + b * params.stride_codes_b +
                                               h * params.stride_codes_h + s * params.stride_codes_s + lane * kColumns),
                   codes);
  }

  FA_DEVICE static float product(const float (&x)[kColumns], const float (&mean)[kColumns]) {
    float sum = 0.f;
    FA_UNROLL
    for (int i = 0; i < kColumns; ++i) sum = ptx::fma(x[i], mean[i], sum);
    FA_UNROLL
    for (int mask = kLanes / 2; mask > 0; mask /= 2) sum += ptx::shfl_xor(sum, mask);
    return sum;
  }

  /// What a row is multiplied by. Called by whole warps.
  FA_DEVICE float factor_of(const float (&x)[kColumns], float* scale, bool has_row, int lane) const {
    float row_scale = 0.f;
    if (params.scale_given != 0) {
      if (has_row) row_scale = ptx::ld_global(scale);
    } else {
      float most = 0.f, zero = 0.f;  // NaN for a row with an infinity or a NaN
      FA_UNROLL
      for (const float value : x) {
        most = ptx::max(most, ptx::abs(value));
        zero = ptx::fma(value, 0.f, zero);
      }
      FA_UNROLL
      for (int mask = kLanes / 2; mask > 0; mask /= 2) {
        most = ptx::max(most, ptx::shfl_xor(most, mask));
        zero += ptx::shfl_xor(zero, mask);
      }
      row_scale = (most < kLeastMagnitude ? 0.f : most / greatest(Code{})) + zero;
      if (has_row && lane == 0) ptx::st_global(scale, row_scale);
    }
    const float factor = 1.f / row_scale;
    return factor - factor == 0.f ? factor : 0.f;  // 0 where there is none
  }

  FA_DEVICE void take_means() const {
    constexpr int kTogether = 4;                    // rows of a thread, whose loads are under way together
    constexpr uint32_t kRowsOfStep = kThreads / 2;  // a thread has half of a row's columns
    constexpr uint32_t kBlocksOfHead = Config::kHeadDim / kMeanColumns;
    const uint32_t head = static_cast<uint32_t>(ptx::block_index()) / kBlocksOfHead;
    const uint32_t block = static_cast<uint32_t>(ptx::block_index()) - head * kBlocksOfHead;
    const uint32_t b = head / params.h, h = head - b * params.h;
    const T* const from = static_cast<const T*>(params.x) + b * params.stride_x_b + h * params.stride_x_h +
                          block * kMeanColumns + thread % 2 * kColumns;
    float sum[kColumns] = {};
    FA_UNROLL_BY(1)
    for (uint32_t first = thread / 2; first < params.s; first += kTogether * kRowsOfStep) {
      float x[kTogether][kColumns] = {};
      FA_UNROLL
      for (uint32_t i = 0; i < kTogether; ++i) {
        const uint32_t row = first + i * kRowsOfStep;
        if (row < params.s) load(x[i], from + row * params.stride_x_s);
      }
      FA_UNROLL
      for (int i = 0; i < kTogether; ++i) {
        FA_UNROLL
        for (int c = 0; c < kColumns; ++c) sum[c] += x[i][c];
      }
    }
    FA_UNROLL
    for (float& part : sum) {
      FA_UNROLL
      for (int mask = 2; mask < kWarpSize; mask *= 2) part += ptx::shfl_xor(part, mask);
    }
    const uint32_t shared = ptx::dynamic_shared();
    if (thread % kWarpSize < 2) {
      FA_UNROLL
      for (int c = 0; c < kColumns; ++c) {
        ptx::st_shared_b32(shared + 4 * (thread / kWarpSize * kMeanColumns + thread % 2 * kColumns + c),
                           ptx::bits(sum[c]));
      }
    }
    ptx::sync_threads();
    if (thread >= kMeanColumns) return;
    float total = 0.f;
    for (int warp = 0; warp < Config::kWarps; ++warp) {
      total += ptx::from_bits(ptx::ld_shared_b32(shared + 4 * (warp * kMeanColumns + thread)));
    }
    ptx::st_global(params.mean + b * params.stride_mean_b + h * params.stride_mean_h + block * kMeanColumns + thread,
                   params.s == 0 ? 0.f : total / static_cast<float>(params.s));
  }
};

template <class Config>
FA_DEVICE void quantize(const QuantizeParams& params) {
  Quantize<Config>(params).run();
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_QUANTIZE_CUH_
