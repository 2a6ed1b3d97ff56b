// A causal transformer layer that learns to write like a text, one character at a time: embedding, attention with a
// residual, a two-layer perceptron with a residual, and a softmax over the characters; Adam. Attention and its
// gradients are fa's, on the GPU if there is one, else on the CPU; the rest is plain loops on the CPU.
//
//   fa_example_char_transformer TEXT_FILE
//
// Ends with 0 once the loss has come below kBound nats a character. Who knows only the last character, or cannot
// learn where to look, stays above 2.1.

#include <cuda.h>
#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <fstream>
#include <iterator>
#include <memory>
#include <new>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include <fa/attention.hpp>

namespace {

constexpr int kBatch = 4, kContext = 64, kHeads = 4, kHeadDim = 16, kWidth = kHeads * kHeadDim, kHidden = 4 * kWidth;
constexpr int kTokens = kBatch * kContext;
constexpr int kMaxSteps = 1500;
constexpr float kLearningRate = 5e-3f;
constexpr double kBound = 1.75;  ///< nats a character, mean of the last steps

using Matrix = std::vector<float>;  ///< row-major

// ---- memory that the CPU and the GPU share ----

/// The CUDA driver, opened at run time: the program also starts on a machine without one.
class Gpu {
 public:
  /// Nothing where there is no usable GPU.
  static std::unique_ptr<Gpu> open() {
    auto gpu = std::unique_ptr<Gpu>(new Gpu);
    return gpu->ready_ ? std::move(gpu) : nullptr;
  }

  void* allocate(std::size_t bytes) const {
    CUdeviceptr pointer = 0;
    if (allocate_(&pointer, bytes, CU_MEM_ATTACH_GLOBAL) != CUDA_SUCCESS) throw std::bad_alloc();
    return reinterpret_cast<void*>(pointer);
  }
  void release(void* memory) const { release_(reinterpret_cast<CUdeviceptr>(memory)); }

  /// Waits until the GPU has done what was queued: then the CPU may look.
  void synchronize() const {
    if (synchronize_() != CUDA_SUCCESS) throw std::runtime_error("the GPU has failed");
  }

 private:
  Gpu() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == nullptr) return;
    decltype(&cuInit) initialize = nullptr;
    decltype(&cuDevicePrimaryCtxRetain) retain = nullptr;
    decltype(&cuCtxSetCurrent) set_current = nullptr;
    CUcontext context = nullptr;
    ready_ = find(library, "cuInit", initialize) && find(library, "cuDevicePrimaryCtxRetain", retain) &&
             find(library, "cuCtxSetCurrent", set_current) && find(library, "cuMemAllocManaged", allocate_) &&
             find(library, "cuMemFree_v2", release_) && find(library, "cuCtxSynchronize", synchronize_) &&
             initialize(0) == CUDA_SUCCESS && retain(&context, 0) == CUDA_SUCCESS &&
             set_current(context) == CUDA_SUCCESS;
  }

  template <typename Function>
  static bool find(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    return function != nullptr;
  }

  bool ready_ = false;
  CUresult (*allocate_)(CUdeviceptr*, std::size_t, unsigned) = nullptr;
  CUresult (*release_)(CUdeviceptr) = nullptr;
  CUresult (*synchronize_)() = nullptr;
};

/// Floats that attention reads or writes where it runs, and the loops here on the CPU.
class Shared {
 public:
  Shared(const Gpu* gpu, std::size_t size) : gpu_(gpu), size_(size) {
    data_ = gpu_ != nullptr ? static_cast<float*>(gpu_->allocate(size * sizeof(float))) : new float[size];
    std::fill_n(data_, size_, 0.0f);
  }
  ~Shared() {
    if (gpu_ != nullptr) {
      gpu_->release(data_);
    } else {
      delete[] data_;
    }
  }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;

  float* data() { return data_; }
  std::size_t size() const { return size_; }

 private:
  const Gpu* gpu_;
  std::size_t size_;
  float* data_;
};

// ---- loops ----

/// c [n, m] += a [n, k] b [k, m]. Four rows of b at a time, so that the compiler's vectors have something to do; every
/// width here is a multiple of four.
void multiply_add(const float* a, const float* b, float* c, int n, int k, int m) {
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

Matrix transposed(const float* x, int rows, int columns) {
  Matrix result(static_cast<std::size_t>(rows) * columns);
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < columns; ++j) result[j * rows + i] = x[i * columns + j];
  }
  return result;
}

/// Every row over its root mean square; the inverse of that is kept for the derivative.
Matrix normalized(const Matrix& x, std::vector<float>& inverse) {
  Matrix y(x.size());
  for (int i = 0; i < kTokens; ++i) {
    float squares = 0;
    for (int c = 0; c < kWidth; ++c) squares += x[i * kWidth + c] * x[i * kWidth + c];
    inverse[i] = 1 / std::sqrt(squares / kWidth + 1e-6f);
    for (int c = 0; c < kWidth; ++c) y[i * kWidth + c] = x[i * kWidth + c] * inverse[i];
  }
  return y;
}

/// dx += what dy, the gradient of y = normalized(x), makes of it.
void add_normalized_gradient(const Matrix& dy, const Matrix& y, const std::vector<float>& inverse, Matrix& dx) {
  for (int i = 0; i < kTokens; ++i) {
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

  /// y = x W for the rows of x.
  Matrix apply(const float* x) const {
    Matrix y(static_cast<std::size_t>(kTokens) * columns_);
    multiply_add(x, value.data(), y.data(), kTokens, rows_, columns_);
    return y;
  }

  /// Adds x^T dy to the gradient; returns dx = dy W^T.
  Matrix differentiate(const float* x, const float* dy) {
    multiply_add(transposed(x, kTokens, rows_).data(), dy, gradient.data(), rows_, kTokens, columns_);
    Matrix dx(static_cast<std::size_t>(kTokens) * rows_);
    multiply_add(dy, transposed(value.data(), rows_, columns_).data(), dx.data(), kTokens, columns_, rows_);
    return dx;
  }

  /// One step of Adam, and an empty gradient.
  void update(int step) {
    constexpr float kMeanDecay = 0.9f, kSquareDecay = 0.99f;
    const float mean_correction = 1 - std::pow(kMeanDecay, static_cast<float>(step));
    const float square_correction = 1 - std::pow(kSquareDecay, static_cast<float>(step));
    for (std::size_t i = 0; i < size(); ++i) {
      mean_[i] += (1 - kMeanDecay) * (gradient[i] - mean_[i]);
      square_[i] += (1 - kSquareDecay) * (gradient[i] * gradient[i] - square_[i]);
      value[i] -= kLearningRate * (mean_[i] / mean_correction) / (std::sqrt(square_[i] / square_correction) + 1e-8f);
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

// ---- attention ----

/// Self-attention of [b, s, 3, h, d] packed q, k and v: no copies, the views say where everything lies.
class SelfAttention {
 public:
  SelfAttention() : gpu_(Gpu::open()) {
    if (gpu_) try_gpu();
    if (!attention_) {
      gpu_.reset();
      attention_.emplace(fa::Attention::create(config(), fa::Device::host()));
    }
    for (auto* memory : {&qkv_, &dqkv_}) *memory = std::make_unique<Shared>(gpu_.get(), 3 * kTokens * kWidth);
    for (auto* memory : {&o_, &dout_}) *memory = std::make_unique<Shared>(gpu_.get(), kTokens * kWidth);
    lse_ = std::make_unique<Shared>(gpu_.get(), kTokens * kHeads);
  }

  std::string device() const { return fa::to_string(attention_->device()); }

  /// o [b, s, h, d] of qkv.
  const float* forward(const Matrix& qkv) {
    std::copy(qkv.begin(), qkv.end(), qkv_->data());
    attention_->forward({part(*qkv_, 0), part(*qkv_, 1), part(*qkv_, 2)}, {rows(*o_), lse()});
    if (gpu_) gpu_->synchronize();
    return o_->data();
  }

  /// dqkv, the gradient of what forward was given, from dout, that of what it returned.
  const float* backward(const Matrix& dout) {
    std::copy(dout.begin(), dout.end(), dout_->data());
    attention_->backward({part(*qkv_, 0), part(*qkv_, 1), part(*qkv_, 2), rows(*o_), lse(), rows(*dout_)},
                         {part(*dqkv_, 0), part(*dqkv_, 1), part(*dqkv_, 2)});
    if (gpu_) gpu_->synchronize();
    return dqkv_->data();
  }

 private:
  static fa::AttentionConfig config() {
    fa::AttentionConfig config;
    config.head_dim = kHeadDim;
    config.dtype = fa::DType::f32;
    config.causal = true;
    return config;
  }

  /// A GPU that fa has no kernels for is no reason not to learn.
  void try_gpu() {
    try {
      attention_.emplace(fa::Attention::create(config(), fa::Device::cuda(0)));
      const fa::AttentionShape shape{.b = kBatch, .h_q = kHeads, .s_q = kContext, .s_kv = kContext};
      attention_->prepare(shape);
      attention_->prepare_backward(shape);
    } catch (const fa::Error& error) {
      std::printf("on the CPU, because: %s\n", error.what());
      attention_.reset();
    }
  }

  /// [b, h, s, d] views of [b, s, ...] memory.
  static fa::TensorView view(float* data, std::int64_t row_stride) {
    const std::int64_t shape[] = {kBatch, kHeads, kContext, kHeadDim};
    const std::int64_t strides[] = {kContext * row_stride, kHeadDim, row_stride, 1};
    return fa::TensorView(data, fa::DType::f32, shape, strides);
  }
  static fa::TensorView part(Shared& packed, int which) { return view(packed.data() + which * kWidth, 3 * kWidth); }
  static fa::TensorView rows(Shared& memory) { return view(memory.data(), kWidth); }
  fa::TensorView lse() { return fa::TensorView(lse_->data(), fa::DType::f32, {kBatch, kHeads, kContext}); }

  std::unique_ptr<Gpu> gpu_;
  std::optional<fa::Attention> attention_;
  std::unique_ptr<Shared> qkv_, dqkv_, o_, dout_, lse_;
};

// ---- the model ----

class Model {
 public:
  Model(int characters, std::mt19937& generator)
      : characters_(characters),
        embedding_(characters, kWidth, 0.5f, generator),
        position_(kContext, kWidth, 0.5f, generator),
        qkv_(kWidth, 3 * kWidth, deviation(kWidth), generator),
        out_(kWidth, kWidth, deviation(kWidth) / 2, generator),
        up_(kWidth, kHidden, deviation(kWidth), generator),
        down_(kHidden, kWidth, deviation(kHidden) / 2, generator),
        logits_(kWidth, padded(), deviation(kWidth) / 4, generator) {}

  std::string device() const { return attention_.device(); }

  /// One step on kBatch windows of kContext characters: the loss before it, in nats a character.
  double train(const std::vector<int>& tokens, const std::vector<int>& next, int step) {
    forward(tokens);
    const double loss = differentiate_loss(next);
    backward(tokens);
    for (Parameter* parameter : {&embedding_, &position_, &qkv_, &out_, &up_, &down_, &logits_}) {
      parameter->update(step);
    }
    return loss;
  }

 private:
  static float deviation(int inputs) { return 1 / std::sqrt(static_cast<float>(inputs)); }

  /// The widths of matrices are multiples of four; the characters that nobody writes never get a probability.
  int padded() const { return (characters_ + 3) / 4 * 4; }

  void forward(const std::vector<int>& tokens) {
    x0_.assign(kTokens * kWidth, 0);
    for (int i = 0; i < kTokens; ++i) {
      for (int c = 0; c < kWidth; ++c) {
        x0_[i * kWidth + c] = embedding_.value[tokens[i] * kWidth + c] + position_.value[i % kContext * kWidth + c];
      }
    }
    y0_ = normalized(x0_, inverse0_);
    o_ = attention_.forward(qkv_.apply(y0_.data()));
    x1_ = out_.apply(o_);
    add(x0_, x1_);
    y1_ = normalized(x1_, inverse1_);
    hidden_ = up_.apply(y1_.data());
    for (float& h : hidden_) h = std::max(h, 0.0f);
    x2_ = down_.apply(hidden_.data());
    add(x1_, x2_);
    y2_ = normalized(x2_, inverse2_);
    scores_ = logits_.apply(y2_.data());
  }

  /// The mean cross-entropy; the scores become its gradient.
  double differentiate_loss(const std::vector<int>& next) {
    double loss = 0;
    for (int i = 0; i < kTokens; ++i) {
      float* row = &scores_[static_cast<std::size_t>(i) * padded()];
      const float greatest = *std::max_element(row, row + characters_);
      float sum = 0;
      for (int c = 0; c < characters_; ++c) sum += std::exp(row[c] - greatest);
      loss -= row[next[i]] - greatest - std::log(sum);
      for (int c = 0; c < characters_; ++c) row[c] = std::exp(row[c] - greatest) / sum / kTokens;
      row[next[i]] -= 1.0f / kTokens;
      std::fill(row + characters_, row + padded(), 0.0f);
    }
    return loss / kTokens;
  }

  void backward(const std::vector<int>& tokens) {
    Matrix dx(kTokens * kWidth);
    add_normalized_gradient(logits_.differentiate(y2_.data(), scores_.data()), y2_, inverse2_, dx);
    Matrix dhidden = down_.differentiate(hidden_.data(), dx.data());
    for (std::size_t i = 0; i < dhidden.size(); ++i) dhidden[i] = hidden_[i] > 0 ? dhidden[i] : 0;
    add_normalized_gradient(up_.differentiate(y1_.data(), dhidden.data()), y1_, inverse1_, dx);
    const float* dqkv = attention_.backward(out_.differentiate(o_, dx.data()));
    add_normalized_gradient(qkv_.differentiate(y0_.data(), dqkv), y0_, inverse0_, dx);
    for (int i = 0; i < kTokens; ++i) {
      for (int c = 0; c < kWidth; ++c) {
        embedding_.gradient[tokens[i] * kWidth + c] += dx[i * kWidth + c];
        position_.gradient[i % kContext * kWidth + c] += dx[i * kWidth + c];
      }
    }
  }

  static void add(const Matrix& x, Matrix& y) {
    for (std::size_t i = 0; i < y.size(); ++i) y[i] += x[i];
  }

  int characters_;
  Parameter embedding_, position_, qkv_, out_, up_, down_, logits_;
  SelfAttention attention_;
  Matrix x0_, y0_, x1_, y1_, hidden_, x2_, y2_, scores_;
  const float* o_ = nullptr;
  std::vector<float> inverse0_ = std::vector<float>(kTokens), inverse1_ = inverse0_, inverse2_ = inverse0_;
};

// ---- the text ----

struct Text {
  std::vector<int> tokens;
  int characters = 0;  ///< different ones
};

Text read_text(const char* path) {
  std::ifstream file(path, std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (bytes.size() <= kContext + 1)
    throw std::runtime_error(std::string(path) + " is no text of at least 66 characters");
  Text text;
  std::vector<int> number(256, -1);
  for (const char byte : bytes) {
    int& token = number[static_cast<unsigned char>(byte)];
    if (token < 0) token = text.characters++;
    text.tokens.push_back(token);
  }
  return text;
}

/// The loss of knowing how often each character follows each other in this very text.
double bigram_loss(const Text& text) {
  std::vector<double> pairs(text.characters * text.characters), first(text.characters);
  for (std::size_t i = 0; i + 1 < text.tokens.size(); ++i) {
    ++pairs[text.tokens[i] * text.characters + text.tokens[i + 1]];
    ++first[text.tokens[i]];
  }
  double loss = 0;
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    if (pairs[i] > 0) loss -= pairs[i] * std::log(pairs[i] / first[i / text.characters]);
  }
  return loss / static_cast<double>(text.tokens.size() - 1);
}

int run(const char* path) {
  const Text text = read_text(path);
  std::mt19937 generator(7);
  Model model(text.characters, generator);
  std::printf("%zu characters, %d different; attention on %s\n", text.tokens.size(), text.characters,
              model.device().c_str());
  std::printf("loss of a uniform guess %.2f, of the best guess from the last character %.2f; wanted %.2f\n",
              std::log(static_cast<double>(text.characters)), bigram_loss(text), kBound);
  const auto start = std::chrono::steady_clock::now();
  double mean = std::log(static_cast<double>(text.characters));
  for (int step = 1; step <= kMaxSteps; ++step) {
    std::vector<int> tokens, next;
    for (int b = 0; b < kBatch; ++b) {
      const auto at =
          text.tokens.begin() + static_cast<std::ptrdiff_t>(generator() % (text.tokens.size() - kContext - 1));
      tokens.insert(tokens.end(), at, at + kContext);
      next.insert(next.end(), at + 1, at + 1 + kContext);
    }
    mean += 0.05 * (model.train(tokens, next, step) - mean);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (step % 50 == 0) std::printf("step %4d: loss %.3f, %.1f s\n", step, mean, seconds);
    if (mean < kBound) {
      std::printf("loss below %.2f after %d steps and %.1f s\n", kBound, step, seconds);
      return 0;
    }
  }
  std::printf("the loss did not come below %.2f\n", kBound);
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s TEXT_FILE\n", argv[0]);
    return 2;
  }
  try {
    return run(argv[1]);
  } catch (const std::exception& exception) {
    std::fprintf(stderr, "%s\n", exception.what());
    return 1;
  }
}
