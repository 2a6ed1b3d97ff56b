// sm90_backward arch=sm_90a dtype=f16 d_qk=128 d_v=72 causal=1 tile_m=64 tile_n=128 stages=2 write_dq=1 split=0 min_blocks=1 varlen=1 dropout=1 left_window=1 sink=1 score=score*gain captures=gain:f32:0:grad
#include <sm90/sm90_backward.cuh>

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
static_assert(sizeof(fa::kernel::BackwardVariantParams) == 1328);
static_assert(sizeof(fa::kernel::CaptureParams) == 88);
static_assert(FA_OFFSETOF(fa::kernel::CaptureParams, strides) == 16);
static_assert(FA_OFFSETOF(fa::kernel::CaptureParams, bits) == 80);
static_assert(sizeof(fa::kernel::VariantParams) == 768);
static_assert(FA_OFFSETOF(fa::kernel::VariantParams, sink) == 704);
static_assert(FA_OFFSETOF(fa::kernel::VariantParams, diagonal) == 720);
static_assert(FA_OFFSETOF(fa::kernel::VariantParams, chunk) == 728);
static_assert(FA_OFFSETOF(fa::kernel::VariantParams, tile_lists) == 744);
static_assert(FA_OFFSETOF(fa::kernel::VariantParams, norms) == 752);
static_assert(FA_OFFSETOF(fa::kernel::VariantParams, b) == 760);
static_assert(sizeof(fa::kernel::Sm90BackwardVariantParams) == 1856);

struct KernelVariant {
  [[maybe_unused]] static constexpr bool kLeftWindow = true;
  [[maybe_unused]] static constexpr bool kChunked = false;
  [[maybe_unused]] static constexpr bool kSink = true;
  [[maybe_unused]] static constexpr bool kScore = true;
  [[maybe_unused]] static constexpr bool kMask = false;
  [[maybe_unused]] static constexpr bool kMaskOnBatch = false;
  [[maybe_unused]] static constexpr bool kMaskOnHead = false;
  [[maybe_unused]] static constexpr float kFactor = 1.0f;  // of what score returns
  [[maybe_unused]] static constexpr int kGradients = 1;
  [[maybe_unused]] static constexpr bool kScoreAlone = false;
  [[maybe_unused]] static constexpr bool kAffine = false;
  [[maybe_unused]] static constexpr int kGradientCapture[] = {0};
  [[maybe_unused]] static constexpr bool kGradientOnQuery[] = {false};
  [[maybe_unused]] static constexpr bool kGradientOnKey[] = {false};
  [[maybe_unused]] static constexpr bool kGradientDistinct[] = {false};
  [[maybe_unused]] static constexpr bool kGradientInSteps[] = {true};

  using Params = fa::kernel::VariantParams;
  using Place = fa::kernel::Place;

  static FA_DEVICE float slopes([[maybe_unused]] const Params& params, [[maybe_unused]] const Place& at, [[maybe_unused]] float raw,
                                float& by_score, [[maybe_unused]] float (&by_capture)[1]) {
    const float t0 = fa::kernel::captured<fa::kernel::f32>(params.captures[0]);
    by_score = t0;
    by_capture[0] = (raw * at.scale);
    return ((raw * at.scale) * t0);
  }

  static FA_DEVICE float* gradient_target([[maybe_unused]] const Params& params, [[maybe_unused]] const Place& at, fa::kernel::Constant<0>) {
    const fa::kernel::CaptureParams& capture = params.captures[0];
    return capture.gradient + fa::kernel::element_offset(capture.gradient_strides);
  }

  static FA_DEVICE fa::kernel::CapturedSteps<float> gradient_steps([[maybe_unused]] const Params& params, [[maybe_unused]] const Place& at, fa::kernel::Constant<0>) {
    const fa::kernel::CaptureParams& capture = params.captures[0];
    return {capture.gradient + fa::kernel::element_offset(capture.gradient_strides), 0, 0};
  }
};

struct Config {
  using Variant = KernelVariant;
  using Element = fa::kernel::f16;
  static constexpr int kHeadDimQk = 128;
  static constexpr int kHeadDimV = 72;
  static constexpr int kTileM = 64;  // query rows of a main-loop step
  static constexpr int kTileN = 128;  // keys of a tile
  static constexpr int kStages = 2;  // Q and dO tiles in flight
  static constexpr bool kCausal = true;
  static constexpr bool kWriteDq = true;
  static constexpr bool kSplit = false;
  static constexpr bool kVarlen = true;
  static constexpr bool kDropout = true;
};
static_assert(fa::sm90::Backward<Config>::kThreads == 384);
static_assert(fa::sm90::Backward<Config>::kSharedBytes == 198016);

FA_KERNEL(fa_sm90_backward, fa::kernel::Sm90BackwardVariantParams, 384, 1) { fa::sm90::backward<Config>(params); }
