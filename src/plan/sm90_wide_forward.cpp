#include "plan/sm90_wide_forward.hpp"
#include "plan/mask_tiles.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include <fa/error.hpp>
#include <sm90/sm90_wide_layout.cuh>

#include "plan/forward_launch.hpp"
#include "plan/sm90_forward.hpp"

namespace fa::plan {
namespace {

constexpr int kLeastHeadDim = 256;  // up to which a consumer warpgroup of sm90_forward holds O
constexpr int kMostHeadDimQk = 576;
constexpr int kMostHeadDimV = 512;
// From so many requests on clusters pay: measured on an H200 (docs/experiments.md).
constexpr std::int64_t kFewestClusteredRequests = 4;
// Up to so many requests, and query tiles, are in splits, which a warp a row merges: of a schedule's parts one block
// merges a whole query tile. Lengths may differ, and splits are of equal parts of them: not more.
constexpr std::int64_t kMostSplitRequests = 4;
constexpr std::int64_t kMostSplitTiles = 16;
constexpr int kBoxRows = 8;  // of a box of a page, at least: whole rows of the swizzle

sm90::WideShape shape_of(const KernelSpec& spec) {
  return {.tile_n = spec.tile_n,
          .d_qk = spec.d_qk,
          .d_v = spec.d_v,
          .stages = spec.stages,
          .value_in_key = spec.as<Sm90WideForward>().value_in_key};
}

bool holds_values(const sm90::WideShape& shape) noexcept {
  return shape.k_slabs() >= 2 * shape.half_slabs();
}

KernelSpec with_stages(const Problem& problem, const Choice& choice, int stages) {
  KernelSpec spec;
  Sm90WideForward& own = spec.own.emplace<Sm90WideForward>();
  spec.arch = problem.arch;
  spec.dtype = problem.dtype;
  spec.d_qk = problem.d_qk;
  spec.d_v = problem.d_v;
  spec.causal = problem.causal;
  spec.place_in_memory = problem.reads_place();
  if (problem.variants != nullptr) spec.variants = *problem.variants;
  spec.positive_scale = problem.positive_scale || !spec.variants.score.empty();  // a function sees scaled scores
  spec.varlen = problem.varlen;
  spec.bounded = problem.bounded && comes_in_waves(problem) && !choice.scheduled;
  spec.page_size = problem.page_size;
  spec.tile_m = spec.tile_n = kSm90WideTile;
  spec.warps = sm90_wide_forward_warps(spec);
  spec.stages = stages;
  spec.pack_gqa = choice.pack_gqa;
  spec.split = choice.splits > 1;
  own.scheduled = choice.scheduled;
  own.multicast = choice.multicast;
  own.value_in_key = problem.value_in_key && holds_values(shape_of(spec));  // else K is read again, as V
  return spec;
}

}  // namespace

const char* sm90_wide_forward_misfit(const Problem& problem) noexcept {
  const int most = std::max(problem.d_qk, problem.d_v);
  if (problem.arch.sm() != 90 || problem.arch.suffix != 'a') return "sm90_wide on a GPU of architecture sm_90a";
  if (problem.dtype != DType::f16 && problem.dtype != DType::bf16) return "sm90_wide with dtype f16 or bf16";
  if (most <= kLeastHeadDim) return "sm90_wide with a head dim above 256";
  if (problem.d_qk > kMostHeadDimQk || problem.d_v > kMostHeadDimV) return "sm90_wide with head dims up to 576 and 512";
  if (problem.stored()) return "sm90_wide with K and V of the queries' dtype";
  if (problem.fixed_rows()) return "sm90_wide with invariance none, or batch without varlen and page_size";
  if (!problem.contiguous() && problem.page_size % kBoxRows != 0)
    return "sm90_wide with a page_size that is a multiple of 8";
  if (problem.dropout) return "sm90_wide without dropout";
  if (problem.row_statistics()) return "sm90_wide without statistics of rows";
  if (problem.accumulate) return "sm90_wide without accumulate";
  if (problem.variants == nullptr) return nullptr;
  if (!problem.variants->mask.empty()) return "sm90_wide without a mask function";
  if (!problem.variants->captures.empty()) return "sm90_wide without captures";
  if (problem.paged() && problem.variants->chunked) return "sm90_wide with page_size 0, or without chunks";
  return nullptr;
}

int sm90_wide_forward_warps(const KernelSpec& spec) noexcept {
  return shape_of(spec).threads() / 32;
}

int sm90_wide_forward_shared_bytes(const KernelSpec& spec) {
  return sm90::wide_layout(shape_of(spec)).bytes;
}

std::string sm90_wide_forward_refusal(const KernelSpec& spec) {
  const auto& own = spec.as<Sm90WideForward>();
  if (spec.tile_m != kSm90WideTile || spec.tile_n != kSm90WideTile) {
    return fmt::format("tile_m = {}, tile_n = {}: accepted are 64 and 64", spec.tile_m, spec.tile_n);
  }
  const int least = own.value_in_key ? 2 : 1;
  if (spec.stages < least || spec.stages > 2)
    return fmt::format("stages = {}: accepted are {} to 2", spec.stages, least);
  if (spec.d_qk > kMostHeadDimQk || spec.d_v > kMostHeadDimV) {
    return fmt::format("d_qk = {}, d_v = {}: accepted are up to 576 and 512", spec.d_qk, spec.d_v);
  }
  if (spec.split && spec.varlen) return "splits above 1: not of packed queries";
  if (own.multicast && (!own.scheduled || spec.bounded)) return "multicast = true: accepted with schedules";
  if (own.value_in_key && !holds_values(shape_of(spec))) return "value_in_key = true: K has fewer slabs than V";
  const int shared = sm90_wide_forward_shared_bytes(spec);
  const int shared_limit = limits(spec.arch).shared_per_block;
  if (shared > shared_limit) {
    return fmt::format("stages = {} need {} bytes of shared memory; {} offers {}", spec.stages, shared,
                       to_string(spec.arch), shared_limit);
  }
  if ((spec.page_size > 0 && spec.page_size % kBoxRows != 0) || (spec.page_size != 0 && spec.variants.chunked)) {
    return fmt::format("page_size = {}: accepted are multiples of 8, without chunks", spec.page_size);
  }
  if (!spec.variants.mask.empty() || !spec.variants.captures.empty()) {
    return "functions: accepted are scores without captures";
  }
  return {};
}

int sm90_wide_forward_decide(const Problem& problem, const Fixed& fixed, Choice& choice) noexcept {
  if (!problem.paged() || problem.varlen || problem.bounded || problem.h_kv == 0) return kSm90WideTile;
  const std::int64_t group = choice.pack_gqa ? problem.h_q / problem.h_kv : 1;
  const std::int64_t tiles = (problem.s_q * group + kSm90WideTile - 1) / kSm90WideTile * (problem.h_q / group);
  const bool few = problem.b <= kMostSplitRequests && problem.b * tiles <= kMostSplitTiles;
  const bool wanted = few && shares_by_schedule(problem, fixed, choice) && !fixed.flag("scheduled", false);
  choice.splits_request = fixed.has("splits") ? fixed.number("splits") > 1 : wanted;
  return kSm90WideTile;
}

void sm90_wide_forward_form_clusters(const Problem& problem, const Fixed& fixed, Choice& choice) noexcept {
  if (!choice.scheduled || problem.bounded || problem.h_kv == 0) return;
  KernelSpec spec;  // as far as heads of a tile depend on it
  spec.own = Sm90WideForward{};
  spec.tile_m = kSm90WideTile;
  spec.pack_gqa = choice.pack_gqa;
  spec.varlen = problem.varlen;
  const std::int64_t group = problem.h_q / problem.h_kv;
  const std::int64_t sharing = group / heads_of_a_tile(spec, group, problem.s_q);  // heads of the grid, of a KV head
  choice.multicast = sharing % 2 == 0 && fixed.flag("multicast", problem.b >= kFewestClusteredRequests);
}

std::vector<KernelSpec> sm90_wide_forward_specs(const Problem& problem, const Fixed& fixed, const Choice& choice) {
  std::string refusal;
  for (const int stages : {2, 1}) {
    KernelSpec spec = with_stages(problem, choice, fixed.number("stages", stages));
    fixed.set_others(spec);
    refusal = sm90_wide_forward_refusal(spec);
    if (refusal.empty()) return {spec};
  }
  throw Error(fixed.has("stages") ? ErrorCode::invalid_argument : ErrorCode::unsupported,
              fmt::format("kernel: no sm90_wide forward kernel fits: {}", refusal),
              {{"argument", "kernel"}, {"value", refusal}, {"accepted", "stages that fit the GPU"}});
}

int heads_of_spread_places(std::int64_t m_blocks, std::int64_t heads, std::int64_t most, int multiprocessors) noexcept {
  const std::int64_t blocks = std::max(multiprocessors, 1);
  const std::int64_t rounds = (m_blocks * heads + blocks - 1) / blocks;
  for (std::int64_t section = 1; section <= std::min(most, heads); ++section) {
    const std::int64_t places = section * std::max<std::int64_t>(m_blocks, 1);
    const std::int64_t apart = std::gcd(places, blocks);  // places that a block comes by
    if (8 * apart <= places && places / apart <= rounds) return static_cast<int>(section);
  }
  return 0;
}

}  // namespace fa::plan
