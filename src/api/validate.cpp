#include "api/validate.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <optional>
#include <span>
#include <string_view>

#include "api/paged.hpp"
#include "api/place.hpp"
#include "api/views.hpp"
#include "support/text.hpp"

namespace fa::api {
namespace {

using support::throw_invalid;
using support::throw_unsupported;

// Of all heads. Split keys, d of 512 and f32 elements make 2^18 bytes of scratch a row and a few, and tiles 128 rows of
// one.
constexpr std::int64_t kMaxRows = std::int64_t{1} << 44;
constexpr std::int64_t kMaxPackedRows = std::int64_t{1} << 48;  // of padded sequences, and without splits

std::span<const std::int64_t> shape_of(const TensorView& view) {
  return {view.shape.data(), static_cast<std::size_t>(std::clamp(view.rank, 0, TensorView::kMaxRank))};
}

void check_size(std::string_view name, std::int64_t value) {
  if (value < 0 || value > kMaxLength) throw_invalid(name, value, fmt::format("0 to {}", kMaxLength));
}

void check_sizes(const AttentionShape& shape) {
  check_size("b", shape.b);
  check_size("h_q", shape.h_q);
  check_size("h_kv", shape.h_kv);
  check_size("s_q", shape.s_q);
  check_size("s_kv", shape.s_kv);
  // With this no product of sizes overflows anywhere later.
  const bool packed = shape.total_q != 0 || shape.total_kv != 0;
  const std::int64_t heads = std::max(shape.h_q, shape.h_kv);
  const std::int64_t most = packed ? kMaxPackedRows : kMaxRows;
  for (const std::int64_t s : {shape.s_q, shape.s_kv}) {
    std::int64_t rows = 0;
    if (__builtin_mul_overflow(shape.b * heads, s, &rows) || rows > most) {
      throw_invalid("b * h_q * s_q", fmt::format("{} * {} * {}", shape.b, heads, s), fmt::format("at most {}", most));
    }
  }
  const std::int64_t total = std::max(shape.total_q, shape.total_kv);
  if (heads * total > kMaxPackedRows) {
    throw_invalid("h_q * total_q", fmt::format("{} * {}", heads, total), fmt::format("at most {}", kMaxPackedRows));
  }
  const bool heads_match = shape.h_kv == 0 ? shape.h_q == 0 : shape.h_q % shape.h_kv == 0;
  if (!heads_match) throw_invalid("h_q", shape.h_q, fmt::format("a multiple of h_kv = {}", shape.h_kv));
}

/// Inserts the head axis that a tensor without heads leaves out.
TensorView with_heads(const TensorView& view, int full_rank) {
  if (view.rank == full_rank) return view;
  TensorView result = view;
  result.rank = full_rank;
  for (int axis = full_rank - 1; axis > 1; --axis) {
    result.shape[static_cast<std::size_t>(axis)] = view.shape[static_cast<std::size_t>(axis - 1)];
    result.strides[static_cast<std::size_t>(axis)] = view.strides[static_cast<std::size_t>(axis - 1)];
  }
  result.shape[1] = 1;
  result.strides[1] = 0;
  return result;
}

/// A packed tensor [total, h, d] as [1, h, total, d], a packed statistic [h, total] as [1, h, total]; others as they
/// are, to be refused for their rank.
TensorView unpacked(const TensorView& view, int packed_rank) {
  if (view.rank != packed_rank) return view;
  TensorView result = packed_rank == 3 ? view.swap_axes(0, 1) : view;
  for (auto axis = static_cast<std::size_t>(packed_rank); axis > 0; --axis) {
    result.shape[axis] = result.shape[axis - 1];
    result.strides[axis] = result.strides[axis - 1];
  }
  result.shape[0] = 1;
  result.strides[0] = 0;
  result.rank = packed_rank + 1;
  return result;
}

void check_packed(std::string_view name, const TensorView& view, int packed_rank, std::string_view axes) {
  if (view.rank != packed_rank + 1 || view.shape[0] != 1) {
    throw_invalid(name, fmt::format("shape {}", shape_text(view)), fmt::format("a packed tensor {}", axes));
  }
}

void check_shape(std::string_view name, const TensorView& view, const std::array<std::int64_t, 4>& expected,
                 std::string_view axes) {
  if (view.shape == expected) return;
  throw_invalid(name, fmt::format("shape {}", shape_text(view)),
                fmt::format("{} = [{}]", axes, fmt::join(expected, ", ")));
}

/// Turns the shape of packed tensors, one batch entry of all rows, into that of the batch.
void set_packed(const AttentionConfig& config, const PackedSequences& sequences, AttentionShape& shape) {
  if (!config.varlen) {
    if (config.page_size != 0) return;
    const bool given = sequences.b != 0 || sequences.cu_seqlens_q != nullptr || sequences.cu_seqlens_kv != nullptr ||
                       sequences.seqused_q != nullptr || sequences.seqused_kv != nullptr;
    if (given) throw_invalid("sequences", "given", "none without AttentionConfig::varlen or page_size");
    return;
  }
  check_size("sequences.b", sequences.b);
  check_size("sequences.max_s_q", sequences.max_s_q);
  check_size("sequences.max_s_kv", sequences.max_s_kv);
  check_array("cu_seqlens_q", sequences.cu_seqlens_q, sequences.b != 0);
  check_array("cu_seqlens_kv", sequences.cu_seqlens_kv, sequences.b != 0 && config.page_size == 0);
  check_array("seqused_q", sequences.seqused_q, false);
  check_array("seqused_kv", sequences.seqused_kv, false);
  shape.b = sequences.b;
  shape.total_q = shape.s_q;
  shape.s_q = shape.total_q == 0 ? 0 : sequences.max_s_q;
  if (config.page_size == 0) {
    shape.total_kv = shape.s_kv;
    shape.s_kv = shape.total_kv == 0 ? 0 : sequences.max_s_kv;
  }
  shape = checked(config, shape);
}

void check_dropout(const AttentionConfig& config, const DropoutState& state) {
  if (config.dropout == 0 && state.device != nullptr) {
    throw_invalid("dropout.device", "given", "none without AttentionConfig::dropout");
  }
  if (reinterpret_cast<std::uintptr_t>(state.device) % alignof(std::uint64_t) != 0) {
    throw_invalid("dropout.device", fmt::format("pointer {}", fmt::ptr(state.device)), "a multiple of 8 bytes");
  }
}

template <class Inputs, class Call>
void set_place(const AttentionConfig& config, const Inputs& inputs, Call& call) {
  call.place = checked_place(config, call.shape, inputs.place);
  call.max_multiprocessors = checked_multiprocessors(inputs.max_multiprocessors);
  call.shape.placed = call.place.has_value();
  call.shape.strided = call.place && (call.place->q_step != 1 || call.place->kv_step != 1);
  call.shape.place_in_memory = call.place && call.place->begin != nullptr;
  if (call.shape.place_in_memory && inputs.tiles.filled) {
    throw_unsupported("tiles", "filled", "memory that is not, with place.begin: lists are of one place");
  }
  call.shape.bounded = call.max_multiprocessors > 0;
}

/// The first columns of k, in the place of a v that is not given.
TensorView value_in_key(const AttentionConfig& config, const TensorView& given, const TensorView& k) {
  if (given.defined()) throw_invalid("v", "given", "nothing with value_in_key: V is the first columns of k");
  TensorView v = k;
  v.shape[3] = config.value_in_key;
  return v;
}

/// The sizes that q and k give a call, to hold the other tensors against.
struct Axes {
  Axes(const AttentionConfig& config, const TensorView& q, const TensorView& k)
      : page_size(config.page_size),
        pages(k.shape[0]),
        d_qk(config.head_dim),
        d_v(d_v_of(config)),
        stored_d_qk(key_columns(config)),
        stored_d_v(stored_columns(config.v_dtype, d_v)) {
    shape.b = q.shape[0];
    shape.h_q = q.shape[1];
    shape.h_kv = k.shape[1];
    shape.s_q = q.shape[2];
    shape.s_kv = k.shape[2];
  }

  void check_q(std::string_view name, const TensorView& view) const {
    check_shape(name, view, {shape.b, shape.h_q, shape.s_q, d_qk}, "[b, h_q, s_q, head_dim]");
  }
  void check_k(std::string_view name, const TensorView& view) const {
    if (page_size == kContiguous) {
      return check_shape(name, view, {pages, shape.h_kv, shape.s_kv, stored_d_qk}, "[rows, h_kv, s_max, head_dim]");
    }
    if (page_size > 0) {
      return check_shape(name, view, {pages, shape.h_kv, page_size, stored_d_qk}, "[pages, h_kv, page_size, head_dim]");
    }
    check_shape(name, view, {shape.b, shape.h_kv, shape.s_kv, stored_d_qk}, "[b, h_kv, s_kv, head_dim]");
  }
  void check_v(std::string_view name, const TensorView& view) const {
    if (page_size == kContiguous) {
      return check_shape(name, view, {pages, shape.h_kv, shape.s_kv, stored_d_v}, "[rows, h_kv, s_max, head_dim_v]");
    }
    if (page_size > 0) {
      return check_shape(name, view, {pages, shape.h_kv, page_size, stored_d_v},
                         "[pages, h_kv, page_size, head_dim_v]");
    }
    check_shape(name, view, {shape.b, shape.h_kv, shape.s_kv, stored_d_v}, "[b, h_kv, s_kv, head_dim_v]");
  }
  void check_o(std::string_view name, const TensorView& view) const {
    check_shape(name, view, {shape.b, shape.h_q, shape.s_q, d_v}, "[b, h_q, s_q, head_dim_v]");
  }

  AttentionShape shape;
  std::int64_t page_size;
  std::int64_t pages;
  std::int64_t d_qk;
  std::int64_t d_v;
  std::int64_t stored_d_qk;  ///< elements of a row of k: u4x2 has two columns each
  std::int64_t stored_d_v;
};

}  // namespace

TensorView tensor_of_call(const char* name, const TensorView& given, const AttentionConfig& config, bool paged,
                          bool of_state, std::optional<DType> stored) {
  const DType dtype = stored.value_or(config.dtype);
  const bool packed = config.varlen && !paged;
  const TensorView view = packed ? unpacked(given, 3) : given;
  if (packed && view.defined()) check_packed(name, view, 3, "[total, h, d]");
  if (!view.defined()) {
    throw_invalid(name, "nothing", paged ? "pages [pages, h_kv, page_size, d]" : "a tensor [b, h, s, d] or [b, s, d]");
  }
  if (view.rank != 3 && view.rank != 4) {
    throw_invalid(name, fmt::format("shape {}", shape_text(view)),
                  paged ? "rank 4 [pages, h_kv, page_size, d] or rank 3 [pages, page_size, d]"
                        : "rank 4 [b, h, s, d] or rank 3 [b, s, d]");
  }
  const bool widened = of_state && view.dtype == DType::f32 && dtype != DType::f64;
  if (view.dtype != dtype && !widened) {
    throw_invalid(name, to_string(view.dtype),
                  of_state ? state_dtypes(config) : fmt::format("dtype {}", to_string(dtype)));
  }
  for (const std::int64_t size : shape_of(view)) {
    if (size < 0 || size > kMaxLength) {
      throw_invalid(name, fmt::format("shape {}", shape_text(view)), fmt::format("sizes from 0 to {}", kMaxLength));
    }
  }
  const TensorView full = with_heads(view, 4);
  if (full.shape[3] > 1 && full.strides[3] != 1) {
    throw_invalid(name, fmt::format("stride {} of the last axis", full.strides[3]), "a contiguous head dim, stride 1");
  }
  check_memory(name, full);
  return full;
}

TensorView checked_statistic(const char* name, const AttentionConfig& config, const TensorView& given,
                             const AttentionShape& shape, bool rank3, const char* accepted) {
  const TensorView view = config.varlen ? unpacked(given, 2) : given;
  if (config.varlen && view.defined()) check_packed(name, view, 2, "[h_q, total_q]");
  return checked_rows(name, config.dtype, view, shape, rank3, accepted);
}

TensorView checked_rows(const char* name, DType of, const TensorView& view, const AttentionShape& shape, bool rank3,
                        const char* accepted) {
  const char* axes = rank3 ? "[b, s_q] or [b, 1, s_q]" : "[b, h_q, s_q]";
  if (!view.defined()) throw_invalid(name, "nothing", fmt::format("a tensor {}", axes));
  const DType dtype = of == DType::f64 ? DType::f64 : DType::f32;
  const int rank = rank3 ? 2 : 3;
  if (view.rank != rank && view.rank != 3) throw_invalid(name, fmt::format("shape {}", shape_text(view)), axes);
  if (view.dtype != dtype) throw_invalid(name, to_string(view.dtype), fmt::format("dtype {}", to_string(dtype)));
  const TensorView full = with_heads(view, 3);
  if (full.shape != std::array<std::int64_t, 4>{shape.b, shape.h_q, shape.s_q, 0}) {
    throw_invalid(name, fmt::format("shape {}", shape_text(view)),
                  fmt::format("{} = [{}, {}, {}]", accepted, shape.b, shape.h_q, shape.s_q));
  }
  check_memory(name, full);
  return full;
}

AttentionShape checked(const AttentionConfig& config, const AttentionShape& shape) {
  AttentionShape result = shape;
  if (result.h_kv == 0) result.h_kv = result.h_q;
  result.placed = result.placed || result.strided || result.place_in_memory;
  if (result.placed) check_has_places(config);
  if (config.varlen) {
    check_size("b", result.b);
    check_size("s_q", result.s_q);
    check_size("s_kv", result.s_kv);
    if (result.total_q == 0) result.total_q = result.b * result.s_q;
    if (config.page_size != 0) {
      result.total_kv = 0;
    } else if (result.total_kv == 0) {
      result.total_kv = result.b * result.s_kv;
    }
    check_size("total_q", result.total_q);
    check_size("total_kv", result.total_kv);
    check_size("total_q + 16 * b", result.total_q + 16 * result.b);  // rows of the backward's workspace
    result.s_q = result.s_q > 0 ? std::min(result.s_q, result.total_q) : result.total_q;
    if (config.page_size == 0) {
      result.s_kv = result.s_kv > 0 ? std::min(result.s_kv, result.total_kv) : result.total_kv;
    }
  } else {
    result.total_q = result.total_kv = 0;
  }
  check_sizes(result);
  return result;
}

void check_array(std::string_view name, const std::int32_t* array, bool needed) {
  if (array == nullptr && needed) throw_invalid(name, "a null pointer", "an array of int32 on the device");
  if (reinterpret_cast<std::uintptr_t>(array) % alignof(std::int32_t) != 0) {
    throw_invalid(name, fmt::format("pointer {}", fmt::ptr(array)), "a multiple of 4 bytes");
  }
}

namespace {

/// The arrays of q, or of k and v.
struct Lengths {
  const char* cu_name;
  const std::int32_t* cu;
  const char* used_name;
  const std::int32_t* used;
  std::int64_t total;
  std::int64_t longest;
};

void check(const Lengths& of, std::int64_t b) {
  for (std::int64_t i = 0; i <= b; ++i) {
    const std::int64_t least = i == 0 ? 0 : of.cu[i - 1];
    if (of.cu[i] < least || of.cu[i] > of.total) {
      throw_invalid(fmt::format("{}[{}]", of.cu_name, i), of.cu[i], fmt::format("{} to {}", least, of.total));
    }
    if (i == 0) continue;
    const std::int64_t length = of.cu[i] - least;
    if (of.used != nullptr && (of.used[i - 1] < 0 || of.used[i - 1] > length)) {
      throw_invalid(fmt::format("{}[{}]", of.used_name, i - 1), of.used[i - 1], fmt::format("0 to {}", length));
    }
    const std::int64_t count = of.used != nullptr ? of.used[i - 1] : length;
    if (count > of.longest) {
      throw_invalid(fmt::format("{}[{}] - {}[{}]", of.cu_name, i, of.cu_name, i - 1), count,
                    fmt::format("at most {}, the longest sequence", of.longest));
    }
  }
}

}  // namespace

void check_rows(const PackedSequences& sequences, const AttentionShape& shape) {
  if (sequences.b == 0) return;  // the arrays may be null
  check({"cu_seqlens_q", sequences.cu_seqlens_q, "seqused_q", sequences.seqused_q, shape.total_q, shape.s_q},
        sequences.b);
}

void check_lengths(const PackedSequences& sequences, const AttentionShape& shape) {
  if (sequences.b == 0) return;
  check_rows(sequences, shape);
  check({"cu_seqlens_kv", sequences.cu_seqlens_kv, "seqused_kv", sequences.seqused_kv, shape.total_kv, shape.s_kv},
        sequences.b);
}

std::int64_t rows_of_request(const AttentionConfig& config, const PackedSequences& sequences,
                             const AttentionShape& shape, std::int64_t i) {
  if (!config.varlen) return shape.s_q;
  if (sequences.seqused_q != nullptr) return sequences.seqused_q[i];
  return sequences.cu_seqlens_q[i + 1] - sequences.cu_seqlens_q[i];
}

bool rows_aligned(const TensorView& view) noexcept {
  if (reinterpret_cast<std::uintptr_t>(view.data) % 16 != 0) return false;
  const auto elements = static_cast<std::int64_t>(16 / size_of(view.dtype));
  for (std::size_t axis = 0; axis < 3; ++axis) {
    if (view.shape[axis] > 1 && view.strides[axis] % elements != 0) return false;
  }
  return true;
}

AttentionState check_state(const AttentionConfig& config, const StateNames& names, const AttentionState& given,
                           const TensorView* like, bool needs_lse) {
  AttentionState state;
  state.o = tensor_of_call(names.o, given.o, config, false, true);
  const std::int64_t d_v = d_v_of(config);
  const std::array<std::int64_t, 4>& shape = state.o.shape;
  check_shape(names.o, state.o, {shape[0], shape[1], shape[2], d_v}, "[b, h_q, s_q, head_dim_v]");
  if (like != nullptr) check_shape(names.o, state.o, like->shape, "[b, h_q, s_q, head_dim_v], as o");
  const AttentionShape rows{.b = shape[0], .h_q = shape[1], .h_kv = shape[1], .s_q = shape[2]};
  check_sizes(rows);
  if (needs_lse || given.lse.defined()) {
    state.lse = checked_statistic(names.lse, config, given.lse, rows, given.o.rank == 3);
  }
  return state;
}

ForwardCall check_forward(const AttentionConfig& config, const ForwardInputs& inputs, const ForwardOutputs& outputs) {
  ForwardCall call;
  const bool paged = config.page_size != 0;
  call.q = tensor_of_call("q", inputs.q, config);
  call.k = tensor_of_call("k", inputs.k, config, paged, false, config.k_dtype);
  call.v = config.value_in_key > 0 ? value_in_key(config, inputs.v, call.k)
                                   : tensor_of_call("v", inputs.v, config, paged, false, v_dtype_of(config));
  call.o = tensor_of_call("o", outputs.o, config, false, false, o_dtype_of(config));
  const Axes axes(config, call.q, call.k);
  AttentionShape& shape = call.shape;
  shape = axes.shape;
  call.sequences = inputs.sequences;
  call.dropout = inputs.dropout;
  call.cache = inputs.cache;
  axes.check_q("q", call.q);
  axes.check_k("k", call.k);
  axes.check_v("v", call.v);
  axes.check_o("o", call.o);
  check_sizes(shape);
  check_writable("o", call.o);
  if (outputs.lse.defined() || config.accumulate) {
    call.lse = checked_statistic("lse", config, outputs.lse, shape, inputs.q.rank == 3);
    check_writable("lse", call.lse);
  }
  if (is_fp8(config.dtype)) {
    set_fp8_scales(config, inputs, call);
  } else {
    if (inputs.q_scale.defined()) throw_invalid("q_scale", "given", "none without a dtype of 8 bits");
    call.k_scale = check_scale(config, config.k_dtype, "k_scale", inputs.k_scale, "k", call.k);
    call.v_scale = check_scale(config, config.v_dtype, "v_scale", inputs.v_scale, "v", call.v);
  }
  if (config.dtype != DType::i8 && inputs.row_bias.defined()) {
    throw_invalid("row_bias", "given", "none without a dtype of i8");
  }
  shape.aligned = rows_aligned(call.q) && rows_aligned(call.k) && rows_aligned(call.v) && rows_aligned(call.o);
  set_paged(config, call.cache, call.k.shape[0], call.sequences, shape);
  call.statistics =
      check_statistics(config, outputs, shape, config.varlen ? inputs.sequences.b : shape.b, inputs.q.rank == 3);
  set_packed(config, call.sequences, shape);
  if (paged) check_sizes(shape);
  call.empty = shape.b == 0 || shape.h_q == 0 || shape.s_q == 0;
  check_dropout(config, call.dropout);
  set_place(config, inputs, call);
  return call;
}

BackwardCall check_backward(const AttentionConfig& config, const BackwardInputs& inputs,
                            const BackwardOutputs& outputs) {
  BackwardCall call;
  call.q = tensor_of_call("q", inputs.q, config);
  call.k = tensor_of_call("k", inputs.k, config);
  call.v = tensor_of_call("v", inputs.v, config);
  call.o = tensor_of_call("o", inputs.o, config);
  call.dout = tensor_of_call("dout", inputs.dout, config);
  const auto output = [&config](const char* name, const TensorView& given) {
    return given.defined() ? tensor_of_call(name, given, config) : TensorView();
  };
  call.dq = output("dq", outputs.dq);
  call.dk = output("dk", outputs.dk);
  call.dv = output("dv", outputs.dv);
  const Gradients gradients{call.dq.defined(), call.dk.defined(), call.dv.defined()};
  const bool others = outputs.dsink.defined() || outputs.captures.begin() != outputs.captures.end();
  if (gradients == Gradients{false, false, false} && !others) {
    throw_invalid("dq", "nothing, as all of them are", "at least one gradient to compute");
  }
  const Axes axes(config, call.q, call.k);
  call.shape = axes.shape;
  call.shape.gradients = gradients;
  call.sequences = inputs.sequences;
  call.dropout = inputs.dropout;
  axes.check_q("q", call.q);
  axes.check_k("k", call.k);
  axes.check_v("v", call.v);
  axes.check_o("o", call.o);
  axes.check_o("dout", call.dout);
  if (gradients.dq) axes.check_q("dq", call.dq);
  if (gradients.dk) axes.check_k("dk", call.dk);
  if (gradients.dv) axes.check_v("dv", call.dv);
  check_sizes(call.shape);
  const bool rank3 = inputs.q.rank == 3;
  call.lse = checked_statistic("lse", config, inputs.lse, call.shape, rank3);
  if (inputs.dlse.defined()) call.dlse = checked_statistic("dlse", config, inputs.dlse, call.shape, rank3);
  call.statistics = check_statistics_gradients(config, inputs, call.shape, rank3);
  if (gradients.dq) check_writable("dq", call.dq);
  if (gradients.dk) check_writable("dk", call.dk);
  if (gradients.dv) check_writable("dv", call.dv);
  call.shape.aligned =
      std::ranges::all_of(std::array{call.q, call.k, call.v, call.o, call.dout, call.dq, call.dk, call.dv},
                          [](const TensorView& view) { return !view.defined() || rows_aligned(view); });
  call.empty = std::ranges::all_of(std::array{call.q, call.k, call.v},
                                   [](const TensorView& view) { return view.elements() == 0; });
  set_packed(config, call.sequences, call.shape);
  call.empty = call.empty || call.shape.b == 0;
  check_dropout(config, call.dropout);
  set_place(config, inputs, call);
  return call;
}

}  // namespace fa::api
