// A forward and a backward in a CUDA graph: captured once, and replayed over new contents of the same memory.
//
// Everything that a call does but launch has to be done before the capture: `prepare` compiles and loads, and a
// workspace of the caller's replaces the allocation. What is captured are pointers, so tensors and workspace live as
// long as the graph.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

#include <fa/attention.hpp>

namespace {

constexpr fa::AttentionShape kShape{.b = 2, .h_q = 4, .h_kv = 4, .s_q = 256, .s_kv = 256};
constexpr int kHeadDim = 64;
constexpr std::size_t kRows = 2 * 4 * 256;
constexpr std::size_t kElements = kRows * kHeadDim;
constexpr int kReplays = 3;
constexpr int kSkipped = 77;

void check(cudaError_t status, const char* call) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(status));
}

/// Memory that the GPU and the CPU see; the process keeps it.
float* floats(std::size_t count) {
  void* memory = nullptr;
  check(cudaMallocManaged(&memory, count * sizeof(float), cudaMemAttachGlobal), "cudaMallocManaged");
  return static_cast<float*>(memory);
}

fa::Workspace workspace(std::size_t bytes) {
  void* memory = nullptr;
  if (bytes != 0) check(cudaMalloc(&memory, bytes), "cudaMalloc");
  return {memory, bytes};
}

struct Training {
  float *q = floats(kElements), *k = floats(kElements), *v = floats(kElements), *o = floats(kElements);
  float *dout = floats(kElements), *dq = floats(kElements), *dk = floats(kElements), *dv = floats(kElements);
  float* lse = floats(kRows);

  static fa::TensorView view(float* data) { return {data, fa::DType::f32, {2, 4, 256, kHeadDim}}; }
  fa::TensorView lse_view() const { return {lse, fa::DType::f32, {2, 4, 256}}; }

  void fill(int step) const {
    for (std::size_t i = 0; i < kElements; ++i) {
      const float x = static_cast<float>(i % 7919) + 0.5f * static_cast<float>(step);
      q[i] = std::sin(0.3f * x), k[i] = std::cos(0.7f * x), v[i] = std::sin(1.1f * x), dout[i] = std::cos(0.2f * x);
    }
  }
  void queue(const fa::Attention& attention, cudaStream_t stream, const fa::Workspace& forward,
             const fa::Workspace& backward) const {
    attention.forward({view(q), view(k), view(v)}, {view(o), lse_view()}, stream, forward);
    attention.backward({view(q), view(k), view(v), view(o), lse_view(), view(dout)}, {view(dq), view(dk), view(dv)},
                       stream, backward);
  }
};

cudaGraphExec_t capture(cudaStream_t stream, const Training& training, const fa::Attention& attention) {
  attention.prepare(kShape);
  attention.prepare_backward(kShape);
  const fa::Workspace forward = workspace(attention.workspace_size(kShape));
  const fa::Workspace backward = workspace(attention.backward_workspace_size(kShape));
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  training.queue(attention, stream, forward, backward);
  check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
  check(cudaGraphInstantiateWithFlags(&executable, graph, 0), "cudaGraphInstantiateWithFlags");
  check(cudaGraphDestroy(graph), "cudaGraphDestroy");
  return executable;
}

void run() {
  fa::AttentionConfig config;
  config.head_dim = kHeadDim;
  config.dtype = fa::DType::f32;
  config.causal = true;
  config.deterministic = true;  // so that two runs can be compared bit by bit
  const auto attention = fa::Attention::create(config);
  const Training training;
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  const cudaGraphExec_t graph = capture(stream, training, attention);

  for (int step = 0; step < kReplays; ++step) {
    training.fill(step);
    check(cudaGraphLaunch(graph, stream), "cudaGraphLaunch");
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    const std::vector<float> dq(training.dq, training.dq + kElements);
    training.queue(attention, stream, {}, {});  // the same, not captured
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    if (!std::equal(dq.begin(), dq.end(), training.dq)) throw std::runtime_error("a replay differs from a call");
    std::printf("step %d: dq[0] = %.6f\n", step, static_cast<double>(dq[0]));
  }
  check(cudaGraphExecDestroy(graph), "cudaGraphExecDestroy");
  check(cudaStreamDestroy(stream), "cudaStreamDestroy");
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
