#include "plan/schedule.hpp"

#include <algorithm>

#include <common/even_cut.cuh>

#include "plan/forward_launch.hpp"
#include "plan/mask_tiles.hpp"
#include "plan/rounding.hpp"
#include "plan/variant_launch.hpp"

namespace fa::plan {
namespace {

constexpr int kScheduleWarps = 32;
constexpr std::int64_t kScheduleThreads = 32 * kScheduleWarps;
// Up to here one block takes less time than others do to tell it that they have finished.
constexpr std::int64_t kSlotsOfOneBlock = 2 * kScheduleThreads;

std::int64_t rows_each(const Problem& problem, const KernelSpec& attention) noexcept {
  return heads_of_a_tile(attention, problem.h_q / problem.h_kv, problem.s_q);
}

/// Of the grid, those of a cluster together.
std::int64_t heads_of(const Problem& problem, const KernelSpec& attention) noexcept {
  return problem.h_q / (rows_each(problem, attention) * attention.cluster());
}

/// A request's lengths.
struct Lengths {
  std::int64_t rows = 0, keys = 0, begin = 0;
};

Lengths lengths_of(const Problem& problem, const HostLengths& from, std::size_t i) {
  Lengths found;
  found.rows = problem.s_q;
  if (problem.varlen) {
    const std::int64_t first = std::clamp<std::int64_t>(from.cu_q[i], 0, problem.total_q);
    found.rows = std::clamp<std::int64_t>(from.cu_q[i + 1], first, problem.total_q) - first;
    if (!from.used_q.empty()) found.rows = std::clamp<std::int64_t>(from.used_q[i], 0, found.rows);
    found.rows = std::min(found.rows, problem.s_q);
  }
  found.keys = std::clamp<std::int64_t>(from.used_kv[i], 0, problem.s_kv);
  if (!from.begin.empty()) found.begin = std::clamp<std::int64_t>(from.begin[i], 0, found.keys);
  return found;
}

/// KV tiles from the first to the last key that any row of a query tile sees, row by row.
std::int64_t tiles_of(const Problem& problem, const KernelSpec& attention, const Lengths& lengths, std::int64_t first,
                      std::int64_t last) {
  const bool window = problem.variants != nullptr && problem.variants->left_window;
  const bool chunked = problem.variants != nullptr && problem.variants->chunked;
  std::int64_t begin = -1, end = 0;
  for (std::int64_t row = first; row <= last; ++row) {
    const std::int64_t stands = row + lengths.keys - lengths.rows;
    std::int64_t low = lengths.begin, high = lengths.keys;
    if (problem.causal) high = std::min(high, stands + problem.window_right + 1);
    if (window) low = std::max(low, stands - problem.window_left);
    if (chunked) {
      const std::int64_t chunk = (stands < 0 ? stands - problem.chunk + 1 : stands) / problem.chunk * problem.chunk;
      low = std::max(low, chunk);
      high = std::min(high, chunk + problem.chunk);
    }
    if (row == first) begin = low;
    end = high;
  }
  return end > begin ? ceil_div(end, attention.tile_n) - begin / attention.tile_n : 0;
}

/// Schedule::whole_items: where a part of a tile's keys costs as much as several of them, 128 KB of partial results and
/// their merge. Or where heads have to keep pace, whose rows of 4 or 8 bits share lines of memory.
int whole_items(const KernelSpec& attention) noexcept {
  if (attention.is<Sm90WideForward>()) return kernel::kLatentItemCost;
  const bool stored = attention.is<Sm80Forward>() && attention.stored() && !attention.as<Sm80Forward>().value_in_key;
  return stored ? kernel::kItemCost : 0;
}

int item_cost(const KernelSpec& attention) noexcept {
  return whole_items(attention) != 0 ? whole_items(attention) : kernel::kItemCost;
}

/// Walks along the line of all heads' items, which are `pitch` apart, to place `at`.
kernel::PartStart start_at(const std::vector<kernel::WorkItem>& items, std::int64_t cost, std::int64_t pitch,
                           std::int64_t heads, std::int64_t at, std::int64_t length, int item_cost, bool whole) {
  using kernel::kFewestTiles;
  kernel::PartStart start{};
  std::int64_t head = 0;
  while (head < heads && (cost == 0 || at >= head * pitch + cost)) ++head;
  start.head = static_cast<int>(head);
  if (head == heads) return start;
  at = std::max(at, head * pitch);
  std::size_t item = 0;
  const auto end_of = [&](std::size_t i) { return i + 1 < items.size() ? items[i + 1].start : cost; };
  while (at - head * pitch >= end_of(item)) ++item;
  const std::int64_t item_start = head * pitch + items[item].start;
  const std::int64_t tiles = end_of(item) - items[item].start - item_cost;
  std::int64_t tile = at - item_start - item_cost;
  if (whole) tile = kernel::even_cut(tiles, tile, item_cost, item_start, length);
  const bool ends = tile >= kFewestTiles && tiles - tile < kFewestTiles;
  const bool wraps = ends && item + 1 == items.size();
  const std::size_t from = wraps ? 0 : ends ? item + 1 : item;
  start.item = static_cast<int>(from);
  start.head += wraps ? 1 : 0;
  start.batch = items[from].batch;
  start.m_block = items[from].m_block;
  if (ends || tile < kFewestTiles) return start;
  start.tile = static_cast<int>(tile);
  // Walk to both sides, part by part.
  std::int64_t first = at / length;
  std::int64_t last = first;
  while (first * length >= item_start + item_cost + kFewestTiles) --first;
  while ((last + 1) * length <= item_start + item_cost + tiles - kFewestTiles) ++last;
  start.first_part = static_cast<int>(first);
  start.last_part = static_cast<int>(last);
  return start;
}

/// Whether each of a call's few parts has a multiprocessor, as splits of dense tensors have.
bool has_multiprocessors(const Problem& problem, const KernelSpec& attention, const ScheduleShape& shape,
                         int multiprocessors) noexcept {
  if (!attention.is<Sm90Forward>() || !attention.own_parts()) return false;
  const int head_dim = std::max(attention.d_qk, attention.d_v);
  return kernel::has_few_parts(attention.min_blocks > 1, head_dim, static_cast<int>(rows_each(problem, attention))) &&
         shape.slots * heads_of(problem, attention) <= multiprocessors;
}

}  // namespace

KernelSpec schedule_spec(const KernelSpec& attention) {
  KernelSpec spec;
  spec.own = Schedule{.whole_items = whole_items(attention)};
  spec.arch = attention.arch;
  spec.dtype = attention.dtype;
  spec.causal = attention.causal;
  spec.tile_m = attention.tile_m;
  spec.tile_n = attention.tile_n;
  spec.pack_gqa = attention.pack_gqa;
  spec.varlen = attention.varlen;
  spec.warps = kScheduleWarps;
  spec.variants.left_window = attention.variants.left_window;
  spec.variants.chunked = attention.variants.chunked;
  return spec;
}

std::size_t ScheduleShape::bytes() const noexcept {
  const auto rounded_parts = static_cast<std::size_t>(ceil_div(2 * parts, 4) * 4);
  return sizeof(kernel::ScheduleHead) + static_cast<std::size_t>(parts + 1) * sizeof(kernel::PartStart) +
         rounded_parts * sizeof(std::int32_t) +
         static_cast<std::size_t>(segments * segment_slots) * sizeof(kernel::WorkItem);
}

ScheduleShape schedule_shape(const Problem& problem, const KernelSpec& attention, int multiprocessors) noexcept {
  ScheduleShape shape;
  const std::int64_t rows = (problem.varlen ? problem.total_q : problem.s_q) * rows_each(problem, attention);
  shape.slots =
      problem.varlen ? slots(rows, attention.tile_m, problem.b) : ceil_div(rows, attention.tile_m) * problem.b;
  shape.segments =
      shape.slots <= kSlotsOfOneBlock
          ? 1
          : static_cast<int>(std::min<std::int64_t>(ceil_div(shape.slots, kScheduleThreads), kernel::kMostSegments));
  shape.segment_slots = ceil_div(shape.slots, kScheduleThreads * shape.segments) * kScheduleThreads;
  // A part has at least so many tiles of an item, or an item.
  const std::int64_t pieces =
      std::max<std::int64_t>(ceil_div(problem.s_kv, attention.tile_n) / kernel::kFewestTiles, 1);
  std::int64_t most = 0;
  if (__builtin_mul_overflow(shape.slots * heads_of(problem, attention), pieces, &most)) most = INT64_MAX;
  const int each =
      problem.bounded || has_multiprocessors(problem, attention, shape, multiprocessors) ? 1 : attention.min_blocks;
  const std::int64_t blocks = std::int64_t{multiprocessors} * each / attention.cluster();
  shape.parts = static_cast<int>(std::clamp<std::int64_t>(blocks, 1, std::max<std::int64_t>(most, 1)));
  return shape;
}

std::int64_t partial_rows(const Problem& problem, const KernelSpec& attention, const ScheduleShape& shape) noexcept {
  const std::int64_t rows = problem.s_q * rows_each(problem, attention);
  return 2 * shape.parts * attention.cluster() * std::min<std::int64_t>(rows, attention.tile_m);
}

std::uint64_t schedule_tag(const Problem& problem, const KernelSpec& attention, const ScheduleShape& shape) noexcept {
  std::uint64_t tag = 1;
  const Variants* const variants = problem.variants;
  for (const std::int64_t value :
       {std::int64_t{attention.tile_m}, std::int64_t{attention.tile_n}, std::int64_t{attention.pack_gqa},
        std::int64_t{problem.varlen}, problem.b, problem.h_q, problem.h_kv, problem.s_q, problem.s_kv, problem.total_q,
        std::int64_t{problem.causal}, std::int64_t{causal_shift(problem)},
        variants != nullptr && variants->left_window ? problem.window_left : -1,
        variants != nullptr && variants->chunked ? problem.chunk : 0, std::int64_t{shape.parts},
        std::int64_t{attention.cluster()}}) {
    tag = mix_tag(tag, static_cast<std::uint64_t>(value));
  }
  return tag;
}

HostSchedule schedule_on_host(const Problem& problem, const KernelSpec& attention, const HostLengths& lengths,
                              int parts) {
  HostSchedule schedule;
  const std::int64_t group = rows_each(problem, attention);
  std::int64_t cost = 0;
  for (std::size_t i = 0; i < static_cast<std::size_t>(problem.b); ++i) {
    const Lengths request = lengths_of(problem, lengths, i);
    const std::int64_t rows = request.rows * group;
    for (std::int64_t first = 0; first < rows; first += attention.tile_m) {
      const std::int64_t last = std::min<std::int64_t>(first + attention.tile_m, rows) - 1;
      schedule.items.push_back({static_cast<int>(i), static_cast<int>(first / attention.tile_m), cost});
      cost += item_cost(attention) + tiles_of(problem, attention, request, first / group, last / group);
    }
  }
  const std::int64_t heads = heads_of(problem, attention);
  std::int64_t length = ceil_div(cost * heads, parts);
  const bool whole = whole_items(attention) != 0;
  if (whole) {
    length = kernel::whole_length(length, cost, static_cast<std::int64_t>(schedule.items.size()), heads, parts);
  }
  length = std::max<std::int64_t>(length, item_cost(attention) + kernel::kFewestTiles);
  const std::int64_t pitch = kernel::head_pitch(cost, length, heads, parts);
  for (std::int64_t part = 0; part <= parts; ++part) {
    schedule.starts.push_back(
        start_at(schedule.items, cost, pitch, heads, part * length, length, item_cost(attention), whole));
  }
  return schedule;
}

}  // namespace fa::plan
