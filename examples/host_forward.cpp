// Causal attention of one head on the host device: every row of o is a weighted mean of the rows of v up to its own.

#include <cstdio>
#include <exception>
#include <vector>

#include <fa/attention.hpp>

namespace {

void run() {
  constexpr std::int64_t kRows = 4, kHeadDim = 8;
  std::vector<float> q(kRows * kHeadDim, 1.0f), k(q), v(q.size()), o(q.size()), lse(kRows);
  for (std::size_t i = 0; i < v.size(); ++i) {
    v[i] = static_cast<float>(i / kHeadDim);  // row j holds j
  }

  fa::AttentionConfig config;
  config.head_dim = kHeadDim;
  config.dtype = fa::DType::f32;
  config.causal = true;
  const auto attention = fa::Attention::create(config, fa::Device::host());

  const auto view = [](std::vector<float>& memory) {
    return fa::TensorView(memory.data(), fa::DType::f32, {1, 1, kRows, kHeadDim});
  };
  attention.forward({view(q), view(k), view(v)}, {view(o), fa::TensorView(lse.data(), fa::DType::f32, {1, 1, kRows})});

  for (std::size_t row = 0; row < kRows; ++row) {
    std::printf("row %zu: o = %.3f, lse = %.3f\n", row, static_cast<double>(o[row * kHeadDim]),
                static_cast<double>(lse[row]));
  }
}

}  // namespace

int main() {
  try {
    run();
    return 0;
  } catch (const std::exception& exception) {
    std::fprintf(stderr, "%s\n", exception.what());
    return 1;
  }
}
