#include "plan/mask_tiles.hpp"

#include <algorithm>
#include <functional>
#include <string_view>
#include <utility>

#include "plan/rounding.hpp"

namespace fa::plan {
namespace {

constexpr int kWarps = 32;
constexpr std::int64_t kHeader = 3;  // numbers before the entries of a list
constexpr std::size_t kAlignment = 256;
constexpr std::int64_t kMostNumbers = std::int64_t{1} << 58;  // 2^60 bytes, which no memory has

/// How many lists there are, and how many tiles each is about.
struct Lists {
  std::int64_t batches, heads, blocks, others;

  std::int64_t count() const { return batches * heads * blocks; }
  static std::size_t bytes_of(std::int64_t lists, std::int64_t numbers) {
    std::int64_t all = 0;
    if (__builtin_mul_overflow(lists, numbers, &all) || all > kMostNumbers) all = kMostNumbers;
    const auto bytes = static_cast<std::size_t>(all) * sizeof(std::int32_t);
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  std::size_t list_bytes() const { return bytes_of(count(), others + kHeader); }
  std::size_t bytes() const { return list_bytes() + bytes_of(count(), others); }
};

Lists lists_of(const Problem& problem, const KernelSpec& attention) noexcept {
  const std::int64_t group = problem.h_kv == 0 ? 0 : problem.h_q / problem.h_kv;
  const std::int64_t rows = attention.pack_gqa ? problem.s_q * group : problem.s_q;
  const std::int64_t m_blocks = ceil_div(rows, attention.tile_m);
  const std::int64_t n_blocks = ceil_div(problem.s_kv, attention.tile_n);
  const bool by_key = attention.op() == Op::backward;
  const std::int64_t heads = by_key || attention.pack_gqa ? problem.h_kv : problem.h_q;
  return {problem.variants->mask_on_batch ? problem.b : 1, problem.variants->mask_on_head ? heads : 1,
          by_key ? n_blocks : m_blocks, by_key ? m_blocks : n_blocks};
}

}  // namespace

bool needs_tile_lists(const Problem& problem) noexcept {
  return problem.variants != nullptr && !problem.variants->mask.empty() && !problem.ragged();
}

bool comes_in_waves(const Problem& problem) noexcept {
  return problem.ragged() || needs_tile_lists(problem);
}

KernelSpec mask_tiles_spec(const KernelSpec& attention) {
  KernelSpec spec;
  if (attention.op() == Op::backward) {
    spec.own = MaskKeys{};
  } else {
    spec.own = MaskRows{.in_order = attention.split_keys() > 0};
  }
  spec.arch = attention.arch;
  spec.dtype = attention.dtype;
  spec.causal = attention.causal;
  spec.tile_m = attention.tile_m;
  spec.tile_n = attention.tile_n;
  spec.pack_gqa = attention.pack_gqa;
  spec.place_in_memory = attention.place_in_memory;
  spec.warps = kWarps;
  spec.variants = attention.variants;
  spec.variants.score.clear();
  spec.variants.sink = false;
  return spec;
}

bool reads_tile_lists(Op op) noexcept {
  return op == Op::forward || op == Op::backward || op == Op::backward_dq;
}

std::vector<Alternatives> with_mask_tiles(const Problem& problem, const std::vector<Alternatives>& kernels) {
  if (!needs_tile_lists(problem)) return kernels;
  std::vector<Alternatives> result;
  for (const Alternatives& specs : kernels) {
    if (reads_tile_lists(specs.front().op())) {
      for (const KernelSpec& spec : specs) {
        Alternatives lists{mask_tiles_spec(spec)};
        if (std::ranges::find(result, lists) == result.end()) result.push_back(std::move(lists));
      }
    }
    result.push_back(specs);
  }
  return result;
}

std::size_t mask_tiles_bytes(const Problem& problem, const KernelSpec& attention) noexcept {
  if (!needs_tile_lists(problem)) return 0;
  return lists_of(problem, attention).bytes();
}

std::size_t mask_tiles_bytes(const Problem& problem, std::span<const KernelSpec> attention) noexcept {
  std::size_t most = 0;
  for (const KernelSpec& spec : attention) most = std::max(most, mask_tiles_bytes(problem, spec));
  return most;
}

std::uint64_t mix_tag(std::uint64_t tag, std::uint64_t value) noexcept {
  std::uint64_t mixed = (tag ^ value) * 0x9e3779b97f4a7c15u;
  mixed = (mixed ^ mixed >> 32) * 0xd6e8feb86659fd93u;
  mixed += tag << 1 | 1;
  return (mixed ^ mixed >> 32) | std::uint64_t{1} << 63;
}

std::uint64_t mask_tiles_tag(const Problem& problem, const KernelSpec& attention) noexcept {
  if (!needs_tile_lists(problem)) return 1;
  const Variants& variants = *problem.variants;
  const Lists lists = lists_of(problem, attention);
  std::uint64_t tag = std::hash<std::string_view>{}(variants.mask);
  for (const std::int64_t value :
       {std::int64_t{attention.op() == Op::backward}, std::int64_t{attention.split_keys() > 0},
        std::int64_t{attention.pack_gqa}, std::int64_t{attention.tile_m}, std::int64_t{attention.tile_n}, lists.batches,
        lists.heads, problem.s_q, problem.s_kv, problem.h_kv == 0 ? 0 : problem.h_q / problem.h_kv,
        std::int64_t{problem.causal}, std::int64_t{causal_shift(problem)},
        variants.left_window ? problem.window_left : -1, variants.chunked ? problem.chunk : 0,
        std::int64_t{problem.causal_align == CausalAlign::top_left}}) {
    tag = mix_tag(tag, static_cast<std::uint64_t>(value));
  }
  if (!problem.place) return tag;
  const ShardPlace& place = *problem.place;
  if (place.begin != nullptr) tag = mix_tag(tag, 2);  // no lists of a place that is known
  for (const std::int64_t value : {place.b, place.h_q, place.q, place.kv, place.q_step, place.kv_step, place.whole_b,
                                   place.whole_h_q, place.whole_s_q, place.whole_s_kv}) {
    tag = mix_tag(tag, static_cast<std::uint64_t>(value));
  }
  return tag;
}

MaskTilesGrid mask_tiles_params(const Problem& problem, const KernelSpec& attention, kernel::VariantParams& variant,
                                kernel::MaskTilesParams& params) noexcept {
  const Lists lists = lists_of(problem, attention);
  params = {};
  params.s_q = static_cast<int>(problem.s_q);
  params.s_kv = static_cast<int>(problem.s_kv);
  params.group = static_cast<int>(problem.h_kv == 0 ? 1 : problem.h_q / problem.h_kv);
  params.causal_shift = causal_shift(problem);
  params.heads = static_cast<int>(lists.heads);
  params.blocks = static_cast<int>(lists.blocks);
  params.others = static_cast<int>(lists.others);
  variant.tile_others = params.others;
  params.variant = variant;
  return {lists.count(), lists.list_bytes()};
}

}  // namespace fa::plan
