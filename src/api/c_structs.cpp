#include "api/c_structs.hpp"

#include <optional>
#include <vector>

#include "support/text.hpp"

namespace fa::api::c {
namespace {

static_assert(FA_INVALID_ARGUMENT == static_cast<int>(ErrorCode::invalid_argument));
static_assert(FA_INTERNAL == static_cast<int>(ErrorCode::internal));
static_assert(FA_NOT_FINITE == static_cast<int>(ErrorCode::not_finite));
static_assert(FA_F64 == static_cast<int>(DType::f64));
static_assert(FA_I8 == static_cast<int>(DType::i8));
static_assert(FA_E5M2 == static_cast<int>(DType::e5m2));
static_assert(FA_U4X2 == static_cast<int>(DType::u4x2));
static_assert(FA_LOG_OFF == static_cast<int>(LogLevel::off));

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

}  // namespace

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
  view.dtype = to_enum(in.dtype, DType::u4x2, argument + ".dtype");
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

namespace {

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

std::optional<ShardPlace> to_place(const fa_shard_place* source) {
  if (source == nullptr) {
    return std::nullopt;
  }
  const fa_shard_place in = read_struct(source, "place");
  const auto step = [](std::int64_t given) { return given == 0 ? 1 : given; };
  return ShardPlace{in.b,       in.h_q,       in.q,         in.kv,         step(in.q_step), step(in.kv_step),
                    in.whole_b, in.whole_h_q, in.whole_s_q, in.whole_s_kv, in.begin};
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

template <std::size_t kSize>
void copy_text(char (&target)[kSize], const std::string& text) {
  const std::size_t length = std::min(text.size(), kSize - 1);
  std::memcpy(target, text.data(), length);
  target[length] = '\0';
}

}  // namespace

void refuse(const std::string& argument, const std::string& value, const std::string& accepted) {
  support::throw_invalid_text(argument, value, accepted);
}

bool all_zero(const char* bytes, std::size_t count) noexcept {
  return std::all_of(bytes, bytes + count, [](char byte) { return byte == 0; });
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

DropoutState to_dropout(const fa_dropout_state* source) {
  if (source == nullptr) {
    return {};
  }
  const fa_dropout_state in = read_struct(source, "dropout");
  return {in.seed, in.offset, in.device};
}

ForwardInputs to_inputs(const fa_forward_inputs* source) {
  const fa_forward_inputs in = read_struct(source, "inputs");
  return {to_view(in.q, "q"),
          to_view(in.k, "k"),
          to_view(in.v, "v"),
          to_captures(in.captures, in.capture_count),
          to_view(in.sink, "sink"),
          to_sequences(in.sequences),
          to_dropout(in.dropout),
          to_tiles(in.tiles),
          to_cache(in.cache),
          to_schedule(in.schedule),
          {},  // read_prefixes
          to_view(in.k_scale, "k_scale"),
          to_view(in.v_scale, "v_scale"),
          to_view(in.q_scale, "q_scale"),
          to_view(in.row_bias, "row_bias"),
          to_place(in.place),
          in.max_multiprocessors};
}

void read_prefixes(const fa_forward_inputs* source, GivenPrefixes* prefixes) {
  const fa_forward_inputs in = read_struct(source, "inputs");
  if (in.prefix_count > prefixes->levels.size()) {
    refuse("prefix_count", std::to_string(in.prefix_count), "at most " + std::to_string(prefixes->levels.size()));
  }
  if (in.prefix_count > 0) require(in.prefixes, "prefixes");
  prefixes->count = static_cast<std::size_t>(in.prefix_count);
  for (std::size_t i = 0; i < prefixes->count; ++i) {
    const fa_shared_prefix& from = in.prefixes[i];
    const std::string name = "prefixes[" + std::to_string(i) + "]";
    prefixes->levels[i] = {
        to_view(from.block_table, (name + ".block_table").c_str()), from.cu_rows,  from.lengths,   from.begin,
        to_view(from.positions, (name + ".positions").c_str()),     from.max_rows, from.max_length};
  }
}

std::vector<SharedPrefixShape> to_shapes(const fa_shared_prefix_shape* source, std::uint64_t count) {
  if (count > SharedPrefix::kMaxLevels) {
    refuse("prefix_count", std::to_string(count), "at most " + std::to_string(SharedPrefix::kMaxLevels));
  }
  if (count > 0) require(source, "prefixes");
  std::vector<SharedPrefixShape> shapes;
  for (std::uint64_t i = 0; i < count; ++i) {
    shapes.push_back({source[i].groups, source[i].max_rows, source[i].s_kv, source[i].begin != 0});
  }
  return shapes;
}

ScheduleInputs to_inputs(const fa_schedule_inputs* source) {
  const fa_schedule_inputs in = read_struct(source, "inputs");
  return {to_shape(in.limits), to_sequences(in.sequences), in.seq_begin};
}

Schedule to_schedule(const fa_schedule_memory* source) {
  if (source == nullptr) {
    return {};
  }
  const fa_schedule_memory in = read_struct(source, "schedule");
  return {in.data, in.size};
}

namespace {

ProbabilityDump to_dump(const fa_probability_dump* source) {
  if (source == nullptr) {
    return {};
  }
  const fa_probability_dump in = read_struct(source, "dump");
  require(in.p, "dump.p");
  return {to_view(in.p, "dump.p"), in.b, in.h};
}

}  // namespace

ForwardOutputs to_outputs(const fa_forward_outputs* source) {
  const fa_forward_outputs in = read_struct(source, "outputs");
  return {to_view(in.o, "o"),
          to_view(in.lse, "lse"),
          {to_view(in.max_logit, "max_logit"), to_view(in.entropy, "entropy"), to_view(in.column_sums, "column_sums"),
           to_view(in.top_keys, "top_keys")},
          to_dump(in.dump)};
}

BackwardInputs to_inputs(const fa_backward_inputs* source) {
  const fa_backward_inputs in = read_struct(source, "inputs");
  return {to_view(in.q, "q"),
          to_view(in.k, "k"),
          to_view(in.v, "v"),
          to_view(in.o, "o"),
          to_view(in.lse, "lse"),
          to_view(in.dout, "dout"),
          to_view(in.dlse, "dlse"),
          to_captures(in.captures, in.capture_count),
          to_view(in.sink, "sink"),
          to_sequences(in.sequences),
          to_dropout(in.dropout),
          to_tiles(in.tiles),
          to_place(in.place),
          in.max_multiprocessors,
          {to_view(in.entropy, "entropy"), to_view(in.dentropy, "dentropy"), to_view(in.dmax_logit, "dmax_logit"),
           to_view(in.dcolumn_sums, "dcolumn_sums")}};
}

BackwardOutputs to_outputs(const fa_backward_outputs* source) {
  const fa_backward_outputs in = read_struct(source, "outputs");
  return {to_view(in.dq, "dq"), to_view(in.dk, "dk"), to_view(in.dv, "dv"), to_captures(in.captures, in.capture_count),
          to_view(in.dsink, "dsink")};
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
          to_view(in.q_out, "q_out"),
          to_view(in.k_scale, "k_scale"),
          to_view(in.v_scale, "v_scale"),
          in.scales_given != 0};
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
  out.scales_given = in.scales_given != 0;
  return out;
}

void read_merge(const fa_merge_inputs* source, GivenMerge* merge) {
  const fa_merge_inputs in = read_struct(source, "inputs");
  if (in.state_count > merge->states.size()) {
    refuse("state_count", std::to_string(in.state_count), "at most " + std::to_string(merge->states.size()));
  }
  if (in.state_count != 0) require(in.states, "states");
  const auto count = static_cast<std::size_t>(in.state_count);
  for (std::size_t i = 0; i < count; ++i) {
    const std::string name = "states[" + std::to_string(i) + "]";
    merge->states[i] = {to_view(in.states[i].o, (name + ".o").c_str()),
                        to_view(in.states[i].lse, (name + ".lse").c_str())};
  }
  merge->inputs.states = {merge->states.data(), count};
  merge->inputs.stacked = in.stacked;
  merge->inputs.stride_o = in.stride_o;
  merge->inputs.stride_lse = in.stride_lse;
  merge->inputs.sink = to_view(in.sink, "sink");
  merge->inputs.sum = in.sum != 0;
}

QuantizeInputs to_inputs(const fa_quantize_inputs* source) {
  const fa_quantize_inputs in = read_struct(source, "inputs");
  QuantizeInputs out;
  out.q = to_view(in.q, "q");
  out.k = to_view(in.k, "k");
  out.v = to_view(in.v, "v");
  out.q_codes = to_view(in.q_codes, "q_codes");
  out.k_codes = to_view(in.k_codes, "k_codes");
  out.v_codes = to_view(in.v_codes, "v_codes");
  out.q_scale = to_view(in.q_scale, "q_scale");
  out.k_scale = to_view(in.k_scale, "k_scale");
  out.v_scale = to_view(in.v_scale, "v_scale");
  out.scales_given = in.scales_given != 0;
  out.k_mean = to_view(in.k_mean, "k_mean");
  out.mean_given = in.mean_given != 0;
  out.row_bias = to_view(in.row_bias, "row_bias");
  return out;
}

MergeShape to_shape(const fa_merge_shape* source) {
  const fa_merge_shape in = read_struct(source, "shape");
  MergeShape out;
  if (in.has_states_dtype != 0) out.states = to_enum(in.states_dtype, DType::i32, "shape.states_dtype");
  out.mixed = in.mixed != 0;
  if (in.has_result_dtype != 0) out.result = to_enum(in.result_dtype, DType::i32, "shape.result_dtype");
  out.aligned = in.unaligned == 0;
  out.sum = in.sum != 0;
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
  out.gradients = {in.without_dq == 0, in.without_dk == 0, in.without_dv == 0};
  out.placed = in.placed != 0;
  out.strided = in.strided != 0;
  out.bounded = in.bounded != 0;
  out.place_in_memory = in.place_in_memory != 0;
  return out;
}

Workspace to_workspace(const fa_workspace* source) {
  if (source == nullptr) {
    return {};
  }
  const fa_workspace in = read_struct(source, "workspace");
  return {in.data, in.size};
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

}  // namespace fa::api::c
