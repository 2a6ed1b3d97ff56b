// The operators of fa_attention for PyTorch's dispatcher, by its stable ABI: one library serves every PyTorch from 2.10
// on, and no Python is needed to build it. Schemas of `forward` and `backward` are defined by fa_attention.torch.

#include <array>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/stableivalue_conversions.h>

#include "attention.hpp"

namespace {

using fa_torch::Options;
using fa_torch::Rest;
using fa_torch::Tensor;

/// The arguments of an operator, from first to last. An operator owns its arguments: what was not asked for, because an
/// earlier one was refused, is not given back.
class Arguments {
 public:
  explicit Arguments(const StableIValue* stack) : next_(stack) {}

  template <class Value>
  Value get() {
    return torch::stable::detail::to<Value>(*next_++);
  }
  Tensor tensor() { return Tensor(get<AtenTensorHandle>()); }
  /// Empty for one that is undefined.
  Tensor tensor_or_none() {
    const auto handle = get<AtenTensorHandle>();
    bool defined = false;
    fa_torch::check(aoti_torch_is_defined(handle, &defined), "a tensor");
    if (defined) return Tensor(handle);
    aoti_torch_delete_tensor_object(handle);
    return {};
  }
  void skip_tensors(int count) {
    for (; count > 0; --count) aoti_torch_delete_tensor_object(get<AtenTensorHandle>());
  }
  /// One that may be given and yet be undefined.
  void skip_optional_tensor() {
    const auto given = get<std::optional<AtenTensorHandle>>();
    if (given) aoti_torch_delete_tensor_object(*given);
  }
  Tensor optional_tensor() {
    const auto given = get<std::optional<AtenTensorHandle>>();
    return given ? Tensor(*given) : Tensor();
  }
  std::vector<Tensor> tensors() {
    std::vector<Tensor> result;
    for (const AtenTensorHandle handle : get<std::vector<AtenTensorHandle>>()) result.emplace_back(handle);
    return result;
  }

 private:
  const StableIValue* next_;
};

/// Arguments from `causal` on, but for varlen.
Options options_from(Arguments& arguments) {
  Options options;
  options.causal = arguments.get<bool>();
  options.scale = arguments.get<std::optional<double>>();
  options.top_left = arguments.get<bool>();
  options.window_left = arguments.get<std::optional<std::int64_t>>();
  options.window_right = arguments.get<std::optional<std::int64_t>>();
  options.chunk = arguments.get<std::int64_t>();
  options.dropout = arguments.get<double>();
  options.deterministic = arguments.get<bool>();
  options.score = arguments.get<std::optional<std::string>>();
  options.mask = arguments.get<std::optional<std::string>>();
  options.tensor_names = arguments.get<std::vector<std::string>>();
  options.number_names = arguments.get<std::vector<std::string>>();
  return options;
}

/// Arguments from `sink` on, and the number of the options that follow.
std::pair<Rest, std::int64_t> rest_from(Arguments& arguments) {
  Rest rest;
  rest.sink = arguments.optional_tensor();
  rest.captures = arguments.tensors();
  for (Tensor* tensor : {&rest.cu_seqlens_q, &rest.cu_seqlens_kv, &rest.seqused_q, &rest.seqused_kv, &rest.rng_state}) {
    *tensor = arguments.optional_tensor();
  }
  for (std::int64_t* number : {&rest.max_s_q, &rest.max_s_kv, &rest.seed, &rest.offset})
    *number = arguments.get<std::int64_t>();
  rest.numbers = arguments.get<std::vector<double>>();
  Options options = options_from(arguments);
  options.varlen = bool(rest.cu_seqlens_q);
  return {std::move(rest), fa_torch::number_of(options)};
}

StableIValue put(Tensor& tensor) {
  return torch::stable::detail::from(tensor.release());
}

/// A tensor without elements where a schema promises one and nobody needs it.
StableIValue put_or_nothing(Tensor& tensor, std::int32_t dtype, fa_torch::Place place) {
  if (!tensor) tensor = fa_torch::empty_row_major(std::array{std::int64_t{0}}, dtype, place);
  return put(tensor);
}

void forward(StableIValue* stack, std::uint64_t, std::uint64_t) {
  Arguments arguments(stack);
  Tensor q = arguments.tensor(), k = arguments.tensor(), v = arguments.tensor();
  const auto [rest, options] = rest_from(arguments);
  fa_torch::Forward result = fa_torch::forward(std::move(q), std::move(k), std::move(v), options, rest, true);
  stack[0] = put(result.o);
  stack[1] = put(result.lse);
}

void backward(StableIValue* stack, std::uint64_t, std::uint64_t) {
  Arguments arguments(stack);
  Tensor dout = arguments.optional_tensor(), dlse = arguments.optional_tensor();
  Tensor q = arguments.tensor(), k = arguments.tensor(), v = arguments.tensor(), o = arguments.tensor();
  Tensor lse = arguments.tensor();
  const auto [rest, options] = rest_from(arguments);
  const auto needed = arguments.get<std::vector<bool>>();
  const std::int32_t dtype = q.dtype();
  const fa_torch::Place place = q.place();
  fa_torch::Backward result = fa_torch::backward(std::move(dout), std::move(dlse), std::move(q), std::move(k),
                                                 std::move(v), std::move(o), std::move(lse), options, rest, needed);
  StableListHandle list = nullptr;
  fa_torch::check(torch_new_list_reserve_size(result.dcaptures.size(), &list), "a list");
  for (Tensor& tensor : result.dcaptures)
    fa_torch::check(torch_list_push_back(list, put_or_nothing(tensor, dtype, place)), "a list");
  Tensor* main[4] = {&result.dq, &result.dk, &result.dv, &result.dsink};
  for (int n = 0; n < 4; ++n) stack[n] = put_or_nothing(*main[n], dtype, place);
  stack[4] = torch::stable::detail::from(list);
}

/// The options of plain_forward and plain_backward.
std::int64_t plain_options(Arguments& arguments) {
  Options options;
  options.scale = arguments.get<std::optional<double>>();
  options.causal = arguments.get<bool>();
  options.top_left = arguments.get<bool>();
  options.deterministic = arguments.get<bool>();
  return fa_torch::number_of(options);
}

void plain_forward(StableIValue* stack, std::uint64_t, std::uint64_t) {
  Arguments arguments(stack);
  Tensor q = arguments.tensor(), k = arguments.tensor(), v = arguments.tensor();
  const std::int64_t options = plain_options(arguments);
  fa_torch::Forward result = fa_torch::forward(std::move(q), std::move(k), std::move(v), options, {}, true);
  stack[0] = put(result.o);
  stack[1] = put(result.lse);
}

void plain_backward(StableIValue* stack, std::uint64_t, std::uint64_t) {
  Arguments arguments(stack);
  Tensor dout = arguments.optional_tensor(), dlse = arguments.optional_tensor();
  Tensor q = arguments.tensor(), k = arguments.tensor(), v = arguments.tensor(), o = arguments.tensor();
  Tensor lse = arguments.tensor();
  const std::int64_t options = plain_options(arguments);
  auto needed = arguments.get<std::vector<bool>>();
  needed.push_back(false);  // of a sink
  const std::int32_t dtype = q.dtype();
  const fa_torch::Place place = q.place();
  fa_torch::Backward result = fa_torch::backward(std::move(dout), std::move(dlse), std::move(q), std::move(k),
                                                 std::move(v), std::move(o), std::move(lse), options, {}, needed);
  stack[0] = put_or_nothing(result.dq, dtype, place);
  stack[1] = put_or_nothing(result.dk, dtype, place);
  stack[2] = put_or_nothing(result.dv, dtype, place);
}

/// Calls without captures, sink, packing and dropout, by the number of their options.
void attend(StableIValue* stack, std::uint64_t, std::uint64_t) {
  Arguments arguments(stack);
  Tensor q = arguments.tensor(), k = arguments.tensor(), v = arguments.tensor();
  fa_torch::Forward result =
      fa_torch::forward(std::move(q), std::move(k), std::move(v), arguments.get<std::int64_t>(), {}, false);
  stack[0] = put(result.o);
}

void attend_lse(StableIValue* stack, std::uint64_t, std::uint64_t) {
  Arguments arguments(stack);
  Tensor q = arguments.tensor(), k = arguments.tensor(), v = arguments.tensor();
  fa_torch::Forward result =
      fa_torch::forward(std::move(q), std::move(k), std::move(v), arguments.get<std::int64_t>(), {}, true);
  stack[0] = put(result.o);
  stack[1] = put(result.lse);
}

void attend_backward(StableIValue* stack, std::uint64_t, std::uint64_t) {
  Arguments arguments(stack);
  Tensor dout = arguments.optional_tensor(), dlse = arguments.optional_tensor();
  Tensor q = arguments.tensor(), k = arguments.tensor(), v = arguments.tensor(), o = arguments.tensor();
  Tensor lse = arguments.tensor();
  const auto options = arguments.get<std::int64_t>(), needed = arguments.get<std::int64_t>();
  const std::int32_t dtype = q.dtype();
  const fa_torch::Place place = q.place();
  fa_torch::Backward result =
      fa_torch::backward(std::move(dout), std::move(dlse), std::move(q), std::move(k), std::move(v), std::move(o),
                         std::move(lse), options, {}, {(needed & 1) != 0, (needed & 2) != 0, (needed & 4) != 0, false});
  stack[0] = put_or_nothing(result.dq, dtype, place);
  stack[1] = put_or_nothing(result.dk, dtype, place);
  stack[2] = put_or_nothing(result.dv, dtype, place);
}

// PyTorch has nodes of its own C++ for attentions: a call whose o alone is wanted goes by one, and autograd runs no
// Python. dropout_p carries which call it is, as -1 - number. On the host it is the attention whose kernels others may
// give, the "overrideable" one. On a GPU it is the one that PyTorch has for CPUs alone, which has less to keep and to
// return, and which Python reaches without boxing.

std::int64_t carried_by(double dropout_p) {
  if (dropout_p < 0) return static_cast<std::int64_t>(-1 - dropout_p);
  throw std::invalid_argument("attention of PyTorch by kernels of fa_attention: accepted are calls of fa_attention");
}

/// An undefined tensor, where no call of fa_attention reads one. Python has None for it.
StableIValue undefined() {
  AtenTensorHandle handle = nullptr;
  fa_torch::check(aoti_torch_new_uninitialized_tensor(&handle), "a tensor");
  return torch::stable::detail::from(handle);
}

StableIValue put_or_undefined(Tensor& tensor) {
  return tensor ? put(tensor) : undefined();
}

void overrideable(StableIValue* stack, std::uint64_t, std::uint64_t) {
  Arguments arguments(stack);
  Tensor q = arguments.tensor(), k = arguments.tensor(), v = arguments.tensor();
  arguments.skip_optional_tensor();
  const std::int64_t number = carried_by(arguments.get<double>());
  fa_torch::Forward result = fa_torch::forward(std::move(q), std::move(k), std::move(v), number, {}, true);
  stack[0] = put(result.o);
  stack[1] = put(result.lse);
  for (const int n : {2, 3, 6, 7, 8}) stack[n] = undefined();
  for (const int n : {4, 5}) stack[n] = torch::stable::detail::from(std::int64_t{0});
}

void overrideable_backward(StableIValue* stack, std::uint64_t, std::uint64_t) {
  Arguments arguments(stack);
  Tensor dout = arguments.tensor_or_none();
  Tensor q = arguments.tensor(), k = arguments.tensor(), v = arguments.tensor();
  arguments.skip_tensors(1);
  auto needed = arguments.get<std::vector<bool>>();
  Tensor o = arguments.tensor(), lse = arguments.tensor();
  arguments.skip_tensors(2);
  arguments.get<std::int64_t>();
  arguments.get<std::int64_t>();
  const std::int64_t number = carried_by(arguments.get<double>());
  arguments.get<bool>();
  arguments.skip_tensors(2);
  needed.resize(3);
  needed.push_back(false);
  fa_torch::Backward result = fa_torch::backward(std::move(dout), {}, std::move(q), std::move(k), std::move(v),
                                                 std::move(o), std::move(lse), number, {}, needed);
  stack[0] = put_or_undefined(result.dq);
  stack[1] = put_or_undefined(result.dk);
  stack[2] = put_or_undefined(result.dv);
  stack[3] = undefined();
}

// This node does not say which gradients are needed: the call does, 8 number + its bits.

void flash_for_cpu(StableIValue* stack, std::uint64_t, std::uint64_t) {
  Arguments arguments(stack);
  Tensor q = arguments.tensor(), k = arguments.tensor(), v = arguments.tensor();
  const std::int64_t number = carried_by(arguments.get<double>()) >> 3;
  arguments.get<bool>();
  arguments.skip_optional_tensor();
  fa_torch::Forward result = fa_torch::forward(std::move(q), std::move(k), std::move(v), number, {}, true);
  stack[0] = put(result.o);
  stack[1] = put(result.lse);
}

void flash_for_cpu_backward(StableIValue* stack, std::uint64_t, std::uint64_t) {
  Arguments arguments(stack);
  Tensor dout = arguments.tensor_or_none();
  Tensor q = arguments.tensor(), k = arguments.tensor(), v = arguments.tensor();
  Tensor o = arguments.tensor(), lse = arguments.tensor();
  const std::int64_t carried = carried_by(arguments.get<double>());
  arguments.get<bool>();
  arguments.skip_optional_tensor();
  fa_torch::Backward result =
      fa_torch::backward(std::move(dout), {}, std::move(q), std::move(k), std::move(v), std::move(o), std::move(lse),
                         carried >> 3, {}, {(carried & 1) != 0, (carried & 2) != 0, (carried & 4) != 0, false});
  stack[0] = put_or_undefined(result.dq);
  stack[1] = put_or_undefined(result.dk);
  stack[2] = put_or_undefined(result.dv);
}

void options(StableIValue* stack, std::uint64_t, std::uint64_t) {
  Arguments arguments(stack);
  const Options given = options_from(arguments);
  stack[0] = torch::stable::detail::from(fa_torch::number_of(given));
}

void open(StableIValue* stack, std::uint64_t, std::uint64_t) {
  Arguments arguments(stack);
  const auto path = arguments.get<std::string>();
  if (arguments.get<bool>()) {
    fa_torch::open(path);
  } else {
    fa_torch::open_later(path);
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fa_attention, library) {
  library.def("_open(str path, bool now) -> ()");
  library.def(
      "_options(bool causal, float? scale, bool top_left, int? window_left, int? window_right, int chunk, float "
      "dropout, "
      "bool deterministic, str? score, str? mask, str[] tensor_names, str[] number_names) -> int");
  library.def("_attend(Tensor q, Tensor k, Tensor v, int options) -> Tensor");
  library.def("_attend_lse(Tensor q, Tensor k, Tensor v, int options) -> (Tensor, Tensor)");
  library.def(
      "_attend_backward(Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, int options, "
      "int needed) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(fa_attention, CompositeExplicitAutograd, library) {
  library.impl("_open", open);
  library.impl("_options", options);
}

STABLE_TORCH_LIBRARY_IMPL(fa_attention, CPU, library) {
  for (const char* name : {"forward", "forward_kernel"}) library.impl(name, forward);
  for (const char* name : {"backward", "backward_kernel"}) library.impl(name, backward);
  for (const char* name : {"plain_forward", "plain_forward_kernel"}) library.impl(name, plain_forward);
  for (const char* name : {"plain_backward", "plain_backward_kernel"}) library.impl(name, plain_backward);
  library.impl("_attend", attend);
  library.impl("_attend_lse", attend_lse);
  library.impl("_attend_backward", attend_backward);
}

STABLE_TORCH_LIBRARY_IMPL(fa_attention, CUDA, library) {
  for (const char* name : {"forward", "forward_kernel"}) library.impl(name, forward);
  for (const char* name : {"backward", "backward_kernel"}) library.impl(name, backward);
  for (const char* name : {"plain_forward", "plain_forward_kernel"}) library.impl(name, plain_forward);
  for (const char* name : {"plain_backward", "plain_backward_kernel"}) library.impl(name, plain_backward);
  library.impl("_attend", attend);
  library.impl("_attend_lse", attend_lse);
  library.impl("_attend_backward", attend_backward);
}

STABLE_TORCH_LIBRARY_IMPL(aten, CPU, library) {
  library.impl("_scaled_dot_product_fused_attention_overrideable", overrideable);
  library.impl("_scaled_dot_product_fused_attention_overrideable_backward", overrideable_backward);
}

STABLE_TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("_scaled_dot_product_fused_attention_overrideable", overrideable);
  library.impl("_scaled_dot_product_fused_attention_overrideable_backward", overrideable_backward);
  library.impl("_scaled_dot_product_flash_attention_for_cpu", flash_for_cpu);
  library.impl("_scaled_dot_product_flash_attention_for_cpu_backward", flash_for_cpu_backward);
}
