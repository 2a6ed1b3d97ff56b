// Context parallelism over the GPUs of a machine, a process each: forward and backward of a sequence that they share,
// against one GPU with the whole.
//
//   examples/context_parallel/launch.py 2 build/release/examples/fa_example_two_gpus
//   mpirun -n 2 -x FA_RENDEZVOUS=/tmp/nccl_id build/release/examples/fa_example_two_gpus

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <fa/parallel.hpp>

#include "ranks.hpp"

namespace {

constexpr std::int64_t kHeads = 16, kKeyHeads = 4, kRows = 8192, kColumns = 128;
constexpr int kSkipped = 77;

void check(cudaError_t status, const char* call) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(status));
}

/// bf16 tensors [1, heads, rows, 128], or f32 statistics [1, heads, rows].
class Tensor {
 public:
  Tensor(std::int64_t heads, std::int64_t rows, bool statistic = false) : heads_(heads), rows_(rows) {
    elements_ = static_cast<std::size_t>(heads * rows * (statistic ? 1 : kColumns));
    void* memory = nullptr;
    check(cudaMalloc(&memory, elements_ * (statistic ? 4 : 2)), "cudaMalloc");
    memory_.reset(memory);
    statistic_ = statistic;
  }
  fa::TensorView view() const {
    if (statistic_) return {memory_.get(), fa::DType::f32, {1, heads_, rows_}};
    return {memory_.get(), fa::DType::bf16, {1, heads_, rows_, kColumns}};
  }
  /// The same numbers on every rank.
  void fill(unsigned seed) {
    std::vector<std::uint16_t> data(elements_);
    for (std::uint16_t& number : data) {
      seed = seed * 1664525 + 1013904223;
      const float value = static_cast<float>(seed >> 8) / (1 << 23) - 1.0F;
      std::uint32_t bits = 0;
      std::memcpy(&bits, &value, 4);
      number = static_cast<std::uint16_t>(bits >> 16);
    }
    check(cudaMemcpy(memory_.get(), data.data(), data.size() * 2, cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  std::vector<float> read() const {
    std::vector<std::uint16_t> data(elements_);
    check(cudaMemcpy(data.data(), memory_.get(), data.size() * 2, cudaMemcpyDeviceToHost), "cudaMemcpy");
    std::vector<float> numbers;
    for (const std::uint16_t number : data) {
      const std::uint32_t bits = std::uint32_t{number} << 16;
      numbers.emplace_back();
      std::memcpy(&numbers.back(), &bits, 4);
    }
    return numbers;
  }

 private:
  struct Free {
    void operator()(void* memory) const { cudaFree(memory); }
  };
  std::unique_ptr<void, Free> memory_;
  std::int64_t heads_, rows_;
  std::size_t elements_ = 0;
  bool statistic_ = false;
};

struct Tensors {
  explicit Tensors(std::int64_t rows)
      : q(kHeads, rows),
        k(kKeyHeads, rows),
        v(kKeyHeads, rows),
        o(kHeads, rows),
        lse(kHeads, rows, true),
        dout(kHeads, rows),
        dq(kHeads, rows),
        dk(kKeyHeads, rows),
        dv(kKeyHeads, rows) {}
  Tensor q, k, v, o, lse, dout, dq, dk, dv;
};

template <class Attention>
void train_step(Attention& attention, const Tensors& t, cudaStream_t stream) {
  attention.forward({t.q.view(), t.k.view(), t.v.view()}, {t.o.view(), t.lse.view()}, stream);
  attention.backward({t.q.view(), t.k.view(), t.v.view(), t.o.view(), t.lse.view(), t.dout.view()},
                     {t.dq.view(), t.dk.view(), t.dv.view()}, stream);
}

/// The greatest difference of a rank's rows from those of the whole, relative to the greatest element.
float difference(const fa::ShardCopy& how, const Tensor& whole, const Tensor& part, Tensor& expected) {
  fa::shard(how, whole.view(), expected.view());
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  const std::vector<float> is = part.read(), wanted = expected.read();
  float off = 0, scale = 0;
  for (std::size_t i = 0; i < is.size(); ++i) {
    off = std::isfinite(is[i]) ? std::max(off, std::abs(is[i] - wanted[i])) : HUGE_VALF;
    scale = std::max(scale, std::abs(wanted[i]));
  }
  return off / scale;
}

int run(const ranks::Rank& rank) {
  const ranks::NcclGroup group(rank);
  const auto communicator = fa::use_nccl(group.comm());
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  fa::ContextParallelConfig config;
  config.attention.head_dim = kColumns;
  config.attention.causal = true;
  Tensors whole(kRows), own(kRows / rank.size), expected(kRows / rank.size);
  whole.q.fill(1);
  whole.k.fill(2);
  whole.v.fill(3);
  whole.dout.fill(4);
  const fa::ShardCopy how{.layout = fa::ShardLayout::zigzag, .ranks = rank.size, .rank = rank.rank};
  fa::shard(how, whole.q.view(), own.q.view());
  fa::shard(how, whole.k.view(), own.k.view());
  fa::shard(how, whole.v.view(), own.v.view());
  fa::shard(how, whole.dout.view(), own.dout.view());
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  const auto one = fa::Attention::create(config.attention);
  train_step(one, whole, nullptr);
  bool right = true;
  for (const fa::Scheme scheme : {fa::Scheme::ring, fa::Scheme::all_gather, fa::Scheme::ulysses}) {
    config.scheme = scheme;
    auto parallel = fa::ContextParallel::create(config, communicator, how.layout);
    parallel.check_agreement(stream);
    train_step(parallel, own, stream);
    communicator->synchronize(stream);
    const float off_o = difference(how, whole.o, own.o, expected.o);
    const float off_dq = difference(how, whole.dq, own.dq, expected.dq);
    const float off_dk = difference(how, whole.dk, own.dk, expected.dk);
    const float off_dv = difference(how, whole.dv, own.dv, expected.dv);
    std::printf("rank %d of %d, %s: o, dq, dk and dv differ by %.4f, %.4f, %.4f and %.4f\n", rank.rank, rank.size,
                to_string(scheme), static_cast<double>(off_o), static_cast<double>(off_dq), static_cast<double>(off_dk),
                static_cast<double>(off_dv));
    right = right && std::max({off_o, off_dq, off_dk, off_dv}) < 0.02F;
  }
  check(cudaStreamDestroy(stream), "cudaStreamDestroy");
  return right ? 0 : 1;
}

}  // namespace

int main() {
  try {
    const ranks::Rank rank;
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices <= rank.local) {
      std::printf("rank %d has no GPU %d\n", rank.rank, rank.local);
      return kSkipped;
    }
    check(cudaSetDevice(rank.local), "cudaSetDevice");
    return run(rank);
  } catch (const std::exception& problem) {
    std::printf("%s\n", problem.what());
    return 1;
  }
}
