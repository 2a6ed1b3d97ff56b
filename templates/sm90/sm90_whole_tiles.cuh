#ifndef FA_TEMPLATES_SM90_SM90_WHOLE_TILES_CUH_
#define FA_TEMPLATES_SM90_SM90_WHOLE_TILES_CUH_

#include <common/constants.cuh>
#include <common/fixed_splits.cuh>
#include <common/log_sum.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>

namespace fa::sm90 {

/// With what O so far and that of the split in the making are multiplied.
template <class Factors>
struct WholeRowFactors : Factors {
  kernel::FoldedRow::Weights weights[2];
};

/// What ends a split of a query tile of few rows that a block has whole (docs/invariance.md, "By length"): a fold by
/// the operations of EvenFold, in its order. All rows are those of the first warp, which calls this.
template <class Epilogue>
struct WholeTiles {
  using Config = typename Epilogue::Config;
  using Variant = typename Epilogue::Variant;
  using Query = typename Epilogue::Query;
  using Rows = typename Epilogue::Rows;
  using O = typename Epilogue::O;
  using Factors = typename Epilogue::Factors;
  static constexpr int kTiles = Epilogue::kTiles;

  const Epilogue& to;

  /// The sums of a split to those before it of a query tile that is this block's; of the last one the whole.
  FA_DEVICE void fold_sums(const kernel::SplitSum (&sums)[2], Factors& factors, const Query& query, int first_row,
                           int lane, bool ends) const {
    const Rows rows{to.params.group, query.tile.head};
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      const uint32_t so_far = folded_shared(kTiles + r, lane);
      const kernel::Chunk words = ptx::ld_shared_chunk(so_far);
      kernel::FoldedRow folded;
      folded.total = {ptx::from_bits(words.word[0]), ptx::from_bits(words.word[1]), ptx::from_bits(words.word[2])};
      factors.weights[r] = folded.add(sums[r]);
      const int row = first_row + 8 * r;
      float factor = 0.f;  // of the whole
      if (ends) {
        const kernel::FoldedRow::Whole whole = folded.template whole<Variant>(to.params, rows.query_head(row));
        factor = whole.factor;
        if (lane % 4 == 0 && to.has_row(query, row)) {
          if (to.params.lse != nullptr) ptx::st_global(to.lse_row(query, rows, row), whole.lse);
          mark_whole(query, rows, row);
        }
        folded = {};
      }
      const kernel::SplitSum& next = folded.total;
      ptx::st_shared_chunk(so_far,
                           {{ptx::bits(next.high), ptx::bits(next.low), ptx::bits(next.sum), ptx::bits(factor)}});
    }
  }

  /// Tells the merge that a row needs none.
  FA_DEVICE void mark_whole(const Query& query, const Rows& rows, int row) const {
    if constexpr (Epilogue::kPaged) {
      Query first = query;
      first.tile.split = to.params.splits - 1;
      kernel::SplitSum::of_whole().store(to.params.partial_lse, to.partial_row(first, rows, row));
    }
  }

  // O of the splits so far, and their sums: each thread of the first warp reads what it has written.
  FA_DEVICE uint32_t folded_shared(int chunk, int lane) const {
    return to.shared + Epilogue::kLayout.folded + (chunk * kWarpSize + lane) * kernel::kChunkBytes;
  }
  FA_DEVICE void begin(int lane) const {
    FA_UNROLL_BY(1)
    for (int j = 0; j < kTiles; ++j) ptx::st_shared_chunk(folded_shared(j, lane), {});
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      ptx::st_shared_chunk(folded_shared(kTiles + r, lane), {{ptx::bits(-kernel::kInfinity), 0, 0, 0}});
    }
  }

  /// Normalised O of a split to that of those before it; of the last one the whole to memory.
  FA_DEVICE void fold(O& o, const Factors& factors, const Query& query, int lane, bool ends) const {
    FA_UNROLL
    for (int j = 0; j < kTiles; ++j) {
      const kernel::Chunk so_far = ptx::ld_shared_chunk(folded_shared(j, lane));
      kernel::Chunk next = {};
      FA_UNROLL
      for (int i = 0; i < 4; ++i) {
        float& own = o[4 * j + i];
        own = kernel::FoldedRow::join(ptx::from_bits(so_far.word[i]), own, factors.weights[i / 2]);
        if (!ends) next.word[i] = ptx::bits(own);
      }
      ptx::st_shared_chunk(folded_shared(j, lane), next);
    }
    if (!ends) return;
    const auto factor_of = [&](int r) {
      return ptx::from_bits(ptx::ld_shared_chunk(folded_shared(kTiles + r, lane)).word[3]);
    };
    const float whole[2] = {factor_of(0), factor_of(1)};
    FA_UNROLL
    for (int i = 0; i < 4 * kTiles; ++i) o[i] = kernel::folded_output(o[i], whole[i / 2 % 2]);
    to.store_rows(o, query, to.first_row_of(query), lane);
  }
};

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_WHOLE_TILES_CUH_
