// append arch=sm_90a dtype=bf16 d_qk=128 d_v=128 page_size=16 rotary_dims=64 interleaved=0 table=0 aligned=1 warps=8 min_blocks=3
#include <common/append.cuh>

static_assert(sizeof(fa::kernel::AppendParams) == 1384);
static_assert(FA_OFFSETOF(fa::kernel::AppendParams, sin) == 56);
static_assert(FA_OFFSETOF(fa::kernel::AppendParams, slots_64) == 104);
static_assert(FA_OFFSETOF(fa::kernel::AppendParams, stride_k_b) == 128);
static_assert(FA_OFFSETOF(fa::kernel::AppendParams, stride_table_page) == 296);
static_assert(FA_OFFSETOF(fa::kernel::AppendParams, b) == 304);
static_assert(FA_OFFSETOF(fa::kernel::AppendParams, token_blocks) == 356);
static_assert(FA_OFFSETOF(fa::kernel::AppendParams, turns) == 360);

struct Config {
  using Element = fa::kernel::bf16;
  static constexpr int kHeadDimQk = 128;
  static constexpr int kHeadDimV = 128;
  static constexpr int kPageSize = 16;  // 0: a contiguous cache
  static constexpr int kRotaryDims = 64;
  static constexpr int kTable = 0;  // of cosines and sines: 1: of floats, 2: of elements
  static constexpr int kWarps = 8;
  static constexpr bool kInterleaved = false;  // pairs are neighbours
  static constexpr bool kAligned = true;  // rows start at multiples of 16 bytes
  static constexpr bool kOverlaps = true;  // with kernels before or behind it
};

FA_KERNEL(fa_append, fa::kernel::AppendParams, 256, 3) { fa::kernel::append<Config>(params); }
