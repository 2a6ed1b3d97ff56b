// backward_convert arch=sm_90a dtype=bf16 d_qk=192 aligned=1 warps=8
#include <common/backward_convert.cuh>

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
  static constexpr int kWarps = 8;
  static constexpr bool kAligned = true;  // rows start at multiples of 16 bytes
  static constexpr bool kVectorReduce = true;
  static constexpr bool kOverlaps = true;  // with kernels before or behind it
};

FA_KERNEL(fa_backward_convert, fa::kernel::BackwardParams, 256, 1) { fa::kernel::backward_convert<Config>(params); }
