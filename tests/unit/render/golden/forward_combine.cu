// forward_combine arch=sm_80 dtype=f16 d_v=72 warps=4
#include <common/forward_combine.cuh>

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
  using Element = fa::kernel::f16;
  static constexpr int kHeadDimV = 72;
  static constexpr int kWarps = 4;
};

FA_KERNEL(fa_forward_combine, fa::kernel::ForwardParams, 128, 1) { fa::kernel::forward_combine<Config>(params); }
