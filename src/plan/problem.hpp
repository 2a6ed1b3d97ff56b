#ifndef FA_SRC_PLAN_PROBLEM_HPP_
#define FA_SRC_PLAN_PROBLEM_HPP_

#include <algorithm>
#include <cstdint>
#include <optional>

#include <fa/statistics.hpp>
#include <fa/tensor.hpp>
#include <fa/types.hpp>

#include "plan/arch.hpp"
#include "plan/variants.hpp"

namespace fa::plan {

/// What something may follow from. Kernels declare it (catalogue.hpp), and what makes one of few facts takes these
/// alone.
enum class Facts : std::uint8_t {
  row,      ///< RowFacts (row_arithmetic.hpp)
  request,  ///< RequestFacts and DeviceFacts
  call,     ///< all of a Problem
};

/// What a call brings of one request, and what its configuration says: nothing of other requests, or of how tensors
/// lie. With Invariance::batch kernels follow from these and DeviceFacts alone. Of a ragged batch, s_q and s_kv are
/// bounds.
struct RequestFacts {
  DType dtype = DType::bf16;
  int d_qk = 0;
  int d_v = 0;
  bool causal = false;  ///< or keys behind the diagonal are hidden from some distance on
  CausalAlign causal_align = CausalAlign::bottom_right;
  bool positive_scale = true;
  bool dropout = false;         ///< some of P is dropped
  bool accumulate = false;      ///< a forward adds to the state that o and lse hold
  bool value_in_key = false;    ///< v is a view of the first d_v columns of k
  DType k_dtype = DType::bf16;  ///< of a forward: e4m3, i8 or u4x2, that K is stored as; any other: it is of dtype
  DType v_dtype = DType::bf16;  ///< likewise V
  int group_size = 0;           ///< columns of a group of u4x2
  DType o_dtype = DType::bf16;  ///< of a forward of 8-bit floats: bf16, f16 or e4m3
  bool key_scales = false;      ///< likewise: k_scale is of keys
  bool value_scales = false;    ///< and v_scale
  bool precise = false;         ///< likewise: P and V in 16 bits
  Invariance invariance = Invariance::none;  ///< of a forward
  Statistics statistics = {};                ///< of a forward
  int sum_buffers = 0;                       ///< likewise; of rows in the pass of column sums, where it is fixed
  Gradients gradients = {};                  ///< of a backward
  bool placed = false;                       ///< calls have places in larger attentions
  bool place_in_memory = false;              ///< likewise, which the device alone knows
  bool portable = false;                     ///< an override names the family of all GPUs, sm80
  /// Keys of a page, or kContiguous: the device knows how many keys a request has, s_kv bounds them. 0: plain tensors.
  int page_size = 0;
  std::int64_t h_q = 1;
  std::int64_t h_kv = 1;
  std::int64_t s_q = 1;
  std::int64_t s_kv = 1;
  const Variants* variants = nullptr;  ///< null: plain attention
  // Of the window and the chunks that `variants` and `causal` speak of: launch parameters.
  std::int64_t window_left = 0;
  std::int64_t window_right = 0;  ///< keys kept behind the diagonal
  std::int64_t chunk = 0;
  std::optional<ShardPlace> place = std::nullopt;  ///< with the sizes of the whole; likewise
};

/// What else a call has: other requests, and how tensors lie. The initial values are a request alone, in dense tensors
/// that every family can serve.
struct BatchFacts {
  bool aligned = true;          ///< rows of q, k, v, o start at multiples of 16 bytes
  bool tensor_maps = true;      ///< the copy engine can describe q, k, v and o (sm90_forward_describable)
  bool varlen = false;          ///< a packed batch: b sequences whose lengths the device knows; s_q and s_kv bound them
  bool given_schedule = false;  ///< of a call over a KV cache: it brings a schedule
  std::int64_t b = 1;
  std::int64_t total_q = 0;   ///< varlen: rows of the packed q
  std::int64_t total_kv = 0;  ///< varlen without pages: rows of the packed k and v
};

/// What kernels may know of the GPU.
struct DeviceFacts {
  Arch arch;
  bool bounded = false;  ///< fewer multiprocessors than there are take a call's tiles
};

/// Every fact that picks or specialises a kernel, and nothing else: pointers, strides and the value of the scale are
/// launch parameters. A function that may see some of them only takes a base.
struct Problem : RequestFacts, BatchFacts, DeviceFacts {
  /// What to plan for: of a packed batch without maximum lengths, twice the mean.
  std::int64_t typical_s_q() const noexcept { return typical(s_q, total_q); }
  /// Of the rows of a packed batch the mean: most requests of a mixed one are decodes.
  std::int64_t mean_s_q() const noexcept { return varlen ? std::min(s_q, ceil_mean(total_q)) : s_q; }
  std::int64_t typical_s_kv() const noexcept { return paged() ? s_kv : typical(s_kv, total_kv); }

  /// Whether q, k and v are of 8 bits: e4m3 or e5m2, or q and k i8 and v e4m3.
  bool fp8() const noexcept { return size_of(dtype) == 1; }
  /// Whether K, whose first columns are V, is stored in latent rows (kernels/sm80_forward.hpp).
  bool latent() const noexcept { return value_in_key && stored(); }
  /// Whether K or V alone is stored in 8 or 4 bits.
  bool stored() const noexcept { return !fp8() && (size_of(k_dtype) == 1 || size_of(v_dtype) == 1); }
  /// Whether the arithmetic of a row is a function of RowFacts alone (row_arithmetic.hpp). Of a packed batch nothing
  /// else is known of a request.
  bool fixed_rows() const noexcept {
    return invariance == Invariance::rows || (invariance == Invariance::batch && ragged() && !splits_by_length());
  }

  /// Whether splits of a request over a KV cache follow from its length, which the device knows: with
  /// Invariance::batch, where the Hopper forward serves all calls of a configuration.
  bool splits_by_length() const noexcept;

  /// What bits of a row may follow from.
  Facts bits_of() const noexcept {
    if (fixed_rows()) return Facts::row;
    return invariance == Invariance::batch ? Facts::request : Facts::call;
  }

  /// Whether the kernel that has the rows stores statistics of them.
  bool row_statistics() const noexcept { return statistics.max_logit != MaxLogit::none || statistics.entropy; }

  /// Whether a backward is given gradients of statistics.
  bool statistics_gradients() const noexcept { return statistics.any_gradient(); }
  /// Whether these need something of whole rows.
  bool scans_rows() const noexcept { return statistics.max_logit_gradient || statistics.column_sums_gradient; }

  /// Whether kernels look for the call's place in memory: what they compute depends on it.
  bool reads_place() const noexcept {
    const bool masked = variants != nullptr && (variants->left_window || variants->chunked || variants->placed);
    return place_in_memory && (causal || masked);
  }

  /// Whether K and V are a KV cache, in pages or contiguous.
  bool paged() const noexcept { return page_size != 0; }
  bool contiguous() const noexcept { return page_size < 0; }
  /// Whether the device alone knows how many rows, or keys, a batch entry has.
  bool ragged() const noexcept { return varlen || paged(); }

  /// Rows of a packed tensor, a page or a row of a cache: the copy engine's maps of these end with the last one needed,
  /// and have so many at most.
  static constexpr std::int64_t kMostBoundedRows = std::int64_t{1} << 30;
  std::int64_t bounded_rows() const noexcept {
    return std::max(varlen ? std::max(total_q, total_kv) : 0, contiguous() ? s_kv : page_size);
  }

 private:
  std::int64_t ceil_mean(std::int64_t total) const noexcept { return (total + b - 1) / std::max<std::int64_t>(b, 1); }
  std::int64_t typical(std::int64_t longest, std::int64_t total) const noexcept {
    return varlen ? std::min(longest, 2 * ceil_mean(total)) : longest;
  }
};

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_PROBLEM_HPP_
