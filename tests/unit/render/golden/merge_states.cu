// merge_states arch=sm_90a dtype=bf16 d_v=128 states=2 float_result=1 aligned=1 warps=8 min_blocks=3
#include <common/merge_states.cuh>

static_assert(sizeof(fa::kernel::MergeStatesParams) == 1152);
static_assert(FA_OFFSETOF(fa::kernel::MergeStatesParams, lse) == 128);
static_assert(FA_OFFSETOF(fa::kernel::MergeStatesParams, sink) == 272);
static_assert(FA_OFFSETOF(fa::kernel::MergeStatesParams, stride_o) == 280);
static_assert(FA_OFFSETOF(fa::kernel::MergeStatesParams, stride_merged_lse) == 1072);
static_assert(FA_OFFSETOF(fa::kernel::MergeStatesParams, states) == 1120);
static_assert(FA_OFFSETOF(fa::kernel::MergeStatesParams, head_axis) == 1148);

struct Config {
  using Element = fa::kernel::bf16;
  static constexpr int kHeadDimV = 128;
  static constexpr int kStates = 2;  // o of a state: 0: of Element, 1: of floats, 2: of either
  static constexpr int kWarps = 8;
  static constexpr bool kFloatResult = true;
  static constexpr bool kAligned = true;  // rows start at multiples of 16 bytes
  static constexpr bool kOverlaps = true;  // with kernels before or behind it
};

FA_KERNEL(fa_merge_states, fa::kernel::MergeStatesParams, 256, 3) { fa::kernel::merge_states<Config>(params); }
