#ifndef FA_TORCH_HPP_
#define FA_TORCH_HPP_

/// Attention of fa for LibTorch, with gradients. Header-only: the program links LibTorch and fa itself.
///
///   fa::AttentionConfig config;
///   config.head_dim = 128;
///   config.causal = true;
///   const auto attention = std::make_shared<const fa::Attention>(fa::Attention::create(config));
///   auto [o, lse] = fa::torch_attention(attention, q, k, v);  // [b, h, s, d] in any memory order
///   o.sum().backward();
///
/// CUDA tensors are worked on in LibTorch's current stream. For them the program defines FA_TORCH_CUDA, has the headers
/// of the CUDA toolkit, and links c10_cuda; CPU tensors need none of that.

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>
#if defined(FA_TORCH_CUDA)
#include <c10/cuda/CUDAStream.h>
#endif

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>

#include <fa/attention.hpp>

namespace fa {
namespace torch_detail {

inline DType dtype_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kHalf:
      return DType::f16;
    case at::kBFloat16:
      return DType::bf16;
    case at::kFloat:
      return DType::f32;
    case at::kDouble:
      return DType::f64;
    case at::kInt:
      return DType::i32;
    case at::kChar:
      return DType::i8;
    case at::kFloat8_e4m3fn:
      return DType::e4m3;
    default:
      throw Error(ErrorCode::invalid_argument,
                  std::string("dtype = ") + c10::toString(tensor.scalar_type()) +
                      ": accepted are Half, BFloat16, Float, Double, Int, Char and Float8_e4m3fn",
                  {{"argument", "dtype"}, {"value", c10::toString(tensor.scalar_type())}});
  }
}

/// The memory of `tensor`, not owned; "not given" for an undefined one.
inline TensorView view_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  return TensorView(tensor.data_ptr(), dtype_of(tensor), {sizes.data(), sizes.size()},
                    {strides.data(), strides.size()});
}

/// `tensor` itself, unless its head dim is not contiguous (as in the gradient of a sum, which is expanded).
inline at::Tensor readable(const at::Tensor& tensor) {
  return tensor.stride(-1) == 1 || tensor.size(-1) <= 1 ? tensor : tensor.contiguous();
}

/// An empty [b, h, s, d] tensor in the memory order of `like`.
inline at::Tensor empty_like(const at::Tensor& like, std::int64_t d) {
  const std::int64_t b = like.size(0), h = like.size(1), s = like.size(2);
  if (like.stride(1) < like.stride(2)) return at::empty({b, s, h, d}, like.options()).transpose(1, 2);
  return at::empty({b, h, s, d}, like.options());
}

/// LibTorch's current stream of the tensor's device.
inline Stream stream_of(const at::Tensor& tensor) {
  if (!tensor.is_cuda()) return nullptr;
#if defined(FA_TORCH_CUDA)
  return c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(tensor.get_device())).stream();
#else
  throw Error(ErrorCode::unsupported, "device = " + tensor.device().str() + ": FA_TORCH_CUDA must be defined for it",
              {{"argument", "device"}, {"value", tensor.device().str()}});
#endif
}

/// Scratch memory that outlives the work on the current stream; undefined for 0 bytes.
inline at::Tensor scratch(std::size_t bytes, const at::Tensor& like) {
  return bytes == 0 ? at::Tensor() : at::empty({static_cast<std::int64_t>(bytes)}, like.options().dtype(at::kByte));
}

inline Workspace workspace_of(const at::Tensor& memory) {
  return memory.defined() ? Workspace{memory.data_ptr(), static_cast<std::size_t>(memory.numel())} : Workspace{};
}

inline bool rows_aligned(const at::Tensor& tensor) {
  if (reinterpret_cast<std::uintptr_t>(tensor.data_ptr()) % 16 != 0) return false;
  for (std::int64_t axis = 0; axis < 3; ++axis) {
    if (tensor.size(axis) > 1 && tensor.stride(axis) * tensor.element_size() % 16 != 0) return false;
  }
  return true;
}

/// The sizes of a call with q, k and `others`, which count for the alignment.
template <typename... Others>
AttentionShape shape_of(const at::Tensor& q, const at::Tensor& k, const Others&... others) {
  AttentionShape shape;
  shape.b = q.size(0);
  shape.h_q = q.size(1);
  shape.h_kv = k.size(1);
  shape.s_q = q.size(2);
  shape.s_kv = k.size(2);
  shape.aligned = rows_aligned(q) && rows_aligned(k) && (rows_aligned(others) && ...);
  return shape;
}

/// Where an Attention runs, and so where its tensors must be.
inline void check_place(const Attention& attention, const char* name, const at::Tensor& tensor) {
  const Device device = attention.device();
  const bool fits = device.kind() == Device::Kind::host ? tensor.is_cpu()
                                                        : tensor.is_cuda() && tensor.get_device() == device.ordinal();
  if (fits && tensor.dim() == 4) return;
  const std::string value = fits ? "rank " + std::to_string(tensor.dim()) : tensor.device().str();
  const std::string accepted = fits ? "rank 4 [b, h, s, d]" : to_string(device);
  throw Error(ErrorCode::invalid_argument, std::string(name) + " = " + value + ": accepted is " + accepted,
              {{"argument", name}, {"value", value}, {"accepted", accepted}});
}

/// Keeps the Attention of a graph alive until its backward.
struct Holder : ::torch::CustomClassHolder {
  explicit Holder(std::shared_ptr<const Attention> held) : attention(std::move(held)) {}
  std::shared_ptr<const Attention> attention;
};

}  // namespace torch_detail

/// The gradients of a TorchAttention. They are a node of their own because only a node can refuse to be differentiated:
/// second derivatives would come out too small, without a word. Inputs q, k, v, o, lse, dout and, where
/// there is one, dlse; outputs those of dq, dk and dv that are wanted.
class TorchAttentionGradients : public ::torch::autograd::Function<TorchAttentionGradients> {
 public:
  using Context = ::torch::autograd::AutogradContext;
  using Tensors = ::torch::autograd::variable_list;

  static Tensors forward(Context*, at::TensorList inputs, const std::shared_ptr<const Attention>& attention,
                         const Gradients& wanted) {
    using namespace torch_detail;
    const at::Tensor &q = inputs[0], &k = inputs[1], &v = inputs[2], &o = inputs[3], &lse = inputs[4];
    const at::Tensor dout = readable(inputs[5]);
    const at::Tensor dlse = inputs.size() > 6 ? inputs[6] : at::Tensor();
    const auto gradient = [](bool is_wanted, const at::Tensor& of) {
      return is_wanted ? empty_like(of, of.size(3)) : at::Tensor();
    };
    const at::Tensor dq = gradient(wanted.dq, q), dk = gradient(wanted.dk, k), dv = gradient(wanted.dv, v);
    AttentionShape shape = shape_of(q, k, v, o, dout);
    for (const at::Tensor& tensor : {dq, dk, dv})
      shape.aligned = shape.aligned && (!tensor.defined() || rows_aligned(tensor));
    shape.gradients = wanted;
    const at::Tensor memory = scratch(attention->backward_workspace_size(shape), q);
    attention->backward({view_of(q), view_of(k), view_of(v), view_of(o), view_of(lse), view_of(dout), view_of(dlse)},
                        {view_of(dq), view_of(dk), view_of(dv)}, stream_of(q), workspace_of(memory));
    Tensors results;
    for (const at::Tensor& tensor : {dq, dk, dv}) {
      if (tensor.defined()) results.push_back(tensor);
    }
    return results;
  }

  [[noreturn]] static Tensors backward(Context*, const Tensors&) {
    throw Error(ErrorCode::unsupported,
                "the gradients of torch_attention are differentiated: accepted are first derivatives only (where "
                "create_graph is meant for other parts of the graph, detach these gradients)",
                {{"argument", "create_graph"}, {"value", "true"}, {"accepted", "first derivatives"}});
  }
};

/// What torch_attention applies: inputs q, k, v; outputs o, lse, both differentiable.
class TorchAttention : public ::torch::autograd::Function<TorchAttention> {
 public:
  using Context = ::torch::autograd::AutogradContext;
  using Tensors = ::torch::autograd::variable_list;

  static Tensors forward(Context* context, const at::Tensor& q_given, const at::Tensor& k_given,
                         const at::Tensor& v_given, const std::shared_ptr<const Attention>& attention) {
    using namespace torch_detail;
    check_place(*attention, "q", q_given);
    check_place(*attention, "k", k_given);
    check_place(*attention, "v", v_given);
    const at::Tensor q = readable(q_given), k = readable(k_given), v = readable(v_given);
    const at::Tensor o = empty_like(q, v.size(3));
    const at::ScalarType statistics = q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const at::Tensor lse = at::empty({q.size(0), q.size(1), q.size(2)}, q.options().dtype(statistics));
    const at::Tensor memory = scratch(attention->workspace_size(shape_of(q, k, v, o)), q);
    attention->forward({view_of(q), view_of(k), view_of(v)}, {view_of(o), view_of(lse)}, stream_of(q),
                       workspace_of(memory));
    context->save_for_backward({q, k, v, o, lse});
    context->saved_data["attention"] = c10::IValue::make_capsule(c10::make_intrusive<Holder>(attention));
    context->set_materialize_grads(false);
    return {o, lse};
  }

  static Tensors backward(Context* context, const Tensors& gradients) {
    using namespace torch_detail;
    if (!gradients[0].defined() && !gradients[1].defined()) return Tensors(4);
    Tensors inputs = context->get_saved_variables();  // q, k, v, o, lse
    inputs.push_back(gradients[0].defined() ? gradients[0] : at::zeros_like(inputs[3]));
    if (gradients[1].defined()) inputs.push_back(gradients[1]);
    const auto holder = context->saved_data["attention"].toCapsule();
    const auto& attention = static_cast<Holder*>(holder.get())->attention;
    const Gradients wanted{context->needs_input_grad(0), context->needs_input_grad(1), context->needs_input_grad(2)};
    const Tensors gradients_of_inputs = TorchAttentionGradients::apply(at::TensorList(inputs), attention, wanted);
    Tensors results(4);  // the Attention has none
    std::size_t next = 0;
    for (std::size_t i = 0; i < 3; ++i) {
      if (context->needs_input_grad(i)) results[i] = gradients_of_inputs[next++];
    }
    return results;
  }
};

/// o [b, h_q, s_q, d_v] and its log-sum-exp [b, h_q, s_q] (natural log, f32; f64 for f64), as nodes of LibTorch's
/// graph. Shapes: q [b, h_q, s_q, d_qk], k [b, h_kv, s_kv, d_qk], v [b, h_kv, s_kv, d_v], of the attention's dtype. No
/// copies while the head dim is contiguous.
///
/// Runs on LibTorch's current stream of the tensors' device, with scratch memory of its allocator; the graph keeps
/// `attention` alive. Throws fa::Error like Attention::forward, also for tensors on another device than `attention`'s.
/// Only first derivatives: a backward through dq, dk or dv throws fa::Error(unsupported).
inline std::tuple<at::Tensor, at::Tensor> torch_attention(const std::shared_ptr<const Attention>& attention,
                                                          const at::Tensor& q, const at::Tensor& k,
                                                          const at::Tensor& v) {
  const auto outputs = TorchAttention::apply(q, k, v, attention);
  return {outputs[0], outputs[1]};
}

}  // namespace fa

#endif  // FA_TORCH_HPP_
