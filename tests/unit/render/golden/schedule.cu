// schedule arch=sm_90a dtype=bf16 causal=0 tile_m=64 tile_n=64 pack_gqa=0 warps=32
#include <common/schedule.cuh>

static_assert(sizeof(fa::kernel::ForwardParams) == 360);
static_assert(FA_OFFSETOF(fa::kernel::ForwardParams, q) == 0);
static_assert(FA_OFFSETOF(fa::kernel::ForwardParams, lse) == 32);
static_assert(FA_OFFSETOF(fa::kernel::ForwardParams, partial_lse) == 48);
static_assert(FA_OFFSETOF(fa::kernel::ForwardParams, stride_q_b) == 64);
static_assert(FA_OFFSETOF(fa::kernel::ForwardParams, stride_o_b) == 136);
static_assert(FA_OFFSETOF(fa::kernel::ForwardParams, stride_lse_s) == 176);
static_assert(FA_OFFSETOF(fa::kernel::ForwardParams, b) == 184);
static_assert(FA_OFFSETOF(fa::kernel::ForwardParams, splits) == 224);
static_assert(FA_OFFSETOF(fa::kernel::ForwardParams, scale_log2) == 232);
static_assert(FA_OFFSETOF(fa::kernel::ForwardParams, sequences) == 240);
static_assert(FA_OFFSETOF(fa::kernel::ForwardParams, dropout) == 288);

struct Config {
  static constexpr int kTileM = 64;  // query rows of a tile
  static constexpr int kTileN = 64;  // keys of a tile
  static constexpr int kWarps = 32;
  static constexpr bool kCausal = false;
  static constexpr bool kPackGqa = false;
  static constexpr bool kOverlaps = true;  // with kernels before or behind it
};
static_assert(fa::kernel::Schedule<Config>::kThreads == 1024);
static_assert(fa::kernel::Schedule<Config>::kSharedBytes == 9232);

FA_KERNEL(fa_schedule, fa::kernel::ForwardParams, 1024, 1) { fa::kernel::schedule<Config>(params); }
