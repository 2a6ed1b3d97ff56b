#ifndef FA_TESTS_SUPPORT_PAGED_CASE_HPP_
#define FA_TESTS_SUPPORT_PAGED_CASE_HPP_

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <vector>

#include <fa/attention.hpp>

#include "support/attention_case.hpp"
#include "support/variant_case.hpp"

/// Requests over a KV cache: a problem, its tensors and table, and the float64 answer.
namespace fa::test {

struct PagedCase {
  /// b, s_q and s_kv follow from the requests (attention_of); the layout is that of the pool, bhsd: HND, bshd: NHD.
  AttentionCase attention;
  VariantChoice variant = {};       ///< functions, windows, chunks and sinks
  std::vector<std::int32_t> rows;   ///< of each request; all the same unless `packed`
  std::vector<std::int32_t> keys;   ///< of each request
  std::vector<std::int32_t> begin;  ///< empty: no seq_begin
  std::int64_t page_size = 16;      ///< or kContiguous
  bool packed = false;        ///< queries lie one behind the other, with two rows of no request in front and one behind
  bool indexed = false;       ///< table rows are in another order, by batch_index
  bool bounded = false;       ///< max_s_q and max_s_kv are given
  bool value_in_key = false;  ///< V is the first d_v columns of K
  std::optional<DType> k_dtype = std::nullopt;  ///< what the pool of K is stored as; with value_in_key latent rows
  std::optional<DType> v_dtype = std::nullopt;
  int group_size = 0;       ///< of u4x2
  bool scaled = false;      ///< 8-bit floats have scales: of rows of q, of heads of k and v
  bool key_scales = false;  ///< or of keys
  bool value_scales = false;
  /// Whether the pool has latent rows.
  bool latent() const { return value_in_key && k_dtype.has_value(); }
  std::int64_t b() const { return static_cast<std::int64_t>(keys.size()); }
};
void PrintTo(const PagedCase& c, std::ostream* out);

/// The case's shape with b requests of the longest lengths.
AttentionCase attention_of(const PagedCase& c);

/// Configuration, functions and captures.
VariantCase variant_of(const PagedCase& c);

/// What a call over pages is given. Pages are in any order, a first page is shared where requests allow it, and there
/// are more than the table names. Rows of the pool that no row of q sees hold NaN, and the table's entries for pages
/// without others lead out of the pool.
struct PagedData {
  HostTensor q;                 ///< [b, h_q, s_q, d_qk], or [1, h_q, total_q, d_qk]
  HostTensor k, v;              ///< [pages, h_kv, page_size, d], or a contiguous cache [rows, h_kv, s_max, d]
  HostTensor wide_k;            ///< of latent rows: the numbers that they stand for, rounded to q's dtype
  HostTensor k_scale, v_scale;  ///< [pages, h_kv, page_size], of 4 bits [.., 2 * groups]; of 8-bit floats or [b, h_kv]
  HostTensor q_scale;           ///< of 8-bit floats, as q
  HostTensor row_bias;          ///< of i8, likewise
  std::vector<std::int32_t> cu_q, used_kv, begin, batch_index;  ///< not given where empty
  std::vector<std::int32_t> table;                              ///< [rows, max_pages]
  std::int64_t table_rows = 0;
  std::int64_t max_pages = 0;  ///< 1 of a contiguous cache, whose table has the number of each row
  std::int64_t page_rows = 0;  ///< page_size, or s_max
  bool contiguous = false;
  std::int64_t max_s_q = 0, max_s_kv = 0;
  std::vector<bool> needed;  ///< of the pool's rows, page by page

  /// Of memory of the host, as long as this lives.
  TensorView k_scales() const;  ///< undefined where there are none
  TensorView v_scales() const;
  PackedSequences sequences() const;
  PagedCache cache() const;
};
PagedData make_data(const PagedCase& c);

/// Stores a pool, whose rows are numbers, as `dtype`; the scales of its rows, with `group` those of groups of columns.
HostTensor store_as(HostTensor& pool, DType dtype, int group, Layout layout);

/// Stores a pool in latent rows: 512 codes, a scale of each 128, and 64 columns of bf16. What rows of the pool's type
/// stand for.
HostTensor store_latent(HostTensor& pool, Layout layout);

/// Fills a row of a page, or its scales, of all heads.
void set_nan(HostTensor& pool, std::int64_t page, std::int64_t row);

/// O and LSE like q, NaN-filled.
AttentionOutputs make_outputs(const PagedCase& c, const PagedData& data);

/// Column sums and top keys, as variant.config.statistics asks for.
struct PagedSums {
  explicit PagedSums(const PagedCase& c, const PagedData& data);

  std::int64_t b, heads, s_kv;
  std::vector<double> sums;            ///< [b, heads, s_kv]; a call may leave them out where top keys are wanted alone
  std::vector<std::int32_t> top_keys;  ///< [b, heads, count]
};

/// The greatest distance in parts of what is allowed: above 1 one is wrong. A key is as far from another as its sum.
/// `without_sums`: of top keys alone.
double error_of(const PagedCase& c, const PagedSums& actual, const PagedSums& expected, bool without_sums = false);

/// The float64 O and LSE, by the CPU reference; 0 and -inf in rows of no request. `sums`: likewise, unless it is null.
AttentionOutputs reference_f64(const PagedCase& c, const PagedData& data, PagedSums* sums = nullptr);

}  // namespace fa::test

#endif  // FA_TESTS_SUPPORT_PAGED_CASE_HPP_
