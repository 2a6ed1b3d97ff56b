#ifndef FA_TEMPLATES_SM90_SM90_FORWARD_CUH_
#define FA_TEMPLATES_SM90_SM90_FORWARD_CUH_

#include <common/constants.cuh>
#include <common/forward_schedule.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/mbarrier.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>
#include <ptx/tma.cuh>
#include <ptx/wgmma.cuh>
#include <sm90/sm90_forward_params.cuh>
#include <sm90/sm90_shared_tile.cuh>
#include <sm90/sm90_softmax.cuh>

namespace fa::sm90 {

using kernel::ForwardTile;
using kernel::KvRange;
using kernel::kWarpSize;
using kernel::Sm90ForwardParams;

inline constexpr int kWarpgroup = 128;

/// Position in a ring of shared memory buffers, and the parity of the round.
template <int kCount>
struct RingSlot {
  int index = 0;
  uint32_t parity = 0;

  FA_DEVICE void advance() {
    if (++index == kCount) {
      index = 0;
      parity ^= 1;
    }
  }
};

/// FlashAttention-3 forward on wgmma and the copy engine (Shah et al., 2024), as one stream of KV tiles: a producer
/// warp copies tiles into rings of buffers, `kConsumers` warpgroups own 64 query rows each. A warpgroup issues S = Q
/// K^T of the next KV tile, then O += P V of the current one, and computes the softmax of the former while the latter
/// runs; the next KV tile may belong to the next query tile, so that the tensor cores see no boundary between query
/// tiles.
///
/// Config is a struct of constants: Element (f16 or bf16), kHeadDimQk, kHeadDimV, kTileM, kTileN, kStages, kQBuffers,
/// kCausal, kPositiveScale, kTakeTurns, kPackGqa, kSplit.
template <class Config>
struct Forward {
  using T = typename Config::Element;

  static constexpr int kTileM = Config::kTileM;
  static constexpr int kTileN = Config::kTileN;
  static constexpr int kHeadDimQk = Config::kHeadDimQk;
  static constexpr int kHeadDimV = Config::kHeadDimV;
  static constexpr int kStages = Config::kStages;
  static constexpr int kQBuffers = Config::kQBuffers;
  static constexpr int kConsumers = kTileM / 64;
  static constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
  // What the launch gives every thread, redistributed: 65,536 registers in all.
  static constexpr int kProducerRegisters = kConsumers == 1 ? 56 : kConsumers == 2 ? 24 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 1 ? 256 : kConsumers == 2 ? 240 : 160;
  static constexpr int kSSteps = kernel::ceil_div(kHeadDimQk, 16);
  static constexpr int kPSteps = kTileN / 16;

  static_assert(kTileM % 64 == 0 && kConsumers >= 1 && kConsumers <= 3, "64 query rows a warpgroup");
  static_assert(kTileN % 16 == 0 && kTileN <= 256, "keys are consumed 16 at a time");
  static_assert(kHeadDimQk % 8 == 0 && kHeadDimV % 8 == 0, "head dims are multiples of 8");
  static_assert(kStages >= 2, "K runs a tile ahead of V");

  using QTile = SwizzledTile<kTileM, kHeadDimQk>;
  using KTile = SwizzledTile<kTileN, kHeadDimQk>;
  using VTile = SwizzledTile<kTileN, kHeadDimV>;
  using SGemm = ptx::Wgmma<T, kTileN>;
  using OGemm = ptx::Wgmma<T, kHeadDimV>;
  using S = float[kTileN / 2];
  using P = uint32_t[kPSteps][4];
  using O = float[kHeadDimV / 2];
  using Rows = kernel::RowMap<Config::kPackGqa>;

  static constexpr int kBarrierBytes = 1024;
  static constexpr int kKOffset = kQBuffers * QTile::kBytes;
  static constexpr int kVOffset = kKOffset + kStages * KTile::kBytes;
  static constexpr int kBarrierOffset = kVOffset + kStages * VTile::kBytes;
  static constexpr int kSharedBytes = kBarrierOffset + kBarrierBytes;

  const Sm90ForwardParams& p;
  const kernel::ForwardParams& params;
  const uint32_t shared = ptx::dynamic_shared();
  const int row_count;
  const int tiles;

  FA_DEVICE explicit Forward(const Sm90ForwardParams& all)
      : p(all),
        params(all.base),
        row_count(Config::kPackGqa ? all.base.s_q * all.base.group : all.base.s_q),
        tiles(all.base.m_blocks * all.base.heads * all.base.b * all.base.splits) {}

  FA_DEVICE uint32_t q_shared(int buffer) const { return shared + buffer * QTile::kBytes; }
  FA_DEVICE uint32_t k_shared(int stage) const { return shared + kKOffset + stage * KTile::kBytes; }
  FA_DEVICE uint32_t v_shared(int stage) const { return shared + kVOffset + stage * VTile::kBytes; }
  // "Full": the copy has landed. "Empty": every warp has read the buffer.
  FA_DEVICE uint32_t k_full(int stage) const { return shared + kBarrierOffset + 8 * stage; }
  FA_DEVICE uint32_t k_empty(int stage) const { return k_full(kStages + stage); }
  FA_DEVICE uint32_t v_full(int stage) const { return k_full(2 * kStages + stage); }
  FA_DEVICE uint32_t v_empty(int stage) const { return k_full(3 * kStages + stage); }
  FA_DEVICE uint32_t q_full(int buffer) const { return k_full(4 * kStages + buffer); }
  FA_DEVICE uint32_t q_empty(int buffer) const { return k_full(4 * kStages + kQBuffers + buffer); }

  FA_DEVICE void run() {
    if (ptx::thread_index() == 0) init_barriers();
    ptx::sync_threads();  // the barriers exist for all
    const int warpgroup = ptx::shfl(ptx::thread_index() / kWarpgroup, 0);
    if (warpgroup == 0) {
      ptx::decrease_registers<kProducerRegisters>();
      if (ptx::thread_index() == 0) produce();
    } else {
      ptx::increase_registers<kConsumerRegisters>();
      consume(warpgroup - 1);
    }
  }

  FA_DEVICE void init_barriers() const {
    constexpr int kReaders = 4 * kConsumers;  // warps
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
      ptx::mbarrier_init(q_empty(i), kReaders);
    }
    ptx::fence_mbarrier_init();
  }

  /// A query tile and the KV tiles it sees.
  struct Query {
    ForwardTile tile;
    KvRange range;
  };

  /// The query tile of this block in `round`: one of tiles round * blocks ... (round + 1) * blocks - 1, every other
  /// round backwards, which evens out what blocks get when lengths fall from tile to tile. Past the last one: tiles or
  /// more.
  FA_DEVICE int tile_index(int round) const {
    const int blocks = ptx::block_count();
    const int place = ptx::block_index();
    return round * blocks + (round % 2 == 0 ? place : blocks - 1 - place);
  }

  FA_DEVICE Query query(int round) const {
    Query query;
    query.tile = kernel::forward_tile<Config::kCausal>(params, tile_index(round));
    const Rows rows{params.group, query.tile.head};
    const int first = query.tile.m_block * kTileM;
    const int last = (first + kTileM < row_count ? first + kTileM : row_count) - 1;
    query.range =
        kernel::kv_range<Config::kCausal, kTileN>(params, rows.position(first), rows.position(last), query.tile.split);
    return query;
  }

  // ---- producer: one thread

  FA_DEVICE void produce() const {
    ptx::prefetch_tensor_map(p.map_q);
    ptx::prefetch_tensor_map(p.map_k);
    ptx::prefetch_tensor_map(p.map_v);
    RingSlot<kStages> k_slot, v_slot;
    RingSlot<kQBuffers> q_slot;
    bool pending = false;  // the last V of the query tile before: it follows the first K of the next one
    int pending_head = 0, pending_batch = 0, pending_n = 0;
    for (int round = 0; tile_index(round) < tiles; ++round) {
      const auto [tile, range] = query(round);
      if (range.begin >= range.end) continue;
      const Rows rows{params.group, tile.head};
      const int kv_head = rows.kv_head();
      const int batch = tile.batch;
      load_k(k_slot, range.end - 1, kv_head, batch);
      if (pending) load_v(v_slot, pending_n, pending_head, pending_batch);
      load_q(q_slot, tile);
      for (int n = range.end - 2; n >= range.begin; --n) {
        load_k(k_slot, n, kv_head, batch);
        load_v(v_slot, n + 1, kv_head, batch);
      }
      pending = true;
      pending_n = range.begin;
      pending_head = kv_head;
      pending_batch = batch;
    }
    if (pending) load_v(v_slot, pending_n, pending_head, pending_batch);
  }

  FA_DEVICE void load_k(RingSlot<kStages>& slot, int n, int head, int batch) const {
    ptx::mbarrier_wait(k_empty(slot.index), slot.parity ^ 1);  // all have read what was there
    ptx::mbarrier_arrive_expect_tx(k_full(slot.index), KTile::kBytes);
    FA_UNROLL
    for (int slab = 0; slab < KTile::kSlabs; ++slab) {
      ptx::tma_load_4d(k_shared(slot.index) + slab * KTile::kSlabBytes, p.map_k, k_full(slot.index),
                       ptx::L2Policy::evict_last, slab * kSlabColumns, n * kTileN, head, batch);
    }
    slot.advance();
  }

  FA_DEVICE void load_v(RingSlot<kStages>& slot, int n, int head, int batch) const {
    ptx::mbarrier_wait(v_empty(slot.index), slot.parity ^ 1);  // all have read what was there
    ptx::mbarrier_arrive_expect_tx(v_full(slot.index), VTile::kBytes);
    FA_UNROLL
    for (int slab = 0; slab < VTile::kSlabs; ++slab) {
      ptx::tma_load_4d(v_shared(slot.index) + slab * VTile::kSlabBytes, p.map_v, v_full(slot.index),
                       ptx::L2Policy::evict_last, slab * kSlabColumns, n * kTileN, head, batch);
    }
    slot.advance();
  }

  FA_DEVICE void load_q(RingSlot<kQBuffers>& slot, const ForwardTile& tile) const {
    ptx::mbarrier_wait(q_empty(slot.index), slot.parity ^ 1);  // all have read what was there
    ptx::mbarrier_arrive_expect_tx(q_full(slot.index), QTile::kBytes);
    const int head = Config::kPackGqa ? 0 : tile.head % params.group;
    const int kv_head = Config::kPackGqa ? tile.head : tile.head / params.group;
    const int row = Config::kPackGqa ? tile.m_block * kTileM / params.group : tile.m_block * kTileM;
    FA_UNROLL
    for (int slab = 0; slab < QTile::kSlabs; ++slab) {
      ptx::tma_load_5d(q_shared(slot.index) + slab * QTile::kSlabBytes, p.map_q, q_full(slot.index),
                       ptx::L2Policy::evict_first, slab * kSlabColumns, head, row, kv_head, tile.batch);
    }
    slot.advance();
  }

  // ---- consumers: one warpgroup each

  /// A consumer's place in the stream of KV tiles.
  struct Cursor {
    int round = -1;
    int n = 0;      // KV tile
    int begin = 0;  // last KV tile of the query tile
    int row = 0;    // first row of this warp, counted in the (packed) head
  };

  FA_DEVICE void consume(int consumer) const {
    const int lane = ptx::thread_index() % kWarpSize;
    const int warp_row = consumer * 64 + ptx::thread_index() % kWarpgroup / kWarpSize * 16;  // in the query tile
    RingSlot<kStages> k_slot, v_slot;
    RingSlot<kQBuffers> q_slot;
    S s;
    P probabilities;
    O o;
    TrailingSoftmax softmax;

    Cursor ahead;
    if (!seek(ahead, warp_row, lane)) return;
    if (Config::kTakeTurns && consumer == kConsumers - 1) ptx::barrier_arrive(1, 2 * kWarpgroup);

    ptx::mbarrier_wait(q_full(q_slot.index), q_slot.parity);
    ptx::mbarrier_wait(k_full(k_slot.index), k_slot.parity);
    issue_scores(s, q_slot.index, consumer, k_slot.index);
    ptx::wgmma_wait<0>();
    ptx::wgmma_tie(s);
    release(k_empty(k_slot.index), lane);
    k_slot.advance();
    if (ahead.n == ahead.begin) {
      release(q_empty(q_slot.index), lane);
      q_slot.advance();
    }
    finish_scores(s, ahead, lane);
    softmax.update(s, softmax_scale_log2());
    pack(probabilities, s);
    bool first = true;  // of the current query tile: O is not yet defined

    int round = ahead.round;  // whose O is in the making
    while (seek_next(ahead, warp_row, lane)) {
      const bool crosses = ahead.round != round;
      if (Config::kTakeTurns) ptx::barrier_sync(1 + consumer, 2 * kWarpgroup);  // my turn to feed the tensor cores
      if (crosses) ptx::mbarrier_wait(q_full(q_slot.index), q_slot.parity);
      ptx::mbarrier_wait(k_full(k_slot.index), k_slot.parity);
      issue_scores(s, q_slot.index, consumer, k_slot.index);
      ptx::mbarrier_wait(v_full(v_slot.index), v_slot.parity);
      issue_output(o, probabilities, v_slot.index, !first);
      if (Config::kTakeTurns) {
        ptx::barrier_arrive(1 + (consumer + 1 == kConsumers ? 0 : consumer + 1), 2 * kWarpgroup);  // the next one's
      }
      ptx::wgmma_wait<1>();
      ptx::wgmma_tie(s);
      release(k_empty(k_slot.index), lane);
      k_slot.advance();
      if (ahead.n == ahead.begin) {
        release(q_empty(q_slot.index), lane);
        q_slot.advance();
      }
      finish_scores(s, ahead, lane);
      TrailingSoftmax done = softmax;
      if (crosses) softmax = TrailingSoftmax();
      const bool rescale = softmax.update(s, softmax_scale_log2());
      ptx::wgmma_wait<0>();
      ptx::wgmma_tie(o);
      release(v_empty(v_slot.index), lane);
      v_slot.advance();
      if (crosses) {
        store(o, done, query(round).tile, warp_row, lane);
      } else if (rescale) {
        multiply(o, softmax.factor);
      }
      first = crosses;
      round = ahead.round;
      pack(probabilities, s);
    }

    ptx::mbarrier_wait(v_full(v_slot.index), v_slot.parity);
    issue_output(o, probabilities, v_slot.index, !first);
    ptx::wgmma_wait<0>();
    ptx::wgmma_tie(o);
    store(o, softmax, query(round).tile, warp_row, lane);
  }

  /// The first KV tile of the next query tile that has any; rows of those that have none are stored at once.
  FA_DEVICE bool seek(Cursor& cursor, int warp_row, int lane) const {
    while (tile_index(++cursor.round) < tiles) {
      const auto [tile, range] = query(cursor.round);
      cursor.n = range.end - 1;
      cursor.begin = range.begin;
      cursor.row = tile.m_block * kTileM + warp_row;
      if (range.begin < range.end) return true;
      store_empty(tile, warp_row, lane);
    }
    return false;
  }

  FA_DEVICE bool seek_next(Cursor& cursor, int warp_row, int lane) const {
    if (--cursor.n >= cursor.begin) return true;
    return seek(cursor, warp_row, lane);
  }

  /// One arrival a warp: its share of every wgmma that read the buffer is complete.
  FA_DEVICE void release(uint32_t barrier, int lane) const {
    if (lane == 0) ptx::mbarrier_arrive(barrier);
  }

  /// Starts S = Q K^T, [64, tile_n].
  FA_DEVICE void issue_scores(S& s, int q_buffer, int consumer, int stage) const {
    ptx::wgmma_tie(s);
    ptx::wgmma_fence();
    FA_UNROLL
    for (int step = 0; step < kSSteps; ++step) {
      SGemm::template shared<false>(s, QTile::k_major(q_shared(q_buffer), consumer * 64, step),
                                    KTile::k_major(k_shared(stage), 0, step), step != 0);
    }
    ptx::wgmma_commit();
  }

  /// Starts O += P V, [64, d_v].
  FA_DEVICE void issue_output(O& o, const P& probabilities, int stage, bool accumulate) const {
    ptx::wgmma_tie(o);
    ptx::wgmma_fence();
    FA_UNROLL
    for (int step = 0; step < kPSteps; ++step) {
      OGemm::template registers<true>(o, probabilities[step], VTile::mn_major(v_shared(stage), step),
                                      accumulate || step != 0);
    }
    ptx::wgmma_commit();
  }

  /// Scale (where it changes the order) and mask.
  FA_DEVICE void finish_scores(S& s, const Cursor& cursor, int lane) const {
    if constexpr (!Config::kPositiveScale) {
      FA_UNROLL
      for (int i = 0; i < kTileN / 2; ++i) s[i] *= params.scale_log2;
    }
    const Rows rows{params.group, 0};
    const int first_key = cursor.n * kTileN;
    // The smallest limit of the warp's rows is that of its first.
    if (kernel::key_limit<Config::kCausal>(params, rows.position(cursor.row)) >= first_key + kTileN) return;
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int limit = kernel::key_limit<Config::kCausal>(params, rows.position(cursor.row + lane / 4 + 8 * r)) -
                        first_key - 2 * (lane % 4);
      FA_UNROLL
      for (int j = 0; j < kTileN / 8; ++j) {
        FA_UNROLL
        for (int e = 0; e < 2; ++e) {
          if (8 * j + e >= limit) s[4 * j + 2 * r + e] = -kInfinity;
        }
      }
    }
  }

  FA_DEVICE float softmax_scale_log2() const { return Config::kPositiveScale ? params.scale_log2 : 1.f; }
  FA_DEVICE float softmax_scale() const { return Config::kPositiveScale ? params.scale : kernel::kLn2; }

  /// Accumulators become the A operand of the next product.
  FA_DEVICE static void pack(P& probabilities, const S& s) {
    FA_UNROLL
    for (int i = 0; i < kTileN / 4; ++i) {
      probabilities[i / 4][i % 4] = ptx::convert_pair<T>(s[2 * i], s[2 * i + 1]);
    }
  }

  FA_DEVICE static void multiply(O& o, const float (&factor)[2]) {
    FA_UNROLL
    for (int i = 0; i < kHeadDimV / 2; ++i) o[i] *= factor[i / 2 % 2];
  }

  FA_DEVICE T* o_row(const ForwardTile& tile, const Rows& rows, int row) const {
    return static_cast<T*>(params.o) + tile.batch * params.stride_o_b + rows.query_head(row) * params.stride_o_h +
           rows.position(row) * params.stride_o_s;
  }

  /// O / sum and the log-sum-exp, straight from registers: the four lanes of a quad exchange what they hold of four
  /// neighbouring n8 tiles, so that each stores 16 bytes.
  FA_DEVICE void store(const O& o, TrailingSoftmax softmax, const ForwardTile& tile, int warp_row, int lane) const {
    softmax.finish();
    const Rows rows{params.group, tile.head};
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int row = tile.m_block * kTileM + warp_row + lane / 4 + 8 * r;
      const float inverse = softmax.inverse_sum(r);
      const bool inside = row < row_count;
      T* const target = o_row(tile, rows, inside ? row : 0);
      FA_UNROLL
      for (int j = 0; j + 4 <= kHeadDimV / 8; j += 4) {
        uint32_t words[4];
        FA_UNROLL
        for (int i = 0; i < 4; ++i) {
          words[i] = ptx::convert_pair<T>(o[4 * (j + i) + 2 * r] * inverse, o[4 * (j + i) + 2 * r + 1] * inverse);
        }
        transpose_quad(words, lane);
        if (inside) {
          ptx::st_global_chunk(target + 8 * (j + lane % 4), {{words[0], words[1], words[2], words[3]}});
        }
      }
      FA_UNROLL
      for (int j = kHeadDimV / 32 * 4; j < kHeadDimV / 8; ++j) {
        if (inside) {
          ptx::st_global(reinterpret_cast<uint32_t*>(target + 8 * j + 2 * (lane % 4)),
                         ptx::convert_pair<T>(o[4 * j + 2 * r] * inverse, o[4 * j + 2 * r + 1] * inverse));
        }
      }
      if (params.lse != nullptr && lane % 4 == 0 && inside) {
        ptx::st_global(params.lse + tile.batch * params.stride_lse_b + rows.query_head(row) * params.stride_lse_h +
                           rows.position(row) * params.stride_lse_s,
                       softmax.lse(r, softmax_scale()));
      }
    }
  }

  /// words[i] of lane q becomes words[q] of lane i, among the four lanes of a quad.
  FA_DEVICE static void transpose_quad(uint32_t (&words)[4], int lane) {
    FA_UNROLL
    for (int bit = 1; bit <= 2; bit *= 2) {
      const bool high = (lane & bit) != 0;
      FA_UNROLL
      for (int i = 0; i < 4; ++i) {
        if ((i & bit) != 0) continue;
        const uint32_t received = ptx::shfl_xor(high ? words[i] : words[i | bit], bit);
        words[i] = high ? received : words[i];
        words[i | bit] = high ? words[i | bit] : received;
      }
    }
  }

  FA_DEVICE void store_empty(const ForwardTile& tile, int warp_row, int lane) const {
    O zeros = {};
    store(zeros, TrailingSoftmax(), tile, warp_row, lane);
  }
};

template <class Config>
FA_DEVICE void forward(const Sm90ForwardParams& params) {
  Forward<Config>(params).run();
}

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_FORWARD_CUH_
