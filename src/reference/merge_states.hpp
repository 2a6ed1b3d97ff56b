#ifndef FA_SRC_REFERENCE_MERGE_STATES_HPP_
#define FA_SRC_REFERENCE_MERGE_STATES_HPP_

#include <cstdint>
#include <span>

#include <fa/merge.hpp>

namespace fa::reference {

/// A merge in host memory: o as views of rank 4 [b, h_q, s_q, d_v], lse of rank 3.
struct MergeArgs {
  std::span<const AttentionState> states;  ///< stacked: the first
  std::int64_t stacked = 0;                ///< how many lie at the distances below; 0: the states are listed
  std::int64_t stride_o = 0;               ///< in elements
  std::int64_t stride_lse = 0;
  AttentionState merged;  ///< may be one of the states; lse may be undefined
  TensorView sink;        ///< [h_q], may be undefined
  bool sum = false;       ///< without weights: there are no logarithms
};

/// Computed in double and rounded once (docs/numerics.md). A row is read whole before it is written.
void merge_states(const MergeArgs& args);

}  // namespace fa::reference

#endif  // FA_SRC_REFERENCE_MERGE_STATES_HPP_
