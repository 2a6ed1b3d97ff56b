// clear_padding arch=sm_80 dtype=f16 warps=4
#include <common/clear_padding.cuh>

static_assert(sizeof(fa::kernel::PaddingParams) == 64);
static_assert(FA_OFFSETOF(fa::kernel::PaddingParams, cu) == 8);
static_assert(FA_OFFSETOF(fa::kernel::PaddingParams, stride_s) == 32);
static_assert(FA_OFFSETOF(fa::kernel::PaddingParams, b) == 40);
static_assert(FA_OFFSETOF(fa::kernel::PaddingParams, value) == 60);

struct Config {
  using Element = fa::kernel::f16;
  static constexpr int kWarps = 4;
};

FA_KERNEL(fa_clear_padding, fa::kernel::PaddingParams, 128, 1) { fa::kernel::clear_padding<Config>(params); }
