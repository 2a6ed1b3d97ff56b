#ifndef FA_SRC_API_CALL_MEMORY_HPP_
#define FA_SRC_API_CALL_MEMORY_HPP_

#include <array>
#include <cstddef>
#include <cstdint>

#include <fa/attention.hpp>

#include "api/views.hpp"

/// The memory that a call names, told in one order to whoever asks: to checks that know names, and to those of a call
/// like an earlier one, which need addresses alone.
namespace fa::api {

/// Tells `to` what forward and backward both read.
template <class Inputs, class To>
void name_shared_memory(const Inputs& inputs, std::int64_t b, To& to) {
  const PackedSequences& sequences = inputs.sequences;
  to.add_read("q", inputs.q);
  to.add_read("k", inputs.k);
  to.add_read("v", inputs.v);
  if constexpr (requires { inputs.k_scale; }) {
    to.add_read("k_scale", inputs.k_scale);
    to.add_read("v_scale", inputs.v_scale);
    to.add_read("q_scale", inputs.q_scale);
    to.add_read("row_bias", inputs.row_bias);
  }
  to.add_read("sink", inputs.sink);
  for (const Captured& captured : inputs.captures) {
    to.add_read({captured.name, Label::Of::capture}, captured.tensor);
  }
  to.add_read("cu_seqlens_q", sequences.cu_seqlens_q, DType::i32, b + 1);
  to.add_read("cu_seqlens_kv", sequences.cu_seqlens_kv, DType::i32, b + 1);
  to.add_read("seqused_q", sequences.seqused_q, DType::i32, b);
  to.add_read("seqused_kv", sequences.seqused_kv, DType::i32, b);
  to.add_read("dropout.device", inputs.dropout.device, DType::f64, 2);  // of 8 bytes as well
  to.add_read("place.begin", inputs.place ? inputs.place->begin : nullptr, DType::f64, 4);
}

template <class To>
void name_memory(const ForwardInputs& inputs, const ForwardOutputs& outputs, To& to) {
  const PagedCache& cache = inputs.cache;
  const PackedSequences& sequences = inputs.sequences;
  const bool dense = sequences.b == 0 && sequences.cu_seqlens_q == nullptr;  // over a cache b may be left to q
  const std::int64_t b = dense ? inputs.q.shape[0] : sequences.b;
  name_shared_memory(inputs, b, to);
  to.add_read("cache.block_table", cache.block_table);
  to.add_read("cache.batch_index", cache.batch_index, DType::i32, b);
  to.add_read("cache.seq_begin", cache.seq_begin, DType::i32, b);
  to.add_written("o", outputs.o);
  to.add_written("lse", outputs.lse);
  to.add_written("max_logit", outputs.statistics.max_logit);
  to.add_written("entropy", outputs.statistics.entropy);
  to.add_written("column_sums", outputs.statistics.column_sums);
  to.add_written("top_keys", outputs.statistics.top_keys);
  to.add_written("dump.p", outputs.dump.p);
}

template <class To>
void name_memory(const BackwardInputs& inputs, const BackwardOutputs& outputs, To& to) {
  name_shared_memory(inputs, inputs.sequences.b, to);
  to.add_read("o", inputs.o);
  to.add_read("lse", inputs.lse);
  to.add_read("dout", inputs.dout);
  to.add_read("dlse", inputs.dlse);
  to.add_read("entropy", inputs.statistics.entropy);
  to.add_read("dentropy", inputs.statistics.dentropy);
  to.add_read("dmax_logit", inputs.statistics.dmax_logit);
  to.add_read("dcolumn_sums", inputs.statistics.dcolumn_sums);
  to.add_written("dq", outputs.dq);
  to.add_written("dk", outputs.dk);
  to.add_written("dv", outputs.dv);
  to.add_written("dsink", outputs.dsink);
  for (const Captured& captured : outputs.captures) {
    to.add_written({captured.name, Label::Of::gradient}, captured.tensor);
  }
}

/// Tells `to` what else a call is given to write to.
template <class To>
void name_given_memory(const ForwardInputs& inputs, const Workspace& workspace, To& to) {
  to.add_memory("workspace", workspace.data, workspace.size);
  to.add_memory("tiles", inputs.tiles.data, inputs.tiles.size);
  to.add_memory("schedule", inputs.schedule.data, inputs.schedule.size);
}

template <class To>
void name_given_memory(const BackwardInputs& inputs, const Workspace& workspace, To& to) {
  to.add_memory("workspace", workspace.data, workspace.size);
  to.add_memory("tiles", inputs.tiles.data, inputs.tiles.size);
}

/// Where the tensors of a call, and the memory that it is given, lie.
class CallAddresses {
 public:
  void add_read(const Label&, const TensorView& view) noexcept {
    if (view.defined()) read_[reads_++] = view.data;
  }
  void add_read(const Label&, const void* array, DType, std::int64_t) noexcept {
    if (array != nullptr) read_[reads_++] = array;
  }
  void add_written(const Label&, const TensorView& view) noexcept {
    if (view.defined()) written_[writes_++] = view.data;
  }
  void add_memory(const Label&, const void* data, std::size_t bytes) noexcept {
    if (data == nullptr || bytes == 0) return;
    memory_[memories_++] = {data, static_cast<std::int64_t>(bytes < kMaxReach ? bytes : kMaxReach) - 1};
  }

 private:
  friend class CallSpans;

  struct Memory {
    const void* data;
    std::int64_t high;  ///< bytes to its last one
  };

  // Of what is there alone: nothing else is read.
  std::array<const void*, kMostTensors> read_;
  std::array<const void*, kMostTensors> written_;
  std::array<Memory, kMostMemory> memory_;
  std::size_t reads_ = 0;
  std::size_t writes_ = 0;
  std::size_t memories_ = 0;
};

/// From which byte to which the tensors of a checked call reach, wherever they lie.
class CallSpans {
 public:
  CallSpans() = default;
  explicit CallSpans(const CallTensors& tensors) noexcept;

  /// Whether what is written, and given memory, is apart from everything else, for certain, where the tensors of a call
  /// of the same shapes and strides lie.
  bool are_apart(const CallAddresses& at) const noexcept;

 private:
  struct Span {
    std::int64_t low, high;  ///< bytes from the first element; of nothing far apart from everything
  };
  static Span span_of(const Reach& reach) noexcept;

  std::array<Span, kMostTensors> read_;
  std::array<Span, kMostTensors> written_;
  std::size_t reads_ = 0;
  std::size_t writes_ = 0;
};

CallSpans spans_of(const ForwardInputs& inputs, const ForwardOutputs& outputs);
CallSpans spans_of(const BackwardInputs& inputs, const BackwardOutputs& outputs);

/// Holds what a call writes, and the memory that it is given, against everything else that it names. Throws
/// fa::Error(invalid_argument) when an output, or that memory, shares bytes with another. The tensors have passed
/// check_forward and check_variants.
void check_disjoint(const ForwardInputs& inputs, const ForwardOutputs& outputs, const Workspace& workspace);

/// The same of backward, with its gradients of captures and sinks.
void check_disjoint(const BackwardInputs& inputs, const BackwardOutputs& outputs, const Workspace& workspace);

}  // namespace fa::api

#endif  // FA_SRC_API_CALL_MEMORY_HPP_
