// Arguments of calls that make codes.

#include "fuzz/c_abi/arguments.hpp"

namespace fa::fuzz {

const fa_quantize_inputs* Arguments::quantize(const GivenConfig& config) {
  const Sizes given = sizes(config);
  const bool packed = config.seen.varlen != 0;
  const auto rows = [&](std::int32_t dtype, std::int64_t h, std::int64_t s, std::int64_t d, Use use) {
    return packed ? tensor(dtype, {s, h, d}, use, true) : tensor(dtype, {given.b, h, s, d}, use, true);
  };
  const auto floats = [&](std::int64_t h, std::int64_t last, Use use) {
    return packed ? tensor(FA_F32, {h, last}, use, false) : tensor(FA_F32, {given.b, h, last}, use, false);
  };
  constexpr std::int32_t kFrom[] = {FA_F16, FA_BF16, FA_F32};
  fa_quantize_inputs inputs{};
  inputs.scales_given = random_.one_in(3);
  const Use use = inputs.scales_given != 0 ? Use::input : Use::output;
  const auto add = [&](const fa_tensor*& from, const fa_tensor*& codes, const fa_tensor*& scale, std::int32_t dtype,
                       std::int64_t h, std::int64_t s, std::int64_t d) {
    if (random_.one_in(4)) return;
    from = rows(random_.pick(kFrom), h, s, d, Use::input);
    codes = rows(dtype, h, s, d, Use::output);
    if (!bad()) scale = floats(h, s, use);
  };
  add(inputs.q, inputs.q_codes, inputs.q_scale, config.seen.dtype, given.h_q, given.s_q, given.d_qk);
  add(inputs.k, inputs.k_codes, inputs.k_scale, config.seen.dtype, given.h_kv, given.s_kv, given.d_qk);
  add(inputs.v, inputs.v_codes, inputs.v_scale, FA_E4M3, given.h_kv, given.s_kv, given.d_v);
  if ((inputs.k != nullptr && random_.one_in(2)) || bad()) {
    inputs.mean_given = random_.one_in(3);
    inputs.k_mean = floats(given.h_kv, given.d_qk, inputs.mean_given != 0 ? Use::input : Use::output);
    if (inputs.q != nullptr && random_.one_in(2)) {
      inputs.row_bias = floats(given.h_q, given.s_q, Use::output);
    }
  }
  spoil(&inputs.scales_given);
  if (!must_fail_) return bad() && random_.one_in(3) ? nullptr : give(inputs);
  inputs.k_mean = nullptr;  // behind the checks of tensors
  inputs.mean_given = 1;
  return write(inputs, sizeof inputs);
}

}  // namespace fa::fuzz
