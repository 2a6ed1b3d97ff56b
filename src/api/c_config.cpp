#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "api/c_structs.hpp"
#include "plan/fixed.hpp"

namespace fa::api::c {
namespace {

static_assert(FA_CAUSAL_TOP_LEFT == static_cast<int>(CausalAlign::top_left));
static_assert(FA_CACHE_MEMORY == static_cast<int>(CachePolicy::Mode::memory));
static_assert(FA_COMPILE_NEVER == static_cast<int>(CompilePolicy::never));
static_assert(FA_COMPILE_ABORTED == static_cast<int>(CompileEvent::Phase::failed));
static_assert(FA_FAMILY_SM90 == static_cast<int>(plan::Family::sm90));

std::optional<bool> to_choice(std::int32_t value, const std::string& argument) {
  switch (to_enum(value, FA_CHOICE_YES, argument)) {
    case FA_CHOICE_NO:
      return false;
    case FA_CHOICE_YES:
      return true;
    default:
      return std::nullopt;
  }
}

/// A field that fa_kernel_override had before it had a text.
struct OldField {
  const char* name;
  std::int32_t fa_kernel_override::*member;
  bool choice = false;  ///< enum fa_choice
};

constexpr OldField kOldFields[] = {
    {"tile_m", &fa_kernel_override::tile_m},
    {"tile_n", &fa_kernel_override::tile_n},
    {"warps", &fa_kernel_override::warps},
    {"stages", &fa_kernel_override::stages},
    {"q_in_registers", &fa_kernel_override::q_in_registers, true},
    {"loop_bodies", &fa_kernel_override::loop_bodies},
    {"pack_gqa", &fa_kernel_override::pack_gqa, true},
    {"splits", &fa_kernel_override::splits},
    {"q_buffers", &fa_kernel_override::q_buffers},
    {"take_turns", &fa_kernel_override::take_turns, true},
    {"warps_n", &fa_kernel_override::warps_n},
    {"affine_product", &fa_kernel_override::affine_product, true},
    {"exact_max", &fa_kernel_override::exact_max, true},
    {"affine_reach", &fa_kernel_override::affine_reach, true},
};

/// The family that an override's number and its text name.
std::string kernel_of(const fa_kernel_override& in, const std::string& argument) {
  const auto family = to_enum(in.family, plan::Family::sm90, argument + ".family");
  std::string named = in.kernel == nullptr ? "" : in.kernel;
  if (family == plan::Family::automatic) return named;
  std::string of_number = plan::to_string(family);
  if (named.empty()) return of_number;
  if (named != of_number && named.rfind(of_number + "_", 0) != 0) {
    refuse(argument + ".kernel", named, "what family names, " + of_number + ", or one of its kernels");
  }
  return named;
}

std::optional<KernelOverride> to_override(const fa_kernel_override* source, plan::Op op, const std::string& argument) {
  if (source == nullptr) {
    return std::nullopt;
  }
  const fa_kernel_override in = read_struct(source, argument);
  KernelOverride out{kernel_of(in, argument), in.text == nullptr ? "" : in.text};
  for (const OldField& field : kOldFields) {
    std::int32_t value = in.*field.member;
    if (field.choice) {
      const std::optional<bool> choice = to_choice(value, argument + "." + field.name);
      if (!choice) continue;
      value = *choice ? 1 : 0;
    } else if (value == 0) {
      continue;
    }
    out.text += (out.text.empty() ? "" : " ") + std::string(field.name) + "=" + std::to_string(value);
  }
  plan::read_override(out, op, argument);  // names the argument as this caller does
  return out;
}

/// A C function that hears of compilations.
std::function<void(const CompileEvent&)> to_hook(fa_compile_callback callback, void* user) {
  if (callback == nullptr) {
    return nullptr;
  }
  return [callback, user](const CompileEvent& event) {
    fa_compile_event out{};
    out.struct_size = sizeof out;
    out.phase = static_cast<std::int32_t>(event.phase);
    out.spec = event.spec.c_str();
    out.target = event.target.c_str();
    out.problem = event.problem.c_str();
    out.milliseconds = event.milliseconds;
    callback(user, &out);
  };
}

/// What fa_config grew for packs, caps and the hook.
void set_cache(const fa_config& in, AttentionConfig* out) {
  constexpr std::uint64_t kMostPacks = 1024;
  if (in.cache_pack_count > kMostPacks) {
    refuse("config.cache_pack_count", std::to_string(in.cache_pack_count), "0 to 1024");
  }
  if (in.cache_pack_count != 0) {
    require(in.cache_packs, "config.cache_packs");
  }
  for (std::uint64_t i = 0; i < in.cache_pack_count; ++i) {
    require(in.cache_packs[i], "config.cache_packs[" + std::to_string(i) + "]");
    out->cache.packs.emplace_back(in.cache_packs[i]);
    const char* const sha256 = in.cache_pack_sha256 == nullptr ? nullptr : in.cache_pack_sha256[i];
    out->cache.pack_sha256.emplace_back(sha256 == nullptr ? "" : sha256);
  }
  out->cache.max_bytes = in.cache_max_bytes;
  out->cache.max_entries = in.cache_max_entries;
  out->cache.compilers = in.cache_compilers == nullptr ? "" : in.cache_compilers;
  out->cache.keep_source = in.cache_keep_source != 0;
  out->on_compile = to_hook(in.on_compile, in.on_compile_user);
}

/// The expression and captures of a function, in a ScoreFunction or MaskFunction.
template <typename Function>
Function to_function(const fa_function* source, const std::string& argument) {
  if (source == nullptr) {
    return {};
  }
  const fa_function in = read_struct(source, argument);
  require(in.expression, argument + ".expression");
  if (in.capture_count > Captures::kMax) {
    refuse(argument + ".capture_count", std::to_string(in.capture_count), "0 to " + std::to_string(Captures::kMax));
  }
  if (in.capture_count != 0) {
    require(in.captures, argument + ".captures");
  }
  Function out;
  out.expression = in.expression;
  for (std::uint32_t i = 0; i < in.capture_count; ++i) {
    const std::string name = argument + ".captures[" + std::to_string(i) + "]";
    require(in.captures[i].name, name + ".name");
    out.captures.push_back({in.captures[i].name, to_enum(in.captures[i].dtype, DType::i32, name + ".dtype"),
                            in.captures[i].requires_grad != 0});
  }
  return out;
}

/// What fa_config grew for functions, windows, chunks and sinks.
void set_variants(const fa_config& in, AttentionConfig* out) {
  out->score = to_function<ScoreFunction>(in.score, "config.score");
  out->mask = to_function<MaskFunction>(in.mask, "config.mask");
  out->window_left = in.has_window_left != 0 ? in.window_left : -1;
  out->window_right = in.has_window_right != 0 ? in.window_right : -1;
  out->chunk = in.chunk;
  out->sink = in.sink != 0;
}

TunePolicy to_tune_policy(std::int32_t value) {
  switch (to_enum(value, FA_TUNE_ON, "config.tune")) {
    case FA_TUNE_OFF:
      return TunePolicy::off;
    case FA_TUNE_CACHED:
      return TunePolicy::cached;
    default:
      return TunePolicy::on;
  }
}

}  // namespace

AttentionConfig to_config(const fa_config* source) {
  const fa_config in = read_struct(source, "config");
  AttentionConfig out;
  out.head_dim = in.head_dim;
  out.head_dim_v = in.head_dim_v;
  out.dtype = to_enum(in.dtype, DType::e5m2, "config.dtype");
  if (in.has_scale != 0) {
    out.scale = in.scale;
  }
  out.causal = in.causal != 0;
  out.causal_align = to_enum(in.causal_align, CausalAlign::top_left, "config.causal_align");
  out.deterministic = in.deterministic != 0;
  out.cache.mode = to_enum(in.cache_mode, CachePolicy::Mode::memory, "config.cache_mode");
  out.cache.directory = in.cache_directory == nullptr ? "" : in.cache_directory;
  out.compile = to_enum(in.compile, CompilePolicy::background, "config.compile");
  out.tune = to_tune_policy(in.tune);
  out.host_f64 = in.host_f64 != 0;
  set_variants(in, &out);
  set_cache(in, &out);
  out.varlen = in.varlen != 0;
  out.zero_padding = in.zero_padding != 0;
  out.check_sequences = in.check_sequences != 0;
  out.dropout = in.dropout;
  out.page_size = in.page_size;
  out.accumulate = in.accumulate != 0;
  out.value_in_key = in.value_in_key;
  if (in.has_k_dtype != 0) out.k_dtype = to_enum(in.k_dtype, DType::u4x2, "config.k_dtype");
  if (in.has_v_dtype != 0) out.v_dtype = to_enum(in.v_dtype, DType::u4x2, "config.v_dtype");
  out.invariance = to_enum(in.invariance, Invariance::rows, "config.invariance");
  out.debug = in.debug != 0;
  if (in.has_o_dtype != 0) out.o_dtype = to_enum(in.o_dtype, DType::e5m2, "config.o_dtype");
  out.group_size = in.group_size;
  out.key_scales = in.key_scales != 0;
  out.value_scales = in.value_scales != 0;
  out.precise = in.precise != 0;
  out.statistics = {to_enum(in.max_logit, MaxLogit::scaled, "config.max_logit"),
                    in.max_logit_by_head != 0,
                    in.entropy != 0,
                    to_enum(in.column_sums, ColumnSums::kv_heads, "config.column_sums"),
                    in.top_keys,
                    in.entropy_gradient != 0,
                    in.max_logit_gradient != 0,
                    in.column_sums_gradient != 0};
  out.kernel = to_override(in.kernel, plan::Op::forward, "config.kernel");
  out.kernel_backward = to_override(in.kernel_backward, plan::Op::backward, "config.kernel_backward");
  return out;
}

}  // namespace fa::api::c
