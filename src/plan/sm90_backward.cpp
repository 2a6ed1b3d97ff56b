#include "plan/sm90_backward.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <span>

#include <fa/error.hpp>
#include <sm90/sm90_backward_layout.cuh>

#include "plan/backward.hpp"
#include "plan/candidates.hpp"
#include "plan/catalogue.hpp"
#include "plan/mask_tiles.hpp"
#include "plan/sm90_backward_pair.hpp"

namespace fa::plan {
namespace {

using sm90::kSlabColumns;

constexpr int kWarpgroupKeys = sm90::kWarpgroupRows;  // rows of scores, which are transposed
constexpr int kMaxConsumers = 3;
// What ptxas gives accumulators and operands of a consumer thread without spilling, by consumer warpgroups: of 255, 240
// and 160.
constexpr int kFragmentRegisters[] = {224, 212, 128};
constexpr int kMaxNarrow = 64;  // head dims of kernels with registers to spare
constexpr std::size_t kMaxSpecs = 4;

struct Tile {
  int tile_m, tile_n, stages;
};

// In order of preference, measured on an H200 (docs/experiments.md).
constexpr Tile kSmall[] = {{128, 128, 2}, {64, 64, 2}};
constexpr Tile kMedium[] = {{64, 128, 2}, {64, 64, 2}};
constexpr Tile kPair[] = {{64, 128, 2}};
constexpr Tile kWide[] = {{64, 128, 6}, {64, 128, 4}};

// With more than plain attention the first may spill.
constexpr Tile kSmallVariants[] = {{128, 128, 2}, {64, 128, 2}, {64, 64, 2}};

/// A tile of a captured tensor lies in registers, which only small tiles of scores leave.
bool loads_ahead(const Problem& problem) noexcept {
  return problem.variants != nullptr && problem.variants->loads_ahead;
}

std::span<const Tile> preferred_tiles(const Problem& problem) noexcept {
  if (is_pair(problem)) return blocks_of_tile(problem) == 4 ? std::span<const Tile>(kWide) : kPair;
  if (loads_ahead(problem)) return kMedium;
  if (std::max(problem.d_qk, problem.d_v) > 64) return kMedium;
  return sm90_backward_is_plain(problem) ? std::span<const Tile>(kSmall) : kSmallVariants;
}

/// What the kernel lays its shared memory and its warps out by.
sm90::BackwardShape shape_of(const KernelSpec& spec) {
  return {.tile_m = spec.tile_m,
          .tile_n = spec.tile_n,
          .d_qk = spec.d_qk,
          .d_v = spec.d_v,
          .stages = spec.stages,
          .write_dq = spec.write_dq,
          .varlen = spec.varlen};
}

int consumers(const KernelSpec& spec) {
  return shape_of(spec).consumers();
}

bool dq_by_rows(const KernelSpec& spec) {
  return shape_of(spec).dq_by_rows();
}

KernelSpec with_tile(const Problem& problem, const Tile& tile, const Fixed& fixed, const BackwardChoice& choice,
                     bool deterministic) {
  KernelSpec spec;
  spec.own = Sm90Backward{};
  spec.arch = problem.arch;
  spec.dtype = problem.dtype;
  spec.d_qk = problem.d_qk;
  spec.d_v = problem.d_v;
  spec.causal = problem.causal;
  spec.aligned = true;
  spec.tile_m = fixed.number("tile_m", tile.tile_m);
  spec.tile_n = fixed.number("tile_n", tile.tile_n);
  spec.stages = fixed.number("stages", tile.stages);
  spec.warps = sm90_backward_warps(spec);  // an override's tile_n may be anything so far
  const bool ordered = deterministic && !needs_tile_lists(problem) && problem.gradients.dq;
  spec.as<Sm90Backward>().ordered_dq = ordered;
  spec.as<Sm90Backward>().split_blocks = choice.split_blocks;
  spec.as<Sm90Backward>().in_turns = choice.in_turns;
  spec.as<Sm90Backward>().rows_without_keys = choice.rows_without_keys;
  spec.write_dq = problem.gradients.dq && (!deterministic || ordered);
  spec.without_dk = !problem.gradients.dk;
  spec.without_dv = !problem.gradients.dv;
  spec.split = choice.leaves_splits();
  spec.varlen = problem.varlen;
  spec.dropout = problem.dropout;
  spec.place_in_memory = problem.reads_place();
  if (problem.variants != nullptr) spec.variants = *problem.variants;
  return spec;
}

/// They differ in how far copies are ahead.
Candidates pair_candidates(const Problem& problem, const BackwardChoice& choice, bool deterministic) {
  Candidates candidates;
  for (const int stages : {2, 3, 4, 6, 8}) {
    const KernelSpec spec =
        as_pair(with_tile(problem, {kPair[0].tile_m, kPair[0].tile_n, stages}, {}, choice, deterministic));
    if (sm90_backward_pair_refusal(spec).empty()) candidates.push_back({spec, 1.0 / stages});
  }
  return candidates;
}

}  // namespace

const char* sm90_backward_misfit(const Problem& problem) noexcept {
  if (problem.arch.sm() != 90 || problem.arch.suffix != 'a') return "sm90 on a GPU of architecture sm_90a";
  if (problem.dtype != DType::f16 && problem.dtype != DType::bf16) return "sm90 with dtype f16 or bf16";
  if (problem.statistics_gradients()) return "sm90 without gradients of statistics";
  if (is_pair(problem)) return sm90_backward_pair_misfit(problem);
  return nullptr;
}

bool sm90_backward_is_plain(const Problem& problem) noexcept {
  return !problem.varlen && !problem.dropout && problem.variants == nullptr;
}

const char* sm90_backward_obstacle(const Problem& problem) noexcept {
  if (!problem.aligned) return "rows of a tensor do not start at multiples of 16 bytes";
  if (!problem.tensor_maps) return "a stride of q, k, v or dout is zero, negative or 2^40 bytes or more";
  if (problem.s_kv == 0) return "there are no keys";
  if (problem.b == 0 || problem.h_q == 0 || problem.h_kv == 0 || problem.s_q == 0) return "there are no rows";
  if (is_pair(problem) && !sm90_backward_is_plain(problem)) {
    return "packed batches, dropout, functions, windows and sinks at head dims above 128 are for another family";
  }
  if (problem.bounded && blocks_of_tile(problem) == 4) return "bounds at head dims above 256 are for another family";
  const bool plain_gradient = loads_ahead(problem) && problem.variants->constant_slopes &&
                              problem.variants->captures.size() == 1 && !problem.varlen && !problem.dropout &&
                              problem.variants->mask.empty();
  if (std::max(problem.d_qk, problem.d_v) > kMaxNarrow && wants_captured_gradients(problem) && !plain_gradient) {
    return "gradients of captures at head dims above 64 leave too few registers";  // beside the sums of dK and dV
  }
  return nullptr;
}

int sm90_backward_warps(const KernelSpec& spec) noexcept {
  return 4 * (consumers(spec) + 1);
}

int sm90_backward_shared_bytes(const KernelSpec& spec) {
  return sm90::shared_layout(shape_of(spec)).bytes;
}

int sm90_backward_registers(const KernelSpec& spec) {
  const int sums = ((spec.without_dk ? 0 : spec.d_qk) + (spec.without_dv ? 0 : spec.d_v)) / 2;
  const int scores = spec.tile_m / 2;   // S or dP
  const int operand = spec.tile_m / 4;  // P or dS, rounded
  // The product for dV takes P's operand while dQ leaves its registers, and at tile_m = 64 while that for dP runs.
  // Without sums the next S is computed beside P and dP.
  const int softmax = spec.sums_keys() ? 2 * scores + (spec.tile_m == 64 ? operand : 0) : 3 * scores;
  const int dq = spec.write_dq ? scores + operand + shape_of(spec).dq_columns() / 2 : 0;
  return sums + std::max(softmax, dq);
}

std::string sm90_backward_refusal(const KernelSpec& spec) {
  if (spec.tile_n < kWarpgroupKeys || spec.tile_n > kMaxConsumers * kWarpgroupKeys ||
      spec.tile_n % kWarpgroupKeys != 0) {
    return fmt::format("tile_n = {}: accepted are 64, 128 and 192", spec.tile_n);
  }
  if (spec.tile_m != 64 && !dq_by_rows(spec)) {
    return fmt::format("tile_m = {}: accepted are 64 and tile_n", spec.tile_m);
  }
  if (!dq_by_rows(spec) && spec.d_qk > consumers(spec) * kSlabColumns) {
    return fmt::format("tile_n = {}: with tile_m = {} each 64 columns of dQ need 64 keys", spec.tile_n, spec.tile_m);
  }
  const int most_stages = spec.write_dq ? 3 : 4;  // the barriers have their place
  if (spec.stages < 2 || spec.stages > most_stages) {
    return fmt::format("stages = {}: accepted are 2 to {}", spec.stages, most_stages);
  }
  if (spec.as<Sm90Backward>().ordered_dq && !spec.write_dq) return "ordered_dq = true: accepted with write_dq = true";
  const int split_blocks = spec.as<Sm90Backward>().split_blocks;
  if (split_blocks < 1 || split_blocks > BackwardChoice::kMaxSplitBlocks) {
    return fmt::format("split_blocks = {}: accepted are 1 to {}", split_blocks, BackwardChoice::kMaxSplitBlocks);
  }
  if (split_blocks > 1 && spec.split) return "splits > 1: accepted with split_blocks = 1";
  if (spec.in_turns() && (spec.split || spec.varlen || split_blocks > 1)) {
    return "in_turns = true: accepted for dense batches, with split_blocks = 1";
  }
  // What the blocks of a cluster add up takes the place of tiles.
  const int sums = spec.tile_n * (spec.d_qk + spec.d_v) * static_cast<int>(sizeof(float));
  if (split_blocks > 1 && sums > sm90::shared_layout(shape_of(spec)).dq) {
    return fmt::format("split_blocks = {}: tile_m = {} and stages = {} leave too little room for sums", split_blocks,
                       spec.tile_m, spec.stages);
  }
  const int shared = sm90_backward_shared_bytes(spec);
  const int shared_limit = limits(spec.arch).shared_per_block;
  if (shared > shared_limit) {
    return fmt::format("tile_m = {}, tile_n = {}, stages = {} need {} bytes of shared memory; {} offers {}",
                       spec.tile_m, spec.tile_n, spec.stages, shared, to_string(spec.arch), shared_limit);
  }
  const int registers = sm90_backward_registers(spec);
  const int offered = kFragmentRegisters[consumers(spec) - 1];
  if (registers > offered) {
    return fmt::format("tile_m = {}, tile_n = {} hold {} registers of fragments a thread; at most {} fit", spec.tile_m,
                       spec.tile_n, registers, offered);
  }
  return {};
}

Candidates sm90_backward_candidates(const Problem& problem, const BackwardChoice& choice, bool deterministic) {
  if (is_pair(problem)) return pair_candidates(problem, choice, deterministic);
  constexpr double kMultiplyAdds = 4096;  // of wgmma, a cycle
  constexpr double kStepCycles = 800;     // what of a step the tensor cores wait for
  constexpr double kTileCycles = 3000;    // its keys come, its sums leave
  Candidates candidates;
  for (const int tile_m : {64, 128, 192}) {
    for (const int tile_n : {64, 128, 192}) {
      for (const int stages : {2, 3}) {
        const KernelSpec spec = with_tile(problem, {tile_m, tile_n, stages}, {}, choice, deterministic);
        if (!sm90_backward_refusal(spec).empty()) continue;
        if (stages == 3 && problem.causal && problem.d_qk > 112) continue;  // spills, and was never the faster
        const double area = double(tile_m) * tile_n;
        const double step = area * (3 * spec.d_qk + 2 * spec.d_v) / kMultiplyAdds + kStepCycles;
        const double steps = std::ceil(double(problem.s_q) / tile_m);
        candidates.push_back({spec, (steps * step + kTileCycles) / (steps * area)});
      }
    }
  }
  return candidates;
}

std::vector<KernelSpec> sm90_backward_specs(const Problem& problem, const Fixed& fixed, const BackwardChoice& choice,
                                            bool deterministic) {
  std::vector<KernelSpec> specs;
  std::string refusal;
  for (const Tile& tile : preferred_tiles(problem)) {
    KernelSpec spec = with_tile(problem, tile, fixed, choice, deterministic);
    if (is_pair(problem)) spec = as_pair(spec);
    fixed.set_others(spec);
    const std::string reason = plan::refusal(spec);
    if (!reason.empty()) {
      refusal = reason;
    } else if (std::ranges::find(specs, spec) == specs.end() && specs.size() < kMaxSpecs) {
      specs.push_back(spec);
    }
  }
  if (!specs.empty()) return specs;
  const bool overridden = fixed.fixes_tile_of(Sm90Backward::kernel());
  throw Error(overridden ? ErrorCode::invalid_argument : ErrorCode::unsupported,
              fmt::format("kernel_backward: no sm90 backward kernel fits: {}", refusal),
              {{"argument", "kernel_backward"}, {"value", refusal}, {"accepted", "tiles that fit the GPU"}});
}

}  // namespace fa::plan
