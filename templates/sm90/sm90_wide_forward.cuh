#ifndef FA_TEMPLATES_SM90_SM90_WIDE_FORWARD_CUH_
#define FA_TEMPLATES_SM90_SM90_WIDE_FORWARD_CUH_

#include <common/constants.cuh>
#include <common/online_softmax.cuh>
#include <ptx/griddepcontrol.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/mbarrier.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>
#include <ptx/wgmma.cuh>
#include <sm90/sm90_epilogue.cuh>
#include <sm90/sm90_wide_epilogue.cuh>
#include <sm90/sm90_wide_producer.cuh>
#include <sm90/sm90_wide_traits.cuh>

namespace fa::sm90 {

/// Forward on wgmma for heads whose O is more than a consumer's registers hold. Two consumer warpgroups have the same
/// 64 query rows, and a half of the columns of O each. They take KV tiles in turn: one makes S = Q K^T of its tile, P,
/// and what its rows' statistics have become, and sends them to the other. Both multiply every P with their half of V.
/// The schedule is FlashMLA's in that a consumer's softmax is overlapped with the products of the other.
///
/// A thread has the same rows and keys as its twin in the other consumer, so that P and statistics go from thread to
/// thread in the layout of an operand. They go through one buffer: who writes it next has read it.
template <class Config>
struct WideForward : WideBlock<Config> {
  using Base = WideBlock<Config>;
  using Traits = typename Base::Traits;
  using S = typename Traits::S;
  using P = typename Traits::P;
  using O = typename Traits::O;
  using QTile = typename Traits::QTile;
  using KTile = typename Traits::KTile;
  using VHalf = typename Traits::VHalf;
  using SGemm = typename Traits::SGemm;
  using OGemm = typename Traits::OGemm;
  using T = typename Traits::T;
  using Rows = typename Traits::Rows;
  using Query = typename Traits::Query;
  using Cursor = typename Base::Cursor;
  using Piece = typename Base::Piece;
  using Softmax = typename Traits::Softmax;
  using Variant = typename Traits::Variant;
  using Traits::kTileM, Traits::kTileN, Traits::kStages, Traits::kHeadDimQk, Traits::kKSlabs, Traits::kHalfSlabs,
      Traits::kPSteps, Traits::kValueInKey, Traits::kWindowed, Traits::kFirstSlab, Traits::kFirstSlabs,
      Traits::kProducerRegisters, Traits::kConsumerRegisters, Base::params, Base::q_shared, Base::k_shared,
      Base::half_shared, Base::landed, Base::parity_of, Base::emptied, Base::query_landed, Base::query_read, Base::sent,
      Base::exchanged, Base::init_barriers, Base::release, Base::work_shared, Base::read_work, Base::tiles_of,
      Base::softmax_scale_log2, Base::scale_sign, Base::lengths_of, Base::described, Traits::kOutputParts,
      Traits::kQueuesScores;

  using Base::Base;

  FA_DEVICE void run() {
    if (ptx::thread_index() == 0) init_barriers();
    if constexpr (Traits::kScheduled && !Traits::kMulticast) Base::prefetch_lists();
    ptx::griddepcontrol_wait();  // for what earlier kernels write, and for those that still read what this one writes
    if constexpr (Traits::kMulticast) {
      ptx::cluster_sync();  // the barriers of both blocks exist for all
    } else {
      ptx::sync_threads();  // the barriers exist for all
    }
    const int warpgroup = ptx::shfl(ptx::thread_index() / kWarpgroup, 0);
    if (warpgroup == 0) {
      ptx::decrease_registers<kProducerRegisters>();
      WideProducer<Config>(*this).run();
    } else {
      ptx::increase_registers<kConsumerRegisters>();
      if (warpgroup == 1) consume<0>();
      if (warpgroup == 2) consume<1>();
    }
    if constexpr (Traits::kMulticast) ptx::cluster_sync();  // the other block may still copy here, and arrive
  }

  /// What a consumer carries from KV tile to KV tile.
  struct Stream {
    int warp;  // of the consumer
    int lane;
    int pieces;    // so far
    int received;  // tiles of the other consumer, so far
    int n;         // KV tile that is next for either consumer
    int limit;     // the first key that is hidden from the warp's first row
    O o;           // [64, kHalfColumns]
    Softmax softmax;
  };

  template <int kHalf>
  FA_DEVICE void consume() const {
    Stream at;
    at.received = 0;
    at.lane = ptx::thread_index() % kWarpSize;
    at.warp = ptx::shfl(ptx::thread_index() % kWarpgroup / kWarpSize, 0);
    int count = 0;  // of KV tiles so far
    FA_UNROLL_BY(1)
    for (at.pieces = 0;; ++at.pieces) {
      ptx::mbarrier_wait(query_landed(), at.pieces % 2);
      const kernel::Chunk words = ptx::ld_shared_chunk(work_shared(at.pieces % 2) + 4 * Base::kPieceWord);
      if (words.word[2] == 0) return;
      const int end = count + start_piece(at);
      attend<kHalf>(at, count, end);
      count = end;
      const Piece piece{0, 0, static_cast<int>(words.word[0]), static_cast<int>(words.word[1])};
      const Query query = read_work(at.pieces % 2);
      WideEpilogue<Config>(*this).run(at.o, at.softmax, query, piece, kHalf, 16 * at.warp, at.lane);
    }
  }

  /// The KV tiles of the piece.
  FA_DEVICE int start_piece(Stream& at) const {
    const Query query = read_work(at.pieces % 2);
    at.n = query.range.end - 1;
    const Rows rows{params.group, 0};
    const int first_row = query.tile.m_block * kTileM + 16 * at.warp;
    at.limit = kernel::key_limit<Config::kCausal>(lengths_of(query), rows.position(first_row));
    at.softmax = Softmax();
    FA_UNROLL
    for (float& o : at.o) o = 0.f;
    return tiles_of(query);
  }

  /// The KV tiles that are numbers `count` to before `end` of the block's: those of a piece. The first is of the first
  /// consumer, the next one of the second, and so on. The first one multiplies what the other has sent before its next
  /// scores, so that buffers are released early; the second one behind its scores, overlapped with its softmax.
  template <int kHalf>
  FA_DEVICE void attend(Stream& at, int count, int end) const {
    int i = count + kHalf;  // the first one of its own
    if constexpr (kHalf == 0 && kQueuesScores) {
      S s;
      if (i < end) {
        issue_scores(s, i);
        await_scores<kHalf, 0>(s, i, at.lane);
      }
      FA_UNROLL_BY(1)
      for (; i < end; i += 2) {
        multiply_own<kHalf>(at, s, i);
        if (i + 2 < end) multiply_and_score<kHalf>(at, s, i + 1);
      }
    } else {
      FA_UNROLL_BY(1)
      for (; i < end; i += 2) {
        S s;
        if constexpr (kHalf == 0) {
          if (i > count) multiply_other<kHalf>(at, i - 1);
          issue_scores(s, i);
          await_scores<kHalf, 0>(s, i, at.lane);
          multiply_own<kHalf>(at, s, i);
        } else {
          P own, other;
          issue_scores(s, i);
          receive<kHalf>(at, other);
          issue_output<kHalf>(at, other, i - 1);
          await_scores<kHalf, kOutputParts>(s, i, at.lane);
          const bool rises = make_probabilities<kHalf>(at, s, own);
          await_output<kHalf>(at, i - 1);
          if (rises) multiply(at.o, at.softmax.factor);
          issue_output<kHalf>(at, own, i);
          await_output<kHalf>(at, i);
        }
      }
    }
    if (i == end && count < end) multiply_other<kHalf>(at, i - 1);  // the last tile is the other's
    ptx::sync_warp();                                               // all lanes have read what was sent
    release(query_read(), at.lane);                                 // and the warp's scores are complete
  }

  /// P of the scores of tile number i, which the other consumer gets too, and O += P V.
  template <int kHalf>
  FA_DEVICE void multiply_own(Stream& at, S& s, int i) const {
    P own;
    const bool rises = make_probabilities<kHalf>(at, s, own);
    if (rises) multiply(at.o, at.softmax.factor);
    issue_output<kHalf>(at, own, i);
    await_output<kHalf>(at, i);
  }

  /// O += P V of tile number i of the other consumer. The next scores' first slabs wait behind the product in the
  /// tensor cores' queue.
  template <int kHalf>
  FA_DEVICE void multiply_and_score(Stream& at, S& s, int i) const {
    P other;
    receive<kHalf>(at, other);
    issue_output<kHalf>(at, other, i);
    issue_first_scores(s, i + 1);
    await_parts<kHalf, 0, 1>(i, at.lane);
    ptx::wgmma_tie(at.o);
    issue_last_scores(s, i + 1);
    await_scores<kHalf, 0>(s, i + 1, at.lane);
  }

  /// O += P V of a tile of the other consumer.
  template <int kHalf>
  FA_DEVICE void multiply_other(Stream& at, int i) const {
    P other;
    receive<kHalf>(at, other);
    issue_output<kHalf>(at, other, i);
    await_output<kHalf>(at, i);
  }

  /// O of KV tile number i is complete, and its half of V is read.
  template <int kHalf>
  FA_DEVICE void await_output(Stream& at, int i) const {
    await_parts<kHalf, 0>(i, at.lane);
    ptx::wgmma_tie(at.o);
  }

  /// Parts of O from kPart on are complete; the slabs of V of each are released as soon as it is. `kBehind` groups of
  /// products may still run.
  template <int kHalf, int kPart, int kBehind = 0>
  FA_DEVICE void await_parts(int i, int lane) const {
    ptx::wgmma_wait<kOutputParts - 1 - kPart + kBehind>();
    Base::release_unit(emptied(stage_of(i), (kValueInKey ? 1 : 2) + kOutputParts * kHalf + kPart), lane);
    if constexpr (kPart + 1 < kOutputParts) await_parts<kHalf, kPart + 1, kBehind>(i, lane);
  }

  /// Scores of KV tile number i are complete; `kBehind` groups of products may still run.
  template <int kHalf, int kBehind>
  FA_DEVICE void await_scores(S& s, int i, int lane) const {
    if constexpr (kFirstSlabs > 0) {
      ptx::wgmma_wait<kBehind + 1>();
      Base::release_unit(emptied(stage_of(i), 0), lane);  // these are not V
    }
    ptx::wgmma_wait<kBehind>();
    ptx::wgmma_tie(s);
    if constexpr (!kValueInKey) Base::release_unit(emptied(stage_of(i), 1), lane);
  }

  static FA_DEVICE int stage_of(int i) { return i % kStages; }

  /// Starts S = Q K^T, [64, tile_n], of KV tile number i.
  FA_DEVICE void issue_scores(S& s, int i) const {
    issue_first_scores(s, i);
    issue_last_scores(s, i);
  }

  /// With the slabs that are read for scores alone.
  FA_DEVICE void issue_first_scores(S& s, int i) const {
    ptx::wgmma_tie(s);
    if constexpr (kFirstSlabs > 0) {
      issue_slabs<0, kFirstSlabs>(s, i);
      ptx::wgmma_commit();
    }
  }

  FA_DEVICE void issue_last_scores(S& s, int i) const {
    issue_slabs<kFirstSlabs, kKSlabs>(s, i);
    ptx::wgmma_commit();
  }

  /// Of slabs number kFrom to before kTo, in the order in which scores are made of them.
  template <int kFrom, int kTo>
  FA_DEVICE void issue_slabs(S& s, int i) const {
    constexpr int kSteps = ceil_div(kHeadDimQk, 16);
    const uint32_t tile = described(k_shared(stage_of(i)));
    FA_UNROLL
    for (int number = kFrom; number < kTo; ++number) {
      const int slab = Traits::slab_of(number);
      ptx::mbarrier_wait(landed(i, slab), parity_of(i));
      ptx::wgmma_fence();  // behind every branch
      FA_UNROLL
      for (int step = 4 * slab; step < 4 * slab + 4 && step < kSteps; ++step) {
        SGemm::template shared<false>(s, QTile::k_major(described(q_shared(0)), 0, step), KTile::k_major(tile, 0, step),
                                      number > 0 || step != 4 * slab);
      }
    }
  }

  /// Starts O += P V, [64, kHalfColumns], of KV tile number i.
  template <int kHalf>
  FA_DEVICE void issue_output(Stream& at, const P& pairs, int i) const {
    constexpr int kSlabs = Traits::kPartSlabs;
    ptx::wgmma_tie(at.o);
    FA_UNROLL
    for (int part = 0; part < kOutputParts; ++part) {
      if constexpr (kValueInKey) {
        FA_UNROLL
        for (int slab = part * kSlabs; slab < (part + 1) * kSlabs; ++slab) {
          ptx::mbarrier_wait(landed(i, kHalf * kHalfSlabs + slab), parity_of(i));
        }
      } else {
        ptx::mbarrier_wait(landed(i, kKSlabs + kHalf), parity_of(i));
      }
      ptx::wgmma_fence();
      const uint32_t tile = half_shared(stage_of(i), kHalf) + part * kSlabs * KTile::kSlabBytes;
      FA_UNROLL
      for (int step = 0; step < kPSteps; ++step) {
        OGemm::template registers<true>(Traits::part_of(at.o, part), pairs[step],
                                        VHalf::mn_major(described(tile), step), true);
      }
      ptx::wgmma_commit();
    }
  }

  /// Scores become P, which the other consumer gets too. True when O must be multiplied by the softmax's factors.
  template <int kHalf>
  FA_DEVICE bool make_probabilities(Stream& at, S& s, P& pairs) const {
    hide_scores(at, s);
    const bool rises = at.softmax.update(s, softmax_scale_log2());
    FA_UNROLL
    for (int step = 0; step < kPSteps; ++step) {
      FA_UNROLL
      for (int word = 0; word < 4; ++word) {
        pairs[step][word] = ptx::convert_pair<T>(s[8 * step + 2 * word], s[8 * step + 2 * word + 1]);
      }
    }
    send<kHalf>(at, pairs);
    at.n -= 1;
    return rises;
  }

  /// What score functions and masks make of scores.
  FA_DEVICE void hide_scores(Stream& at, S& s) const {
    const int warp_row = 16 * at.warp;
    if constexpr (Variant::kScore) {
      this->apply_score(s, cursor_of(at), warp_row, at.lane);
    } else if constexpr (!Config::kPositiveScale) {
      FA_UNROLL
      for (float& score : s) score *= scale_sign();
    }
    if constexpr (kWindowed) {
      const Cursor cursor = cursor_of(at);
      if (at.n >= cursor.query.range.plain_begin && at.n < cursor.query.range.plain_end) return;
      this->hide_outside(s, cursor, warp_row, at.lane);
    } else {
      const int limit = at.limit - at.n * kTileN;
      if (limit < kTileN) this->hide_behind(s, cursor_of(at), limit, warp_row);
    }
  }

  FA_DEVICE Cursor cursor_of(const Stream& at) const { return {read_work(at.pieces % 2), at.n, 0}; }

  /// P and the rows' statistics to the thread of the other consumer that has the same rows.
  template <int kHalf>
  FA_DEVICE void send(const Stream& at, const P& pairs) const {
    FA_UNROLL
    for (int step = 0; step < kPSteps; ++step) {
      ptx::st_shared_chunk(exchanged(step), {{pairs[step][0], pairs[step][1], pairs[step][2], pairs[step][3]}});
    }
    const Softmax& softmax = at.softmax;
    ptx::st_shared_chunk(exchanged(kPSteps), {{ptx::bits(softmax.greatest[0]), ptx::bits(softmax.greatest[1]),
                                               ptx::bits(softmax.sum[0]), ptx::bits(softmax.sum[1])}});
    ptx::sync_warp();  // all lanes have written
    release(sent(kHalf, at.warp), at.lane);
  }

  /// What the other consumer made of its KV tile; O becomes relative to its maxima.
  template <int kHalf>
  FA_DEVICE void receive(Stream& at, P& pairs) const {
    ptx::mbarrier_wait(sent(1 - kHalf, at.warp), at.received % 2);
    ++at.received;
    FA_UNROLL
    for (int step = 0; step < kPSteps; ++step) {
      const kernel::Chunk words = ptx::ld_shared_chunk(exchanged(step));
      FA_UNROLL
      for (int word = 0; word < 4; ++word) pairs[step][word] = words.word[word];
    }
    const kernel::Chunk words = ptx::ld_shared_chunk(exchanged(kPSteps));
    Softmax& softmax = at.softmax;
    bool rises = false;
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      const float before = softmax.greatest[r];
      softmax.greatest[r] = ptx::from_bits(words.word[r]);
      softmax.sum[r] = ptx::from_bits(words.word[2 + r]);
      rises = rises || softmax.greatest[r] > before;
      softmax.factor[r] = before;
    }
    if (ptx::vote_any(rises)) {
      FA_UNROLL
      for (int r = 0; r < 2; ++r) {
        softmax.factor[r] =
            kernel::OnlineSoftmax<1>::shrink_between(softmax.factor[r], softmax.greatest[r], softmax_scale_log2());
      }
      multiply(at.o, softmax.factor);
    }
    at.n -= 1;
  }
};

template <class Config>
FA_DEVICE void wide_forward(const ForwardParamsOf<Config>& params) {
  WideForward<Config>(params).run();
}

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_WIDE_FORWARD_CUH_
