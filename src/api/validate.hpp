#ifndef FA_SRC_API_VALIDATE_HPP_
#define FA_SRC_API_VALIDATE_HPP_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include <fa/attention.hpp>

#include "api/statistics.hpp"

namespace fa::api {

/// Of an axis. Tile indices and rows are 32-bit in the kernels; the margin keeps index + tile from wrapping.
inline constexpr std::int64_t kMaxLength = (std::int64_t{1} << 31) - 65536;

/// Throws fa::Error(invalid_argument) naming the field, its value and what is accepted.
void validate(const AttentionConfig& config, bool host);

/// Throws fa::Error(unsupported) for a configuration that has no backward.
void check_has_backward(const AttentionConfig& config);

int d_v_of(const AttentionConfig& config) noexcept;

/// A window of AttentionConfig that reaches from any row to any key of any call is none: -1, as where it is not given.
std::int64_t window_of(std::int64_t given) noexcept;

/// `shape` of a call of `config`, with defaults filled in: in a packed batch s_q and s_kv become bounds of the lengths.
/// Throws like validate.
AttentionShape checked(const AttentionConfig& config, const AttentionShape& shape);

/// Throws fa::Error(invalid_argument) for an array of int32 on the device that is `needed` and not given, or
/// misaligned.
void check_array(std::string_view name, const std::int32_t* array, bool needed);

/// The lengths of a packed batch, in memory of the host: throws fa::Error(invalid_argument) naming the first that
/// decreases, leaves its tensor or exceeds its maximum.
void check_lengths(const PackedSequences& sequences, const AttentionShape& shape);

/// The same of the rows of q alone.
void check_rows(const PackedSequences& sequences, const AttentionShape& shape);

/// How many rows of q a batch entry has; the lengths are in memory of the host, and were checked.
std::int64_t rows_of_request(const AttentionConfig& config, const PackedSequences& sequences,
                             const AttentionShape& shape, std::int64_t i);

/// Whether rows of a tensor of rank 4 start at multiples of 16 bytes.
bool rows_aligned(const TensorView& view) noexcept;

/// "dtype bf16 or f32": what o of a state may be of.
std::string state_dtypes(const AttentionConfig& config);

/// Whether q, k and v are 8-bit floats, or q and k i8; what o is of, and v where that is not of the dtype.
bool is_fp8(DType dtype) noexcept;
DType o_dtype_of(const AttentionConfig& config) noexcept;
std::optional<DType> v_dtype_of(const AttentionConfig& config) noexcept;
/// Throws fa::Error(unsupported) for an operation that has no meaning for 8-bit floats.
void check_not_fp8(const AttentionConfig& config, const char* operation);

/// Columns of a group of u4x2, or 0 where nothing is stored so; and elements of a row of d columns.
int group_size_of(const AttentionConfig& config) noexcept;
std::int64_t stored_columns(const std::optional<DType>& stored, std::int64_t d) noexcept;

/// A tensor of a call as a view of rank 4, of a packed batch [1, h, total, d]. `of_state`: it may be f32, too.
/// `stored`: what it is of instead of the config's dtype. Throws fa::Error(invalid_argument).
TensorView tensor_of_call(const char* name, const TensorView& given, const AttentionConfig& config, bool paged = false,
                          bool of_state = false, std::optional<DType> stored = std::nullopt);

/// What a call has of each row, [b, h_q, s_q], as a view of rank 3. `rank3`: q has no axis of heads. Throws
/// fa::Error(invalid_argument), with the axes that are `accepted`.
TensorView checked_statistic(const char* name, const AttentionConfig& config, const TensorView& given,
                             const AttentionShape& shape, bool rank3, const char* accepted = "[b, h_q, s_q]");

/// Likewise where nothing is packed, or it is unpacked already. `of`: the dtype of q.
TensorView checked_rows(const char* name, DType of, const TensorView& view, const AttentionShape& shape, bool rank3,
                        const char* accepted);

// Latent rows (docs/mla.md): 512 codes of e4m3, 4 scales, 64 columns of bf16.
inline constexpr int kLatentColumns = 576;
inline constexpr int kLatentValues = 512;
inline constexpr std::int64_t kLatentRowBytes = 656;
bool has_latent_rows(const AttentionConfig& config) noexcept;

/// Elements of a row of k, or of a cache's.
std::int64_t key_columns(const AttentionConfig& config) noexcept;

/// The scales of rows `of` (rank 4) that are stored in 8 bits, [b, h_kv, s_kv], or with offsets in 4 bits, of rank 4;
/// undefined, and refused if it is given, where they are not. Throws fa::Error(invalid_argument).
TensorView check_scale(const AttentionConfig& config, const std::optional<DType>& stored, const char* name,
                       const TensorView& given, const char* of_name, const TensorView& of);

/// A state as views of rank 4 and 3, held to the shape of `like` unless that is null; lse may be missing where it is
/// not `needed`. Throws fa::Error(invalid_argument) with the names of its tensors.
struct StateNames {
  const char* o;
  const char* lse;
};
AttentionState check_state(const AttentionConfig& config, const StateNames& names, const AttentionState& given,
                           const TensorView* like, bool needs_lse);

/// The tensors of a forward call as rank-4 views (lse: rank 3), checked against each other. Those of a packed batch are
/// of one batch entry, [1, h, total, d]; k and v may be pages.
struct ForwardCall {
  TensorView q;               ///< [b, h_q, s_q, d_qk]
  TensorView k;               ///< [b, h_kv, s_kv, d_qk], or [pages, h_kv, page_size, d_qk]
  TensorView v;               ///< [b, h_kv, s_kv, d_v], or [pages, h_kv, page_size, d_v]
  TensorView o;               ///< [b, h_q, s_q, d_v]
  TensorView lse;             ///< [b, h_q, s_q]; optional
  TensorView k_scale;         ///< [b, h_kv, s_kv], or [pages, h_kv, page_size]; with AttentionConfig::k_dtype
  TensorView v_scale;         ///< likewise
  TensorView q_scale;         ///< [b, h_q, s_q]; of 8-bit floats, like the others then
  TensorView row_bias;        ///< [b, h_q, s_q]; of i8
  PackedSequences sequences;  ///< over pages with b
  CheckedStatistics statistics;
  DropoutState dropout;
  PagedCache cache;
  AttentionShape shape;
  bool empty = false;               ///< no output element: nothing to do
  std::optional<ShardPlace> place;  ///< with the sizes of its whole; nothing: it is the whole
  int max_multiprocessors = 0;      ///< 0: all
};

/// The scales of a call of 8-bit floats, whose tensors are there. Throws fa::Error(invalid_argument).
void set_fp8_scales(const AttentionConfig& config, const ForwardInputs& inputs, ForwardCall& call);

/// Throws fa::Error(invalid_argument) for anything that forward must not be launched with.
ForwardCall check_forward(const AttentionConfig& config, const ForwardInputs& inputs, const ForwardOutputs& outputs);

/// The tensors of a backward call as rank-4 views (lse and dlse: rank 3), checked against each other, as above.
struct BackwardCall {
  TensorView q;     ///< [b, h_q, s_q, d_qk]
  TensorView k;     ///< [b, h_kv, s_kv, d_qk]
  TensorView v;     ///< [b, h_kv, s_kv, d_v]
  TensorView o;     ///< [b, h_q, s_q, d_v]
  TensorView lse;   ///< [b, h_q, s_q]
  TensorView dout;  ///< [b, h_q, s_q, d_v]
  TensorView dlse;  ///< [b, h_q, s_q]; optional
  TensorView dq;    ///< [b, h_q, s_q, d_qk]
  TensorView dk;    ///< [b, h_kv, s_kv, d_qk]
  TensorView dv;    ///< [b, h_kv, s_kv, d_v]
  PackedSequences sequences;
  DropoutState dropout;
  AttentionShape shape;
  bool empty = false;               ///< no output element: nothing to do. Without it s_q, h_q or s_kv may still be 0
  std::optional<ShardPlace> place;  ///< as in forward
  int max_multiprocessors = 0;      ///< likewise
  StatisticsGradients statistics;   ///< [b, h_q, s_q]
};

/// Throws fa::Error(invalid_argument) for anything that backward must not be launched with.
BackwardCall check_backward(const AttentionConfig& config, const BackwardInputs& inputs,
                            const BackwardOutputs& outputs);

}  // namespace fa::api

#endif  // FA_SRC_API_VALIDATE_HPP_
