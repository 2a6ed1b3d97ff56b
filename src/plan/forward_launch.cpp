#include "plan/forward_launch.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>

#include "plan/catalogue.hpp"
#include "plan/fixed_splits.hpp"
#include "plan/mask_tiles.hpp"
#include "plan/rounding.hpp"
#include "plan/schedule.hpp"
#include "plan/sm90_forward.hpp"

namespace fa::plan {
namespace {

constexpr double kLog2e = 1.4426950408889634;
// K and V of the heads that run together should fit the L2 cache; half of the smallest data-centre L2 (A100: 40 MB).
constexpr std::int64_t kL2Budget = std::int64_t{20} << 20;
// Measured on an H200 (50 MB): fewer heads at a time, with more blocks each, are slower.
constexpr std::int64_t kDynamicBudget = std::int64_t{32} << 20;
constexpr std::int64_t kStaticBudget = std::int64_t{36} << 20;
constexpr int kFewestHeads = 8;
constexpr int kManyTiles = 6;
constexpr std::uint32_t kWarpRows = 16;  // of O, stored at once

void set_strides(const TensorView& view, std::int64_t& b, std::int64_t& h, std::int64_t& s) {
  b = view.strides[0];
  h = view.strides[1];
  s = view.strides[2];
}

int heads_in_l2(const Problem& problem, const kernel::ForwardParams& params, bool pack_gqa, std::int64_t budget) {
  const std::int64_t head_bytes = std::max<std::int64_t>(
      problem.typical_s_kv() * (problem.d_qk + problem.d_v) * static_cast<std::int64_t>(size_of(problem.dtype)), 1);
  const std::int64_t sharing = pack_gqa ? 1 : params.group;
  const std::int64_t entries = problem.varlen ? 1 : problem.b;  // the slots of a packed batch are those of all
  return static_cast<int>(std::clamp<std::int64_t>(budget / head_bytes * sharing, sharing,
                                                   std::max<std::int64_t>(params.heads, 1) * entries));
}

/// [d, group, s_q, h_kv, b], boxes of `heads` query heads and `rows` of their rows.
TensorMapSpec query_map(const TensorView& view, std::int64_t h_kv, std::uint32_t heads, std::uint32_t rows) {
  const std::int64_t group = view.shape[1] / h_kv;
  TensorMapSpec map = start_map(view);
  add_axis(map, group, view.strides[1], heads);
  add_axis(map, view.shape[2], view.strides[2], rows);
  add_axis(map, h_kv, view.strides[1] * group, 1);
  add_axis(map, view.shape[0], view.strides[0], 1);
  return map;
}

}  // namespace

namespace {

constexpr std::uint32_t kDraws = 65536;  // of 16 bits

}  // namespace

kernel::DropoutParams dropout_params(double probability) noexcept {
  const auto dropped = static_cast<std::uint32_t>(std::clamp(std::round(probability * kDraws), 0.0, kDraws - 1.0));
  kernel::DropoutParams params{};
  for (std::uint32_t i = 0; i < 8; ++i) params.threshold[i] = (dropped >> (8 + i) & 1) * 0xffffffff;
  params.low_threshold = dropped << 24;
  params.keep = static_cast<float>(double(kDraws - dropped) / kDraws);
  params.inverse_keep = static_cast<float>(double(kDraws) / (kDraws - dropped));
  return params;
}

kernel::SequenceParams sequence_params(const Problem& problem, kernel::SequenceParams given) noexcept {
  given.total_q = static_cast<int>(problem.total_q);
  given.total_kv = static_cast<int>(problem.total_kv);
  given.bottom_right = problem.causal_align == CausalAlign::bottom_right ? 1 : 0;
  return given;
}

std::int64_t heads_of_a_tile(const KernelSpec& spec, std::int64_t group, std::int64_t s_q) noexcept {
  if (!spec.pack_gqa) return 1;
  if (!spec.kernel().cuts_groups) return group;
  const std::int64_t rows = spec.tile_m;
  const std::int64_t positions = spec.varlen ? 1 : std::clamp<std::int64_t>(s_q & -s_q, 1, rows);
  return std::min(group, rows / positions);
}

std::int64_t slots(std::int64_t total_rows, std::int64_t tile, std::int64_t b) noexcept {
  return total_rows / tile + b;
}

int waves(std::int64_t rounds) noexcept {
  return std::bit_width(static_cast<std::uint64_t>(rounds));
}

std::int64_t in_waves(kernel::SequenceParams& sequences, std::int64_t tiles, std::int64_t most) noexcept {
  const std::int64_t wave = std::max<std::int64_t>(std::min(tiles, most), 1);
  sequences.wave = static_cast<int>(wave);
  return wave * waves(ceil_div(tiles, wave));
}

PaddingLaunch padding_launch(const TensorView& view, std::int64_t b, const std::int32_t* cu, const std::int32_t* used,
                             std::int64_t longest, float value, int warps) noexcept {
  PaddingLaunch launch{};
  launch.params.data = view.data;
  launch.params.cu = cu;
  launch.params.used = used;
  launch.params.stride_h = view.strides[1];
  launch.params.stride_s = view.strides[2];
  launch.params.b = static_cast<int>(b);
  launch.params.h = static_cast<int>(view.shape[1]);
  launch.params.total = static_cast<int>(view.shape[2]);
  launch.params.d = view.rank == 4 ? static_cast<int>(view.shape[3]) : 1;
  launch.params.longest = static_cast<int>(longest);
  launch.params.value = value;
  launch.grid = ceil_div(view.shape[2], warps);
  return launch;
}

namespace {

void set_tensors(const KernelSpec& spec, const ForwardTensors& tensors, kernel::ForwardVariantParams& params) noexcept {
  params.q = tensors.q.data;
  params.k = tensors.k.data;
  params.v = tensors.v.data;
  params.o = tensors.o.data;
  params.lse = tensors.lse.defined() ? static_cast<float*>(tensors.lse.data) : nullptr;
  set_strides(tensors.q, params.stride_q_b, params.stride_q_h, params.stride_q_s);
  set_strides(tensors.k, params.stride_k_b, params.stride_k_h, params.stride_k_s);
  set_strides(tensors.v, params.stride_v_b, params.stride_v_h, params.stride_v_s);
  set_strides(tensors.o, params.stride_o_b, params.stride_o_h, params.stride_o_s);
  if (spec.max_logit != 0) params.max_logit = static_cast<float*>(tensors.statistics.max_logit.data);
  if (spec.entropy) params.entropy = static_cast<float*>(tensors.statistics.entropy.data);
  if (tensors.lse.defined()) set_strides(tensors.lse, params.stride_lse_b, params.stride_lse_h, params.stride_lse_s);
}

/// Of all `heads` of the call, as many as blocks of neighbouring numbers work on.
int heads_in_flight(const Problem& problem, const KernelSpec& spec, const kernel::ForwardVariantParams& params,
                    std::int64_t heads, int multiprocessors) noexcept {
  const std::int64_t tiles = std::int64_t{params.m_blocks} * params.splits;  // of a head
  if (spec.dynamic()) {
    const bool few_reads = spec.tile_m > 128 || problem.d_qk + problem.d_v > 256;
    const std::int64_t budget = kDynamicBudget * (few_reads ? 2 : 1);
    return equal_sections(heads, std::max(heads_in_l2(problem, params, spec.pack_gqa, budget), kFewestHeads));
  }
  if (!spec.kernel().persistent || problem.ragged()) return heads_in_l2(problem, params, spec.pack_gqa, kL2Budget);
  // Fewer blocks of a head at a time are faster, as long as L2 holds the heads; not with a few tiles each.
  const int most = heads_in_l2(problem, params, spec.pack_gqa, kStaticBudget);
  // K and V of wide heads fill the L2 cache soon.
  const auto spread_heads = spec.kernel().spread_heads;
  const int few = spread_heads != nullptr && problem.causal ? spread_heads(tiles, heads, most, multiprocessors) : 0;
  if (few > 0) return few;
  const int balanced = balanced_heads(tiles, heads, multiprocessors);
  const bool grows = params.m_blocks >= kManyTiles && balanced < heads;
  const int section = grows ? balanced * std::max(most / balanced, 1) : balanced;
  // A last section of fewer heads would start its longest tiles when little else is left.
  return problem.causal && heads % section != 0 && heads <= most ? static_cast<int>(heads) : section;
}

}  // namespace

int balanced_heads(std::int64_t m_blocks, std::int64_t heads, int multiprocessors) noexcept {
  const std::int64_t blocks = std::max(multiprocessors, 1);
  const std::int64_t least = std::max<std::int64_t>(blocks / 4, 1);
  const std::int64_t pair = 2 * blocks;  // tiles of a pair of rounds
  const std::int64_t period = pair / std::gcd(pair, std::max<std::int64_t>(m_blocks, 1));
  std::int64_t section = (least + period - 1) / period * period;
  // No section of a useful size ends with a pair of rounds: one section, or many that end at ever other places.
  if (section > blocks) section = heads > 2 * pair ? least : heads;
  return static_cast<int>(std::clamp<std::int64_t>(section, 1, std::max<std::int64_t>(heads, 1)));
}

int equal_sections(std::int64_t heads, std::int64_t most) noexcept {
  heads = std::max<std::int64_t>(heads, 1);
  const std::int64_t sections = (heads - 1) / std::max<std::int64_t>(most, 1) + 1;
  return static_cast<int>((heads - 1) / sections + 1);
}

ForwardGrid forward_params(const Problem& problem, const ForwardTensors& tensors, double scale, int splits,
                           const KernelSpec& spec, int multiprocessors, const PackedArgs& packed,
                           kernel::ForwardVariantParams& params, int most_blocks) noexcept {
  std::memset(&params, 0, sizeof params);
  set_tensors(spec, tensors, params);
  params.b = static_cast<int>(problem.b);
  params.h_q = static_cast<int>(problem.h_q);
  params.h_kv = static_cast<int>(problem.h_kv);
  params.s_q = static_cast<int>(problem.s_q);
  params.s_kv = static_cast<int>(problem.s_kv);
  const std::int64_t together = heads_of_a_tile(spec, problem.h_q / problem.h_kv, problem.s_q);
  params.group = static_cast<int>(spec.pack_gqa ? together : problem.h_q / problem.h_kv);
  params.causal_shift = causal_shift(problem);
  const bool by_parts = spec.scheduled() || spec.own_parts();
  params.heads = static_cast<int>(problem.h_q / (by_parts ? together * spec.cluster() : together));
  const std::int64_t rows = (problem.varlen ? problem.total_q : problem.s_q) * (spec.pack_gqa ? params.group : 1);
  params.m_blocks =
      static_cast<int>(problem.varlen ? slots(rows, spec.tile_m, problem.b) : ceil_div(rows, spec.tile_m));
  const bool shares = spec.split_keys() > 0 && spec.split;
  const int sharing = shares ? fixed_splits(problem, spec).sharing : 1;
  const bool in_tiles = shares && spec.kernel().persistent;  // each block's part of a tile is one of the tiles
  params.splits = in_tiles ? sharing : splits;
  params.scale = static_cast<float>(scale);
  params.scale_log2 = static_cast<float>(scale * kLog2e);

  if (problem.variants != nullptr) params.variant = variant_params(problem, tensors.variant, scale);

  const bool persistent = spec.kernel().persistent;
  const ScheduleShape schedule = by_parts ? schedule_shape(problem, spec, multiprocessors) : ScheduleShape();
  if (persistent) multiprocessors *= spec.min_blocks;  // as many blocks stay to the end
  const std::int64_t heads = (problem.varlen ? 1 : problem.b) * params.heads;
  params.heads_in_flight = heads_in_flight(problem, spec, params, heads, multiprocessors);
  if (problem.ragged()) params.sequences = sequence_params(problem, packed.sequences);
  if (problem.dropout) params.dropout = placed_dropout(problem, packed.dropout);
  if (problem.paged()) {
    params.paged = packed.paged;
    params.paged.pages = static_cast<int>(tensors.k.shape[0]);
    if (problem.contiguous()) params.paged.rows = params.paged.pages;
    if (spec.kernel().tensor_maps) params.paged.heads_a_page = static_cast<int>(heads_a_page(tensors.k));
  }
  if (by_parts) {
    params.paged.parts = schedule.parts;
    params.paged.slots = static_cast<int>(schedule.slots);
    params.paged.segment_slots = static_cast<int>(schedule.segment_slots);
  }
  // Blocks that take tiles from a counter are never too few.
  int blocks = spec.dynamic() ? multiprocessors : std::max(multiprocessors, most_blocks);
  if (in_tiles) {  // a tile's blocks are neighbours in one round: the last waits for lower numbers alone
    params.splits = std::min({params.splits, blocks, multiprocessors});
    blocks -= blocks % params.splits;
    multiprocessors -= multiprocessors % params.splits;
  }
  ForwardGrid launch;
  if (shares && !in_tiles) params.sequences.wave = sharing;
  launch.tiles = std::int64_t{params.m_blocks} * params.heads * (problem.varlen ? 1 : params.b) * params.splits;
  if (by_parts) {
    launch.grid = std::int64_t{schedule.parts} * spec.cluster();
    return launch;
  }
  if (shares && !in_tiles) launch.tiles *= sharing;
  if (spec.whole_tiles() && !problem.paged()) launch.tiles /= params.splits;
  const bool stays = persistent && spec.cluster() == 1;  // those of a cluster end together, with their tile
  launch.grid = stays || spec.bounded ? std::min<std::int64_t>(launch.tiles, blocks) : launch.tiles;
  const bool in_rounds = spec.split && spec.length_keys() > 0;  // splits are alike
  if (persistent && comes_in_waves(problem) && !spec.bounded && !spec.dynamic() && !in_rounds) {
    launch.grid = in_waves(params.sequences, launch.tiles, stays ? multiprocessors : launch.tiles);
  }
  return launch;
}

kernel::Fp8ScaleParams fp8_scale_params(const ForwardTensors& tensors) noexcept {
  kernel::Fp8ScaleParams params{};
  params.q = static_cast<const float*>(tensors.q_scale.data);
  params.k = static_cast<const float*>(tensors.k_scale.data);
  params.v = static_cast<const float*>(tensors.v_scale.data);
  set_strides(tensors.q_scale, params.stride_q_b, params.stride_q_h, params.stride_q_s);
  params.stride_k_b = tensors.k_scale.strides[0];
  params.stride_k_h = tensors.k_scale.strides[1];
  params.stride_k_s = tensors.k_scale.strides[2];
  params.stride_v_s = tensors.v_scale.strides[2];
  params.stride_v_b = tensors.v_scale.strides[0];
  params.stride_v_h = tensors.v_scale.strides[1];
  return params;
}

kernel::RowBiasParams row_bias_params(const ForwardTensors& tensors) noexcept {
  kernel::RowBiasParams params{};
  params.data = static_cast<const float*>(tensors.row_bias.data);
  set_strides(tensors.row_bias, params.stride_b, params.stride_h, params.stride_s);
  return params;
}

namespace {

/// Strides of scales in words of 4 bytes: those of u4x2 are pairs of 16 bits.
void set_scale_strides(const TensorView& scales, std::int64_t& b, std::int64_t& h, std::int64_t& s) noexcept {
  const std::int64_t elements = scales.defined() && size_of(scales.dtype) == 2 ? 2 : 1;
  b = scales.strides[0] / elements;
  h = scales.strides[1] / elements;
  s = scales.strides[2] / elements;
}

}  // namespace

kernel::ScaleParams scale_params(const ForwardTensors& tensors) noexcept {
  kernel::ScaleParams params{};
  params.k = static_cast<const float*>(tensors.k_scale.data);
  params.v = static_cast<const float*>(tensors.v_scale.data);
  set_scale_strides(tensors.k_scale, params.stride_k_b, params.stride_k_h, params.stride_k_s);
  set_scale_strides(tensors.v_scale, params.stride_v_b, params.stride_v_h, params.stride_v_s);
  return params;
}

bool sm90_forward_describable(const ForwardTensors& tensors, bool varlen, bool paged) noexcept {
  const std::int64_t h_kv = std::max<std::int64_t>(tensors.k.shape[1], 1);
  const std::int64_t group = std::max<std::int64_t>(tensors.q.shape[1] / h_kv, 1);
  if (paged &&
      (tensors.k.shape[0] == 0 || heads_a_page(tensors.k) == 0 || heads_a_page(tensors.v) != heads_a_page(tensors.k)))
    return false;
  const bool bounded =
      (!varlen || boundable(tensors.o)) && (!(varlen || paged) || (boundable(tensors.k) && boundable(tensors.v)));
  return bounded && describable(tensors.q, group) && describable(tensors.o, group) && describable(tensors.k, 1) &&
         describable(tensors.v, 1);
}

Sm90ForwardMaps sm90_forward_maps(const ForwardTensors& tensors, const KernelSpec& spec) noexcept {
  const std::int64_t h_kv = tensors.k.shape[1];
  const auto rows = static_cast<std::uint32_t>(spec.tile_m);
  const auto heads = static_cast<std::uint32_t>(heads_of_a_tile(spec, tensors.q.shape[1] / h_kv, tensors.q.shape[2]));
  Sm90ForwardMaps maps;
  maps.q = query_map(tensors.q, h_kv, heads, rows / heads);
  maps.o = spec.varlen ? bounded_map(tensors.o, kWarpRows) : query_map(tensors.o, h_kv, 1, kWarpRows);
  if (spec.page_size != 0) {
    const int box = rows_together(spec.page_size, spec.tile_n);
    if (spec.is<Sm90Forward>() && spec.as<Sm90Forward>().wide_boxes) {
      maps.k = wide_page_map(tensors.k, box);
      maps.v = wide_page_map(tensors.v, box);
      return maps;
    }
    maps.k = page_map(tensors.k, box);
    maps.v = page_map(tensors.v, box);
    return maps;
  }
  if (spec.varlen) {
    maps.k = bounded_map(tensors.k, spec.tile_n);
    maps.v = bounded_map(tensors.v, spec.tile_n);
    return maps;
  }
  if (tensors.k.shape[2] == 0) {  // nothing is copied, and no tensor need be there
    maps.k = maps.v = maps.q;
    return maps;
  }
  maps.k = head_map(tensors.k, spec.tile_n);
  maps.v = head_map(tensors.v, spec.tile_n);
  return maps;
}

}  // namespace fa::plan
