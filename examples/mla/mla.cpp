// A DeepSeek-style attention layer (multi-head latent attention), absorbed and not: both give the same rows.
//
// The layer caches a latent c and a rotated key r of each token, for all heads. Without absorption every head makes its
// keys and values of them:  k = [W_uk c, r], v = W_uv c. Absorbed, the head's W_uk goes to the query and its W_uv to
// the result:  (W_uk c) . q = c . (W_uk^T q),  and  sum_j p_j W_uv c_j = W_uv sum_j p_j c_j. Attention then has one KV
// head, whose keys are [c, r], and whose values are the first columns of the keys (docs/mla.md).

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <random>
#include <vector>

#include <fa/attention.hpp>

namespace {

using Values = std::vector<float>;

constexpr std::int64_t kHeads = 4, kTokens = 40, kNewTokens = 3;
constexpr std::int64_t kLatent = 512, kRotary = 64, kNope = 128, kValue = 128;

/// As the numbers of a model are: of variance 1 / `terms`, where so many are added.
Values normals(std::int64_t count, std::int64_t terms, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0.0f, 1.0f / std::sqrt(static_cast<float>(terms)));
  Values values(static_cast<std::size_t>(count));
  for (float& value : values) value = normal(generator);
  return values;
}

/// Of tokens [tokens, ...] the last kNewTokens attend.
struct Layer {
  Values w_uk = normals(kHeads * kNope * kLatent, kLatent, 1);   // [heads, nope, latent]
  Values w_uv = normals(kHeads * kValue * kLatent, kLatent, 2);  // [heads, value, latent]
  Values latents = normals(kTokens * kLatent, 1, 3);             // [tokens, latent]
  Values rotated = normals(kTokens * kRotary, 1, 4);             // [tokens, rotary]
  Values q_nope = normals(kNewTokens * kHeads * kNope, 1, 5);    // [new tokens, heads, nope]
  Values q_rotated = normals(kNewTokens * kHeads * kRotary, 1, 6);
};

/// out[row] = sum_i w[row, i] x[i]
void multiply(const float* w, std::int64_t rows, std::int64_t columns, const float* x, float* out) {
  for (std::int64_t row = 0; row < rows; ++row) {
    out[row] = 0;
    for (std::int64_t i = 0; i < columns; ++i) out[row] += w[row * columns + i] * x[i];
  }
}

/// out[i] = sum_row w[row, i] x[row]
void multiply_transposed(const float* w, std::int64_t rows, std::int64_t columns, const float* x, float* out) {
  std::fill_n(out, columns, 0.0f);
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t i = 0; i < columns; ++i) out[i] += w[row * columns + i] * x[row];
  }
}

fa::TensorView view(Values& values, std::int64_t tokens, std::int64_t heads, std::int64_t d) {
  return fa::TensorView(values.data(), fa::DType::f32, {1, tokens, heads, d}).swap_axes(1, 2);
}

fa::AttentionConfig config_of(int d_qk) {
  fa::AttentionConfig config;
  config.head_dim = d_qk;
  config.dtype = fa::DType::f32;
  config.causal = true;                                                  // the new tokens are the last ones
  config.scale = 1.0f / std::sqrt(static_cast<float>(kNope + kRotary));  // of either form
  return config;
}

/// [new tokens, heads, value], with keys and values of every head.
Values not_absorbed(const Layer& layer) {
  constexpr std::int64_t kDim = kNope + kRotary;
  Values q(kNewTokens * kHeads * kDim), k(kTokens * kHeads * kDim), v(kTokens * kHeads * kValue);
  for (std::int64_t i = 0; i < kNewTokens * kHeads; ++i) {
    std::copy_n(&layer.q_nope[static_cast<std::size_t>(i * kNope)], kNope, &q[static_cast<std::size_t>(i * kDim)]);
    std::copy_n(&layer.q_rotated[static_cast<std::size_t>(i * kRotary)], kRotary,
                &q[static_cast<std::size_t>(i * kDim + kNope)]);
  }
  for (std::int64_t token = 0; token < kTokens; ++token) {
    const float* const latent = layer.latents.data() + token * kLatent;
    for (std::int64_t head = 0; head < kHeads; ++head) {
      float* const key = k.data() + (token * kHeads + head) * kDim;
      multiply(layer.w_uk.data() + head * kNope * kLatent, kNope, kLatent, latent, key);
      std::copy_n(layer.rotated.data() + token * kRotary, kRotary, key + kNope);
      multiply(layer.w_uv.data() + head * kValue * kLatent, kValue, kLatent, latent,
               v.data() + (token * kHeads + head) * kValue);
    }
  }
  fa::AttentionConfig config = config_of(kDim);
  config.head_dim_v = kValue;
  Values o(kNewTokens * kHeads * kValue);
  fa::Attention::create(config, fa::Device::host())
      .forward({view(q, kNewTokens, kHeads, kDim), view(k, kTokens, kHeads, kDim), view(v, kTokens, kHeads, kValue)},
               {view(o, kNewTokens, kHeads, kValue)});
  return o;
}

/// The same from the cache [tokens, latent + rotary] alone.
Values absorbed(const Layer& layer) {
  constexpr std::int64_t kDim = kLatent + kRotary;
  Values q(kNewTokens * kHeads * kDim), cache(kTokens * kDim);
  for (std::int64_t i = 0; i < kNewTokens * kHeads; ++i) {
    float* const row = q.data() + i * kDim;
    multiply_transposed(layer.w_uk.data() + i % kHeads * kNope * kLatent, kNope, kLatent,
                        layer.q_nope.data() + i * kNope, row);
    std::copy_n(layer.q_rotated.data() + i * kRotary, kRotary, row + kLatent);
  }
  for (std::int64_t token = 0; token < kTokens; ++token) {
    std::copy_n(layer.latents.data() + token * kLatent, kLatent, cache.data() + token * kDim);
    std::copy_n(layer.rotated.data() + token * kRotary, kRotary, cache.data() + token * kDim + kLatent);
  }
  fa::AttentionConfig config = config_of(kDim);
  config.value_in_key = kLatent;  // no v
  Values latent(kNewTokens * kHeads * kLatent);
  fa::ForwardInputs inputs;
  inputs.q = view(q, kNewTokens, kHeads, kDim);
  inputs.k = view(cache, kTokens, 1, kDim);
  fa::Attention::create(config, fa::Device::host()).forward(inputs, {view(latent, kNewTokens, kHeads, kLatent)});
  Values o(kNewTokens * kHeads * kValue);
  for (std::int64_t i = 0; i < kNewTokens * kHeads; ++i) {
    multiply(layer.w_uv.data() + i % kHeads * kValue * kLatent, kValue, kLatent, latent.data() + i * kLatent,
             o.data() + i * kValue);
  }
  return o;
}

int run() {
  const Layer layer;
  const Values plain = not_absorbed(layer), from_cache = absorbed(layer);
  float error = 0, largest = 0;
  for (std::size_t i = 0; i < plain.size(); ++i) {
    error = std::max(error, std::abs(plain[i] - from_cache[i]));
    largest = std::max(largest, std::abs(plain[i]));
  }
  std::printf("%lld heads, %lld floats of a token in the cache instead of %lld: largest difference %.1e of %.2f\n",
              static_cast<long long>(kHeads), static_cast<long long>(kLatent + kRotary),
              static_cast<long long>(kHeads * (kNope + kRotary + kValue)), static_cast<double>(error),
              static_cast<double>(largest));
  const auto finite = [](float x) { return std::isfinite(x); };
  return largest > 0.1f && error < 1e-5f && std::all_of(from_cache.begin(), from_cache.end(), finite) ? 0 : 1;
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
