#ifndef FA_TEMPLATES_COMMON_VARIANT_BACKWARD_CUH_
#define FA_TEMPLATES_COMMON_VARIANT_BACKWARD_CUH_

#include <common/constants.cuh>
#include <common/dropout.cuh>
#include <common/dropout_place.cuh>
#include <common/online_softmax.cuh>
#include <common/sequences.cuh>
#include <common/statistics_gradients.cuh>
#include <common/switches.cuh>
#include <common/variant.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>

namespace fa::kernel {

/// Adds to an element of a captured tensor's gradient. Neighbouring additions to one element are summed first.
struct GradientSum {
  float* target = nullptr;
  float sum = 0.f;

  FA_DEVICE void add(float* element, float value) {
    if (element != target) {
      flush();
      target = element;
      sum = 0.f;
    }
    sum += value;
  }
  FA_DEVICE void flush() const {
    if (target != nullptr) ptx::red_add_f32(target, sum);
  }
  /// One addition for a warp whose lanes all have the same element.
  FA_DEVICE void flush_warp() {
    const uint64_t address = reinterpret_cast<uint64_t>(target);
    const uint32_t low = static_cast<uint32_t>(address);
    const uint32_t high = static_cast<uint32_t>(address >> 32);
    const uint32_t first_low = ptx::shfl(low, 0);
    const uint32_t first_high = ptx::shfl(high, 0);
    if (ptx::vote_any(first_low != low || first_high != high)) {
      flush();
      return;
    }
    FA_UNROLL
    for (int mask = 1; mask < kWarpSize; mask *= 2) sum += ptx::shfl_xor(sum, mask);
    if (ptx::thread_index() % kWarpSize == 0) flush();
  }
};

/// P^T and dS^T of a warp's fragment of scores, [keys, queries], under a score or mask function or a mask in closed
/// form, and the gradients of captured tensors. Both products, S and dP, are there when it starts. With dropout, P^T
/// comes out as Z^T o P^T and dS^T keep times too small, as without a variant (sm80_backward.cuh).
///
/// A warp of the block's kWarpsN from kFirstWarp on has kWarpKeys keys of the tile.
template <class Config, class Params, int kMTiles, int kNTiles, int kWarpsN, int kWarpKeys, int kTileM, int kTileN,
          int kFirstWarp = 0>
struct VariantScores {
  using Variant = VariantOf<Config>;
  using Scores = Fragment<kMTiles, kNTiles>;
  using CaptureGradients = Scores[Variant::kGradients == 0 ? 1 : Variant::kGradients];

  static constexpr bool kDropout = kernel::kDropout<Config>;
  static constexpr bool kStatistics = kStatisticsGradients<Config>;
  static constexpr int kDrawnTiles = Dropout::drawn_tiles(kNTiles);

  // What score is given of a fragment, of two neighbouring queries each: [m][n][r].
  static constexpr int kAheadMTiles = kLoadsAhead<Variant> ? kMTiles : 1;
  static constexpr int kAheadNTiles = kLoadsAhead<Variant> ? kNTiles : 1;
  using Loaded = uint32_t[kAheadMTiles][kAheadNTiles][2];

  const Params& params;
  const BatchEntry<kVarlen<Config>, BackwardParams>& lengths;
  const int batch;
  const int head;        // a query head
  const int first_row;   // of the fragment
  const int first_key;   // of the tile
  const uint32_t lse;    // in shared memory, of this thread's first query
  const uint32_t delta;  // likewise
  const bool adds;       // to gradients of captured tensors: no other warp has the same scores
  const int thread = ptx::thread_index();
  const int query = first_row + 2 * (thread % 4);  // of element 0
  const int key = first_key + (thread / kWarpSize - kFirstWarp) % kWarpsN * kWarpKeys + thread % kWarpSize / 4;

  /// Whether masks in closed form keep all of the fragment, which covers 8 * kNTiles queries and a tile of keys.
  FA_DEVICE bool plain() const {
    const int last_row = first_row + 8 * kNTiles - 1;
    const int last_key = first_key + kTileN - 1;
    return last_key < keys_end<Config::kCausal, Variant>(params, lengths, first_row) &&
           first_key >= keys_begin<Variant>(params, lengths, last_row) && last_row < lengths.s_q;
  }

  /// S becomes P, and dP becomes dS; without a mask, if `full`. Registers is a Fragment, or all of one in a row.
  template <class Registers>
  FA_DEVICE void differentiate(Registers& p, Registers& ds, bool full) const {
    const Loaded none = {};
    CaptureGradients by_capture;
    differentiate<false>(p, ds, by_capture, full, none);
    add(by_capture);
  }
  /// The same with what was loaded, if kAhead, and with gradients of captured tensors that `add` is to add.
  template <bool kAhead, class Registers>
  FA_DEVICE void differentiate(Registers& p, Registers& ds, CaptureGradients& by_capture, bool full,
                               const Loaded& loaded) const {
    if (full) {
      differentiate_tile<false, kAhead>(p, ds, by_capture, loaded);
    } else {
      differentiate_tile<true, kAhead>(p, ds, by_capture, loaded);
    }
  }
  /// P is 0 where the mask function hides it.
  template <class Registers>
  FA_DEVICE void hide(Registers& p) const {
    for_each([&](int m, int n, int e) {
      if (!Variant::keep(params.variant, place(m, n, e))) element(p, m, n, e) = 0.f;
    });
  }
  FA_DEVICE void add([[maybe_unused]] const CaptureGradients& by_capture) const {
    if constexpr (Variant::kGradients > 0) add_gradients<0>(by_capture);
  }

  /// Loads what score is given.
  FA_DEVICE void load(Loaded& loaded) const {
    const auto steps = Variant::load(params.variant, place(0, 0, 0), Constant<0>{});
    if (steps.kv == 1 && whole()) {
      auto low = steps.base;
      auto high = steps.base + steps.q;
      FA_UNROLL
      for (int n = 0; n < kNTiles; ++n) {
        FA_UNROLL
        for (int i = 0; i < 2 * kMTiles; ++i) {
          loaded[i / 2][n][i % 2] = pair_of(ptx::ld_global_nc(low + 8 * i), ptx::ld_global_nc(high + 8 * i));
        }
        low += 8 * steps.q;
        high += 8 * steps.q;
      }
      return;
    }
    int queries_left = steps_inside(query, lengths.s_q);
    const int keys_left = steps_inside(key, lengths.s_kv);
    auto row = steps.base;
    FA_UNROLL
    for (int n = 0; n < kNTiles; ++n) {
      const auto low = row;
      const auto high = queries_left > 0 ? row + steps.q : row;
      FA_UNROLL
      for (int i = 0; i < 2 * kMTiles; ++i) {
        const int64_t key_step = minimum(8 * i, keys_left) * steps.kv;
        loaded[i / 2][n][i % 2] = pair_of(ptx::ld_global_nc(low + key_step), ptx::ld_global_nc(high + key_step));
      }
      row += minimum(8, queries_left) * steps.q;
      queries_left = maximum(queries_left - 8, 0);
    }
  }

 private:
  /// Whether all of the fragment lies inside of the tensors.
  FA_DEVICE bool whole() const { return first_row + 8 * kNTiles <= lengths.s_q && first_key + kTileN <= lengths.s_kv; }

  FA_DEVICE Place place(int m, int n, int e) const {
    return {
        batch, head, query, key, 8 * n + e % 2, 16 * m + 8 * (e / 2), lengths.s_q, lengths.s_kv, params.variant.scale};
  }

  static FA_DEVICE float& element(Scores& scores, int m, int n, int e) { return scores[m][n][e]; }
  static FA_DEVICE float& element(float (&scores)[kMTiles * kNTiles * 4], int m, int n, int e) {
    return scores[(m * kNTiles + n) * 4 + e];
  }

  /// The score and its derivatives.
  template <bool kMasked, bool kAhead, int kCount>
  FA_DEVICE float slopes(const Loaded& loaded, int m, int n, int e, float raw, float& slope,
                         float (&slopes)[kCount]) const {
    const Place at = place(m, n, e);
    if constexpr (kAhead) {
      const float values[] = {half_of<typename Variant::Loaded>(loaded[m][n][e / 2], e % 2)};
      return Variant::slopes(params.variant, at, raw, slope, slopes, values);
    } else if constexpr (kLoads<Variant> > 0) {
      float values[kLoads<Variant>];
      load_values<Variant, kMasked>(values, params.variant, place(0, 0, 0), at.q_step, at.kv_step);
      return Variant::slopes(params.variant, at, raw, slope, slopes, values);
    } else {
      return Variant::slopes(params.variant, at, raw, slope, slopes);
    }
  }

  template <bool kMasked, bool kAhead, class Registers>
  FA_DEVICE void differentiate_tile(Registers& scores, Registers& gradients, CaptureGradients& by_capture,
                                    const Loaded& loaded) const {
    constexpr int kGradients = Variant::kGradients;
    [[maybe_unused]] uint32_t drops[kMTiles];  // of kDrawnTiles neighbouring n
    [[maybe_unused]] float by_key[kMTiles][2];
    if constexpr (kColumnSumsGradient<Config>) {
      FA_UNROLL
      for (int i = 0; i < 2 * kMTiles; ++i) {
        by_key[i / 2][i % 2] = column_gradient<Config>(params, lengths, batch, head, key + 8 * i);
      }
    }
    FA_UNROLL
    for (int n = 0; n < kNTiles; ++n) {
      float row_lse[2];
      float row_delta[2];
      ptx::ld_shared_f32x2(row_lse, lse + 32 * n);
      ptx::ld_shared_f32x2(row_delta, delta + 32 * n);
      [[maybe_unused]] RowGradients<Config> rows[2];
      if constexpr (kStatistics) {
        FA_UNROLL
        for (int e = 0; e < 2; ++e) rows[e].load(params, lengths, batch, head, query + 8 * n + e, row_lse[e]);
      }
      if constexpr (kDropout) {
        if (n % kDrawnTiles == 0) draw(drops, first_row + 8 * n);
      }
      FA_UNROLL
      for (int m = 0; m < kMTiles; ++m) {
        FA_UNROLL
        for (int e = 0; e < 4; ++e) {
          const Place at = place(m, n, e);
          float& p = element(scores, m, n, e);
          float& ds = element(gradients, m, n, e);
          bool keep = true;
          if constexpr (kMasked) keep = in_bounds(at);
          if constexpr (kMasked && Variant::kMask) keep = keep && Variant::keep(params.variant, at);
          float slope = 1.f;
          float slopes[kGradients == 0 ? 1 : kGradients];
          float log2_p;
          if constexpr (Variant::kScore) {
            const float score = this->slopes<kMasked, kAhead>(loaded, m, n, e, p, slope, slopes);
            log2_p = ptx::fma(score, Variant::kFactor * kLog2e, -row_lse[e % 2]);
          } else {
            log2_p = ptx::fma(p, params.scale_log2, -row_lse[e % 2]);
          }
          float weight = ptx::ex2(log2_p);
          [[maybe_unused]] const float whole = weight;
          float gradient;
          if constexpr (kDropout) {
            const bool dropped = Dropout::dropped(drops[m], n % kDrawnTiles, e);
            gradient = weight * ptx::fma(row_delta[e % 2], -params.dropout.keep, dropped ? 0.f : ds);
            if (dropped) weight = 0.f;
          } else {
            gradient = weight * (ds - row_delta[e % 2]);
          }
          if constexpr (kEntropyGradient<Config>) {
            gradient += whole * undropped(rows[e % 2].of_probability(log2_p));
          }
          if constexpr (kColumnSumsGradient<Config>) gradient += whole * undropped(by_key[m][e / 2]);
          if constexpr (kMaxLogitGradient<Config> == 1) {
            gradient += undropped(rows[e % 2].template of_logit<false>(at.kv + at.kv_step));
          }
          p = keep ? weight : 0.f;
          ds = keep ? gradient * slope : 0.f;
          if constexpr (kMaxLogitGradient<Config> == 2) {
            ds += undropped(rows[e % 2].template of_logit<true>(at.kv + at.kv_step));
          }
          if constexpr (kDropout && kGradients > 0) gradient *= params.dropout.inverse_keep;
          FA_UNROLL
          for (int i = 0; i < kGradients; ++i) by_capture[i][m][n][e] = keep ? gradient * slopes[i] : 0.f;
        }
      }
    }
  }

  /// Of a part of dS that dropout leaves alone: dS comes out keep times too small.
  FA_DEVICE float undropped(float gradient) const {
    if constexpr (kDropout) return gradient * params.dropout.keep;
    return gradient;
  }

  /// Of kDrawnTiles n8 tiles of queries from `first_query` on, and all keys of the warp.
  FA_DEVICE void draw(uint32_t (&drops)[kMTiles], int first_query) const {
    const int lane = thread % kWarpSize;
    const Dropout dropout(params.dropout, heads_before<Variant>(params, batch) + head);
    const int query_drawn = row_of_whole<Variant>(params, first_query);
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      const int key_drawn = key_of_whole<Variant>(params, key - lane / 4 + 16 * m);
      drops[m] = dropout.draw_transposed<kDrawnTiles>(key_drawn, query_drawn, lane);
    }
  }

  FA_DEVICE bool in_bounds(const Place& at) const {
    const int row = at.q + at.q_step;
    const int column = at.kv + at.kv_step;
    return row < lengths.s_q && column >= keys_begin<Variant>(params, lengths, row) &&
           column < keys_end<Config::kCausal, Variant>(params, lengths, row);
  }

  template <int kIndex, class Gradients>
  FA_DEVICE void add_gradients(const Gradients& gradients) const {
    if constexpr (kIndex < Variant::kGradients) {
      if (adds && params.variant.captures[Variant::kGradientCapture[kIndex]].gradient != nullptr) {
        add_gradient<kIndex>(gradients[kIndex]);
      }
      add_gradients<kIndex + 1>(gradients);
    }
  }

  /// The sum is taken first over what the captured tensor's index does not depend on.
  template <int kIndex>
  FA_DEVICE void add_gradient(const Scores& gradient) const {
    constexpr bool kOnQuery = Variant::kGradientOnQuery[kIndex];
    constexpr bool kOnKey = Variant::kGradientOnKey[kIndex];
    if constexpr (!kOnQuery && !kOnKey) {
      float sum = 0.f;
      for_each([&](int m, int n, int e) { sum += gradient[m][n][e]; });
      FA_UNROLL
      for (int mask = 1; mask < kWarpSize; mask *= 2) sum += ptx::shfl_xor(sum, mask);
      if (thread % kWarpSize == 0) ptx::red_add_f32(target<kIndex>(0, 0, 0), sum);
    } else if constexpr (!kOnQuery) {
      add_by_key<kIndex>(gradient);
    } else if constexpr (!kOnKey) {
      add_by_query<kIndex>(gradient);
    } else if constexpr (Variant::kGradientDistinct[kIndex]) {
      if constexpr (Variant::kGradientInSteps[kIndex]) {
        add_in_steps(Variant::gradient_steps(params.variant, place(0, 0, 0), Constant<kIndex>{}), gradient);
      } else {
        for_each([&](int m, int n, int e) {
          if (valid(m, n, e)) ptx::red_add_f32(target<kIndex>(m, n, e), gradient[m][n][e]);
        });
      }
    } else {
      GradientSum sum;
      for_each([&](int m, int n, int e) {
        if (valid(m, n, e)) sum.add(target<kIndex>(m, n, e), gradient[m][n][e]);
      });
      sum.flush_warp();
    }
  }

  FA_DEVICE void add_in_steps(const CapturedSteps<float>& steps, const Scores& gradient) const {
    if (steps.kv == 1 && whole()) {
      float* row[2] = {steps.base, steps.base + steps.q};
      FA_UNROLL
      for (int n = 0; n < kNTiles; ++n) {
        FA_UNROLL
        for (int e = 0; e < 2; ++e) {
          FA_UNROLL
          for (int i = 0; i < 2 * kMTiles; ++i) ptx::red_add_f32(row[e] + 8 * i, gradient[i / 2][n][i % 2 * 2 + e]);
          row[e] += 8 * steps.q;
        }
      }
      return;
    }
    float* row = steps.base;
    FA_UNROLL
    for (int n = 0; n < kNTiles; ++n) {
      FA_UNROLL
      for (int i = 0; i < 2 * kMTiles; ++i) {
        FA_UNROLL
        for (int e = 0; e < 2; ++e) {
          if (valid(i / 2, n, i % 2 * 2 + e)) {
            ptx::red_add_f32(row + e * steps.q + 8 * i * steps.kv, gradient[i / 2][n][i % 2 * 2 + e]);
          }
        }
      }
      row += 8 * steps.q;
    }
  }

  template <int kIndex>
  FA_DEVICE void add_by_key(const Scores& gradient) const {
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int r = 0; r < 2; ++r) {
        float sum = 0.f;
        FA_UNROLL
        for (int n = 0; n < kNTiles; ++n) sum += gradient[m][n][2 * r] + gradient[m][n][2 * r + 1];
        sum += ptx::shfl_xor(sum, 1);
        sum += ptx::shfl_xor(sum, 2);
        if (thread % 4 == 0 && key + 16 * m + 8 * r < lengths.s_kv) ptx::red_add_f32(target<kIndex>(m, 0, 2 * r), sum);
      }
    }
  }

  template <int kIndex>
  FA_DEVICE void add_by_query(const Scores& gradient) const {
    FA_UNROLL
    for (int n = 0; n < kNTiles; ++n) {
      FA_UNROLL
      for (int e = 0; e < 2; ++e) {
        float sum = 0.f;
        FA_UNROLL
        for (int m = 0; m < kMTiles; ++m) sum += gradient[m][n][e] + gradient[m][n][e + 2];
        sum += ptx::shfl_xor(sum, 4);
        sum += ptx::shfl_xor(sum, 8);
        sum += ptx::shfl_xor(sum, 16);
        if (thread % kWarpSize < 4 && query + 8 * n + e < lengths.s_q) {
          ptx::red_add_f32(target<kIndex>(0, n, e), sum);
        }
      }
    }
  }

  template <class Visit>
  static FA_DEVICE void for_each(const Visit& visit) {
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int r = 0; r < 2; ++r) {
        FA_UNROLL
        for (int n = 0; n < kNTiles; ++n) {
          visit(m, n, 2 * r);
          visit(m, n, 2 * r + 1);
        }
      }
    }
  }

  FA_DEVICE bool valid(int m, int n, int e) const {
    return query + 8 * n + e % 2 < lengths.s_q && key + 16 * m + 8 * (e / 2) < lengths.s_kv;
  }

  template <int kIndex>
  FA_DEVICE float* target(int m, int n, int e) const {
    return Variant::gradient_target(params.variant, place(m, n, e), Constant<kIndex>{});
  }
};

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_VARIANT_BACKWARD_CUH_
