#include "reference/paged.hpp"

#include "reference/packed.hpp"

namespace fa::reference {
namespace {

/// Batch entry `i` of a tensor [b, h, s, ...].
TensorView entry_of(const TensorView& view, std::int64_t i) {
  TensorView part = view;
  if (!view.defined()) return part;
  part.shape[0] = 1;
  if (part.elements() != 0) {  // else there may be no memory to count from
    part.data =
        static_cast<std::byte*>(view.data) + i * view.strides[0] * static_cast<std::int64_t>(size_of(view.dtype));
  }
  return part;
}

/// Scales of heads, which all keys share.
TensorView of_any_page(TensorView scales) {
  scales.strides[0] = scales.strides[2] = 0;
  return scales;
}

PagedKeys keys_of(const PackedSequences& sequences, const PagedCache& cache, std::int64_t i) {
  // A request without keys has no entry to point to.
  static constexpr std::int32_t kNone = 0;
  const TensorView& table = cache.block_table;
  const std::int64_t row = cache.batch_index == nullptr ? i : cache.batch_index[i];
  PagedKeys keys;
  keys.s_kv = sequences.seqused_kv[i];
  keys.begin = cache.seq_begin == nullptr ? 0 : cache.seq_begin[i];
  if (!table.defined()) {
    keys.row = row;
    return keys;
  }
  keys.entries = table.elements() == 0 ? &kNone : static_cast<const std::int32_t*>(table.data) + row * table.strides[0];
  keys.stride = table.strides[1];
  return keys;
}

}  // namespace

ForwardArgs call_of_request(const ForwardArgs& args, const PackedSequences& sequences, const PagedCache& cache,
                            std::int64_t i) {
  const bool packed = sequences.cu_seqlens_q != nullptr;
  ForwardArgs part = args;
  for (TensorView ForwardArgs::*tensor :
       {&ForwardArgs::q, &ForwardArgs::o, &ForwardArgs::lse, &ForwardArgs::q_scale, &ForwardArgs::row_bias}) {
    part.*tensor = packed ? rows_of_sequence(args.*tensor, sequences, i) : entry_of(args.*tensor, i);
  }
  for (TensorView RowStatistics::*tensor : {&RowStatistics::max_logit, &RowStatistics::entropy}) {
    const TensorView& whole = args.statistics.*tensor;
    part.statistics.*tensor = packed ? rows_of_sequence(whole, sequences, i) : entry_of(whole, i);
  }
  part.statistics.column_sums = entry_of(args.statistics.column_sums, i);
  part.statistics.top_keys = entry_of(args.statistics.top_keys, i);
  if (args.k_scale_of_requests) part.k_scale = of_any_page(entry_of(args.k_scale, i));
  if (args.v_scale_of_requests) part.v_scale = of_any_page(entry_of(args.v_scale, i));
  part.paged = keys_of(sequences, cache, i);
  part.variant.place.b = i;
  return part;
}

void forward(const ForwardArgs& args, const PackedSequences& sequences, const PagedCache& cache, bool clear) {
  for (std::int64_t i = 0; i < sequences.b; ++i) forward(call_of_request(args, sequences, cache, i));
  if (clear) clear_padding(args, sequences);
}

}  // namespace fa::reference
