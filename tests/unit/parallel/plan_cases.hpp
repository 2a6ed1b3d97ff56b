#ifndef FA_TESTS_UNIT_PARALLEL_PLAN_CASES_HPP_
#define FA_TESTS_UNIT_PARALLEL_PLAN_CASES_HPP_

#include <string>
#include <vector>

#include "parallel/problem.hpp"

namespace fa::test {

inline std::string to_text(const parallel::Problem& p) {
  return std::to_string(p.ranks) + " ranks " + to_string(p.layout) + " " + to_string(p.scheme) + " ulysses " +
         std::to_string(p.ulysses) + " lengths " + std::to_string(p.lengths_q.size()) + " of " +
         std::to_string(p.lengths_q[0]) + "/" + std::to_string(p.lengths_kv[0]) + (p.causal ? " causal" : "") +
         " window " + std::to_string(p.window_left) + "," + std::to_string(p.window_right) + " chunk " +
         std::to_string(p.chunk) + (p.functions ? " functions" : "") + " late " + std::to_string(p.late_heads);
}

/// Every scheme, layout, mask and kind of length, of `ranks` ranks.
inline std::vector<parallel::Problem> plan_cases(int ranks) {
  std::vector<parallel::Problem> all;
  const auto add_masks = [&](parallel::Problem p) {
    for (int mask = 0; mask < 6; ++mask) {
      parallel::Problem q = p;
      q.causal = mask == 1 || mask == 2 || mask == 5;
      if (mask == 2) q.window_left = 5;
      if (mask == 3) q.window_left = q.window_right = 3;
      if (mask == 4) q.chunk = 2 * ranks;
      q.functions = mask == 5;
      q.sink = q.dlse = mask == 3;
      all.push_back(q);
      if (p.scheme != Scheme::ring || p.ulysses == ranks) continue;
      q.late_heads = q.late_gradient_heads = 1;
      all.push_back(q);
    }
  };
  for (const ShardLayout layout : {ShardLayout::contiguous, ShardLayout::zigzag, ShardLayout::striped}) {
    for (const Scheme scheme : {Scheme::ring, Scheme::all_gather}) {
      for (const int ulysses : {1, 2, ranks}) {
        if (ranks % ulysses != 0 || (ulysses == ranks && scheme == Scheme::all_gather)) continue;
        parallel::Problem p;
        p.ranks = ranks;
        p.layout = layout;
        p.scheme = scheme;
        p.ulysses = ulysses;
        p.h_kv = 2 * ulysses;
        p.h_q = 2 * p.h_kv;
        p.head_groups = scheme == Scheme::all_gather ? 2 : 1;
        p.d_qk = p.d_v = 8;
        p.lengths_q = p.lengths_kv = {4 * ranks};
        add_masks(p);
        p.lengths_kv = {8 * ranks};
        add_masks(p);
        p.packed = true;
        p.lengths_q = p.lengths_kv = {2 * ranks, 0, 6 * ranks, 4 * ranks};
        add_masks(p);
        if (scheme != Scheme::ring || ulysses > 1) continue;
        p.dense_rows = true;  // which a ring alone sends as they lie
        add_masks(p);
      }
    }
  }
  return all;
}

}  // namespace fa::test

#endif  // FA_TESTS_UNIT_PARALLEL_PLAN_CASES_HPP_
