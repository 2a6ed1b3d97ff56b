#ifndef FA_TEMPLATES_COMMON_APPEND_STORED_CUH_
#define FA_TEMPLATES_COMMON_APPEND_STORED_CUH_

#include <common/append.cuh>
#include <common/append_params.cuh>
#include <common/constants.cuh>
#include <common/elements.cuh>
#include <common/encode.cuh>
#include <common/rotary.cuh>
#include <common/row_pieces.cuh>
#include <common/stored.cuh>
#include <common/switches.cuh>
#include <ptx/griddepcontrol.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>

namespace fa::kernel {

FA_DEVICE uint32_t encode_u4(float steps) {
  constexpr float kGreatest = 15.f, kRounder = 12582912.f;  // as of i8
  return ptx::bits(ptx::max(ptx::min(steps, kGreatest), 0.f) + kRounder) & 0xfu;
}

/// Append into a cache of 8 or 4 bits (stored.cuh). A warp takes one row of one head of a token: a lane eight columns
/// of every 256. A row's scale is that of its greatest magnitude, after rotary embedding, unless scales are given. Of 4
/// bits a group has an offset, its least number, and a scale that has 15 steps from there to its greatest. A latent row
/// has a scale of each 128 codes, and the columns behind the codes are those that turn.
///
/// Config: as of Append, and kKeyStorage, kValueStorage, kScalesGiven.
template <class Config>
struct AppendStored : Append<Config> {
  using Base = Append<Config>;
  using T = typename Config::Element;
  using Base::params;
  using typename Base::Place;
  const AppendStoredParams& stored;
  static constexpr int kRotaryDims = Config::kRotaryDims;
  static constexpr int kColumns = 8;  // of a lane, of every kStep
  static constexpr int kStep = kColumns * kWarpSize;
  static constexpr bool kLatent = kLatentRows<Config>;
  static constexpr int kCodes = 512, kCodeGroup = 128;  // of a latent row, and those that share a scale
  static constexpr int kLatentRotary = Config::kHeadDimQk - kCodes;
  static constexpr float kLeastMagnitude = 7.888609e-31f;  // 2^-100; rows below it are 0
  static_assert(kPieceElements<T> == kColumns, "elements of 16 bits");

  FA_DEVICE void run() const {
    const int64_t item = static_cast<int64_t>(ptx::block_index()) * Config::kWarps + ptx::thread_index() / kWarpSize;
    const int rows = (kLatent ? 1 : 2) * params.h_kv + params.h_q;  // of a token
    const int64_t token = item / rows;
    if constexpr (kOverlaps<Config>) ptx::griddepcontrol_wait();  // for all that is read, and who read the cache
    if (token < params.tokens) run(static_cast<int>(token), static_cast<int>(item % rows));
    if constexpr (kOverlaps<Config>) ptx::griddepcontrol_launch_dependents();
  }

 private:
  FA_DEVICE void run(int token, int row) const {
    const Place place = this->place_of(token);
    if (!place.is_token) return;
    const int entry = token / params.s_new;
    const int s = token - entry * params.s_new;
    if (row < params.h_kv) {
      if (place.page < 0) return;
      const T* const source =
          static_cast<const T*>(params.k) + entry * params.stride_k_b + row * params.stride_k_h + s * params.stride_k_s;
      const Target target{params.k_cache, place.page * params.stride_k_cache_page + row * params.stride_k_cache_h +
                                              place.row * params.stride_k_cache_s};
      float* const scale = stored.k_scale + place.page * stored.stride_k_scale_page + row * stored.stride_k_scale_h +
                           place.row * stored.stride_k_scale_s;
      if constexpr (kLatent) {
        store_latent(source, static_cast<uint8_t*>(target.tensor) + target.offset, place.position);
      } else {
        store<KeyElement<Config>, Config::kHeadDimQk, kRotaryDims>(source, target, scale, place.position);
      }
    } else if (!kLatent && row < 2 * params.h_kv) {
      if (place.page < 0) return;
      row -= params.h_kv;
      const T* const source =
          static_cast<const T*>(params.v) + entry * params.stride_v_b + row * params.stride_v_h + s * params.stride_v_s;
      const Target target{params.v_cache, place.page * params.stride_v_cache_page + row * params.stride_v_cache_h +
                                              place.row * params.stride_v_cache_s};
      float* const scale = stored.v_scale + place.page * stored.stride_v_scale_page + row * stored.stride_v_scale_h +
                           place.row * stored.stride_v_scale_s;
      store<ValueElement<Config>, Config::kHeadDimV, 0>(source, target, scale, place.position);
    } else {
      row -= (kLatent ? 1 : 2) * params.h_kv;
      const T* const source =
          static_cast<const T*>(params.q) + entry * params.stride_q_b + row * params.stride_q_h + s * params.stride_q_s;
      const Target target{params.q_out,
                          entry * params.stride_q_out_b + row * params.stride_q_out_h + s * params.stride_q_out_s};
      if constexpr (kLatent) {
        store<T, kCodes, 0>(source, target, nullptr, place.position);
        store<T, kLatentRotary, kRotaryDims>(source + kCodes, {target.tensor, target.offset + kCodes}, nullptr,
                                             place.position);
      } else {
        store<T, Config::kHeadDimQk, kRotaryDims>(source, target, nullptr, place.position);
      }
    }
  }

  /// Where a row goes, in elements.
  struct Target {
    void* tensor;
    int64_t offset;
  };

  /// Writes a row [kHeadDim] as elements of Stored; `scale` is where its scale is, or goes.
  template <class Stored, int kHeadDim, int kTurned>
  FA_DEVICE void store(const T* source, const Target& target, float* scale, int64_t position) const {
    constexpr int kSteps = ceil_div(kHeadDim, kStep);
    constexpr bool kStored = sizeof(Stored) == 1;
    float values[kSteps][kColumns] = {};
    float most = 0.f;
    float zero = 0.f;  // NaN for a row with an infinity or a NaN
    FA_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      const int column = first_column(step);
      if (column >= kHeadDim) continue;
      read<kTurned>(values[step], source, column, position);
      FA_UNROLL
      for (int i = 0; i < kColumns; ++i) most = ptx::max(most, ptx::abs(values[step][i]));
      zero = zero_of(values[step], zero);
    }
    ptx::sync_warp();  // all have read the row, whose place a row of q may take
    if constexpr (kIsU4<Stored>) {
      static_assert(kSteps == 1, "a lane has the columns of one group");
      const int column = first_column(0);
      const uint32_t codes = codes_of<Stored, kHeadDim>(reinterpret_cast<T*>(scale), values[0], column);
      if (column >= kHeadDim) return;
      ptx::st_global(
          reinterpret_cast<uint32_t*>(static_cast<unsigned char*>(target.tensor) + target.offset + column / 2), codes);
    } else if constexpr (kStored) {
      const float factor = factor_of<Stored>(scale, most, zero);
      FA_UNROLL
      for (int step = 0; step < kSteps; ++step) {
        const int column = first_column(step);
        if (column >= kHeadDim) continue;
        ptx::st_global(reinterpret_cast<uint64_t*>(static_cast<uint8_t*>(target.tensor) + target.offset + column),
                       bytes_of<Stored>(values[step], factor));
      }
    } else {
      FA_UNROLL
      for (int step = 0; step < kSteps; ++step) {
        const int column = first_column(step);
        if (column >= kHeadDim) continue;
        store_piece<Config::kAligned>(static_cast<T*>(target.tensor) + target.offset + column, values[step]);
      }
    }
  }

  /// Writes a latent row: codes of the first columns, a scale of each group behind them, and the others as bf16. A
  /// group's columns are half a warp's.
  FA_DEVICE void store_latent(const T* source, uint8_t* row, int64_t position) const {
    static_assert(!kLatent || kCodeGroup * 2 == kStep, "a group is half a warp's");
    FA_UNROLL
    for (int step = 0; step < kCodes / kStep; ++step) {
      const int column = first_column(step);
      float values[kColumns];
      read<0>(values, source, column, position);
      float most = 0.f;
      FA_UNROLL
      for (const float value : values) most = ptx::max(most, ptx::abs(value));
      float* const scale = reinterpret_cast<float*>(row + kCodes) + column / kCodeGroup;
      const float factor = factor_of<e4m3, kCodeGroup / kColumns>(scale, most, zero_of(values));
      ptx::st_global(reinterpret_cast<uint64_t*>(row + column), bytes_of<e4m3>(values, factor));
    }
    const int column = first_column(0);
    if (column >= kLatentRotary) return;
    float values[kColumns];
    read<kRotaryDims>(values, source + kCodes, column, position);
    store_piece<true>(reinterpret_cast<bf16*>(row + kCodes + kCodes / kCodeGroup * 4) + column, values);
  }

  static FA_DEVICE int first_column(int step) { return step * kStep + ptx::thread_index() % kWarpSize * kColumns; }

  /// A lane's columns of 8 bits.
  template <class Stored>
  FA_DEVICE static uint64_t bytes_of(const float (&values)[kColumns], float factor) {
    uint64_t codes = 0;
    FA_UNROLL
    for (int i = 0; i < kColumns; ++i) {
      codes |= static_cast<uint64_t>(encode(Stored{}, ptx::multiply(values[i], factor))) << 8 * i;
    }
    return codes;
  }

  /// What the row is multiplied by, or its columns of so many lanes. Called by whole warps.
  template <class Stored, int kLanes = kWarpSize>
  FA_DEVICE float factor_of(float* scale, float most, float zero) const {
    float row_scale;
    if constexpr (Config::kScalesGiven) {
      row_scale = ptx::ld_global(scale);
    } else {
      FA_UNROLL
      for (int mask = kLanes / 2; mask > 0; mask /= 2) {
        most = ptx::max(most, ptx::shfl_xor(most, mask));
        zero += ptx::shfl_xor(zero, mask);
      }
      row_scale = (most < kLeastMagnitude ? 0.f : most / greatest(Stored{})) + zero;
      if (ptx::thread_index() % kLanes == 0) ptx::st_global(scale, row_scale);
    }
    const float factor = 1.f / row_scale;
    return factor - factor == 0.f ? factor : 0.f;  // 0 where there is none
  }

  /// The word of a lane's columns; `pairs` has the scales and offsets of the row's groups. Called by whole warps: those
  /// behind the row are in groups that are not there.
  template <class Stored, int kHeadDim>
  FA_DEVICE uint32_t codes_of(T* pairs, const float (&values)[kColumns], int column) const {
    T* const pair = pairs + (column < kHeadDim ? column / Stored::kGroup * 2 : 0);
    float scale, offset;
    if constexpr (Config::kScalesGiven) {
      scale = to_float(ptx::ld_global(pair));
      offset = to_float(ptx::ld_global(pair + 1));
    } else {
      float least = values[0], most = values[0];
      FA_UNROLL
      for (int i = 1; i < kColumns; ++i) {
        least = ptx::min(least, values[i]);
        most = ptx::max(most, values[i]);
      }
      float zero = zero_of(values);  // NaN of a group with an infinity or a NaN
      FA_UNROLL
      for (int mask = Stored::kGroup / kColumns / 2; mask > 0; mask /= 2) {
        least = ptx::min(least, ptx::shfl_xor(least, mask));
        most = ptx::max(most, ptx::shfl_xor(most, mask));
        zero += ptx::shfl_xor(zero, mask);
      }
      const T rounded_offset = ptx::convert<T>(least + zero);
      offset = to_float(rounded_offset);
      const T rounded_scale = scale_of(offset, most);
      scale = to_float(rounded_scale);
      if (column < kHeadDim && column % Stored::kGroup == 0) {
        ptx::st_global(pair, rounded_scale);
        ptx::st_global(pair + 1, rounded_offset);
      }
    }
    const float inverse = 2.f / scale;
    const float factor = inverse - inverse == 0.f ? inverse : 0.f;  // 0 where there is none
    uint32_t codes = 0;
    FA_UNROLL
    for (int i = 0; i < kColumns; ++i) {
      codes |= encode_u4(ptx::multiply(half_distance(values[i], offset), factor)) << (i % 2 * 16 + i / 2 * 4);
    }
    return codes;
  }

  /// A 15th of the way, rounded to the nearest, or down where code 15 would stand for infinity.
  static FA_DEVICE T scale_of(float offset, float most) {
    T scale = ptx::convert<T>(half_distance(most, offset) / 7.5f);
    const float greatest = to_float(ptx::convert<T>(ptx::fma(15.f, to_float(scale), offset)));
    if (greatest == kInfinity) --scale.bits;
    return scale;
  }

  /// Of any two floats it is finite.
  static FA_DEVICE float half_distance(float to, float from) {
    return ptx::multiply(to, 0.5f) - ptx::multiply(from, 0.5f);
  }

  /// Columns `column`.. of a row, of which those before kTurned are turned.
  template <int kTurned>
  FA_DEVICE void read(float (&values)[kColumns], const T* source, int column, int64_t position) const {
    load_piece<Config::kAligned>(values, source + column);
    if constexpr (kTurned > 0) {
      FA_UNROLL
      for (int i = 0; i < kColumns; ++i) {
        if (column + i < kTurned) values[i] = turned(values[i], source, column + i, position);
      }
    }
  }

  /// A column of a pair, in f32.
  FA_DEVICE float turned(float value, const T* source, int column, int64_t position) const {
    const bool first = Config::kInterleaved ? column % 2 == 0 : column < Base::kPairs;
    const int pair = Config::kInterleaved ? column / 2 : first ? column : column - Base::kPairs;
    const int other = Config::kInterleaved ? column ^ 1 : first ? column + Base::kPairs : column - Base::kPairs;
    float low = first ? value : to_float(ptx::ld_global(source + other));
    float high = first ? to_float(ptx::ld_global(source + other)) : value;
    float cosine, sine;
    angle(pair, position, cosine, sine);
    rotate(low, high, cosine, sine);
    return first ? low : high;
  }

  FA_DEVICE void angle(int pair, int64_t position, float& cosine, float& sine) const {
    if constexpr (Base::kTable == RotaryTable::none) {
      cos_sin(turn_at(position, params.turns[pair]), cosine, sine);
    } else if constexpr (Base::kTable == RotaryTable::floats) {
      look_up<float>(pair, position, cosine, sine);
    } else {
      look_up<T>(pair, position, cosine, sine);
    }
  }

  /// A position that the table does not have gets its nearest one.
  template <class Number>
  FA_DEVICE void look_up(int pair, int64_t position, float& cosine, float& sine) const {
    const int64_t last = params.table_positions - 1;
    const int64_t row = position < 0 ? 0 : position > last ? last : position;
    cosine = to_float(ptx::ld_global(static_cast<const Number*>(params.cos) + row * params.stride_cos + pair));
    sine = to_float(ptx::ld_global(static_cast<const Number*>(params.sin) + row * params.stride_sin + pair));
  }
};

template <class Config>
FA_DEVICE void append_stored(const AppendStoredParams& params) {
  AppendStored<Config>{{params}, params}.run();
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_APPEND_STORED_CUH_
