#include "api/known_calls.hpp"

#include <algorithm>
#include <bit>
#include <string>
#include <vector>

#include "api/build.hpp"
#include "api/packed.hpp"

namespace fa::api {
namespace {

/// A sum of numbers, each by a factor of its own: no multiplication waits for another.
class Code {
 public:
  void add(std::int64_t number) noexcept {
    sum_ += static_cast<std::uint64_t>(number) * factor_;
    factor_ += 2 * 0x9e3779b97f4a7c15u;
  }
  void add_shape(const TensorView& view) noexcept {
    for (std::size_t axis = 0; axis < 3; ++axis) add(view.shape[axis]);
  }
  void add_strides(const TensorView& view) noexcept {
    for (std::size_t axis = 0; axis < 3; ++axis) add(view.strides[axis]);
  }
  std::uint64_t get() const noexcept { return std::max<std::uint64_t>((sum_ ^ sum_ >> 29) * factor_, 1); }

 private:
  std::uint64_t sum_ = 0;
  std::uint64_t factor_ = 0x2545f4914f6cdd1du;
};

std::uintptr_t address(const void* data) noexcept {
  return reinterpret_cast<std::uintptr_t>(data);
}

template <class Inputs>
void add_shared(const Inputs& inputs, Code& code) noexcept {
  code.add_shape(inputs.q);
  code.add_shape(inputs.k);
  code.add_strides(inputs.q);
  code.add_strides(inputs.k);
  code.add_strides(inputs.v);
  code.add(static_cast<std::int64_t>((address(inputs.q.data) | address(inputs.k.data) | address(inputs.v.data)) % 16));
  code.add(inputs.sequences.b);
  code.add(inputs.sequences.max_s_q);
  code.add(inputs.sequences.max_s_kv);
  code.add(inputs.max_multiprocessors);
  for (const Captured& captured : inputs.captures) code.add(std::bit_cast<std::int64_t>(captured.number));
  if (!inputs.place) return;
  code.add(inputs.place->q);
  code.add(inputs.place->kv);
}

/// Whether both are there or not, at the same distance from a multiple of 16 bytes: no check, and no kernel, looks at
/// more of an address.
bool are_alike(const void* a, const void* b) noexcept {
  return (a == nullptr) == (b == nullptr) && (address(a) ^ address(b)) % 16 == 0;
}

bool are_alike(const TensorView& a, const TensorView& b) noexcept {
  if (a.rank != b.rank) return false;
  if (!a.defined()) return true;
  std::int64_t differs = 0;
  for (std::size_t axis = 0; axis < TensorView::kMaxRank; ++axis) {
    differs |= (a.shape[axis] ^ b.shape[axis]) | (a.strides[axis] ^ b.strides[axis]);
  }
  return differs == 0 && a.dtype == b.dtype && a.read_only == b.read_only && are_alike(a.data, b.data);
}

bool are_alike(const Captures& a, const Captures& b) noexcept {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const Captured& x, const Captured& y) {
    return std::bit_cast<std::uint64_t>(x.number) == std::bit_cast<std::uint64_t>(y.number) &&
           are_alike(x.tensor, y.tensor) && x.name == y.name;
  });
}

bool are_alike(const PackedSequences& a, const PackedSequences& b) noexcept {
  const auto& [count, cu_q, cu_kv, used_q, used_kv, max_s_q, max_s_kv] = a;
  return count == b.b && max_s_q == b.max_s_q && max_s_kv == b.max_s_kv && are_alike(cu_q, b.cu_seqlens_q) &&
         are_alike(cu_kv, b.cu_seqlens_kv) && are_alike(used_q, b.seqused_q) && are_alike(used_kv, b.seqused_kv);
}

bool are_alike(const PagedCache& a, const PagedCache& b) noexcept {
  const auto& [table, batch_index, seq_begin] = a;
  return are_alike(table, b.block_table) && are_alike(batch_index, b.batch_index) && are_alike(seq_begin, b.seq_begin);
}

/// What it is of is held to the call when it is launched.
bool are_alike(const MaskTiles& a, const MaskTiles& b) noexcept {
  return (a.data == nullptr) == (b.data == nullptr) && a.filled == b.filled;
}

bool are_alike(const StatisticsOutputs& a, const StatisticsOutputs& b) noexcept {
  const auto& [max_logit, entropy, column_sums, top_keys] = a;
  return are_alike(max_logit, b.max_logit) && are_alike(entropy, b.entropy) && are_alike(column_sums, b.column_sums) &&
         are_alike(top_keys, b.top_keys);
}

bool are_alike(const StatisticsGradients& a, const StatisticsGradients& b) noexcept {
  const auto& [entropy, dentropy, dmax_logit, dcolumn_sums] = a;
  return are_alike(entropy, b.entropy) && are_alike(dentropy, b.dentropy) && are_alike(dmax_logit, b.dmax_logit) &&
         are_alike(dcolumn_sums, b.dcolumn_sums);
}

}  // namespace

std::uint64_t code_of(const ForwardInputs& inputs, const ForwardOutputs& outputs) noexcept {
  Code code;
  add_shared(inputs, code);
  code.add_strides(outputs.o);
  code.add((outputs.lse.defined() ? 1 : 0) | (inputs.schedule.data != nullptr ? 2 : 0));
  return code.get();
}

std::uint64_t code_of(const BackwardInputs& inputs, const BackwardOutputs& outputs) noexcept {
  Code code;
  add_shared(inputs, code);
  code.add_strides(inputs.dout);
  code.add((outputs.dq.defined() ? 1 : 0) | (outputs.dk.defined() ? 2 : 0) | (outputs.dv.defined() ? 4 : 0));
  return code.get();
}

// Whoever gives a call another member meets it here: the bindings name them all.

bool are_alike(const ForwardInputs& known, const ForwardOutputs& to, const ForwardInputs& inputs,
               const ForwardOutputs& outputs) noexcept {
  const auto& [q, k, v, captures, sink, sequences, dropout, tiles, cache, schedule, prefixes, k_scale, v_scale, q_scale,
               row_bias, place, max_multiprocessors] = known;
  const auto& [o, lse, statistics, dump] = to;
  return are_alike(q, inputs.q) && are_alike(k, inputs.k) && are_alike(v, inputs.v) && are_alike(o, outputs.o) &&
         are_alike(lse, outputs.lse) && are_alike(captures, inputs.captures) && are_alike(sink, inputs.sink) &&
         are_alike(sequences, inputs.sequences) && are_alike(dropout.device, inputs.dropout.device) &&
         are_alike(tiles, inputs.tiles) && are_alike(cache, inputs.cache) &&
         (schedule.data == nullptr) == (inputs.schedule.data == nullptr) &&
         prefixes.empty() == inputs.prefixes.empty() && are_alike(k_scale, inputs.k_scale) &&
         are_alike(v_scale, inputs.v_scale) && are_alike(q_scale, inputs.q_scale) &&
         are_alike(row_bias, inputs.row_bias) && place == inputs.place &&
         max_multiprocessors == inputs.max_multiprocessors && are_alike(statistics, outputs.statistics) &&
         are_alike(dump.p, outputs.dump.p);
}

bool are_alike(const BackwardInputs& known, const BackwardOutputs& to, const BackwardInputs& inputs,
               const BackwardOutputs& outputs) noexcept {
  const auto& [q, k, v, o, lse, dout, dlse, captures, sink, sequences, dropout, tiles, place, max_multiprocessors,
               statistics] = known;
  const auto& [dq, dk, dv, gradients, dsink] = to;
  return are_alike(q, inputs.q) && are_alike(k, inputs.k) && are_alike(v, inputs.v) && are_alike(o, inputs.o) &&
         are_alike(lse, inputs.lse) && are_alike(dout, inputs.dout) && are_alike(dlse, inputs.dlse) &&
         are_alike(captures, inputs.captures) && are_alike(sink, inputs.sink) &&
         are_alike(sequences, inputs.sequences) && are_alike(dropout.device, inputs.dropout.device) &&
         are_alike(tiles, inputs.tiles) && place == inputs.place && max_multiprocessors == inputs.max_multiprocessors &&
         are_alike(dq, outputs.dq) && are_alike(dk, outputs.dk) && are_alike(dv, outputs.dv) &&
         are_alike(gradients, outputs.captures) && are_alike(dsink, outputs.dsink) &&
         are_alike(statistics, inputs.statistics);
}

namespace {

/// Moves checked views to where a call has its tensors. Those that it does not have stay undefined.
void move(TensorView& view, const TensorView& given) noexcept {
  if (view.defined()) view.data = given.data;
}

void move(plan::ForwardTensors& tensors, const ForwardInputs& inputs, const ForwardOutputs& outputs) noexcept {
  move(tensors.q, inputs.q);
  move(tensors.k, inputs.k);
  move(tensors.v, inputs.v.defined() ? inputs.v : inputs.k);  // without one it lies in k
  move(tensors.o, outputs.o);
  move(tensors.lse, outputs.lse);
  move(tensors.variant.sink, inputs.sink);
  move(tensors.k_scale, inputs.k_scale);
  move(tensors.v_scale, inputs.v_scale);
  move(tensors.q_scale, inputs.q_scale);
  move(tensors.row_bias, inputs.row_bias);
}

void move(plan::BackwardTensors& tensors, const BackwardInputs& inputs, const BackwardOutputs& outputs) noexcept {
  move(tensors.q, inputs.q);
  move(tensors.k, inputs.k);
  move(tensors.v, inputs.v);
  move(tensors.o, inputs.o);
  move(tensors.dout, inputs.dout);
  move(tensors.lse, inputs.lse);
  move(tensors.dlse, inputs.dlse);
  move(tensors.statistics.entropy, inputs.statistics.entropy);
  move(tensors.statistics.dentropy, inputs.statistics.dentropy);
  move(tensors.statistics.dmax_logit, inputs.statistics.dmax_logit);
  move(tensors.statistics.dcolumn_sums, inputs.statistics.dcolumn_sums);
  move(tensors.dq, outputs.dq);
  move(tensors.dk, outputs.dk);
  move(tensors.dv, outputs.dv);
  move(tensors.variant.sink, inputs.sink);
  move(tensors.variant.dsink, outputs.dsink);
}

/// What a kept call must not name: places that the device reads, prefixes that others are merged with, and gradients
/// that are cleared before.
bool fits(const ForwardInputs& inputs, const ForwardOutputs&) noexcept {
  return inputs.prefixes.empty() && (!inputs.place || inputs.place->begin == nullptr);
}

bool fits(const BackwardInputs& inputs, const BackwardOutputs& outputs) noexcept {
  return outputs.captures.size() == 0 && (!inputs.place || inputs.place->begin == nullptr);
}

/// The place of a capture among those that are given.
std::size_t place_of(const std::string& name, const Captures& given) noexcept {
  return static_cast<std::size_t>(std::ranges::find(given, name, &Captured::name) - given.begin());
}

/// With names that last as long as the configuration: those of a call last as long as the call.
Captures renamed(const Captures& given, const std::vector<expression::Capture>& declared) {
  Captures result;
  for (Captured captured : given) {
    captured.name = std::ranges::find(declared, captured.name, &expression::Capture::name)->name;
    result.add(captured);
  }
  return result;
}

plan::PackedArgs packed_args_of(const AttentionConfig& config, const ForwardInputs& inputs) noexcept {
  return packed_args(config, inputs.sequences, inputs.dropout, inputs.cache);
}

plan::PackedArgs packed_args_of(const AttentionConfig& config, const BackwardInputs& inputs) noexcept {
  return packed_args(config, inputs.sequences, inputs.dropout);
}

Schedule schedule_of(const ForwardInputs& inputs) noexcept {
  return inputs.schedule;
}

Schedule schedule_of(const BackwardInputs&) noexcept {
  return {};
}

}  // namespace

template <class Op>
bool KnownCalls<Op>::fit(const AttentionConfig& config) noexcept {
  const bool looks = wants_debug_kernels(config) || config.check_sequences;
  const bool statistics = Op::kOperation == Operation::forward && config.statistics.any();
  return !looks && !statistics && !config.zero_padding;
}

template <class Op>
typename CallMemo<typename KnownCalls<Op>::Entry>::Held KnownCalls<Op>::find(std::uint64_t code, const Inputs& inputs,
                                                                             const Outputs& outputs) noexcept {
  auto held = memo_.find(code);
  if (!held || !are_alike(held->inputs, held->outputs, inputs, outputs)) return {};
  return held;
}

template <class Op>
bool KnownCalls<Op>::knows(const Inputs& inputs, const Outputs& outputs) noexcept {
  const auto held = find(code_of(inputs, outputs), inputs, outputs);
  return held && operation_.is_current(held->planned);
}

template <class Op>
bool KnownCalls<Op>::run(std::uint64_t code, const Inputs& inputs, const Outputs& outputs, Stream stream,
                         const Workspace& workspace) {
  const auto known = find(code, inputs, outputs);
  if (!known || !operation_.is_current(known->planned)) return false;
  CallAddresses at;
  name_memory(inputs, outputs, at);
  name_given_memory(inputs, workspace, at);
  if (!known->spans.are_apart(at)) check_disjoint(inputs, outputs, workspace);
  const driver::ContextScope scope(context_.context());
  typename Op::Tensors tensors = known->tensors;
  move(tensors, inputs, outputs);
  const std::size_t count = functions_.program.captures.size();
  if (count == 0) {
    launch(*known, inputs, tensors, stream, workspace);
    return true;
  }
  std::array<expression::CapturedView, Captures::kMax> captures = known->captures;
  for (std::size_t i = 0; i < count; ++i) move(captures[i].view, inputs.captures.begin()[known->given_as[i]].tensor);
  tensors.variant.captures = {captures.data(), count};
  launch(*known, inputs, tensors, stream, workspace);
  return true;
}

template <class Op>
void KnownCalls<Op>::launch(const Entry& known, const Inputs& inputs, const typename Op::Tensors& tensors,
                            Stream stream, const Workspace& workspace) const {
  operation_.launch(known.planned, tensors, packed_args_of(config_, inputs), {inputs.tiles, known.numbers},
                    schedule_of(inputs), stream, workspace);
}

template <class Op>
void KnownCalls<Op>::keep(std::uint64_t code, const Inputs& inputs, const Outputs& outputs,
                          const typename Op::Tensors& tensors, const GivenTiles& tiles,
                          const Planned& planned) noexcept {
  if (!fits(inputs, outputs) || !operation_.is_current(planned) || !memo_.was_asked(code)) return;
  memo_.put(code, [&] {
    Entry entry{inputs, outputs, tensors, {}, {}, tiles.numbers, spans_of(inputs, outputs), planned};
    const std::vector<expression::Capture>& declared = functions_.program.captures;
    entry.inputs.captures = renamed(inputs.captures, declared);
    entry.tensors.variant.captures = {};
    for (std::size_t i = 0; i < declared.size(); ++i) {
      entry.captures[i] = tensors.variant.captures[i];
      entry.given_as[i] = static_cast<std::uint8_t>(place_of(declared[i].name, inputs.captures));
    }
    return entry;
  });
}

template class KnownCalls<ForwardOperation>;
template class KnownCalls<BackwardOperation>;

}  // namespace fa::api
