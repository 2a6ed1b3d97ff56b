#include "plan/sm90_backward_pair.hpp"

#include <fmt/format.h>

#include <algorithm>

#include <sm90/sm90_sizes.cuh>

namespace fa::plan {
namespace {

using sm90::kSlabColumns;
using sm90::kSlabRowBytes;

constexpr int kAboveOne = 128;  // head dims that one block serves
constexpr int kAboveTwo = 256;  // and that two serve
constexpr int kMaxHeadDim = 512;
constexpr int kWideColumns = 128;  // of each of four
constexpr int kTileM = 64;
constexpr int kTileN = 128;
constexpr int kRowSlabBytes = kTileM * kSlabRowBytes;
constexpr int kKeySlabBytes = kTileN * kSlabRowBytes;
constexpr int kBarrierBytes = 1024;

int slabs(int d) noexcept {
  return (d + kSlabColumns - 1) / kSlabColumns;
}

/// Slabs of a row that the first, or the second block has.
int own_slabs(int rank, int d) noexcept {
  return rank == 0 ? (slabs(d) + 1) / 2 : slabs(d) / 2;
}

int block_bytes(const KernelSpec& spec, int rank) {
  const int score_head_dim = rank == 0 ? spec.d_qk : spec.d_v;
  const int own_of_scores = own_slabs(rank, score_head_dim);
  const int own_of_sums = own_slabs(rank, rank == 0 ? spec.d_v : spec.d_qk);
  const int keys = slabs(score_head_dim) + (rank == 0 ? 0 : own_slabs(1, spec.d_qk));
  const int more = rank == 0 ? 1 : 0;  // block 0 has a buffer more where it waits for Q
  const int rest = (1 + more) * (slabs(score_head_dim) - own_of_scores);
  return keys * kKeySlabBytes + ((spec.stages + more) * own_of_scores + own_of_sums + rest) * kRowSlabBytes;
}

/// Keys of the scores, those of dQ, the columns of Q and dO, and the ring for the scores.
int wide_block_bytes(const KernelSpec& spec) {
  const int keys = slabs(std::max(spec.d_qk, spec.d_v));
  return (keys + 2 * slabs(kWideColumns) + spec.stages) * kRowSlabBytes +
         (spec.write_dq ? slabs(kWideColumns) * kKeySlabBytes : 0);
}

bool is_wide(const KernelSpec& spec) noexcept {
  return spec.cluster() == 4;
}

/// Of dQ on its way out.
int dq_bytes(const KernelSpec& spec) {
  return kTileM * (is_wide(spec) ? kWideColumns : own_slabs(0, spec.d_qk) * kSlabColumns) * 4;
}

}  // namespace

bool is_pair(const Problem& problem) noexcept {
  return blocks_of_tile(problem) > 1;
}

int blocks_of_tile(int d_qk, int d_v) noexcept {
  const int d = std::max(d_qk, d_v);
  return d > kAboveTwo ? 4 : d > kAboveOne ? 2 : 1;
}

int sm90_backward_box_keys(const KernelSpec& spec) noexcept {
  return spec.is<Sm90BackwardPair>() && is_wide(spec) ? spec.tile_n / 2 : spec.tile_n;
}

const char* sm90_backward_pair_misfit(const Problem& problem) noexcept {
  if (std::max(problem.d_qk, problem.d_v) > kMaxHeadDim) return "sm90 with head dims up to 512";
  if (blocks_of_tile(problem) == 4) {
    return std::min(problem.d_qk, problem.d_v) > kAboveTwo ? nullptr
                                                           : "sm90 with both head dims above 256 where one is";
  }
  if (std::min(problem.d_qk, problem.d_v) <= kSlabColumns) {
    return "sm90 with both head dims above 64 where one is above 128";
  }
  return nullptr;
}

KernelSpec as_pair(KernelSpec spec) {
  spec.own = Sm90BackwardPair{.ordered_dq = spec.ordered_dq()};
  spec.warps = kSm90BackwardPairWarps;
  return spec;
}

int sm90_backward_pair_shared_bytes(const KernelSpec& spec) {
  const int exchanged = 2 * spec.tile_m * spec.tile_n * 2;  // P and dS
  return exchanged + (spec.write_dq ? dq_bytes(spec) : 0) + kBarrierBytes +
         (is_wide(spec) ? wide_block_bytes(spec) : std::max(block_bytes(spec, 0), block_bytes(spec, 1)));
}

int sm90_backward_pair_registers(const KernelSpec& spec) {
  if (is_wide(spec)) return kWideColumns;  // of dK and of dV half each
  return (own_slabs(0, spec.d_qk) + own_slabs(0, spec.d_v)) * kSlabColumns / 2;
}

std::string sm90_backward_pair_refusal(const KernelSpec& spec) {
  if (spec.tile_m != kTileM) return fmt::format("tile_m = {}: above head dim 128 accepted is 64", spec.tile_m);
  if (spec.tile_n != kTileN) return fmt::format("tile_n = {}: above head dim 128 accepted is 128", spec.tile_n);
  const int most_stages = is_wide(spec) ? 8 : 4;
  if (spec.stages < 2 || spec.stages > most_stages) {
    return fmt::format("stages = {}: accepted are 2 to {}", spec.stages, most_stages);
  }
  const int shared = sm90_backward_pair_shared_bytes(spec);
  const int limit = limits(spec.arch).shared_per_block;
  if (shared <= limit) return {};
  return fmt::format("stages = {} need {} bytes of shared memory; {} offers {}", spec.stages, shared,
                     to_string(spec.arch), limit);
}

}  // namespace fa::plan
