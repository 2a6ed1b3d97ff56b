#ifndef FA_EXAMPLES_CHAR_TRANSFORMER_HPP_
#define FA_EXAMPLES_CHAR_TRANSFORMER_HPP_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <functional>
#include <iterator>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

/// A causal transformer layer over characters, in plain loops on the CPU; its attention is given. Rows of activations
/// are characters of some windows of a text: all of them, or those that a rank has.
namespace char_transformer {

constexpr int kHeads = 4, kHeadDim = 16, kWidth = kHeads * kHeadDim, kHidden = 4 * kWidth;

using Matrix = std::vector<float>;  ///< row-major

// ---- loops ----

/// c [n, m] += a [n, k] b [k, m]. Four rows of b at a time, so that the compiler's vectors have something to do; every
/// width here is a multiple of four.
inline void multiply_add(const float* a, const float* b, float* c, int n, int k, int m) {
  for (int i = 0; i < n; ++i) {
    const float* row = a + i * k;
    float* out = c + i * m;
    for (int l = 0; l < k; l += 4) {
      const float *b0 = b + l * m, *b1 = b0 + m, *b2 = b1 + m, *b3 = b2 + m;
      const float a0 = row[l], a1 = row[l + 1], a2 = row[l + 2], a3 = row[l + 3];
      for (int j = 0; j < m; ++j) out[j] += a0 * b0[j] + a1 * b1[j] + a2 * b2[j] + a3 * b3[j];
    }
  }
}

inline Matrix transposed(const float* x, int rows, int columns) {
  Matrix result(static_cast<std::size_t>(rows) * columns);
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < columns; ++j) result[j * rows + i] = x[i * columns + j];
  }
  return result;
}

/// Every row over its root mean square; the inverse of that is kept for the derivative.
inline Matrix normalized(const Matrix& x, std::vector<float>& inverse) {
  Matrix y(x.size());
  inverse.resize(x.size() / kWidth);
  for (std::size_t i = 0; i < inverse.size(); ++i) {
    float squares = 0;
    for (int c = 0; c < kWidth; ++c) squares += x[i * kWidth + c] * x[i * kWidth + c];
    inverse[i] = 1 / std::sqrt(squares / kWidth + 1e-6f);
    for (int c = 0; c < kWidth; ++c) y[i * kWidth + c] = x[i * kWidth + c] * inverse[i];
  }
  return y;
}

/// dx += what dy, the gradient of y = normalized(x), makes of it.
inline void add_normalized_gradient(const Matrix& dy, const Matrix& y, const std::vector<float>& inverse, Matrix& dx) {
  for (std::size_t i = 0; i < inverse.size(); ++i) {
    float mean = 0;
    for (int c = 0; c < kWidth; ++c) mean += dy[i * kWidth + c] * y[i * kWidth + c] / kWidth;
    for (int c = 0; c < kWidth; ++c) {
      dx[i * kWidth + c] += inverse[i] * (dy[i * kWidth + c] - mean * y[i * kWidth + c]);
    }
  }
}

// ---- parameters ----

/// A weight matrix [rows, columns], its gradient, and Adam's moments.
class Parameter {
 public:
  Parameter(int rows, int columns, float deviation, std::mt19937& generator)
      : rows_(rows), columns_(columns), value(size()), gradient(size()), mean_(size()), square_(size()) {
    std::normal_distribution<float> normal(0, deviation);
    for (float& v : value) v = normal(generator);
  }

  /// y = x W for the `count` rows of x.
  Matrix apply(const float* x, int count) const {
    Matrix y(static_cast<std::size_t>(count) * columns_);
    multiply_add(x, value.data(), y.data(), count, rows_, columns_);
    return y;
  }

  /// Adds x^T dy to the gradient; returns dx = dy W^T.
  Matrix differentiate(const float* x, const float* dy, int count) {
    multiply_add(transposed(x, count, rows_).data(), dy, gradient.data(), rows_, count, columns_);
    Matrix dx(static_cast<std::size_t>(count) * rows_);
    multiply_add(dy, transposed(value.data(), rows_, columns_).data(), dx.data(), count, columns_, rows_);
    return dx;
  }

  /// One step of Adam, and an empty gradient.
  void update(int step, float rate) {
    constexpr float kMeanDecay = 0.9f, kSquareDecay = 0.99f;
    const float mean_correction = 1 - std::pow(kMeanDecay, static_cast<float>(step));
    const float square_correction = 1 - std::pow(kSquareDecay, static_cast<float>(step));
    for (std::size_t i = 0; i < size(); ++i) {
      mean_[i] += (1 - kMeanDecay) * (gradient[i] - mean_[i]);
      square_[i] += (1 - kSquareDecay) * (gradient[i] * gradient[i] - square_[i]);
      value[i] -= rate * (mean_[i] / mean_correction) / (std::sqrt(square_[i] / square_correction) + 1e-8f);
      gradient[i] = 0;
    }
  }

 private:
  std::size_t size() const { return static_cast<std::size_t>(rows_) * static_cast<std::size_t>(columns_); }
  int rows_, columns_;

 public:
  Matrix value, gradient;

 private:
  Matrix mean_, square_;
};

// ---- the model ----

/// Self-attention of rows of packed q, k and v, [row, 3, h, d].
class SelfAttention {
 public:
  virtual ~SelfAttention() = default;
  /// o [row, h, d] of qkv.
  virtual const float* forward(const Matrix& qkv) = 0;
  /// dqkv, the gradient of what forward was given, from dout, that of what it returned.
  virtual const float* backward(const Matrix& dout) = 0;
};

/// Which characters of a step a model computes.
struct Rows {
  std::vector<int> positions;  ///< of each row, in its window
  int of_step = 0;             ///< rows of all ranks
  /// Adds up the numbers of all ranks. None: there is one.
  std::function<void(std::vector<float>&)> sum = nullptr;
};

class Model {
 public:
  Model(int characters, int context, const Rows& rows, SelfAttention& attention, std::mt19937& generator)
      : characters_(characters),
        rows_(rows),
        attention_(attention),
        embedding_(characters, kWidth, 0.5f, generator),
        position_(context, kWidth, 0.5f, generator),
        qkv_(kWidth, 3 * kWidth, deviation(kWidth), generator),
        out_(kWidth, kWidth, deviation(kWidth) / 2, generator),
        up_(kWidth, kHidden, deviation(kWidth), generator),
        down_(kHidden, kWidth, deviation(kHidden) / 2, generator),
        logits_(kWidth, padded(), deviation(kWidth) / 4, generator) {}

  /// One step: the loss before it, in nats a character of all ranks. `tokens` and `next` are those of the rows.
  double train(const std::vector<int>& tokens, const std::vector<int>& next, int step, float rate) {
    forward(tokens);
    double loss = differentiate_loss(next);
    backward(tokens);
    if (rows_.sum) loss = sum_gradients(loss);
    for (Parameter* parameter : parameters()) parameter->update(step, rate);
    return loss;
  }

 private:
  static float deviation(int inputs) { return 1 / std::sqrt(static_cast<float>(inputs)); }

  /// The widths of matrices are multiples of four; the characters that nobody writes never get a probability.
  int padded() const { return (characters_ + 3) / 4 * 4; }
  int count() const { return static_cast<int>(rows_.positions.size()); }
  std::vector<Parameter*> parameters() { return {&embedding_, &position_, &qkv_, &out_, &up_, &down_, &logits_}; }

  void forward(const std::vector<int>& tokens) {
    const int n = count();
    x0_.assign(static_cast<std::size_t>(n) * kWidth, 0);
    for (int i = 0; i < n; ++i) {
      for (int c = 0; c < kWidth; ++c) {
        x0_[i * kWidth + c] =
            embedding_.value[tokens[i] * kWidth + c] + position_.value[rows_.positions[i] * kWidth + c];
      }
    }
    y0_ = normalized(x0_, inverse0_);
    o_ = attention_.forward(qkv_.apply(y0_.data(), n));
    x1_ = out_.apply(o_, n);
    add(x0_, x1_);
    y1_ = normalized(x1_, inverse1_);
    hidden_ = up_.apply(y1_.data(), n);
    for (float& h : hidden_) h = std::max(h, 0.0f);
    x2_ = down_.apply(hidden_.data(), n);
    add(x1_, x2_);
    y2_ = normalized(x2_, inverse2_);
    scores_ = logits_.apply(y2_.data(), n);
  }

  /// The cross-entropy of the rows, as their part of the mean of the step; the scores become its gradient.
  double differentiate_loss(const std::vector<int>& next) {
    double loss = 0;
    const auto all = static_cast<float>(rows_.of_step);
    for (int i = 0; i < count(); ++i) {
      float* row = &scores_[static_cast<std::size_t>(i) * padded()];
      const float greatest = *std::max_element(row, row + characters_);
      float sum = 0;
      for (int c = 0; c < characters_; ++c) sum += std::exp(row[c] - greatest);
      loss -= row[next[i]] - greatest - std::log(sum);
      for (int c = 0; c < characters_; ++c) row[c] = std::exp(row[c] - greatest) / sum / all;
      row[next[i]] -= 1.0f / all;
      std::fill(row + characters_, row + padded(), 0.0f);
    }
    return loss / rows_.of_step;
  }

  void backward(const std::vector<int>& tokens) {
    const int n = count();
    Matrix dx(static_cast<std::size_t>(n) * kWidth);
    add_normalized_gradient(logits_.differentiate(y2_.data(), scores_.data(), n), y2_, inverse2_, dx);
    Matrix dhidden = down_.differentiate(hidden_.data(), dx.data(), n);
    for (std::size_t i = 0; i < dhidden.size(); ++i) dhidden[i] = hidden_[i] > 0 ? dhidden[i] : 0;
    add_normalized_gradient(up_.differentiate(y1_.data(), dhidden.data(), n), y1_, inverse1_, dx);
    const float* dqkv = attention_.backward(out_.differentiate(o_, dx.data(), n));
    add_normalized_gradient(qkv_.differentiate(y0_.data(), dqkv, n), y0_, inverse0_, dx);
    for (int i = 0; i < n; ++i) {
      for (int c = 0; c < kWidth; ++c) {
        embedding_.gradient[tokens[i] * kWidth + c] += dx[i * kWidth + c];
        position_.gradient[rows_.positions[i] * kWidth + c] += dx[i * kWidth + c];
      }
    }
  }

  /// Gradients of weights are sums over the rows of all ranks, and so is the loss.
  double sum_gradients(double loss) {
    std::vector<float> all{static_cast<float>(loss)};
    for (const Parameter* parameter : parameters()) {
      all.insert(all.end(), parameter->gradient.begin(), parameter->gradient.end());
    }
    rows_.sum(all);
    auto from = all.begin() + 1;
    for (Parameter* parameter : parameters()) {
      std::copy_n(from, parameter->gradient.size(), parameter->gradient.begin());
      from += static_cast<std::ptrdiff_t>(parameter->gradient.size());
    }
    return all.front();
  }

  static void add(const Matrix& x, Matrix& y) {
    for (std::size_t i = 0; i < y.size(); ++i) y[i] += x[i];
  }

  int characters_;
  const Rows rows_;
  SelfAttention& attention_;
  Parameter embedding_, position_, qkv_, out_, up_, down_, logits_;
  Matrix x0_, y0_, x1_, y1_, hidden_, x2_, y2_, scores_;
  const float* o_ = nullptr;
  std::vector<float> inverse0_, inverse1_, inverse2_;
};

// ---- the text ----

struct Text {
  std::vector<int> tokens;
  int characters = 0;  ///< different ones
};

inline Text read_text(const char* path, int context) {
  std::ifstream file(path, std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (bytes.size() <= static_cast<std::size_t>(context) + 1) {
    throw std::runtime_error(std::string(path) + " is no text of at least " + std::to_string(context + 2) +
                             " characters");
  }
  Text text;
  std::vector<int> number(256, -1);
  for (const char byte : bytes) {
    int& token = number[static_cast<unsigned char>(byte)];
    if (token < 0) token = text.characters++;
    text.tokens.push_back(token);
  }
  return text;
}

/// Windows of a text that are drawn for a step, one behind the other, and what follows each character.
struct Windows {
  std::vector<int> tokens, next;
};

inline Windows draw(const Text& text, int count, int context, std::mt19937& generator) {
  Windows windows;
  for (int b = 0; b < count; ++b) {
    const auto at = text.tokens.begin() + static_cast<std::ptrdiff_t>(generator() % (text.tokens.size() - context - 1));
    windows.tokens.insert(windows.tokens.end(), at, at + context);
    windows.next.insert(windows.next.end(), at + 1, at + 1 + context);
  }
  return windows;
}

}  // namespace char_transformer

#endif  // FA_EXAMPLES_CHAR_TRANSFORMER_HPP_
