#include "plan/sm80_fp8_forward.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <span>

#include <fa/error.hpp>

#include "plan/catalogue.hpp"
#include "plan/fixed.hpp"

namespace fa::plan {
namespace {

constexpr int kFirstArch = 89;  // whose mma.sync has 8-bit floats
constexpr int kMaxHeadDim = 256;
constexpr int kHeadDimStep = 16;  // bytes of a chunk
constexpr int kKeyStep = 32;      // of a product
constexpr int kMaxWarps = 8;
constexpr int kMaxTileN = 256;
constexpr int kMostRegisters = 200;  // of fragments, of a thread
constexpr int kReservedSharedPerBlock = 1024;
constexpr int kWideHeadDim = 192;
constexpr int kHarmlessSpill = 48;         // of addresses
constexpr int kHarmlessSpillOfWide = 128;  // of products made of those of 16 bits; above kWideHeadDim

struct Tile {
  int tile_m, tile_n, stages;
  bool q_in_registers;
};

// In order of preference, of those that fit and that ptxas does not spill, of four warps. Two blocks share a
// multiprocessor, so that one computes while the other waits; above head dim 192 one, which has two tiles on their way.
// By registers and bytes alone: on no GPU of 8.9 or 12.0 were they measured.
constexpr Tile kSmall[] = {{128, 64, 1, false}, {64, 128, 1, true}, {64, 64, 1, false}};
constexpr Tile kMedium[] = {{64, 96, 1, true}, {64, 64, 1, true}, {64, 64, 1, false}};
constexpr Tile kLarge[] = {{64, 64, 1, false}, {64, 64, 2, false}, {64, 32, 1, false}};
constexpr Tile kLargest[] = {{64, 64, 2, false}, {64, 64, 1, false}, {64, 32, 2, false}};
constexpr Tile kShort[] = {{64, 64, 2, false}, {64, 64, 1, false}, {64, 32, 1, false}};
constexpr int kWarps = 4;

std::span<const Tile> tiles_for(const Problem& problem, const Choice& choice) noexcept {
  const int d = std::max(problem.d_qk, problem.d_v);
  if (d > kWideHeadDim) return kLargest;
  if (choice.short_query) return kShort;
  if (d <= 64) return kSmall;
  return d <= 128 ? std::span<const Tile>(kMedium) : kLarge;
}

int pitch(int bytes) noexcept {
  return (bytes / 16 | 1) * 16;
}

/// Of accumulators and of Q.
int registers_of(const KernelSpec& spec) noexcept {
  const int m_tiles = spec.tile_m / spec.warps / 16;
  const int query = spec.as<Sm80Fp8Forward>().q_in_registers ? m_tiles * spec.d_qk / 8 : 0;
  return m_tiles * (spec.d_v + spec.tile_n) / 2 + query;
}

KernelSpec with_tile(const Problem& problem, const Fixed& fixed, const Choice& choice, const Tile& tile) {
  KernelSpec spec;
  Sm80Fp8Forward& own = spec.own.emplace<Sm80Fp8Forward>();
  spec.arch = problem.arch;
  spec.dtype = problem.dtype;
  spec.d_qk = problem.d_qk;
  spec.d_v = problem.d_v;
  spec.causal = problem.causal;
  if (problem.variants != nullptr) spec.variants = *problem.variants;
  spec.place_in_memory = problem.reads_place();
  spec.varlen = problem.varlen;
  spec.page_size = problem.page_size;
  spec.bounded = problem.bounded;
  spec.tile_m = fixed.number("tile_m", tile.tile_m);
  spec.tile_n = fixed.number("tile_n", tile.tile_n);
  spec.warps = fixed.number("warps", kWarps);
  spec.stages = fixed.number("stages", tile.stages);
  spec.pack_gqa = choice.pack_gqa;
  spec.split = choice.splits > 1;
  own.q_in_registers = fixed.flag("q_in_registers", tile.q_in_registers);
  own.single_level = fixed.flag("single_level", false);
  own.half_output = problem.o_dtype == DType::f16;
  own.byte_output = problem.o_dtype == DType::e4m3;
  own.key_scales = problem.key_scales;
  own.value_scales = problem.value_scales;
  return spec;
}

}  // namespace

const char* sm80_fp8_forward_misfit(const Problem& problem) noexcept {
  if (problem.dtype != DType::e4m3 && problem.dtype != DType::e5m2) return "sm80_fp8 with dtype e4m3 or e5m2";
  if (problem.arch.sm() < kFirstArch) return "sm80_fp8 on a GPU of compute capability 8.9 or later";
  if (std::max(problem.d_qk, problem.d_v) > kMaxHeadDim || problem.d_qk % kHeadDimStep != 0 ||
      problem.d_v % kHeadDimStep != 0) {
    return "sm80_fp8 with head dims in multiples of 16 up to 256";
  }
  if (problem.precise) return "sm80_fp8 without precise";
  if (problem.invariance != Invariance::none) return "sm80_fp8 with invariance none";
  if (problem.dropout) return "sm80_fp8 without dropout";
  if (problem.accumulate) return "sm80_fp8 without accumulate";
  if (problem.value_in_key) return "sm80_fp8 with value_in_key 0";
  return nullptr;
}

const char* sm80_fp8_forward_obstacle(const Problem& problem) noexcept {
  return problem.aligned ? nullptr : "rows of q, k, v or o do not start at multiples of 16 bytes";
}

int sm80_fp8_forward_decide(const Problem& problem, const Fixed& fixed, Choice& choice) noexcept {
  return fixed.number("tile_m", tiles_for(problem, choice).front().tile_m);
}

int sm80_fp8_forward_shared_bytes(const KernelSpec& spec) {
  const Sm80Fp8Forward& own = spec.as<Sm80Fp8Forward>();
  const bool scales = own.key_scales || own.value_scales;  // there is room for both, then
  const int key = pitch(spec.d_qk) + pitch(spec.d_v) + (scales ? 2 * static_cast<int>(sizeof(float)) : 0);
  return spec.tile_m * pitch(spec.d_qk) + spec.stages * spec.tile_n * key;
}

int sm80_fp8_forward_resident_blocks(const KernelSpec& spec) {
  if (spec.bounded) return 1;
  const int by_shared =
      limits(spec.arch).shared_per_sm / (sm80_fp8_forward_shared_bytes(spec) + kReservedSharedPerBlock);
  return std::clamp(by_shared, 1, std::max(kMaxWarps / spec.warps, 1));
}

int sm80_fp8_forward_harmless_spill(const KernelSpec& spec) {
  if (spec.arch.major != 9 && spec.arch.major != 10) return 0;
  return std::max(spec.d_qk, spec.d_v) > kWideHeadDim ? kHarmlessSpillOfWide : kHarmlessSpill;
}

std::string sm80_fp8_forward_refusal(const KernelSpec& spec) {
  const Sm80Fp8Forward& own = spec.as<Sm80Fp8Forward>();
  if (spec.warps < 1 || spec.warps > kMaxWarps) {
    return fmt::format("warps = {}: accepted are 1 to {}", spec.warps, kMaxWarps);
  }
  if (spec.tile_m < 16 || spec.tile_m % (16 * spec.warps) != 0) {
    return fmt::format("tile_m = {}: accepted are multiples of 16 * warps = {}", spec.tile_m, 16 * spec.warps);
  }
  if (spec.tile_n < kKeyStep || spec.tile_n % kKeyStep != 0 || spec.tile_n > kMaxTileN) {
    return fmt::format("tile_n = {}: accepted are multiples of {} up to {}", spec.tile_n, kKeyStep, kMaxTileN);
  }
  if (spec.stages < 1 || spec.stages > 4) return fmt::format("stages = {}: accepted are 1 to 4", spec.stages);
  if (own.single_level && own.value_scales) return "single_level = 1: accepted is 0 with value_scales";
  const int shared = sm80_fp8_forward_shared_bytes(spec);
  const int shared_limit = limits(spec.arch).shared_per_block;
  if (shared > shared_limit) {
    return fmt::format("tile_m = {}, tile_n = {}, stages = {} need {} bytes of shared memory; {} offers {}",
                       spec.tile_m, spec.tile_n, spec.stages, shared, to_string(spec.arch), shared_limit);
  }
  const int registers = registers_of(spec);
  if (registers > kMostRegisters) {
    return fmt::format("tile_m = {}, tile_n = {}, warps = {} hold {} registers of fragments a thread; at most {} fit",
                       spec.tile_m, spec.tile_n, spec.warps, registers, kMostRegisters);
  }
  return {};
}

std::vector<KernelSpec> sm80_fp8_forward_specs(const Problem& problem, const Fixed& fixed, const Choice& choice) {
  std::string refusal;
  std::vector<KernelSpec> specs;
  for (const Tile& tile : tiles_for(problem, choice)) {
    KernelSpec spec = with_tile(problem, fixed, choice, tile);
    const std::string reason = sm80_fp8_forward_refusal(spec);
    if (!reason.empty()) {
      refusal = reason;
      continue;
    }
    spec.min_blocks = sm80_fp8_forward_resident_blocks(spec);
    if (std::ranges::find(specs, spec) == specs.end()) specs.push_back(std::move(spec));
  }
  if (!specs.empty()) return specs;
  throw Error(ErrorCode::invalid_argument, fmt::format("kernel: no sm80_fp8 forward kernel fits: {}", refusal),
              {{"argument", "kernel"}, {"value", refusal}, {"accepted", "fields that fit the GPU and d_v"}});
}

}  // namespace fa::plan
