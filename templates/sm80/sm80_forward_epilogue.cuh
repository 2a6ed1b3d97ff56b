#ifndef FA_TEMPLATES_SM80_SM80_FORWARD_EPILOGUE_CUH_
#define FA_TEMPLATES_SM80_SM80_FORWARD_EPILOGUE_CUH_

#include <common/accumulate.cuh>
#include <common/constants.cuh>
#include <common/forward_schedule.cuh>
#include <common/online_softmax.cuh>
#include <common/own_parts.cuh>
#include <common/split_row.cuh>
#include <common/variant.cuh>
#include <common/work_lists.cuh>
#include <ptx/atomic.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>
#include <sm80/sm80_forward_statistics.cuh>
#include <sm80/sm80_fp8.cuh>

namespace fa::sm80 {

using namespace kernel;

/// What a Forward (sm80_forward.cuh) leaves of the O and the softmax of its tile: whole rows, a split's partial
/// results, or a piece of a schedule.
template <class Forward>
struct ForwardEpilogue {
  using Config = typename Forward::Settings;
  using T = typename Forward::Output;
  using Variant = typename Forward::Variant;
  using OWarpTile = typename Forward::OWarpTile;
  using Softmax = typename Forward::Softmax;
  static constexpr int kTileM = Forward::kTileM;
  static constexpr int kHeadDimV = Forward::kHeadDimV;
  static constexpr int kMTiles = Forward::kMTiles;
  static constexpr int kHalves = Forward::kHalves;
  static constexpr int kOTiles = Forward::kOutTiles;
  static constexpr int kWarpsN = Forward::kWarpsN;
  static constexpr int kStoredRows = Forward::kHalfTile ? kTileM : Forward::kWarpRows;  // of a warp
  static constexpr int kWarpColumns = Forward::kOutColumns;
  static constexpr bool kShared =
      Forward::kPairs || Forward::kGroups || Forward::kSplitWarps;  // rows, with other warps
  static constexpr bool kDropout = Forward::kDropout;
  static constexpr bool kAccumulate = Forward::kAccumulate;
  static constexpr bool kPieces = Forward::kPieces;
  static constexpr bool kBytes = Forward::kBytes;

  const Forward& f;

  FA_DEVICE void run(Fragment<kMTiles, kOTiles>& o, const Softmax& softmax) const {
    if constexpr (kPieces) {
      store_piece(o, softmax);
    } else if constexpr (Config::kSplit) {
      store_partial(o, softmax);
    } else {
      store(o, softmax);
    }
  }

  /// What O is multiplied with.
  FA_DEVICE float normaliser(const Softmax& softmax, int m, int r) const {
    if constexpr (kDropout) return softmax.inverse_sum(m, r) * f.params.dropout.inverse_keep;
    // Of a row without keys O is 0, whatever stands as the scale of a V without any.
    if constexpr (kBytes) return softmax.sum[m][r] == 0.f ? 0.f : softmax.inverse_sum(m, r) * f.row_scales.value(f);
    return softmax.inverse_sum(m, r);
  }

  /// O / sum through shared memory, so that rows leave in 16-byte pieces, and the log-sum-exp.
  FA_DEVICE void store(Fragment<kMTiles, kOTiles>& o, const Softmax& softmax) const {
    [[maybe_unused]] float states[kMTiles][2];  // log-sum-exp of the state
    if constexpr (kAccumulate) {
      read_states(states);
      if constexpr (kShared) f.meet();  // the state's log-sum-exp is read, in whose place the result goes
    }
    [[maybe_unused]] float greatest = -kInfinity;         // of the scores of the warp's rows
    if constexpr (!kShared && !kBytes) ptx::sync_warp();  // every lane has read this warp's Q, whose place O takes
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int r = 0; r < kHalves; ++r) {
        float inverse = normaliser(softmax, m, r);
        [[maybe_unused]] float whole = 0.f;   // log-sum-exp with the sink
        [[maybe_unused]] float weight = 1.f;  // of the keys beside it
        if constexpr (Variant::kSink) {
          const float keys = softmax.log_sum(m, r, f.softmax_scale_log2()).value();
          whole = log_add(keys, sink_of(f.params.variant, f.rows.query_head(f.fragment_row(m, r))));
          weight = weight_of(keys, whole);
          inverse *= weight;
        }
        [[maybe_unused]] float state = -1.f;  // what o in memory counts
        if constexpr (kAccumulate) {
          const Joined joined = join(softmax.log_sum(m, r, f.softmax_scale_log2()).value(), states[m][r]);
          whole = joined.lse;
          inverse *= joined.keys;
          state = joined.state;
        }
        if constexpr (kBytes) {
          if (f.fragment_row(m, r) < f.row_count) store_row(o_row(f.fragment_row(m, r)), o, m, r, inverse);
        } else if (kAccumulate && counts(state)) {
          stage_row<true>(o, m, r, inverse, state);
        } else {
          stage_row<false>(o, m, r, inverse, state);
        }
        const int row = f.fragment_row(m, r);
        if (f.params.lse != nullptr && f.half == 0 && f.lane % 4 == 0 && row < f.row_count) {
          float* lse = lse_row(row);
          ptx::st_global(lse,
                         Variant::kSink || kAccumulate ? whole : softmax.log_sum(m, r, f.softmax_scale_log2()).value());
        }
        if constexpr (Forward::kStatistics) {
          ForwardStatistics<Forward>{f}.store_row(softmax, m, r, weight, greatest);
        }
      }
    }
    if constexpr (Forward::kStatistics) {
      ForwardStatistics<Forward>{f}.raise(greatest);
    }
    if constexpr (kShared) {
      f.meet();  // the rows of O of warps that share them are complete in shared memory
    } else if constexpr (!kBytes) {
      ptx::sync_warp();  // the warp's rows of O are complete in shared memory
    }
    if constexpr (!kBytes) store_rows();
  }

  /// A row of O of 8-bit floats, times a factor, as it stands in registers (ByteValues).
  template <class Output>
  FA_DEVICE void store_row(Output* target, const Fragment<kMTiles, kOTiles>& o, int m, int r, float factor) const {
    FA_UNROLL
    for (int n = 0; n < kOTiles; n += 2) {
      const float(&even)[4] = o[m][n], (&odd)[4] = o[m][n + 1];
      store_columns(target + 8 * n + 4 * (f.lane % 4),
                    {even[2 * r] * factor, odd[2 * r] * factor, even[2 * r + 1] * factor, odd[2 * r + 1] * factor});
    }
  }

  FA_DEVICE float* lse_row(int row) const {
    return f.params.lse + f.first_row(f.params.stride_lse_b, f.params.stride_lse_s) +
           f.rows.query_head(row) * f.params.stride_lse_h + f.rows.position(row) * f.params.stride_lse_s;
  }

  FA_DEVICE void read_states(float (&states)[kMTiles][2]) const {
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int r = 0; r < kHalves; ++r) {
        const int row = f.fragment_row(m, r);
        states[m][r] = row < f.row_count ? state_lse(lse_row(row)) : -kInfinity;
      }
    }
  }

  /// A row of O times a factor, and with kAdds what is in memory times another.
  template <bool kAdds>
  FA_DEVICE void stage_row(const Fragment<kMTiles, kOTiles>& o, int m, int r, float factor,
                           [[maybe_unused]] float state) const {
    [[maybe_unused]] const T* old = nullptr;
    if constexpr (kAdds) old = o_row(f.fragment_row(m, r)) + f.first_o_column() + 2 * (f.lane % 4);
    FA_UNROLL
    for (int n = 0; n < kOTiles; ++n) {
      if (!f.owns(n)) continue;
      float low = o[m][n][2 * r] * factor;
      float high = o[m][n][2 * r + 1] * factor;
      if constexpr (kAdds) add_state<Config::kAligned>(low, high, state, old + 8 * n);
      stage_pair(
          f.q_shared + OWarpTile::offset(16 * m + 8 * r + f.lane / 4, f.first_o_column() + 8 * n + 2 * (f.lane % 4)),
          low, high);
    }
  }

  static FA_DEVICE void stage_pair(uint32_t address, float low, float high) {
    if constexpr (sizeof(T) == 2) {
      ptx::st_shared_b32(address, ptx::convert_pair<T>(low, high));
    } else {
      ptx::st_shared_b64(address, ptx::bits(low), ptx::bits(high));
    }
  }

  FA_DEVICE T* o_row(int row) const {
    return static_cast<T*>(f.params.o) + f.first_row(f.params.stride_o_b, f.params.stride_o_s) +
           f.rows.query_head(row) * f.params.stride_o_h + f.rows.position(row) * f.params.stride_o_s;
  }

  FA_DEVICE void store_rows() const {
    constexpr int kUnitBytes = Config::kAligned ? kChunkBytes : static_cast<int>(sizeof(T));
    constexpr int kUnits = kHeadDimV * static_cast<int>(sizeof(T)) / kUnitBytes;  // of a row
    FA_UNROLL_BY(4)
    for (int i = f.copier; i < kStoredRows * kUnits; i += kWarpsN * kWarpSize) {
      const int row = i / kUnits;
      const int unit = i % kUnits;
      if (f.warp_row + row >= f.row_count) break;
      const uint32_t source = f.q_shared + OWarpTile::offset(row, 0) + unit * kUnitBytes;
      T* target = o_row(f.warp_row + row) + unit * (kUnitBytes / static_cast<int>(sizeof(T)));
      if constexpr (Config::kAligned) {
        ptx::st_global_chunk(target, ptx::ld_shared_chunk(source));
      } else if constexpr (sizeof(T) == 2) {
        ptx::st_global(target, T{ptx::ld_shared_b16(source)});
      } else {
        ptx::st_global(target, ptx::from_bits(ptx::ld_shared_b32(source)));
      }
    }
  }

  /// What a block leaves of a piece: whole rows of O, or its part of them. The last block that does makes them whole.
  FA_DEVICE void store_piece(Fragment<kMTiles, kOTiles>& o, const Softmax& softmax) const {
    if (f.piece.is_whole()) {
      store(o, softmax);
      return;
    }
    store_partial(o, softmax);
    ptx::sync_threads();  // the block's partial rows are written, and Q has been read, whose place is taken
    if constexpr (Forward::kOwnParts) {
      if (!is_last_part()) return;
    } else {
      if (!is_last_to_finish()) return;
    }
    const int last = f.piece.last_part - f.piece.first_part;
    const int end = f.block_row + kTileM < f.row_count ? f.block_row + kTileM : f.row_count;
    for (int row = f.block_row + f.warp; row < end; row += Config::kWarps) {
      merge_splits<T, Variant, kHeadDimV>(f.params, last + 1, MergedRow{f, row},
                                          [&](int i) { return partial_row_of(f.piece.first_part + i, row); });
    }
  }

  /// Whether all other parts of the tile have left their partial results.
  FA_DEVICE bool is_last_to_finish() const {
    int32_t* const counter = WorkLists(f.params.paged).counters + f.piece.first_part;
    if (f.thread == 0) {
      const int before = ptx::atomic_add_acq_rel_global(counter, 1);
      ptx::st_shared_b32(f.shared, static_cast<uint32_t>(before));
    }
    ptx::sync_threads();  // the number of blocks before this one is there, and what they have written can be read
    if (static_cast<int>(ptx::ld_shared_b32(f.shared)) != f.piece.last_part - f.piece.first_part) return false;
    if (f.thread == 0) ptx::st_global(counter, 0);  // for the next launch
    return true;
  }

  /// The last part waits for the others, which have started before it; they tell it that they have finished.
  FA_DEVICE bool is_last_part() const {
    using Own = OwnParts<Config, typename Forward::Params>;
    const int part = ptx::block_index();
    if (part != f.piece.last_part) {
      if (f.thread == 0) ptx::raise_flag_global(Own::flag_of(f.params, f.piece, part), kernel::kFlagUp);
      return false;
    }
    if (f.warp == 0) Own::await_others(f.params, f.piece);
    ptx::sync_threads();  // the others' partial results can be read
    return true;
  }

  /// Of the tile, for merge_splits.
  struct MergedRow {
    const Forward& forward;
    int row;

    FA_DEVICE int head() const { return forward.rows.query_head(row); }
    FA_DEVICE int64_t offset(int64_t stride_b, int64_t stride_h, int64_t stride_s) const {
      return forward.first_row(stride_b, stride_s) + head() * stride_h + forward.rows.position(row) * stride_s;
    }
  };

  /// Into [2 parts, rows], of a scheduled kernel.
  FA_DEVICE int64_t partial_row_of(int part, int row) const {
    const int rows_each = Config::kPackGqa ? f.params.group : 1;
    return static_cast<int64_t>(f.piece.place_of(part)) * partial_rows<kTileM>(f.params, rows_each) +
           (row - f.block_row);
  }

  FA_DEVICE int64_t partial_row(int row) const {
    if constexpr (kPieces) {
      return partial_row_of(Forward::part_of(f.params), row);
    } else {
      return ((static_cast<int64_t>(f.tile.split) * f.params.b + f.tile.batch) * f.params.h_q +
              f.rows.query_head(row)) *
                 f.params.s_q +
             f.rows.position(row);  // into [splits, b, h_q, s_q]
    }
  }

  /// Normalised fp32 partial results of one split, for forward_combine.
  FA_DEVICE void store_partial(const Fragment<kMTiles, kOTiles>& o, const Softmax& softmax) const {
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int r = 0; r < kHalves; ++r) {
        const int row = f.fragment_row(m, r);
        if (row >= f.row_count) continue;
        const float inverse = normaliser(softmax, m, r);
        const int64_t to = partial_row(row);
        if constexpr (kBytes) store_row(f.params.partial_o + to * kHeadDimV, o, m, r, inverse);
        FA_UNROLL
        for (int n = 0; n < kOTiles; ++n) {
          if (kBytes || !f.owns(n)) continue;
          float* target = f.params.partial_o + to * kHeadDimV + f.first_o_column() + 8 * n + 2 * (f.lane % 4);
          ptx::st_global(target, o[m][n][2 * r] * inverse);
          ptx::st_global(target + 1, o[m][n][2 * r + 1] * inverse);
        }
        if (f.lane % 4 == 0 && f.half == 0)
          softmax.template log_sum<SplitSum>(m, r, f.softmax_scale_log2()).store(f.params.partial_lse, to);
      }
    }
  }
};

}  // namespace fa::sm80

#endif  // FA_TEMPLATES_SM80_SM80_FORWARD_EPILOGUE_CUH_
