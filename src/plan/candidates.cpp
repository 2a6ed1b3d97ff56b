#include "plan/candidates.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

#include "plan/catalogue.hpp"

namespace fa::plan {
namespace {

/// Variants of one tile mostly run alike: no more than this many of them, before every tile has had its turn.
constexpr std::ptrdiff_t kVariantsOfATile = 2;

bool same_tile(const KernelSpec& a, const KernelSpec& b) noexcept {
  return &a.kernel() == &b.kernel() && a.tile_m == b.tile_m && a.tile_n == b.tile_n && a.warps == b.warps &&
         a.warps_n == b.warps_n;
}

/// Each kernel once, `first` in front, the cheapest behind it; equal costs in the order of their texts, so that the
/// order is the same everywhere.
std::vector<KernelSpec> ranked(Candidates candidates, const KernelSpec& first, std::size_t most) {
  std::vector<std::pair<double, std::string>> keys;
  std::vector<std::size_t> order;
  for (const Candidate& candidate : candidates) {
    order.push_back(order.size());
    keys.emplace_back(candidate.cost, canonical(candidate.spec));
  }
  std::ranges::sort(order, [&](std::size_t a, std::size_t b) { return keys[a] < keys[b]; });
  std::vector<KernelSpec> result{first};
  for (const bool any : {false, true}) {
    for (const std::size_t i : order) {
      const KernelSpec& spec = candidates[i].spec;
      if (result.size() >= most) return result;
      const auto variants =
          std::ranges::count_if(result, [&](const KernelSpec& other) { return same_tile(spec, other); });
      const bool in_turn = any || variants < kVariantsOfATile;
      if (in_turn && std::ranges::find(result, spec) == result.end()) result.push_back(spec);
    }
  }
  return result;
}

void append(Candidates* to, Candidates from) {
  to->insert(to->end(), std::make_move_iterator(from.begin()), std::make_move_iterator(from.end()));
}

}  // namespace

std::vector<KernelSpec> forward_candidates(const Problem& problem, const Fixed& fixed, const KernelSpec& first,
                                           std::size_t most) {
  const Choice choice = choose(problem, fixed);
  Candidates all;
  const ForwardFamily& family = forward_family(choice.family);
  append(&all, family.candidates(problem, choice));
  // With few query rows all families wait for memory; with many, the preferred one is far ahead and compiling others a
  // waste.
  const ForwardFamily& other = last_forward_family(problem);
  // Clusters merge their splits, parts and splits of requests are counted by tiles: no choice of both families'.
  const bool alone = choice.split_blocks > 1 || choice.own_parts || choice.splits_request;
  const bool either = fixed.family == Family::automatic && choice.short_query && !alone && &other != &family;
  if (either) append(&all, other.candidates(problem, choice));
  return ranked(std::move(all), first, most);
}

std::vector<KernelSpec> backward_candidates(const Problem& problem, const Fixed& fixed, const KernelSpec& first,
                                            std::size_t most) {
  if (first.op() == Op::backward_dq) return {first};
  const BackwardChoice choice = choose_backward(problem, fixed);
  const bool deterministic = !first.write_dq || first.ordered_dq();
  return ranked(backward_family(choice.family).candidates(problem, choice, deterministic), first, most);
}

}  // namespace fa::plan
