#ifndef FA_TEMPLATES_SM90_SM90_PRODUCTS_CUH_
#define FA_TEMPLATES_SM90_SM90_PRODUCTS_CUH_

#include <ptx/language.cuh>
#include <ptx/wgmma.cuh>
#include <sm90/sm90_affine.cuh>
#include <sm90/sm90_probabilities.cuh>
#include <sm90/sm90_shared_tile.cuh>

namespace fa::sm90 {

/// The two products of a KV tile. A consumer warpgroup starts them and waits for them later.
template <class Traits>
struct Products : Probabilities<Traits> {
  using Base = Probabilities<Traits>;
  using KeyNumbers = typename Base::KeyNumbers;
  using QTile = typename Base::QTile;
  using KTile = typename Base::KTile;
  using VTile = typename Base::VTile;
  using SGemm = typename Base::SGemm;
  using OGemm = typename Base::OGemm;
  using S = typename Base::S;
  using P = typename Base::P;
  using O = typename Base::O;
  using Tile = typename Base::Tile;
  using Base::kConsumers, Base::kSSteps, Base::kPSteps, Base::kAffineProduct, Base::kExchange, Base::kLayout,
      Base::shared, Base::q_shared, Base::k_shared, Base::v_shared, Base::described;

  using Base::Base;

  /// Starts S = Q K^T, [64, tile_n], with what it adds of an affine score function.
  FA_DEVICE void issue_scores(S& s, [[maybe_unused]] const Tile& tile, int q_buffer, int consumer, int stage) const {
    const int rows = 64 * (kExchange && q_buffer != 0 ? kConsumers - 1 - consumer : consumer);
    ptx::wgmma_tie(s);
    ptx::wgmma_fence();
    FA_UNROLL
    for (int step = 0; step < kSSteps; ++step) {
      SGemm::template shared<false>(s, QTile::k_major(described(q_shared(q_buffer)), rows, step),
                                    KTile::k_major(described(k_shared(stage)), 0, step), step != 0);
    }
    if constexpr (kAffineProduct) {
      SGemm::template registers<false>(s, tile.slopes.operand,
                                       KeyNumbers::descriptor(described(shared + kLayout.key_numbers)), true);
    }
    ptx::wgmma_commit();
  }

  /// Starts O += P V, [64, d_v].
  FA_DEVICE void issue_output(O& o, const P& probabilities, int stage, bool accumulate) const {
    ptx::wgmma_tie(o);
    ptx::wgmma_fence();
    FA_UNROLL
    for (int step = 0; step < kPSteps; ++step) {
      OGemm::template registers<true>(o, probabilities[step], VTile::mn_major(described(v_shared(stage)), step),
                                      accumulate || step != 0);
    }
    ptx::wgmma_commit();
  }
};

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_PRODUCTS_CUH_
