#include "model.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <stdexcept>

#include <fa/attention.hpp>

namespace decode {
namespace {

constexpr double kRotaryBase = 10000;

/// The part of a safetensors file that is needed here: tensors by name, as bytes.
class File {
 public:
  explicit File(const std::string& path) : path_(path) {
    std::ifstream stream(path, std::ios::binary);
    const std::string all((std::istreambuf_iterator<char>(stream)), std::istreambuf_iterator<char>());
    std::uint64_t length = 0;
    if (all.size() < sizeof length) throw std::runtime_error(path + " cannot be read");
    std::memcpy(&length, all.data(), sizeof length);
    if (length > all.size() - sizeof length) throw std::runtime_error(path + " is cut off");
    header_ = all.substr(sizeof length, length);
    data_ = all.substr(sizeof length + length);
  }

  /// The bytes of `name`, whose elements are `dtype`.
  std::string bytes(const std::string& name, const std::string& dtype) const {
    const std::size_t entry = header_.find('"' + name + "\":{\"dtype\":\"" + dtype + '"');
    const std::string key = "\"data_offsets\":[";
    const std::size_t at = entry == std::string::npos ? entry : header_.find(key, entry);
    if (at == std::string::npos) throw std::runtime_error(path_ + " has no tensor " + name + " of " + dtype);
    std::size_t digits = 0;
    const std::string numbers = header_.substr(at + key.size());
    const std::size_t begin = std::stoull(numbers, &digits), end = std::stoull(numbers.substr(digits + 1));
    if (begin > end || end > data_.size()) throw std::runtime_error(path_ + " is cut off");
    return data_.substr(begin, end - begin);
  }

  /// bf16 numbers, of which there are `count`.
  Matrix matrix(const std::string& name, std::int64_t count) const {
    const std::string stored = bytes(name, "BF16");
    if (stored.size() != 2 * static_cast<std::size_t>(count)) throw std::runtime_error(name + " has another size");
    Matrix result(static_cast<std::size_t>(count));
    for (std::size_t i = 0; i < result.size(); ++i) {
      std::uint32_t bits = 0;
      std::memcpy(reinterpret_cast<char*>(&bits) + 2, stored.data() + 2 * i, 2);  // little endian, as the file
      std::memcpy(&result[i], &bits, sizeof bits);
    }
    return result;
  }

 private:
  std::string path_, header_, data_;
};

/// x [rows, inputs] W [inputs, outputs]
Matrix product(const float* x, const Matrix& w, std::int64_t rows, std::int64_t inputs) {
  const std::int64_t outputs = static_cast<std::int64_t>(w.size()) / inputs;
  Matrix y(static_cast<std::size_t>(rows * outputs));
  for (std::int64_t i = 0; i < rows; ++i) {
    float* const out = y.data() + i * outputs;
    for (std::int64_t l = 0; l < inputs; ++l) {
      const float factor = x[i * inputs + l];
      const float* const row = w.data() + l * outputs;
      for (std::int64_t j = 0; j < outputs; ++j) out[j] += factor * row[j];
    }
  }
  return y;
}

/// Rows over their root mean square, times the gains.
Matrix normalized(const Matrix& x, const Matrix& gain) {
  Matrix y(x.size());
  for (std::size_t row = 0; row < x.size(); row += kWidth) {
    float squares = 0;
    for (std::size_t c = 0; c < kWidth; ++c) squares += x[row + c] * x[row + c];
    const float inverse = 1 / std::sqrt(squares / kWidth + 1e-5f);
    for (std::size_t c = 0; c < kWidth; ++c) y[row + c] = x[row + c] * inverse * gain[c];
  }
  return y;
}

void add(const Matrix& from, Matrix* to) {
  for (std::size_t i = 0; i < to->size(); ++i) (*to)[i] += from[i];
}

/// Turns the heads of q and k in rows of qkv: the pair (i, i + kHeadDim / 2) of row p by p base^(-2 i / kHeadDim).
void rotate(Matrix* qkv) {
  for (std::size_t row = 0; row < qkv->size() / kQkvWidth; ++row) {
    for (std::int64_t head = 0; head < kHeads + kKvHeads; ++head) {
      float* const x = qkv->data() + row * kQkvWidth + head * kHeadDim;
      for (std::int64_t i = 0; i < kHeadDim / 2; ++i) {
        const double angle = static_cast<double>(row) * std::pow(kRotaryBase, -2.0 * static_cast<double>(i) / kHeadDim);
        const auto cos = static_cast<float>(std::cos(angle)), sin = static_cast<float>(std::sin(angle));
        const float x0 = x[i], x1 = x[i + kHeadDim / 2];
        x[i] = x0 * cos - x1 * sin;
        x[i + kHeadDim / 2] = x1 * cos + x0 * sin;
      }
    }
  }
}

}  // namespace

Model::Model(const std::string& path) {
  const File file(path);
  const std::string codes = file.bytes("alphabet", "I32");
  for (std::size_t i = 0; i + 4 <= codes.size(); i += 4) {
    std::int32_t code = 0;
    std::memcpy(&code, codes.data() + i, sizeof code);
    alphabet_.push_back(code);
  }
  const auto characters = static_cast<std::int64_t>(alphabet_.size());
  token_ = file.matrix("token", characters * kWidth);
  head_ = file.matrix("head", kWidth * characters);
  norm_ = file.matrix("norm", kWidth);
  for (std::int64_t layer = 0; layer < kLayers; ++layer) {
    const std::string of = std::to_string(layer) + ".";
    layers_.push_back({file.matrix(of + "qkv", kWidth * kQkvWidth), file.matrix(of + "out", kWidth * kWidth),
                       file.matrix(of + "up", kWidth * kHidden), file.matrix(of + "down", kHidden * kWidth),
                       file.matrix(of + "norm1", kWidth), file.matrix(of + "norm2", kWidth)});
  }
}

std::vector<int> Model::tokens_of(const std::string& text) const {
  std::vector<int> tokens;
  for (const char byte : text) {
    const auto at = std::find(alphabet_.begin(), alphabet_.end(), static_cast<unsigned char>(byte));
    if (at == alphabet_.end()) throw std::runtime_error(std::string("the model does not know '") + byte + "'");
    tokens.push_back(static_cast<int>(at - alphabet_.begin()));
  }
  return tokens;
}

std::string Model::text_of(const std::vector<int>& tokens) const {
  std::string text;
  for (const int token : tokens) text += static_cast<char>(alphabet_[static_cast<std::size_t>(token)]);
  return text;
}

Matrix Model::embed(const int* tokens, std::int64_t rows) const {
  Matrix x;
  for (std::int64_t i = 0; i < rows; ++i) {
    const float* const row = token_.data() + tokens[i] * kWidth;
    x.insert(x.end(), row, row + kWidth);
  }
  return x;
}

Matrix Model::qkv(std::int64_t layer, const Matrix& x) const {
  const Layer& weights = layers_[static_cast<std::size_t>(layer)];
  const auto rows = static_cast<std::int64_t>(x.size()) / kWidth;
  return product(normalized(x, weights.norm1).data(), weights.qkv, rows, kWidth);
}

void Model::finish_layer(std::int64_t layer, const float* attention, Matrix* x) const {
  const Layer& weights = layers_[static_cast<std::size_t>(layer)];
  const auto rows = static_cast<std::int64_t>(x->size()) / kWidth;
  add(product(attention, weights.out, rows, kWidth), x);
  Matrix hidden = product(normalized(*x, weights.norm2).data(), weights.up, rows, kWidth);
  for (float& h : hidden) h = std::max(h, 0.0f);
  add(product(hidden.data(), weights.down, rows, kHidden), x);
}

Matrix Model::logits(const Matrix& x, std::int64_t row) const {
  const Matrix last(x.begin() + row * kWidth, x.begin() + (row + 1) * kWidth);
  return product(normalized(last, norm_).data(), head_, 1, kWidth);
}

int Model::next(const Matrix& x, std::int64_t row) const {
  const Matrix of_row = logits(x, row);
  return static_cast<int>(std::max_element(of_row.begin(), of_row.end()) - of_row.begin());
}

std::vector<int> generate_without_cache(const Model& model, const std::vector<int>& prompt, std::int64_t count) {
  fa::AttentionConfig config;
  config.head_dim = kHeadDim;
  config.dtype = fa::DType::f32;
  config.causal = true;
  const auto attention = fa::Attention::create(config, fa::Device::host());
  std::vector<int> tokens = prompt;
  for (std::int64_t step = 0; step < count; ++step) {
    const auto rows = static_cast<std::int64_t>(tokens.size());
    Matrix x = model.embed(tokens.data(), rows);
    for (std::int64_t layer = 0; layer < kLayers; ++layer) {
      Matrix qkv = model.qkv(layer, x), o(x.size());
      rotate(&qkv);
      const auto part = [&](std::int64_t first, std::int64_t heads) {  // [1, heads, rows, kHeadDim]
        const std::int64_t shape[] = {1, heads, rows, kHeadDim};
        const std::int64_t strides[] = {rows * kQkvWidth, kHeadDim, kQkvWidth, 1};
        return fa::TensorView(static_cast<void*>(qkv.data() + first), fa::DType::f32, shape, strides);
      };
      const fa::TensorView out(o.data(), fa::DType::f32, {1, rows, kHeads, kHeadDim});
      attention.forward({part(0, kHeads), part(kWidth, kKvHeads), part(kWidth + kKvWidth, kKvHeads)},
                        {out.swap_axes(1, 2)});
      model.finish_layer(layer, o.data(), &x);
    }
    tokens.push_back(model.next(x, rows - 1));
  }
  return {tokens.begin() + static_cast<std::ptrdiff_t>(prompt.size()), tokens.end()};
}

}  // namespace decode
