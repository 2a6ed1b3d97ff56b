#ifndef FA_TEMPLATES_COMMON_PROBABILITIES_CUH_
#define FA_TEMPLATES_COMMON_PROBABILITIES_CUH_

#include <common/constants.cuh>
#include <common/dropout.cuh>
#include <common/dropout_place.cuh>
#include <common/elements.cuh>
#include <common/paged.cuh>
#include <common/probabilities_params.cuh>
#include <common/sequences.cuh>
#include <common/switches.cuh>
#include <common/variant.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>

namespace fa::kernel {

/// P of one query head, as V is multiplied by it, made anew from q, k and the log-sum-exp that a forward has left. A
/// thread block has a row, a thread pairs of keys. Rows and keys that are not there have 0.
///
/// Config: Element, kHeadDimQk, kCausal, kAligned, kWarps; optionally Variant, kVarlen, kDropout, kPageSize.
template <class Config>
struct Probabilities {
  using T = typename Config::Element;
  using Variant = VariantOf<Config>;
  static constexpr int kThreads = Config::kWarps * kWarpSize;
  static constexpr bool kPaged = kPageSize<Config> != 0;
  using Entry = typename Either<Request, BatchEntry<kVarlen<Config>, ForwardParams>, kPaged>::type;

  const ProbabilitiesParams& params;
  const Entry lengths;
  const int row = ptx::block_index();
  float offset = kInfinity;  // the log-sum-exp, in log2 units

  FA_DEVICE explicit Probabilities(const ProbabilitiesParams& p) : params(p), lengths(entry_of(p)) {
    if (row >= lengths.s_q) return;
    const float lse = ptx::ld_global(params.lse + first_row(params.stride_lse_b, params.stride_lse_s) +
                                     params.head * params.stride_lse_h + row * params.stride_lse_s);
    if (lse != -kInfinity) offset = lse * kLog2e;
  }

  static FA_DEVICE Entry entry_of(const ProbabilitiesParams& p) {
    if constexpr (kPaged) {
      return request_of<kVarlen<Config>>(p, p.batch);
    } else {
      return batch_entry<kVarlen<Config>, ForwardParams>(p, p.batch);
    }
  }

  FA_DEVICE void run() const {
    for (int key = 2 * ptx::thread_index(); key < params.columns; key += 2 * kThreads) {
      float p[2] = {0.f, 0.f};
      if (offset != kInfinity) weigh(p, key);
      FA_UNROLL
      for (int e = 0; e < 2; ++e) {
        if (key + e < params.columns) {
          ptx::st_global(params.p + row * params.stride_row + (key + e) * params.stride_column, p[e]);
        }
      }
    }
  }

 private:
  FA_DEVICE int64_t first_row(int64_t stride_b, int64_t stride_s) const {
    return offset_of_rows<kVarlen<Config>>(lengths, params.batch, stride_b, stride_s);
  }

  FA_DEVICE void weigh(float (&p)[2], int key) const {
    const int begin = keys_begin<Variant>(params, lengths, row);
    const int end = keys_end<Config::kCausal, Variant>(params, lengths, row);
    if (key + 1 < begin || key >= end) return;
    float s[2];
    FA_UNROLL
    for (int e = 0; e < 2; ++e) s[e] = key + e >= begin && key + e < end ? product(key + e) : 0.f;
    const Place at{params.batch, params.head, row, key, 0, 0, lengths.s_q, lengths.s_kv, params.variant.scale};
    const auto score = [&](int, int e) -> float& { return s[e]; };
    if constexpr (Variant::kScore) {
      Fixed<Variant> fixed;
      fixed.read(params.variant, at);
      kernel::apply_score<Variant, 1>(params.variant, at, fixed, score);
    }
    FA_UNROLL
    for (int e = 0; e < 2; ++e) s[e] *= Variant::kScore ? Variant::kFactor * kLog2e : params.scale_log2;
    if constexpr (Variant::kMask) kernel::apply_mask<Variant, 1>(params.variant, at, score);
    FA_UNROLL
    for (int e = 0; e < 2; ++e) {
      if (key + e >= begin && key + e < end && s[e] != -kInfinity) p[e] = ptx::ex2(s[e] - offset);
      if constexpr (kDropout<Config>) p[e] = is_dropped(key + e) ? 0.f : p[e] * params.dropout.inverse_keep;
    }
  }

  /// q . k
  FA_DEVICE float product(int key) const {
    constexpr int kElements = kPieceElements<T>;
    const T* const q = static_cast<const T*>(params.q) + first_row(params.stride_q_b, params.stride_q_s) +
                       params.head * params.stride_q_h + row * params.stride_q_s;
    const T* const k = key_row(key);
    if (k == nullptr) return 0.f;
    float sum = 0.f;
    for (int column = 0; column < Config::kHeadDimQk; column += kElements) {
      float a[kElements], b[kElements];
      load_piece<Config::kAligned>(a, q + column);
      load_piece<Config::kAligned>(b, k + column);
      FA_UNROLL
      for (int i = 0; i < kElements; ++i) sum = ptx::fma(a[i], b[i], sum);
    }
    return sum;
  }

  /// Null where a block table leads out of the pool.
  FA_DEVICE const T* key_row(int key) const {
    const T* const head =
        static_cast<const T*>(params.k) + params.head / (params.h_q / params.h_kv) * params.stride_k_h;
    if constexpr (kPaged) {
      using Keys = PagedKeys<kPageSize<Config>>;
      const int table_row = table_row_of(params.paged, params.batch);
      const Keys keys = keys_in_cache<kPageSize<Config>>(params.paged, table_row, 0, lengths.s_kv);
      const int page = keys.page_of(key);
      if (!keys.has(key, page)) return nullptr;
      return head + page * params.stride_k_b + Keys::row_in_page(key) * params.stride_k_s;
    } else {
      return head + offset_of_keys<kVarlen<Config>>(lengths, params.batch, params.stride_k_b, params.stride_k_s) +
             key * params.stride_k_s;
    }
  }

  /// One thread asks for one element of what a call of the generator decides on.
  FA_DEVICE bool is_dropped(int key) const {
    const int64_t before = heads_before<Variant>(params, params.batch);
    const int drawn = key_of_whole<Variant>(params, key);
    const uint32_t bits =
        Dropout(params.dropout, before)
            .draw_row(0, row_of_whole<Variant>(params, row), params.head, drawn / 16 * 16, drawn % 8 / 2);
    return (bits >> (4 * (drawn % 2) + 2 * (drawn % 16 / 8)) & 1) != 0;
  }
};

template <class Config>
FA_DEVICE void probabilities(const ProbabilitiesParams& params) {
  Probabilities<Config>(params).run();
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_PROBABILITIES_CUH_
