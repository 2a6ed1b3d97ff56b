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
#include <sm90/sm90_forward_block.cuh>
#include <sm90/sm90_forward_traits.cuh>
#include <sm90/sm90_probabilities.cuh>
#include <sm90/sm90_producer.cuh>
#include <sm90/sm90_ring.cuh>
#include <sm90/sm90_roles.cuh>
#include <sm90/sm90_schedule.cuh>
#include <sm90/sm90_scores.cuh>
#include <sm90/sm90_shared_tile.cuh>

namespace fa::sm90 {

/// FlashAttention-3 forward on wgmma and the copy engine (Shah et al., 2024), as one stream of KV tiles: a producer
/// warp copies tiles into rings of buffers, `kConsumers` warpgroups own 64 query rows each. A warpgroup issues S = Q
/// K^T of the next KV tile, then O += P V of the current one, and computes the softmax of the former while the latter
/// runs; the next KV tile may belong to the next query tile, so that the tensor cores see no boundary between query
/// tiles. With dropout further warps make its random bits.
template <class Config>
struct Forward : Probabilities<ForwardTraits<Config>> {
  using Traits = ForwardTraits<Config>;
  using Base = Probabilities<ForwardTraits<Config>>;
  using KeyNumbers = typename Base::KeyNumbers;
  using QTile = typename Base::QTile;
  using KTile = typename Base::KTile;
  using VTile = typename Base::VTile;
  using SGemm = typename Base::SGemm;
  using OGemm = typename Base::OGemm;
  using S = typename Base::S;
  using P = typename Base::P;
  using O = typename Base::O;
  using Rows = typename Base::Rows;
  using Dropped = typename Base::Dropped;
  using Loaded = typename Base::Loaded;
  using Softmax = typename Base::Softmax;
  using Query = typename Base::Query;
  using Cursor = typename Base::Cursor;
  using Slopes = typename Base::Slopes;
  using AffineRows = typename Base::AffineRows;
  using Base::kTileN, Base::kStages, Base::kQBuffers, Base::kConsumers, Base::kSSteps, Base::kPSteps, Base::kPingpong,
      Base::kVarlen, Base::kDropout, Base::kLists, Base::kAffineProduct, Base::kDropoutWarpgroup, Base::kEmptyWarp,
      Base::kOwnRanges, Base::kExchange, Base::kExactMax, Base::kDropoutRegisters, Base::kProducerRegisters,
      Base::kConsumerRegisters, Base::kDropoutWarps, Base::kLoadAhead, Base::kSummed, Base::kFinishOverlapped,
      Base::kLayout, Base::kStageO, Base::params, Base::shared, Base::q_shared, Base::k_shared, Base::v_shared,
      Base::k_full, Base::k_empty, Base::v_full, Base::v_empty, Base::q_empty, Base::dropout_shared,
      Base::init_barriers, Base::release, Base::lengths_of, Base::first_row_of, Base::row_count, Base::read_work,
      Base::read_listed, Base::consume_work, Base::number_keys, Base::kTurnsSlopes, Base::start_slopes,
      Base::turn_slopes, Base::affine_rows, Base::load_ahead, Base::first_limit, Base::exponentiate, Base::rescue,
      Base::clear_hidden, Base::take_mask, Base::convert, Base::keep;

  using Base::Base;

  // A copy in front of the loop, or a member, costs registers there.
  FA_DEVICE Epilogue<Traits> epilogue() const { return Epilogue<Traits>(*this); }

  FA_DEVICE void run() {
    if (ptx::thread_index() == 0) init_barriers();
    if constexpr (kAffineProduct) number_keys();
    ptx::griddepcontrol_wait();  // for what earlier kernels write, and for those that still read what this one writes
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

  FA_DEVICE static WarpgroupRole role_of(int warpgroup) {
    if (warpgroup == 0) return WarpgroupRole::producer;
    return kDropoutWarpgroup && warpgroup > kConsumers ? WarpgroupRole::dropout_rng : WarpgroupRole::consumer;
  }

  FA_DEVICE void produce() const {
    if constexpr (kEmptyWarp) {
      const int warp = ptx::shfl(ptx::thread_index() / kWarpSize, 0);
      const int lane = ptx::thread_index() % kWarpSize;
      if (warp == 0 && (kVarlen || lane == 0)) Producer<Traits>(*this).produce_q_and_k(lane == 0);
      if (warp == 1 && (kVarlen || lane == 0)) Producer<Traits>(*this).produce_v(lane == 0);
      if (warp == 2) epilogue().store_empty_tiles(lane);
    } else {
      if (ptx::thread_index() == 0) Producer<Traits>(*this).produce_q_and_k(true);
      if (ptx::thread_index() == kWarpSize) Producer<Traits>(*this).produce_v(true);
    }
    if constexpr (kDropout && !kDropoutWarpgroup) {
      if (ptx::shfl(ptx::thread_index() / kWarpSize, 0) >= 4 - kDropoutWarps) DropoutWarps<Traits>(*this).write_masks();
    }
  }

  FA_DEVICE void consume(int consumer) const {
    const int lane = ptx::thread_index() % kWarpSize;
    // The warp's first row in the query tile.
    int warp_row = ptx::shfl(consumer * 64 + ptx::thread_index() % kWarpgroup / kWarpSize * 16, 0);
    RingSlot<kStages> k_slot, v_slot;
    RingSlot<kQBuffers> q_slot;
    RingSlot<kMaskBuffers> mask_slot;
    S s;
    P probabilities;
    O o;
    [[maybe_unused]] Dropped dropped;  // of the scores in `s`
    [[maybe_unused]] Loaded loaded;
    [[maybe_unused]] bool in_chunks = false;  // `loaded`
    Softmax softmax;
    [[maybe_unused]] bool risen = false;  // maxima have: with kExactMax, O is to be multiplied by
    [[maybe_unused]] float factor[2] = {1.f, 1.f};
    bool staged = false;  // O is on its way out of the Q buffer that is not in use

    if constexpr (!kEmptyWarp && (Config::kCausal || Config::kSplit)) {
      if (Config::kSplit || params.causal_shift < 0) epilogue().store_empty(warp_row, lane);
    }

    Cursor ahead;
    Slopes slopes;
    if (!consume_work(ahead, q_slot)) return;
    if (kPingpong && consumer == kConsumers - 1) ptx::barrier_arrive(first_of(NamedBarrier::pingpong), 2 * kWarpgroup);

    // Once, or with kOwnRanges once for each stretch of query tiles behind KV tiles that are hidden from this
    // warpgroup.
    for (bool more = true, skips = false; more; skips = true) {
      more = false;
      if constexpr (kAffineProduct) start_slopes(slopes, ahead, warp_row, lane);
      if constexpr (kOwnRanges) {
        skip_hidden(ahead, consumer, warp_row, k_slot, v_slot, skips, lane);
        if constexpr (kPingpong) await_pingpong(consumer);
      }
      ptx::mbarrier_wait(k_full(k_slot.index), k_slot.parity);
      read_listed(ahead, k_slot.index);
      if constexpr (kTurnsSlopes) turn_slopes(slopes, ahead, warp_row, lane);
      issue_scores(s, slopes, kOwnRanges ? ptx::shfl(q_slot.index, 0) : q_slot.index, consumer, k_slot.index);
      if constexpr (kOwnRanges && kPingpong) signal_pingpong(consumer);
      if constexpr (kLoadAhead) in_chunks = load_ahead(loaded, ahead, warp_row, lane);
      int limit = first_limit(ahead, warp_row);
      ptx::wgmma_wait<0>();
      ptx::wgmma_tie(s);
      release_k(k_slot, lane);
      if (kOwnRanges && kStageO && staged) epilogue().release_staged(q_slot.index, lane);
      staged = false;
      const AffineRows first_rows = affine_rows(slopes, ahead, warp_row, lane);
      if constexpr (kDropout) dropped.mask = take_mask(mask_slot, warp_row, lane);
      int visible;
      const bool far = this->template exponentiate<true>(s, visible, softmax, first_rows, ahead, limit, warp_row, lane,
                                                         loaded, in_chunks, dropped, true);
      if constexpr (kSummed) {
        if (far) rescue(s, softmax, dropped, ptx::shfl(q_slot.index, 0), ahead, warp_row);
        softmax.add_own();
      }
      if constexpr (kDropout) {
        keep(probabilities, dropped.pairs, dropped.kept);
      } else {
        convert(probabilities, s);
        clear_hidden(probabilities, visible);
      }

      Query query = ahead.query;  // whose O is in the making
      bool first = true;          // of its KV tiles: O is not yet defined
      float inverse_sum[2];
      while (true) {
        const bool spans = ahead.n == ahead.query.range.begin;
        if (spans) {
          if constexpr (!kFinishOverlapped) {
            epilogue().finish_rows(softmax, inverse_sum, ahead.query, warp_row, lane);
            softmax = Softmax();
          }
          if constexpr (!kStageO) release(q_empty(q_slot.index), lane);
          if (kStageO && staged) epilogue().release_staged(q_slot.index, lane);
          staged = false;
          q_slot.advance();
          if (!consume_work(ahead, q_slot)) break;
          if constexpr (kExchange) warp_row = other_rows(warp_row, consumer);
          if constexpr (kOwnRanges) {
            more = own_range_end(ahead.query, warp_row) < ahead.query.range.end;
            if (more) break;
          }
          if constexpr (kAffineProduct) start_slopes(slopes, ahead, warp_row, lane);
        } else {
          --ahead.n;
        }
        const int q_buffer = ptx::shfl(q_slot.index, 0);
        if constexpr (kLoadAhead && !kLists) in_chunks = load_ahead(loaded, ahead, warp_row, lane);
        if constexpr (kTurnsSlopes && !kLists) turn_slopes(slopes, ahead, warp_row, lane);
        ptx::mbarrier_wait(k_full(k_slot.index), k_slot.parity);
        read_listed(ahead, k_slot.index);
        if constexpr (kTurnsSlopes && kLists) turn_slopes(slopes, ahead, warp_row, lane);
        if (kPingpong) await_pingpong(consumer);
        issue_scores(s, slopes, q_buffer, consumer, k_slot.index);
        if constexpr (kExactMax) {
          if (risen) multiply(o, factor);
        }
        ptx::mbarrier_wait(v_full(v_slot.index), v_slot.parity);
        issue_output(o, probabilities, v_slot.index, !first);
        if (kPingpong) signal_pingpong(consumer);
        if constexpr (kLoadAhead && kLists) in_chunks = load_ahead(loaded, ahead, warp_row, lane);
        const AffineRows rows = affine_rows(slopes, ahead, warp_row, lane);
        limit = first_limit(ahead, warp_row);
        if (kFinishOverlapped && (spans || (kStageO && staged))) {  // overlapped with the products
          if (kStageO && staged) epilogue().release_staged(q_slot.index, lane);
          staged = false;
          if (spans) {
            if constexpr (kStageO) query = read_work(kQBuffers - 1 - q_slot.index);
            epilogue().finish_rows(softmax, inverse_sum, query, other_rows(warp_row, consumer), lane);
            softmax = Softmax();
          }
        }
        if constexpr (kDropout) dropped.mask = take_mask(mask_slot, warp_row, lane);
        ptx::wgmma_wait<1>();
        ptx::wgmma_tie(s);
        release_k(k_slot, lane);
        const bool rescale = this->template exponentiate<false>(s, visible, softmax, rows, ahead, limit, warp_row, lane,
                                                                loaded, in_chunks, dropped, spans);
        if constexpr (kDropout) {  // here what is kept is known too, overlapped with the product
          if (rescale) rescue(s, softmax, dropped, q_buffer, ahead, warp_row);
        }
        FA_UNROLL
        for (int r = 0; r < 2; ++r) {
          if constexpr (kSummed) ptx::settle(softmax.own[r], rescale, shared + kLayout.work);
          if constexpr (!kSummed) ptx::settle(softmax.sum[r], shared + kLayout.work);
        }
        // One branch in the usual case.
        const bool rare = spans || (!kExactMax && rescale) || (!kFinishOverlapped && kStageO && staged);
        ptx::wgmma_wait<0>();
        ptx::wgmma_tie(o);
        release(v_empty(v_slot.index), lane);
        v_slot.advance();
        first = false;
        if (rare) {
          if constexpr (kSummed && !kDropout) {
            if (rescale) rescue(s, softmax, dropped, q_buffer, ahead, warp_row);
          }
          if (!kFinishOverlapped && kStageO && staged) epilogue().release_staged(q_slot.index, lane);
          if constexpr (!kFinishOverlapped) staged = false;
          if (spans) {
            // A work descriptor still lies next to its Q where that is not yet released: fewer registers over the loop.
            if constexpr (kStageO) query = read_work(kQBuffers - 1 - q_slot.index);
            epilogue().store(o, inverse_sum, query, other_rows(warp_row, consumer), lane, q_slot.index);
            query = ahead.query;
            first = staged = true;
          } else if (!kExactMax && rescale) {
            multiply(o, softmax.factor);
          }
        }
        if constexpr (kSummed) softmax.add_own();
        if constexpr (kExactMax) {
          risen = rescale && !spans;
          FA_UNROLL
          for (int r = 0; r < 2; ++r) factor[r] = softmax.factor[r];
        }
        if constexpr (kDropout) {
          keep(probabilities, dropped.pairs, dropped.kept);
        } else {
          convert(probabilities, s);
          clear_hidden(probabilities, visible);
        }
      }

      constexpr bool kSkipsInTurn = kOwnRanges && kPingpong;
      if (kSkipsInTurn && more) await_pingpong(consumer);  // of the first KV tile that is skipped
      ptx::mbarrier_wait(v_full(v_slot.index), v_slot.parity);
      if constexpr (kExactMax) {
        if (risen) multiply(o, factor);
        risen = false;
      }
      issue_output(o, probabilities, v_slot.index, !first);
      if (kSkipsInTurn && more) signal_pingpong(consumer);
      if constexpr (kStageO) query = read_work(kQBuffers - 1 - q_slot.index);
      const int stored_row = kExchange && more ? other_rows(warp_row, consumer) : warp_row;
      if constexpr (kFinishOverlapped) {
        epilogue().finish_rows(softmax, inverse_sum, query, stored_row, lane);
        softmax = Softmax();
      }
      ptx::wgmma_wait<0>();
      ptx::wgmma_tie(o);
      if constexpr (kOwnRanges) {
        release(v_empty(v_slot.index), lane);
        v_slot.advance();
        staged = true;
      }
      if constexpr (kStageO && kPingpong)
        ptx::barrier_sync(first_of(NamedBarrier::staged_o) + consumer, kWarpgroup);  // no ping-pong barrier follows
      epilogue().store(o, inverse_sum, query, stored_row, lane, q_slot.index);
    }
    if constexpr (kStageO) ptx::tma_wait();  // shared memory must outlive the copy
  }

  // Ping-pong scheduling: consumers feed the tensor cores one after the other, once for each KV tile.
  FA_DEVICE static void await_pingpong(int consumer) {
    ptx::barrier_sync(first_of(NamedBarrier::pingpong) + consumer, 2 * kWarpgroup);
  }
  FA_DEVICE static void signal_pingpong(int consumer) {
    ptx::barrier_arrive(first_of(NamedBarrier::pingpong) + (consumer + 1 == kConsumers ? 0 : consumer + 1),
                        2 * kWarpgroup);
  }

  /// The warp's first row in the query tiles before and behind this one.
  FA_DEVICE static int other_rows(int warp_row, int consumer) {
    if constexpr (!kExchange) return warp_row;
    return warp_row % 64 + (warp_row / 64 == consumer ? kConsumers - 1 - consumer : consumer) * 64;
  }

  /// End of the KV tiles that the 64 rows of a warpgroup see: one at least. Of all its warps the same.
  FA_DEVICE int own_range_end(const Query& query, int warp_row) const {
    const Rows rows{params.group, 0};
    const int first = first_row_of(query.tile) + warp_row / 64 * 64;
    const int end = row_count(query);
    const int last = first + 63 < end ? first + 63 : end - 1;
    const int limit = kernel::key_limit<Config::kCausal>(lengths_of(query), rows.position(last));
    const int tiles_seen = first < end && last >= 0 ? kernel::ceil_div(limit, kTileN) : 0;
    return tiles_seen > query.range.begin ? tiles_seen : query.range.begin + 1;
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

  /// Starts S = Q K^T, [64, tile_n], with `slopes` of its keys' numbers added.
  FA_DEVICE void issue_scores(S& s, [[maybe_unused]] const Slopes& slopes, int q_buffer, int consumer,
                              int stage) const {
    const int rows = 64 * (kExchange && q_buffer != 0 ? kConsumers - 1 - consumer : consumer);
    ptx::wgmma_tie(s);
    ptx::wgmma_fence();
    FA_UNROLL
    for (int step = 0; step < kSSteps; ++step) {
      SGemm::template shared<false>(s, QTile::k_major(q_shared(q_buffer), rows, step),
                                    KTile::k_major(k_shared(stage), 0, step), step != 0);
    }
    if constexpr (kAffineProduct) {
      SGemm::template registers<false>(s, slopes.operand, KeyNumbers::descriptor(shared + kLayout.key_numbers), true);
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
};

template <class Config>
FA_DEVICE void forward(const ForwardParamsOf<Config>& params) {
  Forward<Config>(params).run();
}

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_FORWARD_CUH_
