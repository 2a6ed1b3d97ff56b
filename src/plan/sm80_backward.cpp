#include "plan/sm80_backward.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <span>

#include <fa/error.hpp>

#include "plan/candidates.hpp"
#include "plan/catalogue.hpp"

namespace fa::plan {
namespace {

constexpr int kRegistersPerThread = 255;
// What a kernel needs besides the fragments that are counted before ptxas stops spilling: addresses, operands loaded
// ahead, and for fp32 the two halves of every operand. Measured on compiled kernels.
constexpr int kOverhead16Bit = 52;
constexpr int kOverhead32Bit = 110;
constexpr int kOverheadOfStatistics = 40;  // whose gradients are numbers of rows and of keys
// Below this nothing of the main loop's own state fits: an override may go here, the planner does not.
constexpr int kFixedRegisters = 40;
constexpr int kReservedSharedPerBlock = 1024;
constexpr std::size_t kMaxSpecs = 5;
constexpr int kMaxWarps = 16;
constexpr int kMaxTileM = 256;

struct Tile {
  int tile_m, tile_n, warps, warps_n, dq_warps_m, stages;
  int substeps = 1;
  bool delayed_dq = false;
};

// In order of preference; the first that fits the architecture's shared memory and the register file is taken. Shared
// memory's traffic and its waits decide (docs/kernels/sm80_backward.md). Up to d 64 a warp owns 32 keys whole, P and dS
// never leave its registers for dV and dK, and two blocks share a multiprocessor. Beyond, the sums of 32 keys need two
// warps.
constexpr Tile k16Bit64[] = {{64, 128, 4, 4, 2, 1, 2},
                             {64, 128, 4, 4, 2, 2, 2},
                             {64, 128, 4, 4, 2, 1, 4},
                             {64, 64, 4, 2, 2, 1},
                             {32, 64, 4, 2, 2, 1}};
constexpr Tile k16Bit128[] = {{64, 128, 8, 4, 2, 2, 1, true},
                              {64, 128, 8, 4, 2, 2},
                              {64, 128, 8, 4, 2, 1},
                              {64, 64, 8, 2, 2, 1},
                              {32, 64, 8, 4, 2, 1}};
constexpr Tile k16Bit256[] = {{64, 64, 8, 2, 2, 2, 1, true}, {64, 64, 8, 2, 2, 2}, {64, 64, 8, 2, 2, 1},
                              {32, 64, 8, 4, 2, 1},          {32, 32, 8, 2, 2, 1}, {32, 32, 4, 2, 2, 1}};
constexpr Tile k16Bit512[] = {
    {64, 64, 8, 2, 2, 1}, {32, 64, 8, 4, 2, 1}, {32, 32, 8, 2, 2, 1}, {32, 32, 4, 2, 2, 1}, {16, 16, 4, 1, 1, 1}};
constexpr Tile k32Bit64[] = {{64, 64, 8, 4, 4, 1}, {32, 64, 8, 4, 2, 1}, {32, 32, 4, 2, 2, 1}};
constexpr Tile k32Bit128[] = {{64, 64, 8, 4, 2, 1}, {32, 64, 8, 4, 2, 1}, {32, 32, 8, 2, 2, 1}, {32, 32, 4, 2, 2, 1}};
constexpr Tile k32Bit256[] = {{32, 32, 8, 2, 2, 1}, {32, 32, 4, 2, 2, 1}, {16, 16, 4, 1, 1, 1}};

struct DqTile {
  int tile_m, tile_n, warps, stages;
};

constexpr DqTile k16BitDq64[] = {{128, 48, 4, 2}, {128, 32, 4, 2}, {64, 64, 4, 1}, {64, 32, 4, 1}};
constexpr DqTile k16BitDq128[] = {{128, 32, 4, 2}, {128, 32, 4, 1}, {64, 64, 4, 1}, {64, 32, 4, 1}, {32, 32, 2, 1}};
constexpr DqTile k16BitDq256[] = {{64, 32, 4, 1}, {64, 16, 4, 1}, {32, 32, 2, 1}};
constexpr DqTile k32BitDq[] = {{64, 32, 4, 1}, {64, 16, 4, 1}, {32, 16, 2, 1}, {16, 16, 1, 1}};

std::span<const Tile> preferred_tiles(const Problem& problem) {
  using Tiles = std::span<const Tile>;
  const int d = std::max(problem.d_qk, problem.d_v);
  const bool little = has_little_shared(problem.arch);
  if (problem.dtype == DType::f32)
    return d <= 64 ? Tiles(k32Bit64) : d <= 128 && !little ? Tiles(k32Bit128) : k32Bit256;
  if (d > (little ? 128 : 256)) return k16Bit512;
  if (problem.statistics_gradients() && d <= 128) {  // rows have more numbers in registers
    return d <= 64 ? Tiles(k16Bit64).subspan(2) : Tiles(k16Bit128).subspan(3);
  }
  return d <= 64 ? Tiles(k16Bit64) : d <= 128 ? Tiles(k16Bit128) : k16Bit256;
}

std::span<const DqTile> preferred_dq_tiles(const Problem& problem) {
  using Tiles = std::span<const DqTile>;
  const int d = std::max(problem.d_qk, problem.d_v);
  if (problem.dtype == DType::f32 || (d > 128 && has_little_shared(problem.arch))) return k32BitDq;
  if (problem.statistics_gradients() && d <= 128) return Tiles(k16BitDq128).subspan(2);
  return d <= 64 ? Tiles(k16BitDq64) : d <= 128 ? Tiles(k16BitDq128) : k16BitDq256;
}

int pitch(int columns, int element) {
  return (columns * element / 16 | 1) * 16;
}

int ceil_div(int a, int b) {
  return (a + b - 1) / b;
}

/// The grid of warps of the main kernel.
struct Grid {
  explicit Grid(const KernelSpec& spec)
      : warps_m(spec.warps / spec.warps_n),
        query_groups(std::min(spec.tile_m / 16, warps_m)),
        m_tiles(spec.tile_n / spec.warps_n / 16),
        n_tiles(spec.tile_m / query_groups / spec.as<Sm80Backward>().substeps / 8) {}

  int warps_m;
  int query_groups;
  int m_tiles;  ///< of 16 keys, of a warp
  int n_tiles;  ///< of 8 queries, at once
};

int overhead(const KernelSpec& spec) {
  const bool statistics = spec.entropy || spec.max_logit != 0 || spec.column_sums;
  return (spec.dtype == DType::f32 ? kOverhead32Bit : kOverhead16Bit) + (statistics ? kOverheadOfStatistics : 0);
}

int fragment_registers(const KernelSpec& spec) {
  return spec.is<Sm80Backward>() ? sm80_backward_registers(spec) : sm80_backward_dq_registers(spec);
}

int shared_bytes_of(const KernelSpec& spec) {
  return spec.is<Sm80Backward>() ? sm80_backward_shared_bytes(spec) : sm80_backward_dq_shared_bytes(spec);
}

/// Registers a thread with which the kernel does not spill.
int comfortable_registers(const KernelSpec& spec) {
  return fragment_registers(spec) + overhead(spec);
}

int resident_blocks(const KernelSpec& spec) {
  if (spec.bounded) return 1;  // a block has a multiprocessor of its own
  const ArchLimits arch = limits(spec.arch);
  const int registers = (std::min(kRegistersPerThread, comfortable_registers(spec)) + 7) / 8 * 8;
  const int by_registers = arch.registers_per_sm / (spec.threads() * registers);
  const int by_shared = arch.shared_per_sm / (shared_bytes_of(spec) + kReservedSharedPerBlock);
  return std::clamp(std::min(by_registers, by_shared), 1, 4);
}

template <class Which>
KernelSpec common_spec(const Problem& problem) {
  KernelSpec spec;
  spec.own = Which{};
  spec.arch = problem.arch;
  spec.dtype = problem.dtype;
  spec.d_qk = problem.d_qk;
  spec.d_v = problem.d_v;
  spec.causal = problem.causal;
  spec.aligned = problem.aligned;
  spec.varlen = problem.varlen;
  spec.dropout = problem.dropout;
  spec.place_in_memory = problem.reads_place();
  if (problem.variants != nullptr) spec.variants = *problem.variants;
  spec.bounded = problem.bounded;
  set_statistics_gradients(problem, spec);
  return spec;
}

void set_sums(const Problem& problem, KernelSpec* spec) {
  spec->without_dk = !problem.gradients.dk;
  spec->without_dv = !problem.gradients.dv;
}

/// The largest divisor of `warps` up to `wanted`.
int divisor(int warps, int wanted) {
  int result = std::clamp(wanted, 1, std::max(warps, 1));
  while (warps % result != 0) --result;
  return result;
}

KernelSpec with_tile(const Problem& problem, const Tile& tile, const Fixed& fixed, bool write_dq) {
  KernelSpec spec = common_spec<Sm80Backward>(problem);
  spec.tile_m = fixed.number("tile_m", tile.tile_m);
  spec.tile_n = fixed.number("tile_n", tile.tile_n);
  spec.warps = fixed.number("warps", tile.warps);
  const int warps = std::clamp(spec.warps, 1, kMaxWarps);  // a wrong `warps` is refused later
  spec.warps_n = divisor(warps, std::min(tile.warps_n, spec.tile_n / 16));
  spec.as<Sm80Backward>().dq_warps_m = divisor(warps, std::min(tile.dq_warps_m, spec.tile_m / 16));
  spec.stages = fixed.number("stages", tile.stages);
  fixed.set_others(spec);
  spec.write_dq = write_dq && problem.gradients.dq;
  set_sums(problem, &spec);
  spec.as<Sm80Backward>().delayed_dq = tile.delayed_dq && spec.write_dq && spec.stages == 2;
  // An override may leave no room for the tile's substeps.
  const bool shared_queries = spec.warps_n < warps && spec.tile_m >= 32;
  if (!shared_queries && spec.tile_m % (16 * tile.substeps) == 0) spec.as<Sm80Backward>().substeps = tile.substeps;
  return spec;
}

// Of the cost model, a multiprocessor's cycles: multiply-adds of mma.sync, bytes of shared memory, exponentials, and
// bytes added to memory.
constexpr double kMultiplyAdds = 1024;
constexpr double kMultiplyAdds32Bit = 170;  // three tf32 products for one
constexpr double kSharedBytes = 128;
constexpr double kExponentials = 16;
constexpr double kAddedBytes = 24;
constexpr double kStepCycles = 600;  // waits and barriers of a step

/// Cycles for a query row and a key; see candidates.hpp.
double cost_of(const KernelSpec& spec, const Problem& problem) {
  const Grid grid(spec);
  const double element = double(size_of(spec.dtype));
  const double area = double(spec.tile_m) * spec.tile_n;
  const double d = spec.d_qk + spec.d_v;
  const double tensor = area * (d + d + spec.d_qk) / (spec.dtype == DType::f32 ? kMultiplyAdds32Bit : kMultiplyAdds);
  const double keys = double(spec.tile_n) / spec.warps_n;
  const double queries = double(spec.tile_m) / grid.query_groups;
  const double key_width = spec.as<Sm80Backward>().operands_in_registers == 2   ? 0
                           : spec.as<Sm80Backward>().operands_in_registers == 1 ? spec.d_qk
                                                                                : d;
  const double scores = spec.warps * (keys * key_width * spec.as<Sm80Backward>().substeps + queries * d);
  const double exchange = grid.query_groups > 1 ? spec.warps * 2 * keys * spec.tile_m + 2 * area : 0;
  const double sums = spec.warps * spec.tile_m * d / grid.warps_m;
  const double dq = double(spec.warps) * spec.tile_m / spec.as<Sm80Backward>().dq_warps_m * spec.tile_n +
                    double(spec.tile_n) * spec.d_qk * spec.as<Sm80Backward>().dq_warps_m;
  const double shared = (scores + exchange + sums + dq) * element / kSharedBytes;
  const double added = double(spec.tile_m) * spec.d_qk * 4 / kAddedBytes;
  const double cover = spec.min_blocks * (spec.stages > 1 ? 1.3 : 1) * (spec.as<Sm80Backward>().delayed_dq ? 1.2 : 1);
  const double step =
      std::max({tensor, shared, added}) + 0.3 * std::min(tensor, shared) + (area / kExponentials + kStepCycles) / cover;
  const double rows = double(std::max<std::int64_t>(problem.s_q, 1));
  const double wasted = spec.causal ? 1 + (spec.tile_m + spec.tile_n) / rows : 1;
  const std::int64_t blocks = (problem.s_kv + spec.tile_n - 1) / spec.tile_n;
  const double padding = double(blocks) * spec.tile_n / double(std::max<std::int64_t>(problem.s_kv, 1));
  return step / area * wasted * padding;
}

/// What is wrong with the numbers that both kernels have.
std::string misfit(const KernelSpec& spec) {
  if (spec.warps < 1 || spec.warps > kMaxWarps) {
    return fmt::format("warps = {}: accepted are 1 to {}", spec.warps, kMaxWarps);
  }
  if (spec.tile_m < 16 || spec.tile_m % 16 != 0 || spec.tile_m > kMaxTileM) {
    return fmt::format("tile_m = {}: accepted are multiples of 16 up to {}", spec.tile_m, kMaxTileM);
  }
  if (spec.tile_n < 16 || spec.tile_n % 16 != 0 || spec.tile_n > 256) {
    return fmt::format("tile_n = {}: accepted are multiples of 16 up to 256", spec.tile_n);
  }
  if (spec.stages < 1 || spec.stages > 2) return fmt::format("stages = {}: accepted are 1 and 2", spec.stages);
  return {};
}

/// What there is not enough of.
std::string shortage(const KernelSpec& spec) {
  const int shared = shared_bytes_of(spec);
  const int shared_limit = limits(spec.arch).shared_per_block;
  if (shared > shared_limit) {
    return fmt::format("tile_m = {}, tile_n = {}, stages = {} need {} bytes of shared memory; {} offers {}",
                       spec.tile_m, spec.tile_n, spec.stages, shared, to_string(spec.arch), shared_limit);
  }
  const int registers = fragment_registers(spec);
  const int offered = std::min(kRegistersPerThread, limits(spec.arch).registers_per_sm / spec.threads() / 8 * 8);
  if (registers + kFixedRegisters > offered) {
    return fmt::format("tile_m = {}, tile_n = {}, warps = {} hold {} registers of fragments a thread; at most {} fit",
                       spec.tile_m, spec.tile_n, spec.warps, registers, offered - kFixedRegisters);
  }
  return {};
}

/// The candidates that fit, those first that should not spill.
class FittingSpecs {
 public:
  void add(KernelSpec spec, const std::string& refusal) {
    if (!refusal.empty()) {
      refusal_ = refusal;
      return;
    }
    spec.min_blocks = resident_blocks(spec);
    const bool comfortable = comfortable_registers(spec) <= kRegistersPerThread;
    std::vector<KernelSpec>& list = comfortable ? comfortable_ : others_;
    if (std::ranges::find(list, spec) == list.end()) list.push_back(spec);
  }

  std::vector<KernelSpec> take(bool overridden) && {
    comfortable_.insert(comfortable_.end(), others_.begin(), others_.end());
    if (comfortable_.size() > kMaxSpecs) comfortable_.resize(kMaxSpecs);
    if (!comfortable_.empty()) return std::move(comfortable_);
    throw Error(overridden ? ErrorCode::invalid_argument : ErrorCode::unsupported,
                fmt::format("kernel_backward: no sm80 backward kernel fits: {}", refusal_),
                {{"argument", "kernel_backward"}, {"value", refusal_}, {"accepted", "tiles that fit the GPU"}});
  }

 private:
  std::vector<KernelSpec> comfortable_;
  std::vector<KernelSpec> others_;
  std::string refusal_;
};

}  // namespace

int sm80_backward_shared_bytes(const KernelSpec& spec) {
  const int element = static_cast<int>(size_of(spec.dtype));
  const int pitches = pitch(spec.d_qk, element) + pitch(spec.d_v, element);
  const int stage = spec.tile_m * (pitches + 2 * static_cast<int>(sizeof(float)));
  const int p = spec.tile_n * pitch(spec.tile_m, element);
  const bool exchange = Grid(spec).query_groups > 1;
  return spec.tile_n * pitches + spec.stages * stage + (exchange ? p : 0) +
         (exchange || spec.write_dq ? p : 0) * (spec.as<Sm80Backward>().delayed_dq ? 2 : 1);
}

int sm80_backward_dq_shared_bytes(const KernelSpec& spec) {
  const int element = static_cast<int>(size_of(spec.dtype));
  const int pitches = pitch(spec.d_qk, element) + pitch(spec.d_v, element);
  return (spec.tile_m + spec.stages * spec.tile_n) * pitches;
}

int sm80_backward_registers(const KernelSpec& spec) {
  const Grid grid(spec);
  const int sums = 4 * grid.m_tiles *
                   ((spec.without_dk ? 0 : ceil_div(spec.d_qk / 8, grid.warps_m)) +
                    (spec.without_dv ? 0 : ceil_div(spec.d_v / 8, grid.warps_m)));
  const int scores = 2 * 4 * grid.m_tiles * grid.n_tiles;  // S and dP
  const int dq_warps_d = spec.warps / spec.as<Sm80Backward>().dq_warps_m;
  const int dq = spec.write_dq
                     ? 4 * (spec.tile_m / spec.as<Sm80Backward>().dq_warps_m / 16) * ceil_div(spec.d_qk / 8, dq_warps_d)
                     : 0;
  int operands = 0;
  if (spec.as<Sm80Backward>().operands_in_registers >= 1) operands += 4 * grid.m_tiles * ceil_div(spec.d_v, 16);
  if (spec.as<Sm80Backward>().operands_in_registers >= 2) operands += 4 * grid.m_tiles * ceil_div(spec.d_qk, 16);
  return sums + std::max(scores, dq) + operands;
}

int sm80_backward_dq_registers(const KernelSpec& spec) {
  const int m_tiles = spec.tile_m / spec.warps / 16;
  return m_tiles * (spec.d_qk / 2 + spec.tile_n);
}

int sm80_backward_resident_blocks(const KernelSpec& spec) {
  return resident_blocks(spec);
}

std::string sm80_backward_refusal(const KernelSpec& spec) {
  std::string reason = misfit(spec);
  if (!reason.empty()) return reason;
  if (spec.warps_n < 1 || spec.warps % spec.warps_n != 0 || spec.tile_n % (16 * spec.warps_n) != 0) {
    return fmt::format("warps_n = {}: accepted are divisors of warps = {} and of tile_n / 16 = {}", spec.warps_n,
                       spec.warps, spec.tile_n / 16);
  }
  if (spec.as<Sm80Backward>().dq_warps_m < 1 || spec.warps % spec.as<Sm80Backward>().dq_warps_m != 0 ||
      spec.tile_m % (16 * spec.as<Sm80Backward>().dq_warps_m) != 0) {
    return fmt::format("dq_warps_m = {}: accepted are divisors of warps = {} and of tile_m / 16 = {}",
                       spec.as<Sm80Backward>().dq_warps_m, spec.warps, spec.tile_m / 16);
  }
  if (spec.as<Sm80Backward>().substeps < 1 || spec.as<Sm80Backward>().substeps > spec.tile_m / 16) {
    return fmt::format("substeps = {}: accepted are 1 to tile_m / 16 = {}", spec.as<Sm80Backward>().substeps,
                       spec.tile_m / 16);
  }
  const Grid grid(spec);
  if (grid.warps_m % grid.query_groups != 0 || spec.tile_m % (16 * grid.query_groups) != 0) {
    return fmt::format("tile_m = {}: its groups of 16 rows do not come out even on {} warps", spec.tile_m,
                       grid.warps_m);
  }
  if ((spec.as<Sm80Backward>().substeps > 1 && grid.query_groups > 1) ||
      spec.tile_m / grid.query_groups % (16 * spec.as<Sm80Backward>().substeps) != 0) {
    return fmt::format(
        "substeps = {}: accepted are parts of at least 16 of a warp's {} queries, or 1 where {} warps "
        "share them",
        spec.as<Sm80Backward>().substeps, spec.tile_m / grid.query_groups, grid.query_groups);
  }
  if (spec.as<Sm80Backward>().delayed_dq && (spec.stages != 2 || !spec.write_dq)) {
    return "delayed_dq = true: accepted with stages = 2 and write_dq = true";
  }
  if (spec.as<Sm80Backward>().operands_in_registers < 0 || spec.as<Sm80Backward>().operands_in_registers > 2 ||
      (spec.as<Sm80Backward>().operands_in_registers != 0 && spec.dtype == DType::f32)) {
    return fmt::format("operands_in_registers = {}: accepted are 0 to 2, and 0 for fp32",
                       spec.as<Sm80Backward>().operands_in_registers);
  }
  return shortage(spec);
}

std::string sm80_backward_dq_refusal(const KernelSpec& spec) {
  std::string reason = misfit(spec);
  if (!reason.empty()) return reason;
  if (spec.tile_m % (16 * spec.warps) != 0) {
    return fmt::format("tile_m = {}: accepted are multiples of 16 * warps = {}", spec.tile_m, 16 * spec.warps);
  }
  return shortage(spec);
}

bool sm80_backward_fits(const Problem& problem, const Fixed& fixed, bool deterministic) {
  return std::ranges::any_of(preferred_tiles(problem), [&](const Tile& tile) {
    return sm80_backward_refusal(with_tile(problem, tile, fixed, !deterministic)).empty();
  });
}

std::vector<KernelSpec> sm80_backward_specs(const Problem& problem, const Fixed& fixed, const BackwardChoice& choice,
                                            bool deterministic) {
  FittingSpecs candidates;
  for (const Tile& tile : preferred_tiles(problem)) {
    KernelSpec spec = with_tile(problem, tile, fixed, !deterministic);
    spec.split = choice.splits > 1;
    candidates.add(spec, sm80_backward_refusal(spec));
  }
  return std::move(candidates).take(fixed.fixes_tile_of(Sm80Backward::kernel()));
}

Candidates sm80_backward_candidates(const Problem& problem, const BackwardChoice& choice, bool deterministic) {
  Candidates candidates;
  const auto add = [&](KernelSpec spec) {
    if (!sm80_backward_refusal(spec).empty() || comfortable_registers(spec) > kRegistersPerThread) return;
    spec.min_blocks = resident_blocks(spec);
    candidates.push_back({spec, cost_of(spec, problem)});
  };
  const auto add_pipelines = [&](KernelSpec spec) {
    for (const int substeps : {1, 2, 4}) {
      spec.as<Sm80Backward>().substeps = substeps;
      spec.stages = 1;
      spec.as<Sm80Backward>().delayed_dq = false;
      add(spec);
      spec.stages = 2;
      add(spec);
      spec.as<Sm80Backward>().delayed_dq = spec.write_dq;
      if (spec.as<Sm80Backward>().delayed_dq) add(spec);
    }
  };
  KernelSpec spec = common_spec<Sm80Backward>(problem);
  spec.split = choice.splits > 1;
  spec.write_dq = !deterministic && problem.gradients.dq;
  set_sums(problem, &spec);
  for (const int tile_m : {32, 64, 128}) {
    for (const int tile_n : {32, 64, 96, 128}) {
      for (const int warps : {4, 8}) {
        for (const int warps_n : {1, 2, 4, 8}) {
          if (warps % warps_n != 0 || tile_n % (16 * warps_n) != 0) continue;
          for (const int dq_warps_m : {1, 2, 4}) {
            if (warps % dq_warps_m != 0 || tile_m % (16 * dq_warps_m) != 0) continue;
            spec.tile_m = tile_m;
            spec.tile_n = tile_n;
            spec.warps = warps;
            spec.warps_n = warps_n;
            spec.as<Sm80Backward>().dq_warps_m = dq_warps_m;
            add_pipelines(spec);
          }
        }
      }
    }
  }
  return candidates;
}

std::vector<KernelSpec> sm80_backward_dq_specs(const Problem& problem) {
  FittingSpecs candidates;
  for (const DqTile& tile : preferred_dq_tiles(problem)) {
    KernelSpec spec = common_spec<Sm80BackwardDq>(problem);
    spec.tile_m = tile.tile_m;
    spec.tile_n = tile.tile_n;
    spec.warps = tile.warps;
    spec.stages = tile.stages;
    candidates.add(spec, sm80_backward_dq_refusal(spec));
  }
  return std::move(candidates).take(false);
}

}  // namespace fa::plan
