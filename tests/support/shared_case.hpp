#ifndef FA_TESTS_SUPPORT_SHARED_CASE_HPP_
#define FA_TESTS_SUPPORT_SHARED_CASE_HPP_

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <vector>

#include <fa/attention.hpp>

#include "support/attention_case.hpp"

/// Requests over pages that share prefixes: a problem, its tensors and tables, and the float64 answer, by a call that
/// shares nothing.
namespace fa::test {

struct SharedCase {
  /// Consecutive requests whose keys are the same for so many positions behind the level in front.
  struct Group {
    std::int64_t requests = 1;
    std::int32_t keys = 0;
  };

  /// b, s_q and s_kv follow from the requests; the layout is that of the pool, bhsd: HND, bshd: NHD.
  AttentionCase attention;
  std::vector<std::vector<Group>> levels;
  std::vector<std::int32_t> rows;  ///< of each request; all the same unless `packed`
  std::vector<std::int32_t> keys;  ///< of each request's own, no fewer than rows
  std::int64_t page_size = 16;
  bool packed = false;   ///< queries lie one behind the other, with a row of no request in front and one behind
  bool bounded = false;  ///< max_rows, max_length, max_s_q and max_s_kv are given
  bool softcap = false;
  bool sink = false;
  std::int64_t window_left = -1;
  std::int64_t chunk = 0;
  std::int64_t least_pages = 0;                 ///< of a table row
  bool zero_padding = false;                    ///< of a packed case
  bool value_in_key = false;                    ///< the reference takes the first d_v columns of k for v
  std::optional<DType> k_dtype = std::nullopt;  ///< what the pool of K is stored as; with value_in_key latent rows
  std::optional<DType> v_dtype = std::nullopt;
  int group_size = 0;        ///< of u4x2
  ScoreFunction score = {};  ///< behind a softcap. May capture slope [h_q] and table [h_q, 41]
  MaskFunction mask = {};    ///< may capture tree, of a tree of each request's rows, and prefix [b]

  /// Whether the pool has latent rows.
  bool latent() const { return value_in_key && k_dtype.has_value(); }
  std::int64_t b() const { return static_cast<std::int64_t>(keys.size()); }
  AttentionConfig config() const;
};
void PrintTo(const SharedCase& c, std::ostream* out);

/// Of a few requests or of hundreds.
SharedCase random_shared_case(std::uint32_t seed);

/// The same over pools of 8 or 4 bits.
SharedCase random_stored_case(std::uint32_t seed);

/// The same with score and mask functions that depend on rows.
SharedCase random_function_case(std::uint32_t seed);

/// What a call is given. Rows of the pool that nobody needs hold NaN, and entries of the tables that nobody needs lead
/// out of it.
struct SharedData {
  struct Level {
    std::vector<std::int32_t> table, cu_rows, lengths, begin, positions;
    std::int64_t groups = 0, max_rows = 0, max_length = 0;
  };

  /// Undefined where there are none.
  TensorView k_scales() const;
  TensorView v_scales() const;
  /// Those that the case's functions name.
  Captures captures(const SharedCase& c) const;

  HostTensor q, k, v, sink;                      ///< q: [b, h_q, s_q, d_qk], or [1, h_q, total, d_qk]; sink [1, 1, h_q]
  HostTensor wide_k;                             ///< of latent rows: the numbers that they stand for
  HostTensor k_scale, v_scale;                   ///< of a stored pool
  std::vector<float> slope, table_of_distances;  ///< what functions capture
  std::vector<std::int32_t> tree, prefix;
  std::vector<std::int32_t> cu_q, used_kv;       ///< cu_q: not given where empty
  std::vector<std::int32_t> begin;               ///< of the requests' own keys
  std::vector<std::int32_t> table, whole_table;  ///< of these; and of all keys
  std::vector<Level> levels;
  std::int64_t max_pages = 0, max_s_q = 0, max_s_kv = 0;
};
SharedData make_data(const SharedCase& c);

AttentionOutputs make_outputs(const SharedCase& c, const SharedData& data);
AttentionOutputs reference_f64(const SharedCase& c, const SharedData& data);

/// The greatest difference in rows of requests, and in others where they are 0 and -inf by zero_padding.
double worst_of(const SharedCase& c, const SharedData& data, const HostTensor& actual, const HostTensor& expected);

}  // namespace fa::test

#endif  // FA_TESTS_SUPPORT_SHARED_CASE_HPP_
