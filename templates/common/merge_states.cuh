#ifndef FA_TEMPLATES_COMMON_MERGE_STATES_CUH_
#define FA_TEMPLATES_COMMON_MERGE_STATES_CUH_

#include <common/constants.cuh>
#include <common/elements.cuh>
#include <common/merge_states_params.cuh>
#include <common/row_pieces.cuh>
#include <common/switches.cuh>
#include <ptx/griddepcontrol.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>

namespace fa::kernel {

template <class Config>
FA_DEVICE constexpr bool wants_sum() {
  if constexpr (requires { Config::kSum; }) return Config::kSum;
  return false;
}

/// Merges partial results of attention over different keys: o = sum_i exp(lse_i - lse) o_i with
/// lse = log sum_i exp(lse_i), to which a sink adds its logit once. With kSum o is the sum of all o_i, and there are no
/// logarithms. A warp has kRowsOfWarp rows side by side, a lane
/// pieces of 16 bytes of kRows such rows. All that is read of a row is read before anything of it is written.
///
/// Config: Element, kHeadDimV, kStates (what o of the states is made of: 0: Element, 1: floats, 2: either),
/// kFloatResult, kAligned, kWarps; optionally kOverlaps, kSum.
template <class Config>
struct MergeStates {
  using T = typename Config::Element;
  static constexpr int kThreads = Config::kWarps * kWarpSize;
  static constexpr int kColumns = kPieceElements<T>;  // of a piece
  static constexpr int kPieces = Config::kHeadDimV / kColumns;
  static constexpr int kLanes = kPieces < kWarpSize ? kPieces : kWarpSize;  // of a row
  static constexpr int kRowsOfWarp = kWarpSize / kLanes;
  static constexpr int kPiecesOfLane = ceil_div(kPieces, kLanes);
  static constexpr int kRows = kPiecesOfLane > 1 ? 1 : 2;
  static constexpr int kRowsOfBlock = kRows * Config::kWarps * kRowsOfWarp;
  static constexpr bool kMixed = Config::kStates == 2;
  static constexpr bool kSum = wants_sum<Config>();
  static constexpr int kFloatChunks = kColumns / kPieceElements<float>;  // of a piece of floats
  static constexpr int kChunks = Config::kStates == 0 ? 1 : kFloatChunks;
  static constexpr int kLoads = 8;  // of 16 bytes, that a lane has under way
  static constexpr int kInBatch = kLoads / (kRows * kPiecesOfLane * kChunks);
  static constexpr int kBatch = kInBatch > 0 ? kInBatch : 1;  // states
  static_assert(Config::kHeadDimV % kColumns == 0, "rows are whole pieces");

  /// Columns of one state's o, as they lie in memory.
  struct Piece {
    Chunk chunk[kChunks];
  };

  struct Row {
    bool exists = false;
    uint32_t index[3] = {};
  };

  /// The greatest of the logarithms that count, 0 if none does; and the sums over states.
  struct Sums {
    float base = 0.f;
    float weights = 0.f;
    float o[kPiecesOfLane][kColumns] = {};
  };

  const MergeStatesParams& params;
  int lane;  // of the row

  FA_DEVICE explicit MergeStates(const MergeStatesParams& given)
      : params(given), lane(ptx::thread_index() % kWarpSize % kLanes) {}

  FA_DEVICE void run() const {
    Row rows[kRows];
    FA_UNROLL
    for (int r = 0; r < kRows; ++r) rows[r] = row_of(r);
    if constexpr (kOverlaps<Config>) ptx::griddepcontrol_wait();  // for all that is read, and who read the result
    Piece pieces[kBatch][kRows][kPiecesOfLane];
    load(pieces, rows, 0);
    Sums sums[kRows];
    FA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      if constexpr (!kSum) sums[r].base = greatest(rows[r]);
    }
    for (int first = 0; first < params.states; first += kBatch) {
      if (first > 0) load(pieces, rows, first);
      add(sums, pieces, rows, first);
    }
    if constexpr (kOverlaps<Config>) ptx::griddepcontrol_launch_dependents();  // what is left takes no time
    FA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      if constexpr (!kSum) add_sink(sums[r], rows[r]);
    }
    ptx::sync_warp();  // every lane has read the logarithms of its row, in whose place the result's may be
    FA_UNROLL
    for (int r = 0; r < kRows; ++r) store(sums[r], rows[r]);
  }

 private:
  /// Row `r` of this thread; neighbouring rows are a warp's neighbours.
  FA_DEVICE Row row_of(int r) const {
    const int in_warp = ptx::thread_index() % kWarpSize / kLanes;  // the last lanes of a warp may have none
    const int warp = r * Config::kWarps + ptx::thread_index() / kWarpSize;
    const uint32_t number = static_cast<uint32_t>(ptx::block_index()) * static_cast<uint32_t>(kRowsOfBlock) +
                            static_cast<uint32_t>(warp * kRowsOfWarp + in_warp);
    Row row;
    row.exists = in_warp < kRowsOfWarp && number < params.rows;
    const uint32_t outer = number / params.length[2];
    row.index[2] = number - outer * params.length[2];
    row.index[0] = outer / params.length[1];
    row.index[1] = outer - row.index[0] * params.length[1];
    return row;
  }

  static FA_DEVICE int64_t offset(const Row& row, const int64_t (&strides)[3]) {
    return row.index[0] * strides[0] + row.index[1] * strides[1] + row.index[2] * strides[2];
  }

  FA_DEVICE bool is_float(int state) const {
    if constexpr (kMixed) return (params.floats >> state & 1) != 0;
    return Config::kStates == 1;
  }

  /// Of a row without keys -inf: it may be given as +inf.
  FA_DEVICE float lse_of(const Row& row, int state) const {
    const int which = params.listed > 1 ? state : 0;
    const float lse =
        ptx::ld_global(params.lse[which] + state * params.stride_lse_state + offset(row, params.stride_lse[which]));
    return lse == kInfinity ? -kInfinity : lse;
  }

  FA_DEVICE void load(Piece (&pieces)[kBatch][kRows][kPiecesOfLane], const Row (&rows)[kRows], int first) const {
    FA_UNROLL
    for (int i = 0; i < kBatch; ++i) {
      FA_UNROLL
      for (int r = 0; r < kRows; ++r) {
        if (first + i < params.states && rows[r].exists) load_row(pieces[i][r], rows[r], first + i);
      }
    }
  }

  FA_DEVICE void load_row(Piece (&pieces)[kPiecesOfLane], const Row& row, int state) const {
    const int which = params.listed > 1 ? state : 0;
    const int64_t start = state * params.stride_o_state + offset(row, params.stride_o[which]);
    FA_UNROLL
    for (int i = 0; i < kPiecesOfLane; ++i) {
      const int piece = i * kLanes + lane;
      if (piece >= kPieces) continue;
      if (is_float(state)) {
        if constexpr (Config::kStates != 0) {
          const float* const source = static_cast<const float*>(params.o[which]) + start + piece * kColumns;
          FA_UNROLL
          for (int j = 0; j < kFloatChunks; ++j) {
            constexpr int kWidth = Config::kAligned ? kPieceElements<float> : 1;
            load_columns<kWidth>(pieces[i].chunk[j], source + j * kPieceElements<float>, kPieceElements<float>);
          }
        }
      } else {
        load_columns<(Config::kAligned ? kColumns : 1)>(
            pieces[i].chunk[0], static_cast<const T*>(params.o[which]) + start + piece * kColumns, kColumns);
      }
    }
  }

  FA_DEVICE float element(const Piece& piece, int state, int column) const {
    if constexpr (Config::kStates != 0) {
      if (is_float(state)) {
        return element_of<float>(piece.chunk[column / kPieceElements<float>], column % kPieceElements<float>);
      }
    }
    return element_of<T>(piece.chunk[0], column);
  }

  /// What exponentials are taken relative to.
  FA_DEVICE float greatest(const Row& row) const {
    if (!row.exists) return 0.f;
    float largest = params.sink == nullptr ? -kInfinity : sink_of_row(row);
    FA_UNROLL_BY(4)
    for (int i = 0; i < params.states; ++i) largest = ptx::max(largest, lse_of(row, i));
    return largest == -kInfinity ? 0.f : largest;
  }

  FA_DEVICE float sink_of_row(const Row& row) const {
    const uint32_t head = params.head_axis == 0 ? row.index[0] : params.head_axis == 1 ? row.index[1] : row.index[2];
    return ptx::ld_global(params.sink + head * params.stride_sink);
  }

  FA_DEVICE static float weight(float lse, float base) { return ptx::ex2((lse - base) * kLog2e); }

  FA_DEVICE void add(Sums (&sums)[kRows], const Piece (&pieces)[kBatch][kRows][kPiecesOfLane], const Row (&rows)[kRows],
                     int first) const {
    FA_UNROLL
    for (int i = 0; i < kBatch; ++i) {
      FA_UNROLL
      for (int r = 0; r < kRows; ++r) {
        if (first + i >= params.states || !rows[r].exists) continue;
        float part = 1.f;
        if constexpr (!kSum) {
          const float lse = lse_of(rows[r], first + i);
          if (lse == -kInfinity) continue;  // whatever its o holds
          part = weight(lse, sums[r].base);
          sums[r].weights += part;
        }
        FA_UNROLL
        for (int j = 0; j < kPiecesOfLane; ++j) {
          FA_UNROLL
          for (int c = 0; c < kColumns; ++c) {
            sums[r].o[j][c] = ptx::fma(part, element(pieces[i][r][j], first + i, c), sums[r].o[j][c]);
          }
        }
      }
    }
  }

  FA_DEVICE void add_sink(Sums& sums, const Row& row) const {
    if (params.sink != nullptr && row.exists) sums.weights += weight(sink_of_row(row), sums.base);
  }

  FA_DEVICE void store(Sums& sums, const Row& row) const {
    if (!row.exists) return;
    const float inverse = kSum ? 1.f : sums.weights == 0.f ? 0.f : 1.f / sums.weights;
    const int64_t start = offset(row, params.stride_merged_o);
    FA_UNROLL
    for (int i = 0; i < kPiecesOfLane; ++i) {
      const int piece = i * kLanes + lane;
      if (piece >= kPieces) continue;
      FA_UNROLL
      for (int c = 0; c < kColumns; ++c) sums.o[i][c] *= inverse;
      store_columns_of(sums.o[i], start + piece * kColumns);
    }
    if (!kSum && params.merged_lse != nullptr && lane == 0) {
      ptx::st_global(params.merged_lse + offset(row, params.stride_merged_lse),
                     sums.weights == 0.f ? -kInfinity : sums.base + kLn2 * ptx::lg2(sums.weights));
    }
  }

  FA_DEVICE void store_columns_of(const float (&o)[kColumns], int64_t at) const {
    if constexpr (Config::kFloatResult) {
      FA_UNROLL
      for (int j = 0; j < kFloatChunks; ++j) {
        float part[kPieceElements<float>];
        FA_UNROLL
        for (int c = 0; c < kPieceElements<float>; ++c) part[c] = o[j * kPieceElements<float> + c];
        store_piece<Config::kAligned>(static_cast<float*>(params.merged_o) + at + j * kPieceElements<float>, part);
      }
    } else {
      store_piece<Config::kAligned>(static_cast<T*>(params.merged_o) + at, o);
    }
  }
};

template <class Config>
FA_DEVICE void merge_states(const MergeStatesParams& params) {
  MergeStates<Config>(params).run();
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_MERGE_STATES_CUH_
