#ifndef FA_TEMPLATES_COMMON_ROW_NORMS_CUH_
#define FA_TEMPLATES_COMMON_ROW_NORMS_CUH_

#include <common/constants.cuh>
#include <common/elements.cuh>
#include <common/variant_params.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>

namespace fa::kernel {

/// The greatest squared norm among the rows of each head of q, and of each head of k, before attention: bits of floats,
/// which are 0 at the launch. A NaN in a row is greater than all.
///
/// Config: Element (f16 or bf16), kHeadDim, kWarps.
template <class Config>
struct RowNorms {
  using T = typename Config::Element;
  static constexpr int kPieces = Config::kHeadDim / kPieceElements<T>;  // of a row
  static constexpr int kLanes = kPieces <= 1    ? 1
                                : kPieces <= 2  ? 2
                                : kPieces <= 4  ? 4
                                : kPieces <= 8  ? 8
                                : kPieces <= 16 ? 16
                                                : 32;
  static constexpr int kRowsTogether = kWarpSize / kLanes;
  static constexpr int kSteps = 8;  // loads of a lane that are under way together
  static constexpr int kRowsOfBlock = Config::kWarps * kRowsTogether * kSteps;
  static_assert(kPieces <= kWarpSize && sizeof(T) == 2, "head dims up to 256, of 16-bit elements");

  const ForwardVariantParams& params;
  const int thread = ptx::thread_index();

  FA_DEVICE void run() const {
    const int blocks_of_q = ceil_div(params.s_q, kRowsOfBlock);
    const int all_of_q = blocks_of_q * params.h_q * params.b;
    const int index = ptx::block_index();
    if (index < all_of_q) {
      const int head = index / blocks_of_q;
      look(static_cast<const T*>(params.q) + head / params.h_q * params.stride_q_b +
               head % params.h_q * params.stride_q_h,
           params.stride_q_s, params.s_q, index % blocks_of_q, head);
    } else {
      const int blocks_of_k = ceil_div(params.s_kv, kRowsOfBlock);
      const int head = (index - all_of_q) / blocks_of_k;
      look(static_cast<const T*>(params.k) + head / params.h_kv * params.stride_k_b +
               head % params.h_kv * params.stride_k_h,
           params.stride_k_s, params.s_kv, (index - all_of_q) % blocks_of_k, params.h_q * params.b + head);
    }
  }

 private:
  /// At rows [block * kRowsOfBlock, + kRowsOfBlock) of a head.
  FA_DEVICE void look(const T* head, int64_t stride, int rows, int block, int place) const {
    const int first = block * kRowsOfBlock + thread / kLanes;
    const int piece = thread % kLanes;
    float values[kSteps][kPieceElements<T>] = {};
    FA_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      const int row = first + step * (kRowsOfBlock / kSteps);
      if (row < rows && piece < kPieces) {
        load_piece<true>(values[step], head + row * stride + piece * kPieceElements<T>);
      }
    }
    uint32_t greatest = 0;
    FA_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      float sum = 0.f;
      FA_UNROLL
      for (int i = 0; i < kPieceElements<T>; ++i) sum = ptx::fma(values[step][i], values[step][i], sum);
      FA_UNROLL
      for (int mask = 1; mask < kLanes; mask *= 2) sum += ptx::shfl_xor(sum, mask);
      greatest = maximum(greatest, ptx::bits(sum));
    }
    FA_UNROLL
    for (int mask = kLanes; mask < kWarpSize; mask *= 2) greatest = maximum(greatest, ptx::shfl_xor(greatest, mask));
    if (thread % kWarpSize == 0) ptx::red_max_u32(params.variant.norms + place, greatest);
  }

  static FA_DEVICE uint32_t maximum(uint32_t a, uint32_t b) { return a < b ? b : a; }
};

template <class Config>
FA_DEVICE void row_norms(const ForwardVariantParams& params) {
  RowNorms<Config>{params}.run();
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_ROW_NORMS_CUH_
