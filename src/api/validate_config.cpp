#include "api/validate.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "api/build.hpp"
#include "api/paged.hpp"
#include "plan/backward.hpp"
#include "plan/fixed.hpp"
#include "support/text.hpp"

namespace fa::api {
namespace {

using support::throw_invalid;

constexpr int kMaxStoredHeadDim = 256;
constexpr int kMaxInvariantHeadDim = 256;
constexpr int kMaxHeadDim = 576;
constexpr int kMaxHeadDimV = 512;
// Of gradients, where d_qk and d_v are not the same.
constexpr int kMaxBackwardHeadDim = 256;
constexpr int kMaxSplits = 64;
constexpr float kMaxScale = 2.3e38f;  // times log2(e) it is still finite

void check_head_dim(std::string_view name, int value, int most) {
  if (value >= 8 && value <= most && value % 8 == 0) return;
  throw_invalid(name, value, fmt::format("a multiple of 8 from 8 to {}", most));
}

void check_head_dims(const AttentionConfig& config) {
  check_head_dim("head_dim", config.head_dim, kMaxHeadDim);
  if (config.head_dim_v != 0) check_head_dim("head_dim_v", config.head_dim_v, kMaxHeadDimV);
  if (config.value_in_key == 0) {
    if (config.head_dim_v != 0 || config.head_dim <= kMaxHeadDimV) return;
    throw_invalid("head_dim_v", 0,
                  fmt::format("a multiple of 8 from 8 to {} where head_dim is {}", kMaxHeadDimV, config.head_dim));
  }
  check_head_dim("value_in_key", config.value_in_key, std::min(config.head_dim, kMaxHeadDimV));
  if (config.head_dim_v != 0 && config.head_dim_v != config.value_in_key) {
    throw_invalid("head_dim_v", config.head_dim_v, fmt::format("0, or value_in_key = {}", config.value_in_key));
  }
}

/// The numbers of enumerations reach the library as they were written, whatever that was.
template <class Enum>
void check_enum(std::string_view name, Enum value, Enum last, std::string_view accepted) {
  if (value > last) throw_invalid(name, static_cast<int>(value), accepted);
}

void check_override(std::string_view name, const std::optional<KernelOverride>& given, plan::Op op) {
  const plan::Fixed fixed = plan::read_override(given, op, name);
  const auto check = [&](std::string_view field, int most) {
    const int value = fixed.number(field);
    if (value > most) throw_invalid(fmt::format("{}.{}", name, field), value, fmt::format("0 to {}", most));
  };
  check("splits", kMaxSplits);
  check("split_blocks",
        op == plan::Op::backward ? plan::BackwardChoice::kMaxSplitBlocks : plan::Choice::kMaxSplitBlocks);
}

/// What no bits are promised for.
void check_invariance(const AttentionConfig& config) {
  check_enum("invariance", config.invariance, Invariance::rows, "none, batch or rows");
  if (config.invariance == Invariance::none) return;
  if (config.accumulate) throw_invalid("accumulate", "true", "false with invariance: merge adds states in one order");
  for (const auto& [name, dtype] : {std::pair{"k_dtype", config.k_dtype}, std::pair{"v_dtype", config.v_dtype}}) {
    if (dtype) throw_invalid(name, to_string(*dtype), "none with invariance");
  }
  if (config.value_in_key != 0) throw_invalid("value_in_key", config.value_in_key, "0 with invariance");
  for (const auto& [name, d] : {std::pair{"head_dim", config.head_dim}, std::pair{"head_dim_v", config.head_dim_v}}) {
    if (d > kMaxInvariantHeadDim)
      throw_invalid(name, d, fmt::format("at most {} with invariance", kMaxInvariantHeadDim));
  }
  const plan::Fixed fixed = plan::read_override(config.kernel, plan::Op::forward, "kernel");
  if (fixed.fields().empty()) return;
  throw_invalid("kernel.text", fixed.fields().front().first, "no fields with invariance, which fixes them");
}

void validate_stored(const AttentionConfig& config, const char* name, const std::optional<DType>& stored,
                     const char* head_dim, int d) {
  if (!stored) return;
  const bool u4 = *stored == DType::u4x2;
  if (*stored != DType::e4m3 && *stored != DType::i8 && !u4) {
    throw_invalid(name, to_string(*stored), "e4m3, i8 or u4x2, or none");
  }
  if (config.dtype != DType::f16 && config.dtype != DType::bf16) {
    throw_invalid(name, to_string(*stored), "none with a dtype that is not f16 or bf16");
  }
  if (config.dropout > 0) throw_invalid("dropout", config.dropout, fmt::format("0 with {}", name));
  if (config.varlen && config.page_size == 0) {
    throw_invalid("varlen", "true", fmt::format("false, or a page_size, with {}", name));
  }
  if (config.value_in_key != 0) {
    if (has_latent_rows(config)) return;
    throw_invalid(name, to_string(*stored),
                  "none with value_in_key, or a k_dtype of e4m3 with head_dim 576, value_in_key 512 and a page_size");
  }
  const int granule = u4 ? group_size_of(config) : 16;
  if (d % granule != 0 || d > kMaxStoredHeadDim) {
    throw_invalid(head_dim, d, fmt::format("a multiple of {} up to {} with {}", granule, kMaxStoredHeadDim, name));
  }
}

void validate_group_size(const AttentionConfig& config) {
  if (config.group_size == 0) return;
  if (config.k_dtype != DType::u4x2 && config.v_dtype != DType::u4x2) {
    throw_invalid("group_size", config.group_size, "0 without a k_dtype or v_dtype of u4x2");
  }
  if (config.group_size != 32 && config.group_size != 64 && config.group_size != 128) {
    throw_invalid("group_size", config.group_size, "32, 64 or 128, or 0: 32");
  }
}

/// What 8-bit floats have no kernels, or no meaning, for.
void validate_fp8(const AttentionConfig& config) {
  const bool fp8 = is_fp8(config.dtype);
  if (config.key_scales && !fp8) throw_invalid("key_scales", "true", "false without a dtype of 8 bits");
  if (config.value_scales && !fp8) throw_invalid("value_scales", "true", "false without a dtype of 8 bits");
  if (config.precise && !fp8) throw_invalid("precise", "true", "false without a dtype of 8 bits");
  if (config.o_dtype && !fp8) throw_invalid("o_dtype", to_string(*config.o_dtype), "none without a dtype of 8 bits");
  if (!fp8) return;
  const std::string with = fmt::format(" with dtype {}", to_string(config.dtype));
  constexpr std::array kOutputs{DType::bf16, DType::f16, DType::e4m3};
  if (config.o_dtype && std::ranges::find(kOutputs, *config.o_dtype) == kOutputs.end()) {
    throw_invalid("o_dtype", to_string(*config.o_dtype), "bf16, f16 or e4m3, or none");
  }
  for (const auto& [name, stored] : {std::pair{"k_dtype", config.k_dtype}, std::pair{"v_dtype", config.v_dtype}}) {
    if (stored) throw_invalid(name, to_string(*stored), "none" + with);
  }
  for (const auto& [name, d] : {std::pair{"head_dim", config.head_dim}, std::pair{"head_dim_v", d_v_of(config)}}) {
    if (d % 16 != 0 || d > kMaxStoredHeadDim) {
      throw_invalid(name, d, fmt::format("a multiple of 16 up to {}{}", kMaxStoredHeadDim, with));
    }
  }
  const auto refuse = [&](const char* name, bool given) {
    if (given) throw_invalid(name, "given", "none" + with);
  };
  if (o_dtype_of(config) == DType::e4m3 && config.zero_padding) {
    throw_invalid("zero_padding", "true", "false with an o_dtype of e4m3");
  }
  refuse("dropout", config.dropout > 0);
  refuse("accumulate", config.accumulate);
  refuse("value_in_key", config.value_in_key != 0);
  refuse("invariance", config.invariance != Invariance::none);
}

}  // namespace

bool is_fp8(DType dtype) noexcept {
  return dtype == DType::e4m3 || dtype == DType::e5m2 || dtype == DType::i8;
}

DType o_dtype_of(const AttentionConfig& config) noexcept {
  return is_fp8(config.dtype) ? config.o_dtype.value_or(DType::bf16) : config.dtype;
}

std::optional<DType> v_dtype_of(const AttentionConfig& config) noexcept {
  return config.dtype == DType::i8 ? DType::e4m3 : config.v_dtype;
}

void check_not_fp8(const AttentionConfig& config, const char* operation) {
  if (!is_fp8(config.dtype)) return;
  support::throw_unsupported("dtype", to_string(config.dtype),
                             fmt::format("f16, bf16 or f32 of {}, or f64 on the host", operation));
}

std::string state_dtypes(const AttentionConfig& config) {
  const bool either = config.dtype != DType::f32 && config.dtype != DType::f64;
  return fmt::format("dtype {}{}", to_string(config.dtype), either ? " or f32" : "");
}

int d_v_of(const AttentionConfig& config) noexcept {
  if (config.value_in_key != 0) return config.value_in_key;
  return config.head_dim_v != 0 ? config.head_dim_v : config.head_dim;
}

void check_has_backward(const AttentionConfig& config) {
  if (config.page_size != 0) {
    support::throw_unsupported("page_size", config.page_size, "0 of backward: there are no gradients over pages");
  }
  if (config.value_in_key != 0) {
    support::throw_unsupported("value_in_key", config.value_in_key, "0 of backward: v is a tensor of its own there");
  }
  check_not_fp8(config, "backward");
  for (const auto& [name, dtype] : {std::pair{"k_dtype", config.k_dtype}, std::pair{"v_dtype", config.v_dtype}}) {
    if (dtype)
      support::throw_unsupported(name, to_string(*dtype), "none of backward: there are no gradients of 8 bits");
  }
  const int d_v = d_v_of(config);
  if (std::max(config.head_dim, d_v) <= kMaxBackwardHeadDim) return;
  if (config.head_dim != d_v) {
    support::throw_unsupported(
        "head_dim_v", d_v,
        fmt::format("head_dim = {} of backward, where one is above {}", config.head_dim, kMaxBackwardHeadDim));
  }
}

void validate(const AttentionConfig& config, bool host) {
  check_head_dims(config);
  if (!is_fp8(config.dtype)) check_enum("dtype", config.dtype, DType::f64, "f16, bf16, f32, f64, e4m3, e5m2 or i8");
  if (config.dtype == DType::f64 && !host) throw_invalid("dtype", "f64", "f16, bf16 or f32 on a GPU");
  if (config.scale && !(std::abs(*config.scale) <= kMaxScale)) {
    throw_invalid("scale", *config.scale, fmt::format("a finite number of at most {:g}", kMaxScale));
  }
  check_enum("causal_align", config.causal_align, CausalAlign::top_left, "bottom_right or top_left");
  check_enum("cache.mode", config.cache.mode, CachePolicy::Mode::memory, "disk or memory");
  check_enum("compile", config.compile, CompilePolicy::background, "allow, never or background");
  if (config.compile == CompilePolicy::background) {
    const bool fixed = config.deterministic || config.invariance != Invariance::none;
    const char* const which = config.deterministic ? "deterministic" : "invariance";
    if (fixed) throw_invalid("compile", "background", fmt::format("allow or never with {}: bits would change", which));
  }
  check_enum("tune", config.tune, TunePolicy::on, "off, cached or on");
  if (!(config.dropout >= 0 && config.dropout < 1)) {
    throw_invalid("dropout", config.dropout, "a probability from 0 to below 1");
  }
  validate_pages(config);
  const int d_v = config.head_dim_v != 0 ? config.head_dim_v : config.head_dim;
  validate_group_size(config);
  validate_stored(config, "k_dtype", config.k_dtype, "head_dim", config.head_dim);
  validate_stored(config, "v_dtype", config.v_dtype, config.head_dim_v != 0 ? "head_dim_v" : "head_dim", d_v);
  validate_fp8(config);
  if (config.accumulate && config.sink) {
    throw_invalid("sink", "true", "false with accumulate: the state that is added to has the sink, or a merge adds it");
  }
  if (!config.varlen && config.zero_padding) throw_invalid("zero_padding", "true", "false without varlen");
  if (!config.varlen && config.page_size == 0 && config.check_sequences) {
    throw_invalid("check_sequences", "true", "false without varlen or page_size");
  }
  check_override("kernel", config.kernel, plan::Op::forward);
  check_invariance(config);
  validate_statistics(config);
  check_override("kernel_backward", config.kernel_backward, plan::Op::backward);
  if (!config.cache.compilers.empty()) cache_acceptance(config.cache);
}

std::int64_t window_of(std::int64_t given) noexcept {
  return given < kMaxLength ? given : -1;
}

}  // namespace fa::api
