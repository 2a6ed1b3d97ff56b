// fa/torch.hpp beside LibTorch's own gradients: libtorch_test cuda|cpu. Exits with 77 where there is no such device.

#include <ATen/Context.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <cstdio>
#include <exception>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include <fa/torch.hpp>

namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;

int failures = 0;

void check(bool condition, const std::string& text) {
  if (condition) return;
  std::fprintf(stderr, "FAILED: %s\n", text.c_str());
  ++failures;
}

struct Case {
  at::ScalarType dtype;
  std::int64_t b, h_q, h_kv, s_q, s_kv, d_qk, d_v;
  bool causal;
  bool bshd;
};

std::shared_ptr<const fa::Attention> make_attention(const Case& c, at::Device device) {
  fa::AttentionConfig config;
  config.head_dim = static_cast<int>(c.d_qk);
  config.head_dim_v = static_cast<int>(c.d_v);
  config.dtype = fa::torch_detail::dtype_of(at::empty({0}, c.dtype));
  config.causal = c.causal;
  return std::make_shared<const fa::Attention>(
      fa::Attention::create(config, device.is_cuda() ? fa::Device::cuda(0) : fa::Device::host()));
}

/// O and LSE by LibTorch's own differentiable operations.
std::tuple<Tensor, Tensor> definition(const Case& c, const Tensor& q, const Tensor& k, const Tensor& v) {
  const auto repeated = [&](const Tensor& t) { return t.repeat_interleave(c.h_q / c.h_kv, 1); };
  Tensor scores = at::matmul(q, repeated(k).transpose(2, 3)) / std::sqrt(static_cast<double>(c.d_qk));
  if (c.causal) {
    const Tensor hidden = at::ones({c.s_q, c.s_kv}, q.options().dtype(at::kBool)).triu(c.s_kv - c.s_q + 1);
    scores = scores.masked_fill(hidden, -INFINITY);
  }
  return {at::matmul(scores.softmax(-1), repeated(v)), scores.logsumexp(-1)};
}

/// o, dq, dk and dv of sum(o * dout) + sum(lse * dlse).
template <typename Function>
Tensors gradients(const Function& function, const Tensors& inputs, const Tensor& dout, const Tensor& dlse) {
  Tensors leaves;
  for (const Tensor& t : inputs) leaves.push_back(t.detach().clone().requires_grad_());
  const auto [o, lse] = function(leaves[0], leaves[1], leaves[2]);
  const Tensor loss = (o * dout.to(o.scalar_type())).sum() + (lse * dlse.to(lse.scalar_type())).sum();
  Tensors results = torch::autograd::grad({loss}, leaves);
  results.insert(results.begin(), o);
  return results;
}

void compare(const Case& c, at::Device device) {
  const auto normal = [&](std::int64_t h, std::int64_t s, std::int64_t d) {
    const Tensor t = c.bshd ? at::randn({c.b, s, h, d}).transpose(1, 2) : at::randn({c.b, h, s, d});
    return t.to(device, c.dtype);
  };
  const Tensors inputs = {normal(c.h_q, c.s_q, c.d_qk), normal(c.h_kv, c.s_kv, c.d_qk), normal(c.h_kv, c.s_kv, c.d_v)};
  const Tensor dout = normal(c.h_q, c.s_q, c.d_v), dlse = at::randn({c.b, c.h_q, c.s_q}).to(device);
  const auto attention = make_attention(c, device);
  const Tensors ours = gradients(
      [&](const Tensor& q, const Tensor& k, const Tensor& v) { return fa::torch_attention(attention, q, k, v); },
      inputs, dout, dlse);
  Tensors wide;
  for (const Tensor& t : inputs) wide.push_back(t.to(at::kDouble));
  const Tensors exact = gradients(
      [&](const Tensor& q, const Tensor& k, const Tensor& v) { return definition(c, q, k, v); }, wide, dout, dlse);
  // Two roundings to the dtype, of P or dS and of the result, and O's on its way to backward, of the largest element.
  const double unit = c.dtype == at::kBFloat16 ? 0x1p-8 : c.dtype == at::kHalf ? 0x1p-11 : 0x1p-18;
  const char* names[] = {"o", "dq", "dk", "dv"};
  for (std::size_t n = 0; n < 4; ++n) {
    const double largest = exact[n].abs().max().item<double>();
    const double error = (ours[n].to(at::kDouble) - exact[n]).abs().max().item<double>();
    check(error <= 3 * unit * largest, std::string(names[n]) + " is off by " + std::to_string(error / largest));
  }
  for (std::size_t n = 1; n < 4; ++n) check(ours[n].strides() == inputs[n - 1].strides(), "memory order");
}

void test_parts_of_the_graph(at::Device device) {
  const Case c{at::kFloat, 1, 2, 2, 7, 9, 8, 8, false, false};
  const auto attention = make_attention(c, device);
  const Tensor q = at::randn({1, 2, 7, 8}, device).requires_grad_(), k = at::randn({1, 2, 9, 8}, device),
               v = at::randn({1, 2, 9, 8}, device).requires_grad_();
  // Only the log-sum-exp, only some inputs, and a gradient that comes in expanded.
  const Tensor dq = torch::autograd::grad({std::get<1>(fa::torch_attention(attention, q, k, v)).sum()}, {q})[0];
  const Tensor expected = torch::autograd::grad({std::get<1>(definition(c, q, k, v)).sum()}, {q})[0];
  check(at::allclose(dq, expected, 1e-4, 1e-5), "dq of the log-sum-exp");
  const Tensor dv = torch::autograd::grad({std::get<0>(fa::torch_attention(attention, q, k, v)).sum()}, {v})[0];
  check(at::allclose(dv.sum(), at::full({}, 7.0 * 2 * 8, dv.options()), 1e-4), "every row has weights of sum 1");
  // Every subset of the inputs has the gradients that all of them have.
  const Tensor dout = at::randn({1, 2, 7, 8}, device);
  const Tensors all{q, k.detach().requires_grad_(), v};
  const Tensors whole =
      torch::autograd::grad({std::get<0>(fa::torch_attention(attention, all[0], all[1], all[2]))}, all, {dout});
  for (unsigned subset = 1; subset < 7; ++subset) {
    Tensors given, leaves;
    for (unsigned n = 0; n < 3; ++n) {
      given.push_back(all[n].detach().requires_grad_((subset >> n & 1) != 0));
      if ((subset >> n & 1) != 0) leaves.push_back(given.back());
    }
    const Tensors some = torch::autograd::grad(
        {std::get<0>(fa::torch_attention(attention, given[0], given[1], given[2]))}, leaves, {dout});
    for (unsigned n = 0, at = 0; n < 3; ++n) {
      if ((subset >> n & 1) != 0) check(at::allclose(some[at++], whole[n], 1e-4, 1e-5), "a subset of the gradients");
    }
  }
}

/// Whether `f` throws fa::Error(unsupported).
template <typename F>
bool unsupported(const F& f) {
  try {
    f();
    return false;
  } catch (const fa::Error& error) {
    return error.code() == fa::ErrorCode::unsupported;
  }
}

/// Whatever they are derivatives of and by, second ones are refused; a graph of first ones may be made.
void test_second_derivatives(at::Device device) {
  const Case c{at::kFloat, 1, 2, 2, 7, 9, 8, 8, false, false};
  const auto attention = make_attention(c, device);
  const Tensor strided = at::randn({1, 2, 8, 7}, device).transpose(2, 3).requires_grad_();  // is copied
  const Tensor dense = at::randn({1, 2, 7, 8}, device).requires_grad_();
  const Tensor k = at::randn({1, 2, 9, 8}, device).requires_grad_(),
               v = at::randn({1, 2, 9, 8}, device).requires_grad_();
  const Tensor weight = at::randn({1, 2, 7, 8}, device).requires_grad_();
  const auto first = [&](const Tensor& loss, const Tensor& by) {
    return torch::autograd::grad({loss}, {by}, {}, true, /*create_graph=*/true)[0];
  };
  for (const Tensor& q : {strided, dense}) {
    const auto [o, lse] = fa::torch_attention(attention, q, k, v);
    for (const Tensor& loss : {o.sum(), (o * o).sum(), lse.sum(), (o * weight).sum() + lse.sum()}) {
      for (const Tensor& by : {q, k, v}) {
        const Tensor gradient = first(loss, by);
        for (const Tensor& again : {q, k, v}) {
          check(unsupported([&] { first(gradient.sum(), again); }), "a second derivative is refused");
          check(unsupported([&] { first((gradient * gradient).sum() + loss, again); }), "a penalty is refused");
        }
      }
    }
    const Tensor dq = first((o * weight).sum(), q);
    check(unsupported([&] { first(dq.sum(), weight); }), "a derivative by the gradient that came in is refused");
    const Tensor expected = torch::autograd::grad({(o * weight).sum()}, {q}, {}, true)[0];
    check(at::equal(dq, expected), "the first derivative is the same with a graph");
    check(!expected.requires_grad() && dq.requires_grad(), "only a graph that is asked for is made");
    const Tensor dw = first((o * weight).sum() + (dq.detach() * weight).sum(), weight);
    check(at::allclose(dw, o + dq), "what is detached may be used");
  }
  // One input that needs no gradient, and only one that does.
  const auto [o, lse] = fa::torch_attention(attention, dense.detach(), k.detach(), v);
  check(unsupported([&, o = o] { first(first((o * o).sum(), v).sum(), v); }), "a second derivative by v alone");
}

void test_errors(at::Device device) {
  const Case c{at::kFloat, 1, 1, 1, 4, 4, 8, 8, false, false};
  const auto attention = make_attention(c, device);
  const auto refused = [&](const Tensor& q, const char* argument) {
    try {
      fa::torch_attention(attention, q, q, q);
      check(false, "nothing was thrown");
    } catch (const fa::Error& error) {
      check(error.code() == fa::ErrorCode::invalid_argument && error.field("argument") == argument, error.what());
    }
  };
  refused(at::zeros({4, 8}, device), "q");
  refused(at::zeros({1, 1, 4, 8}, at::TensorOptions(device).dtype(at::kInt)), "q");
  refused(at::zeros({1, 1, 4, 16}, device), "q");
}

}  // namespace

int main(int argc, char** argv) {
  const bool cuda = argc < 2 || std::string(argv[1]) != "cpu";
#if defined(FA_TORCH_CUDA)
  const bool usable = at::hasCUDA();
#else
  const bool usable = false;
#endif
  if (cuda && !usable) {
    std::puts("skipped: LibTorch sees no CUDA device, or was found without what FA_TORCH_CUDA needs");
    return 77;
  }
  const at::Device device(cuda ? at::kCUDA : at::kCPU, cuda ? 0 : -1);
  try {
    for (const at::ScalarType dtype : {at::kHalf, at::kBFloat16, at::kFloat}) {
      compare({dtype, 2, 4, 2, 65, 130, 64, 64, true, true}, device);
      compare({dtype, 1, 3, 3, 100, 70, 40, 72, false, false}, device);
    }
    test_parts_of_the_graph(device);
    test_second_derivatives(device);
    test_errors(device);
  } catch (const std::exception& exception) {
    std::fprintf(stderr, "%s\n", exception.what());
    return 1;
  }
  std::puts(failures == 0 ? "libtorch: all checks passed" : "libtorch: failed");
  return failures == 0 ? 0 : 1;
}
