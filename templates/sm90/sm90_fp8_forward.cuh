#ifndef FA_TEMPLATES_SM90_SM90_FP8_FORWARD_CUH_
#define FA_TEMPLATES_SM90_SM90_FP8_FORWARD_CUH_

#include <common/constants.cuh>
#include <ptx/fp8.cuh>
#include <ptx/griddepcontrol.cuh>
#include <ptx/language.cuh>
#include <ptx/mbarrier.cuh>
#include <ptx/thread.cuh>
#include <ptx/wgmma.cuh>
#include <sm90/sm90_fp8_epilogue.cuh>
#include <sm90/sm90_fp8_producer.cuh>
#include <sm90/sm90_fp8_traits.cuh>
#include <sm90/sm90_ring.cuh>
#include <sm90/sm90_roles.cuh>

namespace fa::sm90 {

/// Forward on wgmma of 8-bit floats (Shah et al., 2024, section 3.3). Warps of the producer transpose V, and give its
/// keys the order in which accumulators of S are an operand. The tensor cores keep few bits of a sum: what a KV tile
/// adds to O is summed by them from zero, and added to O in float (two levels).
template <class Config>
struct Fp8Forward : Fp8Block<Config> {
  using Base = Fp8Block<Config>;
  using Traits = typename Base::Traits;
  using S = typename Traits::S;
  using P = typename Traits::P;
  using O = typename Traits::O;
  using Slice = typename Traits::Slice;
  using QTile = typename Traits::QTile;
  using KTile = typename Traits::KTile;
  using VTile = typename Traits::VTile;
  using SGemm = typename Traits::SGemm;
  using OGemm = typename Traits::OGemm;
  using Rows = typename Traits::Rows;
  using Query = typename Traits::Query;
  using Cursor = typename Base::Cursor;
  using Softmax = typename Traits::Softmax;
  using Variant = typename Traits::Variant;
  using Traits::kTileN, Traits::kStages, Traits::kQBuffers, Traits::kWorks, Traits::kConsumers, Traits::kSSteps,
      Traits::kPSteps, Traits::kSlices, Traits::kValueColumns, Traits::kWindowed, Traits::kPingpong, Traits::kAhead,
      Traits::kSingleLevel, Traits::kOwnRanges, Traits::kProducerRegisters, Traits::kConsumerRegisters, Base::params,
      Base::q_shared, Base::k_shared, Base::v_shared, Base::k_full, Base::k_empty, Base::v_full, Base::v_empty,
      Base::q_full, Base::q_empty, Base::init_barriers, Base::release, Base::read_work, Base::lengths_of,
      Base::first_row_of, Base::has_row, Base::own_range_end, Base::tiles_of;

  using Base::Base;

  FA_DEVICE void run() {
    if (ptx::thread_index() == 0) init_barriers();
    ptx::griddepcontrol_wait();  // for what earlier kernels write, and for those that still read what this one writes
    ptx::sync_threads();         // the barriers exist for all
    const int warpgroup = ptx::shfl(ptx::thread_index() / kWarpgroup, 0);
    if (warpgroup == 0) {
      ptx::decrease_registers<kProducerRegisters>();
      Fp8Producer<Config>(*this).run();
    } else {
      ptx::increase_registers<kConsumerRegisters>();
      consume(warpgroup - 1);
    }
  }

  /// What a consumer carries from KV tile to KV tile. It is not made as an aggregate, which would clear S.
  struct Stream {
    int consumer;
    int lane;
    int warp_row;  // the warp's first row in the query tile
    RingSlot<kStages> k_slot, v_slot;
    RingSlot<kQBuffers> q_slot;
    RingSlot<kWorks> work;
    int n;      // KV tile whose scores are in the making
    int limit;  // the first key that is hidden from the warp's first row
    S s;
    O o;  // [64, d_v]
    Softmax softmax;
    float scale[2];       // of raw scores, by row, in log2 units: no less than 0
    float multiplier[2];  // of raw scores before score functions or masks: a sign, or all of the scale
    bool multiplies;      // it is not 1
  };

  FA_DEVICE void consume(int consumer) const {
    Stream at;
    at.consumer = consumer;
    at.lane = ptx::thread_index() % kWarpSize;
    at.warp_row = ptx::shfl(consumer * 64 + ptx::thread_index() % kWarpgroup / kWarpSize * 16, 0);
    if (kPingpong && consumer == kConsumers - 1) ptx::barrier_arrive(first_of(NamedBarrier::pingpong), 2 * kWarpgroup);
    FA_UNROLL_BY(1)
    while (true) {
      ptx::mbarrier_wait(q_full(at.q_slot.index), at.q_slot.parity);
      if (!start_query(at)) return;
      attend(at);
      Fp8Epilogue<Config>(*this).run(at.o, at.softmax, at.scale, read_work(at.work.index), at.warp_row, at.lane);
      at.q_slot.advance();
      at.work.advance();
    }
  }

  /// False at the end.
  FA_DEVICE bool start_query(Stream& at) const {
    const Query query = read_work(at.work.index);
    ptx::sync_warp();  // all lanes have waited before one of them releases the buffer
    if (query.range.end < 0) return false;
    at.n = query.range.end - 1;
    const Rows rows{params.group, query.tile.head};
    const int row = first_row_of(query.tile) + at.warp_row;
    at.limit = kernel::key_limit<Config::kCausal>(lengths_of(query), Rows{params.group, 0}.position(row));
    at.softmax = Softmax();
    FA_UNROLL
    for (int slice = 0; slice < kSlices; ++slice) {
      FA_UNROLL
      for (float& o : at.o[slice]) o = 0.f;
    }
    at.multiplies = false;
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int of_row = row + at.lane / 4 + 8 * r;
      const int existing = has_row(query, of_row) ? of_row : first_row_of(query.tile);
      const float scale =
          this->k_scale(query) * this->q_scale(query, rows.query_head(existing), rows.position(existing));
      set_scale(at, r, scale);
    }
    return true;
  }

  /// `scale`: what makes raw scores of sums of products.
  FA_DEVICE void set_scale(Stream& at, int r, float scale) const {
    if constexpr (Variant::kScore) {
      at.scale[r] = Variant::kFactor * kernel::kLog2e;
      at.multiplier[r] = scale;
    } else {
      const float whole = scale * params.scale_log2;
      at.scale[r] = whole == 0.f ? 1.f : ptx::abs(whole);
      at.multiplier[r] = whole < 0.f ? -1.f : whole == 0.f ? 0.f : 1.f;
    }
    at.multiplies = at.multiplies || at.multiplier[r] != 1.f;
  }

  /// All KV tiles of a query tile.
  FA_DEVICE void attend(Stream& at) const {
    const Query query = read_work(at.work.index);
    const int begin = query.range.begin;
    if constexpr (kOwnRanges) skip_hidden(at, query);
    if (at.n < begin) {
      release(q_empty(at.q_slot.index), at.lane);
      return;
    }
    if constexpr (kPingpong) await_pingpong(at.consumer);
    issue_scores(at);
    if constexpr (kPingpong) signal_pingpong(at.consumer);
    ptx::wgmma_wait<0>();
    FA_UNROLL_BY(1)
    while (true) {
      ptx::wgmma_tie(at.s);
      release(k_empty(at.k_slot.index), at.lane);
      at.k_slot.advance();
      const bool last = at.n == begin;
      if (last) release(q_empty(at.q_slot.index), at.lane);  // this was the last product that reads Q
      hide_scores(at);
      const bool rises = at.softmax.update(at.s, at.scale);
      P pairs;
      pack(pairs, at.s);
      step(at, pairs, rises, last);
      if (last) return;
      --at.n;
    }
  }

  /// O += P V of a KV tile, and the start of S of the next one.
  FA_DEVICE void step(Stream& at, const P& pairs, bool rises, bool last) const {
    if constexpr (kPingpong) await_pingpong(at.consumer);
    ptx::mbarrier_wait(v_full(at.v_slot.index), at.v_slot.parity);
    if constexpr (kSingleLevel) {
      if (rises) multiply(at.o[0], at.softmax.factor);
      issue_output(at.o[0], pairs, at.v_slot.index, 0, true);
      if (!last) issue_scores(at);
      if constexpr (kPingpong) signal_pingpong(at.consumer);
      ptx::wgmma_wait<0>();
      ptx::wgmma_tie(at.o[0]);
    } else {
      FA_UNROLL
      for (int slice = 0; slice < kSlices - 1; ++slice) {
        Slice added;
        issue_output(added, pairs, at.v_slot.index, slice, false);
        ptx::wgmma_wait<0>();
        ptx::wgmma_tie(added);
        add(at.o[slice], added, at.softmax.factor);
      }
      Slice added;
      issue_output(added, pairs, at.v_slot.index, kSlices - 1, false);
      if constexpr (!kAhead) {
        ptx::wgmma_wait<0>();
        ptx::wgmma_tie(added);
        add(at.o[kSlices - 1], added, at.softmax.factor);
        if (!last) issue_scores(at);
        if constexpr (kPingpong) signal_pingpong(at.consumer);
        ptx::wgmma_wait<0>();
      } else if (last) {
        if constexpr (kPingpong) signal_pingpong(at.consumer);
        ptx::wgmma_wait<0>();
        ptx::wgmma_tie(added);
        add(at.o[kSlices - 1], added, at.softmax.factor);
      } else {
        issue_scores(at);
        if constexpr (kPingpong) signal_pingpong(at.consumer);
        ptx::wgmma_wait<1>();
        ptx::wgmma_tie(added);
        add(at.o[kSlices - 1], added, at.softmax.factor);
        ptx::wgmma_wait<0>();
      }
    }
    release(v_empty(at.v_slot.index), at.lane);
    at.v_slot.advance();
  }

  /// Starts S = Q K^T, [64, tile_n], of the KV tile that is next in K's ring.
  FA_DEVICE void issue_scores(Stream& at) const {
    ptx::mbarrier_wait(k_full(at.k_slot.index), at.k_slot.parity);
    ptx::wgmma_tie(at.s);
    ptx::wgmma_fence();
    const uint32_t q = q_shared(at.q_slot.index);
    FA_UNROLL
    for (int step = 0; step < kSSteps; ++step) {
      SGemm::shared(at.s, QTile::k_major(q, 64 * at.consumer, step), KTile::k_major(k_shared(at.k_slot.index), 0, step),
                    step != 0);
    }
    ptx::wgmma_commit();
  }

  /// Starts P V, [64, kValueColumns], of a slice of V's columns.
  FA_DEVICE void issue_output(Slice& o, const P& pairs, int stage, int slice, bool accumulate) const {
    ptx::wgmma_tie(o);
    ptx::wgmma_fence();
    FA_UNROLL
    for (int step = 0; step < kPSteps; ++step) {
      OGemm::registers(o, pairs[step], VTile::k_major(v_shared(stage), slice * kValueColumns, step),
                       accumulate || step != 0);
    }
    ptx::wgmma_commit();
  }

  /// O of two rows, relative to the maxima that P has.
  FA_DEVICE static void add(Slice& o, const Slice& added, const float (&factor)[2]) {
    FA_UNROLL
    for (int i = 0; i < kValueColumns / 2; ++i) o[i] = ptx::fma(o[i], factor[i / 2 % 2], added[i]);
  }
  FA_DEVICE static void multiply(Slice& o, const float (&factor)[2]) {
    FA_UNROLL
    for (int i = 0; i < kValueColumns / 2; ++i) o[i] *= factor[i / 2 % 2];
  }

  /// P as the operand of the next product. Of 16 keys place 4t + 2h + e is key 8h + 2t + e, which is what a thread has
  /// of two n8 tiles: V's keys are in that order.
  FA_DEVICE static void pack(P& pairs, const S& s) {
    FA_UNROLL
    for (int step = 0; step < kPSteps; ++step) {
      FA_UNROLL
      for (int word = 0; word < 4; ++word) {
        const int i = 16 * step + 8 * (word / 2) + 2 * (word % 2);
        pairs[step][word] = ptx::convert_e4m3(s[i], s[i + 1], s[i + 4], s[i + 5]);
      }
    }
  }

  /// What score functions and masks make of scores.
  FA_DEVICE void hide_scores(Stream& at) const {
    if (Variant::kScore || at.multiplies) {
      FA_UNROLL
      for (int i = 0; i < kTileN / 2; ++i) at.s[i] *= at.multiplier[i / 2 % 2];
    }
    if constexpr (Variant::kScore) this->apply_score(at.s, cursor_of(at), at.warp_row, at.lane);
    if constexpr (kWindowed) {
      const Cursor cursor = cursor_of(at);
      if (at.n >= cursor.query.range.plain_begin && at.n < cursor.query.range.plain_end) return;
      this->hide_outside(at.s, cursor, at.warp_row, at.lane);
    } else {
      const int limit = at.limit - at.n * kTileN;
      if (limit < kTileN) this->hide_behind(at.s, cursor_of(at), limit, at.warp_row);
    }
  }

  FA_DEVICE Cursor cursor_of(const Stream& at) const { return {read_work(at.work.index), at.n, 0}; }

  /// Releases KV tiles that are hidden from this warpgroup, each in its turn of the ping-pong. A buffer is released
  /// after it is filled: else this would count for what was there before.
  FA_DEVICE void skip_hidden(Stream& at, const Query& query) const {
    if (tiles_of(query) <= 0) return;
    const int end = own_range_end(query, at.warp_row);
    FA_UNROLL_BY(1)
    for (; at.n >= end; --at.n) {
      if constexpr (kPingpong) {
        await_pingpong(at.consumer);
        signal_pingpong(at.consumer);
      }
      skip(k_full(at.k_slot.index), k_empty(at.k_slot.index), at.k_slot, at.lane);
      skip(v_full(at.v_slot.index), v_empty(at.v_slot.index), at.v_slot, at.lane);
    }
  }
  FA_DEVICE void skip(uint32_t full, uint32_t empty, RingSlot<kStages>& slot, int lane) const {
    ptx::mbarrier_wait(full, slot.parity);
    ptx::sync_warp();  // all lanes have waited
    release(empty, lane);
    slot.advance();
  }

  // Ping-pong scheduling: consumers feed the tensor cores one after the other, once for each KV tile.
  FA_DEVICE static void await_pingpong(int consumer) {
    ptx::barrier_sync(first_of(NamedBarrier::pingpong) + consumer, 2 * kWarpgroup);
  }
  FA_DEVICE static void signal_pingpong(int consumer) {
    ptx::barrier_arrive(first_of(NamedBarrier::pingpong) + (consumer + 1 == kConsumers ? 0 : consumer + 1),
                        2 * kWarpgroup);
  }
};

template <class Config>
FA_DEVICE void fp8_forward(const kernel::Sm90Fp8Params& params) {
  Fp8Forward<Config>(params).run();
}

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_FP8_FORWARD_CUH_
