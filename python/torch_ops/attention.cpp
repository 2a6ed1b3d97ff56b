#include "attention.hpp"

#include <array>
#include <utility>

#include "library.hpp"

namespace fa_torch {
namespace {

std::string shown(const Tensor& tensor) {
  std::string text = "[";
  for (const std::int64_t size : tensor.sizes()) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

void check_main(const char* name, const Tensor& tensor, const Tensor& q, bool varlen) {
  const std::string named = name;
  if (tensor.rank() != (varlen ? 3 : 4)) {
    throw std::invalid_argument(named + " has shape " + shown(tensor) + ": accepted is " +
                                (varlen ? "[total, h, d]" : "[b, h, s, d]"));
  }
  const std::int32_t dtype = fa_dtype_of(tensor.dtype());
  if (dtype < 0 || dtype == FA_I32) {
    throw std::invalid_argument(named + " is " + name_of(tensor.dtype()) +
                                ": accepted are torch.float16, torch.bfloat16, torch.float32 and torch.float64");
  }
  if (tensor.dtype() != q.dtype()) {
    throw std::invalid_argument(named + " is " + name_of(tensor.dtype()) + ": accepted is what q is, " +
                                name_of(q.dtype()));
  }
  if (!(tensor.place() == q.place()))
    throw std::invalid_argument(named + " is not where q is: accepted is the device of q");
}

void check_rest(const Rest& rest, const Options& options, const Tensor& q) {
  const auto beside = [&](const std::string& name, const Tensor& tensor) {
    if (tensor && !(tensor.place() == q.place())) {
      throw std::invalid_argument(name + " is not where q is: accepted is the device of q");
    }
  };
  beside("sink", rest.sink);
  if (rest.captures.size() != options.tensor_names.size()) {
    throw std::invalid_argument("captures has " + std::to_string(rest.captures.size()) + " tensors: accepted are " +
                                std::to_string(options.tensor_names.size()) + ", as in tensor_names");
  }
  if (rest.numbers.size() != options.number_names.size()) {
    throw std::invalid_argument("numbers has " + std::to_string(rest.numbers.size()) + " elements: accepted are " +
                                std::to_string(options.number_names.size()) + ", as in number_names");
  }
  for (std::size_t n = 0; n < rest.captures.size(); ++n) {
    const std::string name = "captures['" + options.tensor_names[n] + "']";
    beside(name, rest.captures[n]);
    if (fa_dtype_of(rest.captures[n].dtype()) < 0) {
      throw std::invalid_argument(name + " is " + name_of(rest.captures[n].dtype()) +
                                  ": accepted are floating point and torch.int32");
    }
  }
  const std::array lengths{std::pair("cu_seqlens_q", &rest.cu_seqlens_q),
                           std::pair("cu_seqlens_kv", &rest.cu_seqlens_kv), std::pair("seqused_q", &rest.seqused_q),
                           std::pair("seqused_kv", &rest.seqused_kv)};
  for (const auto& [name, tensor] : lengths) {
    beside(name, *tensor);
    if (*tensor && fa_dtype_of(tensor->dtype()) != FA_I32) {
      throw std::invalid_argument(std::string(name) + " is " + name_of(tensor->dtype()) + ": accepted is torch.int32");
    }
  }
  if (options.varlen && (!rest.cu_seqlens_q || !rest.cu_seqlens_kv)) {
    throw std::invalid_argument("cu_seqlens_q and cu_seqlens_kv: both are needed");
  }
  beside("rng_state", rest.rng_state);
}

/// The structs of a call that forward and backward share. Pointers among them stay right as long as it is not moved.
struct Variants {
  Variants(const Options& options, const Rest& rest) {
    if (rest.sink) sink = describe(rest.sink);
    tensors.reserve(rest.captures.size());
    for (std::size_t n = 0; n < rest.captures.size(); ++n) {
      tensors.push_back(describe(rest.captures[n]));
      captures.push_back({options.tensor_names[n].c_str(), &tensors[n], 0});
    }
    for (std::size_t n = 0; n < rest.numbers.size(); ++n) {
      captures.push_back({options.number_names[n].c_str(), nullptr, rest.numbers[n]});
    }
    if (options.varlen) {
      const auto lengths = [](const Tensor& tensor) { return static_cast<const std::int32_t*>(tensor.data()); };
      sequences.struct_size = sizeof sequences;
      sequences.b = rest.cu_seqlens_q.elements() - 1;
      sequences.cu_seqlens_q = lengths(rest.cu_seqlens_q);
      sequences.cu_seqlens_kv = lengths(rest.cu_seqlens_kv);
      sequences.seqused_q = rest.seqused_q ? lengths(rest.seqused_q) : nullptr;
      sequences.seqused_kv = rest.seqused_kv ? lengths(rest.seqused_kv) : nullptr;
      sequences.max_s_q = rest.max_s_q;
      sequences.max_s_kv = rest.max_s_kv;
    }
    dropout.struct_size = sizeof dropout;
    dropout.seed = static_cast<std::uint64_t>(rest.seed);
    dropout.offset = static_cast<std::uint64_t>(rest.offset);
    if (rest.rng_state) dropout.device = static_cast<const std::uint64_t*>(rest.rng_state.data());
  }
  Variants(const Variants&) = delete;
  Variants& operator=(const Variants&) = delete;

  template <class Inputs>
  void join(Inputs& inputs, const Options& options, const Rest& rest) const {
    inputs.struct_size = sizeof inputs;
    inputs.sequences = options.varlen ? &sequences : nullptr;
    inputs.dropout = options.dropout != 0 ? &dropout : nullptr;
    inputs.captures = captures.data();
    inputs.capture_count = captures.size();
    inputs.sink = rest.sink ? &sink : nullptr;
  }

  fa_tensor sink = {};
  std::vector<fa_tensor> tensors;
  std::vector<fa_captured> captures;
  fa_sequences sequences = {};
  fa_dropout_state dropout = {};
};

fa_shape shape_of(const Tensor& q, const Tensor& k, const Options& options, const Rest& rest, bool aligned) {
  fa_shape shape = {};
  shape.struct_size = sizeof shape;
  shape.unaligned = aligned ? 0 : 1;
  shape.h_q = q.size(1);
  shape.h_kv = k.size(1);
  if (options.varlen) {
    shape.b = rest.cu_seqlens_q.elements() - 1;
    shape.s_q = rest.max_s_q;
    shape.s_kv = rest.max_s_kv;
    shape.total_q = q.size(0);
    shape.total_kv = k.size(0);
  } else {
    shape.b = q.size(0);
    shape.s_q = q.size(2);
    shape.s_kv = k.size(2);
  }
  return shape;
}

/// Scratch memory of PyTorch's allocator, which gives it to nobody else before the stream has passed this call.
Tensor scratch_of(std::size_t size, Place place, fa_workspace& workspace) {
  if (size == 0) return {};
  Tensor memory = empty_row_major(std::array{static_cast<std::int64_t>(size)}, aoti_torch_dtype_uint8(), place);
  workspace.struct_size = sizeof workspace;
  workspace.data = memory.data();
  workspace.size = size;
  return memory;
}

Tensor empty_rows(const Tensor& q, const Options& options) {
  if (options.varlen) return empty_row_major(std::array{q.size(1), q.size(0)}, row_dtype(q.dtype()), q.place());
  return empty_row_major(std::array{q.size(0), q.size(1), q.size(2)}, row_dtype(q.dtype()), q.place());
}

Tensor gradient_of(const Tensor& tensor) {
  return empty_like(tensor, tensor.size(1), tensor.size(tensor.rank() == 3 ? 0 : 2), tensor.sizes().back());
}

HandleOf question_of(const Tensor& q, const Tensor& v, std::int64_t options, const Rest& rest,
                     std::span<const bool> grads) {
  return {options,          q.place(),       fa_dtype_of(q.dtype()), q.sizes().back(),
          v.sizes().back(), bool(rest.sink), rest.captures,          grads};
}

}  // namespace

Forward forward(Tensor q, Tensor k, Tensor v, std::int64_t number, const Rest& rest, bool want_lse) {
  const Options& options = options_of(number);
  for (const auto& [name, tensor] : {std::pair("q", &q), std::pair("k", &k), std::pair("v", &v)}) {
    check_main(name, *tensor, q, options.varlen);
  }
  check_rest(rest, options, q);
  q = readable(std::move(q)), k = readable(std::move(k)), v = readable(std::move(v));
  const fa_attention* attention = attention_of(question_of(q, v, number, rest, {}));
  const Stream stream(q.place());
  Forward result{empty_like(q, q.size(1), q.size(options.varlen ? 0 : 2), v.sizes().back()), {}};
  if (want_lse) result.lse = empty_rows(q, options);
  const bool aligned = rows_aligned(q) && rows_aligned(k) && rows_aligned(v) && rows_aligned(result.o);
  fa_workspace workspace = {};
  const Tensor scratch =
      scratch_of(scratch_size(attention, shape_of(q, k, options, rest, aligned), false), q.place(), workspace);
  const Variants variants(options, rest);
  const fa_tensor q_view = describe(q), k_view = describe(k), v_view = describe(v), o_view = describe(result.o);
  const fa_tensor lse_view = want_lse ? describe(result.lse) : fa_tensor{};
  fa_forward_inputs inputs = {};
  variants.join(inputs, options, rest);
  inputs.q = &q_view;
  inputs.k = &k_view;
  inputs.v = &v_view;
  fa_forward_outputs outputs = {};
  outputs.struct_size = sizeof outputs;
  outputs.o = &o_view;
  outputs.lse = want_lse ? &lse_view : nullptr;
  check_status(library().forward(attention, &inputs, &outputs, stream.get(), scratch ? &workspace : nullptr));
  return result;
}

namespace {

/// Which gradients there are, and their memory.
struct Gradients {
  Gradients(const Tensor& q, const Tensor& k, const Tensor& v, const Options& options, const Rest& rest,
            const std::vector<bool>& needed) {
    const std::array<const Tensor*, 3> main{&q, &k, &v};
    for (std::size_t n = 0; n < 3; ++n) {
      if (needed[n]) tensors[n] = gradient_of(*main[n]);
    }
    if (rest.sink && needed[3]) tensors[3] = empty_row_major(rest.sink.sizes(), rest.sink.dtype(), q.place());
    for (std::size_t n = 0; n < 4; ++n) {
      if (tensors[n]) views[n] = describe(tensors[n]);
    }
    captures.resize(rest.captures.size());
    capture_views.reserve(rest.captures.size());
    for (std::size_t n = 0; n < rest.captures.size(); ++n) {
      if (!needed[4 + n]) continue;
      captures[n] = empty_row_major(rest.captures[n].sizes(), row_dtype(q.dtype()), q.place());
      capture_views.push_back(describe(captures[n]));
      captured.push_back({options.tensor_names[n].c_str(), &capture_views.back(), 0});
    }
  }
  Gradients(const Gradients&) = delete;
  Gradients& operator=(const Gradients&) = delete;

  [[nodiscard]] bool any() const { return tensors[0] || tensors[1] || tensors[2] || tensors[3] || !captured.empty(); }

  [[nodiscard]] fa_backward_outputs outputs() const {
    fa_backward_outputs result = {};
    result.struct_size = sizeof result;
    const std::array fields{&result.dq, &result.dk, &result.dv, &result.dsink};
    for (std::size_t n = 0; n < 4; ++n) *fields[n] = tensors[n] ? &views[n] : nullptr;
    result.captures = captured.data();
    result.capture_count = captured.size();
    return result;
  }

  Backward results(const Rest& rest) {
    Backward result;
    const std::array main{&result.dq, &result.dk, &result.dv, &result.dsink};
    for (std::size_t n = 0; n < 4; ++n) *main[n] = std::move(tensors[n]);
    for (std::size_t n = 0; n < captures.size(); ++n) {
      const bool given = bool(captures[n]);
      result.dcaptures.push_back(given ? to_dtype(std::move(captures[n]), rest.captures[n].dtype()) : Tensor());
    }
    return result;
  }

  std::array<Tensor, 4> tensors;  // of q, k, v and the sink
  std::array<fa_tensor, 4> views{};
  std::vector<Tensor> captures;
  std::vector<fa_tensor> capture_views;
  std::vector<fa_captured> captured;
};

/// Whether all rows of q, k, v, o, dout and the gradients start at multiples of 16 bytes.
bool all_aligned(std::initializer_list<const Tensor*> tensors, const Gradients& gradients) {
  for (const Tensor* tensor : tensors) {
    if (!rows_aligned(*tensor)) return false;
  }
  for (std::size_t n = 0; n < 3; ++n) {
    if (gradients.tensors[n] && !rows_aligned(gradients.tensors[n])) return false;
  }
  return true;
}

}  // namespace

Backward backward(Tensor dout, Tensor dlse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, std::int64_t number,
                  const Rest& rest, const std::vector<bool>& needed) {
  const Options& options = options_of(number);
  for (const auto& [name, tensor] : {std::pair("q", &q), std::pair("k", &k), std::pair("v", &v), std::pair("o", &o)}) {
    check_main(name, *tensor, q, options.varlen);
  }
  check_rest(rest, options, q);
  if (needed.size() != 4 + rest.captures.size()) {
    throw std::invalid_argument("needed has " + std::to_string(needed.size()) + " elements: accepted are " +
                                std::to_string(4 + rest.captures.size()));
  }
  q = readable(std::move(q)), k = readable(std::move(k)), v = readable(std::move(v)), o = readable(std::move(o));
  Gradients gradients(q, k, v, options, rest, needed);
  if (!gradients.any()) return gradients.results(rest);
  if (dout) {
    check_main("dout", dout, q, options.varlen);
    dout = readable(std::move(dout));
  } else {
    dout = empty_row_major(o.sizes(), o.dtype(), o.place());
    check(aoti_torch_zero_(dout.get()), "zero_");
  }
  if (dlse) dlse = to_dtype(std::move(dlse), lse.dtype());
  std::array<bool, 64> grads{};
  if (rest.captures.size() > grads.size()) throw std::invalid_argument("captures: accepted are at most 50");
  for (std::size_t n = 0; n < rest.captures.size(); ++n) grads[n] = needed[4 + n];
  const fa_attention* attention =
      attention_of(question_of(q, v, number, rest, std::span(grads).first(rest.captures.size())));
  const Stream stream(q.place());
  fa_shape shape = shape_of(q, k, options, rest, all_aligned({&q, &k, &v, &o, &dout}, gradients));
  shape.without_dq = needed[0] ? 0 : 1;
  shape.without_dk = needed[1] ? 0 : 1;
  shape.without_dv = needed[2] ? 0 : 1;
  fa_workspace workspace = {};
  const Tensor scratch = scratch_of(scratch_size(attention, shape, true), q.place(), workspace);
  const Variants variants(options, rest);
  const fa_tensor q_view = describe(q), k_view = describe(k), v_view = describe(v), o_view = describe(o);
  const fa_tensor lse_view = describe(lse), dout_view = describe(dout);
  const fa_tensor dlse_view = dlse ? describe(dlse) : fa_tensor{};
  fa_backward_inputs inputs = {};
  variants.join(inputs, options, rest);
  inputs.q = &q_view;
  inputs.k = &k_view;
  inputs.v = &v_view;
  inputs.o = &o_view;
  inputs.lse = &lse_view;
  inputs.dout = &dout_view;
  inputs.dlse = dlse ? &dlse_view : nullptr;
  const fa_backward_outputs outputs = gradients.outputs();
  check_status(library().backward(attention, &inputs, &outputs, stream.get(), scratch ? &workspace : nullptr));
  return gradients.results(rest);
}

}  // namespace fa_torch
