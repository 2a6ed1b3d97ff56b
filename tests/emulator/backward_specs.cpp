#include "emulator/backward_specs.hpp"

#include <array>
#include <cstddef>

#include "emulator/mutations.hpp"
#include "emulator/pairwise.hpp"
#include "plan/sm80_backward.hpp"
#include "plan/sm90_backward_pair.hpp"

namespace emulator {
namespace {

using fa::DType;
using fa::plan::Arch;
using fa::plan::KernelSpec;
using fa::plan::Op;
using fa::plan::Problem;

constexpr std::array kDTypes{DType::f16, DType::bf16, DType::f32};
constexpr std::array kHeadDims{8, 24, 64, 80};
constexpr std::array kHeadDimsV{0, 8, 40};  // 0: that of q and k

struct MainTile {
  int tile_m, tile_n, warps, warps_n, dq_warps_m;
};
// Grids of warps of every kind: keys only, queries only, both; more columns of warps than groups of 16 queries.
constexpr MainTile kMainTiles[] = {{32, 32, 4, 2, 2}, {32, 32, 2, 2, 1}, {16, 32, 4, 1, 1},
                                   {32, 16, 2, 1, 2}, {64, 32, 4, 1, 2}, {32, 64, 4, 4, 1}};
struct DqTile {
  int tile_m, tile_n, warps;
};
constexpr DqTile kDqTiles[] = {{32, 32, 2}, {32, 16, 1}, {16, 32, 1}};
constexpr Arch kArchs[] = {{8, 0, '\0'}, {9, 0, 'a'}};  // additions one by one, and four at a time

enum Factor : std::size_t {
  dtype,
  d_qk,
  d_v,
  main_tile,
  stages,
  operands,
  causal,
  aligned,
  write_dq,
  split,
  arch,
  dq_tile,
  dq_stages,
  substeps,
  delayed_dq
};

BackwardSpecs to_specs(const Row& row) {
  KernelSpec spec;
  spec.own = fa::plan::Sm80Backward{};
  spec.arch = kArchs[row[arch]];
  spec.dtype = kDTypes[row[dtype]];
  spec.d_qk = kHeadDims[row[d_qk]];
  spec.d_v = kHeadDimsV[row[d_v]] == 0 ? spec.d_qk : kHeadDimsV[row[d_v]];
  spec.causal = row[causal] != 0;
  spec.aligned = row[aligned] != 0;
  BackwardSpecs specs{spec, spec};

  const MainTile& tile = kMainTiles[row[main_tile]];
  specs.main.tile_m = tile.tile_m;
  specs.main.tile_n = tile.tile_n;
  specs.main.warps = tile.warps;
  specs.main.warps_n = tile.warps_n;
  specs.main.as<fa::plan::Sm80Backward>().dq_warps_m = tile.dq_warps_m;
  specs.main.stages = static_cast<int>(row[stages]) + 1;
  specs.main.as<fa::plan::Sm80Backward>().substeps = static_cast<int>(row[substeps]) + 1;
  specs.main.as<fa::plan::Sm80Backward>().operands_in_registers = static_cast<int>(row[operands]);
  specs.main.as<fa::plan::Sm80Backward>().delayed_dq = row[delayed_dq] != 0;
  specs.main.write_dq = row[write_dq] != 0;
  specs.main.split = row[split] != 0;

  specs.dq.own = fa::plan::Sm80BackwardDq{};
  specs.dq.tile_m = kDqTiles[row[dq_tile]].tile_m;
  specs.dq.tile_n = kDqTiles[row[dq_tile]].tile_n;
  specs.dq.warps = kDqTiles[row[dq_tile]].warps;
  specs.dq.stages = static_cast<int>(row[dq_stages]) + 1;
  return specs;
}

/// Of the mma.sync family with some gradients: sums of one kind, over splits or beside exchanged P and dS; dQ alone, by
/// the main kernel and by the pass in its place.
std::vector<BackwardSpecs> find_unwanted_specs() {
  const std::vector<std::size_t> levels{
      kDTypes.size(), kHeadDims.size(), kHeadDimsV.size(), std::size(kMainTiles), 2, 2, 2, 5};
  constexpr fa::Gradients kWanted[] = {
      {true, false, false}, {false, true, true}, {false, true, false}, {false, false, true}, {true, true, false}};
  std::vector<BackwardSpecs> specs;
  const auto make = [&](const Row& row) {
    const fa::Gradients& wanted = kWanted[row[7]];
    BackwardSpecs made =
        to_specs({row[0], row[1], row[2], row[3], 0, 0, row[4], 1, wanted.dq ? row[6] : 0, row[5], row[6], 0, 0, 0, 0});
    made.main.without_dk = !wanted.dk;
    made.main.without_dv = !wanted.dv;
    made.without_dq = !wanted.dq;
    return made;
  };
  for (const Row& row : pairwise_cover(levels, [&](const Row& r) {
         const KernelSpec main = make(r).main;
         return fa::plan::sm80_backward_refusal(main).empty();
       })) {
    specs.push_back(make(row));
  }
  for (const DqTile& tile : kDqTiles) {
    BackwardSpecs alone = specs[static_cast<std::size_t>(&tile - kDqTiles)];
    alone.without_dq = false;
    alone.main = alone.dq;
    alone.main.tile_m = tile.tile_m;
    alone.main.tile_n = tile.tile_n;
    alone.main.warps = tile.warps;
    alone.main.without_dk = alone.main.without_dv = true;
    specs.push_back(alone);
  }
  return specs;
}

std::vector<BackwardSpecs> find_covering_specs() {
  const std::vector<std::size_t> levels{kDTypes.size(),
                                        kHeadDims.size(),
                                        kHeadDimsV.size(),
                                        std::size(kMainTiles),
                                        2,
                                        3,
                                        2,
                                        2,
                                        2,
                                        2,
                                        std::size(kArchs),
                                        std::size(kDqTiles),
                                        2,
                                        2,
                                        2};
  const auto valid = [](const Row& row) { return fa::plan::sm80_backward_refusal(to_specs(row).main).empty(); };
  std::vector<BackwardSpecs> specs;
  for (const Row& row : pairwise_cover(levels, valid)) specs.push_back(to_specs(row));
  const std::vector<BackwardSpecs> more = find_unwanted_specs();
  specs.insert(specs.end(), more.begin(), more.end());
  return specs;
}

struct Sm90Shape {
  DType dtype;
  int d_qk, d_v, tile_m, tile_n, stages;
  bool causal, write_dq, split, ordered = false;
  int split_blocks = 1;
  fa::Gradients wanted = {};
  bool in_turns = false;
};
constexpr fa::Gradients kDqAlone{true, false, false};
constexpr fa::Gradients kDkAlone{false, true, false};
constexpr fa::Gradients kWithoutDq{false, true, true};
constexpr fa::Gradients kWithoutDk{true, false, true};

// dQ by columns (64 x 128 and 64 x 192) and by rows; head dims that fill their slabs or not, that leave warpgroups
// without columns of dQ, that differ.
constexpr Sm90Shape kSm90Shapes[] = {
    {DType::bf16, 64, 64, 64, 128, 2, false, true, false},
    {DType::f16, 128, 128, 64, 128, 2, true, true, false},
    {DType::bf16, 64, 64, 128, 128, 2, true, true, false},
    {DType::bf16, 8, 24, 64, 128, 2, true, true, false},
    {DType::f16, 72, 24, 64, 64, 2, false, true, true},
    {DType::bf16, 80, 64, 64, 128, 3, true, false, false},
    {DType::f16, 96, 96, 64, 128, 2, false, true, false},
    {DType::bf16, 128, 72, 64, 64, 2, true, true, true},
    {DType::f16, 80, 80, 128, 128, 2, false, false, true},
    {DType::f16, 40, 48, 64, 192, 3, true, true, false},
    // dQ in order: by rows, by columns of which the last warpgroup has a part, over splits.
    {DType::bf16, 64, 64, 128, 128, 2, false, true, false, true},
    {DType::f16, 96, 96, 64, 128, 3, true, true, false, true},
    {DType::bf16, 40, 24, 64, 64, 2, true, true, true, true},
    // By the blocks of a cluster: as many as may be emulated, whole groups of columns and parts, dQ in order.
    {DType::bf16, 64, 64, 64, 128, 2, true, true, false, false, 2},
    {DType::f16, 72, 24, 64, 64, 3, false, true, false, false, 4},
    {DType::bf16, 40, 48, 128, 128, 2, true, true, false, true, 2},
    {DType::f16, 128, 128, 64, 64, 2, true, false, false, false, 3},
    // Some gradients: dQ by columns, by rows, over splits and clusters, in order; without it; one of the sums.
    {DType::bf16, 128, 128, 64, 128, 2, true, true, false, false, 1, kDqAlone},
    {DType::f16, 64, 64, 128, 128, 2, false, true, false, false, 1, kDqAlone},
    {DType::bf16, 40, 24, 64, 64, 3, true, true, true, false, 1, kDqAlone},
    {DType::f16, 72, 96, 64, 128, 2, true, true, false, false, 2, kDqAlone},
    {DType::bf16, 96, 96, 64, 128, 2, true, true, false, true, 1, kDqAlone},
    {DType::f16, 128, 128, 64, 128, 2, true, false, false, false, 1, kWithoutDq},
    {DType::bf16, 64, 64, 128, 128, 2, false, false, true, false, 1, kDkAlone},
    {DType::f16, 96, 80, 64, 128, 2, true, true, false, false, 1, kWithoutDk},
    {DType::bf16, 64, 64, 64, 128, 2, false, true, false, false, 2, {true, true, false}},
    // dK and dV in turns: one and several key tiles, head dims that differ, dQ in order too, one of the sums.
    {DType::bf16, 64, 64, 128, 128, 2, true, true, false, false, 1, {}, true},
    {DType::f16, 128, 128, 64, 128, 2, false, true, false, false, 1, {}, true},
    {DType::bf16, 72, 24, 64, 64, 2, true, true, false, true, 1, {}, true},
    {DType::f16, 40, 48, 64, 64, 3, false, true, false, true, 1, {}, true},
    {DType::bf16, 96, 80, 64, 64, 2, true, true, false, false, 1, kWithoutDk, true},
};

// By pairs of blocks: columns in two halves, in unequal ones, in parts of slabs; rings of two and three.
constexpr Sm90Shape kPairShapes[] = {
    {DType::bf16, 256, 256, 64, 128, 2, true, true, false},
    {DType::f16, 192, 128, 64, 128, 2, false, true, true},
    {DType::f16, 136, 72, 64, 128, 3, true, true, false},
    {DType::bf16, 96, 200, 64, 128, 2, false, false, false},
    {DType::bf16, 160, 160, 64, 128, 2, true, false, true},
    {DType::bf16, 136, 72, 64, 128, 2, true, true, false, true},
    {DType::f16, 192, 192, 64, 128, 2, false, true, true, true},
    {DType::bf16, 256, 192, 64, 128, 2, true, true, false, false, 1, kDqAlone},
    {DType::f16, 136, 136, 64, 128, 2, true, true, false, true, 1, kDqAlone},
    {DType::bf16, 192, 256, 64, 128, 2, true, false, true, false, 1, kWithoutDq},
    {DType::f16, 160, 72, 64, 128, 3, false, true, false, false, 1, kWithoutDk},
};

// By four blocks: whole columns, parts of a slab, blocks without columns; rings of few slabs and of more than a tile
// has.
constexpr Sm90Shape kWideShapes[] = {
    {DType::bf16, 512, 512, 64, 128, 4, true, true, false},
    {DType::f16, 264, 320, 64, 128, 6, false, true, true, false, 1, kWithoutDk},
    {DType::bf16, 392, 264, 64, 128, 2, true, true, false, true},
    {DType::bf16, 320, 264, 64, 128, 7, true, true, false, false, 1, kDqAlone},
    {DType::f16, 264, 264, 64, 128, 8, true, false, true, false, 1, kWithoutDq},
};

BackwardSpecs to_specs(const Sm90Shape& shape) {
  KernelSpec spec;
  spec.own = fa::plan::Sm90Backward{};
  spec.arch = {9, 0, 'a'};
  spec.dtype = shape.dtype;
  spec.d_qk = shape.d_qk;
  spec.d_v = shape.d_v;
  spec.causal = shape.causal;
  BackwardSpecs both{spec, spec};
  both.main.tile_m = shape.tile_m;
  both.main.tile_n = shape.tile_n;
  both.main.warps = 4 * (shape.tile_n / 64 + 1);
  both.main.stages = shape.stages;
  both.main.write_dq = shape.write_dq;
  both.main.without_dk = !shape.wanted.dk;
  both.main.without_dv = !shape.wanted.dv;
  both.without_dq = !shape.wanted.dq;
  both.main.as<fa::plan::Sm90Backward>().ordered_dq = shape.ordered;
  both.main.as<fa::plan::Sm90Backward>().split_blocks = shape.split_blocks;
  both.main.as<fa::plan::Sm90Backward>().in_turns = shape.in_turns;
  both.main.as<fa::plan::Sm90Backward>().rows_without_keys = shape.causal;  // the planned ones have none
  both.main.split = shape.split;
  both.dq.own = fa::plan::Sm80BackwardDq{};
  both.dq.tile_m = kDqTiles[0].tile_m;
  both.dq.tile_n = kDqTiles[0].tile_n;
  both.dq.warps = kDqTiles[0].warps;
  both.dq.stages = 1;
  return both;
}

std::vector<BackwardSpecs> find_sm90_backward_specs() {
  std::vector<BackwardSpecs> specs;
  for (const Sm90Shape& shape : kSm90Shapes) specs.push_back(to_specs(shape));
  for (const Sm90Shape& shape : kPairShapes) {
    BackwardSpecs both = to_specs(shape);
    both.main = fa::plan::as_pair(both.main);
    specs.push_back(both);
  }
  for (const Sm90Shape& shape : kWideShapes) {
    BackwardSpecs both = to_specs(shape);
    both.main = fa::plan::as_pair(both.main);
    specs.push_back(both);
  }
  return specs;
}

Problem problem(Arch gpu, DType type, int d, bool is_causal, std::int64_t s, std::int64_t h_q, std::int64_t h_kv) {
  Problem p;
  p.arch = gpu;
  p.dtype = type;
  p.d_qk = d;
  p.d_v = d;
  p.causal = is_causal;
  p.h_q = h_q;
  p.h_kv = h_kv;
  p.s_q = s;
  p.s_kv = s;
  return p;
}

}  // namespace

const std::vector<BackwardSpecs>& covering_backward_specs() {
  static const std::vector<BackwardSpecs> specs = find_covering_specs();
  return specs;
}

const std::vector<BackwardSpecs>& sm90_backward_specs() {
  static const std::vector<BackwardSpecs> specs = find_sm90_backward_specs();
  return specs;
}

std::vector<Problem> planned_backward_problems() {
  const auto& [ampere, hopper] = kArchs;
  return {problem(ampere, DType::bf16, 64, true, 200, 1, 1), problem(ampere, DType::f16, 128, false, 150, 2, 1),
          problem(hopper, DType::f32, 64, true, 100, 2, 1), problem(hopper, DType::bf16, 64, true, 200, 1, 1),
          problem(hopper, DType::f16, 128, false, 150, 2, 1)};
}

BackwardSpecs planned_backward_specs(const Problem& problem, bool deterministic) {
  const fa::plan::BackwardPlan plan = fa::plan::plan_backward(problem, {}, deterministic);
  return {plan.main.front(), plan.dq.empty() ? KernelSpec{} : plan.dq.front()};
}

std::vector<BackwardSpecs> all_backward_specs() {
  std::vector<BackwardSpecs> specs = covering_backward_specs();
  specs.insert(specs.end(), sm90_backward_specs().begin(), sm90_backward_specs().end());
  for (const Problem& problem : planned_backward_problems()) {
    for (const bool deterministic : {false, true}) specs.push_back(planned_backward_specs(problem, deterministic));
  }
  for (const Mutation& mutation : mutations()) {
    if (is_backward(mutation)) specs.push_back(backward_specs_of(mutation));
  }
  return specs;
}

}  // namespace emulator
