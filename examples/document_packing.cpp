// Several documents in one sequence, each blind to the others: the same numbers as one call for each document.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <vector>

#include <fa/attention.hpp>

namespace {

constexpr std::int64_t kHeadDim = 16;

fa::TensorView rows(std::vector<float>& memory, std::int64_t first, std::int64_t count) {
  return fa::TensorView(memory.data() + first * kHeadDim, fa::DType::f32, {1, 1, count, kHeadDim});
}

int run() {
  const std::vector<std::int64_t> lengths{5, 1, 9, 3};
  std::vector<std::int32_t> document;  // of each row
  for (std::size_t i = 0; i < lengths.size(); ++i) document.insert(document.end(), lengths[i], static_cast<int>(i));
  const auto total = static_cast<std::int64_t>(document.size());
  std::vector<float> q(total * kHeadDim), k(q), v(q), packed(q), apart(q);
  for (std::size_t i = 0; i < q.size(); ++i) {
    const auto x = static_cast<float>(i);
    q[i] = std::sin(x);
    k[i] = std::cos(x);
    v[i] = std::sin(2 * x);
  }

  fa::AttentionConfig config;
  config.head_dim = kHeadDim;
  config.dtype = fa::DType::f32;
  config.causal = true;
  const auto plain = fa::Attention::create(config, fa::Device::host());
  config.mask = fa::functions::documents();  // doc[q] == doc[kv]
  const auto masked = fa::Attention::create(config, fa::Device::host());

  const fa::TensorView doc(document.data(), fa::DType::i32, {total});
  masked.forward({rows(q, 0, total), rows(k, 0, total), rows(v, 0, total), {{"doc", doc}}}, {rows(packed, 0, total)});
  std::int64_t first = 0;
  for (const std::int64_t length : lengths) {
    plain.forward({rows(q, first, length), rows(k, first, length), rows(v, first, length)},
                  {rows(apart, first, length)});
    first += length;
  }
  float error = 0;
  for (std::size_t i = 0; i < packed.size(); ++i) error = std::max(error, std::abs(packed[i] - apart[i]));
  std::printf("%zu documents, %lld rows: largest difference %.1e\n", lengths.size(), static_cast<long long>(total),
              static_cast<double>(error));
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
