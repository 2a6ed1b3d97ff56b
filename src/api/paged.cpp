#include "api/paged.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "api/views.hpp"
#include "reference/geometry.hpp"
#include "support/text.hpp"

namespace fa::api {
namespace {

using support::throw_invalid;

/// One number of an array, named by its place.
void check_element(std::string_view name, std::int64_t i, std::int64_t value, std::int64_t most,
                   std::string_view meaning) {
  if (value >= 0 && value <= most) return;
  throw_invalid(fmt::format("{}[{}]", name, i), value, fmt::format("0 to {}, {}", most, meaning));
}

/// The first position that any of a request's rows sees: masks in closed form hide more from later rows.
std::int64_t first_seen(const AttentionConfig& config, std::int64_t rows, std::int64_t keys, std::int64_t begin) {
  reference::Geometry geometry;
  geometry.s_q = rows;
  geometry.s_kv = keys;
  geometry.window_left = window_of(config.window_left);
  geometry.chunk = config.chunk;
  return std::max(geometry.first_key(0), begin);
}

std::int32_t table_entry(const TensorView& table, std::int64_t row, std::int64_t page) {
  const auto* const entries = static_cast<const std::int32_t*>(table.data);
  return entries[row * table.strides[0] + page * table.strides[1]];
}

/// Requests have as many keys as the cache, or max_s_kv, leaves room for.
void set_longest(const PackedSequences& sequences, std::int64_t positions, AttentionShape& shape) {
  const std::int64_t longest = sequences.max_s_kv;
  if (longest < 0 || longest > kMaxLength) {
    throw_invalid("sequences.max_s_kv", longest, fmt::format("0 to {}", kMaxLength));
  }
  shape.s_kv = longest == 0 ? positions : std::min(longest, positions);
}

/// The same of a contiguous cache of `rows`.
void set_contiguous(const PagedCache& cache, std::int64_t rows, const PackedSequences& sequences,
                    AttentionShape& shape) {
  if (cache.block_table.defined()) {
    throw_invalid("cache.block_table", "given", "none of a contiguous cache");
  }
  const bool indexed = cache.batch_index != nullptr;
  if (sequences.b != 0 && (indexed ? rows == 0 : rows != sequences.b)) {
    throw_invalid("k", fmt::format("{} rows of a cache", rows),
                  indexed ? std::string("a row") : fmt::format("b = {} without cache.batch_index", sequences.b));
  }
  set_longest(sequences, shape.s_kv, shape);
}

}  // namespace

void validate_pages(const AttentionConfig& config) {
  if (config.page_size < kContiguous || config.page_size > kMaxLength) {
    throw_invalid("page_size", config.page_size,
                  fmt::format("0 to {}, or {} for a contiguous cache", kMaxLength, kContiguous));
  }
  if (config.page_size == 0) return;
  if (config.causal_align != CausalAlign::bottom_right) {
    throw_invalid("causal_align", "top_left",
                  "bottom_right with a page_size: rows stand at the last positions of a request");
  }
  if (config.dropout > 0) throw_invalid("dropout", config.dropout, "0 with a page_size");
}

void set_paged(const AttentionConfig& config, const PagedCache& cache, std::int64_t rows, PackedSequences& sequences,
               AttentionShape& shape) {
  const TensorView& table = cache.block_table;
  if (config.page_size == 0) {
    const bool given = table.defined() || cache.batch_index != nullptr || cache.seq_begin != nullptr;
    if (given) throw_invalid("cache", "given", "none without AttentionConfig::page_size");
    return;
  }
  if (!config.varlen) {
    if (sequences.b != 0 && sequences.b != shape.b) {
      throw_invalid("sequences.b", sequences.b, fmt::format("0, or the b = {} of q", shape.b));
    }
    sequences.b = shape.b;
    for (const auto& [name, array] :
         {std::pair{"cu_seqlens_q", sequences.cu_seqlens_q}, std::pair{"seqused_q", sequences.seqused_q}}) {
      if (array != nullptr) throw_invalid(name, "given", "none without AttentionConfig::varlen");
    }
  }
  if (sequences.cu_seqlens_kv != nullptr) {
    throw_invalid("cu_seqlens_kv", "given", "none of a KV cache: seqused_kv has the lengths");
  }
  check_array("seqused_kv", sequences.seqused_kv, sequences.b != 0);
  check_array("cache.batch_index", cache.batch_index, false);
  check_array("cache.seq_begin", cache.seq_begin, false);
  if (config.page_size == kContiguous) return set_contiguous(cache, rows, sequences, shape);
  if (!table.defined()) throw_invalid("cache.block_table", "nothing", "a tensor [b, max_pages] of i32");
  check_memory("cache.block_table", table);
  if (table.dtype != DType::i32) throw_invalid("cache.block_table", to_string(table.dtype), "dtype i32");
  const bool indexed = cache.batch_index != nullptr;
  const bool fits =
      table.rank == 2 && (sequences.b == 0 || (indexed ? table.shape[0] > 0 : table.shape[0] == sequences.b));
  if (!fits || table.shape[0] > kMaxLength || table.shape[1] > kMaxLength) {
    throw_invalid(
        "cache.block_table", fmt::format("shape {}", shape_text(table)),
        indexed ? std::string("[rows, max_pages], with a row") : fmt::format("[b, max_pages], b = {}", sequences.b));
  }
  const std::int64_t positions =
      table.shape[1] > kMaxLength / config.page_size ? kMaxLength : table.shape[1] * config.page_size;
  set_longest(sequences, positions, shape);
}

void check_requests(const AttentionConfig& config, const PackedSequences& sequences, const PagedCache& cache,
                    const AttentionShape& shape, std::int64_t pages) {
  if (config.varlen) check_rows(sequences, shape);
  const TensorView& table = cache.block_table;
  const bool contiguous = config.page_size == kContiguous;
  for (std::int64_t i = 0; i < sequences.b; ++i) {
    const std::int64_t keys = sequences.seqused_kv[i];
    check_element("seqused_kv", i, keys, shape.s_kv,
                  contiguous ? "what a row of the cache and max_s_kv leave room for"
                             : "what a row of the block table and max_s_kv leave room for");
    const std::int64_t begin = cache.seq_begin == nullptr ? 0 : cache.seq_begin[i];
    check_element("cache.seq_begin", i, begin, keys, "the length of the request");
    const std::int64_t row = cache.batch_index == nullptr ? i : cache.batch_index[i];
    check_element("cache.batch_index", i, row, (contiguous ? pages : table.shape[0]) - 1,
                  contiguous ? "a row of the cache" : "a row of the block table");
    if (contiguous) continue;
    const std::int64_t rows = rows_of_request(config, sequences, shape, i);
    const std::int64_t first = first_seen(config, rows, keys, begin);
    if (rows == 0 || first >= keys) continue;
    for (std::int64_t page = first / config.page_size; page * config.page_size < keys; ++page) {
      const std::int32_t entry = table_entry(table, row, page);
      if (entry >= 0 && entry < pages) continue;
      throw_invalid(fmt::format("cache.block_table[{}][{}]", row, page), entry,
                    fmt::format("0 to {}, a page of k and v", pages - 1));
    }
  }
}

}  // namespace fa::api
