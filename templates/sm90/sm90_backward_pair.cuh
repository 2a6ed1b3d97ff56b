#ifndef FA_TEMPLATES_SM90_SM90_BACKWARD_PAIR_CUH_
#define FA_TEMPLATES_SM90_SM90_BACKWARD_PAIR_CUH_

#include <sm90/sm90_backward_by_columns.cuh>

namespace fa::sm90 {

/// dK, dV and additions to dQ's accumulator for head dims above 128, by two thread blocks of a cluster. Sums of 128
/// keys fill the registers of two multiprocessors, so each block has half of the columns of dK, dV and dQ. What all
/// columns are needed for is done once: block 0 has K whole and computes P, block 1 has V whole and computes dS from
/// dP, and the copy engines exchange the two:
///   block 0:  S = Q K^T,   P = exp2(scale_log2 * S - LSE)  ->  block 1
///   block 1:  dP = dO V^T,  dS = P o (dP - delta)          ->  block 0
///   both:     dV += P^T dO,  dK += dS^T Q,  dQ = dS K, of their columns.
///
/// The warpgroups of a block have one task each and meet at barriers in shared memory only, so that the tensor cores go
/// on with the sums of one step while others take the exponentials of the next: warpgroup 0 computes P or dS, 1 and 2
/// the sums of 64 keys each, 3 dQ. The first thread of 3 starts the copies of what several tasks read; a thread of its
/// second warp adds what all leave in shared memory to dQ's accumulator.
///
/// The kernel may be launched before that of the row statistics is complete, which also clears dQ's accumulator: copies
/// and the first product go ahead.
///
/// Config is a struct of constants: Element (f16 or bf16), kHeadDimQk, kHeadDimV, kTileM, kTileN, kStages, kCausal,
/// kWriteDq, kSplit; optionally kOrderedDq, kWithoutDk, kWithoutDv (common/switches.cuh).
template <class Config>
struct BackwardPair : BackwardByColumns<Config, 2> {
  FA_BY_COLUMNS(2);

  static_assert(kQkSlabs >= 2 && kVSlabs >= 2 && kQkSlabs <= 4 && kVSlabs <= 4, "each block has columns");

  // Columns of a block: slabs [first, first + count).
  FA_DEVICE static constexpr int first_slab(int rank, int slabs) { return rank == 0 ? 0 : (slabs + 1) / 2; }
  FA_DEVICE static constexpr int slab_count(int rank, int slabs) { return rank == 0 ? (slabs + 1) / 2 : slabs / 2; }
  FA_DEVICE static constexpr int columns(int rank, int slabs, int d) {
    return rank == 0 ? slab_count(0, slabs) * kSlabColumns : d - first_slab(1, slabs) * kSlabColumns;
  }

  using KeySlab = SwizzledTile<kTileN, kSlabColumns>;  // of K and V
  using ScoreGemm = ptx::Wgmma<T, kTileN>;
  using Scores = float[kTileN / 2];  // [64, tile_n]

  // Buffers. Block 0 needs Q from before S to behind dK, and has room where block 1 has K beside V: one more. What only
  // a sum needs, dO in block 0 and Q in block 1, comes while the next scores are computed.
  static constexpr int kMaxQStages = kStages + 1;
  static constexpr int kMaxOtherStages = 2;
  static constexpr int kBarriers = 8 + 2 * (kMaxOtherStages + kMaxQStages + kStages);
  static_assert(8 * kBarriers <= 1024, "the barriers have 1024 bytes");

  /// What follows, in block `rank`.
  template <int kRank>
  struct Layout {
    // The query operand of the scores: Q in block 0, dO in block 1.
    static constexpr int kScoreSlabs = kRank == 0 ? kQkSlabs : kVSlabs;
    static constexpr int kQFirst = first_slab(kRank, kQkSlabs);
    static constexpr int kQSlabs = slab_count(kRank, kQkSlabs);
    static constexpr int kDoFirst = first_slab(kRank, kVSlabs);
    static constexpr int kDoSlabs = slab_count(kRank, kVSlabs);
    static constexpr int kOwnFirst = kRank == 0 ? kQFirst : kDoFirst;  // slabs of that operand in the ring
    static constexpr int kOwnSlabs = kRank == 0 ? kQSlabs : kDoSlabs;
    static constexpr int kOtherSlabs = kScoreSlabs - kOwnSlabs;  // for the scores only
    static constexpr int kOtherFirst = kRank == 0 ? kOwnSlabs : 0;
    static constexpr int kQStages = kRank == 0 ? kMaxQStages : 1;
    static constexpr int kDoStages = kRank == 0 ? 1 : kStages;
    static constexpr int kOtherStages = kRank == 0 ? kMaxOtherStages : 1;
    static constexpr int kScoreStages = kRank == 0 ? kQStages : kDoStages;
    static constexpr int kQkColumns = columns(kRank, kQkSlabs, kHeadDimQk);
    static constexpr int kVColumns = columns(kRank, kVSlabs, kHeadDimV);

    // "Columns", of dK, dV and dQ.
    FA_DEVICE static constexpr int first_qk() { return kQFirst * kSlabColumns; }
    FA_DEVICE static constexpr int qk() { return kQkColumns; }
    FA_DEVICE static constexpr int first_v() { return kDoFirst * kSlabColumns; }
    FA_DEVICE static constexpr int v() { return kVColumns; }

    // Block 0: K, whose first slabs are those for dQ. Block 1: V, and its slabs of K.
    static constexpr int kDqKeysOffset = kKeysOffset + (kRank == 0 ? 0 : kVSlabs * KeySlab::kBytes);
    static constexpr int kQOffset = kDqKeysOffset + (kRank == 0 ? kQkSlabs : kQSlabs) * KeySlab::kBytes;
    static constexpr int kDoOffset = kQOffset + kQStages * kQSlabs * RowSlab::kBytes;
    static constexpr int kOtherOffset = kDoOffset + kDoStages * kDoSlabs * RowSlab::kBytes;
    static constexpr int kBytes = kOtherOffset + kOtherStages * kOtherSlabs * RowSlab::kBytes;
  };
  static constexpr int kSharedBytes = Layout<0>::kBytes > Layout<1>::kBytes ? Layout<0>::kBytes : Layout<1>::kBytes;

  template <int kRank>
  FA_DEVICE uint32_t q_shared(int stage) const {
    return shared + Layout<kRank>::kQOffset + stage * (Layout<kRank>::kQSlabs * RowSlab::kBytes);
  }
  template <int kRank>
  FA_DEVICE uint32_t do_shared(int stage) const {
    return shared + Layout<kRank>::kDoOffset + stage * (Layout<kRank>::kDoSlabs * RowSlab::kBytes);
  }

  template <int kRank>
  FA_DEVICE uint32_t other_shared(int stage) const {
    return shared + Layout<kRank>::kOtherOffset + stage * (Layout<kRank>::kOtherSlabs * RowSlab::kBytes);
  }

  FA_DEVICE uint32_t p_full() const { return barrier(2); }
  FA_DEVICE uint32_t p_empty() const { return barrier(3); }  // block 0's: of both blocks
  FA_DEVICE uint32_t ds_full() const { return barrier(4); }
  FA_DEVICE uint32_t ds_empty() const { return barrier(5); }  // block 1's: of both blocks
  FA_DEVICE uint32_t other_full(int stage) const { return barrier(8 + stage); }
  FA_DEVICE uint32_t other_empty(int stage) const { return other_full(kMaxOtherStages + stage); }
  FA_DEVICE uint32_t do_full(int stage) const { return other_full(2 * kMaxOtherStages + stage); }
  FA_DEVICE uint32_t do_empty(int stage) const { return do_full(kStages + stage); }
  FA_DEVICE uint32_t q_full(int stage) const { return do_full(2 * kStages + stage); }
  FA_DEVICE uint32_t q_empty(int stage) const { return q_full(kMaxQStages + stage); }

  FA_DEVICE void run() const { this->run_roles(*this); }

  FA_DEVICE void compute_scores(const Job& work, int rank) const {
    if (rank == 0) {
      compute_scores<0>(work);
    } else {
      compute_scores<1>(work);
    }
  }
  FA_DEVICE void copy_and_compute_dq(const Job& work, int rank) const {
    if (rank == 0) {
      copy_and_compute_dq<0>(work);
    } else {
      copy_and_compute_dq<1>(work);
    }
  }
  FA_DEVICE void sum(const Job& work, int rank, int part) const {
    if (rank == 0) {
      sum<0>(work, part);
    } else {
      sum<1>(work, part);
    }
  }

  FA_DEVICE void init_barriers(int rank) const {
    // Warps: 4 compute scores, 8 sums, 4 dQ.
    constexpr int kDqWarps = Config::kWriteDq ? 4 : 0;
    constexpr int kSumWarps = kSums ? 8 : 0;
    ptx::mbarrier_init(keys_full(), 1);
    ptx::mbarrier_init(dq_keys_full(), 1);
    ptx::mbarrier_init(p_full(), 4);
    ptx::mbarrier_init(p_empty(), 2 * kSumWarps + 4);
    ptx::mbarrier_init(ds_full(), 4);
    ptx::mbarrier_init(ds_empty(), 2 * (kSumWarps + kDqWarps));
    if constexpr (Config::kWriteDq) {
      ptx::mbarrier_init(dq_full(), kDqWarps);
      ptx::mbarrier_init(dq_empty(), 1);
    }
    FA_UNROLL
    for (int i = 0; i < kMaxOtherStages; ++i) {
      ptx::mbarrier_init(other_full(i), 1);
      ptx::mbarrier_init(other_empty(i), 4);
    }
    FA_UNROLL
    for (int i = 0; i < kMaxQStages; ++i) {
      ptx::mbarrier_init(q_full(i), 1);
      ptx::mbarrier_init(q_empty(i), rank == 0 ? kSumWarps + 4 : 8);
    }
    FA_UNROLL
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(do_full(i), 1);
      ptx::mbarrier_init(do_empty(i), rank == 0 ? 8 : kSumWarps + 4);
    }
    ptx::fence_mbarrier_init();
  }

  // ---- copies from global memory, by one thread

  /// Likewise of the key tile.
  FA_DEVICE void load_keys(uint32_t target, const kernel::TensorMap& map, int first, int count, uint32_t full,
                           const Job& work) const {
    ptx::mbarrier_arrive_expect_tx(full, count * KeySlab::kBytes);
    FA_UNROLL
    for (int slab = 0; slab < count; ++slab) {
      ptx::tma_load_4d(target + slab * KeySlab::kBytes, map, full, ptx::L2Policy::evict_first,
                       (first + slab) * kSlabColumns, work.first_key(), work.tile.head, work.tile.batch);
    }
  }

  template <int kRank>
  FA_DEVICE void load_q(const Job& work, const Query& query, int stage) const {
    using L = Layout<kRank>;
    load_rows(q_shared<kRank>(stage), p.map_q, L::kQFirst, L::kQSlabs, q_full(stage), work, query);
  }
  template <int kRank>
  FA_DEVICE void load_dout(const Job& work, const Query& query, int stage) const {
    using L = Layout<kRank>;
    load_rows(do_shared<kRank>(stage), p.map_dout, L::kDoFirst, L::kDoSlabs, do_full(stage), work, query);
  }
  /// What of the scores' query tile is in no ring.
  template <int kRank>
  FA_DEVICE void load_other(const Job& work, const Query& query, int stage) const {
    using L = Layout<kRank>;
    load_rows(other_shared<kRank>(stage), kRank == 0 ? p.map_q : p.map_dout, L::kOtherFirst, L::kOtherSlabs,
              other_full(stage), work, query);
  }
  template <int kRank>
  FA_DEVICE void load_score_keys(const Job& work) const {
    load_keys(shared + kKeysOffset, kRank == 0 ? p.map_k : p.map_v, 0, Layout<kRank>::kScoreSlabs, keys_full(), work);
  }

  // ---- warpgroup 0: P in block 0, dS in block 1

  template <int kRank>
  FA_DEVICE void compute_scores(const Job& work) const {
    using L = Layout<kRank>;
    Scores scores;
    const int steps = work.count();
    Query query(work, params);
    Query ahead = query;  // of the next copies
    BufferRing<L::kScoreStages> ring;
    BufferRing<L::kOtherStages> others;
    const bool loads = ptx::thread_index() == 0;
    if (loads) {
      if constexpr (kRank == 0) ptx::prefetch_tensor_map(p.map_q);
      load_score_keys<kRank>(work);
      if constexpr (L::kOtherSlabs != 0) {
        FA_UNROLL
        for (int stage = 0; stage < L::kOtherStages; ++stage) {
          if (stage == steps) break;
          load_other<kRank>(work, ahead, stage);
          ahead.advance(work, params);
        }
      }
    }
    ptx::sync_warp();  // one lane started the copies
    ptx::mbarrier_wait(keys_full(), 0);
    for (int count = 0; count < steps; ++count) {
      issue_scores<kRank>(scores, ring, others);
      if (count == 0) ptx::griddepcontrol_wait();  // for the row statistics
      const float* const statistics =
          (kRank == 0 ? params.lse_log2 : params.delta) + row_index(work, query) + 16 * warp_index() + lane_index() / 4;
      const float row[2] = {ptx::ld_global(statistics), ptx::ld_global(statistics + 8)};
      const int m_block = query.m_block;
      query.advance(work, params);
      ptx::wgmma_wait<0>();
      ptx::wgmma_tie(scores);
      release(kRank == 0 ? q_empty(ring.stage) : do_empty(ring.stage));
      if constexpr (L::kOtherSlabs != 0) {
        release(other_empty(others.stage));
        if (loads && count + L::kOtherStages < steps) {
          ptx::mbarrier_wait(other_empty(others.stage), others.parity);  // the four warps have read it
          load_other<kRank>(work, ahead, others.stage);
          ahead.advance(work, params);
        }
        ptx::sync_warp();  // one lane started the copies
      }
      ring.advance();
      others.advance();
      if constexpr (kRank == 0) {
        exponentiate(scores, row, work.first_key(), m_block);
      } else {
        FA_UNROLL
        for (int i = 0; i < kTileN / 2; ++i) scores[i] -= row[i / 2 % 2];
        ptx::mbarrier_wait_cluster(p_full(), parity_of_one(count));
        multiply_by_p(scores, p_shared());
        const int rows = rows_without_keys(m_block);
        if (Config::kCausal && rows > 0) clear_first_rows(scores, rows);
        ptx::sync_warp();  // all lanes have read P
        if (lane_index() == 0) ptx::mbarrier_arrive_remote(ptx::map_shared(p_empty(), 0));
      }
      ptx::mbarrier_wait_cluster(kRank == 0 ? p_empty() : ds_empty(), parity_of_one(count) ^ 1);  // of the last step
      hand_on<kRank>(scores);
    }
    ptx::griddepcontrol_launch_dependents();  // the sums of a step are left
  }

  /// Starts S = Q K^T or dP = dO V^T, [64, tile_n].
  template <int kRank>
  FA_DEVICE void issue_scores(Scores& scores, const BufferRing<Layout<kRank>::kScoreStages>& ring,
                              const BufferRing<Layout<kRank>::kOtherStages>& others) const {
    using L = Layout<kRank>;
    constexpr int kHeadDim = kRank == 0 ? kHeadDimQk : kHeadDimV;
    ptx::mbarrier_wait(kRank == 0 ? q_full(ring.stage) : do_full(ring.stage), ring.parity);
    if constexpr (L::kOtherSlabs != 0) ptx::mbarrier_wait(other_full(others.stage), others.parity);
    const uint32_t own = ptx::without_rank(kRank == 0 ? q_shared<0>(ring.stage) : do_shared<1>(ring.stage));
    const uint32_t other = ptx::without_rank(other_shared<kRank>(others.stage));
    const uint32_t keys = ptx::without_rank(shared + kKeysOffset);
    ptx::wgmma_forget(scores);
    ptx::wgmma_fence();
    FA_UNROLL
    for (int step = 0; step < ceil_div(kHeadDim, 16); ++step) {
      const int slab = step / 4;
      const bool in_ring = slab >= L::kOwnFirst && slab < L::kOwnFirst + L::kOwnSlabs;
      const uint32_t rows =
          in_ring ? own + (slab - L::kOwnFirst) * RowSlab::kBytes : other + (slab - L::kOtherFirst) * RowSlab::kBytes;
      ScoreGemm::template shared<false>(scores, RowSlab::k_major(rows, 0, step % 4),
                                        KeySlab::k_major(keys + slab * KeySlab::kBytes, 0, step % 4), step != 0);
    }
    ptx::wgmma_commit();
  }

  /// Stores a warp's 16 rows of P or dS, rounded, for this block, and copies them to the other.
  template <int kRank>
  FA_DEVICE void hand_on(const Scores& scores) const {
    const uint32_t tile = (kRank == 0 ? p_shared() : ds_shared()) + warp_index() * kWarpBytes;
    const uint32_t full = kRank == 0 ? p_full() : ds_full();
    store_scores(scores, tile);
    if (lane_index() != 0) return;
    ptx::mbarrier_arrive(full);
    const uint32_t full_there = ptx::map_shared(full, 1 - kRank);
    ptx::mbarrier_arrive_expect_tx_remote(full_there, kKeySlabs * kWarpBytes);
    FA_UNROLL
    for (int slab = 0; slab < kKeySlabs; ++slab) {
      const uint32_t rows = tile + slab * RowSlab::kBytes;
      ptx::bulk_copy_to_cluster(ptx::map_shared(rows, 1 - kRank), rows, kWarpBytes, full_there);
    }
  }

  // ---- warpgroups 1 and 2: dK and dV of 64 keys each

  template <int kRank>
  FA_DEVICE void sum(const Job& work, int part) const {
    using L = Layout<kRank>;
    float dk[L::kQkColumns / 2] = {};  // [64 keys, columns of this block]
    float dv[L::kVColumns / 2] = {};   // likewise

    ptx::griddepcontrol_wait();  // before anything is stored
    if (work.count() > 0) sum_steps<kRank>(dk, dv, work, part);
    ptx::wgmma_tie(dk);
    ptx::wgmma_tie(dv);
    store(dk, dv, work, part, L());
  }

  template <int kRank, class Dk, class Dv>
  FA_DEVICE void sum_steps(Dk& dk, Dv& dv, const Job& work, int part) const {
    using L = Layout<kRank>;
    const int steps = work.count();
    const uint32_t slab = part * RowSlab::kBytes;  // of this warpgroup's keys
    BufferRing<L::kDoStages> ring_do;
    BufferRing<L::kQStages> ring_q;
    [[maybe_unused]] Query query(work, params);
    // Each product is waited for at once: P is free for the next step before this step's dS is there.
    for (int count = 0; count < steps; ++count) {
      ptx::mbarrier_wait(do_full(ring_do.stage), ring_do.parity);
      if constexpr (Config::kCausal) {
        const int rows = rows_without_keys(query.m_block);
        if (rows > 0) {
          await_shared(ds_full(), count);  // the scores have read both
          ptx::mbarrier_wait(q_full(ring_q.stage), ring_q.parity);
          clear_first_rows(do_shared<kRank>(ring_do.stage), L::kDoSlabs, rows);
          clear_first_rows(q_shared<kRank>(ring_q.stage), L::kQSlabs, rows);
          ptx::fence_proxy_async();
          ptx::barrier_sync(first_of(NamedBarrier::clean_tiles),
                            2 * kWarpgroup);  // the tiles are clean for both warpgroups
        }
        query.advance(work, params);
      }
      await_shared(p_full(), count);
      issue_sum(dv, p_shared() + slab, do_shared<kRank>(ring_do.stage));
      ptx::wgmma_wait<0>();  // dV
      release_p<kRank>();
      release(do_empty(ring_do.stage));
      ring_do.advance();
      ptx::mbarrier_wait(q_full(ring_q.stage), ring_q.parity);
      await_shared(ds_full(), count);
      issue_sum(dk, ds_shared() + slab, q_shared<kRank>(ring_q.stage));
      ptx::wgmma_wait<0>();  // dK
      release_ds<kRank>();
      release(q_empty(ring_q.stage));
      ring_q.advance();
    }
  }

  template <int kRank>
  FA_DEVICE void release_p() const {
    release_to<kRank, 0>(p_empty());
  }
  template <int kRank>
  FA_DEVICE void release_ds() const {
    release_to<kRank, 1>(ds_empty());
  }
  /// Tells block kTo, from whose warpgroup 0 the buffer is filled.
  template <int kRank, int kTo>
  FA_DEVICE static void release_to(uint32_t barrier) {
    if (lane_index() != 0) return;
    if constexpr (kRank == kTo) {
      ptx::mbarrier_arrive(barrier);
    } else {
      ptx::mbarrier_arrive_remote(ptx::map_shared(barrier, kTo));
    }
  }

  // ---- warpgroup 3: copies of what several read, and dQ

  // Without sums block 0 has no use for dO, nor block 1 for Q.
  template <int kRank>
  FA_DEVICE static constexpr bool loads_q() {
    return kSums || kRank == 0;
  }
  template <int kRank>
  FA_DEVICE static constexpr bool loads_dout() {
    return kSums || kRank == 1;
  }

  template <int kRank>
  FA_DEVICE void copy_and_compute_dq(const Job& work) const {
    using L = Layout<kRank>;
    const int steps = work.count();
    const bool loads = ptx::thread_index() == 3 * kWarpgroup;
    [[maybe_unused]] const uint32_t keys = shared + L::kDqKeysOffset;
    [[maybe_unused]] const auto give_back = [this] { release_ds<kRank>(); };
    Query query(work, params);
    Query ahead_q = query;  // of the next copies
    Query ahead_do = query;
    BufferRing<L::kDoStages> ring_do;
    BufferRing<L::kQStages> ring_q;
    if (loads) {
      FA_UNROLL
      for (int stage = 0; stage < kMaxQStages; ++stage) {
        if (stage == steps) break;
        if (stage < L::kQStages && loads_q<kRank>()) {
          load_q<kRank>(work, ahead_q, stage);
          ahead_q.advance(work, params);
        }
        if (stage < L::kDoStages && loads_dout<kRank>()) {
          load_dout<kRank>(work, ahead_do, stage);
          ahead_do.advance(work, params);
        }
        if (stage == 0 && kRank == 1) {
          load_keys(shared + L::kDqKeysOffset, p.map_k, L::kQFirst, L::kQSlabs, dq_keys_full(), work);
        }
      }
    }
    ptx::sync_warp();            // one lane started the copies
    ptx::griddepcontrol_wait();  // for the cleared accumulator
    if constexpr (Config::kWriteDq) ptx::mbarrier_wait(kRank == 0 ? keys_full() : dq_keys_full(), 0);
    [[maybe_unused]] Addition addition{kRank, L::first_qk(), L::kQkColumns};
    for (int count = 0; count < steps; ++count) {
      if (loads && loads_dout<kRank>() && count + L::kDoStages < steps) {
        ptx::mbarrier_wait(do_empty(ring_do.stage), ring_do.parity);  // dV and dP have read it
        load_dout<kRank>(work, ahead_do, ring_do.stage);
        ahead_do.advance(work, params);
      }
      ptx::sync_warp();  // one lane started the copies
      ring_do.advance();
      float dq[L::kQkColumns / 2];  // [64, columns of this block]
      [[maybe_unused]] bool again = false;
      if constexpr (Config::kWriteDq) {
        again = compute_dq(dq, keys, ds_full(), 1, addition, work, query, count, give_back);
      }
      if (loads && loads_q<kRank>() && count + L::kQStages < steps) {
        ptx::mbarrier_wait(q_empty(ring_q.stage), ring_q.parity);  // S and dK have read it
        load_q<kRank>(work, ahead_q, ring_q.stage);
        ahead_q.advance(work, params);
      }
      ptx::sync_warp();  // one lane started the copies
      ring_q.advance();
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

#endif  // FA_TEMPLATES_SM90_SM90_BACKWARD_PAIR_CUH_
