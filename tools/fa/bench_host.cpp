#include "bench_host.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <string>
#include <system_error>

#include "bench_timing.hpp"
#include "cache/files.hpp"
#include "system.hpp"
#include "terminal.hpp"

namespace fa::cli {
namespace {

using Clock = std::chrono::steady_clock;

double milliseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

/// A directory that disappears with the object.
class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    path_ = std::filesystem::temp_directory_path() / cache::temporary_name("fa-latency");
    if (!cache::platform::make_directory(cache::platform::kHere, path_)) {
      throw Error(ErrorCode::io, fmt::format("{} could not be created", path_.string()));
    }
  }
  ~TemporaryDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;

  const std::filesystem::path& path() const noexcept { return path_; }

 private:
  std::filesystem::path path_;
};

/// A first call of each problem: from nothing to the result, in milliseconds.
nlohmann::json first_calls(int device, const std::vector<BenchProblem>& problems, const std::filesystem::path& cache,
                           CompilePolicy policy) {
  const Gpu gpu(device);
  nlohmann::json calls = nlohmann::json::array();
  for (const BenchProblem& problem : problems) {
    show_progress(fmt::format("{}: {}", policy == CompilePolicy::allow ? "empty cache" : "warm cache", problem.text()));
    const BenchTensors tensors(problem);
    AttentionConfig config = problem.config();
    config.cache.directory = cache.string();
    config.compile = policy;
    const Clock::time_point start = Clock::now();
    const Attention attention = Attention::create(config, gpu.device());
    launch(attention, problem, tensors, gpu.stream());
    gpu.synchronize();
    const double elapsed = milliseconds_since(start);
    calls.push_back({{"ms", elapsed}, {"compile_ms", prepare(attention, problem).compile_ms}});
  }
  clear_progress();
  return calls;
}

}  // namespace

namespace {

/// `call` queues the work once.
template <typename Call>
HostCost time_calls(const Gpu& gpu, const Call& call) {
  constexpr int kBatches = 200;
  constexpr int kCallsPerBatch = 50;  // few enough that the queue never fills and makes the host wait
  call();
  gpu.synchronize();
  std::vector<double> microseconds;
  for (int batch = 0; batch < kBatches; ++batch) {
    const Clock::time_point start = Clock::now();
    for (int n = 0; n < kCallsPerBatch; ++n) {
      call();
    }
    microseconds.push_back(milliseconds_since(start) * 1000 / kCallsPerBatch);
    gpu.synchronize();
  }
  return {median(microseconds), *std::min_element(microseconds.begin(), microseconds.end()), kBatches * kCallsPerBatch};
}

}  // namespace

namespace {

/// A small problem: what the GPU does is no part of the cost, and a short queue never makes the host wait.
BenchProblem host_problem(Operation op) {
  BenchProblem problem;
  problem.op = op;
  problem.d_qk = problem.d_v = 64;
  problem.shape = {.b = 1, .h_q = 1, .h_kv = 1, .s_q = 64, .s_kv = 64};
  if (op != Operation::decode) return problem;
  problem.page_size = 16;
  problem.d_qk = problem.d_v = 128;
  problem.shape = {.b = 4, .h_q = 32, .h_kv = 8, .s_q = 1, .s_kv = 2048};
  return problem;
}

}  // namespace

HostCost measure_host_cost(const Gpu& gpu, Operation op, const KernelOverride& kernel) {
  const BenchProblem problem = host_problem(op);
  const BenchTensors tensors(problem);
  const Attention attention = Attention::create(problem.config(kernel), gpu.device());
  const DeviceBuffer scratch(workspace_size(attention, problem));
  const Workspace workspace{scratch.data(), scratch.size()};
  if (op == Operation::backward) {
    return time_calls(gpu, [&, inputs = tensors.backward_inputs(), outputs = tensors.backward_outputs()] {
      attention.backward(inputs, outputs, gpu.stream(), workspace);
    });
  }
  ForwardInputs inputs = tensors.inputs();
  const DeviceBuffer lists(op == Operation::decode ? attention.schedule_size(problem.shape) : 0);
  if (lists.size() != 0) {
    inputs.schedule = {lists.data(), lists.size()};
    attention.schedule({problem.shape, inputs.sequences, nullptr}, inputs.schedule, gpu.stream());
  }
  return time_calls(gpu,
                    [&, outputs = tensors.outputs()] { attention.forward(inputs, outputs, gpu.stream(), workspace); });
}

std::vector<Latency> measure_latency(int device, const std::vector<BenchProblem>& problems) {
  const TemporaryDirectory cache;
  const auto measure = [&](CompilePolicy policy) {
    return run_in_child([&] { return first_calls(device, problems, cache.path(), policy); });
  };
  const nlohmann::json cold = measure(CompilePolicy::allow);
  const nlohmann::json warm = measure(CompilePolicy::never);
  std::vector<Latency> results;
  for (std::size_t i = 0; i < problems.size(); ++i) {
    results.push_back(
        {problems[i], cold[i]["compile_ms"].get<double>(), cold[i]["ms"].get<double>(), warm[i]["ms"].get<double>()});
  }
  return results;
}

}  // namespace fa::cli
