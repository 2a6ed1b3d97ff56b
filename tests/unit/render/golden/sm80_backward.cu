// sm80_backward arch=sm_90a dtype=bf16 d_qk=192 d_v=128 causal=1 aligned=1 tile_m=64 tile_n=64 warps=8 warps_n=4 dq_warps_m=2 substeps=1 stages=2 operands_in_registers=0 write_dq=1 delayed_dq=0 split=0 min_blocks=1
#include <sm80/sm80_backward.cuh>

static_assert(sizeof(fa::kernel::BackwardParams) == 544);
static_assert(FA_OFFSETOF(fa::kernel::BackwardParams, q) == 0);
static_assert(FA_OFFSETOF(fa::kernel::BackwardParams, dout) == 32);
static_assert(FA_OFFSETOF(fa::kernel::BackwardParams, dv) == 72);
static_assert(FA_OFFSETOF(fa::kernel::BackwardParams, lse_log2) == 80);
static_assert(FA_OFFSETOF(fa::kernel::BackwardParams, partial) == 112);
static_assert(FA_OFFSETOF(fa::kernel::BackwardParams, stride_q_b) == 120);
static_assert(FA_OFFSETOF(fa::kernel::BackwardParams, stride_lse_b) == 240);
static_assert(FA_OFFSETOF(fa::kernel::BackwardParams, stride_dv_s) == 352);
static_assert(FA_OFFSETOF(fa::kernel::BackwardParams, b) == 360);
static_assert(FA_OFFSETOF(fa::kernel::BackwardParams, padded_rows) == 388);
static_assert(FA_OFFSETOF(fa::kernel::BackwardParams, splits) == 408);
static_assert(FA_OFFSETOF(fa::kernel::BackwardParams, scale_log2) == 416);
static_assert(FA_OFFSETOF(fa::kernel::BackwardParams, sequences) == 424);
static_assert(FA_OFFSETOF(fa::kernel::BackwardParams, dropout) == 472);

struct Config {
  using Element = fa::kernel::bf16;
  static constexpr int kHeadDimQk = 192;
  static constexpr int kHeadDimV = 128;
  static constexpr int kTileM = 64;  // query rows of a main-loop step
  static constexpr int kTileN = 64;  // keys of a thread block
  static constexpr int kWarps = 8;
  static constexpr int kWarpsN = 4;  // groups of keys
  static constexpr int kDqWarpsM = 2;  // groups of queries, for dQ
  static constexpr int kSubsteps = 1;  // parts of a warp's queries
  static constexpr int kStages = 2;  // Q and dO tiles in flight
  static constexpr int kOperandsInRegisters = 0;  // 1: V, 2: V and K
  static constexpr bool kCausal = true;
  static constexpr bool kAligned = true;  // rows start at multiples of 16 bytes
  static constexpr bool kWriteDq = true;
  static constexpr bool kDelayedDq = false;
  static constexpr bool kSplit = false;
  static constexpr bool kVectorReduce = true;
};
static_assert(fa::sm80::Backward<Config>::kSharedBytes == 148480);

FA_KERNEL(fa_sm80_backward, fa::kernel::BackwardParams, 256, 1) { fa::sm80::backward<Config>(params); }
