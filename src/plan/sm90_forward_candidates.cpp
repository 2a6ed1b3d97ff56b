#include <algorithm>
#include <cmath>

#include "plan/candidates.hpp"
#include "plan/sm90_forward.hpp"

namespace fa::plan {
namespace {

// A multiprocessor's cycles: 4096 multiply-adds of wgmma and 16 exponentials each.
constexpr double kMultiplyAdds = 4096;
constexpr double kExponentials = 16;
constexpr double kStepCycles = 120;  // barriers, addresses, the first and last wgmma of a step
// The part of the softmax that tensor cores wait for, by consumer warpgroups; less when they take turns.
constexpr double kExposed[] = {0.8, 0.45, 0.35, 0.25};
constexpr double kExposedInTurns[] = {0.8, 0.3, 0.2, 0.15};
constexpr double kExposedLoad = 0.15;  // of a Q tile, when there is one buffer

double cost_of(const KernelSpec& spec, const Problem& problem) {
  const auto consumers = static_cast<std::size_t>(spec.tile_m / 64 - 1);
  const double area = double(spec.tile_m) * spec.tile_n;
  const double tensor = area * (spec.d_qk + spec.d_v) / kMultiplyAdds;
  const double softmax = area / kExponentials;
  const double exposed = (spec.as<Sm90Forward>().take_turns ? kExposedInTurns : kExposed)[consumers] * softmax;
  const double starved = spec.stages < 3 ? 0.02 * tensor : 0;
  const double step = std::max(tensor, softmax) + exposed + kStepCycles + starved;
  // Whole tiles are computed where only a part is needed: at the end of rows and keys, and along the diagonal.
  const auto padded = [](std::int64_t size, int tile) { return std::ceil(double(size) / tile) * tile; };
  const std::int64_t rows = spec.pack_gqa ? problem.s_q * (problem.h_q / problem.h_kv) : problem.s_q;
  double keys = padded(problem.s_kv, spec.tile_n);
  double needed = double(problem.s_kv);
  if (spec.causal) {
    needed = std::max(needed / 2, 1.0);
    keys = std::min(keys, needed + (spec.tile_m + spec.tile_n) / 2.0);
  }
  const double steps = keys / spec.tile_n;
  const double entry =
      double(spec.tile_m) * (spec.d_qk + spec.d_v) / 64 * (spec.as<Sm90Forward>().q_buffers == 1 ? 1 : kExposedLoad);
  // Warpgroups without rows let the others have their turns: half of a loss.
  const double last = spec.as<Sm90Forward>().own_ends ? 0.5 * (padded(rows, spec.tile_m) - padded(rows, 64)) : 0;
  const double tiles = (padded(rows, spec.tile_m) - last) / spec.tile_m;
  return tiles * (steps * step + entry) / (double(std::max<std::int64_t>(rows, 1)) * needed);
}

}  // namespace

Candidates sm90_forward_candidates(const Problem& problem, const Choice& choice) {
  const KernelSpec planned = sm90_forward_specs(problem, {}, choice).front();
  const std::int64_t group = problem.h_q / problem.h_kv;
  Candidates candidates;
  const auto add = [&](const KernelSpec& spec) {
    const bool whole_groups = !spec.pack_gqa || spec.tile_m % group == 0;
    if (whole_groups && sm90_forward_refusal(spec).empty()) candidates.push_back({spec, cost_of(spec, problem)});
  };
  for (const int tile_m : {64, 128, 192, 256}) {
    if (choice.short_query && tile_m != 64) continue;  // the other warpgroups would have no rows
    for (int tile_n = 48; tile_n <= 224; tile_n += 16) {
      for (const int stages : {2, 3, 4, 6}) {
        if (stages > 4 && tile_m < 256) continue;
        for (const int q_buffers : {1, 2}) {
          KernelSpec spec = planned;
          spec.tile_m = tile_m;
          spec.tile_n = tile_n;
          spec.stages = stages;
          spec.as<Sm90Forward>().q_buffers = q_buffers;
          spec.warps = sm90_forward_warps(spec);
          spec.min_blocks = sm90_forward_has_two_blocks(problem, spec) ? 2 : 1;
          spec.as<Sm90Forward>().skips_hidden = choice.many_diagonals && sm90_forward_may_skip_hidden(spec);
          spec.as<Sm90Forward>().softmax_chunks = sm90_forward_softmax_chunks(spec);
          for (const bool take_turns : {false, true}) {
            spec.as<Sm90Forward>().take_turns = take_turns;
            spec.as<Sm90Forward>().own_ends = sm90_forward_own_ends(spec);
            add(spec);
          }
        }
      }
    }
  }
  return candidates;
}

}  // namespace fa::plan
