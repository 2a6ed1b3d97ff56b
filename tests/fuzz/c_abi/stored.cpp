// Caches of 8 and 4 bits, and 8-bit floats.

#include <algorithm>

#include "fuzz/c_abi/arguments.hpp"

namespace fa::fuzz {
namespace {

std::int64_t group_of(const fa_config& config) {
  return config.group_size == 0 ? 32 : std::clamp(config.group_size, 8, 1024);
}

}  // namespace

bool is_fp8(const fa_config& config) {
  return config.dtype == FA_E4M3 || config.dtype == FA_E5M2 || config.dtype == FA_I8;
}

bool is_latent(const fa_config& config) {
  return config.has_k_dtype != 0 && config.k_dtype == FA_E4M3 && config.value_in_key == 512 && config.head_dim == 576;
}

Rows stored_rows(const fa_config& config, const Sizes& sizes, bool of_v) {
  const std::int64_t d = of_v ? sizes.d_v : sizes.d_qk;
  if (is_latent(config) && !of_v) return {config.k_dtype, 656};
  if (of_v && config.dtype == FA_I8) return {FA_E4M3, d};
  if ((of_v ? config.has_v_dtype : config.has_k_dtype) == 0) return {config.dtype, d};
  const std::int32_t dtype = of_v ? config.v_dtype : config.k_dtype;
  return {dtype, dtype == FA_U4X2 ? d / 2 : d};
}

/// 8-bit floats, and without what these have not.
void Arguments::set_fp8(fa_config* value) {
  constexpr std::int32_t kHeadDims[] = {16, 16, 32, 64, 128, 256};
  constexpr std::int32_t kOutputs[] = {FA_F16, FA_BF16, FA_E4M3};
  constexpr std::int32_t kDTypes[] = {FA_E4M3, FA_E5M2, FA_I8};
  value->dtype = random_.pick(kDTypes);
  value->head_dim = random_.pick(kHeadDims);
  value->head_dim_v = random_.one_in(2) ? 0 : random_.pick(kHeadDims);
  value->has_o_dtype = random_.one_in(2);
  value->o_dtype = random_.pick(kOutputs);
  value->key_scales = random_.one_in(3);
  value->value_scales = random_.one_in(3);
  value->precise = random_.one_in(3);
  if (value->has_o_dtype != 0 && value->o_dtype == FA_E4M3) value->zero_padding = 0;
  value->accumulate = value->invariance = 0;
  if (!random_.one_in(4)) value->page_size = 0;
  value->dropout = 0;
  value->kernel = nullptr;
}

/// Caches of 8 or 4 bits likewise.
void Arguments::set_stored(fa_config* value) {
  constexpr std::int32_t kHeadDims[] = {32, 32, 64, 128, 256};
  constexpr std::int32_t kStored[] = {FA_E4M3, FA_I8, FA_U4X2, FA_U4X2};
  value->dtype = random_.one_in(2) ? FA_F16 : FA_BF16;
  value->head_dim = random_.pick(kHeadDims);
  value->head_dim_v = random_.one_in(2) ? 0 : random_.pick(kHeadDims);
  value->has_k_dtype = !random_.one_in(4);
  value->has_v_dtype = value->has_k_dtype == 0 || !random_.one_in(4);
  value->k_dtype = random_.pick(kStored);
  value->v_dtype = random_.pick(kStored);
  const bool u4 =
      (value->has_k_dtype != 0 && value->k_dtype == FA_U4X2) || (value->has_v_dtype != 0 && value->v_dtype == FA_U4X2);
  if (random_.one_in(6)) {  // latent rows
    value->head_dim = 576;
    value->head_dim_v = 0;
    value->value_in_key = 512;
    value->has_k_dtype = 1;
    value->has_v_dtype = 0;
    value->k_dtype = FA_E4M3;
    if (value->page_size == 0) value->page_size = random_.one_in(2) ? -1 : 16;
  }
  if (u4 && value->value_in_key == 0 && random_.one_in(2)) value->group_size = random_.one_in(4) ? 64 : 32;
  if (value->page_size == 0) value->varlen = value->zero_padding = value->check_sequences = 0;
  value->invariance = 0;
  value->dropout = 0;
  value->kernel = nullptr;
}

/// Of a cache of `blocks` pages, or batch entries, of so many rows.
const fa_tensor* Arguments::stored_scale(const fa_config& config, const Sizes& sizes, bool of_v, std::int64_t blocks,
                                         std::int64_t rows, Use use) {
  const bool stored = (of_v ? config.has_v_dtype : config.has_k_dtype) != 0;
  if ((stored && !is_latent(config)) == bad()) return nullptr;
  if (stored_rows(config, sizes, of_v).dtype != FA_U4X2) {
    return tensor(FA_F32, {blocks, sizes.h_kv, rows}, use, false);
  }
  const std::int64_t d = of_v ? sizes.d_v : sizes.d_qk;
  return tensor(config.dtype, {blocks, sizes.h_kv, rows, 2 * d / group_of(config)}, use, true);
}

void Arguments::set_scales(const GivenConfig& config, const Sizes& sizes, fa_forward_inputs* inputs) {
  const bool packed = config.seen.varlen != 0;
  const std::int64_t page = config.seen.page_size;
  const bool paged = page > 0 && page <= 256;
  const std::int64_t blocks = paged ? sizes.b * (sizes.s_kv / page + 1) : sizes.b;
  if (is_fp8(config.seen) || bad()) {
    const auto scale = [&](std::int64_t heads) {
      return random_.one_in(2) ? nullptr : tensor(FA_F32, {sizes.b, heads}, Use::input, false);
    };
    if (packed) {
      inputs->q_scale = random_.one_in(2) ? nullptr : tensor(FA_F32, {sizes.h_q, sizes.s_q}, Use::input, false);
    } else {
      inputs->q_scale =
          random_.one_in(2) ? tensor(FA_F32, {sizes.b, sizes.h_q, sizes.s_q}, Use::input, false) : scale(sizes.h_q);
    }
    const auto of_keys = [&](std::int32_t rows) {
      if (rows == 0 || random_.one_in(3)) return scale(sizes.h_kv);
      if (page != 0) return tensor(FA_F32, {blocks, sizes.h_kv, paged ? page : sizes.s_kv}, Use::input, false);
      return packed ? tensor(FA_F32, {sizes.h_kv, sizes.s_kv}, Use::input, false)
                    : tensor(FA_F32, {sizes.b, sizes.h_kv, sizes.s_kv}, Use::input, false);
    };
    inputs->k_scale = of_keys(config.seen.key_scales);
    inputs->v_scale = of_keys(config.seen.value_scales);
    if ((config.seen.dtype == FA_I8 && random_.one_in(2)) || bad()) {
      inputs->row_bias = packed ? tensor(FA_F32, {sizes.h_q, sizes.s_q}, Use::input, false)
                                : tensor(FA_F32, {sizes.b, sizes.h_q, sizes.s_q}, Use::input, false);
    }
    return;
  }
  inputs->k_scale = stored_scale(config.seen, sizes, false, blocks, paged ? page : sizes.s_kv, Use::input);
  inputs->v_scale = stored_scale(config.seen, sizes, true, blocks, paged ? page : sizes.s_kv, Use::input);
}

}  // namespace fa::fuzz
