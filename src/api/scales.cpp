#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <string>

#include "api/validate.hpp"
#include "api/views.hpp"
#include "support/text.hpp"

/// Scales of what is stored in 8 or 4 bits, and of 8-bit floats.
namespace fa::api {

using support::throw_invalid;

namespace {

/// Scales and offsets of u4x2.
TensorView check_pairs(const AttentionConfig& config, const char* name, const TensorView& given, const char* of_name,
                       const TensorView& of) {
  const std::int64_t pairs = 2 * of.shape[3] / group_size_of(config);
  const std::array<std::int64_t, 4> expected{of.shape[0], of.shape[1], of.shape[2], 2 * pairs};
  const std::string axes =
      fmt::format("{} [{}, {}, {}, {}], a scale and an offset of each group of {}", to_string(config.dtype),
                  expected[0], expected[1], expected[2], expected[3], of_name);
  if (!given.defined()) throw_invalid(name, "nothing", axes);
  if (given.dtype != config.dtype) throw_invalid(name, to_string(given.dtype), axes);
  if (given.rank != 4 || given.shape != expected) {
    throw_invalid(name, fmt::format("shape {}", shape_text(given)), axes);
  }
  check_memory(name, given);
  if (given.strides[3] != 1) {
    throw_invalid(name, fmt::format("stride {} of the last axis", given.strides[3]), "stride 1");
  }
  const auto odd = [&](std::size_t axis) { return given.shape[axis] > 1 && given.strides[axis] % 2 != 0; };
  if (reinterpret_cast<std::uintptr_t>(given.data) % 4 != 0 || odd(0) || odd(1) || odd(2)) {
    throw_invalid(name, fmt::format("pointer {}, strides [{}]", given.data, fmt::join(given.strides, ", ")),
                  "pairs that start at multiples of 4 bytes");
  }
  return given;
}

/// The scales of rows of a packed q, or k, [h, total], as [1, h, total].
TensorView check_packed_scale(const char* name, const TensorView& given, const char* axes_of, const TensorView& of) {
  if (!given.defined()) return {};
  const std::string axes = fmt::format("f32 {} = [{}, {}]", axes_of, of.shape[1], of.shape[2]);
  if (given.dtype != DType::f32) throw_invalid(name, to_string(given.dtype), axes);
  if (given.rank != 2 || given.shape[0] != of.shape[1] || given.shape[1] != of.shape[2]) {
    throw_invalid(name, fmt::format("shape {}", shape_text(given)), axes);
  }
  check_memory(name, given);
  TensorView view = given;
  view.rank = 3;
  view.shape = {1, given.shape[0], given.shape[1]};
  view.strides = {0, given.strides[0], given.strides[1]};
  return view;
}

/// The scales of heads, or with `rows`, the name of their axis, of rows, of 8-bit floats `of` as [b, h, s]; undefined
/// where none are given.
TensorView check_fp8_scale(const char* name, const TensorView& given, const char* heads, const TensorView& of,
                           const char* rows) {
  if (!given.defined()) return {};
  const std::string axes = fmt::format("f32 [b, {}] = [{}, {}]{}", heads, of.shape[0], of.shape[1],
                                       rows != nullptr ? fmt::format(", or [b, {}, {}]", heads, rows) : "");
  if (given.dtype != DType::f32) throw_invalid(name, to_string(given.dtype), axes);
  const bool of_rows = rows != nullptr && given.rank == 3 && given.shape[2] == of.shape[2];
  if ((given.rank != 2 && !of_rows) || given.shape[0] != of.shape[0] || given.shape[1] != of.shape[1]) {
    throw_invalid(name, fmt::format("shape {}", shape_text(given)), axes);
  }
  check_memory(name, given);
  TensorView view = given;
  view.rank = 3;
  if (!of_rows) {
    view.shape[2] = of.shape[2];
    view.strides[2] = 0;
  }
  return view;
}

/// Scales of keys in pages, [pages, h_kv, page_size].
TensorView check_page_scale(const char* name, const TensorView& given, const TensorView& of) {
  if (!given.defined()) return {};
  const std::string axes = fmt::format("f32 [{}, {}, {}], the rows of {}", of.shape[0], of.shape[1], of.shape[2],
                                       name[0] == 'k' ? "k" : "v");
  if (given.dtype != DType::f32) throw_invalid(name, to_string(given.dtype), axes);
  if (given.rank != 3 || !std::equal(of.shape.begin(), of.shape.begin() + 3, given.shape.begin())) {
    throw_invalid(name, fmt::format("shape {}", shape_text(given)), axes);
  }
  check_memory(name, given);
  return given;
}

}  // namespace

int group_size_of(const AttentionConfig& config) noexcept {
  const bool u4 = config.k_dtype == DType::u4x2 || config.v_dtype == DType::u4x2;
  return config.group_size != 0 ? config.group_size : u4 ? 32 : 0;
}

std::int64_t stored_columns(const std::optional<DType>& stored, std::int64_t d) noexcept {
  return stored == DType::u4x2 ? d / 2 : d;
}

bool has_latent_rows(const AttentionConfig& config) noexcept {
  return config.k_dtype == DType::e4m3 && !config.v_dtype && config.head_dim == kLatentColumns &&
         config.value_in_key == kLatentValues && config.page_size != 0;
}

std::int64_t key_columns(const AttentionConfig& config) noexcept {
  return has_latent_rows(config) ? kLatentRowBytes : stored_columns(config.k_dtype, config.head_dim);
}

TensorView check_scale(const AttentionConfig& config, const std::optional<DType>& stored, const char* name,
                       const TensorView& given, const char* of_name, const TensorView& of) {
  if (!stored) {
    if (given.defined()) throw_invalid(name, "given", fmt::format("none without AttentionConfig::{}_dtype", of_name));
    return {};
  }
  const bool latent = has_latent_rows(config);
  if (latent && given.defined()) throw_invalid(name, "given", "none: the scales are in the rows of 656 bytes");
  if (!rows_aligned(of)) {
    throw_invalid(of_name, fmt::format("shape {}, strides {}", shape_text(of), fmt::join(of.strides, ", ")),
                  "rows of 8-bit elements that start at multiples of 16 bytes");
  }
  if (latent) return {};
  if (*stored == DType::u4x2) return check_pairs(config, name, given, of_name, of);
  const std::string axes =
      fmt::format("f32 [{}, {}, {}], the rows of {}", of.shape[0], of.shape[1], of.shape[2], of_name);
  if (!given.defined()) throw_invalid(name, "nothing", axes);
  if (given.dtype != DType::f32) throw_invalid(name, to_string(given.dtype), axes);
  if (given.rank != 3 || given.shape[0] != of.shape[0] || given.shape[1] != of.shape[1] ||
      given.shape[2] != of.shape[2]) {
    throw_invalid(name, fmt::format("shape {}", shape_text(given)), axes);
  }
  check_memory(name, given);
  return given;
}

void set_fp8_scales(const AttentionConfig& config, const ForwardInputs& inputs, ForwardCall& call) {
  const bool paged = config.page_size != 0;
  if (paged && inputs.cache.seq_begin != nullptr) {
    throw_invalid("cache.seq_begin", "given", "nothing with 8-bit floats");
  }
  // Keys and values of a sequence share a scale, as those of a batch entry do.
  const auto of_sequences = [&](TensorView keys) {
    if (config.varlen) keys.shape[0] = inputs.sequences.b;
    if (paged && !config.varlen) keys.shape[0] = call.q.shape[0];
    return keys;
  };
  const auto of_rows = [&](const char* name, const TensorView& given) {
    return config.varlen ? check_packed_scale(name, given, "[h_q, total_q]", call.q)
                         : check_fp8_scale(name, given, "h_q", call.q, "s_q");
  };
  call.q_scale = of_rows("q_scale", inputs.q_scale);
  if (config.dtype == DType::i8) call.row_bias = of_rows("row_bias", inputs.row_bias);
  const auto of_keys = [&](const char* name, const TensorView& given, const TensorView& of, bool rows) {
    if (rows && paged) return check_page_scale(name, given, of);
    if (rows && config.varlen) return check_packed_scale(name, given, "[h_kv, total_kv]", of);
    return check_fp8_scale(name, given, "h_kv", of_sequences(of), rows ? "s_kv" : nullptr);
  };
  call.k_scale = of_keys("k_scale", inputs.k_scale, call.k, config.key_scales);
  call.v_scale = of_keys("v_scale", inputs.v_scale, call.v, config.value_scales);
}

}  // namespace fa::api
