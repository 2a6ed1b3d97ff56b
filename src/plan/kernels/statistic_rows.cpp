#include "plan/statistic_rows.hpp"

#include <fmt/format.h>

#include <array>
#include <cstdint>

#include "plan/catalogue.hpp"
#include "plan/forward_launch.hpp"
#include "support/text.hpp"

namespace fa::plan {
namespace {

constexpr Field kFields[] = {
    field<&SpecHead::d_qk>("d_qk").as("kHeadDimQk"),
    field<&SpecHead::causal>("causal").as("kCausal"),
    field<&SpecHead::positive_scale>("positive_scale").as("kPositiveScale"),
    field<&SpecHead::aligned>("aligned").as("kAligned", "rows start at multiples of 16 bytes"),
    field<&SpecHead::tile_m>("tile_m").as("kTileM", "query rows of a thread block"),
    field<&SpecHead::tile_n>("tile_n").as("kTileN", "keys of a step"),
    field<&SpecHead::warps>("warps").as("kWarps"),
    field<&SpecHead::varlen>("varlen").when_set().as("kVarlen"),
    field<&SpecHead::max_logit>("max_logit").when_above_0().as("kMaxLogitGradient", "2: of the scaled scores"),
    field<&SpecHead::max_logit_by_head>("max_logit_by_head").when_set().as("kMaxLogitByHead"),
    field<&SpecHead::column_sums>("column_sums").when_set().as("kColumnSumsGradient"),
};

/// A buffer of query rows, and two of keys. Rows are an odd number of 16 bytes apart.
int bytes_of_tiles(const KernelSpec& spec) {
  const int pitch = (spec.d_qk * static_cast<int>(size_of(spec.dtype)) / 16 | 1) * 16;
  return (spec.tile_m + 2 * spec.tile_n) * pitch;
}

constexpr Kernel kKernel{
    .name = "statistic_rows",
    .op = Op::statistic_rows,
    .unit = {.header = "sm80/sm80_statistic_rows.cuh",
             .params = "StatisticRowsParams",
             .variant_params = "StatisticRowsParams",
             .function = "sm80::statistic_rows",
             .room = "sm80::StatisticRows",
             .asserts_threads = true},
    .fields = kFields,
    .shared_bytes = bytes_of_tiles,
};

struct Tile {
  int tile_m, tile_n, warps;
};
constexpr std::array kTiles{Tile{64, 64, 4}, Tile{64, 32, 4}, Tile{32, 32, 2}, Tile{16, 16, 1}};

}  // namespace

const Kernel& StatisticRows::kernel() noexcept {
  return kKernel;
}

KernelSpec statistic_rows_spec(const Problem& problem) {
  KernelSpec spec;
  spec.own = StatisticRows{};
  spec.arch = problem.arch;
  spec.dtype = problem.dtype;
  spec.d_qk = problem.d_qk;
  spec.causal = problem.causal;
  if (problem.variants != nullptr) spec.variants = *problem.variants;
  set_statistics_gradients(problem, spec);
  spec.entropy = false;                           // which needs nothing of it
  constexpr std::int64_t kMostRows = 0xfffffffe;  // those of a head are told by 32 bits
  if (spec.max_logit_by_head && statistic_rows(problem) / problem.h_q > kMostRows) {
    support::throw_unsupported("statistics.max_logit_gradient",
                               fmt::format("{} rows", statistic_rows(problem) / problem.h_q),
                               fmt::format("at most {} rows of a head with max_logit_by_head", kMostRows));
  }
  spec.positive_scale = problem.positive_scale || !spec.variants.score.empty();
  spec.aligned = problem.aligned;
  spec.varlen = problem.varlen;
  for (const Tile& tile : kTiles) {
    spec.tile_m = tile.tile_m;
    spec.tile_n = tile.tile_n;
    spec.warps = tile.warps;
    if (bytes_of_tiles(spec) <= limits(spec.arch).shared_per_block) return spec;
  }
  support::throw_unsupported("statistics.gradients", problem.d_qk, "a head_dim whose tiles fit the shared memory");
}

std::int64_t statistic_rows_params(const Problem& problem, const KernelSpec& spec, const BackwardTensors& tensors,
                                   double scale, const PackedArgs& packed,
                                   kernel::StatisticRowsParams& params) noexcept {
  ForwardTensors of_forward;
  of_forward.q = tensors.q;
  of_forward.k = tensors.k;
  of_forward.lse = tensors.lse;
  of_forward.variant = tensors.variant;
  const ForwardGrid grid = forward_params(problem, of_forward, scale, 1, spec, 1, packed, params);
  params.dcolumn_sums = static_cast<const float*>(tensors.statistics.dcolumn_sums.data);
  params.sum_group = heads_of_a_sum(problem);
  params.max_keys = nullptr;
  params.max_rows = nullptr;
  params.row_sums = nullptr;
  return grid.grid;
}

int heads_of_a_sum(const Problem& problem) noexcept {
  const bool of_kv_heads = problem.statistics.column_sums == ColumnSums::kv_heads;
  return of_kv_heads && problem.h_kv != 0 ? static_cast<int>(problem.h_q / problem.h_kv) : 1;
}

std::int64_t statistic_rows(const Problem& problem) noexcept {
  return problem.h_q * (problem.varlen ? problem.total_q : problem.b * problem.s_q);
}

}  // namespace fa::plan
