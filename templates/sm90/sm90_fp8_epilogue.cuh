#ifndef FA_TEMPLATES_SM90_SM90_FP8_EPILOGUE_CUH_
#define FA_TEMPLATES_SM90_SM90_FP8_EPILOGUE_CUH_

#include <common/log_sum.cuh>
#include <common/variant.cuh>
#include <ptx/fp8.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>
#include <sm90/sm90_fp8_traits.cuh>

namespace fa::sm90 {

/// What ends a query tile: the log-sum-exp of its rows, and O; of a split both go to the partial results.
template <class Config>
struct Fp8Epilogue : Fp8Block<Config> {
  using Base = Fp8Block<Config>;
  using Traits = typename Base::Traits;
  using Output = typename Traits::Output;
  using Variant = typename Traits::Variant;
  using O = typename Traits::O;
  using Rows = typename Traits::Rows;
  using Query = typename Traits::Query;
  using Softmax = typename Traits::Softmax;
  using Traits::kHeadDimV, Traits::kValueColumns, Traits::kVarlen, Traits::kByteOutput, Base::params, Base::lengths_of,
      Base::first_row_of, Base::has_row;

  FA_DEVICE explicit Fp8Epilogue(const Base& base) : Base(base) {}

  FA_DEVICE void run(const O& o, Softmax& softmax, const float (&scale_log2)[2], const Query& query, int warp_row,
                     int lane) const {
    softmax.finish();
    const Rows rows{params.group, query.tile.head};
    const float scale = this->v_scale(query);
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int row = first_row_of(query) + warp_row + lane / 4 + 8 * r;
      if (!has_row(query, row)) continue;
      // Of a row without keys O is 0, whatever stands as the scale of a V without any.
      float factor = softmax.sum[r] == 0.f ? 0.f : softmax.inverse_sum(r) * scale;
      if constexpr (Config::kSplit) {
        store_partial(o, factor, r, softmax, scale_log2[r], query, row, lane);
      } else {
        float lse = softmax.log_sum(r, scale_log2[r]);
        if constexpr (Traits::kInt8 && !Variant::kScore) {
          lse = ptx::fma(params.scale, this->row_bias(query, rows.query_head(row), rows.position(row)), lse);
        }
        if constexpr (Variant::kSink) {
          const float keys = lse;
          lse = kernel::log_add(keys, kernel::sink_of(params.variant, rows.query_head(row)));
          factor *= kernel::weight_of(keys, lse);
        }
        if (params.lse != nullptr && lane % 4 == 0) {
          ptx::st_global(
              params.lse + offset_of(query, row, params.stride_lse_b, params.stride_lse_h, params.stride_lse_s), lse);
        }
        store_row(o, factor, r,
                  static_cast<Output*>(params.o) +
                      offset_of(query, row, params.stride_o_b, params.stride_o_h, params.stride_o_s),
                  lane);
      }
    }
  }

 private:
  FA_DEVICE int64_t offset_of(const Query& query, int row, int64_t stride_b, int64_t stride_h, int64_t stride_s) const {
    const Rows rows{params.group, query.tile.head};
    return kernel::offset_of_rows<kVarlen>(lengths_of(query), query.tile.batch, stride_b, stride_s) +
           rows.query_head(row) * stride_h + rows.position(row) * stride_s;
  }

  /// In float, normalised: [splits, b, h_q, s_q]. A sink is left to what joins splits.
  FA_DEVICE void store_partial(const O& o, float factor, int r, const Softmax& softmax, float scale_log2,
                               const Query& query, int row, int lane) const {
    const Rows rows{params.group, query.tile.head};
    const int head = rows.query_head(row), position = rows.position(row);
    const int64_t batch = static_cast<int64_t>(query.tile.split) * params.b + query.tile.batch;
    const int64_t place = (batch * params.h_q + head) * params.s_q + position;
    kernel::SplitSum sum = softmax.split_sum(r, scale_log2);
    if constexpr (Traits::kInt8 && !Variant::kScore) sum.add(params.scale * this->row_bias(query, head, position));
    if (lane % 4 == 0) sum.store(params.partial_lse, place);
    float* const target = params.partial_o + place * kHeadDimV + 4 * (lane % 4);
    FA_UNROLL
    for (int block = 0; block < kHeadDimV / 16; ++block) {
      const float(&slice)[kValueColumns / 2] = o[block * 16 / kValueColumns];
      const int i = block * 16 % kValueColumns / 2 + 2 * r;
      ptx::st_global_chunk(target + 16 * block, {{ptx::bits(slice[i] * factor), ptx::bits(slice[i + 4] * factor),
                                                  ptx::bits(slice[i + 1] * factor), ptx::bits(slice[i + 5] * factor)}});
    }
  }

  /// Of 16 columns a lane has 4t, 4t + 2 in one n8 tile and 4t + 1, 4t + 3 in the next (t = lane % 4), since V's
  /// columns were exchanged (Fp8Producer): 8 bytes of a row, or 4.
  FA_DEVICE static void store_row(const O& o, float factor, int r, Output* target, int lane) {
    FA_UNROLL
    for (int block = 0; block < kHeadDimV / 16; ++block) {
      const float(&slice)[kValueColumns / 2] = o[block * 16 / kValueColumns];
      const int i = block * 16 % kValueColumns / 2 + 2 * r;
      if constexpr (kByteOutput) {
        ptx::st_global(
            reinterpret_cast<uint32_t*>(target + 16 * block + 4 * (lane % 4)),
            ptx::convert_e4m3(slice[i] * factor, slice[i + 4] * factor, slice[i + 1] * factor, slice[i + 5] * factor));
      } else {
        const uint32_t low = ptx::convert_pair<Output>(slice[i] * factor, slice[i + 4] * factor);
        const uint32_t high = ptx::convert_pair<Output>(slice[i + 1] * factor, slice[i + 5] * factor);
        ptx::st_global(reinterpret_cast<uint64_t*>(target + 16 * block + 4 * (lane % 4)),
                       static_cast<uint64_t>(high) << 32 | low);
      }
    }
  }
};

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_FP8_EPILOGUE_CUH_
