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
  if (part.elements() != 0) {  // else there may be no memory to count from
    part.data = static_cast<std::byte*>(view.data) +
                span.first * view.strides[2] * static_cast<std::int64_t>(size_of(view.dtype));
  }
  return part;
}

/// Of a tensor [b, ...] what belongs to one sequence.
TensorView entry_of(const TensorView& view, std::int64_t sequence) {
  TensorView part = view;
  if (!view.defined()) return part;
  part.shape[0] = 1;
  part.data =
      static_cast<std::byte*>(view.data) + sequence * view.strides[0] * static_cast<std::int64_t>(size_of(view.dtype));
  return part;
}

/// The scales of heads, [b, h, s], of one sequence; or of its keys, [1, h, total].
TensorView scales_of(const TensorView& view, std::int64_t sequence, const Span& keys) {
  return view.shape[0] == 1 ? rows_of(view, keys) : entry_of(view, sequence);
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

/// Gradients that all sequences add to, in double until the last has.
class VariantSums {
 public:
  explicit VariantSums(const VariantArgs& args)
      : args_(args), captures_(args.captures.begin(), args.captures.end()), gradients_(captures_.size()) {
    dsink_ = summed(args.dsink, &dsink_values_);
    if (args.dsink.defined()) dsink_.strides[0] = 1;
    for (std::size_t i = 0; i < captures_.size(); ++i) {
      captures_[i].gradient = summed(args.captures[i].gradient, &gradients_[i]);
    }
  }

  void add_to(VariantArgs* part) const {
    part->captures = captures_;
    part->dsink = dsink_;
    part->accumulate = true;
  }

  void store() const {
    for (std::size_t h = 0; h < dsink_values_.size(); ++h) {
      store_element(args_.dsink, static_cast<std::int64_t>(h) * args_.dsink.strides[0], dsink_values_[h]);
    }
    for (std::size_t i = 0; i < captures_.size(); ++i) {  // which have no gaps between elements
      for (std::size_t n = 0; n < gradients_[i].size(); ++n) {
        store_element(args_.captures[i].gradient, static_cast<std::int64_t>(n), gradients_[i][n]);
      }
    }
  }

 private:
  static TensorView summed(const TensorView& target, std::vector<double>* values) {
    TensorView view = target;
    if (!target.defined()) return view;
    values->assign(static_cast<std::size_t>(target.elements()), 0.0);
    view.data = values->data();
    view.dtype = DType::f64;
    return view;
  }

  const VariantArgs& args_;
  std::vector<expression::CapturedView> captures_;
  TensorView dsink_;
  std::vector<double> dsink_values_;
  std::vector<std::vector<double>> gradients_;  // of captures
};

}  // namespace

ForwardArgs call_of_sequence(const ForwardArgs& args, const PackedSequences& sequences, std::int64_t i) {
  const Span rows = span_of(sequences.cu_seqlens_q, sequences.seqused_q, i);
  const Span keys = span_of(sequences.cu_seqlens_kv, sequences.seqused_kv, i);
  ForwardArgs part = args;
  part.q = rows_of(args.q, rows);
  part.k = rows_of(args.k, keys);
  part.v = rows_of(args.v, keys);
  part.o = rows_of(args.o, rows);
  part.lse = rows_of(args.lse, rows);
  part.q_scale = rows_of(args.q_scale, rows);
  part.row_bias = rows_of(args.row_bias, rows);
  part.statistics.max_logit = rows_of(args.statistics.max_logit, rows);
  part.statistics.entropy = rows_of(args.statistics.entropy, rows);
  part.statistics.column_sums = rows_of(args.statistics.column_sums, keys);
  part.statistics.top_keys = entry_of(args.statistics.top_keys, i);
  part.k_scale = scales_of(args.k_scale, i, keys);
  part.v_scale = scales_of(args.v_scale, i, keys);
  part.dropout = args.dropout.part(i * args.q.shape[1], 0, 0);
  part.variant.place.b = i;
  return part;
}

void forward(const ForwardArgs& args, const PackedSequences& sequences, bool clear) {
  for (std::int64_t i = 0; i < sequences.b; ++i) forward(call_of_sequence(args, sequences, i));
  if (clear) clear_padding(args, sequences);
}

TensorView rows_of_sequence(const TensorView& view, const PackedSequences& sequences, std::int64_t i) {
  return rows_of(view, span_of(sequences.cu_seqlens_q, sequences.seqused_q, i));
}

TensorView keys_of_sequence(const TensorView& view, const PackedSequences& sequences, std::int64_t i) {
  return rows_of(view, span_of(sequences.cu_seqlens_kv, sequences.seqused_kv, i));
}

void clear_padding(const ForwardArgs& args, const PackedSequences& sequences) {
  clear_rows(args.o, sequences.cu_seqlens_q, sequences.seqused_q, sequences.b, 0);
  for (const TensorView& view : {args.lse, args.statistics.max_logit}) {
    clear_rows(view, sequences.cu_seqlens_q, sequences.seqused_q, sequences.b,
               -std::numeric_limits<double>::infinity());
  }
  clear_rows(args.statistics.entropy, sequences.cu_seqlens_q, sequences.seqused_q, sequences.b, 0);
  if (sequences.cu_seqlens_kv == nullptr) return;  // over a KV cache there is a sum for each position
  clear_rows(args.statistics.column_sums, sequences.cu_seqlens_kv, sequences.seqused_kv, sequences.b, 0);
}

BackwardArgs call_of_sequence(const BackwardArgs& args, const PackedSequences& sequences, std::int64_t i) {
  const Span rows = span_of(sequences.cu_seqlens_q, sequences.seqused_q, i);
  const Span keys = span_of(sequences.cu_seqlens_kv, sequences.seqused_kv, i);
  BackwardArgs part = args;
  for (TensorView BackwardArgs::*tensor :
       {&BackwardArgs::q, &BackwardArgs::o, &BackwardArgs::lse, &BackwardArgs::dout, &BackwardArgs::dlse,
        &BackwardArgs::dq, &BackwardArgs::entropy, &BackwardArgs::dentropy, &BackwardArgs::dmax_logit}) {
    part.*tensor = rows_of(args.*tensor, rows);
  }
  for (TensorView BackwardArgs::*tensor :
       {&BackwardArgs::k, &BackwardArgs::v, &BackwardArgs::dk, &BackwardArgs::dv, &BackwardArgs::dcolumn_sums}) {
    part.*tensor = rows_of(args.*tensor, keys);
  }
  part.dropout = args.dropout.part(i * args.q.shape[1], 0, 0);
  part.variant.place.b = i;
  part.variant.accumulate = true;
  return part;
}

void backward(const BackwardArgs& args, const PackedSequences& sequences, bool clear) {
  VariantSums sums(args.variant);
  for (std::int64_t i = 0; i < sequences.b; ++i) {
    BackwardArgs part = call_of_sequence(args, sequences, i);
    sums.add_to(&part.variant);
    backward(part);
  }
  sums.store();
  if (!clear) return;
  clear_rows(args.dq, sequences.cu_seqlens_q, sequences.seqused_q, sequences.b, 0);
  clear_rows(args.dk, sequences.cu_seqlens_kv, sequences.seqused_kv, sequences.b, 0);
  clear_rows(args.dv, sequences.cu_seqlens_kv, sequences.seqused_kv, sequences.b, 0);
}

}  // namespace fa::reference
