// A character transformer writes on from a prompt, one token a step: its keys and values are in a KV cache in pages,
// which append fills and attention reads. Each token is the one that a computation of the whole sequence gives, without
// a cache.
//
//   fa_example_decode tests/data/char_model.safetensors [PROMPT]
//
// Ends with 0 if all tokens are equal.

#include <algorithm>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "cached_attention.hpp"
#include "model.hpp"

namespace {

using namespace decode;

constexpr std::int64_t kNewTokens = 96, kPageSize = 16;

/// x [rows, kWidth] behind the last layer, of the last `rows` tokens.
Matrix forward(const Model& model, CachedAttention& attention, const int* tokens, std::int64_t rows) {
  Matrix x = model.embed(tokens, rows);
  for (std::int64_t layer = 0; layer < kLayers; ++layer) {
    model.finish_layer(layer, attention.run(layer, model.qkv(layer, x), rows), &x);
  }
  return x;
}

std::vector<int> generate(const Model& model, CachedAttention& attention, const std::vector<int>& prompt) {
  const auto prompt_rows = static_cast<std::int64_t>(prompt.size());
  // The pages of the one request, in an order that nothing depends on: the last page of the pool first.
  for (std::int64_t i = 0; i < attention.shape().pages_of_request; ++i) {
    attention.page(0, i) = static_cast<std::int32_t>(attention.shape().pages - 1 - i);
  }
  attention.length(0) = static_cast<std::int32_t>(prompt_rows);
  const Matrix x = forward(model, attention, prompt.data(), prompt_rows);
  std::vector<int> tokens{model.next(x, prompt_rows - 1)};
  while (static_cast<std::int64_t>(tokens.size()) < kNewTokens) {
    ++attention.length(0);
    tokens.push_back(model.next(forward(model, attention, &tokens.back(), 1), 0));
  }
  return tokens;
}

int run(const char* path, const std::string& text) {
  const Model model(path);
  const std::vector<int> prompt = model.tokens_of(text);
  const auto rows = static_cast<std::int64_t>(prompt.size());
  const std::int64_t pages = (rows + kNewTokens + kPageSize - 1) / kPageSize;
  CachedAttention attention(
      {.requests = 1, .pages = pages + 2, .page_size = kPageSize, .pages_of_request = pages, .rows = rows});
  const std::vector<int> tokens = generate(model, attention, prompt);
  std::printf("attention on %s, pages of %lld\n%s|%s\n", attention.device().c_str(), static_cast<long long>(kPageSize),
              text.c_str(), model.text_of(tokens).c_str());
  const std::vector<int> expected = generate_without_cache(model, prompt, kNewTokens);
  const auto differs = std::mismatch(tokens.begin(), tokens.end(), expected.begin()).first - tokens.begin();
  if (tokens != expected) {
    std::printf("without a cache, token %lld is another:\n%s\n", static_cast<long long>(differs),
                model.text_of(expected).c_str());
    return 1;
  }
  std::printf("%zu tokens, the same without a cache\n", tokens.size());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2 && argc != 3) {
    std::fprintf(stderr, "usage: %s MODEL [PROMPT]\n", argv[0]);
    return 2;
  }
  try {
    return run(argv[1], argc == 3 ? argv[2] : "To pay attention is ");
  } catch (const std::exception& exception) {
    std::fprintf(stderr, "%s\n", exception.what());
    return 1;
  }
}
