#include "bench_decode.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <fa/attention.hpp>

#include "bench_graph.hpp"
#include "gpu.hpp"
#include "terminal.hpp"

namespace fa::cli {
namespace {

constexpr int kCalls = 100;      // of a graph
constexpr int kFewestCalls = 4;  // however long they take
constexpr double kL2Caches = 4;  // that rotating calls fill

/// A call and a read of as much, over the same tensors (warm) or rotating over many (cold).
struct Times {
  double call_us = 0, read_us = 0;
};

struct Result {
  std::string refusal;
  double error = 0;
  Times warm, cold;
  double schedule_us = 0;  ///< of the kernel that makes a schedule, once for all calls; 0: they take none
  int sets = 1;
  KernelInfo kernel;
};

/// The graphs of one way of choosing tensors.
class Race {
 public:
  Race(int calls, const CallGraph& call, const CallGraph& read) : calls_(calls), graphs_{&call, &read} {}

  void round(double round_ms) {
    for (std::size_t i = 0; i < 2; ++i) {
      const double once_ms = std::max(graphs_[i]->time() * calls_ / 1000, 1e-3);  // and warms up
      us_[i].push_back(graphs_[i]->time(std::clamp(static_cast<int>(std::lround(round_ms / once_ms)), 1, 1000)));
    }
  }
  Times times() const { return {median(us_[0]), median(us_[1])}; }

 private:
  int calls_;
  const CallGraph* graphs_[2];
  std::vector<double> us_[2];
};

/// As many bytes of each tensor as a call reads: of a contiguous cache those of its requests' keys.
std::array<ReadKernel::Region, 4> regions_of(const BenchProblem& problem, const BenchTensors& tensors, int set) {
  const ForwardInputs in = tensors.inputs(set);
  const ForwardOutputs out = tensors.outputs(set);
  const auto region = [&](const TensorView& view) {
    return ReadKernel::Region{view.data, static_cast<std::size_t>(view.elements()) * size_of(view.dtype)};
  };
  std::array<ReadKernel::Region, 4> regions = {region(in.k), region(in.v), region(in.q), region(out.o)};
  if (problem.page_size == kContiguous) {
    const std::vector<std::int64_t> lengths = problem.lengths_kv();
    const auto used = static_cast<std::size_t>(std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0}));
    const auto there = static_cast<std::size_t>(in.k.shape[0] * in.k.shape[2]);  // rows of a head
    for (ReadKernel::Region& keys : std::span(regions).first(2)) keys.bytes = keys.bytes / there * used;
  }
  return regions;
}

/// Calls of a graph: what fits in a round.
int calls_of(const Gpu& gpu, const TimingOptions& timing, const std::function<void(int)>& call) {
  Event start, end;
  start.record(gpu.stream());
  for (int i = 0; i < 2; ++i) call(i);
  end.record(gpu.stream());
  end.synchronize();
  const double once_ms = std::max(end.milliseconds_since(start) / 2, 1e-3);
  return static_cast<int>(std::clamp(std::round(timing.round_ms / once_ms), double{kFewestCalls}, double{kCalls}));
}

Result measure(const Gpu& gpu, const ReadKernel& read, const BenchProblem& problem, const KernelOverride& kernel,
               const TimingOptions& timing) {
  Result result;
  const Attention attention = Attention::create(problem.config(kernel), gpu.device());
  result.kernel = attention.kernel_info(problem.shape);
  const double wanted = std::ceil(kL2Caches * static_cast<double>(gpu.l2_bytes()) / problem.bytes()) + 1;
  result.sets = wanted <= 2 ? 1 : static_cast<int>(std::min(wanted, double{kCalls}));
  BenchTensors tensors(problem, result.sets);
  const DeviceBuffer memory(attention.workspace_size(problem.shape));
  const Workspace workspace{memory.data(), memory.size()};
  const DeviceBuffer lists(problem.page_size != 0 ? attention.schedule_size(problem.shape) : 0);
  const Schedule schedule{lists.size() > 0 ? lists.data() : nullptr, lists.size()};
  const auto make_schedule = [&](int) {
    attention.schedule({problem.shape, tensors.inputs(0).sequences, nullptr}, schedule, gpu.stream());
  };
  if (schedule.data != nullptr) make_schedule(0);
  const auto forward = [&](int set) {
    ForwardInputs inputs = tensors.inputs(set);
    inputs.schedule = schedule;
    attention.forward(inputs, tensors.outputs(set), gpu.stream(), workspace);
  };
  const auto read_set = [&](int set) { read.launch(regions_of(problem, tensors, set), gpu.stream()); };
  forward(0);
  gpu.synchronize();
  result.error = tensors.check();
  if (!(result.error <= 1)) {
    result.refusal = fmt::format("wrong result: {:.2f} times the allowed error", result.error);
    return result;
  }
  const int calls = calls_of(gpu, timing, [&](int) { forward(0); });
  const auto turn = [&](int call) { return call % result.sets; };
  const CallGraph forwards(gpu, calls, [&](int) { forward(0); }), reads(gpu, calls, [&](int) { read_set(0); });
  const CallGraph forwards_rotating(gpu, calls, [&](int call) { forward(turn(call)); });
  const CallGraph reads_rotating(gpu, calls, [&](int call) { read_set(turn(call)); });
  Race warm(calls, forwards, reads), cold(calls, forwards_rotating, reads_rotating);
  for (int round = 0; round < timing.rounds; ++round) {
    warm.round(timing.round_ms);
    if (result.sets > 1) cold.round(timing.round_ms);
  }
  if (schedule.data != nullptr) {
    const CallGraph schedules(gpu, kCalls, make_schedule);
    std::vector<double> us;
    for (int round = 0; round < timing.rounds; ++round) us.push_back(schedules.time());
    result.schedule_us = median(us);
  }
  result.warm = warm.times();
  result.cold = result.sets > 1 ? cold.times() : result.warm;
  return result;
}

double terabytes(const BenchProblem& problem, double microseconds) {
  return problem.bytes() / microseconds / 1e6;
}

std::string keys_text(const BenchProblem& problem) {
  const bool ragged = !problem.cumulative_kv.empty();
  return fmt::format("{}{}", ragged ? "to " : "", problem.shape.s_kv);
}

void print_head(const Gpu& gpu, const TimingOptions& timing) {
  fmt::print(
      "{}, fa {}; median of {} rounds of about {} ms; TB/s of K, V, Q and O; cold: rotating over 4 L2 caches\n\n",
      gpu.info().name, version(), timing.rounds, timing.round_ms);
  fmt::print("{:<5} {:>4} {:>4} {:>4} {:>4} {:>10} {:>4} {:>4} | {:>9} {:>6} {:>6} | {:>9} {:>6} {:>6} {:>6} | {:>8}\n",
             "dtype", "b", "h_q", "h_kv", "s_q", "s_kv", "d", "page", "us", "TB/s", "read", "cold us", "TB/s", "read",
             "ratio", "schedule");
}

void print_row(const BenchProblem& problem, const Result& result) {
  const AttentionShape& shape = problem.shape;
  fmt::print("{:<5} {:>4} {:>4} {:>4} {:>4} {:>10} {:>4} {:>4} | ", to_string(problem.dtype), shape.b, shape.h_q,
             shape.h_kv, shape.s_q, keys_text(problem), problem.d_qk, problem.page_size);
  if (!result.refusal.empty()) {
    fmt::print("refused: {}\n", result.refusal);
    return;
  }
  const auto [warm, cold] = std::pair(result.warm, result.cold);
  fmt::print("{:>9.2f} {:>6.2f} {:>6.2f} | {:>9.2f} {:>6.2f} {:>6.2f} {:>6.2f} | {:>8.2f}\n", warm.call_us,
             terabytes(problem, warm.call_us), terabytes(problem, warm.read_us), cold.call_us,
             terabytes(problem, cold.call_us), terabytes(problem, cold.read_us), cold.read_us / cold.call_us,
             result.schedule_us);
  std::fflush(stdout);
}

nlohmann::json to_json(const BenchProblem& problem, const Result& result) {
  nlohmann::json record = {{"problem", cli::to_json(problem)}};
  if (!problem.cumulative_kv.empty()) record["lengths"] = problem.lengths_kv();
  if (!result.refusal.empty()) {
    record["refused"] = result.refusal;
    return record;
  }
  const auto add = [&](const std::string& name, const Times& times) {
    record[name] = {{"us", times.call_us},
                    {"tbps", terabytes(problem, times.call_us)},
                    {"read_us", times.read_us},
                    {"read_tbps", terabytes(problem, times.read_us)}};
  };
  add("warm", result.warm);
  add("cold", result.cold);
  if (result.schedule_us > 0) record["schedule_us"] = result.schedule_us;
  record["sets"] = result.sets;
  record["bytes"] = problem.bytes();
  record["error_of_allowed"] = result.error;
  record["kernel"] = {{"name", result.kernel.name}, {"spec", result.kernel.spec}};
  return record;
}

}  // namespace

bool bench_decode(int device, const BenchGrid& grid, const KernelOverride& kernel, const TimingOptions& timing,
                  bool json) {
  const std::vector<BenchProblem> problems = make_decodes(grid);
  const Gpu gpu(device);
  const ReadKernel read(gpu);
  nlohmann::json records = nlohmann::json::array();
  bool all_run = true;
  if (!json) print_head(gpu, timing);
  for (const BenchProblem& problem : problems) {
    Result result;
    try {
      result = measure(gpu, read, problem, kernel, timing);
    } catch (const Error& error) {
      result.refusal = error.what();
    }
    all_run = all_run && result.refusal.empty();
    if (!json) print_row(problem, result);
    records.push_back(to_json(problem, result));
  }
  if (json) {
    print_json(
        {{"gpu", cli::to_json(gpu)}, {"rounds", timing.rounds}, {"round_ms", timing.round_ms}, {"decode", records}});
  }
  return all_run;
}

}  // namespace fa::cli
