#ifndef FA_TEMPLATES_SM90_SM90_FORWARD_CUH_
#define FA_TEMPLATES_SM90_SM90_FORWARD_CUH_

#include <common/constants.cuh>
#include <ptx/griddepcontrol.cuh>
#include <ptx/language.cuh>
#include <ptx/mbarrier.cuh>
#include <ptx/thread.cuh>
#include <ptx/tma.cuh>
#include <ptx/wgmma.cuh>
#include <sm90/sm90_affine_scores.cuh>
#include <sm90/sm90_dropout_warps.cuh>
#include <sm90/sm90_epilogue.cuh>
#include <sm90/sm90_fixed_splits.cuh>
#include <sm90/sm90_forward_block.cuh>
#include <sm90/sm90_forward_traits.cuh>
#include <sm90/sm90_probabilities.cuh>
#include <sm90/sm90_producer.cuh>
#include <sm90/sm90_products.cuh>
#include <sm90/sm90_ring.cuh>
#include <sm90/sm90_roles.cuh>
#include <sm90/sm90_schedule.cuh>
#include <sm90/sm90_scores.cuh>
#include <sm90/sm90_shared_tile.cuh>
#include <sm90/sm90_walks.cuh>

namespace fa::sm90 {

/// FlashAttention-3 forward on wgmma and the copy engine (Shah et al., 2024), as one stream of KV tiles: a producer
/// warp copies tiles into rings of buffers, `kConsumers` warpgroups own 64 query rows each. A warpgroup issues S = Q
/// K^T of the next KV tile, then O += P V of the current one, and computes the softmax of the former while the latter
/// runs; the next KV tile may belong to the next query tile, so that the tensor cores see no boundary between query
/// tiles. With dropout further warps make its random bits.
template <class Config>
struct Forward : Products<ForwardTraits<Config>> {
  using Traits = ForwardTraits<Config>;
  using Base = Products<ForwardTraits<Config>>;
  using S = typename Base::S;
  using P = typename Base::P;
  using O = typename Base::O;
  using Softmax = typename Base::Softmax;
  using Query = typename Base::Query;
  using Cursor = typename Base::Cursor;
  using Tile = typename Base::Tile;
  using Base::kStages, Base::kQBuffers, Base::kConsumers, Base::kPingpong, Base::kRagged, Base::kDropout,
      Base::kAffineProduct, Base::kDropoutWarpgroup, Base::kEmptyWarp, Base::kOwnRanges, Base::kExchange,
      Base::kExactMax, Base::kDropoutRegisters, Base::kProducerRegisters, Base::kConsumerRegisters, Base::kDropoutWarps,
      Base::kSummed, Base::kPostsPieces, Base::kRolesWait, Base::kNamesLast, Base::kRowsAhead, Base::kMergesInCluster,
      Base::kWholeTiles, Base::kWalksTogether, Base::kFixedSplits, Base::kFoldsOverlapped, Base::kShares,
      Base::kSplitTiles, Base::kFinishOverlapped, Base::kLayout, Base::kStageO, Base::p, Base::params, Base::shared,
      Base::k_full, Base::k_empty, Base::v_full, Base::v_empty, Base::q_empty, Base::dropout_shared,
      Base::init_barriers, Base::release, Base::own_range_end, Base::other_rows, Base::read_work, Base::work_before,
      Base::work_of, Base::consume_work, Base::number_keys, Base::begin_rows, Base::before_keys, Base::with_keys,
      Base::with_products, Base::before_softmax, Base::pack, Base::exponentiate, Base::rescue, Base::issue_scores,
      Base::issue_output;

  using Base::Base;

  static constexpr bool kKeepsWork =
      kStageO || Base::kTwoPlaces;  // descriptors, until the O of their query tile is stored

  // Made where it is used. A member costs instructions in the main loop: what it copies stays in registers.
  FA_DEVICE Epilogue<Traits> epilogue() const { return Epilogue<Traits>(*this); }

  using Fixed = FixedSplits<Traits>;
  using Folded = typename kernel::Either<typename Fixed::Folded, typename Base::Nothing, kFixedSplits>::type;

  FA_DEVICE void run() {
    if (ptx::thread_index() == 0) init_barriers();
    if constexpr (kAffineProduct) number_keys();
    if constexpr (kRolesWait) {
      prefetch_maps();
    } else {
      if constexpr (Config::kSplit) {  // a call of few KV tiles, which is long in its start
        if (ptx::thread_index() == 0) ptx::prefetch_tensor_map(p.map_k);
      }
      ptx::griddepcontrol_wait();  // for what earlier kernels write, and for those that still read what this one writes
    }
    if constexpr (kDropout) {
      if (ptx::thread_index() == 0) kernel::Dropout::share(params.dropout, dropout_shared());
    }
    ptx::sync_threads();  // the barriers exist for all, and the seed of dropout
    const int warpgroup = ptx::shfl(ptx::thread_index() / kWarpgroup, 0);
    const WarpgroupRole role = role_of(warpgroup);
    if (role == WarpgroupRole::producer) {
      ptx::decrease_registers<kProducerRegisters>();
      produce();
    } else if (role == WarpgroupRole::dropout_rng) {
      if constexpr (kDropoutWarpgroup) {
        ptx::decrease_registers<kDropoutRegisters>();
        DropoutWarps<Traits>(*this).write_masks();
      }
    } else {
      ptx::increase_registers<kConsumerRegisters>();
      consume(warpgroup - 1);
    }
  }

  /// Each by another warp.
  FA_DEVICE void prefetch_maps() const {
    const int thread = ptx::thread_index();
    if (thread == 0) ptx::prefetch_tensor_map(p.map_k);
    if (thread == kWarpSize) ptx::prefetch_tensor_map(p.map_v);
    if (thread == 2 * kWarpSize) ptx::prefetch_tensor_map(p.map_q);
  }

  FA_DEVICE static WarpgroupRole role_of(int warpgroup) {
    if (warpgroup == 0) return WarpgroupRole::producer;
    return kDropoutWarpgroup && warpgroup > kConsumers ? WarpgroupRole::dropout_rng : WarpgroupRole::consumer;
  }

  FA_DEVICE void produce() const {
    if constexpr (kWalksTogether) {
      const int warp = ptx::shfl(ptx::thread_index() / kWarpSize, 0);
      if (warp < 3) produce_together(warp, ptx::thread_index() % kWarpSize);
    } else if constexpr (kEmptyWarp) {
      const int warp = ptx::shfl(ptx::thread_index() / kWarpSize, 0);
      const int lane = ptx::thread_index() % kWarpSize;
      if (warp == 0 && (kRagged || lane == 0)) Producer<Traits>(*this).produce_q_and_k(lane == 0);
      if (warp == 1 && (kRagged || lane == 0)) Producer<Traits>(*this).produce_v(lane == 0);
      if (warp == 2 && !kMergesInCluster) {
        if constexpr (kRolesWait) ptx::griddepcontrol_wait();
        epilogue().store_empty_tiles(lane);
      }
    } else {
      if (ptx::thread_index() == 0) Producer<Traits>(*this).produce_q_and_k(true);
      if (ptx::thread_index() == kWarpSize) Producer<Traits>(*this).produce_v(true);
      if constexpr (kRolesWait && Config::kSplit && !kMergesInCluster) {
        if (ptx::shfl(ptx::thread_index() / kWarpSize, 0) == 2) {
          ptx::griddepcontrol_wait();
          epilogue().store_empty_tiles(ptx::thread_index() % kWarpSize);
        }
      }
    }
    if constexpr (kNamesLast) {  // by a warp that has nothing else to do
      if (ptx::thread_index() == 3 * kWarpSize) {
        ptx::griddepcontrol_wait();
        Producer<Traits>(*this).allow_next();
      }
    }
    if constexpr (kDropout && !kDropoutWarpgroup) {
      if (ptx::shfl(ptx::thread_index() / kWarpSize, 0) >= 4 - kDropoutWarps) DropoutWarps<Traits>(*this).write_masks();
    }
  }

  /// Warps walk over the same pieces, each with what it does of them: instructions that all of them wait for come once.
  FA_DEVICE void produce_together(int warp, int lane) const {
    const Producer<Traits> producer(*this);
    RingSlot<kStages> slot;
    RingSlot<kQBuffers> q_slot;
    bool known = false;  // to the consumers: which tile is the last
    const auto begin = [&](const Query& work) { return producer.first_page(work); };
    const auto body = [&](const Query& work, int page) {
      if (warp == 0) {
        producer.load_q_and_k(slot, q_slot, work, page);
        known = work.ahead.last && work.range.begin < work.range.end;
      } else if (warp == 1) {
        producer.load_values(slot, work, page);
      } else {
        epilogue().store_empty_tile(work, lane);
      }
    };
    Walks<Traits>(*this).for_each_round(begin, body);
    if (warp == 0 && lane == 0 && !known) producer.post_end(q_slot);
  }

  /// What a consumer carries from KV tile to KV tile. It is not made as an aggregate, which would clear S and O.
  struct Stream {
    int consumer;
    int lane;
    int warp_row;  // the warp's first row in the query tile
    RingSlot<kStages> k_slot, v_slot;
    RingSlot<kQBuffers> q_slot;
    S s;
    P p;
    O o;
    Tile tile;  // ahead, whose scores are in the making
    Softmax softmax;
    [[maybe_unused]] bool risen = false;  // maxima have: with kExactMax, O is to be multiplied by
    [[maybe_unused]] float factor[2] = {1.f, 1.f};
    bool staged = false;  // O is on its way out of the Q buffer that is not in use
    Cursor ahead;         // the place of the tile ahead
    Query query;          // whose O is in the making
    bool first;           // of its KV tiles: O is not yet defined
    typename Epilogue<Traits>::Factors factors;
    [[maybe_unused]] Folded folded;  // with fixed splits
  };

  FA_DEVICE void consume(int consumer) const {
    Stream at;
    at.consumer = consumer;
    at.lane = ptx::thread_index() % kWarpSize;
    at.warp_row = ptx::shfl(consumer * 64 + ptx::thread_index() % kWarpgroup / kWarpSize * 16, 0);
    if constexpr (kWholeTiles) {
      if (at.warp_row == 0) {
        WholeTiles<Epilogue<Traits>>{epilogue()}.begin(at.lane);
      }
    }
    [[maybe_unused]] Query first;
    if constexpr (kRowsAhead) {
      first = this->first_with_keys();
      epilogue().find_rows(at.factors, first, at.warp_row, at.lane);
    }
    if constexpr (kRolesWait) ptx::griddepcontrol_wait();
    if constexpr (!kEmptyWarp && !kRolesWait && !kMergesInCluster && (Config::kCausal || Config::kSplit)) {
      if (Config::kSplit || params.causal_shift < 0) epilogue().store_empty(at.warp_row, at.lane);
    }
    if (!consume_work(at.ahead, at.q_slot)) {
      if constexpr (kMergesInCluster) {
        if constexpr (!kRowsAhead) first = this->query_of_round(0);
        epilogue().merge_nothing(at.factors, first, at.warp_row, at.lane);
      }
      return;
    }
    if (kPingpong && consumer == kConsumers - 1) ptx::barrier_arrive(first_of(NamedBarrier::pingpong), 2 * kWarpgroup);

    if constexpr (kFixedSplits && !kShares) {
      Fixed{epilogue()}.begin(at.folded.o, at.warp_row, at.lane);
    }
    // Once, or with kOwnRanges once for each stretch of query tiles behind KV tiles that are hidden from this
    // warpgroup.
    for (bool more = true, skips = false; more; skips = true) {
      more = false;
      begin(at, skips);
      while (true) {
        const bool spans = at.ahead.n == at.ahead.query.range.begin;
        const bool leaves = spans || (kFixedSplits && static_cast<uint32_t>(at.ahead.n) % kSplitTiles == 0) ||
                            (kWholeTiles && at.ahead.n == at.ahead.split_begin);
        if constexpr (kWholeTiles && !kFinishOverlapped) {
          if (leaves && !(spans && at.ahead.query.ahead.last)) finish_split(at, spans);
        }
        if (spans) {
          if (!next_query(at, more)) break;
        } else {
          --at.ahead.n;
        }
        step(at, spans, leaves);
      }
      end(at, more);
    }
    if constexpr (kStageO) ptx::tma_wait();  // shared memory must outlive the copy
  }

  /// P of the first KV tile of a stretch.
  FA_DEVICE void begin(Stream& at, [[maybe_unused]] bool skips) const {
    begin_rows(at.tile, at.ahead, at.warp_row, at.lane);
    if constexpr (kOwnRanges) {
      skip_hidden(at.ahead, at.consumer, at.warp_row, at.k_slot, at.v_slot, skips, at.lane);
      if constexpr (kPingpong) await_pingpong(at.consumer);
    }
    ptx::mbarrier_wait(k_full(at.k_slot.index), at.k_slot.parity);
    this->template with_keys<true>(at.tile, at.ahead, at.k_slot.index, at.warp_row, at.lane);
    issue_scores(at.s, at.tile, kOwnRanges ? ptx::shfl(at.q_slot.index, 0) : at.q_slot.index, at.consumer,
                 at.k_slot.index);
    if constexpr (kOwnRanges && kPingpong) signal_pingpong(at.consumer);
    this->template with_products<true>(at.tile, at.ahead, at.warp_row, at.lane);
    ptx::wgmma_wait<0>();
    ptx::wgmma_tie(at.s);
    release_k(at.k_slot, at.lane);
    if (kOwnRanges && kStageO && at.staged) epilogue().release_staged(at.q_slot.index, at.lane);
    at.staged = false;
    this->template before_softmax<true>(at.tile, at.ahead, at.warp_row, at.lane);
    const bool far = this->template exponentiate<true>(at.s, at.tile.visible, at.softmax, at.tile.rows, at.ahead,
                                                       at.tile.limit, at.warp_row, at.lane, at.tile.loaded,
                                                       at.tile.in_chunks, at.tile.dropped, true);
    if constexpr (kSummed) {
      if (far) rescue(at.s, at.softmax, at.tile.dropped, ptx::shfl(at.q_slot.index, 0), at.ahead, at.warp_row);
      at.softmax.add_own();
    }
    pack(at.p, at.s, at.tile);
    if constexpr (!kKeepsWork) at.query = at.ahead.query;
    at.first = true;
  }

  /// The query tile behind the one whose last scores have been taken. False at the end, and where KV tiles have to be
  /// skipped first: then there are `more`.
  FA_DEVICE bool next_query(Stream& at, [[maybe_unused]] bool& more) const {
    if constexpr (kNamesLast) {
      if (at.ahead.query.ahead.last) {
        // Earlier the blocks of the next kernel would lie beside those of this one, two on one multiprocessor.
        if (ptx::thread_index() == kWarpgroup) ptx::griddepcontrol_launch_dependents();
        return false;
      }
    }
    if constexpr (!kFinishOverlapped && !kWholeTiles) {
      epilogue().finish_rows(at.softmax, at.factors, at.ahead.query, at.warp_row, at.lane);
      at.softmax = Softmax();
    }
    if constexpr (!kStageO) release(q_empty(at.q_slot.index), at.lane);
    if (kStageO && at.staged) epilogue().release_staged(at.q_slot.index, at.lane);
    at.staged = false;
    at.q_slot.advance();
    if (kMergesInCluster || !consume_work(at.ahead, at.q_slot)) return false;
    if constexpr (kExchange) at.warp_row = other_rows(at.warp_row, at.consumer);
    if constexpr (kOwnRanges) {
      more = own_range_end(at.ahead.query, at.warp_row) < at.ahead.query.range.end;
      if (more) return false;
    }
    begin_rows(at.tile, at.ahead, at.warp_row, at.lane);
    return true;
  }

  /// What is known of a split's rows before their O is complete.
  FA_DEVICE void finish_split(Stream& at, bool ends) const {
    epilogue().finish_rows(at.softmax, at.factors, at.ahead.query, at.warp_row, at.lane, ends);
    at.softmax = Softmax();
  }

  /// S of the KV tile ahead, and O += P V of the one before it; the softmax of the former is overlapped with the
  /// latter. spans: the tile ahead is of the next query tile; leaves: of that, or of another split of a fixed size.
  FA_DEVICE void step(Stream& at, bool spans, bool leaves) const {
    const int q_buffer = ptx::shfl(at.q_slot.index, 0);
    before_keys(at.tile, at.ahead, at.warp_row, at.lane);
    ptx::mbarrier_wait(k_full(at.k_slot.index), at.k_slot.parity);
    this->template with_keys<false>(at.tile, at.ahead, at.k_slot.index, at.warp_row, at.lane);
    if (kPingpong) await_pingpong(at.consumer);
    issue_scores(at.s, at.tile, q_buffer, at.consumer, at.k_slot.index);
    fold_overlapped(at);
    multiply_risen(at);
    ptx::mbarrier_wait(v_full(at.v_slot.index), at.v_slot.parity);
    issue_output(at.o, at.p, at.v_slot.index, !at.first);
    if (kPingpong) signal_pingpong(at.consumer);
    this->template with_products<false>(at.tile, at.ahead, at.warp_row, at.lane);
    if constexpr (kWholeTiles) {
      if (leaves && !spans) this->enter_next_split(at.ahead);
    }
    if constexpr (kFinishOverlapped) finish_overlapped(at, spans, leaves);
    this->template before_softmax<false>(at.tile, at.ahead, at.warp_row, at.lane);
    ptx::wgmma_wait<1>();
    ptx::wgmma_tie(at.s);
    release_k(at.k_slot, at.lane);
    const bool rescale = take_softmax(at, q_buffer, leaves);
    // One branch in the usual case.
    const bool rare = leaves || (!kExactMax && rescale) || (!kFinishOverlapped && kStageO && at.staged);
    ptx::wgmma_wait<0>();
    ptx::wgmma_tie(at.o);
    release(v_empty(at.v_slot.index), at.lane);
    at.v_slot.advance();
    at.first = false;
    if (rare) leave_query(at, rescale, q_buffer, spans, leaves);
    if constexpr (kSummed) at.softmax.add_own();
    if constexpr (kExactMax) note_risen(at, rescale && !leaves);
    pack(at.p, at.s, at.tile);
  }

  /// The last product of a stretch, and its query tile's end.
  FA_DEVICE void end(Stream& at, bool more) const {
    constexpr bool kSkipsInTurn = kOwnRanges && kPingpong;
    if (kSkipsInTurn && more) await_pingpong(at.consumer);  // of the first KV tile that is skipped
    ptx::mbarrier_wait(v_full(at.v_slot.index), at.v_slot.parity);
    fold_overlapped(at);
    multiply_risen(at);
    if constexpr (kExactMax) at.risen = false;
    issue_output(at.o, at.p, at.v_slot.index, !at.first);
    if (kSkipsInTurn && more) signal_pingpong(at.consumer);
    if constexpr (kKeepsWork) at.query = read_work(work_before(at.q_slot));
    const int stored_row = kExchange && more ? other_rows(at.warp_row, at.consumer) : at.warp_row;
    if constexpr (kFinishOverlapped) {
      finish_rows(at, stored_row);
      at.softmax = Softmax();
    }
    if constexpr (kNamesLast && !kFinishOverlapped) {
      if (at.query.ahead.last) epilogue().finish_rows(at.softmax, at.factors, at.query, stored_row, at.lane);
    }
    ptx::wgmma_wait<0>();
    ptx::wgmma_tie(at.o);
    if constexpr (kOwnRanges) {
      release(v_empty(at.v_slot.index), at.lane);
      at.v_slot.advance();
      at.staged = true;
    }
    if constexpr (kStageO && kPingpong) {  // no ping-pong barrier follows
      ptx::barrier_sync(first_of(NamedBarrier::staged_o) + at.consumer, kWarpgroup);
    }
    if constexpr (kFixedSplits) {
      store_split(at, true, stored_row);
    } else {
      epilogue().template store<true>(at.o, at.factors, at.query, stored_row, at.lane, at.q_slot.index);
    }
  }

  /// What is known of rows before their O is complete.
  FA_DEVICE void finish_rows(Stream& at, int warp_row, bool ends = true) const {
    if constexpr (kFixedSplits) {
      Fixed{epilogue()}.finish(at.softmax, at.folded, warp_row, at.lane);
    } else {
      epilogue().finish_rows(at.softmax, at.factors, at.query, warp_row, at.lane, ends);
    }
  }

  /// O of a split of a fixed size: to those of its query tile, or with them to memory where that `ends`.
  FA_DEVICE void store_split(Stream& at, bool ends, int warp_row) const {
    if constexpr (kShares) {
      const int split = ends ? at.query.range.begin / kSplitTiles : at.ahead.n / kSplitTiles + 1;
      Fixed{epilogue()}.store_split(at.o, at.folded, at.query, split, ends, warp_row, at.lane);
    } else if constexpr (kFixedSplits) {
      if (ends) {
        Fixed{epilogue()}.fold_last(at.o, at.folded.o, at.query, warp_row, at.lane, at.q_slot.index);
      } else if constexpr (!kFoldsOverlapped) {
        Fixed{epilogue()}.fold_if_left(at.o, at.folded.o, warp_row, at.lane);
      }
    }
  }

  /// O of a split that is complete, to those before it.
  FA_DEVICE void fold_overlapped(Stream& at) const {
    if constexpr (kFoldsOverlapped) {
      if (at.first) {
        Fixed{epilogue()}.fold_if_left(at.o, at.folded.o, at.warp_row, at.lane);
      }
    }
  }

  /// O of the KV tiles before, where exact maxima have risen.
  FA_DEVICE static void multiply_risen(Stream& at) {
    if constexpr (kExactMax) {
      if (at.risen) multiply(at.o, at.factor);
    }
  }
  FA_DEVICE static void note_risen(Stream& at, bool risen) {
    at.risen = risen;
    FA_UNROLL
    for (int r = 0; r < 2; ++r) at.factor[r] = at.softmax.factor[r];
  }

  /// The rows of the query tile before, overlapped with the products.
  FA_DEVICE void finish_overlapped(Stream& at, [[maybe_unused]] bool spans, bool leaves) const {
    if (!leaves && !(kStageO && at.staged)) return;
    if (kStageO && at.staged) epilogue().release_staged(at.q_slot.index, at.lane);
    at.staged = false;
    if (!leaves) return;
    if constexpr (kKeepsWork && !kFixedSplits) at.query = read_work(work_before(at.q_slot));
    finish_rows(at, other_rows(at.warp_row, at.consumer), spans);
    at.softmax = Softmax();
  }

  /// P of the KV tile ahead, in place of its scores. True when O must be rescaled, or else P after `rescue`.
  FA_DEVICE bool take_softmax(Stream& at, int q_buffer, bool leaves) const {
    const bool rescale = this->template exponentiate<false>(at.s, at.tile.visible, at.softmax, at.tile.rows, at.ahead,
                                                            at.tile.limit, at.warp_row, at.lane, at.tile.loaded,
                                                            at.tile.in_chunks, at.tile.dropped, leaves);
    if constexpr (kDropout) {  // here what is kept is known too, overlapped with the product
      if (rescale) rescue(at.s, at.softmax, at.tile.dropped, q_buffer, at.ahead, at.warp_row);
    }
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      if constexpr (kSummed) ptx::settle(at.softmax.own[r], rescale, shared + kLayout.work);
      if constexpr (!kSummed) ptx::settle(at.softmax.sum[r], shared + kLayout.work);
    }
    return rescale;
  }

  /// O is complete: it leaves with its query tile, is multiplied, or only its staged predecessor is waited for.
  FA_DEVICE void leave_query(Stream& at, bool rescale, [[maybe_unused]] int q_buffer, bool spans, bool leaves) const {
    if constexpr (kSummed && !kDropout) {
      if (rescale) rescue(at.s, at.softmax, at.tile.dropped, q_buffer, at.ahead, at.warp_row);
    }
    if (!kFinishOverlapped && kStageO && at.staged) epilogue().release_staged(at.q_slot.index, at.lane);
    if constexpr (!kFinishOverlapped) at.staged = false;
    if (kFixedSplits && leaves) {
      leave_split(at, spans);
    } else if (spans || (kWholeTiles && leaves)) {
      // A work descriptor still lies next to its Q where that is not yet released: fewer registers over the loop.
      if constexpr (kKeepsWork) at.query = read_work(work_before(at.q_slot));
      if constexpr (kPostsPieces) ptx::sync_warp();  // all lanes have read it before one of them releases the next Q
      epilogue().template store<false>(at.o, at.factors, at.query, other_rows(at.warp_row, at.consumer), at.lane,
                                       at.q_slot.index, spans);
      if constexpr (!kKeepsWork) at.query = at.ahead.query;
      if constexpr (kRowsAhead) epilogue().find_rows(at.factors, at.query, at.warp_row, at.lane);
      at.first = at.staged = true;
    } else if (!kExactMax && rescale) {
      multiply(at.o, at.softmax.factor);
    }
  }

  /// O of a split is complete. spans: it was the last of its query tile, or of this block's there.
  FA_DEVICE void leave_split(Stream& at, bool spans) const {
    if constexpr (kKeepsWork) at.query = read_work(spans ? work_before(at.q_slot) : work_of(at.q_slot));
    if constexpr (kShares) ptx::sync_warp();  // all lanes have read it before one of them releases the next Q
    store_split(at, spans, at.warp_row);
    at.first = true;
    if (spans) at.staged = true;
    if (!kKeepsWork && spans) at.query = at.ahead.query;
  }

  // Ping-pong scheduling: consumers feed the tensor cores one after the other, once for each KV tile.
  FA_DEVICE static void await_pingpong(int consumer) {
    ptx::barrier_sync(first_of(NamedBarrier::pingpong) + consumer, 2 * kWarpgroup);
  }
  FA_DEVICE static void signal_pingpong(int consumer) {
    ptx::barrier_arrive(first_of(NamedBarrier::pingpong) + (consumer + 1 == kConsumers ? 0 : consumer + 1),
                        2 * kWarpgroup);
  }

  /// Releases KV tiles that are hidden from this warpgroup, each in its turn of the ping-pong; that of the first may be
  /// over.
  FA_DEVICE void skip_hidden(Cursor& cursor, int consumer, int warp_row, RingSlot<kStages>& k_slot,
                             RingSlot<kStages>& v_slot, bool had_pingpong, int lane) const {
    const int end = own_range_end(cursor.query, warp_row);
    for (; cursor.n >= end; --cursor.n) {
      if (kPingpong && !had_pingpong) {
        await_pingpong(consumer);
        signal_pingpong(consumer);
      }
      had_pingpong = false;
      skip(k_full(k_slot.index), k_empty(k_slot.index), k_slot, lane);
      skip(v_full(v_slot.index), v_empty(v_slot.index), v_slot, lane);
    }
  }

  /// A buffer is released after it is filled: else this would count for what was there before.
  FA_DEVICE void skip(uint32_t full, uint32_t empty, RingSlot<kStages>& slot, int lane) const {
    ptx::mbarrier_wait(full, slot.parity);
    ptx::sync_warp();  // all lanes have waited
    release(empty, lane);
    slot.advance();
  }

  FA_DEVICE void release_k(RingSlot<kStages>& slot, int lane) const {
    release(k_empty(slot.index), lane);
    slot.advance();
  }
};

template <class Config>
FA_DEVICE void forward(const ForwardParamsOf<Config>& params) {
  Forward<Config>(params).run();
}

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_FORWARD_CUH_
