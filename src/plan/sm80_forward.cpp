#include "plan/sm80_forward.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <span>

#include <fa/error.hpp>

namespace fa::plan {
namespace {

constexpr int kRegistersPerThread = 255;
// Addresses, row statistics and operand fragments in flight, on top of what sm80_forward_registers counts; measured on
// the compiled kernels.
constexpr int kRegisterOverhead = 52;
// What ptxas wants beyond that before it stops spilling: room to load ahead, and the halves of split fp32 operands.
constexpr int kSchedulingRegisters = 16;
constexpr int kF32SplitRegisters = 48;
constexpr int kReservedSharedPerBlock = 1024;

struct Tile {
  int tile_m, tile_n, warps, stages;
  bool q_in_registers;
};

// In order of preference; the first that fits the architecture's shared memory and the register file is taken.
constexpr Tile k16BitSmall[] = {{128, 64, 4, 1, true}, {64, 64, 4, 1, false}};
constexpr Tile k16BitMedium[] = {{128, 64, 8, 1, false}, {64, 64, 4, 1, false}, {64, 32, 4, 1, false}};
constexpr Tile k16BitLarge[] = {{128, 64, 8, 1, false}, {64, 64, 4, 1, false}, {64, 32, 4, 1, false}};
constexpr Tile k16BitShortQuery[] = {{64, 64, 4, 2, false}, {64, 64, 4, 1, false}, {64, 32, 4, 1, false}};
constexpr Tile k32BitSmall[] = {{64, 64, 4, 1, false}, {64, 32, 4, 1, false}};
constexpr Tile k32BitLarge[] = {{64, 32, 4, 1, false}, {64, 16, 4, 1, false}, {32, 16, 2, 1, false}};

std::span<const Tile> preferred_tiles(const Problem& problem, std::int64_t rows) {
  const int d = std::max(problem.d_qk, problem.d_v);
  if (problem.dtype == DType::f32) return d <= 64 ? std::span<const Tile>(k32BitSmall) : k32BitLarge;
  if (rows <= 64) return k16BitShortQuery;
  return d <= 64 ? std::span<const Tile>(k16BitSmall) : d <= 128 ? k16BitMedium : k16BitLarge;
}

int pitch(int columns, int element) {
  return (columns * element / 16 | 1) * 16;
}

bool has_override(const KernelOverride& fixed) {
  return fixed.tile_m != 0 || fixed.tile_n != 0 || fixed.warps != 0 || fixed.stages != 0 || fixed.q_in_registers;
}

int resident_blocks(const KernelSpec& spec) {
  const ArchLimits arch = limits(spec.arch);
  const int margin = spec.dtype == DType::f32 ? kF32SplitRegisters : kSchedulingRegisters;
  const int registers = std::min(kRegistersPerThread, sm80_forward_registers(spec) + margin + 7) / 8 * 8;
  const int by_registers = arch.registers_per_sm / (spec.threads() * std::max(registers, 32));
  const int by_shared = arch.shared_per_sm / (sm80_forward_shared_bytes(spec) + kReservedSharedPerBlock);
  return std::clamp(std::min(by_registers, by_shared), 1, 8);
}

KernelSpec with_tile(const Problem& problem, const Tile& tile, const KernelOverride& fixed) {
  KernelSpec spec;
  spec.family = Family::sm80;
  spec.arch = problem.arch;
  spec.dtype = problem.dtype;
  spec.d_qk = problem.d_qk;
  spec.d_v = problem.d_v;
  spec.causal = problem.causal;
  spec.positive_scale = problem.positive_scale;
  spec.aligned = problem.aligned;
  spec.tile_m = fixed.tile_m != 0 ? fixed.tile_m : tile.tile_m;
  spec.tile_n = fixed.tile_n != 0 ? fixed.tile_n : tile.tile_n;
  spec.warps = fixed.warps != 0 ? fixed.warps : tile.warps;
  spec.stages = fixed.stages != 0 ? fixed.stages : tile.stages;
  spec.q_in_registers = fixed.q_in_registers.value_or(tile.q_in_registers);
  spec.loop_bodies = fixed.loop_bodies != 0 ? fixed.loop_bodies : 1;
  return spec;
}

}  // namespace

int sm80_forward_shared_bytes(const KernelSpec& spec) {
  const int element = static_cast<int>(size_of(spec.dtype));
  const int pitch_qk = pitch(spec.d_qk, element);
  const int pitch_v = pitch(spec.d_v, element);
  return spec.tile_m * std::max(pitch_qk, pitch_v) + spec.stages * spec.tile_n * (pitch_qk + pitch_v);
}

int sm80_forward_registers(const KernelSpec& spec) {
  const int m_tiles = spec.tile_m / spec.warps / 16;
  const int output = m_tiles * spec.d_v / 2;
  const int scores = m_tiles * spec.tile_n / 2;
  const int query = spec.q_in_registers ? m_tiles * spec.d_qk * static_cast<int>(size_of(spec.dtype)) / 8 : 0;
  return output + scores + query + kRegisterOverhead;
}

std::string sm80_forward_refusal(const KernelSpec& spec) {
  if (spec.warps < 1 || spec.warps > 16) return fmt::format("warps = {}: accepted are 1 to 16", spec.warps);
  if (spec.tile_m < 16 || spec.tile_m % (16 * spec.warps) != 0) {
    return fmt::format("tile_m = {}: accepted are multiples of 16 * warps = {}", spec.tile_m, 16 * spec.warps);
  }
  if (spec.tile_n < 16 || spec.tile_n % 16 != 0 || spec.tile_n > 256) {
    return fmt::format("tile_n = {}: accepted are multiples of 16 up to 256", spec.tile_n);
  }
  if (spec.stages < 1 || spec.stages > 4) return fmt::format("stages = {}: accepted are 1 to 4", spec.stages);
  if (spec.loop_bodies < 1 || spec.loop_bodies > 2) {
    return fmt::format("loop_bodies = {}: accepted are 1 and 2", spec.loop_bodies);
  }
  // A row of the widest tile must not have more 16-byte chunks than a warp (Q) or the block (K, V) has threads.
  const int shared = sm80_forward_shared_bytes(spec);
  const int shared_limit = limits(spec.arch).shared_per_block;
  if (shared > shared_limit) {
    return fmt::format("tile_m = {}, tile_n = {}, stages = {} need {} bytes of shared memory; {} offers {}",
                       spec.tile_m, spec.tile_n, spec.stages, shared, to_string(spec.arch), shared_limit);
  }
  const int registers = sm80_forward_registers(spec);
  if (registers > kRegistersPerThread + 5) {
    return fmt::format("tile_m = {}, tile_n = {}, warps = {} need about {} registers a thread; {} exist", spec.tile_m,
                       spec.tile_n, spec.warps, registers, kRegistersPerThread);
  }
  return {};
}

KernelSpec sm80_forward_spec(const Problem& problem, const KernelOverride& fixed, bool pack_gqa, bool split) {
  const std::int64_t rows = pack_gqa ? problem.s_q * (problem.h_q / problem.h_kv) : problem.s_q;
  std::string refusal;
  for (const Tile& tile : preferred_tiles(problem, rows)) {
    KernelSpec spec = with_tile(problem, tile, fixed);
    spec.pack_gqa = pack_gqa;
    spec.split = split;
    refusal = sm80_forward_refusal(spec);
    if (refusal.empty()) {
      spec.min_blocks = resident_blocks(spec);
      return spec;
    }
  }
  throw Error(has_override(fixed) ? ErrorCode::invalid_argument : ErrorCode::unsupported,
              fmt::format("kernel: no sm80 forward kernel fits: {}", refusal),
              {{"argument", "kernel"}, {"value", refusal}, {"accepted", "tiles that fit the GPU"}});
}

}  // namespace fa::plan
