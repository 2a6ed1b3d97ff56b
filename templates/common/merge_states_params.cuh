#ifndef FA_TEMPLATES_COMMON_MERGE_STATES_PARAMS_CUH_
#define FA_TEMPLATES_COMMON_MERGE_STATES_PARAMS_CUH_

#include <common/types.cuh>

namespace fa::kernel {

inline constexpr int kMaxListedStates = 16;

/// Launch parameters of merge_states. Strides are in elements. Rows are numbered over three axes, b, h_q and s_q in the
/// order in which the result has them in memory, the outermost first.
struct MergeStatesParams {
  const void* o[kMaxListedStates];     // [axis 0, axis 1, axis 2, d_v] each; stacked: the first has all
  const float* lse[kMaxListedStates];  // [axis 0, axis 1, axis 2]
  void* merged_o;                      // as o, may be one of them
  float* merged_lse;                   // as lse, may be one of them; null: not wanted
  const float* sink;                   // [h_q], may be null
  int64_t stride_o[kMaxListedStates][3];
  int64_t stride_lse[kMaxListedStates][3];
  int64_t stride_merged_o[3];
  int64_t stride_merged_lse[3];
  int64_t stride_sink;
  int64_t stride_o_state, stride_lse_state;  // stacked: from a state to the next; listed: 0
  int32_t states;
  int32_t listed;      // the states that are listed; 1: stacked
  uint32_t floats;     // bit i: o of state i is of floats, where kinds are mixed
  uint32_t rows;       // of all axes
  uint32_t length[3];  // of each axis
  int32_t head_axis;   // which of them is h_q
};

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_MERGE_STATES_PARAMS_CUH_
