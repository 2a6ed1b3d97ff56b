#include <fa/attention.hpp>

#include <cmath>
#include <cstdio>
#include <vector>

// Attention over one key is that key's value.
int main() {
  fa::AttentionConfig config;
  config.head_dim = 8;
  config.dtype = fa::DType::f32;
  const auto attention = fa::Attention::create(config, fa::Device::host());
  std::vector<float> q(8, 0.5F), k(8, 0.25F), v(8, 3.0F), o(8);
  const auto view = [](std::vector<float>& data) { return fa::TensorView(data.data(), fa::DType::f32, {1, 1, 1, 8}); };
  attention.forward({view(q), view(k), view(v)}, {view(o), {}});
  std::printf("fa %s: %g\n", fa::version(), static_cast<double>(o[0]));
  return std::fabs(o[0] - 3.0F) < 1e-6F ? 0 : 1;
}
