// Trains the layer of char_transformer.cpp by ranks that share each window of the text: a rank has some characters of
// every window, computes all of its layer for them, and its attention reads the keys of all ranks. Gradients of weights
// are added up, so every rank has the same weights. The losses are those of one device with the whole windows.
//
//   fa_example_train_ranks TEXT_FILE [--ranks 2] [--steps 50] [--scheme automatic]
//       ranks are threads of this process, on the CPU
//   examples/context_parallel/launch.py 2 fa_example_train_ranks TEXT_FILE [--steps 50] [--scheme automatic]
//       ranks are processes, each with a GPU, over NCCL
//
// Ends with 0 where each loss is that of one device within 1e-3, and the last ones are lower than the first.

#include <cuda.h>
#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <memory>
#include <new>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <fa/parallel.hpp>

#include "../char_transformer.hpp"
#include "ranks.hpp"

namespace {

using char_transformer::kHeadDim;
using char_transformer::kHeads;
using char_transformer::kWidth;
using char_transformer::Matrix;
using char_transformer::Rows;
using char_transformer::Text;

constexpr int kBatch = 2, kContext = 128, kTokens = kBatch * kContext;
constexpr float kLearningRate = 2e-3f;
constexpr double kBound = 1e-3;
constexpr int kSkipped = 77;

struct Options {
  const char* text = nullptr;
  int ranks = 2;
  int steps = 50;
  fa::Scheme scheme = fa::Scheme::automatic;
};

// ---- memory of a device ----

/// A GPU, by the CUDA driver, opened at run time: the program also runs on a machine without one.
class Gpu {
 public:
  explicit Gpu(int ordinal) : ordinal_(ordinal) {
    library_ = dlopen("libcuda.so.1", RTLD_NOW);
    if (library_ == nullptr) throw std::runtime_error("there is no CUDA driver");
    CUdevice device = 0;
    CUcontext context = nullptr;
    check(find<decltype(&cuInit)>("cuInit")(0));
    check(find<decltype(&cuDeviceGet)>("cuDeviceGet")(&device, ordinal));
    check(find<decltype(&cuDevicePrimaryCtxRetain)>("cuDevicePrimaryCtxRetain")(&context, device));
    check(find<decltype(&cuCtxSetCurrent)>("cuCtxSetCurrent")(context));
    allocate_ = find<Allocate>("cuMemAlloc_v2");
    free_ = find<Free>("cuMemFree_v2");
    upload_ = find<Upload>("cuMemcpyHtoD_v2");
    download_ = find<Download>("cuMemcpyDtoH_v2");
  }

  fa::Device device() const { return fa::Device::cuda(ordinal_); }
  void* allocate(std::size_t bytes) const {
    CUdeviceptr pointer = 0;
    if (allocate_(&pointer, bytes) != CUDA_SUCCESS) throw std::bad_alloc();
    return reinterpret_cast<void*>(pointer);
  }
  void free(void* memory) const { free_(reinterpret_cast<CUdeviceptr>(memory)); }
  void upload(void* to, const void* from, std::size_t bytes) const {
    check(upload_(reinterpret_cast<CUdeviceptr>(to), from, bytes));
  }
  /// Waits for what was queued on the stream that all calls here are on.
  void download(void* to, const void* from, std::size_t bytes) const {
    check(download_(to, reinterpret_cast<CUdeviceptr>(from), bytes));
  }

 private:
  using Allocate = CUresult (*)(CUdeviceptr*, std::size_t);
  using Free = CUresult (*)(CUdeviceptr);
  using Upload = CUresult (*)(CUdeviceptr, const void*, std::size_t);
  using Download = CUresult (*)(void*, CUdeviceptr, std::size_t);

  template <class Function>
  Function find(const char* name) const {
    void* const found = dlsym(library_, name);
    if (found == nullptr) throw std::runtime_error(std::string("the driver has no ") + name);
    return reinterpret_cast<Function>(found);
  }
  static void check(CUresult result) {
    if (result != CUDA_SUCCESS) throw std::runtime_error("the driver failed with " + std::to_string(result));
  }

  int ordinal_;
  void* library_ = nullptr;
  Allocate allocate_ = nullptr;
  Free free_ = nullptr;
  Upload upload_ = nullptr;
  Download download_ = nullptr;
};

/// Floats where attention runs: of a GPU, or of the host.
class Floats {
 public:
  Floats(const Gpu* gpu, std::size_t size) : gpu_(gpu), host_(gpu == nullptr ? size : 0), size_(size) {
    data_ = gpu_ == nullptr ? host_.data() : static_cast<float*>(gpu_->allocate(size * sizeof(float)));
  }
  ~Floats() {
    if (gpu_ != nullptr) gpu_->free(data_);
  }
  Floats(const Floats&) = delete;
  Floats& operator=(const Floats&) = delete;

  float* data() const { return data_; }
  void upload(const std::vector<float>& from, std::size_t at = 0) {
    if (gpu_ == nullptr) {
      std::ranges::copy(from, data_ + at);
    } else {
      gpu_->upload(data_ + at, from.data(), from.size() * sizeof(float));
    }
  }
  std::vector<float> download() const {
    if (gpu_ == nullptr) return host_;
    std::vector<float> to(size_);
    gpu_->download(to.data(), data_, size_ * sizeof(float));
    return to;
  }

 private:
  const Gpu* gpu_;
  std::vector<float> host_;
  std::size_t size_;
  float* data_;
};

// ---- attention ----

fa::AttentionConfig attention_config() {
  fa::AttentionConfig config;
  config.head_dim = kHeadDim;
  config.dtype = fa::DType::f32;
  config.causal = true;
  return config;
}

/// fa::Attention of whole windows, or fa::ContextParallel of a rank's part: `rows` of each window.
template <class Attention>
class Calls final : public char_transformer::SelfAttention {
 public:
  Calls(Attention attention, const Gpu* gpu, int rows)
      : attention_(std::move(attention)),
        rows_(rows),
        qkv_(gpu, 3 * size()),
        dqkv_(gpu, 3 * size()),
        o_(gpu, size()),
        dout_(gpu, size()),
        lse_(gpu, size() / kHeadDim) {}

  const float* forward(const Matrix& qkv) override {
    qkv_.upload(qkv);
    attention_.forward({part(qkv_, 0), part(qkv_, 1), part(qkv_, 2)}, {view(o_.data(), kWidth), lse()});
    result_ = o_.download();
    return result_.data();
  }

  const float* backward(const Matrix& dout) override {
    dout_.upload(dout);
    attention_.backward(
        {part(qkv_, 0), part(qkv_, 1), part(qkv_, 2), view(o_.data(), kWidth), lse(), view(dout_.data(), kWidth)},
        {part(dqkv_, 0), part(dqkv_, 1), part(dqkv_, 2)});
    result_ = dqkv_.download();
    return result_.data();
  }

 private:
  std::size_t size() const { return static_cast<std::size_t>(kBatch * rows_ * kWidth); }
  /// [b, h, s, d] of [b, s, ...] memory.
  fa::TensorView view(float* data, std::int64_t row_stride) const {
    const std::int64_t shape[] = {kBatch, kHeads, rows_, kHeadDim};
    const std::int64_t strides[] = {rows_ * row_stride, kHeadDim, row_stride, 1};
    return fa::TensorView(data, fa::DType::f32, shape, strides);
  }
  fa::TensorView part(const Floats& packed, int which) const {
    return view(packed.data() + which * kWidth, 3 * kWidth);
  }
  fa::TensorView lse() const { return fa::TensorView(lse_.data(), fa::DType::f32, {kBatch, kHeads, rows_}); }

  Attention attention_;
  std::int64_t rows_;
  Floats qkv_, dqkv_, o_, dout_, lse_;
  Matrix result_;
};

/// Adds up vectors of all ranks in the order of ranks, so that all come to the same bits.
class Sum {
 public:
  Sum(fa::Communicator& communicator, const Gpu* gpu) : communicator_(communicator), gpu_(gpu) {}

  void operator()(std::vector<float>& numbers) {
    const int n = communicator_.size(), me = communicator_.rank();
    const std::size_t count = numbers.size();
    if (!all_) all_ = std::make_unique<Floats>(gpu_, count * static_cast<std::size_t>(n));
    const auto of = [&](int rank) { return all_->data() + count * static_cast<std::size_t>(rank); };
    all_->upload(numbers, count * static_cast<std::size_t>(me));
    std::vector<fa::Communicator::Transfer> transfers;
    for (int peer = 0; peer < n; ++peer) {
      if (peer == me) continue;
      transfers.push_back({true, peer, of(me), static_cast<std::int64_t>(count), fa::DType::f32});
      transfers.push_back({false, peer, of(peer), static_cast<std::int64_t>(count), fa::DType::f32});
    }
    communicator_.wait(communicator_.exchange(transfers, nullptr), nullptr);
    communicator_.synchronize(nullptr);
    const std::vector<float> all = all_->download();
    for (std::size_t i = 0; i < count; ++i) {
      double sum = 0;
      for (std::size_t rank = 0; rank < static_cast<std::size_t>(n); ++rank) {
        sum += static_cast<double>(all[rank * count + i]);
      }
      numbers[i] = static_cast<float>(sum);
    }
  }

 private:
  fa::Communicator& communicator_;
  const Gpu* gpu_;
  std::unique_ptr<Floats> all_;
};

// ---- training ----

/// Losses of steps, of the rows of each window that `of_window` names.
std::vector<double> train(const Text& text, int steps, const std::vector<std::int64_t>& of_window,
                          char_transformer::SelfAttention& attention, std::function<void(std::vector<float>&)> sum) {
  Rows rows{.positions = {}, .of_step = kTokens, .sum = std::move(sum)};
  for (int b = 0; b < kBatch; ++b) rows.positions.insert(rows.positions.end(), of_window.begin(), of_window.end());
  std::mt19937 weights(7), windows(11);
  char_transformer::Model model(text.characters, kContext, rows, attention, weights);
  std::vector<double> losses;
  for (int step = 1; step <= steps; ++step) {
    const char_transformer::Windows drawn = draw(text, kBatch, kContext, windows);
    std::vector<int> tokens, next;
    for (int b = 0; b < kBatch; ++b) {
      for (const std::int64_t row : of_window) {
        tokens.push_back(drawn.tokens[static_cast<std::size_t>(b * kContext + row)]);
        next.push_back(drawn.next[static_cast<std::size_t>(b * kContext + row)]);
      }
    }
    losses.push_back(model.train(tokens, next, step, kLearningRate));
  }
  return losses;
}

std::vector<double> train_one(const Text& text, int steps, const Gpu* gpu) {
  Calls<fa::Attention> attention(
      fa::Attention::create(attention_config(), gpu == nullptr ? fa::Device::host() : gpu->device()), gpu, kContext);
  std::vector<std::int64_t> rows(kContext);
  std::iota(rows.begin(), rows.end(), 0);
  return train(text, steps, rows, attention, nullptr);
}

std::vector<double> train_rank(const Text& text, const Options& options, const Gpu* gpu,
                               const std::shared_ptr<fa::Communicator>& communicator) {
  fa::ContextParallelConfig config;
  config.attention = attention_config();
  config.scheme = options.scheme;
  const std::int64_t lengths[] = {kContext};
  const auto rows = fa::shard_rows(fa::ShardLayout::zigzag, communicator->size(), communicator->rank(), lengths);
  auto parallel = fa::ContextParallel::create(config, communicator, fa::ShardLayout::zigzag);
  parallel.check_agreement();
  if (communicator->rank() == 0) {
    std::printf("%d ranks, %s\n", communicator->size(),
                to_string(parallel.scheme({kBatch, kHeads, kHeads, kContext, kContext}).scheme));
  }
  Calls<fa::ContextParallel> attention(std::move(parallel), gpu, static_cast<int>(rows.size()));
  Sum sum(*communicator, gpu);
  return train(text, options.steps, rows, attention, std::ref(sum));
}

/// 0 where losses are those of one device, and become less.
int compare(const std::vector<double>& one, const std::vector<double>& losses, bool prints) {
  double off = 0;
  for (std::size_t i = 0; i < one.size(); ++i) {
    const double difference = std::abs(one[i] - losses[i]);
    off = difference <= off ? off : difference;  // NaN stays
    if (prints && (i % 10 == 0 || i + 1 == one.size())) {
      std::printf("step %3zu: loss %.6f, of one device %.6f\n", i + 1, losses[i], one[i]);
    }
  }
  const double first = losses.front(), last = losses.back();
  if (prints) std::printf("greatest difference %.1e, wanted %.0e\n", off, kBound);
  return off <= kBound && (losses.size() < 10 || last < first - 0.5) ? 0 : 1;
}

int run_threads(const Text& text, const Options& options) {
  const std::vector<double> one = train_one(text, options.steps, nullptr);
  const auto group = fa::make_local_group(options.ranks);
  std::vector<std::vector<double>> losses(group.size());
  std::vector<std::string> problems(group.size());
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < group.size(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        losses[rank] = train_rank(text, options, nullptr, group[rank]);
      } catch (const std::exception& problem) {
        problems[rank] = problem.what();
        group[rank]->abort(problem.what());  // else the others wait for this rank
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& problem : problems) {
    if (!problem.empty()) throw std::runtime_error(problem);
  }
  int code = 0;
  for (std::size_t rank = 0; rank < group.size(); ++rank) code = std::max(code, compare(one, losses[rank], rank == 0));
  return code;
}

int run_process(const Text& text, const Options& options) {
  const ranks::Rank rank;
  std::unique_ptr<Gpu> gpu;
  try {
    gpu = std::make_unique<Gpu>(rank.local);
  } catch (const std::exception& problem) {
    std::printf("rank %d has no GPU %d: %s\n", rank.rank, rank.local, problem.what());
    return kSkipped;
  }
  const std::vector<double> one = train_one(text, options.steps, gpu.get());
  const ranks::NcclGroup group(rank);
  const auto losses = train_rank(text, options, gpu.get(), fa::use_nccl(group.comm()));
  return compare(one, losses, rank.rank == 0);
}

Options options_of(int count, char** values) {
  Options options;
  for (int i = 1; i < count; ++i) {
    const std::string name = values[i];
    if (name.rfind("--", 0) != 0) {
      options.text = values[i];
      continue;
    }
    if (i + 1 == count) throw std::runtime_error(name + " takes a value");
    const std::string value = values[++i];
    if (name == "--ranks" || name == "--steps") {
      const int number = std::max(std::atoi(value.c_str()), 1);
      (name == "--ranks" ? options.ranks : options.steps) = number;
      continue;
    }
    bool known = false;
    for (const fa::Scheme scheme :
         {fa::Scheme::automatic, fa::Scheme::ring, fa::Scheme::all_gather, fa::Scheme::ulysses}) {
      if (name != "--scheme" || value != to_string(scheme)) continue;
      options.scheme = scheme;
      known = true;
    }
    if (!known)
      throw std::runtime_error(name + " " + value + ": accepted are --ranks, --steps, --scheme ring and so on");
  }
  if (options.text == nullptr) throw std::runtime_error("which text?");
  return options;
}

}  // namespace

int main(int count, char** values) {
  try {
    const Options options = options_of(count, values);
    const Text text = char_transformer::read_text(options.text, kContext);
    const bool launched = ranks::environment({"WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS"}, 0) > 0;
    return launched ? run_process(text, options) : run_threads(text, options);
  } catch (const std::exception& problem) {
    std::printf("%s\n", problem.what());
    return 1;
  }
}
