#ifndef FA_TESTS_SUPPORT_INVARIANCE_CASE_HPP_
#define FA_TESTS_SUPPORT_INVARIANCE_CASE_HPP_

#include <cstddef>
#include <cstdint>
#include <vector>

#include <fa/attention.hpp>

#include "support/attention_case.hpp"

/// Rows of texts in calls of every layout, to compare their bits.
namespace fa::test {

/// All rows and keys of a text: q [1, h_q, n, d_qk], k [1, h_kv, n, d_qk], v [1, h_kv, n, d_v].
struct Document {
  AttentionInputs inputs;
  std::int64_t rows() const { return inputs.q.view().shape[2]; }
  std::int64_t heads() const { return inputs.q.view().shape[1]; }
};
Document make_document(const AttentionConfig& config, std::int64_t h_q, std::int64_t h_kv, std::int64_t rows,
                       std::uint64_t seed);

/// Rows [begin, end) of a document, which see the keys before `end`.
struct Chunk {
  const Document* document;
  std::int64_t begin;
  std::int64_t end;
};

/// The bits of o and lse of a chunk: [h_q, rows, d_v] and [h_q, rows].
struct RowBits {
  std::vector<std::byte> o, lse;
  friend bool operator==(const RowBits&, const RowBits&) = default;
};
/// Of `whole`, a document's rows from 0 on, those of a chunk.
RowBits rows_of(const RowBits& whole, const Chunk& chunk);

/// o [1, h_q, n, d_v] and lse [1, h_q, n] of a document whose rows are those of chunks, as calls have left them. NaN
/// where no chunk has been.
AttentionOutputs joined(const AttentionConfig& config, const std::vector<Chunk>& chunks,
                        const std::vector<RowBits>& bits);

/// Cuts of a document into chunks, one behind the other: in one, by 64 rows, with rows alone at the end, and at random.
std::vector<std::vector<Chunk>> cuts_of(const Document& document, std::uint64_t seed);

/// What a call of some chunks is given, in host memory. Without varlen chunks have as many rows, and without pages as
/// many keys.
struct ChunkCall {
  /// `spare`: keys that no request has, up to which the limit goes; `seed`: of the order of pages.
  ChunkCall(const AttentionConfig& config, const std::vector<Chunk>& chunks, std::int64_t spare, std::uint64_t seed);

  AttentionOutputs outputs() const;  ///< filled with NaN
  std::vector<RowBits> bits_of(const AttentionOutputs& of) const;

  std::vector<Chunk> chunks;
  bool varlen;
  AttentionShape shape;
  HostTensor q, k, v;  ///< k and v may be pages
  std::vector<std::int32_t> cu_q, cu_kv, used_kv, table;
  std::int64_t columns = 0;  ///< of the table

 private:
  void put_queries();
  void put_keys();
  void put_pages(std::int64_t page_size, std::uint64_t seed);
  void put_key(const Chunk& chunk, std::int64_t key, std::int64_t b, std::int64_t at);

  std::int64_t d_v_;
};

/// A random call that `config` can do, of chunks of `documents`.
std::vector<Chunk> random_chunks(const AttentionConfig& config, const std::vector<Document>& documents,
                                 std::uint64_t seed);

}  // namespace fa::test

#endif  // FA_TESTS_SUPPORT_INVARIANCE_CASE_HPP_
