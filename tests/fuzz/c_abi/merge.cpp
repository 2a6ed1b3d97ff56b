// Arguments of merges of partial results.

#include <algorithm>

#include "fuzz/c_abi/arguments.hpp"

namespace fa::fuzz {

MergeArguments Arguments::merge(const GivenConfig& config) {
  const Sizes given = sizes(config);
  const bool packed = config.seen.varlen != 0;
  const std::int32_t own = config.seen.dtype;
  const auto o_of = [&](std::int64_t times, Use use) {
    const std::int32_t dtype = own != FA_F64 && random_.one_in(3) ? FA_F32 : own;
    return packed ? tensor(dtype, {times * given.b * given.s_q, given.h_q, given.d_v}, use, true)
                  : tensor(dtype, {times * given.b, given.h_q, given.s_q, given.d_v}, use, true);
  };
  const auto lse_of = [&](Use use) {
    const std::int32_t dtype = own == FA_F64 ? FA_F64 : FA_F32;
    return packed ? tensor(dtype, {given.h_q, given.b * given.s_q}, use, false)
                  : tensor(dtype, {given.b, given.h_q, given.s_q}, use, false);
  };
  std::vector<fa_state> states(static_cast<std::size_t>(random_.between(1, 5)));
  for (fa_state& state : states) {
    const bool in_place = random_.one_in(8);
    state.o = o_of(1, in_place ? Use::output : Use::input);
    state.lse = bad() && random_.one_in(4) ? nullptr : lse_of(in_place ? Use::output : Use::input);
  }
  fa_merge_inputs inputs{};
  inputs.states = array(states);
  inputs.state_count = states.size();
  // States that overlap are as good as others: a stack of one memory needs no more of it.
  if (states.size() == 1 && random_.one_in(2)) inputs.stacked = random_.between(1, 40);
  if (bad()) inputs.stride_o = random_.wild();
  spoil(&inputs.stacked);
  if (random_.one_in(3)) inputs.sink = tensor(own == FA_F64 ? FA_F64 : FA_F32, {given.h_q}, Use::input, false);
  if (bad() && random_.one_in(4)) inputs.state_count = static_cast<std::uint64_t>(random_.wild());
  const bool sum = random_.one_in(4);
  inputs.sum = sum ? 1 : 0;
  if (sum && !(bad() && random_.one_in(4))) {  // neither logarithms nor a sink
    inputs.sink = nullptr;
    for (fa_state& state : states) state.lse = nullptr;
    inputs.states = array(states);
  }
  const bool of_a_state = random_.one_in(3);
  fa_forward_outputs outputs{};
  outputs.o = of_a_state ? states.front().o : o_of(1, Use::output);
  outputs.lse = sum ? nullptr : of_a_state ? states.front().lse : random_.one_in(4) ? nullptr : lse_of(Use::output);
  if (must_fail_ || inputs.stride_o != 0 || inputs.stacked > 40) {  // what is valid may not be in memory
    inputs.state_count = 17;
    return {write(inputs, sizeof inputs), write(outputs, sizeof outputs)};
  }
  if (inputs.state_count > states.size()) inputs.state_count = std::max<std::uint64_t>(inputs.state_count, 17);
  return {bad() && random_.one_in(3) ? nullptr : give(inputs), bad() && random_.one_in(3) ? nullptr : give(outputs)};
}

const fa_merge_shape* Arguments::merge_shape(const GivenConfig& config) {
  if (bad() && random_.one_in(4)) return nullptr;
  fa_merge_shape value{};
  value.has_states_dtype = random_.one_in(2);
  value.states_dtype = random_.one_in(2) ? FA_F32 : config.seen.dtype;
  value.mixed = random_.one_in(3);
  value.has_result_dtype = random_.one_in(2);
  value.result_dtype = random_.one_in(2) ? FA_F32 : config.seen.dtype;
  value.unaligned = random_.one_in(3);
  value.sum = random_.one_in(3);
  for (std::int32_t* const field : {&value.has_states_dtype, &value.states_dtype, &value.mixed, &value.result_dtype}) {
    spoil(field);
  }
  return give(value);
}

}  // namespace fa::fuzz
