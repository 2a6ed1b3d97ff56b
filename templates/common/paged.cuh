#ifndef FA_TEMPLATES_COMMON_PAGED_CUH_
#define FA_TEMPLATES_COMMON_PAGED_CUH_

#include <common/forward_params.cuh>
#include <common/packed_params.cuh>
#include <common/sequences.cuh>
#include <ptx/language.cuh>
#include <ptx/memory.cuh>

namespace fa::kernel {

/// The page size of a KV cache that is not in pages: each of its rows [rows, h_kv, s_max, d] has all positions of a
/// request, and takes the place of a page.
inline constexpr int kContiguous = -1;

/// The greatest number that divides both.
FA_DEVICE constexpr int common_divisor(int a, int b) {
  while (b != 0) {
    const int rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}

/// A sequence whose keys are in pages, and start at position 0 of its table row.
struct Request : Sequence {
  int first_position;  // that counts
};

/// A request of such rows of q and as many keys.
FA_DEVICE Request request_between(const ForwardParams& params, const Span& rows, int keys) {
  Request request;
  request.s_q = rows.count;
  request.s_kv = clamp(keys, 0, params.s_kv);
  request.diagonal = request.s_kv - request.s_q;
  request.causal_shift = request.diagonal + params.causal_shift;
  request.first_row = rows.first;
  request.first_key = 0;
  request.group = params.group;
  request.splits = 1;
  request.m_blocks = 0;
  request.padded_rows = 0;
  request.first_padded_row = 0;
  request.first_position = 0;
  return request;
}

/// Request `batch`. Whatever the arrays hold, its rows lie in q, and its positions in its table row.
template <bool kVarlen>
FA_DEVICE Request request_of(const ForwardParams& params, int batch) {
  const SequenceParams& from = params.sequences;
  const Span rows = kVarlen ? span_of(from.cu_q, from.used_q, batch, from.total_q, params.s_q) : Span{0, params.s_q};
  Request request = request_between(params, rows, ptx::ld_global(from.used_kv + batch));
  const int32_t* const begin = params.paged.begin;
  request.first_position = begin == nullptr ? 0 : clamp(ptx::ld_global(begin + batch), 0, request.s_kv);
  return request;
}

/// The row of the block table, or of a contiguous cache, that request `batch` has.
FA_DEVICE int table_row_of(const PagedParams& paged, int batch) {
  int row = batch;
  if (paged.batch_index != nullptr) row = clamp(ptx::ld_global(paged.batch_index + batch), 0, paged.rows - 1);
  return row;
}

/// The positions from `begin` to before `end` of a request, which are found by its row of the block table. Others are
/// not there: what the table has for them alone is never read.
template <int kPageSize>
struct PagedKeys {
  const PagedParams& paged;
  const int32_t* row;
  int begin;
  int end;

  static FA_DEVICE int page_index(int key) { return static_cast<uint32_t>(key) / static_cast<uint32_t>(kPageSize); }
  static FA_DEVICE int row_in_page(int key) { return static_cast<uint32_t>(key) % static_cast<uint32_t>(kPageSize); }

  /// The page that `key` is in; anything for a page without keys. kGuessed: so may `begin` and `end` be.
  template <bool kGuessed = false>
  FA_DEVICE int page_of(int key) const {
    const int index = page_index(key);
    if (index < page_index(begin) || index * int64_t{kPageSize} >= end) return -1;
    const int32_t* const entry = row + index * paged.stride_page;
    return kGuessed ? ptx::ld_guessed_global(entry) : ptx::ld_global(entry);
  }
  /// Whether `key` is there, in page `page`, which may lead out of the pool.
  FA_DEVICE bool has(int key, int page) const { return key >= begin && key < end && in_pool(page); }
  FA_DEVICE bool in_pool(int page) const { return static_cast<uint32_t>(page) < static_cast<uint32_t>(paged.pages); }
};

/// Those of a contiguous cache, whose row is the page of all of them.
template <>
struct PagedKeys<kContiguous> {
  int row;
  int begin;
  int end;

  static FA_DEVICE int row_in_page(int key) { return key; }
  template <bool kGuessed = false>
  FA_DEVICE int page_of(int) const {
    return row;
  }
  FA_DEVICE bool has(int key, int page) const { return page >= 0 && begin <= key && key < end; }
  static FA_DEVICE bool in_pool(int page) { return page >= 0; }
};

/// The positions from `begin` to before `end` of the request that has row `row`.
template <int kPageSize>
FA_DEVICE PagedKeys<kPageSize> keys_in_cache(const PagedParams& paged, int row, int begin, int end) {
  if constexpr (kPageSize == kContiguous) {
    return {row, begin, end};
  } else {
    return {paged, paged.table + row * paged.stride_row, begin, end};
  }
}

/// Rows of a KV tile that are copied together: they are sure to be in one page.
template <int kPageSize, int kTileN>
inline constexpr int kRowsTogether = kPageSize > 0 ? common_divisor(kPageSize, kTileN) : kTileN;

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_PAGED_CUH_
