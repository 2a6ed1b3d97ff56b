// What forward tells of its scores and of P: QK-clip bounds the greatest logit of each head by scaling its queries and
// keys, and the sums of P over rows say which keys of a cache count most and least.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <numeric>
#include <vector>

#include <fa/attention.hpp>

namespace {

constexpr std::int64_t kHeads = 4, kLength = 64, kHeadDim = 16;
constexpr int kKept = 3;
constexpr float kMostLogit = 2;

using Numbers = std::vector<float>;

fa::TensorView heads_of(Numbers& memory) {
  return fa::TensorView(memory.data(), fa::DType::f32, {1, kHeads, kLength, kHeadDim});
}

struct Statistics {
  Numbers greatest = Numbers(kHeads);
  Numbers entropy = Numbers(kHeads * kLength);
  Numbers sums = Numbers(kHeads * kLength);
  std::vector<std::int32_t> top = std::vector<std::int32_t>(kHeads * kKept);
};

Statistics statistics_of(const fa::Attention& attention, Numbers& q, Numbers& k, Numbers& v) {
  Numbers o(q.size()), lse(kHeads * kLength);
  Statistics result;
  fa::ForwardOutputs outputs{heads_of(o), fa::TensorView(lse.data(), fa::DType::f32, {1, kHeads, kLength}), {}};
  outputs.statistics.max_logit = fa::TensorView(result.greatest.data(), fa::DType::f32, {kHeads});
  outputs.statistics.entropy = fa::TensorView(result.entropy.data(), fa::DType::f32, {1, kHeads, kLength});
  outputs.statistics.column_sums = fa::TensorView(result.sums.data(), fa::DType::f32, {1, kHeads, kLength});
  outputs.statistics.top_keys = fa::TensorView(result.top.data(), fa::DType::i32, {1, kHeads, kKept});
  attention.forward({heads_of(q), heads_of(k), heads_of(v)}, outputs);
  return result;
}

int run() {
  Numbers q(kHeads * kLength * kHeadDim), k(q), v(q);
  for (std::size_t i = 0; i < q.size(); ++i) {
    const auto head = static_cast<float>(i / (kLength * kHeadDim));
    q[i] = (1 + 2 * head) * std::sin(static_cast<float>(i));  // later heads have larger logits
    k[i] = std::cos(0.7f * static_cast<float>(i));
    v[i] = std::sin(3 * static_cast<float>(i));
  }
  fa::AttentionConfig config;
  config.head_dim = kHeadDim;
  config.dtype = fa::DType::f32;
  config.causal = true;
  config.statistics = {fa::MaxLogit::softmax, true, true, fa::ColumnSums::query_heads, kKept};
  const auto attention = fa::Attention::create(config, fa::Device::host());
  const Statistics before = statistics_of(attention, q, k, v);

  for (std::int64_t head = 0; head < kHeads; ++head) {  // half of the factor to each of the two
    const float greatest = before.greatest[static_cast<std::size_t>(head)];
    const float factor = greatest > kMostLogit ? std::sqrt(kMostLogit / greatest) : 1.f;
    for (Numbers* const weights : {&q, &k}) {
      float* const first = weights->data() + head * kLength * kHeadDim;
      std::for_each(first, first + kLength * kHeadDim, [&](float& x) { x *= factor; });
    }
  }
  const Statistics after = statistics_of(attention, q, k, v);

  bool right = true;
  for (std::size_t head = 0; head < kHeads; ++head) {
    const auto row = after.sums.begin() + static_cast<std::ptrdiff_t>(head) * kLength;
    const float all = std::accumulate(row, row + kLength, 0.f);
    const auto least = std::min_element(row, row + kLength) - row, most = std::max_element(row, row + kLength) - row;
    const std::int32_t* const top = after.top.data() + head * kKept;
    std::printf("head %zu: greatest logit %.2f, clipped %.2f; entropy of the last row %.2f nats; ", head,
                before.greatest[head], after.greatest[head], after.entropy[(head + 1) * kLength - 1]);
    std::printf("keys %d, %d and %d count most, key %td least\n", top[0], top[1], top[2], least);
    right = right && top[0] == most && after.greatest[head] <= kMostLogit * 1.0001f && std::abs(all - kLength) < 1e-3f;
  }
  return right && before.greatest.back() > kMostLogit ? 0 : 1;
}

}  // namespace

int main() {
  try {
    return run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
