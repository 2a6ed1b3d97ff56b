#ifndef FA_TEMPLATES_COMMON_VARIANT_CUH_
#define FA_TEMPLATES_COMMON_VARIANT_CUH_

#include <common/constants.cuh>
#include <common/paged.cuh>
#include <common/sequences.cuh>
#include <common/switches.cuh>
#include <common/variant_params.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>

namespace fa::kernel {

/// What a kernel without functions, bounded masks and sinks has in the place of Config::Variant, and so what a Variant
/// may set. Those with functions have them as static members, called where the constants say so.
struct NoVariant {
  static constexpr bool kLeftWindow = false;
  static constexpr bool kChunked = false;
  static constexpr bool kSink = false;
  static constexpr bool kScore = false;  // score, differentiate
  static constexpr bool kMask = false;   // keep
  static constexpr bool kMaskOnBatch = false;
  static constexpr bool kMaskOnHead = false;
  static constexpr int kGradients = 0;        // places of captured tensors whose gradient is wanted
  static constexpr float kFactor = 1.f;       // of what score returns
  static constexpr bool kAffine = false;      // affine
  static constexpr bool kScoreAlone = false;  // score is a function of nothing else
  static constexpr bool kAffineAbs = false;
  static constexpr int kAffineStep = 0;
};

template <class First, class Second, bool kFirst>
struct Either {
  using type = First;
};
template <class First, class Second>
struct Either<First, Second, false> {
  using type = Second;
};

/// Whether the call may be a part of a larger attention, the whole, whose positions functions, chunks and dropout see
/// (shard_place.cuh).
template <class Variant>
inline constexpr bool kPlaced = false;
template <class Variant>
requires(Variant::kPlaced) inline constexpr bool kPlaced<Variant> = true;

/// How many captured tensors score is given the values of (Variant::kLoads, load): those whose elements lie at steps
/// along the keys. Ahead: one of 16-bit elements, of which a kernel may keep a tile.
template <class Variant>
inline constexpr int kLoads = 0;
template <class Variant>
requires(Variant::kLoads > 0) inline constexpr int kLoads<Variant> = Variant::kLoads;

template <class Variant>
inline constexpr bool kLoadsAhead = false;
template <class Variant>
requires(Variant::kLoads > 0) inline constexpr bool kLoadsAhead<Variant> = Variant::kLoadsAhead;

/// How many captured values that are the same for all rows and keys of a head score may be given (fix).
template <class Variant>
inline constexpr int kFixed = 0;
template <class Variant>
requires(Variant::kFixed > 0) inline constexpr int kFixed<Variant> = Variant::kFixed;

/// Whether an affine score function is one of a magnitude.
template <class Variant>
inline constexpr bool kAffineAbs = false;
template <class Variant>
requires(Variant::kAffine) inline constexpr bool kAffineAbs<Variant> = Variant::kAffineAbs;

/// The batch entry and the head of place `index` among b * heads, which tiles are taken in the order of: head by head
/// of one entry after the other, unless the entries read the same elements of a captured tensor, and add to the same of
/// its gradient. Then a head's tiles of all entries come together, so that the elements stay in the L2 cache.
template <class Variant>
FA_DEVICE void place_of_head(int& batch, int& head, int index, int b, int heads) {
  if constexpr (kLoads < Variant >> 0) {
    head = index / b;
    batch = index - head * b;
  } else {
    batch = index / heads;
    head = index - batch * heads;
  }
}

template <class Config>
inline constexpr bool kHasVariant = requires {
  typename Config::Variant;
};

template <class Config, bool kGiven = kHasVariant<Config>>
struct FindVariant {
  using type = NoVariant;
};
template <class Config>
struct FindVariant<Config, true> {
  using type = typename Config::Variant;
};
template <class Config>
using VariantOf = typename FindVariant<Config>::type;

template <class Config>
using ForwardParamsOf = typename Either<ForwardVariantParams, ForwardParams, kHasVariant<Config>>::type;
template <class Config>
using BackwardParamsOf =
    typename Either<BackwardStatisticsParams,
                    typename Either<BackwardVariantParams, BackwardParams, kHasVariant<Config>>::type,
                    kStatisticsGradients<Config>>::type;

// ---- what rendered functions are made of ----

/// A number that overloads are chosen by.
template <int kValue>
struct Constant {};

/// Where a function is evaluated: logical indices, as a base and a step from it, which is a constant once loops are
/// unrolled. What follows from the base alone is computed once for many elements.
struct Place {
  int b, h;
  int q, kv;
  int q_step, kv_step;
  int s_q, s_kv;
  float scale;  // of raw scores
};

/// A score function that adds factor * x, or with Variant::kAffineAbs factor * |x|, to the raw score of a row, before
/// the scale; x is base + Variant::kAffineStep * (key - Place::kv).
struct AffineRow {
  float factor;
  float base;
};

FA_DEVICE int minimum(int a, int b) {
  return a < b ? a : b;
}
FA_DEVICE int maximum(int a, int b) {
  return a > b ? a : b;
}
FA_DEVICE int absolute(int a) {
  return a < 0 ? -a : a;
}
FA_DEVICE int quotient(int a, int b) {
  return b == 0 ? 0 : a / b;
}
FA_DEVICE int remainder(int a, int b) {
  return b == 0 ? 0 : a % b;
}
FA_DEVICE int floor_quotient(int a, int b) {
  if (b == 0) return 0;
  const int towards_zero = a / b;
  return a % b != 0 && (a < 0) != (b < 0) ? towards_zero - 1 : towards_zero;
}
FA_DEVICE int floor_remainder(int a, int b) {
  return b == 0 ? 0 : a - floor_quotient(a, b) * b;
}

/// An index that is read from memory with: what lies behind the end of a tile is hidden, and reads the last element.
FA_DEVICE int inside(int index, int length) {
  return minimum(index, length - 1);
}

FA_DEVICE float divide(float a, float b) {
  return a * ptx::rcp(b);
}

/// tanh to the precision of float, but for tiny x, where the error is absolute.
FA_DEVICE float tanh(float x) {
  const float power = ptx::ex2(2.f * kLog2e * ptx::abs(x));
  const float magnitude = 1.f - 2.f * ptx::rcp(power + 1.f);
  return x < 0.f ? -magnitude : x == x ? magnitude : x;
}

/// Its derivative, 1 - tanh(x)^2, within 2^-16 of itself.
FA_DEVICE float tanh_slope(float x) {
  const float half_of_rest = ptx::rcp(ptx::ex2(2.f * kLog2e * ptx::abs(x)) + 1.f);  // (1 - |tanh(x)|) / 2
  return 4.f * half_of_rest * (1.f - half_of_rest);
}

/// x less the nearest multiple of 2 pi, in two steps, so that the approximations below are at their best.
FA_DEVICE float reduced_angle(float x) {
  const float turns = ptx::floor(ptx::fma(x, 0.159154943091895336f, 0.5f));
  return ptx::fma(turns, 1.74845553146e-07f, ptx::fma(turns, -6.28318548202514648f, x));
}

FA_DEVICE int captured_value(int32_t x) {
  return x;
}
FA_DEVICE float captured_value(float x) {
  return x;
}
FA_DEVICE float captured_value(f16 x) {
  return ptx::convert_to_float(x);
}
FA_DEVICE float captured_value(bf16 x) {
  return ptx::convert_to_float(x);
}

template <class... Index>
FA_DEVICE int64_t element_offset(const int64_t (&strides)[kMaxCaptureRank], Index... index) {
  const int indices[] = {index..., 0};
  int64_t offset = 0;
  FA_UNROLL
  for (int i = 0; i < static_cast<int>(sizeof...(Index)); ++i) offset += indices[i] * strides[i];
  return offset;
}

/// Elements of a captured tensor at steps from a Place's base.
template <class T>
struct CapturedSteps {
  T* base;
  int64_t q, kv;  // in elements, of a step of query or key

  FA_DEVICE T* at(int q_step, int kv_step) const { return base + (q_step * q + kv_step * kv); }
};

/// How far steps may go on from a base without leaving `length`.
FA_DEVICE int steps_inside(int base, int length) {
  return maximum(length - 1 - base, 0);
}

/// Two 16-bit elements in a word.
template <class T>
FA_DEVICE uint32_t pair_of(T low, T high) {
  return low.bits | static_cast<uint32_t>(high.bits) << 16;
}
template <class T>
FA_DEVICE float half_of(uint32_t pair, int which) {
  return captured_value(T{static_cast<uint16_t>(which == 0 ? pair & 0xffffu : pair >> 16)});
}

/// The values for steps of query and key, loads from kIndex on; kept inside of the tensors if kClamped.
template <class Variant, bool kClamped, int kIndex = 0>
FA_DEVICE void load_values(float (&loaded)[kLoads<Variant>], const VariantParams& variant, const Place& at, int q_step,
                           int kv_step) {
  if constexpr (kIndex < kLoads<Variant>) {
    if constexpr (kClamped) {
      q_step = minimum(q_step, steps_inside(at.q, at.s_q));
      kv_step = minimum(kv_step, steps_inside(at.kv, at.s_kv));
    }
    const auto steps = Variant::load(variant, at, Constant<kIndex>{});
    loaded[kIndex] = captured_value(ptx::ld_global_nc(steps.at(q_step, kv_step)));
    load_values<Variant, kClamped, kIndex + 1>(loaded, variant, at, q_step, kv_step);
  }
}

/// An element of a captured tensor of T.
template <class T, class... Index>
FA_DEVICE auto captured(const CaptureParams& capture, Index... index) {
  const T* data = static_cast<const T*>(capture.data);
  return captured_value(ptx::ld_global_nc(data + element_offset(capture.strides, index...)));
}

/// One whose index is the same for all rows and keys of a head, and in the tensor where the batch entry exists, of
/// which there are `b`: read once for many.
template <class T, class... Index>
FA_DEVICE auto captured_of_head(const CaptureParams& capture, int batch, int b, Index... index) {
  const T* data = static_cast<const T*>(capture.data);
  return captured_value(ptx::ld_global_nc_of(b - 1 - batch, data + element_offset(capture.strides, index...), data));
}

/// A scalar: given by value, or the element of a tensor of one.
template <class T>
FA_DEVICE auto captured(const CaptureParams& capture) {
  const T* data = static_cast<const T*>(capture.data);
  const auto value = captured_value(ptx::ld_global_or_param(data, capture.bits));
  if constexpr (sizeof(T) == sizeof capture.bits) {
    return value;
  } else {
    return data == nullptr ? ptx::from_bits(capture.bits) : value;  // an f32 whatever the capture's type
  }
}

// ---- functions on scores ----
//
// `score(n, e)` is what a thread holds of a row in n8 tile n: of key at.kv + 8 * n + e.

/// What score is given for a head. Kernels that keep it do so over all KV tiles: the compiler would rather read it
/// again than keep it, and has no registers for the address.
template <class Variant, int kCount = kFixed<Variant>>
struct Fixed {
  float values[kCount];

  FA_DEVICE void read(const VariantParams& variant, const Place& at) { Variant::fix(variant, at, values); }
  template <class... Loaded>
  FA_DEVICE float score(const VariantParams& variant, const Place& at, float raw, const Loaded&... loaded) const {
    return Variant::score(variant, at, raw, loaded..., values);
  }
};
template <class Variant>
struct Fixed<Variant, 0> {
  FA_DEVICE void read(const VariantParams&, const Place&) {}
  template <class... Loaded>
  FA_DEVICE float score(const VariantParams& variant, const Place& at, float raw, const Loaded&... loaded) const {
    return Variant::score(variant, at, raw, loaded...);
  }
};

/// Raw scores become those of the score function, over Variant::kFactor.
template <class Variant, int kNTiles, int kFixedCount, class Scores>
FA_DEVICE void apply_score(const VariantParams& variant, Place at, const Fixed<Variant, kFixedCount>& fixed,
                           Scores score) {
  FA_UNROLL
  for (int n = 0; n < kNTiles; ++n) {
    FA_UNROLL
    for (int e = 0; e < 2; ++e) {
      at.kv_step = 8 * n + e;
      if constexpr (kLoads < Variant >> 0) {
        float loaded[kLoads<Variant>];
        Place base = at;
        base.kv_step = 0;
        load_values<Variant, true>(loaded, variant, base, 0, at.kv_step);
        score(n, e) = fixed.score(variant, at, score(n, e), loaded);
      } else {
        score(n, e) = fixed.score(variant, at, score(n, e));
      }
    }
  }
}

/// The same with nothing kept.
template <class Variant, int kNTiles, class Scores>
FA_DEVICE void apply_score(const VariantParams& variant, const Place& at, Scores score) {
  apply_score<Variant, kNTiles>(variant, at, Fixed<Variant, 0>(), score);
}

/// The same with what is loaded, [n][e] as the scores.
template <class Variant, int kNTiles, class Scores, class Loaded>
FA_DEVICE void apply_score_to(const VariantParams& variant, Place at, Scores score, Loaded load) {
  FA_UNROLL
  for (int n = 0; n < kNTiles; ++n) {
    FA_UNROLL
    for (int e = 0; e < 2; ++e) {
      at.kv_step = 8 * n + e;
      const float loaded[] = {load(n, e)};
      score(n, e) = Variant::score(variant, at, score(n, e), loaded);
    }
  }
}

/// How far scores may grow over a KV tile where what a row has in common is left to the softmax, in log2 units: what is
/// added to a score rounds it by less than 2^-13 then.
constexpr float kMostGrowth = 2048.f;

/// The factor of an AffineRow from that of the score, finite where that is: 0 times it is 0.
FA_DEVICE float affine_factor(float factor, float inverse_scale) {
  constexpr float kGreatest = 3.402823466e+38f;
  const float result = factor * inverse_scale;
  if (ptx::abs(result) < kInfinity || !(ptx::abs(factor) < kInfinity)) return result;
  return result < 0.f ? -kGreatest : kGreatest;
}

/// The same for an affine function of the keys, of both row halves r: `score(n, 2 * r + e)`. Where x has one sign in
/// all of the warp's scores, and these grow little, the step from key to key is one multiplication and addition, and
/// what is the same for a row is left to the softmax: `shift`, before the scale.
template <class Variant, int kNTiles, class Scores>
FA_DEVICE void apply_affine(const AffineRow (&rows)[2], float (&shift)[2], float scale_log2, Scores score) {
  constexpr float kSpan = static_cast<float>(Variant::kAffineStep * (8 * kNTiles - 7));  // to the thread's last key
  bool by_steps = true;
  float factor[2];
  FA_UNROLL
  for (int r = 0; r < 2; ++r) {
    const float last = rows[r].base + kSpan;
    factor[r] = rows[r].factor;
    by_steps = by_steps && ptx::abs(factor[r]) * (ptx::abs(kSpan) * scale_log2) <= kMostGrowth;
    if constexpr (Variant::kAffineAbs) {
      by_steps = by_steps && rows[r].base * last >= 0.f;
      if (rows[r].base + last < 0.f) factor[r] = -factor[r];
    }
    shift[r] = factor[r] * rows[r].base;
  }
  if (!ptx::vote_any(!by_steps)) {
    FA_UNROLL
    for (int i = 0; i < 4 * kNTiles; ++i) {
      const float step = static_cast<float>(Variant::kAffineStep * (8 * (i / 4) + i % 2));
      score(i / 4, i % 4) = ptx::fma(factor[i / 2 % 2], step, score(i / 4, i % 4));
    }
    return;
  }
  shift[0] = shift[1] = 0.f;
  FA_UNROLL
  for (int i = 0; i < 4 * kNTiles; ++i) {
    const AffineRow& row = rows[i / 2 % 2];
    const float x = row.base + static_cast<float>(Variant::kAffineStep * (8 * (i / 4) + i % 2));
    score(i / 4, i % 4) = ptx::fma(row.factor, Variant::kAffineAbs ? ptx::abs(x) : x, score(i / 4, i % 4));
  }
}

/// Scores that the mask function hides become -inf.
template <class Variant, int kNTiles, class Scores>
FA_DEVICE void apply_mask(const VariantParams& variant, Place at, Scores score) {
  FA_UNROLL
  for (int n = 0; n < kNTiles; ++n) {
    FA_UNROLL
    for (int e = 0; e < 2; ++e) {
      at.kv_step = 8 * n + e;
      if (!Variant::keep(variant, at)) score(n, e) = -kInfinity;
    }
  }
}

// ---- masks in closed form ----
//
// `lengths` are those of a batch entry: the launch parameters, or a Sequence.

/// Row i of a batch entry stands at key i + diagonal.
template <class Params>
FA_DEVICE int diagonal_of(const Params& params, const ForwardParams&) {
  return params.variant.diagonal;
}
template <class Params>
FA_DEVICE int diagonal_of(const Params& params, const BackwardParams&) {
  return params.variant.diagonal;
}
template <class Params>
FA_DEVICE int diagonal_of(const Params& params, const MaskTilesParams&) {
  return params.variant.diagonal;
}
template <class Params>
FA_DEVICE int diagonal_of(const Params&, const Sequence& sequence) {
  return sequence.diagonal;
}

/// The first key of a batch entry that any row may keep.
template <class Lengths>
FA_DEVICE int first_key_of(const Lengths&) {
  return 0;
}
FA_DEVICE int first_key_of(const Request& request) {
  return request.first_position;
}

/// Keys of the first key's chunk that are not the call's.
template <class Variant, class Params>
FA_DEVICE int keys_before_chunk(const Params& params) {
  if constexpr (kPlaced<Variant>) return params.variant.chunk_keys;
  return 0;
}

/// Row `row` (a query position) keeps keys from keys_begin(row) to before keys_end(row). Neither ever decreases.
template <class Variant, class Params, class Lengths>
FA_DEVICE int keys_begin(const Params& params, const Lengths& lengths, int row) {
  int begin = first_key_of(lengths);
  if constexpr (Variant::kLeftWindow) {
    begin = maximum(begin, row + diagonal_of(params, lengths) - params.variant.window_left);
  }
  if constexpr (Variant::kChunked) {
    const int chunk = floor_quotient(row + diagonal_of(params, lengths), params.variant.chunk);
    begin = maximum(begin, chunk * params.variant.chunk - keys_before_chunk<Variant>(params));
  }
  return begin;
}
template <bool kCausal, class Variant, class Params, class Lengths>
FA_DEVICE int keys_end(const Params& params, const Lengths& lengths, int row) {
  int end = lengths.s_kv;
  if constexpr (kCausal) end = minimum(end, row + lengths.causal_shift + 1);
  if constexpr (Variant::kChunked) {
    const int chunk = floor_quotient(row + diagonal_of(params, lengths), params.variant.chunk);
    end = minimum(end, (chunk + 1) * params.variant.chunk - keys_before_chunk<Variant>(params));
  }
  return end;
}

/// Key `key` is kept by rows from rows_begin(key) to before rows_end(key).
template <bool kCausal, class Variant, class Params, class Lengths>
FA_DEVICE int rows_begin(const Params& params, const Lengths& lengths, int key) {
  int begin = 0;
  if constexpr (kCausal) begin = maximum(begin, key - lengths.causal_shift);
  if constexpr (Variant::kChunked) {
    const int chunk = (key + keys_before_chunk<Variant>(params)) / params.variant.chunk;
    begin = maximum(begin, chunk * params.variant.chunk - diagonal_of(params, lengths));
  }
  return begin;
}
template <class Variant, class Params, class Lengths>
FA_DEVICE int rows_end(const Params& params, const Lengths& lengths, int key) {
  int end = lengths.s_q;
  if constexpr (Variant::kLeftWindow) {
    end = minimum(end, key + params.variant.window_left - diagonal_of(params, lengths) + 1);
  }
  if constexpr (Variant::kChunked) {
    const int chunk = (key + keys_before_chunk<Variant>(params)) / params.variant.chunk;
    end = minimum(end, (chunk + 1) * params.variant.chunk - diagonal_of(params, lengths));
  }
  return end;
}

/// Rows before the one that first keeps the first key keep none, nor do those that do not keep the last key any more:
/// from keeping_end on, which may lie behind the last row.
template <bool kCausal, class Variant, class Params, class Lengths>
FA_DEVICE int keeping_begin(const Params& params, const Lengths& lengths) {
  return rows_begin<kCausal, Variant>(params, lengths, 0);
}
template <class Variant, class Params, class Lengths>
FA_DEVICE int keeping_end(const Params& params, const Lengths& lengths) {
  int end = 0x7fffffff;
  if constexpr (Variant::kLeftWindow) {
    end = minimum(end, lengths.s_kv + params.variant.window_left - diagonal_of(params, lengths));
  }
  if constexpr (Variant::kChunked) {
    const int chunk = (lengths.s_kv - 1 + keys_before_chunk<Variant>(params)) / params.variant.chunk;
    end = minimum(end, (chunk + 1) * params.variant.chunk - diagonal_of(params, lengths));
  }
  return end;
}

/// Whether masks in closed form hide any of the kKeys keys from `first_key` on, if they are there, from any of the
/// kRows rows from `first_row` on. Registers are dear where this is asked: a window takes one comparison.
template <bool kCausal, class Variant, int kRows, int kKeys, class Params, class Lengths>
FA_DEVICE bool hides_any(const Params& params, const Lengths& lengths, int first_row, int first_key) {
  if constexpr (Variant::kChunked) {
    return first_key + kKeys > keys_end<kCausal, Variant>(params, lengths, first_row) ||
           first_key < keys_begin<Variant>(params, lengths, first_row + kRows - 1);
  } else if constexpr (Variant::kLeftWindow) {
    const int step = first_row - first_key;
    const int most = params.variant.window_left - diagonal_of(params, lengths) - kRows + 1;  // without a hidden key
    if constexpr (!kCausal) return step > most;
    const int least = kKeys - 1 - lengths.causal_shift;
    return static_cast<uint32_t>(step - least) >= static_cast<uint32_t>(maximum(most - least + 1, 0));
  } else {
    return kCausal && first_key + kKeys - 1 > first_row + lengths.causal_shift;
  }
}

// ---- tile lists of mask functions ----

constexpr int kTileListHeader = 3;

/// The entries of a list; the numbers before them are how many there are, how many of these the function keeps whole
/// but for masks in closed form, and how many are full.
template <class T>
FA_DEVICE T* tile_list(T* lists, int list, int others) {
  return lists + static_cast<int64_t>(list) * (others + kTileListHeader) + kTileListHeader;
}

/// The list of an attention kernel's tile `block`, one of `blocks`, of head `head` of `heads`.
template <class Variant>
FA_DEVICE const int32_t* tile_list_of(const VariantParams& variant, int batch, int head, int heads, int block,
                                      int blocks) {
  const int list_head = Variant::kMaskOnHead ? head : 0;
  const int list_heads = Variant::kMaskOnHead ? heads : 1;
  const int list_batch = Variant::kMaskOnBatch ? batch : 0;
  return tile_list(variant.tile_lists, (list_batch * list_heads + list_head) * blocks + block, variant.tile_others);
}

// ---- sinks ----

/// ln(e^a + e^b); -inf for two of them, NaN for a NaN or +inf.
FA_DEVICE float log_add(float a, float b) {
  const float largest = ptx::max(a, b);
  if (largest == -kInfinity) return a + b;  // NaN for a NaN, which the maximum drops
  return largest + kLn2 * ptx::lg2(ptx::ex2((a - largest) * kLog2e) + ptx::ex2((b - largest) * kLog2e));
}

/// The logit of query head `head`, which takes part in the sum of each of its rows.
FA_DEVICE float sink_of(const VariantParams& variant, int head) {
  return ptx::ld_global_nc(variant.sink + head * variant.stride_sink);
}

/// What a part of a sum counts in the whole, from the logarithms of both; NaN of a NaN.
FA_DEVICE float weight_of(float part, float whole) {
  return whole == -kInfinity ? 0.f : ptx::ex2((part - whole) * kLog2e);
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_VARIANT_CUH_
