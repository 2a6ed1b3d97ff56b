#ifndef FA_TESTS_DIFFERENTIAL_DENSE_HPP_
#define FA_TESTS_DIFFERENTIAL_DENSE_HPP_

#include <cstdint>
#include <string>
#include <vector>

#include "differential/configuration.hpp"
#include "differential/stored.hpp"
#include "differential/tensor.hpp"

/// Attention and its gradients written out, row by row in float64, with a bound of how far a device may be from each
/// element. Nothing of it is the library's, but for the bits of the dropout mask.
namespace fa::differential {

/// Every tensor that a call reads, with the values that it sees.
struct Inputs {
  Tensor q, k, v, dout, dlse, sink;
  Stored stored_q, stored_k, stored_v;  ///< what they are in memory, where that is not themselves
  Tensor row_bias;                      ///< [b, h_q, s_q]; of i8
  std::vector<Tensor> captures;         ///< undefined where the capture is a number, or is not used
  std::vector<double> numbers;
};

/// A result and its bounds, row-major. Infinite bounds are not held.
struct Expected {
  std::vector<double> value, bound;
};

/// Sequences of a call, or its batch entries.
struct Segment {
  std::int64_t b, tensor_b, first_q, s_q, first_kv, s_kv;
  std::int64_t begin = 0;  ///< keys before it are hidden from all rows
};

struct Results {
  Expected o, lse, dq, dk, dv, dsink;
  Expected max_logit, entropy;        ///< as lse; empty where the configuration does not ask for them
  Expected column_sums;               ///< [heads, s_kv] of each of `summed`, one behind the other
  std::vector<Segment> summed;        ///< segments that have column sums
  std::vector<Expected> captures;     ///< gradients; empty where none is required
  std::vector<bool> q_rows, kv_rows;  ///< whether a row of the tensors belongs to a sequence
  std::vector<bool> empty_rows;       ///< [b, h_q, s_q] of the tensors
};

/// What a mistake in the formula would be, to see that it is found. docs: the self-test.
enum class Mistake : std::uint8_t {
  none,
  causal_by_one,
  wrong_align,
  window_by_one,
  chunk_by_one,
  last_key_lost,
  first_row_again,
  wrong_kv_head,
  no_sink,
  sink_not_in_lse,
  dropout_scale,
  dropout_shifted,
  score_unscaled,
  no_score_function,
  no_mask_function,
  no_dlse,
  d_not_subtracted,
  group_not_summed,
  no_score_derivative,
  dk_unscaled,
  lse_base_two,
  used_ignored,
  begin_ignored,
  state_ignored,
  place_ignored,
  no_row_bias,
  logit_of_the_other_side,
  entropy_in_bits,
  sums_without_last_row,
};
constexpr int kMistakes = static_cast<int>(Mistake::sums_without_last_row) + 1;
const char* to_string(Mistake mistake);

/// Who computes, for the bounds.
struct Arithmetic {
  bool f64 = false;            ///< everything in double
  bool device = false;         ///< tensor cores: P and dS are rounded to the element type, approximate functions
  bool half_products = false;  ///< P is rounded to f16 where V has 8 bits, and not to bf16
};

Results evaluate(const Configuration& configuration, const Call& call, const Inputs& inputs,
                 const Arithmetic& arithmetic, Mistake mistake = Mistake::none);

/// What o and lse held before a forward that adds to them (config.accumulate), row-major; lse = -inf or +inf in rows
/// without keys.
struct State {
  std::vector<double> o, lse;
};
/// Joins a state to the o and lse of the keys alone.
void join_state(const Configuration& configuration, const State& state, Results& results,
                Mistake mistake = Mistake::none);

std::vector<Segment> segments_of(const Configuration& configuration, const Call& call, bool ignore_used = false);

/// Where an element of a call stands in the whole that the call is a part of.
Place in_whole(const Call& call, Place place);

/// Whether the masks in closed form keep a pair.
bool in_closed_form(const AttentionConfig& config, std::int64_t s_q, std::int64_t s_kv, std::int64_t i, std::int64_t j,
                    Mistake mistake = Mistake::none);

/// The mask function of a call; not defined without one.
Function mask_function(const Configuration& configuration, const Inputs& inputs);

}  // namespace fa::differential

#endif  // FA_TESTS_DIFFERENTIAL_DENSE_HPP_
