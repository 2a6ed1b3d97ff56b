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
#include <memory>
#include <new>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include <fa/attention.hpp>

#include "char_transformer.hpp"

namespace {

using char_transformer::kHeadDim;
using char_transformer::kHeads;
using char_transformer::kWidth;
using char_transformer::Matrix;
using char_transformer::Text;

constexpr int kBatch = 4, kContext = 64, kTokens = kBatch * kContext;
constexpr int kMaxSteps = 1500;
constexpr float kLearningRate = 5e-3f;
constexpr double kBound = 1.75;  ///< nats a character, mean of the last steps

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

// ---- attention ----

/// Self-attention of [b, s, 3, h, d] packed q, k and v: no copies, the views say where everything lies.
class OneDevice final : public char_transformer::SelfAttention {
 public:
  OneDevice() : gpu_(Gpu::open()) {
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

  const float* forward(const Matrix& qkv) override {
    std::copy(qkv.begin(), qkv.end(), qkv_->data());
    attention_->forward({part(*qkv_, 0), part(*qkv_, 1), part(*qkv_, 2)}, {rows(*o_), lse()});
    if (gpu_) gpu_->synchronize();
    return o_->data();
  }

  const float* backward(const Matrix& dout) override {
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

// ---- the text ----

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
  const Text text = char_transformer::read_text(path, kContext);
  std::mt19937 generator(7);
  OneDevice attention;
  char_transformer::Rows rows{.positions = {}, .of_step = kTokens};
  for (int i = 0; i < kTokens; ++i) rows.positions.push_back(i % kContext);
  char_transformer::Model model(text.characters, kContext, rows, attention, generator);
  std::printf("%zu characters, %d different; attention on %s\n", text.tokens.size(), text.characters,
              attention.device().c_str());
  std::printf("loss of a uniform guess %.2f, of the best guess from the last character %.2f; wanted %.2f\n",
              std::log(static_cast<double>(text.characters)), bigram_loss(text), kBound);
  const auto start = std::chrono::steady_clock::now();
  double mean = std::log(static_cast<double>(text.characters));
  for (int step = 1; step <= kMaxSteps; ++step) {
    const auto windows = char_transformer::draw(text, kBatch, kContext, generator);
    mean += 0.05 * (model.train(windows.tokens, windows.next, step, kLearningRate) - mean);
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
