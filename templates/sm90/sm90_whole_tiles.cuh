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
  using Softmax = typename Epilogue::Softmax;
  using O = typename Epilogue::O;
  using Factors = typename Epilogue::Factors;
  static constexpr int kTiles = Epilogue::kTiles;

  const Epilogue& to;

  /// Whether rows 8 to 15 are there, each in the quad of the row eight before. What they cost is left out else.
  FA_DEVICE bool has_pairs(const Query& query) const { return to.row_count(query) - to.first_row_of(query) > 8; }

  /// The sums of a split to those before it of a query tile that is this block's; of the last one the whole.
  FA_DEVICE void finish(Softmax& softmax, Factors& factors, const Query& query, int first_row, int lane,
                        bool ends) const {
    const bool pairs = has_pairs(query);
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      if (r == 1 && !pairs) break;
      factors.keys[r] = softmax.inverse_sum(r);
      fold_sums(softmax.template log_sum<kernel::SplitSum>(r, to.softmax_scale_log2()), factors, r, lane);
      if (ends) finish_row(query, first_row, r, lane);
    }
  }

  FA_DEVICE void fold_sums(const kernel::SplitSum& sums, Factors& factors, int r, int lane) const {
    kernel::FoldedRow folded;
    folded.total = load_sums(r, lane);
    factors.weights[r] = folded.add(sums);
    store_sums(folded.total, 0.f, r, lane);
  }

  /// Stores the log-sum-exp of a row. What its O is multiplied with is left beside the sums of the next query tile.
  FA_DEVICE void finish_row(const Query& query, int first_row, int r, int lane) const {
    const Rows rows{to.params.group, query.tile.head};
    const int row = first_row + 8 * r;
    kernel::FoldedRow folded;
    folded.total = load_sums(r, lane);
    const kernel::FoldedRow::Whole whole = folded.template whole<Variant>(to.params, rows.query_head(row));
    if (lane % 4 == 0 && to.has_row(query, row)) {
      if (to.params.lse != nullptr) ptx::st_global(to.lse_row(query, rows, row), whole.lse);
      mark_whole(query, rows, row);
    }
    store_sums(kernel::SplitSum::of_no_keys(), whole.factor, r, lane);
  }

  /// Tells the merge that a row needs none.
  FA_DEVICE void mark_whole(const Query& query, const Rows& rows, int row) const {
    if constexpr (Epilogue::kPaged) {
      Query first = query;
      first.tile.split = to.params.splits - 1;
      kernel::SplitSum::of_whole().store(to.params.partial_lse, to.partial_row(first, rows, row));
    }
  }

  // O of the splits so far, [2 rows, tiles], and their sums: each thread of the first warp reads what it has written.
  static constexpr int kPairBytes = 8;
  static constexpr int kRowBytes = kTiles * kWarpSize * kPairBytes;
  FA_DEVICE uint32_t place(int r, int tile, int lane) const {
    return to.shared + Epilogue::kLayout.folded + r * kRowBytes + (tile * kWarpSize + lane) * kPairBytes;
  }
  FA_DEVICE uint32_t sums_shared(int r, int lane) const {
    return to.shared + Epilogue::kLayout.folded + 2 * kRowBytes + (r * kWarpSize + lane) * kernel::kChunkBytes;
  }
  FA_DEVICE kernel::SplitSum load_sums(int r, int lane) const {
    const kernel::Chunk words = ptx::ld_shared_chunk(sums_shared(r, lane));
    return {ptx::from_bits(words.word[0]), ptx::from_bits(words.word[1]), ptx::from_bits(words.word[2])};
  }
  FA_DEVICE void store_sums(const kernel::SplitSum& sums, float factor, int r, int lane) const {
    ptx::st_shared_chunk(sums_shared(r, lane),
                         {{ptx::bits(sums.high), ptx::bits(sums.low), ptx::bits(sums.sum), ptx::bits(factor)}});
  }
  FA_DEVICE void begin(int lane) const {
    FA_UNROLL_BY(1)
    for (int r = 0; r < 2; ++r) {
      clear(r, lane);
      store_sums(kernel::SplitSum::of_no_keys(), 0.f, r, lane);
    }
  }
  FA_DEVICE void clear(int r, int lane) const {
    FA_UNROLL
    for (int j = 0; j < kTiles; ++j) ptx::st_shared_b64(place(r, j, lane), 0, 0);
  }

  /// Normalised O of a split to that of those before it; of the last one the whole to memory.
  FA_DEVICE void fold(O& o, const Factors& factors, const Query& query, int lane, bool ends) const {
    const bool pairs = has_pairs(query);
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      if (r == 1 && !pairs) break;
      FA_UNROLL
      for (int first = 0; first < kTiles; first += kTogether) fold_row(o, factors, r, first, lane);
      if (ends) end_row(o, r, lane);
    }
    if (ends) to.store_rows(o, query, to.first_row_of(query), lane);
  }

 private:
  static constexpr int kTogether = 8;  // n8 tiles whose loads are in flight

  /// Of a row's n8 tiles from number `first` on.
  FA_DEVICE void fold_row(O& o, const Factors& factors, int r, int first, int lane) const {
    uint32_t so_far[kTogether][2];
    FA_UNROLL
    for (int j = 0; j < kTogether; ++j) {
      if (first + j < kTiles) ptx::ld_shared_b64(so_far[j][0], so_far[j][1], place(r, first + j, lane));
    }
    FA_UNROLL
    for (int j = 0; j < kTogether; ++j) {
      if (first + j >= kTiles) break;
      FA_UNROLL
      for (int i = 0; i < 2; ++i) {
        float& own = o[4 * (first + j) + 2 * r + i];
        const float split = ptx::multiply(own, factors.keys[r]);
        own = kernel::FoldedRow::join(ptx::from_bits(so_far[j][i]), split, factors.weights[r]);
        so_far[j][i] = ptx::bits(own);
      }
      ptx::st_shared_b64(place(r, first + j, lane), so_far[j][0], so_far[j][1]);
    }
  }
  FA_DEVICE void end_row(O& o, int r, int lane) const {
    const float whole = ptx::from_bits(ptx::ld_shared_chunk(sums_shared(r, lane)).word[3]);
    FA_UNROLL
    for (int i = 0; i < 2 * kTiles; ++i) {
      float& own = o[4 * (i / 2) + 2 * r + i % 2];
      own = kernel::folded_output(own, whole);
    }
    clear(r, lane);
  }
};

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_WHOLE_TILES_CUH_
