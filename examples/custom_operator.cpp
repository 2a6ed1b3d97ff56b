// Attention as an operator with its own derivative, in a training loop written by hand: forward, loss, backward,
// update. Gradient descent on q, k and v until the output of causal attention is the sequence that was asked for.

#include <cmath>
#include <cstdio>
#include <exception>
#include <random>
#include <vector>

#include <fa/attention.hpp>

namespace {

constexpr std::int64_t kHeads = 2, kRows = 16, kHeadDim = 8;
constexpr std::size_t kElements = kHeads * kRows * kHeadDim;

using Tensor = std::vector<float>;

fa::TensorView view(Tensor& memory) {
  return fa::TensorView(memory.data(), fa::DType::f32, {1, kHeads, kRows, kHeadDim});
}

fa::Attention make_attention() {
  fa::AttentionConfig config;
  config.head_dim = kHeadDim;
  config.dtype = fa::DType::f32;
  config.causal = true;
  return fa::Attention::create(config, fa::Device::host());
}

/// o = attention(q, k, v), and what its derivative needs later.
class AttentionOperator {
 public:
  const Tensor& forward(Tensor& q, Tensor& k, Tensor& v) {
    attention_.forward({view(q), view(k), view(v)}, {view(o_), rows(lse_)});
    return o_;
  }

  /// The gradients of a loss whose gradient with respect to o is `dout`.
  void backward(Tensor& q, Tensor& k, Tensor& v, Tensor& dout, Tensor& dq, Tensor& dk, Tensor& dv) {
    attention_.backward(
        {.q = view(q), .k = view(k), .v = view(v), .o = view(o_), .lse = rows(lse_), .dout = view(dout)},
        {.dq = view(dq), .dk = view(dk), .dv = view(dv)});
  }

 private:
  static fa::TensorView rows(Tensor& memory) {
    return fa::TensorView(memory.data(), fa::DType::f32, {1, kHeads, kRows});
  }

  fa::Attention attention_ = make_attention();
  Tensor o_ = Tensor(kElements), lse_ = Tensor(kHeads * kRows);
};

Tensor normal(unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> distribution;
  Tensor values(kElements);
  for (float& value : values) value = distribution(generator);
  return values;
}

/// Half the mean square of o - target, and its gradient.
double loss(const Tensor& o, const Tensor& target, Tensor& dout) {
  double sum = 0;
  for (std::size_t i = 0; i < kElements; ++i) {
    dout[i] = o[i] - target[i];
    sum += 0.5 * dout[i] * dout[i];
  }
  return sum / kElements;
}

int run() {
  constexpr int kSteps = 300;
  constexpr float kLearningRate = 0.3f;
  constexpr double kBound = 0.02;  // a twentieth of what it begins with
  Tensor q = normal(1), k = normal(2), v = normal(3), target(kElements);
  for (std::size_t i = 0; i < kElements; ++i) target[i] = std::sin(0.1f * static_cast<float>(i));
  Tensor dout(kElements), dq(kElements), dk(kElements), dv(kElements);
  AttentionOperator attention;
  double now = 0;
  for (int step = 0; step <= kSteps; ++step) {
    now = loss(attention.forward(q, k, v), target, dout);
    if (step % 50 == 0) std::printf("step %3d: loss %.5f\n", step, now);
    attention.backward(q, k, v, dout, dq, dk, dv);
    for (std::size_t i = 0; i < kElements; ++i) {
      q[i] -= kLearningRate * dq[i];
      k[i] -= kLearningRate * dk[i];
      v[i] -= kLearningRate * dv[i];
    }
  }
  std::printf("loss %.5f after %d steps; it should be below %.2f\n", now, kSteps, kBound);
  return now < kBound ? 0 : 1;
}

}  // namespace

int main() {
  try {
    return run();
  } catch (const std::exception& exception) {
    std::fprintf(stderr, "%s\n", exception.what());
    return 1;
  }
}
