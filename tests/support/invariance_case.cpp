#include "support/invariance_case.hpp"

#include <algorithm>
#include <numeric>
#include <random>
#include <utility>

#include "reference/geometry.hpp"

namespace fa::test {
namespace {

void copy_row(const HostTensor& from, std::int64_t h, std::int64_t s, HostTensor& to, std::int64_t to_b,
              std::int64_t to_s) {
  const auto element = static_cast<std::int64_t>(size_of(from.view().dtype));
  const auto* const source = static_cast<const std::byte*>(from.view().data);
  auto* const target = static_cast<std::byte*>(to.view().data);
  std::copy_n(source + reference::row_offset(from.view(), 0, h, s) * element, from.view().shape[3] * element,
              target + reference::row_offset(to.view(), to_b, h, to_s) * element);
}

void append_row(std::vector<std::byte>& to, const HostTensor& from, std::int64_t b, std::int64_t h, std::int64_t s,
                std::int64_t columns) {
  const auto element = static_cast<std::int64_t>(size_of(from.view().dtype));
  const auto* const row =
      static_cast<const std::byte*>(from.view().data) + reference::row_offset(from.view(), b, h, s) * element;
  to.insert(to.end(), row, row + columns * element);
}

std::int64_t d_v_of(const AttentionConfig& config) {
  return config.head_dim_v != 0 ? config.head_dim_v : config.head_dim;
}

/// The rows of a chunk of an array [h, rows, ...] of bytes.
std::vector<std::byte> part_of(const std::vector<std::byte>& whole, const Chunk& chunk) {
  const std::int64_t rows = chunk.document->rows(), heads = chunk.document->heads();
  const std::int64_t row_bytes = std::ssize(whole) / (rows * heads);
  std::vector<std::byte> part;
  for (std::int64_t h = 0; h < heads; ++h) {
    const auto first = whole.begin() + h * rows * row_bytes;
    part.insert(part.end(), first + chunk.begin * row_bytes, first + chunk.end * row_bytes);
  }
  return part;
}

}  // namespace

Document make_document(const AttentionConfig& config, std::int64_t h_q, std::int64_t h_kv, std::int64_t rows,
                       std::uint64_t seed) {
  return {make_inputs({.h_q = h_q,
                       .h_kv = h_kv,
                       .s_q = rows,
                       .s_kv = rows,
                       .d_qk = config.head_dim,
                       .d_v = d_v_of(config),
                       .dtype = config.dtype,
                       .seed = seed})};
}

RowBits rows_of(const RowBits& whole, const Chunk& chunk) {
  return {part_of(whole.o, chunk), part_of(whole.lse, chunk)};
}

AttentionOutputs joined(const AttentionConfig& config, const std::vector<Chunk>& chunks,
                        const std::vector<RowBits>& bits) {
  const std::int64_t heads = chunks.front().document->heads(), rows = chunks.front().document->rows();
  const DType lse_dtype = config.dtype == DType::f64 ? DType::f64 : DType::f32;
  AttentionOutputs whole{HostTensor(config.dtype, 1, heads, rows, d_v_of(config), Layout::bhsd),
                         HostTensor(lse_dtype, 1, heads, rows)};
  whole.o.fill_with_nan();
  whole.lse.fill_with_nan();
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    const Chunk& chunk = chunks[i];
    const std::int64_t count = chunk.end - chunk.begin;
    for (const auto& [from, to] : {std::pair{&bits[i].o, &whole.o}, std::pair{&bits[i].lse, &whole.lse}}) {
      const std::int64_t row = std::ssize(*from) / (heads * count);
      for (std::int64_t h = 0; h < heads; ++h) {
        std::copy_n(from->begin() + h * count * row, count * row, to->bytes().begin() + (h * rows + chunk.begin) * row);
      }
    }
  }
  return whole;
}

std::vector<std::vector<Chunk>> cuts_of(const Document& document, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const std::int64_t rows = document.rows();
  std::vector<std::vector<std::int64_t>> ends{{rows}, {}, {}, {}};
  for (std::int64_t end = std::min<std::int64_t>(64, rows); ends[1].empty() || ends[1].back() < rows; end += 64) {
    ends[1].push_back(std::min(end, rows));
  }
  for (std::int64_t end = std::max<std::int64_t>(rows - 5, 1); end <= rows; ++end) ends[2].push_back(end);
  while (ends[3].empty() || ends[3].back() < rows) {
    const std::int64_t begin = ends[3].empty() ? 0 : ends[3].back();
    ends[3].push_back(std::min(rows, begin + 1 + static_cast<std::int64_t>(random() % 97)));
  }
  std::vector<std::vector<Chunk>> cuts;
  for (const std::vector<std::int64_t>& of : ends) {
    std::vector<Chunk>& chunks = cuts.emplace_back();
    for (const std::int64_t end : of) chunks.push_back({&document, chunks.empty() ? 0 : chunks.back().end, end});
  }
  return cuts;
}

ChunkCall::ChunkCall(const AttentionConfig& config, const std::vector<Chunk>& of, std::int64_t spare,
                     std::uint64_t seed)
    : chunks(of), varlen(config.varlen), d_v_(d_v_of(config)) {
  const HostTensor& like = chunks.front().document->inputs.k;
  shape = {.b = std::ssize(chunks),
           .h_q = chunks.front().document->heads(),
           .h_kv = like.view().shape[1],
           .s_q = 0,
           .s_kv = 0};
  for (const Chunk& chunk : chunks) {
    shape.s_q = std::max(shape.s_q, chunk.end - chunk.begin);
    shape.s_kv = std::max(shape.s_kv, chunk.end);
    if (varlen) shape.total_q += chunk.end - chunk.begin;
    if (varlen && config.page_size == 0) shape.total_kv += chunk.end;
  }
  if (varlen || config.page_size > 0) shape.s_kv += spare;
  q = HostTensor(config.dtype, varlen ? 1 : shape.b, shape.h_q, varlen ? shape.total_q : shape.s_q, config.head_dim,
                 Layout::bshd);
  put_queries();
  if (config.page_size > 0) {
    put_pages(config.page_size, seed);
  } else {
    put_keys();
  }
}

void ChunkCall::put_queries() {
  if (varlen) cu_q.push_back(0);
  for (std::int64_t i = 0; i < shape.b; ++i) {
    const Chunk& chunk = chunks[static_cast<std::size_t>(i)];
    const std::int64_t first = varlen ? cu_q.back() : 0;
    for (std::int64_t row = chunk.begin; row < chunk.end; ++row) {
      for (std::int64_t h = 0; h < shape.h_q; ++h) {
        copy_row(chunk.document->inputs.q, h, row, q, varlen ? 0 : i, first + row - chunk.begin);
      }
    }
    if (varlen) cu_q.push_back(static_cast<std::int32_t>(first + chunk.end - chunk.begin));
  }
}

void ChunkCall::put_key(const Chunk& chunk, std::int64_t key, std::int64_t b, std::int64_t at) {
  for (std::int64_t h = 0; h < shape.h_kv; ++h) {
    copy_row(chunk.document->inputs.k, h, key, k, b, at);
    copy_row(chunk.document->inputs.v, h, key, v, b, at);
  }
}

void ChunkCall::put_keys() {
  const std::int64_t b = varlen ? 1 : shape.b, rows = varlen ? shape.total_kv : shape.s_kv;
  k = HostTensor(q.view().dtype, b, shape.h_kv, rows, q.view().shape[3], Layout::bshd);
  v = HostTensor(q.view().dtype, b, shape.h_kv, rows, d_v_, Layout::bshd);
  if (varlen) cu_kv.push_back(0);
  for (std::int64_t i = 0; i < shape.b; ++i) {
    const Chunk& chunk = chunks[static_cast<std::size_t>(i)];
    const std::int64_t first = varlen ? cu_kv.back() : 0;
    for (std::int64_t key = 0; key < chunk.end; ++key) put_key(chunk, key, varlen ? 0 : i, first + key);
    if (varlen) cu_kv.push_back(static_cast<std::int32_t>(first + chunk.end));
  }
}

void ChunkCall::put_pages(std::int64_t page, std::uint64_t seed) {
  columns = (shape.s_kv + page - 1) / page;
  const std::int64_t pages = columns * shape.b;
  k = HostTensor(q.view().dtype, pages, shape.h_kv, page, q.view().shape[3], Layout::bshd);
  v = HostTensor(q.view().dtype, pages, shape.h_kv, page, d_v_, Layout::bshd);
  fill(k, {0, page}, 3.0);  // rows that no request has hold numbers, too
  fill(v, {0, page}, -7.0);
  table.resize(static_cast<std::size_t>(pages));
  std::iota(table.begin(), table.end(), 0);
  std::mt19937_64 random(seed);
  std::shuffle(table.begin(), table.end(), random);
  for (std::int64_t i = 0; i < shape.b; ++i) {
    const Chunk& chunk = chunks[static_cast<std::size_t>(i)];
    for (std::int64_t key = 0; key < chunk.end; ++key) {
      put_key(chunk, key, table[static_cast<std::size_t>(i * columns + key / page)], key % page);
    }
    used_kv.push_back(static_cast<std::int32_t>(chunk.end));
  }
}

AttentionOutputs ChunkCall::outputs() const {
  const auto& rows = q.view().shape;
  const DType lse_dtype = q.view().dtype == DType::f64 ? DType::f64 : DType::f32;
  AttentionOutputs result{HostTensor(q.view().dtype, rows[0], rows[1], rows[2], d_v_, Layout::bshd),
                          HostTensor(lse_dtype, rows[0], rows[1], rows[2])};
  result.o.fill_with_nan();
  result.lse.fill_with_nan();
  return result;
}

std::vector<RowBits> ChunkCall::bits_of(const AttentionOutputs& of) const {
  std::vector<RowBits> result;
  for (std::int64_t i = 0; i < shape.b; ++i) {
    const Chunk& chunk = chunks[static_cast<std::size_t>(i)];
    const std::int64_t first = varlen ? cu_q[static_cast<std::size_t>(i)] : 0;
    RowBits bits;
    for (std::int64_t h = 0; h < shape.h_q; ++h) {
      for (std::int64_t row = 0; row < chunk.end - chunk.begin; ++row) {
        append_row(bits.o, of.o, varlen ? 0 : i, h, first + row, d_v_);
        append_row(bits.lse, of.lse, varlen ? 0 : i, h, first + row, 1);
      }
    }
    result.push_back(std::move(bits));
  }
  return result;
}

std::vector<Chunk> random_chunks(const AttentionConfig& config, const std::vector<Document>& documents,
                                 std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto below = [&random](std::int64_t n) {
    return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(n));
  };
  const auto b = static_cast<std::size_t>(1 + below(config.varlen || config.page_size > 0 ? 5 : 3));
  // Of equal rows a decode, a draft, a chunk, or whole texts.
  constexpr std::int64_t kRows[] = {1, 1, 4, 64, 200};
  const std::int64_t rows = kRows[below(5)];
  std::vector<Chunk> chunks;
  std::int64_t equal_end = 0;
  for (std::size_t i = 0; i < b; ++i) {
    const Document& document = documents[static_cast<std::size_t>(below(std::ssize(documents)))];
    std::int64_t end = 1 + below(document.rows());
    std::int64_t count = config.varlen ? 1 + below(below(2) == 0 ? 8 : end) : rows;
    if (!config.varlen && end < count) end = std::min(count, document.rows());
    if (!config.varlen && config.page_size == 0) end = equal_end = i == 0 ? end : equal_end;
    if (end > document.rows() || (!config.varlen && end < count)) continue;  // a text that is too short
    count = std::min(count, end);
    chunks.push_back({&document, end - count, end});
  }
  if (chunks.empty()) chunks.push_back({&documents.front(), 0, documents.front().rows()});
  return chunks;
}

}  // namespace fa::test
