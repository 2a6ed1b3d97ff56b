#include "reference/packed.hpp"

#include <limits>
#include <vector>

#include "reference/geometry.hpp"

namespace fa::reference {
namespace {

/// Rows of one sequence in a packed tensor.
struct Span {
  std::int64_t first;
  std::int64_t count;
};

Span span_of(const std::int32_t* cu, const std::int32_t* used, std::int64_t sequence) {
  return {cu[sequence], used != nullptr ? used[sequence] : cu[sequence + 1] - cu[sequence]};
}

/// The rows of a tensor [1, h, total, ...] that `span` has.
TensorView rows_of(const TensorView& view, const Span& span) {
  TensorView part = view;
  if (!view.defined()) return part;
  part.shape[2] = span.count;
  if (span.count != 0) {
    part.data = static_cast<std::byte*>(view.data) +
                span.first * view.strides[2] * static_cast<std::int64_t>(size_of(view.dtype));
  }
  return part;
}

void clear_rows(const TensorView& view, const std::int32_t* cu, const std::int32_t* used, std::int64_t sequences,
                double value) {
  if (!view.defined()) return;
  std::vector<bool> taken(static_cast<std::size_t>(view.shape[2]), false);
  for (std::int64_t i = 0; i < sequences; ++i) {
    const Span span = span_of(cu, used, i);
    for (std::int64_t row = span.first; row < span.first + span.count; ++row)
      taken[static_cast<std::size_t>(row)] = true;
  }
  const std::int64_t d = view.rank == 4 ? view.shape[3] : 1;
  for (std::int64_t h = 0; h < view.shape[1]; ++h) {
    for (std::int64_t row = 0; row < view.shape[2]; ++row) {
      if (taken[static_cast<std::size_t>(row)]) continue;
      for (std::int64_t c = 0; c < d; ++c) {
        store_element(view, row_offset(view, 0, h, row) + (view.rank == 4 ? c * view.strides[3] : 0), value);
      }
    }
  }
}

}  // namespace

void forward(const ForwardArgs& args, const PackedSequences& sequences, bool clear) {
  for (std::int64_t i = 0; i < sequences.b; ++i) {
    const Span rows = span_of(sequences.cu_seqlens_q, sequences.seqused_q, i);
    const Span keys = span_of(sequences.cu_seqlens_kv, sequences.seqused_kv, i);
    ForwardArgs part = args;
    part.q = rows_of(args.q, rows);
    part.k = rows_of(args.k, keys);
    part.v = rows_of(args.v, keys);
    part.o = rows_of(args.o, rows);
    part.lse = rows_of(args.lse, rows);
    part.dropout = args.dropout.part(i * args.q.shape[1], 0, 0);
    forward(part);
  }
  if (!clear) return;
  clear_rows(args.o, sequences.cu_seqlens_q, sequences.seqused_q, sequences.b, 0);
  clear_rows(args.lse, sequences.cu_seqlens_q, sequences.seqused_q, sequences.b,
             -std::numeric_limits<double>::infinity());
}

void backward(const BackwardArgs& args, const PackedSequences& sequences, bool clear) {
  for (std::int64_t i = 0; i < sequences.b; ++i) {
    const Span rows = span_of(sequences.cu_seqlens_q, sequences.seqused_q, i);
    const Span keys = span_of(sequences.cu_seqlens_kv, sequences.seqused_kv, i);
    BackwardArgs part = args;
    for (TensorView BackwardArgs::*tensor : {&BackwardArgs::q, &BackwardArgs::o, &BackwardArgs::lse,
                                             &BackwardArgs::dout, &BackwardArgs::dlse, &BackwardArgs::dq}) {
      part.*tensor = rows_of(args.*tensor, rows);
    }
    for (TensorView BackwardArgs::*tensor :
         {&BackwardArgs::k, &BackwardArgs::v, &BackwardArgs::dk, &BackwardArgs::dv}) {
      part.*tensor = rows_of(args.*tensor, keys);
    }
    part.dropout = args.dropout.part(i * args.q.shape[1], 0, 0);
    backward(part);
  }
  if (!clear) return;
  clear_rows(args.dq, sequences.cu_seqlens_q, sequences.seqused_q, sequences.b, 0);
  clear_rows(args.dk, sequences.cu_seqlens_kv, sequences.seqused_kv, sequences.b, 0);
  clear_rows(args.dv, sequences.cu_seqlens_kv, sequences.seqused_kv, sequences.b, 0);
}

}  // namespace fa::reference
