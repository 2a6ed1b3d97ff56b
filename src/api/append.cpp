#include "api/append.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string_view>
#include <utility>
#include <vector>

#include "api/validate.hpp"
#include "api/views.hpp"
#include "plan/arch.hpp"
#include "reference/append.hpp"
#include "support/text.hpp"

namespace fa::api {
namespace {

using support::throw_invalid;

bool is_packed(const AppendInputs& inputs) noexcept {
  return inputs.k.rank == 3;
}

bool has_slots(const AppendInputs& inputs) noexcept {
  return inputs.slots != nullptr || inputs.slots_64 != nullptr;
}

bool has_positions(const RotaryEmbedding& rotary) noexcept {
  return rotary.positions != nullptr || rotary.positions_64 != nullptr;
}

void check_size(std::string_view name, std::int64_t value) {
  if (value < 0 || value > kMaxLength) throw_invalid(name, value, fmt::format("0 to {}", kMaxLength));
}

/// An array of a call. `needed`: it must not be null.
template <class Int>
void check_numbers(std::string_view name, const Int* array, bool needed = false) {
  if (array == nullptr && needed) {
    throw_invalid(name, "a null pointer", fmt::format("an array of int{}", 8 * sizeof(Int)));
  }
  if (reinterpret_cast<std::uintptr_t>(array) % sizeof(Int) != 0) {
    throw_invalid(name, fmt::format("pointer {}", fmt::ptr(array)), fmt::format("a multiple of {} bytes", sizeof(Int)));
  }
}

/// A packed tensor [total, h, d] as [1, h, total, d].
TensorView unpacked(const TensorView& view) {
  TensorView result = view;
  result.rank = 4;
  result.shape = {1, view.shape[1], view.shape[0], view.shape[2]};
  result.strides = {0, view.strides[1], view.strides[0], view.strides[2]};
  return result;
}

/// A tensor of the config's dtype whose rows are contiguous, as rank 4.
TensorView checked_tensor(const char* name, const TensorView& view, const AttentionConfig& config, bool packed,
                          std::optional<DType> stored = std::nullopt) {
  const int rank = packed ? 3 : 4;
  const char* const axes = packed ? "[total, h, d], as k" : "[b, h, s, d]";
  if (!view.defined()) throw_invalid(name, "nothing", fmt::format("a tensor {}", axes));
  if (view.rank != rank)
    throw_invalid(name, fmt::format("shape {}", shape_text(view)), fmt::format("rank {} {}", rank, axes));
  if (const DType dtype = stored.value_or(config.dtype); view.dtype != dtype) {
    throw_invalid(name, to_string(view.dtype), fmt::format("dtype {}, of the config", to_string(dtype)));
  }
  for (int axis = 0; axis < rank; ++axis) {
    const std::int64_t size = view.shape[static_cast<std::size_t>(axis)];
    if (size < 0 || size > kMaxLength) {
      throw_invalid(name, fmt::format("shape {}", shape_text(view)), fmt::format("sizes from 0 to {}", kMaxLength));
    }
  }
  const auto last = static_cast<std::size_t>(rank - 1);
  if (view.shape[last] > 1 && view.strides[last] != 1) {
    throw_invalid(name, fmt::format("stride {} of the last axis", view.strides[last]),
                  "a contiguous head dim, stride 1");
  }
  check_memory(name, view);
  return packed ? unpacked(view) : view;
}

void check_shape(const char* name, const TensorView& view, const std::array<std::int64_t, 4>& expected,
                 std::string_view axes) {
  if (view.shape == expected) return;
  throw_invalid(
      name,
      fmt::format("shape [{}, {}, {}, {}] (b, h, s, d)", view.shape[0], view.shape[1], view.shape[2], view.shape[3]),
      fmt::format("{} = [{}, {}, {}, {}]", axes, expected[0], expected[1], expected[2], expected[3]));
}

bool rows_aligned(const TensorView& view) noexcept {
  if (!view.defined()) return true;
  if (reinterpret_cast<std::uintptr_t>(view.data) % 16 != 0) return false;
  const auto elements = static_cast<std::int64_t>(16 / size_of(view.dtype));
  for (std::size_t axis = 0; axis + 1 < static_cast<std::size_t>(view.rank); ++axis) {
    if (view.shape[axis] > 1 && view.strides[axis] % elements != 0) return false;
  }
  return true;
}

void check_rotary_dims(const AttentionConfig& config, int dims, const char* name) {
  const bool latent = has_latent_rows(config);
  const int most = latent ? kLatentColumns - kLatentValues : config.head_dim;
  if (dims < 0 || dims > most || dims % 2 != 0) {
    throw_invalid(name, dims,
                  fmt::format("an even number from 0 to {}",
                              latent ? "64, the columns behind the latent's" : fmt::format("head_dim = {}", most)));
  }
}

bool is_table_dtype(const AttentionConfig& config, DType dtype) noexcept {
  return dtype == config.dtype || (dtype == DType::f32 && config.dtype != DType::f64);
}

int table_of(const AttentionConfig& config, DType dtype, const char* name) {
  if (!is_table_dtype(config, dtype)) {
    throw_invalid(name, to_string(dtype),
                  config.dtype == DType::f64 ? "dtype f64" : fmt::format("dtype f32 or {}", to_string(config.dtype)));
  }
  return dtype == DType::f32 ? 1 : 2;
}

void check_table(const AttentionConfig& config, const char* name, const TensorView& view,
                 const RotaryEmbedding& rotary) {
  if (!view.defined()) throw_invalid(name, "nothing", "a table of both cosines and sines, or of neither");
  table_of(config, view.dtype, name);
  const bool fits = view.rank == 2 && view.shape[1] == rotary.dims / 2 && view.shape[0] >= 1 &&
                    view.shape[0] <= kMaxLength && view.shape[0] == rotary.cos.shape[0];
  if (!fits) {
    throw_invalid(name, fmt::format("shape {}", shape_text(view)),
                  fmt::format("[positions, rotary.dims / 2 = {}], of cosines and sines alike", rotary.dims / 2));
  }
  if (view.shape[1] > 1 && view.strides[1] != 1) {
    throw_invalid(name, fmt::format("stride {} of the last axis", view.strides[1]), "stride 1");
  }
  if (view.dtype != rotary.cos.dtype) throw_invalid(name, to_string(view.dtype), "the dtype of rotary.cos");
  check_memory(name, view);
}

void check_rotary(const AttentionConfig& config, const RotaryEmbedding& rotary) {
  check_rotary_dims(config, rotary.dims, "rotary.dims");
  if (!(rotary.base > 0 && std::isfinite(rotary.base))) {
    throw_invalid("rotary.base", rotary.base, "a finite number above 0");
  }
  check_numbers("rotary.positions", rotary.positions);
  check_numbers("rotary.positions_64", rotary.positions_64);
  if (rotary.positions != nullptr && rotary.positions_64 != nullptr) {
    throw_invalid("rotary.positions_64", "given", "positions or positions_64, not both");
  }
  const bool table = rotary.cos.defined() || rotary.sin.defined();
  if (rotary.dims == 0) {
    if (table) throw_invalid("rotary.cos", "given", "none without rotary.dims");
    if (has_positions(rotary)) throw_invalid("rotary.positions", "given", "none without rotary.dims");
  } else if (table) {
    check_table(config, "rotary.cos", rotary.cos, rotary);
    check_table(config, "rotary.sin", rotary.sin, rotary);
  }
}

void check_queries(const AttentionConfig& config, const AppendInputs& given, AppendInputs& inputs) {
  const bool packed = is_packed(given);
  if (!given.q.defined() && !given.q_out.defined()) return;
  if (given.rotary.dims == 0) throw_invalid("q", "given", "none without rotary.dims");
  inputs.q = checked_tensor("q", given.q, config, packed);
  inputs.q_out = checked_tensor("q_out", given.q_out, config, packed);
  const std::array<std::int64_t, 4> expected{inputs.k.shape[0], inputs.q.shape[1], inputs.k.shape[2], config.head_dim};
  check_shape("q", inputs.q, expected, "[b, h_q, s_new, head_dim]");
  check_shape("q_out", inputs.q_out, expected, "[b, h_q, s_new, head_dim], as q");
  const std::int64_t h_kv = inputs.k.shape[1];
  if (h_kv == 0 ? inputs.q.shape[1] != 0 : inputs.q.shape[1] % h_kv != 0) {
    throw_invalid("q", fmt::format("{} heads", inputs.q.shape[1]), fmt::format("a multiple of h_kv = {}", h_kv));
  }
  check_writable("q_out", inputs.q_out);
}

void check_value_cache(const AttentionConfig& config, const std::array<std::int64_t, 4>& shape, const char* axes,
                       AppendInputs& inputs) {
  inputs.v_cache = checked_tensor("v_cache", inputs.v_cache, config, false, config.v_dtype);
  check_shape("v_cache", inputs.v_cache, shape, axes);
  check_writable("v_cache", inputs.v_cache);
}

void check_cache(const AttentionConfig& config, AppendInputs& inputs) {
  inputs.k_cache = checked_tensor("k_cache", inputs.k_cache, config, false, config.k_dtype);
  const std::int64_t pages = inputs.k_cache.shape[0];
  const std::int64_t rows = config.page_size > 0 ? config.page_size : inputs.k_cache.shape[2];
  const char* const axes = config.page_size > 0 ? "[pages, h_kv, page_size, d]" : "[b, h_kv, s_max, d]";
  check_shape("k_cache", inputs.k_cache, {pages, inputs.k.shape[1], rows, key_columns(config)}, axes);
  check_writable("k_cache", inputs.k_cache);
  if (!has_latent_rows(config)) {
    check_value_cache(config, {pages, inputs.k.shape[1], rows, stored_columns(config.v_dtype, d_v_of(config))}, axes,
                      inputs);
  }
  inputs.k_scale = check_scale(config, config.k_dtype, "k_scale", inputs.k_scale, "k_cache", inputs.k_cache);
  inputs.v_scale = check_scale(config, config.v_dtype, "v_scale", inputs.v_scale, "v_cache", inputs.v_cache);
  if (inputs.scales_given) {
    if (!config.k_dtype && !config.v_dtype) throw_invalid("scales_given", "true", "false without k_dtype or v_dtype");
    return;
  }
  if (config.k_dtype && inputs.k_scale.defined()) check_writable("k_scale", inputs.k_scale);
  if (config.v_dtype) check_writable("v_scale", inputs.v_scale);
}

void check_block_table(const TensorView& table) {
  constexpr std::string_view kName = "cache.block_table";
  if (!table.defined()) throw_invalid(kName, "nothing", "a tensor [rows, max_pages], or slots");
  if (table.rank != 2) throw_invalid(kName, fmt::format("shape {}", shape_text(table)), "rank 2 [rows, max_pages]");
  if (table.dtype != DType::i32) throw_invalid(kName, to_string(table.dtype), "dtype i32");
  check_size("cache.block_table.shape[0]", table.shape[0]);
  check_size("cache.block_table.shape[1]", table.shape[1]);
  check_memory("cache.block_table", table);
}

/// Rows of the block table, or of a contiguous cache.
std::int64_t request_rows(const AppendInputs& inputs) noexcept {
  const TensorView& table = inputs.cache.block_table;
  return table.defined() ? table.shape[0] : inputs.k_cache.shape[0];
}

/// Positions that a request can have.
std::int64_t most_positions(const AppendInputs& inputs) noexcept {
  const TensorView& table = inputs.cache.block_table;
  return (table.defined() ? table.shape[1] : 1) * inputs.k_cache.shape[2];
}

void check_places(const AttentionConfig& config, AppendInputs& inputs) {
  const PagedCache& cache = inputs.cache;
  check_numbers("slots", inputs.slots);
  check_numbers("slots_64", inputs.slots_64);
  if (inputs.slots != nullptr && inputs.slots_64 != nullptr) {
    throw_invalid("slots_64", "given", "slots or slots_64, not both");
  }
  check_numbers("cache.batch_index", cache.batch_index);
  if (config.page_size <= 0 && cache.block_table.defined()) {
    throw_invalid("cache.block_table", "given", "none without AttentionConfig::page_size");
  }
  if (has_slots(inputs)) {
    inputs.cache = {};
    return;
  }
  if (config.page_size > 0) check_block_table(cache.block_table);
  if (cache.batch_index == nullptr && inputs.b > request_rows(inputs)) {
    throw_invalid("b", inputs.b,
                  fmt::format("at most {}, the rows of {}, without cache.batch_index", request_rows(inputs),
                              config.page_size > 0 ? "cache.block_table" : "k_cache"));
  }
}

/// Lengths, and which of them the call reads.
void check_requests(const AppendInputs& given, AppendInputs& inputs) {
  const bool packed = is_packed(given);
  if (!packed && given.cu_seqlens_k_new != nullptr) {
    throw_invalid("cu_seqlens_k_new", "given", "none with a dense batch: k of rank 3 is a packed one");
  }
  check_numbers("cu_seqlens_k_new", given.cu_seqlens_k_new);
  check_numbers("seqused_kv", given.seqused_kv);
  const bool reads_lengths = !has_slots(given) || (given.rotary.dims > 0 && !has_positions(given.rotary));
  if (!reads_lengths) {
    inputs.seqused_kv = inputs.cu_seqlens_k_new = nullptr;
    inputs.b = packed ? 1 : inputs.k.shape[0];
    return;
  }
  check_size("b", given.b);
  if (!packed) inputs.b = inputs.k.shape[0];
  if (inputs.b == 0) return;
  check_numbers("seqused_kv", given.seqused_kv, true);
  check_numbers("cu_seqlens_k_new", given.cu_seqlens_k_new, packed);
}

/// An array of `count` numbers as a tensor; undefined where there is none.
TensorView array_view(const std::int32_t* array, std::int64_t count) {
  return array == nullptr ? TensorView() : TensorView(array, DType::i32, {count});
}
TensorView array_view(const std::int64_t* array, std::int64_t count) {
  return array == nullptr ? TensorView() : TensorView(array, DType::f64, {count});  // of 8 bytes as well
}

bool is_same(const TensorView& a, const TensorView& b) noexcept {
  return a.data == b.data && a.shape == b.shape && a.strides == b.strides;
}

/// What is written shares no memory with anything else, but for q that is turned in place.
void check_disjoint(const AppendInputs& inputs, std::int64_t rows) {
  const PagedCache& cache = inputs.cache;
  const TensorView index = array_view(cache.batch_index, inputs.b);
  const TensorView cu = array_view(inputs.cu_seqlens_k_new, inputs.b + 1);
  const TensorView used = array_view(inputs.seqused_kv, inputs.b);
  const TensorView slots = array_view(inputs.slots, rows), slots_64 = array_view(inputs.slots_64, rows);
  const TensorView positions = array_view(inputs.rotary.positions, rows);
  const TensorView positions_64 = array_view(inputs.rotary.positions_64, rows);
  CallTensors tensors;
  tensors.add_read("k", inputs.k);
  tensors.add_read("v", inputs.v);
  if (!is_same(inputs.q, inputs.q_out)) tensors.add_read("q", inputs.q);
  tensors.add_read("rotary.cos", inputs.rotary.cos);
  tensors.add_read("rotary.sin", inputs.rotary.sin);
  tensors.add_read("cache.block_table", cache.block_table);
  tensors.add_read("cache.batch_index", index);
  tensors.add_read("cu_seqlens_k_new", cu);
  tensors.add_read("seqused_kv", used);
  tensors.add_read("slots", slots);
  tensors.add_read("slots_64", slots_64);
  tensors.add_read("rotary.positions", positions);
  tensors.add_read("rotary.positions_64", positions_64);
  tensors.add_written("k_cache", inputs.k_cache);
  tensors.add_written("v_cache", inputs.v_cache);
  tensors.add_written("q_out", inputs.q_out);
  if (inputs.scales_given) {
    tensors.add_read("k_scale", inputs.k_scale);
    tensors.add_read("v_scale", inputs.v_scale);
  } else {
    tensors.add_written("k_scale", inputs.k_scale);
    tensors.add_written("v_scale", inputs.v_scale);
  }
  tensors.check_disjoint();
}

bool all_aligned(const AppendInputs& inputs) noexcept {
  return rows_aligned(inputs.k) && rows_aligned(inputs.v) && rows_aligned(inputs.k_cache) &&
         rows_aligned(inputs.v_cache) && rows_aligned(inputs.q) && rows_aligned(inputs.q_out) &&
         rows_aligned(inputs.rotary.cos) && rows_aligned(inputs.rotary.sin);
}

plan::AppendProblem problem_of(const AttentionConfig& config) noexcept {
  plan::AppendProblem problem;
  problem.dtype = config.dtype;
  problem.d_qk = config.head_dim;
  problem.d_v = d_v_of(config);
  problem.page_size = static_cast<int>(std::max<std::int64_t>(config.page_size, 0));
  problem.k_storage = has_latent_rows(config) ? plan::kLatentRows
                      : config.k_dtype        ? plan::storage_of(*config.k_dtype, group_size_of(config))
                                              : 0;
  problem.v_storage = config.v_dtype ? plan::storage_of(*config.v_dtype, group_size_of(config)) : 0;
  return problem;
}

void check_cumulative(const AppendInputs& inputs) {
  for (std::int64_t i = 0; i <= inputs.b; ++i) {
    const std::int32_t* const cu = inputs.cu_seqlens_k_new;
    const std::int64_t least = i == 0 ? 0 : cu[i - 1];
    if (cu[i] < least || cu[i] > inputs.k.shape[2]) {
      throw_invalid(fmt::format("cu_seqlens_k_new[{}]", i), cu[i], fmt::format("{} to {}", least, inputs.k.shape[2]));
    }
  }
}

/// New rows of a request have positions, and those a place in the cache.
void check_request(const AppendInputs& inputs, std::int64_t i) {
  const std::int32_t* const cu = inputs.cu_seqlens_k_new;
  const std::int64_t count = cu != nullptr ? cu[i + 1] - cu[i] : inputs.k.shape[2];
  if (count == 0) return;
  const PagedCache& cache = inputs.cache;
  const std::int64_t most = has_slots(inputs) ? kMaxLength : most_positions(inputs);
  if (const std::int64_t used = inputs.seqused_kv[i]; used < count || used > most) {
    throw_invalid(fmt::format("seqused_kv[{}]", i), used,
                  fmt::format("{} to {}: its new keys, and what its {} have room for", count, most,
                              cache.block_table.defined() ? "pages" : "rows of the cache"));
  }
  if (cache.batch_index == nullptr) return;
  if (const std::int32_t row = cache.batch_index[i]; row < 0 || row >= request_rows(inputs)) {
    throw_invalid(fmt::format("cache.batch_index[{}]", i), row, fmt::format("0 to {}", request_rows(inputs) - 1));
  }
}

/// Of a row of a request whose lengths fit.
void check_row(const AppendInputs& inputs, std::int64_t token) {
  const reference::AppendedRow row = reference::appended_row(inputs, token);
  if (row.request < 0) return;
  const std::int64_t pages = inputs.k_cache.shape[0], page_rows = inputs.k_cache.shape[2];
  if (!has_slots(inputs)) {
    if (!reference::cache_row(inputs, row, token)) {
      throw_invalid("cache.block_table",
                    fmt::format("no page of the cache at position {} of request {}", row.position, row.request),
                    fmt::format("pages 0 to {}", pages - 1));
    }
  } else {
    const std::int64_t slot = inputs.slots != nullptr ? inputs.slots[token] : inputs.slots_64[token];
    if (slot >= pages * page_rows) {
      throw_invalid(fmt::format("{}[{}]", inputs.slots != nullptr ? "slots" : "slots_64", token), slot,
                    fmt::format("at most {}, or a negative number", pages * page_rows - 1));
    }
  }
  if (!inputs.rotary.cos.defined()) return;
  const std::int64_t position = reference::rotary_position(inputs, row, token);
  if (position < 0 || position >= inputs.rotary.cos.shape[0]) {
    throw_invalid("rotary.positions", fmt::format("{} of row {}", position, token),
                  fmt::format("0 to {}, of rotary.cos", inputs.rotary.cos.shape[0] - 1));
  }
}

}  // namespace

namespace {

void check_has_append(const AttentionConfig& config) {
  check_not_fp8(config, "append");
  if (config.value_in_key == 0 || has_latent_rows(config)) return;
  support::throw_unsupported("value_in_key", config.value_in_key,
                             "0 of append, which writes k and v, or a k_dtype of e4m3: latent rows");
}

void check_values(const AttentionConfig& config, const AppendInputs& given, bool packed, AppendInputs& inputs) {
  if (has_latent_rows(config)) {
    if (given.v.defined()) throw_invalid("v", "given", "nothing with value_in_key");
    if (given.v_cache.defined()) throw_invalid("v_cache", "given", "nothing with value_in_key");
    return;
  }
  inputs.v = checked_tensor("v", given.v, config, packed);
  check_shape("v", inputs.v, {inputs.k.shape[0], inputs.k.shape[1], inputs.k.shape[2], d_v_of(config)},
              "[b, h_kv, s_new, head_dim_v], as k");
}

}  // namespace

AppendCall check_append(const AttentionConfig& config, const AppendInputs& given) {
  check_has_append(config);
  AppendCall call;
  AppendInputs& inputs = call.inputs;
  inputs = given;
  const bool packed = is_packed(given);
  inputs.k = checked_tensor("k", given.k, config, packed);
  const std::array<std::int64_t, 4> rows{inputs.k.shape[0], inputs.k.shape[1], inputs.k.shape[2], config.head_dim};
  check_shape("k", inputs.k, rows, "[b, h_kv, s_new, head_dim]");
  check_values(config, given, packed, inputs);
  const std::int64_t tokens = rows[0] * rows[2];
  if (tokens > kMaxLength) throw_invalid("b * s_new", tokens, fmt::format("at most {}", kMaxLength));
  check_cache(config, inputs);
  check_rotary(config, given.rotary);
  check_queries(config, given, inputs);
  check_requests(given, inputs);
  check_places(config, inputs);
  check_disjoint(inputs, tokens);
  const RotaryEmbedding& rotary = inputs.rotary;
  call.problem = problem_of(config);
  call.problem.rotary_dims = rotary.dims;
  call.problem.interleaved = rotary.dims > 0 && rotary.interleaved;
  call.problem.table = rotary.cos.defined() ? table_of(config, rotary.cos.dtype, "rotary.cos") : 0;
  call.problem.aligned = all_aligned(inputs);
  call.problem.scales_given = given.scales_given;
  const std::int64_t heads = rows[1] + (inputs.q.defined() ? inputs.q.shape[1] : 0);
  call.empty = tokens == 0 || heads == 0 || inputs.b == 0;
  return call;
}

void check_append_values(const AppendCall& call) {
  const AppendInputs& inputs = call.inputs;
  if (call.empty) return;
  if (inputs.seqused_kv != nullptr) {
    if (inputs.cu_seqlens_k_new != nullptr) check_cumulative(inputs);
    for (std::int64_t i = 0; i < inputs.b; ++i) check_request(inputs, i);
  }
  const std::int64_t tokens = inputs.k.shape[0] * inputs.k.shape[2];
  for (std::int64_t token = 0; token < tokens; ++token) check_row(inputs, token);
}

plan::AppendProblem append_problem(const AttentionConfig& config, const AppendShape& shape) {
  check_has_append(config);
  check_rotary_dims(config, shape.rotary_dims, "rotary_dims");
  plan::AppendProblem problem = problem_of(config);
  problem.rotary_dims = shape.rotary_dims;
  problem.interleaved = shape.rotary_dims > 0 && shape.interleaved;
  problem.aligned = shape.aligned;
  problem.scales_given = shape.scales_given;
  if (!shape.table) return problem;
  if (shape.rotary_dims == 0) throw_invalid("table", to_string(*shape.table), "none without rotary_dims");
  problem.table = table_of(config, *shape.table, "table");
  return problem;
}

void append_on_host(const AppendCall& call) {
  if (call.empty) return;
  check_append_values(call);
  reference::append(call.inputs);
}

KernelInfo host_append_info(const AttentionConfig& config) {
  KernelInfo info;
  info.name = "fa_reference_append";
  info.spec = fmt::format("reference_append dtype={}", to_string(config.dtype));
  info.origin = "host";
  return info;
}

}  // namespace fa::api
