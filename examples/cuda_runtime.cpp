// Attention in a program of the CUDA runtime: its memory, its stream, and its events. fa itself links no part of CUDA.
//
// The library works in the context that the runtime has made current, so a cudaStream_t and a pointer of cudaMalloc are
// all that it is given. The result is compared with the host device's.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <fa/attention.hpp>

namespace {

constexpr std::int64_t kBatch = 2, kHeads = 4, kRows = 300, kHeadDim = 64;
constexpr std::size_t kElements = kBatch * kHeads * kRows * kHeadDim;
constexpr int kSkipped = 77;

void check(cudaError_t status, const char* call) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(status));
}

struct Free {
  void operator()(float* memory) const { cudaFree(memory); }
};
using DeviceMemory = std::unique_ptr<float, Free>;

DeviceMemory allocate() {
  float* memory = nullptr;
  check(cudaMalloc(reinterpret_cast<void**>(&memory), kElements * sizeof(float)), "cudaMalloc");
  return DeviceMemory(memory);
}

std::vector<float> wave(float frequency) {
  std::vector<float> values(kElements);
  for (std::size_t i = 0; i < kElements; ++i) values[i] = std::sin(frequency * static_cast<float>(i % 9973));
  return values;
}

/// [b, h, s, d] in memory of any device.
fa::TensorView view(float* data) {
  return {data, fa::DType::f32, {kBatch, kHeads, kRows, kHeadDim}};
}

void run() {
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");

  std::vector<float> host_q = wave(0.37f), host_k = wave(0.11f), host_v = wave(0.73f);
  const DeviceMemory q = allocate(), k = allocate(), v = allocate(), o = allocate();
  for (const auto& [to, from] :
       {std::pair{q.get(), &host_q}, std::pair{k.get(), &host_k}, std::pair{v.get(), &host_v}}) {
    check(cudaMemcpyAsync(to, from->data(), kElements * sizeof(float), cudaMemcpyHostToDevice, stream),
          "cudaMemcpyAsync");
  }

  fa::AttentionConfig config;
  config.head_dim = kHeadDim;
  config.dtype = fa::DType::f32;
  config.causal = true;
  const auto attention = fa::Attention::create(config);  // on the device of cudaSetDevice

  // Behind the copies, in the order of the stream; the call does not wait.
  attention.forward({view(q.get()), view(k.get()), view(v.get())}, {view(o.get()), {}}, stream);

  std::vector<float> result(kElements);
  check(cudaMemcpyAsync(result.data(), o.get(), kElements * sizeof(float), cudaMemcpyDeviceToHost, stream),
        "cudaMemcpyAsync");
  check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  check(cudaStreamDestroy(stream), "cudaStreamDestroy");

  std::vector<float> expected(kElements);
  const auto host = fa::Attention::create(config, fa::Device::host());
  host.forward({view(host_q.data()), view(host_k.data()), view(host_v.data())}, {view(expected.data()), {}});
  float error = 0;
  for (std::size_t i = 0; i < kElements; ++i) {
    if (!std::isfinite(result[i])) throw std::runtime_error("a result is not finite");
    error = std::max(error, std::fabs(result[i] - expected[i]));
  }
  std::printf("greatest difference from the host device: %.2e\n", static_cast<double>(error));
  if (!(error < 5e-3f)) throw std::runtime_error("the results differ");  // fp32 products by TF32
}

}  // namespace

int main() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("skipped: no CUDA device\n");
    return kSkipped;
  }
  try {
    run();
    return 0;
  } catch (const std::exception& exception) {
    std::fprintf(stderr, "%s\n", exception.what());
    return 1;
  }
}
