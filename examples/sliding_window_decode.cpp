// Decoding with a sliding window and an attention sink: one row a step sees the last keys of the cache alone, and gives
// what the same row of a call over the whole sequence gives.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <vector>

#include <fa/attention.hpp>

namespace {

constexpr std::int64_t kHeads = 4, kKvHeads = 2, kLength = 24, kHeadDim = 16, kWindow = 6;

/// `count` rows from `first` on of [1, heads, kLength, kHeadDim].
fa::TensorView rows(std::vector<float>& memory, std::int64_t heads, std::int64_t first, std::int64_t count) {
  const std::int64_t shape[] = {1, heads, count, kHeadDim};
  const std::int64_t strides[] = {heads * kLength * kHeadDim, kLength * kHeadDim, kHeadDim, 1};
  return fa::TensorView(static_cast<void*>(memory.data() + first * kHeadDim), fa::DType::f32, shape, strides);
}

int run() {
  std::vector<float> q(kHeads * kLength * kHeadDim), k(kKvHeads * kLength * kHeadDim), v(k), whole(q), steps(q);
  for (std::size_t i = 0; i < q.size(); ++i) q[i] = std::sin(static_cast<float>(i));
  for (std::size_t i = 0; i < k.size(); ++i) {
    k[i] = std::cos(static_cast<float>(i));
    v[i] = std::sin(3 * static_cast<float>(i));
  }
  std::vector<float> sink{0.5f, -1.0f, 0.0f, 2.0f};

  fa::AttentionConfig config;
  config.head_dim = kHeadDim;
  config.dtype = fa::DType::f32;
  config.causal = true;
  config.window_left = kWindow;  // a row sees itself and the kWindow keys before
  config.sink = true;
  const auto attention = fa::Attention::create(config, fa::Device::host());
  const fa::TensorView sinks(sink.data(), fa::DType::f32, {kHeads});

  attention.forward(
      {rows(q, kHeads, 0, kLength), rows(k, kKvHeads, 0, kLength), rows(v, kKvHeads, 0, kLength), {}, sinks},
      {rows(whole, kHeads, 0, kLength)});
  for (std::int64_t step = 0; step < kLength; ++step) {  // the cache holds step + 1 keys: bottom-right alignment
    attention.forward(
        {rows(q, kHeads, step, 1), rows(k, kKvHeads, 0, step + 1), rows(v, kKvHeads, 0, step + 1), {}, sinks},
        {rows(steps, kHeads, step, 1)});
  }
  float error = 0;
  for (std::size_t i = 0; i < whole.size(); ++i) error = std::max(error, std::abs(whole[i] - steps[i]));
  std::printf("%lld steps, a window of %lld: largest difference %.1e\n", static_cast<long long>(kLength),
              static_cast<long long>(kWindow), static_cast<double>(error));
  return error < 1e-5f ? 0 : 1;
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
