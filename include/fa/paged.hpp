#ifndef FA_PAGED_HPP_
#define FA_PAGED_HPP_

#include <cstdint>

#include <fa/tensor.hpp>

/// A KV cache in pages (AttentionConfig::page_size).
///
/// Pages of `page_size` positions each are rows of one pool: k is [pages, h_kv, page_size, d_qk] and v is [pages, h_kv,
/// page_size, d_v] by meaning, with any strides. So [pages, page_size, h_kv, d] (NHD) is given by swap_axes(1, 2), and
/// K and V may be interleaved in one tensor. A request's table row says which pages are its own: position j is row
/// j % page_size of page block_table[row][j / page_size].
///
/// PackedSequences::seqused_kv has the positions of each request, new tokens counted. Row i of a request with s_q rows
/// stands at position seqused_kv - s_q + i: prefills, chunks of them, decodes and drafts are one kind of request.
///
/// With a page_size of kContiguous the cache has no pages, and no block table: k is [rows, h_kv, s_max, d_qk] and v is
/// [rows, h_kv, s_max, d_v], with any strides. Position j of a request is at j of its row.
namespace fa {

/// AttentionConfig::page_size of a KV cache that is not in pages.
inline constexpr std::int64_t kContiguous = -1;

/// Where the keys of a batch of requests are. Everything is in memory of the Attention's device, is read when the
/// kernels run, and may change between replays of a captured call.
struct PagedCache {
  /// [rows, max_pages], i32, any strides: page numbers from 0. Without `batch_index` rows = b. Entries that no row of
  /// the call needs are never read, and may be anything, -1 by convention. These are pages from seqused_kv on, in front
  /// of seq_begin, and in front of the window or chunk of the first row. Not with kContiguous.
  TensorView block_table = {};
  /// [b], the row of the table, or of a contiguous cache, that each request has; optional: request i has row i.
  const std::int32_t* batch_index = nullptr;
  /// [b], the first position of each request that counts; optional: 0. What is in front is padding or was evicted. It
  /// is hidden from all rows, and moves no position.
  const std::int32_t* seq_begin = nullptr;
};

}  // namespace fa

#endif  // FA_PAGED_HPP_
