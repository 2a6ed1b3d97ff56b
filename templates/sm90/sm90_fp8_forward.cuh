#ifndef FA_TEMPLATES_SM90_SM90_FP8_FORWARD_CUH_
#define FA_TEMPLATES_SM90_SM90_FP8_FORWARD_CUH_

#include <common/constants.cuh>
#include <common/half_bytes.cuh>
#include <ptx/fp8.cuh>
#include <ptx/griddepcontrol.cuh>
#include <ptx/language.cuh>
#include <ptx/mbarrier.cuh>
#include <ptx/memory.cuh>
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
      Traits::kSingleLevel, Traits::kKeyScales, Traits::kValueScales, Traits::kPrecise, Traits::kInt8, Traits::kBiased,
      Traits::kHalfBytes, Traits::kSharedScales, Traits::kScalesOfAll, Traits::kLateSums, Traits::kOwnRanges,
      Traits::kProducerRegisters, Traits::kConsumerRegisters, Base::params, Base::q_shared, Base::k_shared,
      Base::v_shared, Base::k_full, Base::k_empty, Base::v_full, Base::v_empty, Base::q_full, Base::q_empty,
      Base::init_barriers, Base::release, Base::read_work, Base::lengths_of, Base::first_row_of, Base::has_row,
      Base::own_range_end, Base::tiles_of;

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

  /// What a consumer carries from KV tile to KV tile. It is not made as an aggregate, which would clear S. What is
  /// rarely wanted, as the lane and the query tile's place, is found anew: registers are few.
  struct Stream {
    int consumer;
    int count;                 // of query tiles before this one
    RingSlot<kStages> v_slot;  // of the KV tile whose scores are in the making; its K has the same place
    int left;                  // KV tiles behind that one
    int edge;                  // from so many on scores are changed before the softmax
    S s;
    O o;  // [64, d_v]
    Softmax softmax;
    float scale[2];  // of raw scores, by row, in log2 units: above 0
    typename Traits::RawScale raw;
    typename Traits::KeyScales keys;  // of the KV tile whose scores are in the making
    typename Traits::ValueScales values;
    float values_by;  // with these: what O takes of a KV tile's product is times this; kScalesOfAll: O is times this
  };

  FA_DEVICE void consume(int consumer) const {
    Stream at;
    at.consumer = consumer;
    if (kPingpong && consumer == kConsumers - 1) ptx::barrier_arrive(first_of(NamedBarrier::pingpong), 2 * kWarpgroup);
    FA_UNROLL_BY(1)
    for (at.count = 0;; ++at.count) {
      ptx::mbarrier_wait(q_full(at.count % kQBuffers), at.count / kQBuffers % 2);
      if (!start_query(at)) return;
      attend(at);
      Fp8Epilogue<Config>(*this).run(at.o, at.softmax, at.scale, work_of(at), warp_row(at), ptx::lane_index());
    }
  }

  FA_DEVICE Query work_of(const Stream& at) const { return read_work(at.count % kWorks); }

  /// The warp's first row in the query tile.
  static FA_DEVICE int warp_row(const Stream& at) {
    return ptx::shfl(at.consumer * 64 + ptx::thread_index() % kWarpgroup / kWarpSize * 16, 0);
  }

  /// False at the end.
  FA_DEVICE bool start_query(Stream& at) const {
    const Query query = work_of(at);
    ptx::sync_warp();  // all lanes have waited before one of them releases the buffer
    if (query.range.end < 0) return false;
    at.left = query.range.end - query.range.begin - 1;
    at.softmax = Softmax();
    if constexpr (kScalesOfAll) at.values_by = 0.f;
    FA_UNROLL
    for (int slice = 0; slice < kSlices; ++slice) {
      FA_UNROLL
      for (float& o : at.o[slice]) o = 0.f;
    }
    const int row = first_row_of(query) + warp_row(at);
    const int limit = kernel::key_limit<Config::kCausal>(lengths_of(query), Rows{params.group, 0}.position(row));
    at.edge = limit / kTileN - query.range.begin;
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      const float scale = raw_scale(at, query, r);
      if constexpr (Variant::kScore) {
        at.scale[r] = Variant::kFactor * kernel::kLog2e;
        at.raw.scale[r] = scale;
        if constexpr (kInt8) at.raw.bias[r] = bias_of(at, query, r);
      } else {
        const float whole = scale * params.scale_log2;
        at.scale[r] = whole == 0.f ? 1.f : ptx::abs(whole);
        if (ptx::vote_any(!(whole > 0.f))) at.edge = 0;
      }
    }
    return true;
  }

  /// What makes raw scores of the sums of products of a row.
  FA_DEVICE float raw_scale(const Stream& at, const Query& query, int r) const {
    const Rows rows{params.group, query.tile.head};
    const int first = first_row_of(query);
    const int row = first + warp_row(at) + ptx::lane_index() / 4 + 8 * r;
    const int existing = has_row(query, row) ? row : first;
    return this->k_scale(query) * this->q_scale(query, rows.query_head(existing), rows.position(existing));
  }
  FA_DEVICE float bias_of(const Stream& at, const Query& query, int r) const {
    const Rows rows{params.group, query.tile.head};
    const int first = first_row_of(query);
    const int row = first + warp_row(at) + ptx::lane_index() / 4 + 8 * r;
    const int existing = has_row(query, row) ? row : first;
    return this->row_bias(query, rows.query_head(existing), rows.position(existing));
  }

  /// All KV tiles of a query tile.
  FA_DEVICE void attend(Stream& at) const {
    if constexpr (kOwnRanges) skip_hidden(at);
    if (at.left < 0) {
      release(q_empty(at.count % kQBuffers), ptx::lane_index());
      return;
    }
    if constexpr (kPingpong) await_pingpong(at.consumer);
    issue_scores(at, at.v_slot, at.left);
    if constexpr (kPingpong) signal_pingpong(at.consumer);
    ptx::wgmma_wait<0>();
    if constexpr (kPrecise && kAhead) {
      attend_overlapped(at);
    } else {
      FA_UNROLL_BY(1)
      while (true) {
        const bool last = at.left == 0;
        const bool rises = take_scores(at, at.v_slot.index);
        P pairs;
        pack(pairs, at.s);
        step(at, pairs, rises, last);
        if (last) break;
        --at.left;
      }
    }
    if constexpr (kScalesOfAll) {
      FA_UNROLL
      for (int slice = 0; slice < kSlices; ++slice) multiply(at.o[slice], {at.values_by, at.values_by});
    }
  }

  /// P of the KV tile whose scores are complete, in their place. True when a row has a greater maximum than before.
  FA_DEVICE bool take_scores(Stream& at, int stage) const {
    ptx::wgmma_tie(at.s);
    release(k_empty(stage), ptx::lane_index());
    if (at.left == 0) release(q_empty(at.count % kQBuffers), ptx::lane_index());  // no product reads Q any more
    if constexpr (kInt8) {
      convert_scores(at);
    } else if constexpr (kKeyScales) {
      multiply_keys(at.s, at.keys.of);
    }
    if (Variant::kScore || kWindowed || at.left >= at.edge) change_scores(at);
    bool rises = at.softmax.update(at.s, at.scale);
    if constexpr (kScalesOfAll) {
      rises = multiply_values_by_all(at) || rises;
    } else if constexpr (kValueScales) {
      multiply_values(at);
    }
    return rises;
  }

  /// All KV tiles, with kPrecise: P of one is made beside P V of the one before. The first scores are complete.
  FA_DEVICE void attend_overlapped(Stream& at) const {
    P pairs;
    take_scores(at, at.v_slot.index);
    pack(pairs, at.s);
    FA_UNROLL_BY(1)
    while (at.left > 0) {
      RingSlot<kStages> next = at.v_slot;
      next.advance();
      if constexpr (kPingpong) {
        settle(pairs);
        await_pingpong(at.consumer);
      }
      issue_scores(at, next, at.left - 1);
      await_values(at);
      issue_output(at.o[0], pairs, at.v_slot.index, 0, true);
      if constexpr (kPingpong) signal_pingpong(at.consumer);
      --at.left;
      ptx::wgmma_wait<1>();
      const bool rises = take_scores(at, next.index);
      ptx::wgmma_wait<0>();
      ptx::wgmma_tie(at.o[0]);
      release(v_empty(at.v_slot.index), ptx::lane_index());
      at.v_slot = next;
      if (rises) multiply(at.o[0], at.softmax.factor);
      pack(pairs, at.s);
    }
    await_values(at);
    issue_output(at.o[0], pairs, at.v_slot.index, 0, true);
    ptx::wgmma_wait<0>();
    ptx::wgmma_tie(at.o[0]);
    release(v_empty(at.v_slot.index), ptx::lane_index());
    at.v_slot.advance();
  }

  FA_DEVICE void await_values(const Stream& at) const { ptx::mbarrier_wait(v_full(at.v_slot.index), at.v_slot.parity); }

  FA_DEVICE void settle(const P& pairs) const {
    if constexpr (kValueScales || kPrecise || kHalfBytes) {  // of a NaN, too
      ptx::settle_signed(pairs, this->work_shared(0));
    } else {
      ptx::settle(pairs, this->work_shared(0));
    }
  }

  /// O += P V of a KV tile, and the start of S of the next one.
  FA_DEVICE void step(Stream& at, const P& pairs, [[maybe_unused]] bool rises, bool last) const {
    if constexpr (kSingleLevel) {
      if (rises) multiply(at.o[0], at.softmax.factor);
    }
    if constexpr (kPingpong) {
      settle(pairs);
      await_pingpong(at.consumer);
    }
    RingSlot<kStages> next = at.v_slot;
    next.advance();
    await_values(at);
    if constexpr (kPrecise) {  // P has 32 registers of 128 keys, which the next scores take
      issue_output(at.o[0], pairs, at.v_slot.index, 0, true);
      ptx::wgmma_wait<0>();
      ptx::wgmma_tie(at.o[0]);
      release(v_empty(at.v_slot.index), ptx::lane_index());
      if (!last) issue_scores(at, next, at.left - 1);
      if constexpr (kPingpong) signal_pingpong(at.consumer);
      ptx::wgmma_wait<0>();
    } else if constexpr (kSingleLevel) {
      issue_output(at.o[0], pairs, at.v_slot.index, 0, true);
      if (!last) issue_scores(at, next, at.left - 1);
      if constexpr (kPingpong) signal_pingpong(at.consumer);
      ptx::wgmma_wait<0>();
      ptx::wgmma_tie(at.o[0]);
    } else {
      Slice apart;
      Slice& added = kShares ? slice_of(at.s) : apart;
      FA_UNROLL
      for (int slice = 0; slice < kSlices; ++slice) {
        issue_output(added, pairs, at.v_slot.index, slice, false);
        if (kAhead && slice == kSlices - 1) break;
        if constexpr (kLateSums) {
          at.softmax.add_sums(at.s);
          ptx::settle(at.softmax.sum[0] + at.softmax.sum[1], this->work_shared(0));
        }
        ptx::wgmma_wait<0>();
        ptx::wgmma_tie(added);
        add(at.o[slice], added, at);
      }
      if constexpr (!kAhead) {
        release(v_empty(at.v_slot.index), ptx::lane_index());
        if (!last) issue_scores(at, next, at.left - 1);
        if constexpr (kPingpong) signal_pingpong(at.consumer);
        ptx::wgmma_wait<0>();
      } else if (last) {
        if constexpr (kPingpong) signal_pingpong(at.consumer);
        ptx::wgmma_wait<0>();
        ptx::wgmma_tie(added);
        add(at.o[kSlices - 1], added, at);
      } else {
        issue_scores(at, next, at.left - 1);
        if constexpr (kPingpong) signal_pingpong(at.consumer);
        ptx::wgmma_wait<1>();
        ptx::wgmma_tie(added);
        add(at.o[kSlices - 1], added, at);
        ptx::wgmma_wait<0>();
      }
    }
    if constexpr (!kPrecise && (kAhead || kSingleLevel)) release(v_empty(at.v_slot.index), ptx::lane_index());
    at.v_slot = next;
  }

  /// Starts S = Q K^T, [64, tile_n], of the KV tile in `slot`, behind which are `left` others.
  FA_DEVICE void issue_scores(Stream& at, const RingSlot<kStages>& slot, [[maybe_unused]] int left) const {
    ptx::mbarrier_wait(k_full(slot.index), slot.parity);
    ptx::wgmma_tie(at.s);
    ptx::wgmma_fence();
    const uint32_t q = q_shared(at.count % kQBuffers);
    FA_UNROLL
    for (int step = 0; step < kSSteps; ++step) {
      SGemm::shared(at.s, QTile::k_major(q, 64 * at.consumer, step), KTile::k_major(k_shared(slot.index), 0, step),
                    step != 0);
    }
    ptx::wgmma_commit();
    if constexpr (kKeyScales || kValueScales) load_scales_of_keys(at, left);
  }

  FA_DEVICE void load_scales_of_keys(Stream& at, int left) const {
    Query query = work_of(at);
    if constexpr (Traits::kPaged) {
      query.pages = this->pages_of(query);
    } else if constexpr (Traits::kVarlen) {
      query.sequence.first_key = this->read_first_key(at.count % kWorks);
    }
    const kernel::Fp8ScaleParams& from = this->p.scales;
    const int n = query.range.begin + left;
    if constexpr (kKeyScales) {
      this->load_scales(at.keys.of, from.k, from.stride_k_b, from.stride_k_h, from.stride_k_s, query, n,
                        ptx::lane_index());
    }
    if constexpr (kValueScales) {
      this->load_scales(at.values.of, from.v, from.stride_v_b, from.stride_v_h, from.stride_v_s, query, n,
                        ptx::lane_index());
    }
  }

  /// S of a KV tile, [64, tile_n], times the scales of its keys.
  template <int kCount>
  FA_DEVICE void multiply_keys(S& s, const float (&of)[kCount]) const {
    each_scale(of, [&](int i, float scale) {
      s[i] *= scale;
      s[i + 2] *= scale;
    });
  }

  /// Calls `use(i, scale)` with the scale of the key of registers i and i + 2 of S. A thread has keys 2t and 2t + 1 of
  /// each n8 tile, a lane has loaded every 32nd.
  template <int kCount, class Use>
  FA_DEVICE void each_scale(const float (&of)[kCount], const Use& use) const {
    const int pair = 2 * (ptx::lane_index() % 4);
    if constexpr (kSharedScales) {
      const uint32_t own = spread_scales(of);
      FA_UNROLL
      for (int block = 0; block < kTileN / 16; ++block) {
        const kernel::Chunk scales = ptx::ld_shared_chunk(own + 64 * block + 8 * pair);
        FA_UNROLL
        for (int i = 0; i < 4; ++i) use(8 * block + 4 * (i / 2) + i % 2, ptx::from_bits(scales.word[i]));
      }
    } else {
      FA_UNROLL
      for (int n = 0; n < kTileN / 8; ++n) {
        FA_UNROLL
        for (int e = 0; e < 2; ++e) {
          use(4 * n + e, ptx::from_bits(ptx::shfl(ptx::bits(of[n / 4]), n % 4 * 8 + pair + e)));
        }
      }
    }
  }

  /// Puts scales into the warp's shared memory, of 16 keys those of a thread side by side: place 4t + 2h + e is of
  /// key 8h + 2t + e.
  template <int kCount>
  FA_DEVICE uint32_t spread_scales(const float (&of)[kCount]) const {
    const int lane = ptx::lane_index();
    const int warp = ptx::shfl(ptx::thread_index() / kWarpSize, 0) - kWarpgroup / kWarpSize;
    const uint32_t own = this->shared + Traits::kLayout.scales + 4 * kTileN * warp;
    const uint32_t place = own + 4 * (lane / 16 * 16 + lane % 8 / 2 * 4 + lane / 8 % 2 * 2 + lane % 2);
    ptx::sync_warp();  // all lanes have read what was there
    FA_UNROLL
    for (int i = 0; i < kCount; ++i) {
      if (32 * i + 32 <= kTileN || 32 * i + lane < kTileN) ptx::st_shared_b32(place + 128 * i, ptx::bits(of[i]));
    }
    ptx::sync_warp();  // the scales are there
    return own;
  }

  /// Sums of products of i8, whole numbers, as floats, times the scales of their keys; above kernel::kInt8Bias where
  /// kBiased. Its product with a scale of 22 bits is exact.
  FA_DEVICE void convert_scores(Stream& at) const {
    FA_UNROLL
    for (float& s : at.s) s = kernel::biased_float(s);
    if constexpr (kKeyScales) {
      FA_UNROLL
      for (float& scale : at.keys.of) scale = kernel::scale_of_22_bits(scale);
      each_scale(at.keys.of, [&](int i, float scale) {
        const float of_bias = ptx::multiply(scale, -kernel::kInt8Bias);
        at.s[i] = ptx::fma(at.s[i], scale, of_bias);
        at.s[i + 2] = ptx::fma(at.s[i + 2], scale, of_bias);
      });
    } else if constexpr (!kBiased) {
      FA_UNROLL
      for (float& s : at.s) s -= kernel::kInt8Bias;
    }
  }

  template <int kCount>
  FA_DEVICE static float greatest_scale(const float (&of)[kCount], float most) {
    FA_UNROLL
    for (const float scale : of) most = ptx::max(most, ptx::abs(scale));
    FA_UNROLL
    for (int mask = kWarpSize / 2; mask > 0; mask /= 2) most = ptx::max(most, ptx::shfl_xor(most, mask));
    return most;
  }

  /// P times the scales of its rows of V, relative to the greatest of the KV tile: no product is beyond what P reaches.
  FA_DEVICE void multiply_values(Stream& at) const {
    const float most = greatest_scale(at.values.of, 0.f);
    const float inverse = 1.f / most;
    at.values_by = inverse - inverse == 0.f ? most : 0.f;  // 0 where there is none
    FA_UNROLL
    for (float& scale : at.values.of) scale = at.values_by == 0.f ? 0.f : scale * inverse;
    multiply_keys(at.s, at.values.of);
  }

  /// With kScalesOfAll the greatest is that of all KV tiles so far, and O relative to it. True where O has to follow
  /// it.
  FA_DEVICE bool multiply_values_by_all(Stream& at) const {
    const float most = greatest_scale(at.values.of, at.values_by);
    const bool rises = most > at.values_by;
    const float inverse = 1.f / most;
    const bool any = inverse - inverse == 0.f;  // not where all scales are 0
    FA_UNROLL
    for (float& scale : at.values.of) scale = any ? scale * inverse : 0.f;
    if (rises) {
      FA_UNROLL
      for (float& factor : at.softmax.factor) factor *= any ? at.values_by * inverse : 0.f;
      at.values_by = most;
    }
    multiply_keys(at.s, at.values.of);
    return rises;
  }

  /// Starts P V, [64, kValueColumns], of a slice of V's columns.
  FA_DEVICE void issue_output(Slice& o, const P& pairs, int stage, int slice, bool accumulate) const {
    ptx::wgmma_tie(o);
    ptx::wgmma_fence();
    FA_UNROLL
    for (int step = 0; step < kPSteps; ++step) {
      if constexpr (kPrecise) {
        OGemm::template registers<true>(o, pairs[step], VTile::mn_major(v_shared(stage), step), true);
      } else {
        OGemm::registers(o, pairs[step], VTile::k_major(v_shared(stage), slice * kValueColumns, step),
                         accumulate || step != 0);
      }
    }
    ptx::wgmma_commit();
  }

  /// What a KV tile adds to O takes the registers of its scores, whose P is made. ptxas waits for products that take a
  /// part of them.
  static constexpr bool kShares = !kAhead && kValueColumns == kTileN;
  FA_DEVICE static Slice& slice_of(S& s) { return reinterpret_cast<Slice&>(s); }

  /// O of two rows, relative to the maxima that P has.
  FA_DEVICE static void add(Slice& o, const Slice& added, const Stream& at) {
    const float(&factor)[2] = at.softmax.factor;
    FA_UNROLL
    for (int i = 0; i < kValueColumns / 2; ++i) {
      if constexpr (kValueScales && !kScalesOfAll) {
        o[i] = ptx::fma(added[i], at.values_by, o[i] * factor[i / 2 % 2]);
      } else {
        o[i] = ptx::fma(o[i], factor[i / 2 % 2], added[i]);
      }
    }
  }
  template <int kCount>
  FA_DEVICE static void multiply(float (&x)[kCount], const float (&factor)[2]) {
    FA_UNROLL
    for (int i = 0; i < kCount; ++i) x[i] *= factor[i / 2 % 2];
  }

  FA_DEVICE static void multiply_biased(S& s, const float (&sign)[2]) {
    FA_UNROLL
    for (int i = 0; i < kTileN / 2; ++i) {
      s[i] = ptx::fma(s[i] - kernel::kInt8Bias, sign[i / 2 % 2], kernel::kInt8Bias);
    }
  }

  /// P as the operand of the next product: with kPrecise in the order of scores. Of 16 keys place 4t + 2h + e is key 8h
  /// + 2t + e, which is what a thread has of two n8 tiles: V's keys are in that order.
  FA_DEVICE static void pack(P& pairs, const S& s) {
    FA_UNROLL
    for (int step = 0; step < kPSteps; ++step) {
      FA_UNROLL
      for (int word = 0; word < 4; ++word) {
        if constexpr (kPrecise) {
          pairs[step][word] = ptx::convert_pair<kernel::f16>(s[8 * step + 2 * word], s[8 * step + 2 * word + 1]);
        } else {
          const int i = 16 * step + 8 * (word / 2) + 2 * (word % 2);
          pairs[step][word] = kHalfBytes ? kernel::bytes_by_halves(s[i], s[i + 1], s[i + 4], s[i + 5])
                                         : ptx::convert_e4m3(s[i], s[i + 1], s[i + 4], s[i + 5]);
        }
      }
    }
  }

  /// What score functions, signs of scales and masks make of scores.
  FA_DEVICE void change_scores(Stream& at) const {
    const Query query = work_of(at);
    const int n = query.range.begin + at.left;
    const Cursor cursor{query, n, 0};
    const int row = warp_row(at);
    const int lane = ptx::lane_index();
    if constexpr (Variant::kScore) {
      if constexpr (kInt8) {
        FA_UNROLL
        for (int i = 0; i < kTileN / 2; ++i)
          at.s[i] = ptx::fma(at.s[i], at.raw.scale[i / 2 % 2], at.raw.bias[i / 2 % 2]);
      } else {
        multiply(at.s, at.raw.scale);
      }
      this->apply_score(at.s, cursor, row, lane);
    } else {
      const float sign[2] = {sign_of(raw_scale(at, query, 0)), sign_of(raw_scale(at, query, 1))};
      if constexpr (kBiased) {
        if (sign[0] != 1.f || sign[1] != 1.f) multiply_biased(at.s, sign);
      } else {
        if (sign[0] != 1.f || sign[1] != 1.f) multiply(at.s, sign);  // exactly, whatever their magnitude
      }
    }
    if constexpr (kWindowed) {
      if (n >= query.range.plain_begin && n < query.range.plain_end) return;
      this->hide_outside(at.s, cursor, row, lane);
    } else {
      this->hide_behind(at.s, cursor, this->first_limit(cursor, row), row);
    }
  }

  FA_DEVICE float sign_of(float scale) const {
    const float whole = scale * params.scale_log2;
    return whole < 0.f ? -1.f : whole == 0.f ? 0.f : 1.f;
  }

  /// Releases KV tiles that are hidden from this warpgroup, each in its turn of the ping-pong. A buffer is released
  /// after it is filled: else this would count for what was there before.
  FA_DEVICE void skip_hidden(Stream& at) const {
    if (at.left < 0) return;
    const Query query = work_of(at);
    const int end = own_range_end(query, warp_row(at)) - query.range.begin;
    FA_UNROLL_BY(1)
    for (; at.left >= end; --at.left) {
      if constexpr (kPingpong) {
        await_pingpong(at.consumer);
        signal_pingpong(at.consumer);
      }
      skip(k_full(at.v_slot.index), k_empty(at.v_slot.index), at.v_slot.parity);
      skip(v_full(at.v_slot.index), v_empty(at.v_slot.index), at.v_slot.parity);
      at.v_slot.advance();
    }
  }
  FA_DEVICE void skip(uint32_t full, uint32_t empty, uint32_t parity) const {
    ptx::mbarrier_wait(full, parity);
    ptx::sync_warp();  // all lanes have waited
    release(empty, ptx::lane_index());
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
FA_DEVICE void fp8_forward(const Fp8ParamsOf<Config>& params) {
  Fp8Forward<Config>(params).run();
}

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_FP8_FORWARD_CUH_
