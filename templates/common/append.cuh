#ifndef FA_TEMPLATES_COMMON_APPEND_CUH_
#define FA_TEMPLATES_COMMON_APPEND_CUH_

#include <common/append_params.cuh>
#include <common/constants.cuh>
#include <common/elements.cuh>
#include <common/rotary.cuh>
#include <common/row_pieces.cuh>
#include <common/sequences.cuh>
#include <common/switches.cuh>
#include <ptx/griddepcontrol.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>

namespace fa::kernel {

/// Where cosines and sines come from: positions and a base, or a table of floats or of the tensors' elements.
enum class RotaryTable { none, floats, elements };

/// Writes the new keys and values of a batch into a cache, keys and queries with their rotary embedding. A thread takes
/// one piece of 16 bytes of kHeads heads of a token, and with it the piece that it makes pairs with. All that it reads
/// of them is under way before it finds out where it goes.
///
/// Config: Element, kHeadDimQk, kHeadDimV, kPageSize (0: contiguous), kRotaryDims, kInterleaved, kTable, kAligned,
/// kWarps; optionally kOverlaps.
template <class Config>
struct Append {
  using T = typename Config::Element;
  static constexpr int kThreads = Config::kWarps * kWarpSize;
  static constexpr int kHeads = 4;  // of a thread
  static constexpr int kPiece = kPieceElements<T>;
  static constexpr int kRotaryDims = Config::kRotaryDims;
  static constexpr int kPairs = kRotaryDims / 2;
  static constexpr RotaryTable kTable = static_cast<RotaryTable>(Config::kTable);
  static constexpr bool kHalves = kRotaryDims > 0 && !Config::kInterleaved;  // pairs are kPairs columns apart
  static constexpr int kPairPieces = kHalves ? ceil_div(kPairs, kPiece) : 0;
  static constexpr int kPiecesK =
      kHalves ? kPairPieces + ceil_div(Config::kHeadDimQk - kRotaryDims, kPiece) : Config::kHeadDimQk / kPiece;
  static constexpr int kPiecesV = Config::kHeadDimV / kPiece;
  static constexpr int kTurns = Config::kInterleaved ? kPiece / 2 : kPiece;  // of a thread
  // Elements of an access: columns behind the pairs start where those end.
  static constexpr int kWidthK = !Config::kAligned ? 1 : kHalves ? common_width(kPairs, kPiece) : kPiece;
  static constexpr int kWidthV = Config::kAligned ? kPiece : 1;

  enum class Kind { k, v, q, none };

  /// What a thread does, with which rows of a token.
  struct Item {
    Kind kind = Kind::none;
    int token = 0;
    int head = 0;    // the first of kHeads
    int heads = 0;   // of the tensor
    int column = 0;  // where the piece starts
    int count = 0;   // how many of its columns there are
    bool turns = false;
  };

  /// Where a token goes.
  struct Place {
    bool is_token = false;  // of a sequence, or of a call that needs to know none
    int page = -1;          // none: its keys and values go nowhere
    int row = 0;            // of the page
    int64_t position = 0;   // for rotary embedding
  };

  struct Turns {
    float cosine[kTurns];
    float sine[kTurns];
  };

  const AppendParams& params;

  FA_DEVICE void run() const {
    const int block = ptx::block_index();
    const int index = block % params.token_blocks * kThreads + ptx::thread_index();
    const int first = block / params.token_blocks * params.block_tokens;
    const int local = index / params.items;
    const int end = params.tokens - first < params.block_tokens ? params.tokens - first : params.block_tokens;
    const Item item = local < end ? item_of(first + local, index % params.items) : Item{};
    if constexpr (kOverlaps<Config>) ptx::griddepcontrol_wait();  // for all that is read, and who read the cache
    Chunk pieces[kHeads][kHalves ? 2 : 1] = {};
    load(item, pieces);
    const Place place = place_of_mine(first, local, end);
    if constexpr (kOverlaps<Config>) ptx::griddepcontrol_launch_dependents();  // what is left takes no time
    if constexpr (kRotaryDims > 0) {
      if (item.turns && place.is_token) turn(item, turns_of(item, place.position), pieces);
    }
    store(item, place, pieces);
  }

 protected:
  FA_DEVICE Item item_of(int token, int index) const {
    const int groups_kv = ceil_div(params.h_kv, kHeads);
    const int of_k = groups_kv * kPiecesK;
    const int of_v = groups_kv * kPiecesV;
    Item item;
    item.token = token;
    item.kind = index < of_k ? Kind::k : index < of_k + of_v ? Kind::v : Kind::q;
    if (item.kind == Kind::v) {
      index -= of_k;
      item.head = index / kPiecesV * kHeads;
      item.column = index % kPiecesV * kPiece;
      item.count = kPiece;
      item.heads = params.h_kv;
      return item;
    }
    if (item.kind == Kind::q) index -= of_k + of_v;
    item.heads = item.kind == Kind::q ? params.h_q : params.h_kv;
    item.head = index / kPiecesK * kHeads;
    const int piece = index % kPiecesK;
    item.turns = kHalves ? piece < kPairPieces : piece * kPiece < kRotaryDims;
    const bool is_behind = kHalves && !item.turns;
    item.column = is_behind ? kRotaryDims + (piece - kPairPieces) * kPiece : piece * kPiece;
    const int last = kHalves && item.turns ? kPairs : Config::kHeadDimQk;
    item.count = last - item.column < kPiece ? last - item.column : kPiece;
    return item;
  }

  FA_DEVICE void load(const Item& item, Chunk (&pieces)[kHeads][kHalves ? 2 : 1]) const {
    const int entry = item.token / params.s_new;  // 0 of a packed batch
    const int row = item.token - entry * params.s_new;
    if (item.kind == Kind::v) {
      const T* const rows =
          static_cast<const T*>(params.v) + entry * params.stride_v_b + row * params.stride_v_s + item.column;
      FA_UNROLL
      for (int i = 0; i < kHeads; ++i) {
        if (item.head + i < item.heads) {
          load_columns<kWidthV>(pieces[i][0], rows + (item.head + i) * params.stride_v_h, kPiece);
        }
      }
    } else if (item.kind != Kind::none) {
      const bool is_q = item.kind == Kind::q;
      const int64_t stride_h = is_q ? params.stride_q_h : params.stride_k_h;
      const T* const rows = static_cast<const T*>(is_q ? params.q : params.k) +
                            entry * (is_q ? params.stride_q_b : params.stride_k_b) +
                            row * (is_q ? params.stride_q_s : params.stride_k_s) + item.column;
      FA_UNROLL
      for (int i = 0; i < kHeads; ++i) {
        if (item.head + i >= item.heads) continue;
        load_columns<kWidthK>(pieces[i][0], rows + (item.head + i) * stride_h, item.count);
        if constexpr (kHalves) {
          if (item.turns) load_columns<kWidthK>(pieces[i][1], rows + (item.head + i) * stride_h + kPairs, item.count);
        }
      }
    }
  }

  FA_DEVICE void store(const Item& item, const Place& place, const Chunk (&pieces)[kHeads][kHalves ? 2 : 1]) const {
    if (!place.is_token || (place.page < 0 && item.kind != Kind::q)) return;
    if (item.kind == Kind::v) {
      T* const rows = static_cast<T*>(params.v_cache) + place.page * params.stride_v_cache_page +
                      place.row * params.stride_v_cache_s + item.column;
      FA_UNROLL
      for (int i = 0; i < kHeads; ++i) {
        if (item.head + i < item.heads) {
          store_columns<kWidthV>(rows + (item.head + i) * params.stride_v_cache_h, pieces[i][0], kPiece);
        }
      }
    } else if (item.kind != Kind::none) {
      const bool is_q = item.kind == Kind::q;
      const int64_t stride_h = is_q ? params.stride_q_out_h : params.stride_k_cache_h;
      T* const rows = (is_q ? row_of_q(item.token)
                            : static_cast<T*>(params.k_cache) + place.page * params.stride_k_cache_page +
                                  place.row * params.stride_k_cache_s) +
                      item.column;
      FA_UNROLL
      for (int i = 0; i < kHeads; ++i) {
        if (item.head + i >= item.heads) continue;
        store_columns<kWidthK>(rows + (item.head + i) * stride_h, pieces[i][0], item.count);
        if constexpr (kHalves) {
          if (item.turns) store_columns<kWidthK>(rows + (item.head + i) * stride_h + kPairs, pieces[i][1], item.count);
        }
      }
    }
  }

  FA_DEVICE T* row_of_q(int token) const {
    const int entry = token / params.s_new;
    return static_cast<T*>(params.q_out) + entry * params.stride_q_out_b +
           (token - entry * params.s_new) * params.stride_q_out_s;
  }

  /// Of the token `first` + `local`, one of the few that a warp has. Called by whole warps.
  FA_DEVICE Place place_of_mine(int first, int local, int end) const {
    Place mine;
    const int last = ptx::shfl(local, kWarpSize - 1);
    for (int i = ptx::shfl(local, 0); i <= last && i < end; ++i) {
      const Place place = place_of(first + i);
      if (i == local) mine = place;
    }
    return mine;
  }

  FA_DEVICE Place place_of(int token) const {
    Place place;
    int request = 0;
    if (params.used_kv != nullptr) {
      request = params.cu == nullptr ? token / params.s_new : sequence_of(token);
      int row = token - request * params.s_new;
      int count = params.s_new;
      if (params.cu != nullptr) {
        const Span span = span_of(params.cu, nullptr, request, params.tokens, params.tokens);
        row = token - span.first;
        count = span.count;
      }
      if (row < 0 || row >= count) return place;
      place.position = static_cast<int64_t>(ptx::ld_global(params.used_kv + request)) - count + row;
    }
    place.is_token = true;
    if (params.slots != nullptr || params.slots_64 != nullptr) {
      put_at_slot(token, place);
    } else {
      put_at_position(request, place);
    }
    if (params.positions != nullptr) place.position = ptx::ld_global(params.positions + token);
    if (params.positions_64 != nullptr) place.position = ptx::ld_global(params.positions_64 + token);
    return place;
  }

  /// The last sequence that starts at or before a row. With as many rows each, one look shows it.
  FA_DEVICE int sequence_of(int token) const {
    const auto start = [&](int i) { return clamp(ptx::ld_global(params.cu + i), 0, params.tokens); };
    if (params.even_rows > 0) {
      const int guess = token / params.even_rows;
      if (guess < params.b && start(guess) <= token && token < start(guess + 1)) return guess;
    }
    return last_sequence(params.b, [&](int i) { return start(i) <= token; });
  }

  FA_DEVICE int page_rows() const { return Config::kPageSize > 0 ? Config::kPageSize : params.page_rows; }

  FA_DEVICE void put_at_slot(int token, Place& place) const {
    const int64_t slot =
        params.slots != nullptr ? ptx::ld_global(params.slots + token) : ptx::ld_global(params.slots_64 + token);
    if (slot < 0 || slot >= static_cast<int64_t>(params.pages) * page_rows()) return;
    place.page = static_cast<int>(slot / page_rows());
    place.row = static_cast<int>(slot % page_rows());
  }

  FA_DEVICE void put_at_position(int request, Place& place) const {
    const int row = params.batch_index == nullptr ? request : ptx::ld_global(params.batch_index + request);
    if (row < 0 || row >= params.table_rows || place.position < 0) return;
    if (place.position >= static_cast<int64_t>(params.max_pages) * page_rows()) return;
    const auto position = static_cast<uint32_t>(place.position);
    const auto rows = static_cast<uint32_t>(page_rows());
    int page = row;
    if (params.block_table != nullptr) {
      page = ptx::ld_global(params.block_table + row * params.stride_table_row +
                            static_cast<int>(position / rows) * params.stride_table_page);
    }
    if (page < 0 || page >= params.pages) return;
    place.page = page;
    place.row = static_cast<int>(params.block_table != nullptr ? position % rows : position);
  }

  FA_DEVICE Turns turns_of(const Item& item, int64_t position) const {
    Turns turns;
    const int first = Config::kInterleaved ? item.column / 2 : item.column;
    if constexpr (kTable == RotaryTable::none) {
      FA_UNROLL
      for (int i = 0; i < kTurns; ++i) {
        cos_sin(turn_at(position, params.turns[first + i]), turns.cosine[i], turns.sine[i]);
      }
    } else if constexpr (kTable == RotaryTable::floats) {
      look_up<float>(turns, position, first);
    } else {
      look_up<T>(turns, position, first);
    }
    return turns;
  }

  /// A position that the table does not have gets its nearest one.
  template <class Number>
  FA_DEVICE void look_up(Turns& turns, int64_t position, int first) const {
    const int row = position < 0                         ? 0
                    : position >= params.table_positions ? params.table_positions - 1
                                                         : static_cast<int>(position);
    load_numbers<Number>(turns.cosine, static_cast<const Number*>(params.cos) + row * params.stride_cos + first, first);
    load_numbers<Number>(turns.sine, static_cast<const Number*>(params.sin) + row * params.stride_sin + first, first);
  }
  template <class Number>
  static FA_DEVICE void load_numbers(float (&numbers)[kTurns], const Number* source, int first) {
    constexpr int kMost = kPieceElements<Number>;
    constexpr int kWidth = !Config::kAligned || kPairs % kTurns != 0 ? 1 : kTurns < kMost ? kTurns : kMost;
    FA_UNROLL
    for (int i = 0; i < kTurns; i += kWidth) {
      Chunk chunk = {};
      if (first + i < kPairs) load_columns<kWidth>(chunk, source + i, kWidth);
      FA_UNROLL
      for (int j = 0; j < kWidth; ++j) numbers[i + j] = element_of<Number>(chunk, j);
    }
  }

  static FA_DEVICE void turn(const Item& item, const Turns& turns, Chunk (&pieces)[kHeads][kHalves ? 2 : 1]) {
    FA_UNROLL
    for (int i = 0; i < kHeads; ++i) {
      if constexpr (kHalves) {
        turn_halves(pieces[i][0], pieces[i][1], turns);
      } else {
        turn_neighbours(pieces[i][0], turns, (kRotaryDims - item.column) / 2);
      }
    }
  }

  static FA_DEVICE void turn_halves(Chunk& low, Chunk& high, const Turns& turns) {
    float first[kPiece], second[kPiece];
    FA_UNROLL
    for (int i = 0; i < kPiece; ++i) {
      first[i] = element_of<T>(low, i);
      second[i] = element_of<T>(high, i);
      rotate(first[i], second[i], turns.cosine[i % kTurns], turns.sine[i % kTurns]);
    }
    low = chunk_of<T>(first);
    high = chunk_of<T>(second);
  }

  /// Only the first `count` pairs of a piece.
  static FA_DEVICE void turn_neighbours(Chunk& piece, const Turns& turns, int count) {
    float numbers[kPiece];
    FA_UNROLL
    for (int i = 0; i < kPiece; ++i) numbers[i] = element_of<T>(piece, i);
    FA_UNROLL
    for (int i = 0; i < kPiece / 2; ++i) rotate(numbers[2 * i], numbers[2 * i + 1], turns.cosine[i], turns.sine[i]);
    const Chunk turned = chunk_of<T>(numbers);
    FA_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int pair = sizeof(T) == 2 ? i : i / 2;
      if (pair < count) piece.word[i] = turned.word[i];
    }
  }
};

template <class Config>
FA_DEVICE void append(const AppendParams& params) {
  Append<Config>{params}.run();
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_APPEND_CUH_
