// sm90_backward arch=sm_90a dtype=f16 d_qk=256 d_v=192 causal=1 tile_m=64 tile_n=128 stages=2 write_dq=1 split=0 min_blocks=1 cluster=2
#include <sm90/sm90_backward_blocks.cuh>

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
static_assert(sizeof(fa::kernel::Sm90BackwardParams) == 1088);
static_assert(FA_OFFSETOF(fa::kernel::Sm90BackwardParams, map_k) == 128);
static_assert(FA_OFFSETOF(fa::kernel::Sm90BackwardParams, map_dout) == 384);
static_assert(FA_OFFSETOF(fa::kernel::Sm90BackwardParams, base) == 512);

struct Config {
  using Element = fa::kernel::f16;
  static constexpr int kHeadDimQk = 256;
  static constexpr int kHeadDimV = 192;
  static constexpr int kTileM = 64;  // query rows of a main-loop step
  static constexpr int kTileN = 128;  // keys of a tile
  static constexpr int kStages = 2;  // Q and dO tiles in flight
  static constexpr bool kCausal = true;
  static constexpr bool kWriteDq = true;
  static constexpr bool kSplit = false;
};
static_assert(fa::sm90::BackwardBlocks<Config>::kThreads == 512);
static_assert(fa::sm90::BackwardBlocks<Config>::kSharedBytes == 230400);

FA_CLUSTER_KERNEL(fa_sm90_backward_pair, fa::kernel::Sm90BackwardParams, 512, 1, 2) { fa::sm90::backward_blocks<Config>(params); }
