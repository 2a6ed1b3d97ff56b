#ifndef FA_TEMPLATES_SM90_SM90_WIDE_EPILOGUE_CUH_
#define FA_TEMPLATES_SM90_SM90_WIDE_EPILOGUE_CUH_

#include <common/log_sum.cuh>
#include <common/partial_merge.cuh>
#include <common/transpose.cuh>
#include <common/variant.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>
#include <sm90/sm90_epilogue.cuh>
#include <sm90/sm90_pieces.cuh>
#include <sm90/sm90_wide_traits.cuh>

namespace fa::sm90 {

/// What ends a query tile of the wide forward, or a piece of one: the log-sum-exp of its rows, and the columns of O
/// that a consumer has.
template <class Config>
struct WideEpilogue : WideBlock<Config> {
  using Base = WideBlock<Config>;
  using Traits = typename Base::Traits;
  using T = typename Traits::T;
  using Variant = typename Traits::Variant;
  using O = typename Traits::O;
  using Rows = typename Traits::Rows;
  using Query = typename Traits::Query;
  using Piece = typename Base::Piece;
  using Softmax = typename Traits::Softmax;
  using Traits::kTileM, Traits::kHeadDimV, Traits::kVarlen, Traits::kScheduled, Traits::kHalfColumns, Traits::kLayout,
      Traits::kConsumers, Traits::kMulticast, Base::params, Base::shared, Base::softmax_scale_log2, Base::lengths_of,
      Base::row_count;

  // Rows of a partial result that the kernel itself merges keep the columns of a lane together, in chunks of 16 bytes.
  static constexpr int kChunkColumns = 16;  // of a quad
  static constexpr bool kInChunks = kScheduled && kHeadDimV == 2 * kHalfColumns;

  struct alignas(8) Pair {
    float first, second;
  };

  FA_DEVICE explicit WideEpilogue(const Base& base) : Base(base) {}

  FA_DEVICE void run(O& o, Softmax& softmax, const Query& query, const Piece& piece, int half, int warp_row,
                     int lane) const {
    softmax.finish();
    if constexpr (kScheduled) {
      if (!piece.is_whole()) {
        store_partial(o, softmax, query, half, warp_row, lane);
        if constexpr (kInChunks) {
          if constexpr (kMulticast) {
            merge_accumulators(o, query, piece, half, warp_row, lane);
          } else {
            merge_chunks(query, piece);
          }
        } else {
          merge_piece<true>(*this, query, piece, shared + kLayout.arrived);
        }
        return;
      }
    }
    if constexpr (Config::kSplit) {
      store_partial(o, softmax, query, half, warp_row, lane);
    } else {
      store_whole(o, softmax, query, half, warp_row, lane);
    }
  }

  /// Offset of a row of the batch entry.
  FA_DEVICE int64_t offset_of(const Query& query, int row, int64_t stride_b, int64_t stride_h, int64_t stride_s) const {
    const Rows rows{params.group, query.tile.head};
    return kernel::offset_of_rows<kVarlen>(lengths_of(query), query.tile.batch, stride_b, stride_s) +
           rows.query_head(row) * stride_h + rows.position(row) * stride_s;
  }

  FA_DEVICE void store_whole(O& o, const Softmax& softmax, const Query& query, int half, int warp_row, int lane) const {
    const int first = query.tile.m_block * kTileM + warp_row + lane / 4;
    float factors[2];
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int row = first + 8 * r;
      factors[r] = softmax.inverse_sum(r);
      float lse = softmax.log_sum(r, softmax_scale_log2()).value();
      if constexpr (Variant::kSink) {
        const float keys = lse;
        const Rows rows{params.group, query.tile.head};
        lse = kernel::log_add(keys, kernel::sink_of(params.variant, rows.query_head(row)));
        factors[r] *= kernel::weight_of(keys, lse);
      }
      if (half == 0 && lane % 4 == 0 && row < row_count(query)) store_lse(query, row, lse);
    }
    multiply(o, factors);
    store_rows(o, query, first, half, lane);
  }

  /// The four lanes of a quad exchange what they hold of four neighbouring n8 tiles, so that each stores 16 bytes.
  FA_DEVICE void store_rows(const O& o, const Query& query, int first, int half, int lane) const {
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int row = first + 8 * r;
      const bool inside = row < row_count(query);
      T* const target = static_cast<T*>(params.o) +
                        offset_of(query, inside ? row : 0, params.stride_o_b, params.stride_o_h, params.stride_o_s);
      FA_UNROLL
      for (int j = 0; j < kHalfColumns / 8; j += 4) {
        uint32_t words[4];
        FA_UNROLL
        for (int i = 0; i < 4; ++i) {
          words[i] = ptx::convert_pair<T>(o[4 * (j + i) + 2 * r], o[4 * (j + i) + 2 * r + 1]);
        }
        kernel::transpose_quad(words, lane);
        const int column = half * kHalfColumns + 8 * (j + lane % 4);
        if (inside && column < kHeadDimV) {
          ptx::st_global_chunk(target + column, {{words[0], words[1], words[2], words[3]}});
        }
      }
    }
  }

  /// Into [splits, b, h_q, s_q], or of a scheduled kernel into [blocks of a cluster, 2 parts, rows].
  FA_DEVICE int64_t partial_row(const Query& query, int row) const {
    if constexpr (kScheduled) {
      return partial_row_at(query, query.tile.split, row);
    } else {
      const Rows rows{params.group, query.tile.head};
      const int64_t batch = static_cast<int64_t>(query.tile.split) * params.b + query.tile.batch;
      return (batch * params.h_q + rows.query_head(row)) * params.s_q + rows.position(row);
    }
  }
  FA_DEVICE int64_t partial_row_at(const Query& query, int place, int row) const {
    const int before = 2 * this->rank() * params.paged.parts;
    return partial_row_of_part<kTileM, Config::kPackGqa>(params, query, before + place, row);
  }
  FA_DEVICE int counter_of(const Piece& piece) const { return this->rank() * params.paged.parts + piece.first_part; }

  /// Normalised, in float.
  FA_DEVICE void store_partial(const O& o, const Softmax& softmax, const Query& query, int half, int warp_row,
                               int lane) const {
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int row = query.tile.m_block * kTileM + warp_row + lane / 4 + 8 * r;
      if (row >= row_count(query)) continue;
      const float factor = softmax.inverse_sum(r);
      const int64_t to = partial_row(query, row);
      if constexpr (kInChunks) {
        float* const target = chunks_of(to, half, lane);
        FA_UNROLL
        for (int j = 0; j < kHalfColumns / 8; j += 2) {
          ptx::st_global_chunk(target + 8 * j,
                               {{ptx::bits(o[4 * j + 2 * r] * factor), ptx::bits(o[4 * j + 2 * r + 1] * factor),
                                 ptx::bits(o[4 * j + 4 + 2 * r] * factor), ptx::bits(o[4 * j + 5 + 2 * r] * factor)}});
        }
      } else {
        const int first = half * kHalfColumns + 2 * (lane % 4);
        Pair* const target = reinterpret_cast<Pair*>(params.partial_o + to * kHeadDimV + first);
        FA_UNROLL
        for (int j = 0; j < kHalfColumns / 8; ++j) {
          if (kHeadDimV < 2 * kHalfColumns && first + 8 * j >= kHeadDimV) continue;
          ptx::st_global(target + 4 * j, Pair{o[4 * j + 2 * r] * factor, o[4 * j + 2 * r + 1] * factor});
        }
      }
      if (lane % 4 == 0 && half == 0)
        softmax.template log_sum<kernel::SplitSum>(r, softmax_scale_log2()).store(params.partial_lse, to);
    }
  }

  /// A lane's first chunk of a row of a partial result; the next ones are kChunkColumns apart.
  FA_DEVICE float* chunks_of(int64_t row, int half, int lane) const {
    return params.partial_o + row * kHeadDimV + half * kHalfColumns + 4 * (lane % 4);
  }

  /// The block that leaves a query tile's last partial result adds all of them up, in their order, as merge_splits
  /// does: 16 threads a row, whose loads of two results are in flight at once.
  FA_DEVICE void merge_chunks(const Query& query, const Piece& piece) const {
    constexpr int kMerging = kConsumers * kWarpgroup;
    if (!is_last_to_finish<kMerging>(params, piece, counter_of(piece), shared + kLayout.arrived)) return;
    const int thread = ptx::thread_index() - kWarpgroup;
    const int first = query.tile.m_block * kTileM;
    const int end = first + kTileM < row_count(query) ? first + kTileM : row_count(query);
    const int own = thread / kThreadsOfRow;
    FA_UNROLL_BY(1)
    for (int row = first; row < end;
         row += kMerging / kThreadsOfRow) {  // of all warps: else none has uniform registers
      merge_row(query, piece, row + own, thread % kThreadsOfRow);
    }
  }

  /// What thread `own` of a row's has of it.
  FA_DEVICE void merge_row(const Query& query, const Piece& piece, int row, int own) const {
    const int parts = piece.last_part - piece.first_part + 1;
    const auto place_of = [&](int i) {
      return partial_row_at(query, piece.place_of(piece.first_part + i), row_to_read(query, row));
    };
    Ahead ahead[2];
    load_ahead(ahead[0], place_of(0), own);
    load_ahead(ahead[1], place_of(1), own);
    kernel::PartialMerge<kHeadDimV, 1> merge;  // without its columns
    FA_UNROLL_BY(2)
    for (int i = 0; i < parts; ++i) merge.join(kernel::SplitSum::load(params.partial_lse, place_of(i)));
    if constexpr (Variant::kSink) merge.join(sink_of_row(query, row));
    merge.begin();
    float sums[4 * kOwnChunks] = {};
    FA_UNROLL_BY(1)
    for (int i = 0; i < parts; i += 2) {
      FA_UNROLL
      for (int next = 0; next < 2; ++next) {
        if (i + next == parts) break;
        if (i > 0) load_ahead(ahead[next], place_of(i + next), own);
      }
      FA_UNROLL
      for (int next = 0; next < 2; ++next) {
        if (i + next == parts) break;
        const float weight = merge.weight_of(kernel::SplitSum::load(params.partial_lse, place_of(i + next)));
        merge.total.sum += weight;
        FA_UNROLL
        for (int n = 0; n < 4 * kOwnChunks; ++n) sums[n] += weight * ptx::from_bits(ahead[next][n / 4].word[n % 4]);
      }
    }
    if constexpr (Variant::kSink) merge.total.sum += merge.weight_of(sink_of_row(query, row));
    const bool inside = row < row_count(query);
    if (inside && own == 0) store_lse(query, row, merge.total.value());
    store_merged(sums, merge.inverse_sum(), query, row, own);
  }

  static constexpr int kThreadsOfRow = 16;
  static constexpr int kOwnChunks = kHeadDimV / 4 / kThreadsOfRow;  // of a thread, of a row
  using Ahead = kernel::Chunk[kOwnChunks];
  static_assert(!kInChunks || kHeadDimV % (8 * kThreadsOfRow) == 0);

  /// Two chunks of 32 neighbouring columns after the other: of which a quad has all.
  FA_DEVICE void load_ahead(Ahead& ahead, int64_t place, int own) const {
    const float* const from = params.partial_o + place * kHeadDimV + 32 * (own / 4) + 4 * (own % 4);
    FA_UNROLL
    for (int i = 0; i < kOwnChunks; ++i)
      ahead[i] = ptx::ld_global_chunk(from + 128 * (i / 2) + kChunkColumns * (i % 2));
  }

  FA_DEVICE void store_merged(const float (&sums)[4 * kOwnChunks], float factor, const Query& query, int row,
                              int own) const {
    const bool inside = row < row_count(query);
    T* const target = static_cast<T*>(params.o) +
                      offset_of(query, inside ? row : 0, params.stride_o_b, params.stride_o_h, params.stride_o_s);
    FA_UNROLL
    for (int i = 0; i < kOwnChunks; i += 2) {
      uint32_t words[4];
      FA_UNROLL
      for (int word = 0; word < 4; ++word) {
        const int at = 4 * i + 2 * word;
        words[word] = ptx::convert_pair<T>(sums[at] * factor, sums[at + 1] * factor);
      }
      kernel::transpose_quad(words, own % 4);
      if (inside) {
        ptx::st_global_chunk(target + 128 * (i / 2) + 32 * (own / 4) + 8 * (own % 4),
                             {{words[0], words[1], words[2], words[3]}});
      }
    }
  }

  /// The same where clusters have parts: each thread what it has of a query tile, in the layout of accumulators.
  FA_DEVICE void merge_accumulators(O& o, const Query& query, const Piece& piece, int half, int warp_row,
                                    int lane) const {
    constexpr int kMerging = kConsumers * kWarpgroup;
    if (!is_last_to_finish<kMerging>(params, piece, counter_of(piece), shared + kLayout.arrived)) return;
    const int first = query.tile.m_block * kTileM + warp_row + lane / 4;
    if (first - lane / 4 >= row_count(query)) return;
    const int parts = piece.last_part - piece.first_part + 1;
    const auto place_of = [&](int i, int r) {
      return partial_row_at(query, piece.place_of(piece.first_part + i), row_to_read(query, first + 8 * r));
    };
    kernel::PartialMerge<kHeadDimV, 1> rows[2];  // without their columns
    FA_UNROLL_BY(2)
    for (int i = 0; i < parts; ++i) {
      FA_UNROLL
      for (int r = 0; r < 2; ++r) rows[r].join(kernel::SplitSum::load(params.partial_lse, place_of(i, r)));
    }
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      if constexpr (Variant::kSink) rows[r].join(sink_of_row(query, first + 8 * r));
      rows[r].begin();
    }
    FA_UNROLL
    for (float& x : o) x = 0.f;
    FA_UNROLL_BY(1)
    for (int i = 0; i < parts; ++i) {
      const int64_t places[2] = {place_of(i, 0), place_of(i, 1)};
      float weights[2];
      FA_UNROLL
      for (int r = 0; r < 2; ++r) {
        weights[r] = rows[r].weight_of(kernel::SplitSum::load(params.partial_lse, places[r]));
        rows[r].total.sum += weights[r];
      }
      const float* const sources[2] = {chunks_of(places[0], half, lane), chunks_of(places[1], half, lane)};
      FA_UNROLL
      for (int j = 0; j < kHalfColumns / kChunkColumns; j += kAhead) add_chunks(o, sources, weights, j);
    }
    float factors[2];
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int row = first + 8 * r;
      if constexpr (Variant::kSink) rows[r].total.sum += rows[r].weight_of(sink_of_row(query, row));
      factors[r] = rows[r].inverse_sum();
      if (half == 0 && lane % 4 == 0 && row < row_count(query)) store_lse(query, row, rows[r].total.value());
    }
    multiply(o, factors);
    store_rows(o, query, first, half, lane);
  }

  static constexpr int kAhead = 4;  // chunks of each row whose loads are in flight

  FA_DEVICE static void add_chunks(O& o, const float* const (&sources)[2], const float (&weights)[2], int first) {
    kernel::Chunk chunks[2][kAhead];
    FA_UNROLL
    for (int i = 0; i < 2 * kAhead; ++i) {
      chunks[i % 2][i / 2] = ptx::ld_global_chunk(sources[i % 2] + kChunkColumns * (first + i / 2));
    }
    FA_UNROLL
    for (int i = 0; i < 2 * kAhead; ++i) {
      const int r = i % 2;
      FA_UNROLL
      for (int word = 0; word < 4; ++word) {
        float& sum = o[8 * (first + i / 2) + 4 * (word / 2) + 2 * r + word % 2];
        sum += weights[r] * ptx::from_bits(chunks[r][i / 2].word[word]);
      }
    }
  }

  FA_DEVICE void store_lse(const Query& query, int row, float lse) const {
    if (params.lse == nullptr) return;
    ptx::st_global(params.lse + offset_of(query, row, params.stride_lse_b, params.stride_lse_h, params.stride_lse_s),
                   lse);
  }

  /// A row of the query tile that there is.
  FA_DEVICE int row_to_read(const Query& query, int row) const {
    return row < row_count(query) ? row : query.tile.m_block * kTileM;
  }

  FA_DEVICE kernel::SplitSum sink_of_row(const Query& query, int row) const {
    const Rows rows{params.group, query.tile.head};
    return kernel::SplitSum::of_term(kernel::sink_of(params.variant, rows.query_head(row_to_read(query, row))));
  }
};

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_WIDE_EPILOGUE_CUH_
