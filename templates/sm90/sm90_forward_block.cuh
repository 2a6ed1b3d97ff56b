#ifndef FA_TEMPLATES_SM90_SM90_FORWARD_BLOCK_CUH_
#define FA_TEMPLATES_SM90_SM90_FORWARD_BLOCK_CUH_

#include <common/constants.cuh>
#include <common/dropout.cuh>
#include <ptx/cluster.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/mbarrier.cuh>
#include <ptx/thread.cuh>
#include <ptx/tma.cuh>
#include <sm90/sm90_forward_traits.cuh>

namespace fa::sm90 {

/// What all warps of a forward know: the parameters, where things lie in shared memory, and who waits for what.
template <class Traits>
struct ForwardBlock : Traits {
  using Base = Traits;
  using Variant = typename Base::Variant;
  using Params = typename Base::Params;
  using KTile = typename Base::KTile;
  using VTile = typename Base::VTile;
  using Mask = typename Base::Mask;
  using Config = typename Base::Config;
  using Base::kStages, Base::kQBuffers, Base::kConsumers, Base::kDropout, Base::kAffine, Base::kDynamic,
      Base::kDropoutWarps, Base::kLayout;

  const Params& p;
  const kernel::ForwardParamsOf<Config>& params;
  const uint32_t shared = ptx::dynamic_shared();

  FA_DEVICE explicit ForwardBlock(const Params& all) : p(all), params(all.base) {}

  FA_DEVICE uint32_t q_shared(int buffer) const { return shared + buffer * kLayout.q_bytes; }
  FA_DEVICE uint32_t k_shared(int stage) const { return shared + kLayout.k + stage * KTile::kBytes; }
  FA_DEVICE uint32_t v_shared(int stage) const { return shared + kLayout.v + stage * VTile::kBytes; }
  /// As matrix descriptors have it.
  FA_DEVICE static uint32_t described(uint32_t tile) {
    if constexpr (Base::kInCluster) return ptx::without_rank(tile);
    return tile;
  }
  // "Full": the copy has landed. "Empty": every warp has read the buffer.
  FA_DEVICE uint32_t k_full(int stage) const { return shared + kLayout.mbarriers + 8 * stage; }
  FA_DEVICE uint32_t k_empty(int stage) const { return k_full(kStages + stage); }
  FA_DEVICE uint32_t v_full(int stage) const { return k_full(2 * kStages + stage); }
  FA_DEVICE uint32_t v_empty(int stage) const { return k_full(3 * kStages + stage); }
  FA_DEVICE uint32_t q_full(int buffer) const { return k_full(4 * kStages + buffer); }
  FA_DEVICE uint32_t q_empty(int buffer) const { return k_full(4 * kStages + kQBuffers + buffer); }
  FA_DEVICE uint32_t work_full(int buffer) const { return k_full(4 * kStages + 2 * kQBuffers + buffer); }
  /// Of V whose last rows are cleared before it is full.
  FA_DEVICE uint32_t v_landed() const { return k_full(4 * kStages + (kDynamic ? 3 : 2) * kQBuffers); }
  FA_DEVICE uint32_t mask_full(int stage) const { return shared + kLayout.mask_mbarriers + 8 * stage; }
  FA_DEVICE uint32_t mask_empty(int stage) const { return mask_full(kMaskBuffers + stage); }
  FA_DEVICE uint32_t dropout_shared() const { return shared + kLayout.seed; }
  /// A lane's words of the mask for the 16 rows from `row` on.
  FA_DEVICE uint32_t mask_shared(int stage, int row, int lane) const {
    return shared + kLayout.masks + stage * kLayout.mask_bytes + (row * 2 + lane) * Mask::kBytes;
  }

  FA_DEVICE void init_barriers() const {
    constexpr int kReaders = 4 * kConsumers;  // warps
    constexpr int kReadersOfWork = kReaders + (kDropout ? kDropoutWarps : 0) + (kDynamic ? 1 : 0);
    FA_UNROLL
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(k_full(i), 1);
      ptx::mbarrier_init(k_empty(i), kReaders);
      ptx::mbarrier_init(v_full(i), 1);
      ptx::mbarrier_init(v_empty(i), kReaders);
    }
    FA_UNROLL
    for (int i = 0; i < kQBuffers; ++i) {
      ptx::mbarrier_init(q_full(i), 1);
      ptx::mbarrier_init(q_empty(i), kReadersOfWork);
      if constexpr (kDynamic) ptx::mbarrier_init(work_full(i), 1);
    }
    if constexpr (Base::kWideBoxes) ptx::mbarrier_init(v_landed(), 1);
    if constexpr (kDropout) {
      FA_UNROLL
      for (int i = 0; i < kMaskBuffers; ++i) {
        ptx::mbarrier_init(mask_full(i), kDropoutWarps);
        ptx::mbarrier_init(mask_empty(i), kReaders);
      }
    }
    ptx::fence_mbarrier_init();
  }
  FA_DEVICE uint32_t work_shared(int buffer) const { return shared + kLayout.work + kLayout.work_bytes * buffer; }

  // The KV tile that a K buffer holds, for the consumers.
  FA_DEVICE uint32_t listed_shared(int stage) const { return shared + kLayout.listed + 4 * stage; }

  /// One arrival a warp: its share of every wgmma that read the buffer is complete.
  FA_DEVICE void release(uint32_t barrier, int lane) const {
    if (lane == 0) ptx::mbarrier_arrive(barrier);
  }

  FA_DEVICE float softmax_scale_log2() const {
    if constexpr (Variant::kScore && !kAffine) return Variant::kFactor * kernel::kLog2e;
    if constexpr (Config::kPositiveScale) return params.scale_log2;
    return params.scale_log2 == 0.f ? 1.f : ptx::abs(params.scale_log2);
  }

  /// Of a scale that need not be positive. Scores take it in front of the softmax: exactly, whatever their magnitude.
  FA_DEVICE float scale_sign() const { return params.scale_log2 < 0.f ? -1.f : params.scale_log2 > 0.f ? 1.f : 0.f; }
  FA_DEVICE uint32_t row_bits_shared(int row, int lane) const {
    return shared + kLayout.row_bits + kernel::PhiloxPart::kBytes * (row + lane);
  }
  static constexpr int kStepBytes = 4 * kernel::PhiloxPart::kBytes;
  FA_DEVICE uint32_t column_bits_shared(int warp, int column) const {
    return shared + kLayout.column_bits + kLayout.column_bits_bytes * warp + kernel::PhiloxPart::kBytes * column;
  }
};

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_FORWARD_BLOCK_CUH_
