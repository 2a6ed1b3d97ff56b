#include <algorithm>
#include <cstddef>
#include <cstring>
#include <exception>
#include <functional>
#include <new>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <fa/fa.h>

#include <fa/attention.hpp>
#include <fa/compiler.hpp>

#include "plan/fixed.hpp"
#include "support/text.hpp"

struct fa_attention {
  fa::Attention attention;
};

namespace fa {
namespace {

/// Sizes beyond this are uninitialised memory, not a newer version of a struct.
constexpr std::uint32_t kLargestStruct = 4096;

static_assert(FA_INVALID_ARGUMENT == static_cast<int>(ErrorCode::invalid_argument));
static_assert(FA_INTERNAL == static_cast<int>(ErrorCode::internal));
static_assert(FA_F64 == static_cast<int>(DType::f64));
static_assert(FA_I32 == static_cast<int>(DType::i32));
static_assert(FA_CAUSAL_TOP_LEFT == static_cast<int>(CausalAlign::top_left));
static_assert(FA_CACHE_MEMORY == static_cast<int>(CachePolicy::Mode::memory));
static_assert(FA_COMPILE_NEVER == static_cast<int>(CompilePolicy::never));
static_assert(FA_COMPILE_ABORTED == static_cast<int>(CompileEvent::Phase::failed));
static_assert(FA_FAMILY_SM90 == static_cast<int>(plan::Family::sm90));
static_assert(FA_LOG_OFF == static_cast<int>(LogLevel::off));

struct LastError {
  std::optional<Error> error;
  int code = FA_OK;  ///< of `error`, or of `plain` when there is no memory for an Error
  const char* plain = "";
};

LastError& last_error() noexcept {
  thread_local LastError last;
  return last;
}

int remember(const Error& error) noexcept {
  LastError& last = last_error();
  last.error.emplace(error);
  last.code = static_cast<int>(error.code());
  return last.code;
}

int remember(ErrorCode code, const char* plain) noexcept {
  LastError& last = last_error();
  last.error.reset();
  last.plain = plain;
  last.code = static_cast<int>(code);
  return last.code;
}

int remember_unexpected(const std::exception& exception) noexcept {
  try {
    return remember(Error(ErrorCode::internal, std::string("unexpected exception: ") + exception.what()));
  } catch (...) {
    return remember(ErrorCode::internal, "unexpected exception");
  }
}

/// Runs `body`; no exception passes.
template <typename Body>
int guarded(Body&& body) noexcept {
  try {
    body();
    return FA_OK;
  } catch (const Error& error) {
    return remember(error);
  } catch (const std::bad_alloc&) {
    return remember(ErrorCode::out_of_memory, "out of host memory");
  } catch (const std::exception& exception) {
    return remember_unexpected(exception);
  } catch (...) {
    return remember(ErrorCode::internal, "unexpected exception");
  }
}

[[noreturn]] void refuse(const std::string& argument, const std::string& value, const std::string& accepted) {
  support::throw_invalid_text(argument, value, accepted);
}

template <typename Pointer>
void require(const Pointer* pointer, const std::string& argument) {
  if (pointer == nullptr) {
    refuse(argument, "NULL", "a pointer");
  }
}

bool all_zero(const char* bytes, std::size_t count) {
  return std::all_of(bytes, bytes + count, [](char byte) { return byte == 0; });
}

/// What the size of a version of a struct is a multiple of.
template <typename Struct>
constexpr std::size_t granule(std::uint32_t /*size*/) {
  return alignof(Struct);
}

/// It had no pointers at first.
template <>
constexpr std::size_t granule<fa_kernel_override>(std::uint32_t size) {
  return size <= offsetof(fa_kernel_override, kernel) ? alignof(std::uint32_t) : alignof(fa_kernel_override);
}

/// Every version of a struct is a whole number of its alignments long: any other size may cut a pointer in two.
template <typename Struct>
void check_struct_size(const Struct& given, const std::string& argument) {
  constexpr std::uint32_t kSmallest = 2 * sizeof(std::uint32_t);
  const std::uint32_t size = given.struct_size;
  if (size < kSmallest || size > kLargestStruct || size % granule<Struct>(size) != 0) {
    refuse(argument + ".struct_size", std::to_string(size), "the sizeof of the struct");
  }
}

/// A copy of a caller's struct in this library's version of it.
template <typename Struct>
Struct read_struct(const Struct* source, const std::string& argument) {
  static_assert(std::is_trivially_copyable_v<Struct>);
  require(source, argument);
  const std::uint32_t size = source->struct_size;
  check_struct_size(*source, argument);
  Struct copy{};
  std::memcpy(&copy, source, std::min<std::size_t>(size, sizeof(Struct)));
  if (size > sizeof(Struct) &&
      !all_zero(reinterpret_cast<const char*>(source) + sizeof(Struct), size - sizeof(Struct))) {
    throw Error(ErrorCode::unsupported,
                argument + " sets a field that this version of fa (" + version() + ") does not know",
                {{"argument", argument}, {"value", std::to_string(size)}});
  }
  return copy;
}

/// The enumerator numbered `value`; `last` is the greatest that exists.
template <typename Enum>
Enum to_enum(std::int32_t value, Enum last, const std::string& argument) {
  if (value < 0 || value > static_cast<std::int32_t>(last)) {
    refuse(argument, std::to_string(value), "0 to " + std::to_string(static_cast<std::int32_t>(last)));
  }
  return static_cast<Enum>(value);
}

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

Device to_device(fa_device device) {
  switch (device.kind) {
    case FA_DEVICE_CURRENT:
      return Device::current();
    case FA_DEVICE_CUDA:
      return Device::cuda(device.ordinal);
    case FA_DEVICE_HOST:
      return Device::host();
    default:
      refuse("device.kind", std::to_string(device.kind), "FA_DEVICE_CURRENT, FA_DEVICE_CUDA or FA_DEVICE_HOST");
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

AttentionConfig to_config(const fa_config* source) {
  const fa_config in = read_struct(source, "config");
  AttentionConfig out;
  out.head_dim = in.head_dim;
  out.head_dim_v = in.head_dim_v;
  out.dtype = to_enum(in.dtype, DType::f64, "config.dtype");
  if (in.has_scale != 0) {
    out.scale = in.scale;
  }
  out.causal = in.causal != 0;
  out.causal_align = to_enum(in.causal_align, CausalAlign::top_left, "config.causal_align");
  out.deterministic = in.deterministic != 0;
  out.cache.mode = to_enum(in.cache_mode, CachePolicy::Mode::memory, "config.cache_mode");
  out.cache.directory = in.cache_directory == nullptr ? "" : in.cache_directory;
  out.compile = to_enum(in.compile, CompilePolicy::never, "config.compile");
  out.tune = to_tune_policy(in.tune);
  out.host_f64 = in.host_f64 != 0;
  set_variants(in, &out);
  set_cache(in, &out);
  out.varlen = in.varlen != 0;
  out.zero_padding = in.zero_padding != 0;
  out.check_sequences = in.check_sequences != 0;
  out.dropout = in.dropout;
  out.page_size = in.page_size;
  out.kernel = to_override(in.kernel, plan::Op::forward, "config.kernel");
  out.kernel_backward = to_override(in.kernel_backward, plan::Op::backward, "config.kernel_backward");
  return out;
}

void check_flags(std::uint32_t flags, const std::string& argument) {
  constexpr std::uint32_t kKnown = FA_TENSOR_READ_ONLY | FA_TENSOR_ROW_MAJOR;
  if ((flags & ~kKnown) != 0) {
    refuse(argument + ".flags", std::to_string(flags), "FA_TENSOR_READ_ONLY and FA_TENSOR_ROW_MAJOR");
  }
}

void set_row_major_strides(TensorView& view) {
  std::int64_t stride = 1;
  for (int axis = view.rank - 1; axis >= 0; --axis) {
    const auto i = static_cast<std::size_t>(axis);
    view.strides[i] = stride;
    if (__builtin_mul_overflow(stride, std::max<std::int64_t>(view.shape[i], 1), &stride)) {
      stride = 0;  // no such tensor fits in memory: the sizes are refused when they are validated
    }
  }
}

/// A NULL tensor is one that was not given.
TensorView to_view(const fa_tensor* source, const std::string& argument) {
  if (source == nullptr) {
    return {};
  }
  const fa_tensor in = read_struct(source, argument);
  if (in.rank < 1 || in.rank > TensorView::kMaxRank) {
    refuse(argument + ".rank", std::to_string(in.rank), "1 to 4");
  }
  check_flags(in.flags, argument);
  TensorView view;
  view.data = in.data;
  view.dtype = to_enum(in.dtype, DType::i32, argument + ".dtype");
  view.rank = in.rank;
  view.read_only = (in.flags & FA_TENSOR_READ_ONLY) != 0;
  std::copy_n(in.shape, in.rank, view.shape.begin());
  if ((in.flags & FA_TENSOR_ROW_MAJOR) != 0) {
    set_row_major_strides(view);
  } else {
    std::copy_n(in.strides, in.rank, view.strides.begin());
  }
  return view;
}

PackedSequences to_sequences(const fa_sequences* source) {
  if (source == nullptr) {
    return {};
  }
  const fa_sequences in = read_struct(source, "sequences");
  return {in.b, in.cu_seqlens_q, in.cu_seqlens_kv, in.seqused_q, in.seqused_kv, in.max_s_q, in.max_s_kv};
}

PagedCache to_cache(const fa_paged_cache* source) {
  if (source == nullptr) {
    return {};
  }
  const fa_paged_cache in = read_struct(source, "cache");
  return {to_view(in.block_table, "cache.block_table"), in.batch_index, in.seq_begin};
}

DropoutState to_dropout(const fa_dropout_state* source) {
  if (source == nullptr) {
    return {};
  }
  const fa_dropout_state in = read_struct(source, "dropout");
  return {in.seed, in.offset, in.device};
}

Captures to_captures(const fa_captured* captures, std::uint64_t count) {
  if (count > Captures::kMax) {
    refuse("capture_count", std::to_string(count), "0 to " + std::to_string(Captures::kMax));
  }
  if (count != 0) {
    require(captures, "captures");
  }
  Captures out;
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::string argument = "captures[" + std::to_string(i) + "]";
    require(captures[i].name, argument + ".name");
    Captured captured(captures[i].name, captures[i].number);
    captured.tensor = to_view(captures[i].tensor, argument);
    out.add(captured);
  }
  return out;
}

MaskTiles to_tiles(const fa_mask_tiles* source) {
  if (source == nullptr) {
    return {};
  }
  const fa_mask_tiles in = read_struct(source, "tiles");
  return {in.data, in.size, in.filled != 0};
}

ForwardInputs to_inputs(const fa_forward_inputs* source) {
  const fa_forward_inputs in = read_struct(source, "inputs");
  return {to_view(in.q, "q"),       to_view(in.k, "k"),
          to_view(in.v, "v"),       to_captures(in.captures, in.capture_count),
          to_view(in.sink, "sink"), to_sequences(in.sequences),
          to_dropout(in.dropout),   to_tiles(in.tiles),
          to_cache(in.cache)};
}

ForwardOutputs to_outputs(const fa_forward_outputs* source) {
  const fa_forward_outputs in = read_struct(source, "outputs");
  return {to_view(in.o, "o"), to_view(in.lse, "lse")};
}

BackwardInputs to_inputs(const fa_backward_inputs* source) {
  const fa_backward_inputs in = read_struct(source, "inputs");
  return {to_view(in.q, "q"),       to_view(in.k, "k"),
          to_view(in.v, "v"),       to_view(in.o, "o"),
          to_view(in.lse, "lse"),   to_view(in.dout, "dout"),
          to_view(in.dlse, "dlse"), to_captures(in.captures, in.capture_count),
          to_view(in.sink, "sink"), to_sequences(in.sequences),
          to_dropout(in.dropout),   to_tiles(in.tiles)};
}

BackwardOutputs to_outputs(const fa_backward_outputs* source) {
  const fa_backward_outputs in = read_struct(source, "outputs");
  return {to_view(in.dq, "dq"), to_view(in.dk, "dk"), to_view(in.dv, "dv"), to_captures(in.captures, in.capture_count),
          to_view(in.dsink, "dsink")};
}

RotaryEmbedding to_rotary(const fa_rotary_embedding* source) {
  if (source == nullptr) {
    return {};
  }
  const fa_rotary_embedding in = read_struct(source, "rotary");
  RotaryEmbedding out;
  out.dims = in.dims;
  out.interleaved = in.interleaved != 0;
  if (in.base != 0) {
    out.base = in.base;
  }
  out.cos = to_view(in.cos, "rotary.cos");
  out.sin = to_view(in.sin, "rotary.sin");
  out.positions = in.positions;
  out.positions_64 = in.positions_64;
  return out;
}

AppendInputs to_inputs(const fa_append_inputs* source) {
  const fa_append_inputs in = read_struct(source, "inputs");
  return {to_view(in.k, "k"),
          to_view(in.v, "v"),
          to_view(in.k_cache, "k_cache"),
          to_view(in.v_cache, "v_cache"),
          to_cache(in.cache),
          in.b,
          in.cu_seqlens_k_new,
          in.seqused_kv,
          in.slots,
          in.slots_64,
          to_rotary(in.rotary),
          to_view(in.q, "q"),
          to_view(in.q_out, "q_out")};
}

AppendShape to_shape(const fa_append_shape* source) {
  const fa_append_shape in = read_struct(source, "shape");
  AppendShape out;
  out.rotary_dims = in.rotary_dims;
  out.interleaved = in.interleaved != 0;
  if (in.has_table != 0) {
    out.table = to_enum(in.table_dtype, DType::i32, "shape.table_dtype");
  }
  out.aligned = in.unaligned == 0;
  return out;
}

AttentionShape to_shape(const fa_shape* source) {
  const fa_shape in = read_struct(source, "shape");
  AttentionShape out;
  out.b = in.b;
  out.h_q = in.h_q;
  out.h_kv = in.h_kv;
  out.s_q = in.s_q;
  out.s_kv = in.s_kv;
  out.aligned = in.unaligned == 0;
  out.total_q = in.total_q;
  out.total_kv = in.total_kv;
  return out;
}

Workspace to_workspace(const fa_workspace* source) {
  if (source == nullptr) {
    return {};
  }
  const fa_workspace in = read_struct(source, "workspace");
  return {in.data, in.size};
}

template <std::size_t kSize>
void copy_text(char (&target)[kSize], const std::string& text) {
  const std::size_t length = std::min(text.size(), kSize - 1);
  std::memcpy(target, text.data(), length);
  target[length] = '\0';
}

fa_kernel_info to_c(const KernelInfo& info) {
  fa_kernel_info out{};
  out.registers = info.registers;
  out.local_bytes = info.local_bytes;
  out.shared_bytes = info.shared_bytes;
  out.threads = info.threads;
  out.compile_ms = info.compile_ms;
  out.load_ms = info.load_ms;
  copy_text(out.name, info.name);
  copy_text(out.origin, info.origin);
  copy_text(out.spec, info.spec);
  copy_text(out.chosen_by, info.chosen_by);
  return out;
}

fa_cache_counters to_c(const CacheCounters& counters) {
  fa_cache_counters out{};
  out.memory_hits = counters.memory_hits;
  out.pack_hits = counters.pack_hits;
  out.disk_hits = counters.disk_hits;
  out.compiles = counters.compiles;
  out.damaged = counters.damaged;
  out.unaccepted = counters.unaccepted;
  out.publish_failures = counters.publish_failures;
  out.evictions = counters.evictions;
  return out;
}

/// Fills the caller's struct up to the size it was compiled with.
template <typename Struct>
void write_struct(Struct* target, Struct values) {
  const std::uint32_t size = target->struct_size;
  values.struct_size = size;
  std::memcpy(target, &values, std::min<std::size_t>(size, sizeof values));
}

/// Looks kernels up and tells about the one that the others serve.
void find(decltype(find_kernels) look_up, const fa_config* config, const fa_shape* shape, const char* arch,
          fa_kernel_info* info) {
  require(arch, "arch");
  if (info != nullptr) {
    check_struct_size(*info, "info");
  }
  const std::vector<KernelInfo> found = look_up(to_config(config), to_shape(shape), arch);
  if (info == nullptr) {
    return;
  }
  const auto main = std::find_if(found.begin(), found.end(), [](const KernelInfo& kernel) {
    return kernel.name.ends_with("_forward") || kernel.name.ends_with("_backward");
  });
  write_struct(info, to_c(main == found.end() ? KernelInfo{} : *main));
}

}  // namespace
}  // namespace fa

extern "C" {

int fa_create(const fa_config* config, fa_device device, fa_attention** out) {
  return fa::guarded([&] {
    fa::require(out, "out");
    *out = nullptr;
    *out = new fa_attention{fa::Attention::create(fa::to_config(config), fa::to_device(device))};
  });
}

void fa_destroy(fa_attention* attention) {
  delete attention;
}

int fa_forward(const fa_attention* attention, const fa_forward_inputs* inputs, const fa_forward_outputs* outputs,
               void* stream, const fa_workspace* workspace) {
  return fa::guarded([&] {
    fa::require(attention, "attention");
    attention->attention.forward(fa::to_inputs(inputs), fa::to_outputs(outputs), static_cast<fa::Stream>(stream),
                                 fa::to_workspace(workspace));
  });
}

int fa_append(const fa_attention* attention, const fa_append_inputs* inputs, void* stream) {
  return fa::guarded([&] {
    fa::require(attention, "attention");
    attention->attention.append(fa::to_inputs(inputs), static_cast<fa::Stream>(stream));
  });
}

int fa_prepare_append(const fa_attention* attention, const fa_append_shape* shape) {
  return fa::guarded([&] {
    fa::require(attention, "attention");
    attention->attention.prepare_append(fa::to_shape(shape));
  });
}

int fa_append_kernel_info_get(const fa_attention* attention, const fa_append_shape* shape, fa_kernel_info* info) {
  return fa::guarded([&] {
    fa::require(attention, "attention");
    fa::require(info, "info");
    fa::check_struct_size(*info, "info");
    fa::write_struct(info, fa::to_c(attention->attention.append_kernel_info(fa::to_shape(shape))));
  });
}

int fa_find_append_kernel(const fa_config* config, const fa_append_shape* shape, const char* arch,
                          fa_kernel_info* info) {
  return fa::guarded([&] {
    fa::require(arch, "arch");
    if (info != nullptr) {
      fa::check_struct_size(*info, "info");
    }
    const fa::KernelInfo found = fa::find_append_kernel(fa::to_config(config), fa::to_shape(shape), arch);
    if (info != nullptr) {
      fa::write_struct(info, fa::to_c(found));
    }
  });
}

int fa_prepare(const fa_attention* attention, const fa_shape* shape) {
  return fa::guarded([&] {
    fa::require(attention, "attention");
    attention->attention.prepare(fa::to_shape(shape));
  });
}

int fa_workspace_size(const fa_attention* attention, const fa_shape* shape, size_t* size) {
  return fa::guarded([&] {
    fa::require(attention, "attention");
    fa::require(size, "size");
    *size = attention->attention.workspace_size(fa::to_shape(shape));
  });
}

int fa_kernel_info_get(const fa_attention* attention, const fa_shape* shape, fa_kernel_info* info) {
  return fa::guarded([&] {
    fa::require(attention, "attention");
    fa::require(info, "info");
    fa::check_struct_size(*info, "info");
    fa::write_struct(info, fa::to_c(attention->attention.kernel_info(fa::to_shape(shape))));
  });
}

int fa_cache_counters_get(const fa_attention* attention, fa_cache_counters* counters) {
  return fa::guarded([&] {
    fa::require(attention, "attention");
    fa::require(counters, "counters");
    fa::check_struct_size(*counters, "counters");
    fa::write_struct(counters, fa::to_c(attention->attention.cache_counters()));
  });
}

int fa_find_kernel(const fa_config* config, const fa_shape* shape, const char* arch, fa_kernel_info* info) {
  return fa::guarded([&] { fa::find(fa::find_kernels, config, shape, arch, info); });
}

int fa_find_backward_kernel(const fa_config* config, const fa_shape* shape, const char* arch, fa_kernel_info* info) {
  return fa::guarded([&] { fa::find(fa::find_backward_kernels, config, shape, arch, info); });
}

int fa_backward(const fa_attention* attention, const fa_backward_inputs* inputs, const fa_backward_outputs* outputs,
                void* stream, const fa_workspace* workspace) {
  return fa::guarded([&] {
    fa::require(attention, "attention");
    attention->attention.backward(fa::to_inputs(inputs), fa::to_outputs(outputs), static_cast<fa::Stream>(stream),
                                  fa::to_workspace(workspace));
  });
}

int fa_prepare_backward(const fa_attention* attention, const fa_shape* shape) {
  return fa::guarded([&] {
    fa::require(attention, "attention");
    attention->attention.prepare_backward(fa::to_shape(shape));
  });
}

int fa_backward_workspace_size(const fa_attention* attention, const fa_shape* shape, size_t* size) {
  return fa::guarded([&] {
    fa::require(attention, "attention");
    fa::require(size, "size");
    *size = attention->attention.backward_workspace_size(fa::to_shape(shape));
  });
}

int fa_mask_tiles_size(const fa_attention* attention, const fa_shape* shape, size_t* size) {
  return fa::guarded([&] {
    fa::require(attention, "attention");
    fa::require(size, "size");
    *size = attention->attention.mask_tiles_size(fa::to_shape(shape));
  });
}

int fa_backward_mask_tiles_size(const fa_attention* attention, const fa_shape* shape, size_t* size) {
  return fa::guarded([&] {
    fa::require(attention, "attention");
    fa::require(size, "size");
    *size = attention->attention.backward_mask_tiles_size(fa::to_shape(shape));
  });
}

int fa_backward_kernel_info_get(const fa_attention* attention, const fa_shape* shape, fa_kernel_info* info) {
  return fa::guarded([&] {
    fa::require(attention, "attention");
    fa::require(info, "info");
    fa::check_struct_size(*info, "info");
    fa::write_struct(info, fa::to_c(attention->attention.backward_kernel_info(fa::to_shape(shape))));
  });
}

int fa_dropout_mask(const fa_dropout_state* state, float probability, int64_t b, int64_t h_q, int64_t s_q, int64_t s_kv,
                    uint8_t* keep) {
  return fa::guarded([&] { fa::dropout_mask(fa::to_dropout(state), probability, b, h_q, s_q, s_kv, keep); });
}

int fa_last_error_code(void) {
  return fa::last_error().code;
}

const char* fa_last_error_message(void) {
  const fa::LastError& last = fa::last_error();
  return last.error ? last.error->what() : last.plain;
}

const char* fa_last_error_field(const char* name) {
  const fa::LastError& last = fa::last_error();
  if (!last.error || name == nullptr) {
    return "";
  }
  for (const fa::ErrorField& field : last.error->fields()) {
    if (field.name == name) {
      return field.value.c_str();
    }
  }
  return "";
}

const char* fa_status_name(int status) {
  if (status == FA_OK) {
    return "ok";
  }
  return status < FA_INVALID_ARGUMENT || status > FA_INTERNAL ? "unknown"
                                                              : fa::to_string(static_cast<fa::ErrorCode>(status));
}

const char* fa_version(void) {
  return fa::version();
}

int fa_set_log_callback(fa_log_callback callback, void* user) {
  return fa::guarded([&] {
    if (callback == nullptr) {
      fa::set_log_callback({});
      return;
    }
    fa::set_log_callback([callback, user](fa::LogLevel level, std::string_view message) {
      callback(user, static_cast<int>(level), std::string(message).c_str());
    });
  });
}

int fa_set_log_level(int level) {
  return fa::guarded([&] { fa::set_log_level(fa::to_enum(level, fa::LogLevel::off, "level")); });
}

int fa_set_nvrtc_path(const char* path) {
  return fa::guarded([&] { fa::set_nvrtc_path(path == nullptr ? "" : path); });
}

}  // extern "C"
