#ifndef FA_TEMPLATES_SM90_SM90_BACKWARD_WIDE_CUH_
#define FA_TEMPLATES_SM90_SM90_BACKWARD_WIDE_CUH_

#include <sm90/sm90_backward_by_columns.cuh>

namespace fa::sm90 {

/// dK, dV and additions to dQ's accumulator for head dims above 256, by four thread blocks of a cluster, each with 128
/// columns of dK, dV and dQ. Scores need all columns: each block computes those of 64 keys, and the copy engines take
/// them to the three others:
///   blocks 0, 1:  S = Q K^T,    P = exp2(scale_log2 * S - LSE)
///   blocks 2, 3:  dP = dO V^T,  dS = P o (dP - delta)
///   all:          dV += P^T dO,  dK += dS^T Q,  dQ = dS K, of 128 keys and their columns.
///
/// Warpgroups have the tasks of BackwardPair's. The query operand of the scores comes through a ring of kStages slabs
/// of 64 columns, of which each block uses up all: copies of the block's own columns are the sums' alone. Columns
/// behind the last are zeros, which are neither stored nor added.
///
/// Config is as for BackwardPair.
template <class Config>
struct BackwardWide : BackwardByColumns<Config, 4> {
  FA_BY_COLUMNS(4);

  static constexpr int kBlocks = 4;
  static constexpr int kKeys = 64;      // of a block's scores
  static constexpr int kColumns = 128;  // of a block
  static constexpr int kOwnSlabs = kColumns / kSlabColumns;
  static constexpr int kOwnBytes = kOwnSlabs * RowSlab::kBytes;
  using ScoreGemm = ptx::Wgmma<T, kKeys>;
  using Scores = float[kKeys / 2];  // [64, 64 keys]
  using Sum = float[kColumns / 2];  // [64, columns of a block]
  using Ring = BufferRing<kStages>;

  static_assert(kQkSlabs > 4 && kVSlabs > 4 && kQkSlabs <= 8 && kVSlabs <= 8, "head dims above 256, up to 512");

  // Of K or V, for the scores; then K of the block's columns, and those of Q and dO.
  static constexpr int kDqKeysOffset = kKeysOffset + greater(kQkSlabs, kVSlabs) * RowSlab::kBytes;
  static constexpr int kQOffset = kDqKeysOffset + (Config::kWriteDq ? SwizzledTile<kTileN, kColumns>::kBytes : 0);
  static constexpr int kDoOffset = kQOffset + kOwnBytes;
  static constexpr int kRingOffset = kDoOffset + kOwnBytes;
  static constexpr int kSharedBytes = kRingOffset + kStages * RowSlab::kBytes;
  static_assert(8 * (14 + 2 * kStages) <= 1024, "the barriers have 1024 bytes");

  /// Of a block.
  struct Columns {
    int block;

    FA_DEVICE int first_qk() const { return block * kColumns; }
    FA_DEVICE int first_v() const { return block * kColumns; }
    FA_DEVICE int qk() const { return clamped(kHeadDimQk - first_qk()); }
    FA_DEVICE int v() const { return clamped(kHeadDimV - first_v()); }
    FA_DEVICE static int clamped(int count) { return count < 0 ? 0 : count < kColumns ? count : kColumns; }
  };

  // "Half": of the tile's keys, and whose scores a block computes.
  FA_DEVICE uint32_t p_empty() const { return barrier(3); }   // of all blocks, in that which fills the half
  FA_DEVICE uint32_t ds_empty() const { return barrier(5); }  // likewise
  FA_DEVICE uint32_t p_full(int half) const { return barrier(8 + half); }
  FA_DEVICE uint32_t ds_full(int half) const { return barrier(10 + half); }
  FA_DEVICE uint32_t q_full() const { return barrier(2); }
  FA_DEVICE uint32_t q_empty() const { return barrier(4); }
  FA_DEVICE uint32_t do_full() const { return barrier(12); }
  FA_DEVICE uint32_t do_empty() const { return barrier(13); }
  FA_DEVICE uint32_t slab_full(int stage) const { return barrier(14 + stage); }
  FA_DEVICE uint32_t slab_empty(int stage) const { return slab_full(kStages + stage); }

  FA_DEVICE void run() const { this->run_roles(*this); }

  FA_DEVICE void init_barriers(int) const {
    // Warps: 4 compute scores, 8 sums, of which 4 read a half, 4 dQ.
    constexpr int kDqWarps = Config::kWriteDq ? 4 : 0;
    constexpr int kSumWarps = kSums ? 4 : 0;
    ptx::mbarrier_init(keys_full(), 1);
    ptx::mbarrier_init(dq_keys_full(), 1);
    ptx::mbarrier_init(p_empty(), kBlocks * kSumWarps + 4);
    ptx::mbarrier_init(ds_empty(), kBlocks * (kSumWarps + kDqWarps));
    FA_UNROLL
    for (int half = 0; half < 2; ++half) {
      ptx::mbarrier_init(p_full(half), 4);
      ptx::mbarrier_init(ds_full(half), 4);
    }
    ptx::mbarrier_init(q_full(), 1);
    ptx::mbarrier_init(q_empty(), 8);
    ptx::mbarrier_init(do_full(), 1);
    ptx::mbarrier_init(do_empty(), 8);
    ptx::mbarrier_init(dq_full(), 4);
    ptx::mbarrier_init(dq_empty(), 1);
    FA_UNROLL
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::mbarrier_init(slab_full(stage), 1);
      ptx::mbarrier_init(slab_empty(stage), 4);
    }
    ptx::fence_mbarrier_init();
  }

  /// One arrival a warp in block `to`, which fills the buffer.
  FA_DEVICE static void release_to(uint32_t barrier, int to) {
    if (lane_index() == 0) ptx::mbarrier_arrive_remote(ptx::map_shared(barrier, to));
  }

  /// So many slabs of 64 columns of 64 keys each, `stride` bytes apart.
  FA_DEVICE void load_keys(uint32_t target, int stride, const kernel::TensorMap& map, int first_column, int count,
                           uint32_t full, const Job& work, int first_key) const {
    FA_UNROLL
    for (int slab = 0; slab < count; ++slab) {
      ptx::tma_load_4d(target + slab * stride, map, full, ptx::L2Policy::evict_first,
                       first_column + slab * kSlabColumns, first_key, work.tile.head, work.tile.batch);
    }
  }

  // ---- warpgroup 0: P or dS of 64 keys

  // kPart 0: P, of Q and K; 1: dS, of dO and V.
  template <int kPart>
  static constexpr int kSlabs = kPart == 0 ? kQkSlabs : kVSlabs;

  /// What is copied next: slabs of one query tile after the other.
  struct Ahead {
    Query query;
    int slab;
    int left;
  };
  template <int kPart>
  FA_DEVICE void load_slab(Ahead& ahead, const Job& work, int stage) const {
    load_rows(slab_shared(stage), kPart == 0 ? p.map_q : p.map_dout, ahead.slab, 1, slab_full(stage), work,
              ahead.query);
    --ahead.left;
    if (++ahead.slab != kSlabs<kPart>) return;
    ahead.slab = 0;
    ahead.query.advance(work, params);
  }

  FA_DEVICE void compute_scores(const Job& work, int rank) const {
    if (rank < 2) {
      compute_scores<0>(work, rank);
    } else {
      compute_scores<1>(work, rank - 2);
    }
  }
  template <int kPart>
  FA_DEVICE void compute_scores(const Job& work, int half) const {
    Scores scores;
    const int steps = work.count();
    const int first_key = work.first_key() + kKeys * half;
    Query query(work, params);
    Ahead ahead{query, 0, steps * kSlabs<kPart>};
    Ring ring;
    const bool loads = ptx::thread_index() == 0;
    if (loads) {
      ptx::mbarrier_arrive_expect_tx(keys_full(), kSlabs<kPart> * RowSlab::kBytes);
      load_keys(shared + kKeysOffset, RowSlab::kBytes, kPart == 0 ? p.map_k : p.map_v, 0, kSlabs<kPart>, keys_full(),
                work, first_key);
      FA_UNROLL
      for (int stage = 0; stage < kStages; ++stage) {
        if (ahead.left > 0) load_slab<kPart>(ahead, work, stage);
      }
    }
    ptx::sync_warp();  // one lane started the copies
    ptx::mbarrier_wait(keys_full(), 0);
    const uint32_t full = kPart == 0 ? p_full(half) : ds_full(half);
    const uint32_t tile = (kPart == 0 ? p_shared() : ds_shared()) + half * RowSlab::kBytes;
    for (int count = 0; count < steps; ++count) {
      multiply<kPart>(scores, ring, ahead, work, loads);
      if (count == 0) ptx::griddepcontrol_wait();  // for the row statistics
      const float* const statistics =
          (kPart == 0 ? params.lse_log2 : params.delta) + row_index(work, query) + 16 * warp_index() + lane_index() / 4;
      const float row[2] = {ptx::ld_global(statistics), ptx::ld_global(statistics + 8)};
      const int m_block = query.m_block;
      query.advance(work, params);
      if constexpr (kPart == 0) {
        exponentiate(scores, row, first_key, m_block);
      } else {
        FA_UNROLL
        for (int i = 0; i < kKeys / 2; ++i) scores[i] -= row[i / 2 % 2];
        await_shared(p_full(half), count);
        multiply_by_p(scores, p_shared() + half * RowSlab::kBytes);
        const int rows = rows_without_keys(m_block);
        if (Config::kCausal && rows > 0) clear_first_rows(scores, rows);
        ptx::sync_warp();  // all lanes have read P
        release_to(p_empty(), half);
      }
      await_shared(kPart == 0 ? p_empty() : ds_empty(), count + 1);  // of the last step
      hand_on<kPart>(scores, tile + warp_index() * kWarpBytes, full);
    }
    ptx::griddepcontrol_launch_dependents();  // the sums of a step are left
  }

  /// S = Q K^T or dP = dO V^T, [64, 64 keys]. A slab is released as soon as the next one's product has started.
  template <int kPart>
  FA_DEVICE void multiply(Scores& scores, Ring& ring, Ahead& ahead, const Job& work, bool loads) const {
    const uint32_t keys = ptx::without_rank(shared + kKeysOffset);
    Ring read = ring;  // the slab whose product is waited for
    ptx::wgmma_forget(scores);
    FA_UNROLL
    for (int slab = 0; slab < kSlabs<kPart>; ++slab) {
      ptx::mbarrier_wait(slab_full(ring.stage), ring.parity);
      const uint32_t rows = ptx::without_rank(slab_shared(ring.stage));
      ptx::wgmma_fence();
      FA_UNROLL
      for (int step = 0; step < 4 && 64 * slab + 16 * step < (kPart == 0 ? kHeadDimQk : kHeadDimV); ++step) {
        ScoreGemm::template shared<false>(scores, RowSlab::k_major(rows, 0, step),
                                          RowSlab::k_major(keys + slab * RowSlab::kBytes, 0, step), slab + step != 0);
      }
      ptx::wgmma_commit();
      ring.advance();
      if (slab == 0) continue;
      ptx::wgmma_wait<1>();
      refill<kPart>(read, ahead, work, loads);
    }
    ptx::wgmma_wait<0>();
    ptx::wgmma_tie(scores);
    refill<kPart>(read, ahead, work, loads);
  }

  template <int kPart>
  FA_DEVICE void refill(Ring& read, Ahead& ahead, const Job& work, bool loads) const {
    release(slab_empty(read.stage));
    if (loads && ahead.left > 0) {
      ptx::mbarrier_wait(slab_empty(read.stage), read.parity);  // the four warps have read it
      load_slab<kPart>(ahead, work, read.stage);
    }
    ptx::sync_warp();  // one lane started the copy
    read.advance();
  }

  /// Stores a warp's 16 rows of P or dS, rounded, for this block, and copies them to the others.
  template <int kPart>
  FA_DEVICE static void hand_on(const Scores& scores, uint32_t rows, uint32_t full) {
    store_scores(scores, rows);
    if (lane_index() != 0) return;
    ptx::mbarrier_arrive(full);
    const int rank = ptx::cluster_rank();
    FA_UNROLL
    for (int i = 1; i < kBlocks; ++i) {
      if (kPart == 0 && !kSums && i != 2) continue;  // P is for the block that makes dS of it
      const int to = rank ^ i;
      const uint32_t full_there = ptx::map_shared(full, to);
      ptx::mbarrier_arrive_expect_tx_remote(full_there, kWarpBytes);
      ptx::bulk_copy_to_cluster(ptx::map_shared(rows, to), rows, kWarpBytes, full_there);
    }
  }

  FA_DEVICE uint32_t slab_shared(int stage) const { return shared + kRingOffset + stage * RowSlab::kBytes; }

  // ---- warpgroups 1 and 2: dK and dV of 64 keys each

  FA_DEVICE void sum(const Job& work, int rank, int part) const {
    Sum dk = {};
    Sum dv = {};
    ptx::griddepcontrol_wait();                    // before anything is stored
    const uint32_t slab = part * RowSlab::kBytes;  // of this warpgroup's keys
    Job seen = work;
    if (work.count() == 0) seen.steps.first = 0;  // without steps any query tile will do
    [[maybe_unused]] Query query(seen, params);
    // Each product is waited for at once: P is free for the next step before this step's dS is there.
    for (int count = 0; count < work.count(); ++count) {
      ptx::mbarrier_wait(do_full(), parity_of_one(count));
      if constexpr (Config::kCausal) {
        const int rows = rows_without_keys(query.m_block);
        if (rows > 0) {
          ptx::mbarrier_wait(q_full(), parity_of_one(count));
          clear_first_rows(shared + kQOffset, 2 * kOwnSlabs, rows);  // dO too
          ptx::fence_proxy_async();
          ptx::barrier_sync(first_of(NamedBarrier::clean_tiles),
                            2 * kWarpgroup);  // the tiles are clean for both warpgroups
        }
        query.advance(work, params);
      }
      await_shared(p_full(part), count);
      issue_sum(dv, p_shared() + slab, shared + kDoOffset);
      ptx::wgmma_wait<0>();  // dV
      release_to(p_empty(), part);
      release(do_empty());
      ptx::mbarrier_wait(q_full(), parity_of_one(count));
      await_shared(ds_full(part), count);
      issue_sum(dk, ds_shared() + slab, shared + kQOffset);
      ptx::wgmma_wait<0>();  // dK
      release_to(ds_empty(), 2 + part);
      release(q_empty());
    }
    ptx::wgmma_tie(dk);
    ptx::wgmma_tie(dv);
    store(dk, dv, work, part, Columns{rank});
  }

  // ---- warpgroup 3: copies of the block's columns, and dQ

  template <bool kQ>
  FA_DEVICE void load_own(const Job& work, const Query& query, int rank) const {
    load_rows(shared + (kQ ? kQOffset : kDoOffset), kQ ? p.map_q : p.map_dout, rank * kOwnSlabs, kOwnSlabs,
              kQ ? q_full() : do_full(), work, query);
  }

  FA_DEVICE void copy_and_compute_dq(const Job& work, int rank) const {
    const Columns columns{rank};
    const int steps = work.count();
    const bool loads = ptx::thread_index() == 3 * kWarpgroup;
    const uint32_t keys = shared + kDqKeysOffset;
    [[maybe_unused]] const auto give_back = [this] {  // both halves
      release_to(ds_empty(), 2);
      release_to(ds_empty(), 3);
    };
    Query query(work, params);
    Query ahead = query;  // of the next copies
    if (loads) {
      if constexpr (kSums) load_own<false>(work, query, rank);
      if constexpr (kSums) load_own<true>(work, query, rank);
      if constexpr (Config::kWriteDq) {
        ptx::mbarrier_arrive_expect_tx(dq_keys_full(), SwizzledTile<kTileN, kColumns>::kBytes);
        FA_UNROLL
        for (int half = 0; half < 2; ++half) {
          load_keys(keys + half * RowSlab::kBytes, 2 * RowSlab::kBytes, p.map_k, columns.first_qk(), kOwnSlabs,
                    dq_keys_full(), work, work.first_key() + kKeys * half);
        }
      }
    }
    ptx::sync_warp();            // one lane started the copies
    ptx::griddepcontrol_wait();  // for the cleared accumulator
    if constexpr (Config::kWriteDq) ptx::mbarrier_wait(dq_keys_full(), 0);
    [[maybe_unused]] Addition addition{rank, columns.first_qk(), columns.qk()};
    for (int count = 0; count < steps; ++count) {
      ahead.advance(work, params);
      const bool more = kSums && loads && count + 1 < steps;
      if (more) {
        ptx::mbarrier_wait(do_empty(), parity_of_one(count));  // dV has read it
        load_own<false>(work, ahead, rank);
      }
      ptx::sync_warp();  // one lane started the copies
      Sum dq;            // [64, columns of this block]
      [[maybe_unused]] bool again = false;
      if constexpr (Config::kWriteDq) {
        again = compute_dq(dq, keys, ds_full(0), 2, addition, work, query, count, give_back);
      }
      if (more) {
        ptx::mbarrier_wait(q_empty(), parity_of_one(count));  // dK has read it
        load_own<true>(work, ahead, rank);
      }
      ptx::sync_warp();  // one lane started the copies
      if constexpr (Config::kWriteDq) {
        leave_dq(dq, again, keys, addition, work, query, count, give_back);
      }
      query.advance(work, params);
    }
    if constexpr (Config::kWriteDq) {
      if (is_adder()) finish(addition, work);
    }
  }
};

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_BACKWARD_WIDE_CUH_
