// sm90_forward arch=sm_90a dtype=f16 d_qk=192 d_v=128 causal=1 positive_scale=1 tile_m=128 tile_n=112 stages=2 q_buffers=1 softmax_chunks=2 take_turns=1 pack_gqa=0 split=0 min_blocks=1
#include <sm90/sm90_forward.cuh>

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
static_assert(sizeof(fa::kernel::Sm90ForwardParams) == 896);
static_assert(FA_OFFSETOF(fa::kernel::Sm90ForwardParams, map_k) == 128);
static_assert(FA_OFFSETOF(fa::kernel::Sm90ForwardParams, map_o) == 384);
static_assert(FA_OFFSETOF(fa::kernel::Sm90ForwardParams, base) == 512);

struct Config {
  using Element = fa::kernel::f16;
  static constexpr int kHeadDimQk = 192;
  static constexpr int kHeadDimV = 128;
  static constexpr int kTileM = 128;  // query rows of a tile
  static constexpr int kTileN = 112;  // keys of a main-loop step
  static constexpr int kStages = 2;  // K and V tiles in flight
  static constexpr int kQBuffers = 1;  // query tiles in flight
  static constexpr bool kCausal = true;
  static constexpr bool kPositiveScale = true;
  static constexpr int kSoftmaxChunks = 2;  // of a KV tile
  static constexpr bool kTakeTurns = true;  // at the tensor cores
  static constexpr bool kPackGqa = false;
  static constexpr bool kSplit = false;
};
static_assert(fa::sm90::Forward<Config>::kThreads == 384);
static_assert(fa::sm90::Forward<Config>::kSharedBytes == 193536);

FA_KERNEL(fa_sm90_forward, fa::kernel::Sm90ForwardParams, 384, 1) { fa::sm90::forward<Config>(params); }
