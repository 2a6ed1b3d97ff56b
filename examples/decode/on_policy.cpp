// On-policy: a sampler draws texts with a KV cache in pages under continuous batching, and a trainer computes the
// log-probabilities of the same tokens from whole texts, in plain tensors. With fa::Invariance::rows attention gives
// both the same bits, and so does everything around it here: the difference is exactly 0.
//
//   fa_example_on_policy tests/data/char_model.safetensors
//
// Ends with 0 if it is.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "cached_attention.hpp"
#include "memory.hpp"
#include "model.hpp"

namespace {

using namespace decode;

// Texts get long enough for more than one of the fixed splits of the keys.
constexpr std::int64_t kPlaces = 3, kPageSize = 16, kPagesOfRequest = 40, kTokens = 600;

struct Text {
  std::vector<int> tokens;
  std::size_t prompt = 0;
  std::int64_t joins_at = 0;              ///< step of the sampler
  std::vector<double> log_probabilities;  ///< of the tokens behind the prompt
};

double log_probability(const Matrix& logits, int token) {
  const float greatest = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit) - greatest);
  return static_cast<double>(logits[static_cast<std::size_t>(token)]) - greatest - std::log(sum);
}

int draw(const Matrix& logits, std::mt19937& random) {
  std::vector<double> weights;
  const float greatest = *std::max_element(logits.begin(), logits.end());
  for (const float logit : logits) weights.push_back(std::exp(static_cast<double>(logit) - greatest));
  return static_cast<int>(std::discrete_distribution<int>(weights.begin(), weights.end())(random));
}

/// One token of every text a step, of those that have joined.
std::string sample(const Model& model, std::vector<Text>& texts) {
  CachedAttention attention({.requests = kPlaces,
                             .pages = kPlaces * kPagesOfRequest,
                             .page_size = kPageSize,
                             .pages_of_request = kPagesOfRequest,
                             .invariance = fa::Invariance::rows});
  std::mt19937 random(7);
  std::int32_t next_page = 0;
  const auto complete = [](const Text& text) { return text.tokens.size() == static_cast<std::size_t>(kTokens); };
  for (std::int64_t step = 0; !std::all_of(texts.begin(), texts.end(), complete); ++step) {
    std::vector<int> tokens(kPlaces, 0);
    for (std::int64_t i = 0; i < kPlaces; ++i) {
      const Text& text = texts[static_cast<std::size_t>(i)];
      if (complete(text)) attention.length(i) = 0;
      if (complete(text) || step < text.joins_at) continue;
      const std::int32_t position = attention.length(i)++;
      tokens[static_cast<std::size_t>(i)] = text.tokens[static_cast<std::size_t>(position)];
      if (position % kPageSize == 0) attention.page(i, position / kPageSize) = next_page++;
    }
    Matrix x = model.embed(tokens.data(), kPlaces);
    for (std::int64_t layer = 0; layer < kLayers; ++layer) {
      model.finish_layer(layer, attention.run(layer, model.qkv(layer, x), 1), &x);
    }
    for (std::int64_t i = 0; i < kPlaces; ++i) {
      Text& text = texts[static_cast<std::size_t>(i)];
      if (attention.length(i) == 0 || text.tokens.size() != static_cast<std::size_t>(attention.length(i))) continue;
      const Matrix logits = model.logits(x, i);
      const int token = draw(logits, random);
      text.log_probabilities.push_back(log_probability(logits, token));
      text.tokens.push_back(token);
    }
  }
  return attention.device();
}

/// Attention of whole texts, as a training forward calls it.
class TrainingAttention {
 public:
  explicit TrainingAttention(std::int64_t rows)
      : rows_(rows),
        gpu_(Gpu::open()),
        attention_(fa::Attention::create(config(), gpu_ ? fa::Device::cuda(0) : fa::Device::host())),
        qkv_(gpu_, static_cast<std::size_t>(rows * kQkvWidth)),
        keys_(gpu_, static_cast<std::size_t>(2 * rows * kKvWidth)),
        o_(gpu_, static_cast<std::size_t>(rows * kWidth)),
        length_(gpu_, 1) {
    length_[0] = static_cast<std::int32_t>(rows);
  }

  const float* run(const Matrix& qkv) {
    std::copy(qkv.begin(), qkv.end(), qkv_.data());
    const fa::Stream stream = gpu_ ? gpu_->stream() : nullptr;
    const fa::TensorView q = part(qkv_.data(), kHeads, kQkvWidth);
    const fa::TensorView k = part(keys_.data(), kKvHeads, kKvWidth);
    const fa::TensorView v = part(keys_.data() + rows_ * kKvWidth, kKvHeads, kKvWidth);
    fa::AppendInputs turned{part(qkv_.data() + kWidth, kKvHeads, kQkvWidth),
                            part(qkv_.data() + kWidth + kKvWidth, kKvHeads, kQkvWidth), k, v};
    turned.seqused_kv = length_.data();
    turned.rotary.dims = kHeadDim;
    turned.q = turned.q_out = q;
    attention_.append(turned, stream);
    attention_.forward({q, k, v}, {part(o_.data(), kHeads, kWidth)}, stream);
    if (gpu_) gpu_->synchronize();
    return o_.data();
  }

 private:
  static fa::AttentionConfig config() {
    fa::AttentionConfig config;
    config.head_dim = kHeadDim;
    config.dtype = fa::DType::f32;
    config.causal = true;
    config.invariance = fa::Invariance::rows;
    return config;
  }
  /// [1, heads, rows, kHeadDim].
  fa::TensorView part(float* data, std::int64_t heads, std::int64_t width) const {
    const std::int64_t shape[] = {1, heads, rows_, kHeadDim};
    const std::int64_t strides[] = {rows_ * width, kHeadDim, width, 1};
    return fa::TensorView(static_cast<void*>(data), fa::DType::f32, shape, strides);
  }

  std::int64_t rows_;
  std::shared_ptr<Gpu> gpu_;
  fa::Attention attention_;
  Shared<float> qkv_, keys_, o_;
  Shared<std::int32_t> length_;
};

/// The greatest difference of the two log-probabilities of a token.
double difference(const Model& model, const Text& text) {
  const std::int64_t rows = kTokens - 1;  // the last token is behind the last row
  TrainingAttention attention(rows);
  Matrix x = model.embed(text.tokens.data(), rows);
  for (std::int64_t layer = 0; layer < kLayers; ++layer) {
    model.finish_layer(layer, attention.run(model.qkv(layer, x)), &x);
  }
  double greatest = 0;
  for (std::size_t i = 0; i < text.log_probabilities.size(); ++i) {
    const std::size_t at = text.prompt + i;
    const double trained = log_probability(model.logits(x, static_cast<std::int64_t>(at) - 1), text.tokens[at]);
    if (!std::isfinite(trained)) throw std::runtime_error("a log-probability is not finite");
    greatest = std::max(greatest, std::abs(trained - text.log_probabilities[i]));
  }
  return greatest;
}

int run(const char* path) {
  const Model model(path);
  std::vector<Text> texts;
  for (const char* const prompt : {"The harbour ", "When ", "To pay attention is to "}) {
    const std::vector<int> tokens = model.tokens_of(prompt);
    texts.push_back({tokens, tokens.size(), 17 * static_cast<std::int64_t>(texts.size()), {}});
  }
  const std::string device = sample(model, texts);
  double greatest = 0;
  std::size_t count = 0;
  for (const Text& text : texts) {
    greatest = std::max(greatest, difference(model, text));
    count += text.log_probabilities.size();
  }
  std::printf("attention on %s: %zu tokens sampled, and their log-probabilities differ by %g in training\n",
              device.c_str(), count, greatest);
  return greatest == 0 && count > 1000 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s MODEL\n", argv[0]);
    return 2;
  }
  try {
    return run(argv[1]);
  } catch (const std::exception& exception) {
    std::fprintf(stderr, "%s\n", exception.what());
    return 1;
  }
}
