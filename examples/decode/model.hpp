#ifndef FA_EXAMPLES_DECODE_MODEL_HPP_
#define FA_EXAMPLES_DECODE_MODEL_HPP_

#include <cstdint>
#include <string>
#include <vector>

/// A small character transformer, as tools/make_char_model.py trains it: everything but attention, in plain loops.
namespace decode {

constexpr std::int64_t kLayers = 2, kHeads = 4, kKvHeads = 2, kHeadDim = 32, kHidden = 256;
constexpr std::int64_t kWidth = kHeads * kHeadDim, kKvWidth = kKvHeads * kHeadDim;
constexpr std::int64_t kQkvWidth = kWidth + 2 * kKvWidth;  ///< heads of q, then of k, then of v

using Matrix = std::vector<float>;  ///< row-major

class Model {
 public:
  /// Reads the weights from a safetensors file. Throws std::runtime_error.
  explicit Model(const std::string& path);

  /// The number of each character of a text. Throws std::runtime_error for one that the model does not know.
  std::vector<int> tokens_of(const std::string& text) const;
  std::string text_of(const std::vector<int>& tokens) const;

  /// [rows, kWidth] of as many tokens.
  Matrix embed(const int* tokens, std::int64_t rows) const;
  /// What goes into attention of a layer, [rows, kQkvWidth], without rotary embedding.
  Matrix qkv(std::int64_t layer, const Matrix& x) const;
  /// Adds to x [rows, kWidth] what a layer makes of attention's output, [rows, kWidth].
  void finish_layer(std::int64_t layer, const float* attention, Matrix* x) const;
  /// Of every token behind row `row` of x.
  Matrix logits(const Matrix& x, std::int64_t row) const;
  /// The most likely token behind row `row` of x.
  int next(const Matrix& x, std::int64_t row) const;

 private:
  struct Layer {
    Matrix qkv, out, up, down, norm1, norm2;
  };
  std::vector<int> alphabet_;
  Matrix token_, head_, norm_;
  std::vector<Layer> layers_;
};

/// `count` tokens behind `prompt`, greedily, each by a computation of the whole sequence from the first token on:
/// causal attention of plain tensors on the host, and a rotary embedding of its own. What a cache must not change.
std::vector<int> generate_without_cache(const Model& model, const std::vector<int>& prompt, std::int64_t count);

}  // namespace decode

#endif  // FA_EXAMPLES_DECODE_MODEL_HPP_
