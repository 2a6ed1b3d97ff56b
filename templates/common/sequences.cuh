#ifndef FA_TEMPLATES_COMMON_SEQUENCES_CUH_
#define FA_TEMPLATES_COMMON_SEQUENCES_CUH_

#include <common/constants.cuh>
#include <common/packed_params.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>

namespace fa::kernel {

FA_DEVICE int clamp(int value, int low, int high) {
  return value < low ? low : value > high ? high : value;
}

/// The rows of one sequence in a packed tensor.
struct Span {
  int first;
  int count;
};

/// Sequence `batch` by its cumulative lengths. Whatever these hold, the span lies in [0, total).
FA_DEVICE Span span_of(const int32_t* cu, const int32_t* used, int batch, int total, int longest) {
  Span span;
  span.first = clamp(ptx::ld_global(cu + batch), 0, total);
  span.count = clamp(ptx::ld_global(cu + batch + 1), span.first, total) - span.first;
  if (used != nullptr) span.count = clamp(ptx::ld_global(used + batch), 0, span.count);
  if (span.count > longest) span.count = longest;
  return span;
}

/// A tile of `kTile` rows is found by its slot: the slots of sequence i start at cu[i] * rows_each / kTile + i. That
/// leaves each sequence as many slots as it has tiles, and at most one more, so that a grid of total * rows_each /
/// kTile + b slots needs to know no length, and no kernel has to run ahead to count.
template <int kTile>
FA_DEVICE int first_slot(const int32_t* cu, int batch, int total, int rows_each) {
  return clamp(ptx::ld_global(cu + batch), 0, total) * rows_each / kTile + batch;
}

/// The last sequence of which `starts(i)` says that it starts at or before some place; the first if none does. A warp
/// asks for 32 sequences at a time, so that thousands take three steps. Called by whole warps.
template <class Starts>
FA_DEVICE int last_sequence(int b, Starts starts) {
  const int lane = ptx::thread_index() % kWarpSize;
  int first = 0;
  int count = b;
  while (count > 1) {
    const int step = ceil_div(count, kWarpSize);
    const bool yes = lane * step < count && starts(first + lane * step);
    const int before = ptx::popc(ptx::vote_ballot(yes));
    const int skipped = before > 1 ? (before - 1) * step : 0;
    first += skipped;
    count = count - skipped < step ? count - skipped : step;
  }
  return first;
}

/// The sequence that owns `slot`.
template <int kTile>
FA_DEVICE int sequence_of_slot(const int32_t* cu, int b, int total, int rows_each, int slot) {
  return last_sequence(b, [&](int i) { return first_slot<kTile>(cu, i, total, rows_each) <= slot; });
}

/// What a kernel knows of the sequence that it works on; the names are those that a dense batch has in its parameters.
struct Sequence {
  int s_q;
  int s_kv;
  int causal_shift;
  int diagonal;   // row i stands at key i + diagonal
  int first_row;  // in the packed q
  int first_key;  // in the packed k and v
  int group;
  int splits;
  int m_blocks;          // query tiles, where a kernel walks them
  int padded_rows;       // s_q rounded up to the rows of an accumulator fragment
  int first_padded_row;  // in the workspace of the backward
};

template <class Params>
FA_DEVICE Sequence sequence_of(const Params& params, int batch) {
  const SequenceParams& from = params.sequences;
  const Span rows = span_of(from.cu_q, from.used_q, batch, from.total_q, params.s_q);
  const Span keys = span_of(from.cu_kv, from.used_kv, batch, from.total_kv, params.s_kv);
  Sequence sequence;
  sequence.s_q = rows.count;
  sequence.s_kv = keys.count;
  sequence.diagonal = from.bottom_right != 0 ? keys.count - rows.count : 0;
  sequence.causal_shift = sequence.diagonal + params.causal_shift;
  sequence.first_row = rows.first;
  sequence.first_key = keys.first;
  sequence.group = params.group;
  sequence.splits = 1;
  sequence.m_blocks = 0;
  sequence.padded_rows = 0;
  sequence.first_padded_row = 0;
  return sequence;
}

template <bool kVarlen, class Params>
struct BatchEntryOf {
  using Type = const Params&;
};
template <class Params>
struct BatchEntryOf<true, Params> {
  using Type = Sequence;
};
/// The lengths of a batch entry: of a dense batch the launch parameters themselves.
template <bool kVarlen, class Params>
using BatchEntry = typename BatchEntryOf<kVarlen, Params>::Type;

/// Offset of a batch entry's first row (of q, o, their gradients, and row statistics), and of its first key.
template <bool kVarlen, class Entry>
FA_DEVICE int64_t offset_of_rows(const Entry& entry, int batch, int64_t stride_b, int64_t stride_s) {
  if constexpr (kVarlen) {
    return entry.first_row * stride_s;
  } else {
    return batch * stride_b;
  }
}
template <bool kVarlen, class Entry>
FA_DEVICE int64_t offset_of_keys(const Entry& entry, int batch, int64_t stride_b, int64_t stride_s) {
  if constexpr (kVarlen) {
    return entry.first_key * stride_s;
  } else {
    return batch * stride_b;
  }
}

template <bool kVarlen, class Params>
FA_DEVICE BatchEntry<kVarlen, Params> batch_entry(const Params& params, int batch) {
  if constexpr (kVarlen) {
    return sequence_of(params, batch);
  } else {
    return params;
  }
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_SEQUENCES_CUH_
