// sm80_backward_dq arch=sm_90a dtype=bf16 d_qk=192 d_v=128 causal=1 aligned=1 tile_m=64 tile_n=64 warps=4 stages=2 min_blocks=1
#include <sm80/sm80_backward_dq.cuh>

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
  static constexpr int kTileM = 64;  // query rows of a thread block
  static constexpr int kTileN = 64;  // keys of a main-loop step
  static constexpr int kWarps = 4;
  static constexpr int kStages = 2;  // K and V tiles in flight
  static constexpr bool kCausal = true;
  static constexpr bool kAligned = true;  // rows start at multiples of 16 bytes
};
static_assert(fa::sm80::BackwardDq<Config>::kSharedBytes == 129024);

FA_KERNEL(fa_sm80_backward_dq, fa::kernel::BackwardParams, 128, 1) { fa::sm80::backward_dq<Config>(params); }
