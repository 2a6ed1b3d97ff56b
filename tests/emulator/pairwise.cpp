#include "emulator/pairwise.hpp"

#include <random>
#include <set>
#include <tuple>
#include <utility>

namespace emulator {
namespace {

using Pair = std::tuple<std::size_t, std::size_t, std::size_t, std::size_t>;  // factor, level, factor, level

constexpr int kCandidates = 60;  // rows tried for each row taken
constexpr int kPatience = 400;   // draws for one pair before it counts as impossible

std::set<Pair> all_pairs(const std::vector<std::size_t>& levels) {
  std::set<Pair> pairs;
  for (std::size_t f = 0; f < levels.size(); ++f) {
    for (std::size_t g = f + 1; g < levels.size(); ++g) {
      for (std::size_t i = 0; i < levels[f]; ++i) {
        for (std::size_t j = 0; j < levels[g]; ++j) pairs.insert({f, i, g, j});
      }
    }
  }
  return pairs;
}

template <class Visit>
void for_each_pair(const Row& row, const Visit& visit) {
  for (std::size_t f = 0; f < row.size(); ++f) {
    for (std::size_t g = f + 1; g < row.size(); ++g) visit(Pair{f, row[f], g, row[g]});
  }
}

}  // namespace

std::vector<Row> pairwise_cover(const std::vector<std::size_t>& levels, const std::function<bool(const Row&)>& valid) {
  std::mt19937 engine(1);
  std::set<Pair> open = all_pairs(levels);
  std::vector<Row> rows;
  while (!open.empty()) {
    const Pair wanted = *open.begin();
    Row best;
    std::size_t best_gain = 0;
    for (int draw = 0, found = 0; draw < kPatience && found < kCandidates; ++draw) {
      Row row(levels.size());
      for (std::size_t f = 0; f < levels.size(); ++f) row[f] = engine() % levels[f];
      row[std::get<0>(wanted)] = std::get<1>(wanted);
      row[std::get<2>(wanted)] = std::get<3>(wanted);
      if (!valid(row)) continue;
      ++found;
      std::size_t gain = 0;
      for_each_pair(row, [&](const Pair& pair) { gain += open.count(pair); });
      if (gain <= best_gain) continue;
      best_gain = gain;
      best = std::move(row);
    }
    if (best.empty()) {
      open.erase(wanted);
      continue;
    }
    for_each_pair(best, [&](const Pair& pair) { open.erase(pair); });
    rows.push_back(std::move(best));
  }
  return rows;
}

}  // namespace emulator
