// Attention with a bias for each pair of a query and a key, as models of proteins have, and the bias learned: gradient
// descent on it alone makes a head copy the value of the key before each row.

#include <cmath>
#include <cstdio>
#include <exception>
#include <vector>

#include <fa/attention.hpp>

namespace {

constexpr std::int64_t kHeads = 2, kRows = 6, kHeadDim = 8;

fa::TensorView tensor(std::vector<float>& memory) {
  return fa::TensorView(memory.data(), fa::DType::f32, {1, kHeads, kRows, kHeadDim});
}

int run() {
  std::vector<float> q(kHeads * kRows * kHeadDim), k(q), v(q), o(q), dout(q), dq(q), dk(q), dv(q);
  for (std::size_t i = 0; i < q.size(); ++i) {
    const auto x = static_cast<float>(i);
    q[i] = std::sin(x);
    k[i] = std::cos(2 * x);
    v[i] = std::sin(3 * x);
  }
  std::vector<float> lse(kHeads * kRows), bias(kHeads * kRows * kRows), dbias(bias);
  const fa::TensorView lse_view(lse.data(), fa::DType::f32, {1, kHeads, kRows});
  const fa::TensorView bias_view(bias.data(), fa::DType::f32, {kHeads, kRows, kRows});
  const fa::TensorView dbias_view(dbias.data(), fa::DType::f32, {kHeads, kRows, kRows});

  fa::AttentionConfig config;
  config.head_dim = kHeadDim;
  config.dtype = fa::DType::f32;
  config.score = fa::functions::bias("hqk", fa::DType::f32, true);  // score + bias[h, q, kv]
  const auto attention = fa::Attention::create(config, fa::Device::host());

  double first = 0, loss = 0;
  for (int step = 0; step < 200; ++step) {
    fa::ForwardInputs inputs{tensor(q), tensor(k), tensor(v), {{"bias", bias_view}}};
    attention.forward(inputs, {tensor(o), lse_view});
    loss = 0;
    for (std::size_t i = 0; i < o.size(); ++i) {
      const std::size_t row = i / kHeadDim % kRows;
      const float difference = o[i] - (row == 0 ? v[i] : v[i - kHeadDim]);
      loss += 0.5 * static_cast<double>(difference * difference);
      dout[i] = difference;
    }
    if (step == 0) first = loss;
    fa::BackwardOutputs gradients{tensor(dq), tensor(dk), tensor(dv), {{"bias", dbias_view}}};
    attention.backward({tensor(q), tensor(k), tensor(v), tensor(o), lse_view, tensor(dout), {}, {{"bias", bias_view}}},
                       gradients);
    for (std::size_t i = 0; i < bias.size(); ++i) bias[i] -= 2 * dbias[i];
  }
  std::printf("loss %.4f -> %.4f\n", first, loss);
  return loss < 0.05 * first ? 0 : 1;
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
