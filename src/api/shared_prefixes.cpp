#include "api/shared_prefixes.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "api/call_memory.hpp"
#include "api/packed.hpp"
#include "api/paged.hpp"
#include "api/schedule.hpp"
#include "api/views.hpp"
#include "expression/parse.hpp"
#include "expression/positions.hpp"
#include "plan/mask_tiles.hpp"
#include "support/text.hpp"

namespace fa::api {
namespace {

using support::throw_invalid;

constexpr std::size_t kAlignment = 256;
// Query tiles of 128 rows with which a grid fills a GPU without sharing keys.
constexpr std::int64_t kManyTiles = 192;
constexpr std::int64_t kTileRows = 128;
// For messages alone: calls that are served build no text.
using LevelNames = std::array<const char*, SharedPrefix::kMaxLevels>;
constexpr LevelNames kTableNames{"prefixes[0].block_table", "prefixes[1].block_table", "prefixes[2].block_table",
                                 "prefixes[3].block_table", "prefixes[4].block_table", "prefixes[5].block_table",
                                 "prefixes[6].block_table", "prefixes[7].block_table"};
constexpr LevelNames kPositionNames{"prefixes[0].positions", "prefixes[1].positions", "prefixes[2].positions",
                                    "prefixes[3].positions", "prefixes[4].positions", "prefixes[5].positions",
                                    "prefixes[6].positions", "prefixes[7].positions"};
constexpr const char* kPositions = "shared_positions";
constexpr const char* kWindow = "shared_window";
constexpr const char* kChunk = "shared_chunk";

std::size_t aligned_up(std::size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

std::size_t bytes_of(std::int64_t elements, DType dtype) {
  return aligned_up(static_cast<std::size_t>(elements) * size_of(dtype));
}

DType statistic_of(const AttentionConfig& config) {
  return config.dtype == DType::f64 ? DType::f64 : DType::f32;
}

bool is_bounded(const AttentionConfig& config) {
  return window_of(config.window_left) >= 0 || config.chunk > 0;
}

using expression::Input;
constexpr std::array kRowInputs{std::pair("q", Input::q), std::pair("s_q", Input::s_q), std::pair("s_kv", Input::s_kv)};

bool depends_on(const expression::Program& program, expression::NodeId root, Input input) {
  return program.dependent(input)[static_cast<std::size_t>(root)];
}

/// Why levels cannot have a function, empty where they can: it is that of all rows of a group, whichever request they
/// are of, and rows have positions.
std::string level_refusal(const expression::Program& program, expression::NodeId root) {
  if (depends_on(program, root, Input::b)) return "functions that do not depend on b with shared prefixes";
  if (expression::sees_positions_alone(program.graph, root)) return "";
  for (const auto& [name, input] : kRowInputs) {
    if (!depends_on(program, root, input)) continue;
    return fmt::format("functions that do not depend on {} but in q + s_kv - s_q with shared prefixes", name);
  }
  return "";
}

/// The same function of a level, whose rows have positions there. `text` stays as it is where none are needed.
std::string text_of_level(const char* argument, const std::string& text, const expression::Program& program,
                          expression::NodeId root) {
  const bool by_rows =
      std::ranges::any_of(kRowInputs, [&](const auto& of) { return depends_on(program, root, of.second); });
  return by_rows ? expression::at_position(argument, text, fmt::format("{}[b, q]", kPositions)) : text;
}

void declare(std::vector<Capture>& captures, const char* name) {
  const bool known = std::ranges::any_of(captures, [name](const Capture& c) { return c.name == name; });
  if (!known) captures.push_back({name, DType::i32});
}

bool mentions_positions(const std::string& text) {
  return !text.empty() && expression::mentions("function", text, kPositions);
}

void set_score(const AttentionConfig& config, const expression::Program& program, AttentionConfig& level) {
  if (!program.score) return;
  const std::string& text = config.score.expression;
  const std::string refusal = level_refusal(program, *program.score);
  if (!refusal.empty()) support::throw_unsupported("config.score", text, refusal);
  level.score.expression = text_of_level("config.score", text, program, *program.score);
  if (mentions_positions(level.score.expression)) declare(level.score.captures, kPositions);
}

/// None where the mask keeps the keys in front of each request's rows, as the whole prefix is.
void set_mask(const AttentionConfig& config, const expression::Program& program, AttentionConfig& level) {
  level.mask = {};
  if (!program.mask || expression::keeps_keys_in_front(program.graph, *program.mask)) return;
  const std::string& text = config.mask.expression;
  const std::string refusal = level_refusal(program, *program.mask);
  if (!refusal.empty()) {
    support::throw_unsupported("config.mask", text, refusal + ", or that keep all keys in front of s_kv - s_q");
  }
  level.mask.captures = config.mask.captures;
  level.mask.expression = text_of_level("config.mask", text, program, *program.mask);
  if (mentions_positions(level.mask.expression)) declare(level.mask.captures, kPositions);
}

/// Windows and chunks as a mask by the rows' positions, behind a function's.
void add_bounds(const AttentionConfig& config, MaskFunction& mask) {
  std::string& text = mask.expression;
  if (!text.empty()) text = fmt::format("({})", text);
  declare(mask.captures, kPositions);
  const auto next = [&] { return text.empty() ? "" : " && "; };
  if (window_of(config.window_left) >= 0) {
    text += fmt::format("{}kv >= {}[b, q] - {}", next(), kPositions, kWindow);
    declare(mask.captures, kWindow);
  }
  if (config.chunk > 0) {
    text += fmt::format("{}kv / {} == {}[b, q] / {}", next(), kChunk, kPositions, kChunk);
    declare(mask.captures, kChunk);
  }
}

/// What the rows of a group see of its prefix: they stand behind all of it.
AttentionConfig config_of_levels(const AttentionConfig& config, const Functions& functions) {
  if (config.page_size <= 0) throw_invalid("prefixes", "given", "none without pages (AttentionConfig::page_size)");
  if (config.invariance != Invariance::none) {
    support::throw_unsupported("invariance", to_string(config.invariance), "none with shared prefixes");
  }
  if (config.accumulate) support::throw_unsupported("accumulate", "true", "false with shared prefixes");
  if (is_fp8(config.dtype))
    support::throw_unsupported("dtype", to_string(config.dtype), "16 bits with shared prefixes");
  if (config.statistics.any()) support::throw_unsupported("statistics", "given", "none with shared prefixes");
  AttentionConfig level = config;
  level.varlen = true;
  level.causal = level.sink = false;
  level.window_left = level.window_right = -1;
  level.chunk = 0;
  set_score(config, functions.program, level);
  set_mask(config, functions.program, level);
  if (is_bounded(config)) add_bounds(config, level.mask);
  return level;
}

/// Whether rows of a group do not see the same of their prefix.
bool has_positions(const AttentionConfig& level) {
  return mentions_positions(level.score.expression) || mentions_positions(level.mask.expression);
}

/// Whether a level's functions name what a call gives.
bool is_of_level(const AttentionConfig& level, std::string_view name) {
  const auto same = [name](const Capture& capture) { return capture.name == name; };
  return std::ranges::any_of(level.score.captures, same) || std::ranges::any_of(level.mask.captures, same);
}

/// Over few rows thread blocks share keys, and pages begin anywhere: the sm80 family does both.
AttentionConfig on_sm80(AttentionConfig config, bool host) {
  if (!host && !config.kernel) config.kernel = KernelOverride{"sm80", {}};
  return config;
}

/// [b, h, s, d] as rows of all batch entries, [b s, h, d].
TensorView rows_of(const char* name, const TensorView& view) {
  const auto [b, h, s, d] = view.shape;
  if (b > 1 && s > 1 && view.strides[0] != s * view.strides[2]) {
    throw_invalid(name, fmt::format("strides {} of b and {} of s_q", view.strides[0], view.strides[2]),
                  "batch entries one behind the other, with shared prefixes: s_q times the stride of s_q, or varlen");
  }
  const std::int64_t shape[] = {b * s, h, d};
  const std::int64_t strides[] = {s > 1 ? view.strides[2] : view.strides[0], view.strides[1], view.strides[3]};
  return TensorView(view.data, view.dtype, shape, strides);
}

/// [rows, h, d] and [h, rows], packed.
AttentionState partial_state(const AttentionConfig& config, std::byte* at, std::int64_t rows, std::int64_t h,
                             std::int64_t d) {
  return {TensorView(static_cast<void*>(at), config.dtype, {rows, h, d}),
          TensorView(static_cast<void*>(at + bytes_of(rows * h * d, config.dtype)), statistic_of(config), {h, rows})};
}

/// The same as of b batch entries.
AttentionState by_entry(const AttentionState& state, std::int64_t b) {
  const auto [rows, h, d, unused] = state.o.shape;
  const std::int64_t s = rows / b;
  const std::int64_t o_shape[] = {b, h, s, d}, o_strides[] = {s * h * d, d, h * d, 1};
  const std::int64_t lse_shape[] = {b, h, s}, lse_strides[] = {s, rows, 1};
  return {TensorView(state.o.data, state.o.dtype, o_shape, o_strides),
          TensorView(state.lse.data, state.lse.dtype, lse_shape, lse_strides)};
}

std::string name_of(std::size_t level, const char* field) {
  return fmt::format("prefixes[{}].{}", level, field);
}

void check_number(std::size_t level, const char* field, std::int64_t value) {
  if (value >= 0 && value <= kMaxLength) return;
  throw_invalid(name_of(level, field), value, fmt::format("0 to {}", kMaxLength));
}

void check_levels(std::size_t count) {
  if (count <= SharedPrefix::kMaxLevels) return;
  throw_invalid("prefixes", count, fmt::format("at most {} levels", SharedPrefix::kMaxLevels));
}

TensorView ints(const std::int32_t* array, std::int64_t count) {
  return array == nullptr ? TensorView() : TensorView(array, DType::i32, {count});
}

/// What a call writes to.
struct Written {
  const ForwardInputs& inputs;
  const ForwardOutputs& outputs;
  const Workspace& workspace;
};

/// It shares no memory with what a level reads, which has passed check_level.
void check_disjoint(const SharedPrefix& prefix, bool positioned, std::size_t level, const Written& call) {
  const std::int64_t groups = prefix.block_table.shape[0];
  const std::array<std::pair<const char*, TensorView>, 5> read{
      {{"block_table", prefix.block_table},
       {"cu_rows", ints(prefix.cu_rows, groups + 1)},
       {"lengths", ints(prefix.lengths, groups)},
       {"begin", ints(prefix.begin, groups)},
       {"positions", positioned ? prefix.positions : TensorView()}}};
  CallTensors tensors;
  std::array<std::string, 5> names;  // which labels refer to
  for (std::size_t i = 0; i < read.size(); ++i) {
    names[i] = name_of(level, read[i].first);
    tensors.add_read({names[i], Label::Of::argument}, read[i].second);
  }
  tensors.add_written("o", call.outputs.o);
  tensors.add_written("lse", call.outputs.lse);
  name_given_memory(call.inputs, call.workspace, tensors);
  tensors.check_disjoint();
}

std::uint64_t tag_of(const SharedPrefixes::Call& call, std::size_t size) {
  std::uint64_t tag = plan::mix_tag(size, call.count);
  const AttentionShape& s = call.shape;
  for (const std::int64_t value : {s.b, s.h_q, s.h_kv, s.s_q, s.s_kv, s.total_q, std::int64_t{s.aligned}}) {
    tag = plan::mix_tag(tag, static_cast<std::uint64_t>(value));
  }
  for (std::size_t i = 0; i < call.count; ++i) {
    const SharedPrefixShape& level = call.shapes[i];
    for (const std::int64_t value : {level.groups, level.max_rows, level.s_kv, std::int64_t{level.begin}}) {
      tag = plan::mix_tag(tag, static_cast<std::uint64_t>(value));
    }
  }
  return tag;
}

}  // namespace

SharedPrefixes::SharedPrefixes(const AttentionConfig& config, const Functions& functions, Device device)
    : config_(config),
      functions_(functions),
      level_config_(config_of_levels(config, functions)),
      positioned_(has_positions(level_config_)),
      host_(device.kind() == Device::Kind::host),
      own_(Attention::create(on_sm80(config, host_), device)),
      many_(Attention::create(level_config_, device)),
      few_(Attention::create(on_sm80(level_config_, host_), device)) {}

void SharedPrefixes::check_level(const Call& call, const SharedPrefix& prefix, std::size_t level) const {
  const TensorView& table = prefix.block_table;
  if (table.rank != 2 || table.dtype != DType::i32) {
    throw_invalid(name_of(level, "block_table"),
                  table.defined() ? fmt::format("{} of rank {}", to_string(table.dtype), table.rank) : "nothing",
                  "a tensor [groups, max_pages] of i32");
  }
  check_memory(kTableNames[level], table);
  if (table.shape[0] < 1) throw_invalid(name_of(level, "block_table"), "no group", "1 and more");
  check_array(name_of(level, "cu_rows"), prefix.cu_rows, true);
  check_array(name_of(level, "lengths"), prefix.lengths, true);
  check_array(name_of(level, "begin"), prefix.begin, false);
  check_number(level, "max_rows", prefix.max_rows);
  check_number(level, "max_length", prefix.max_length);
  if (!positioned_) return;
  const std::int64_t rows = prefix.max_rows > 0 ? prefix.max_rows : level_shape(call.shape, call.shapes[level]).total_q;
  const TensorView& positions = prefix.positions;
  const bool fits = positions.rank == 2 && positions.dtype == DType::i32 && positions.shape[0] == table.shape[0] &&
                    positions.shape[1] >= rows;
  if (fits) return check_memory(kPositionNames[level], positions);
  throw_invalid(
      name_of(level, "positions"),
      positions.defined() ? fmt::format("{} of rank {}", to_string(positions.dtype), positions.rank) : "nothing",
      fmt::format("a tensor [groups, max_rows] = [{}, {} and more] of i32 with a window, chunk or function of q",
                  table.shape[0], rows));
}

SharedPrefixes::Call SharedPrefixes::check(const ForwardInputs& inputs, const ForwardOutputs& outputs,
                                           const Workspace& workspace) const {
  check_levels(inputs.prefixes.size());
  if (inputs.cache.seq_begin == nullptr) {
    throw_invalid("cache.seq_begin", "nothing", "where each request's own keys begin, behind its prefix");
  }
  Call call;
  call.count = inputs.prefixes.size();
  call.own = inputs;
  call.own.prefixes = {};
  const ForwardCall own = check_forward(config_, call.own, outputs);
  check_takes_schedules(config_, inputs.schedule);
  check_variants(config_, functions_, own.shape, own.place, call.own);
  api::check_disjoint(call.own, outputs, workspace);
  call.shape = own.shape;
  call.out = outputs;
  call.rows = {own.o, own.lse};
  if (!config_.varlen) {
    call.own.q = own.q;
    call.out = {own.o, own.lse};
    rows_of("q", own.q);
  }
  call.empty = own.empty;
  for (std::size_t i = 0; i < call.count; ++i) {
    const SharedPrefix& prefix = inputs.prefixes[i];
    call.shapes[i] = {prefix.block_table.rank == 2 ? prefix.block_table.shape[0] : 0, prefix.max_rows, 0,
                      prefix.begin != nullptr};
    check_level(call, prefix, i);
    check_disjoint(prefix, positioned_, i, {call.own, outputs, workspace});
    const std::int64_t room = std::min(prefix.block_table.shape[1], kMaxLength / config_.page_size) * config_.page_size;
    call.shapes[i].s_kv = prefix.max_length == 0 ? room : std::min(prefix.max_length, room);
    call.levels[i] = level_inputs(own, inputs, i);
  }
  return call;
}

ForwardInputs SharedPrefixes::level_inputs(const ForwardCall& call, const ForwardInputs& inputs,
                                           std::size_t level) const {
  const SharedPrefix& prefix = inputs.prefixes[level];
  ForwardInputs result;
  result.q = config_.varlen ? inputs.q : rows_of("q", call.q);
  result.k = inputs.k;
  result.v = inputs.v;
  result.k_scale = inputs.k_scale;  // of pages, whichever request has them
  result.v_scale = inputs.v_scale;
  for (const Captured& captured : inputs.captures) {
    if (is_of_level(level_config_, captured.name)) result.captures.add(captured);
  }
  if (positioned_) result.captures.add({kPositions, prefix.positions});
  if (window_of(config_.window_left) >= 0) {
    result.captures.add({kWindow, static_cast<double>(std::min(config_.window_left, kMaxLength))});
  }
  if (config_.chunk > 0) result.captures.add({kChunk, static_cast<double>(std::min(config_.chunk, kMaxLength))});
  result.sequences.b = prefix.block_table.shape[0];
  result.sequences.cu_seqlens_q = prefix.cu_rows;
  result.sequences.seqused_kv = prefix.lengths;
  result.sequences.max_s_q = prefix.max_rows;
  result.sequences.max_s_kv = prefix.max_length;
  result.cache.block_table = prefix.block_table;
  result.cache.seq_begin = prefix.begin;
  result.max_multiprocessors = inputs.max_multiprocessors;
  return result;
}

/// Of each request: its levels and its own keys follow each other, and it stands behind its prefix. Groups have whole
/// requests, and all rows.
void SharedPrefixes::check_arrays(const Call& call) const {
  const PackedSequences& sequences = call.own.sequences;
  PackedSequences known = sequences;
  known.b = call.shape.b;
  std::array<std::int64_t, SharedPrefix::kMaxLevels> group{};
  for (std::int64_t i = 0; i < call.shape.b; ++i) {
    const std::int64_t rows = rows_of_request(config_, known, call.shape, i);
    const std::int64_t first = config_.varlen ? sequences.cu_seqlens_q[i] : i * call.shape.s_q;
    if (rows == 0) continue;
    std::int64_t end = 0;  // of the keys so far
    for (std::size_t level = 0; level < call.count; ++level) {
      const ForwardInputs& prefix = call.levels[level];
      std::int64_t& g = group[level];
      while (g < call.shapes[level].groups && prefix.sequences.cu_seqlens_q[g + 1] <= first) ++g;
      const bool whole = g < call.shapes[level].groups && prefix.sequences.cu_seqlens_q[g] <= first &&
                         first + rows <= prefix.sequences.cu_seqlens_q[g + 1];
      if (!whole) {
        throw_invalid(name_of(level, "cu_rows"), fmt::format("no group with rows {} to {}", first, first + rows),
                      fmt::format("a group for the rows of request {}, and all of them", i));
      }
      const std::int64_t begin = prefix.cache.seq_begin == nullptr ? 0 : prefix.cache.seq_begin[g];
      if (begin < end || (level == 0 && prefix.sequences.seqused_kv[g] < begin)) {
        throw_invalid(fmt::format("{}[{}]", name_of(level, "begin"), g), begin,
                      fmt::format("{} and more, where the keys in front end", end));
      }
      end = std::max<std::int64_t>(prefix.sequences.seqused_kv[g], begin);
    }
    const std::int64_t begin = call.own.cache.seq_begin[i];
    if (begin < end) {
      throw_invalid(fmt::format("cache.seq_begin[{}]", i), begin,
                    fmt::format("{} and more, where its prefix ends", end));
    }
    if (sequences.seqused_kv[i] - rows < end) {
      throw_invalid(fmt::format("seqused_kv[{}]", i), sequences.seqused_kv[i],
                    fmt::format("{} and more: its {} rows stand behind its prefix", end + rows, rows));
    }
  }
}

AttentionShape SharedPrefixes::level_shape(const AttentionShape& shape, const SharedPrefixShape& prefix) const {
  AttentionShape level = shape;
  level.b = prefix.groups;
  level.total_q = config_.varlen && shape.total_q > 0 ? shape.total_q : shape.b * shape.s_q;
  level.total_kv = 0;
  level.s_q = prefix.max_rows;
  level.s_kv = prefix.s_kv;
  return level;
}

const Attention& SharedPrefixes::level_of(const AttentionShape& level, bool begins) const {
  const std::int64_t tiles = (level.total_q + kTileRows - 1) / kTileRows * level.h_q;
  return begins || tiles < kManyTiles ? few_ : many_;
}

std::size_t SharedPrefixes::partial_bytes(const AttentionShape& shape, std::size_t levels) const {
  const std::int64_t rows = level_shape(shape, {}).total_q;
  const std::int64_t d_v = d_v_of(config_);
  const std::size_t lse = bytes_of(rows * shape.h_q, statistic_of(config_));
  return levels * (bytes_of(rows * shape.h_q * d_v, config_.dtype) + lse) +
         lse;  // of the own keys, where none is given
}

std::size_t SharedPrefixes::partial_bytes(const Call& call) const {
  return partial_bytes(call.shape, call.count);
}

std::size_t SharedPrefixes::workspace_size(const AttentionShape& wanted,
                                           std::span<const SharedPrefixShape> prefixes) const {
  check_levels(prefixes.size());
  const AttentionShape shape = checked(config_, wanted);
  std::size_t most = own_.workspace_size(wanted);
  for (const SharedPrefixShape& prefix : prefixes) {
    AttentionShape level = level_shape(shape, prefix);
    for (const bool aligned : {shape.aligned, true}) {  // that of o does not count
      level.aligned = aligned;
      most = std::max(most, level_of(level, prefix.begin).workspace_size(level));
    }
  }
  return partial_bytes(shape, prefixes.size()) + aligned_up(most);
}

void SharedPrefixes::prepare(const AttentionShape& wanted, std::span<const SharedPrefixShape> prefixes) const {
  check_levels(prefixes.size());
  const AttentionShape shape = checked(config_, wanted);
  own_.prepare(wanted);
  for (const SharedPrefixShape& prefix : prefixes) {
    AttentionShape level = level_shape(shape, prefix);
    for (const bool aligned : {shape.aligned, true}) {  // that of o does not count
      level.aligned = aligned;
      level_of(level, prefix.begin).prepare(level);
    }
  }
  for (const bool aligned : {wanted.aligned, true}) own_.prepare_merge({.aligned = aligned});  // nor that of q, k, v
}

void SharedPrefixes::check_workspace(const Call& call, std::size_t size) const {
  const std::uint64_t tag = tag_of(call, size);
  if (enough_.load(std::memory_order_relaxed) == tag) return;
  const std::size_t needed = workspace_size(call.shape, std::span(call.shapes).first(call.count));
  if (size < needed) {
    throw Error(ErrorCode::out_of_memory,
                fmt::format("workspace = {} bytes: accepted are {} or more for this shape", size, needed),
                {{"argument", "workspace"}, {"value", std::to_string(size)}, {"accepted", std::to_string(needed)}});
  }
  enough_.store(tag, std::memory_order_relaxed);
}

void SharedPrefixes::run(const Call& call, std::byte* partial, Workspace rest, Stream stream) const {
  const std::int64_t d_v = d_v_of(config_);
  const std::int64_t rows = level_shape(call.shape, {}).total_q, h = call.shape.h_q;
  const std::size_t each = bytes_of(rows * h * d_v, config_.dtype) + bytes_of(rows * h, statistic_of(config_));
  std::array<AttentionState, SharedPrefix::kMaxLevels + 1> states;
  AttentionState own{call.out.o, call.out.lse};
  if (!own.lse.defined()) {
    const AttentionState behind = partial_state(config_, partial + call.count * each, rows, h, 0);
    own.lse = config_.varlen
                  ? behind.lse
                  : by_entry({TensorView(partial, config_.dtype, {rows, h, d_v}), behind.lse}, call.shape.b).lse;
  }
  std::array<ForwardCall, SharedPrefix::kMaxLevels> levels;  // before anything is launched, and before arrays are read
  for (std::size_t i = 0; i < call.count; ++i) {
    const AttentionState state = partial_state(config_, partial + i * each, rows, h, d_v);
    levels[i] = check_forward(level_config_, call.levels[i], {state.o, state.lse});
  }
  if (host_) {
    for (std::size_t i = 0; i < call.count; ++i) {
      const ForwardCall& level = levels[i];
      check_requests(level_config_, level.sequences, level.cache, level.shape, level.k.shape[0]);
    }
    check_arrays(call);
  }
  own_.forward(call.own, {own.o, own.lse}, stream, rest);
  states[0] = own;
  for (std::size_t i = 0; i < call.count; ++i) {
    const AttentionState state = partial_state(config_, partial + i * each, rows, h, d_v);
    level_of(level_shape(call.shape, call.shapes[i]), call.shapes[i].begin)
        .forward(call.levels[i], {state.o, state.lse}, stream, rest);
    states[i + 1] = config_.varlen ? state : by_entry(state, call.shape.b);
  }
  own_.merge({.states = std::span(states).first(call.count + 1)}, {own.o, call.out.lse}, stream);
}

}  // namespace fa::api
