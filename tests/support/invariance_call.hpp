#ifndef FA_TESTS_SUPPORT_INVARIANCE_CALL_HPP_
#define FA_TESTS_SUPPORT_INVARIANCE_CALL_HPP_

#include <cstdint>
#include <vector>

#include <fa/attention.hpp>

#include "support/invariance_case.hpp"

namespace fa::test {

/// A call's inputs, whose tensors and arrays `place` puts into the device's memory: `place(tensor)` gives a view,
/// `place(array)` a pointer, null for an empty one. `sink`: logits in that memory, if the configuration has them.
template <class PlaceTensor, class PlaceArray>
ForwardInputs inputs_of(const ChunkCall& call, const PlaceTensor& place, const PlaceArray& place_array,
                        const TensorView& sink = {}) {
  // Packed tensors are [total, h, d].
  const auto packed = [&](TensorView view, bool is_packed) {
    if (!is_packed) return view;
    TensorView result = view;
    result.rank = 3;
    result.shape = {view.shape[2], view.shape[1], view.shape[3], 0};
    result.strides = {view.strides[2], view.strides[1], view.strides[3], 0};
    return result;
  };
  const bool paged = call.columns > 0;
  ForwardInputs inputs{packed(place(call.q), call.varlen), packed(place(call.k), call.varlen && !paged),
                       packed(place(call.v), call.varlen && !paged)};
  inputs.sink = sink;
  PackedSequences& sequences = inputs.sequences;
  if (call.varlen || paged) {
    sequences.b = call.shape.b;
    sequences.max_s_kv = call.shape.s_kv;
  }
  if (call.varlen) sequences.max_s_q = call.shape.s_q;
  sequences.cu_seqlens_q = place_array(call.cu_q);
  sequences.cu_seqlens_kv = place_array(call.cu_kv);
  sequences.seqused_kv = place_array(call.used_kv);
  if (paged) {
    inputs.cache.block_table = TensorView(place_array(call.table), DType::i32, {call.shape.b, call.columns});
  }
  return inputs;
}

/// The outputs of a call by views of [b, h_q, s_q, d_v] and [b, h_q, s_q].
inline ForwardOutputs outputs_of(const ChunkCall& call, TensorView o, TensorView lse) {
  if (call.varlen) {
    o.rank = 3;
    o.shape = {o.shape[2], o.shape[1], o.shape[3], 0};
    o.strides = {o.strides[2], o.strides[1], o.strides[3], 0};
    lse.rank = 2;
    lse.shape = {lse.shape[1], lse.shape[2], 0, 0};
    lse.strides = {lse.strides[1], lse.strides[2], 0, 0};
  }
  return {o, lse};
}

}  // namespace fa::test

#endif  // FA_TESTS_SUPPORT_INVARIANCE_CALL_HPP_
