// sm80_forward arch=sm_90a dtype=bf16 d_qk=192 d_v=128 causal=1 positive_scale=1 aligned=1 tile_m=128 tile_n=64 warps=8 stages=2 q_in_registers=0 loop_bodies=1 conditional_rescale=1 pack_gqa=0 split=0 min_blocks=1
#include <sm80/sm80_forward.cuh>

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
  using Element = fa::kernel::bf16;
  static constexpr int kHeadDimQk = 192;
  static constexpr int kHeadDimV = 128;
  static constexpr int kTileM = 128;  // query rows of a thread block
  static constexpr int kTileN = 64;  // keys of a main-loop step
  static constexpr int kWarps = 8;
  static constexpr int kStages = 2;  // K and V tiles in flight
  static constexpr int kLoopBodies = 1;
  static constexpr bool kCausal = true;
  static constexpr bool kPositiveScale = true;
  static constexpr bool kAligned = true;  // rows start at multiples of 16 bytes
  static constexpr bool kQInRegisters = false;
  static constexpr bool kConditionalRescale = true;
  static constexpr bool kPackGqa = false;
  static constexpr bool kSplit = false;
};
static_assert(fa::sm80::Forward<Config>::kSharedBytes == 137216);

FA_KERNEL(fa_sm80_forward, fa::kernel::ForwardParams, 256, 1) { fa::sm80::forward<Config>(params); }
