#ifndef FA_TESTS_DIFFERENTIAL_CONFIGURATION_HPP_
#define FA_TESTS_DIFFERENTIAL_CONFIGURATION_HPP_

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <fa/attention.hpp>

#include "differential/expression.hpp"

/// What a case is: a configuration, and calls of it. All of it follows from seed, number and edits.
namespace fa::differential {

enum class Where : std::uint8_t { host, cuda };

/// How large calls are.
enum class Size : std::uint8_t { small, usual };

/// An axis of a captured tensor, by what indexes it.
enum class Axis : std::uint8_t { b, h, q, kv, both, fixed, broadcast };

struct CaptureChoice {
  std::string name;
  DType dtype = DType::f32;
  std::vector<Axis> axes = {};
  std::int64_t fixed = 1;  ///< length of a fixed axis
  bool requires_grad = false;
  bool as_number = false;
  enum class Values : std::uint8_t {
    centred,
    positive,
    documents,
    prefix,
    small_integers,
    keep,
    bits
  } values = Values::centred;
};

/// How the axes of a tensor lie in memory.
struct Layout {
  std::array<int, 3> order{0, 1, 2};  ///< of b, h, s: the outermost first
  std::int64_t row_padding = 0;       ///< elements behind a row
  std::int64_t offset = 0;            ///< elements in front
  unsigned expanded = 0;              ///< axes of stride 0, a bit each
  int negative = -1;                  ///< an axis that runs backwards
  std::int64_t step = 1;              ///< of the last axis of a statistic
};

enum class LayoutClass : std::uint8_t { aligned, unaligned, strange, mixed };

/// Values that ought to have no effect, or are large.
enum class Hostile : std::uint8_t { none, unseen_keys, empty_rows, large, tiny, equal_keys };

/// What shares a scale of 8-bit elements; a block is of 16 rows.
enum class ScaleOf : std::uint8_t { none, tensor, head, block, row };

struct Configuration {
  AttentionConfig config;  ///< functions as text
  ExprPtr score, mask;
  std::vector<CaptureChoice> captures;
  std::vector<std::string> capture_names() const;
  LayoutClass layouts = LayoutClass::aligned;
  bool decode = false;  ///< few rows
  /// After a change of anything: the texts and declarations that `config` holds.
  void settle();
};

struct Call {
  std::int64_t b = 1, h_q = 1, h_kv = 1, s_q = 1, s_kv = 1;  ///< varlen: s_q and s_kv are the totals
  std::vector<std::int32_t> cu_q, cu_kv, used_q, used_kv;
  /// Over pages (config.page_size) k and v are drawn as without, and laid out in pages: used_kv may be given of dense
  /// queries, too.
  std::vector<std::int32_t> begin;  ///< first positions; may be empty
  bool indexed = false;             ///< table rows are found by batch_index
  bool scheduled = false;           ///< the call is given a schedule
  std::int64_t max_s_q = 0, max_s_kv = 0;
  bool lse = true, dlse = false, backward = true, dsink = true, positive_empty_lse = false;
  Gradients gradients = {};  ///< that backward is asked for
  Hostile hostile = Hostile::none;
  std::uint64_t values = 0;                                                           ///< seed
  ScaleOf q_scale = ScaleOf::none, k_scale = ScaleOf::none, v_scale = ScaleOf::none;  ///< with 8 bits
  bool row_bias = false;                                                              ///< with i8
  DropoutState dropout;
  bool dropout_on_device = false, workspace = false, tiles = false;
  std::optional<ShardPlace> place;  ///< with the sizes of the whole, in which functions, masks and dropout see the call
  Layout q, k, v, o, lse_layout, dout, dlse_layout, dq, dk, dv, capture;

  /// Lengths that captures must hold.
  std::int64_t longest_q(bool varlen) const {
    return place ? place->whole_s_q : varlen ? (max_s_q != 0 ? max_s_q : s_q) : s_q;
  }
  std::int64_t longest_kv(const AttentionConfig& config) const {
    const std::int64_t longest = place ? place->whole_s_kv : config.varlen && max_s_kv != 0 ? max_s_kv : s_kv;
    // Of a contiguous cache max_s_kv = 0 says nothing, and its rows have room: requests without keys are said to be of
    // one at most.
    return config.page_size == kContiguous ? std::max<std::int64_t>(longest, 1) : longest;
  }
  std::int64_t keys_of(bool varlen, std::int64_t i) const;  ///< of sequence or batch entry i
  std::int64_t entries_of_captures(bool varlen) const { return place ? place->whole_b : sequences(varlen); }
  std::int64_t heads_of_captures() const { return place ? place->whole_h_q : h_q; }
  std::int64_t sequences(bool varlen) const { return varlen ? static_cast<std::int64_t>(cu_q.size()) - 1 : b; }
};

/// Whether q, k and v are of 8 bits.
bool has_bytes(const AttentionConfig& config);
/// What o is of.
DType output_dtype(const AttentionConfig& config);

Configuration random_configuration(std::uint64_t seed, std::uint64_t number, Where where, Size size);
Call random_call(const Configuration& configuration, std::uint64_t seed, std::uint64_t number, std::uint64_t shape,
                 Where where, Size size);

/// One step towards something simpler, by name: false where it changes nothing or is not known.
bool edit(const std::string& name, Configuration& configuration, Call& call);
/// Names to try, the most drastic first.
std::vector<std::string> edits_for(const Configuration& configuration, const Call& call);

std::string to_string(const Configuration& configuration);
std::string to_string(const Configuration& configuration, const Call& call);

}  // namespace fa::differential

#endif  // FA_TESTS_DIFFERENTIAL_CONFIGURATION_HPP_
