#include "bench_merge.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <vector>

#include <fa/attention.hpp>

#include "bench_graph.hpp"
#include "gpu.hpp"
#include "terminal.hpp"

namespace fa::cli {
namespace {

constexpr int kCalls = 100;  // of a graph

struct MergeBench {
  DType dtype = DType::bf16;
  DType of_states = DType::bf16;
  std::int64_t states = 2, tokens = 1, h_q = 32, d = 128;
  bool stacked = false;
  bool in_place = false;  ///< of the first state

  std::int64_t rows() const { return tokens * h_q; }
  std::size_t state_bytes() const { return static_cast<std::size_t>(rows() * d) * size_of(of_states); }
  std::size_t result_bytes() const { return static_cast<std::size_t>(rows() * d) * size_of(dtype); }
  std::size_t lse_bytes() const { return static_cast<std::size_t>(rows()) * sizeof(float); }
  /// What is read and written.
  std::size_t bytes() const {
    return static_cast<std::size_t>(states) * (state_bytes() + lse_bytes()) + result_bytes() + lse_bytes();
  }
};

/// The tensors of one call, and as much memory to copy from and to.
class MergeTensors {
 public:
  explicit MergeTensors(const MergeBench& bench)
      : bench_(bench),
        o_(static_cast<std::size_t>(bench.states) * bench.state_bytes() + bench.result_bytes()),
        lse_(static_cast<std::size_t>(bench.states + 1) * bench.lse_bytes()),
        copied_(bench.bytes() / 32 * 32) {
    const std::vector<std::byte> block = normal_block(bench.of_states, 1);
    o_.tile(block.data(), block.size());
    const std::vector<std::byte> sums = normal_block(DType::f32, 2);
    lse_.tile(sums.data(), sums.size());
    for (std::int64_t i = 0; i < (bench.stacked ? 1 : bench.states); ++i) states_.push_back(state(i));
  }

  MergeInputs inputs() const {
    MergeInputs inputs{.states = states_};
    if (bench_.stacked) {
      inputs.stacked = bench_.states;
      inputs.stride_o = bench_.rows() * bench_.d;
      inputs.stride_lse = bench_.rows();
    }
    return inputs;
  }

  ForwardOutputs outputs() const {
    if (bench_.in_place) return {states_[0].o, states_[0].lse};
    const AttentionState last = state(bench_.states, bench_.dtype);
    return {last.o, last.lse};
  }

  const void* source() const { return copied_.data(); }
  void* target() const { return static_cast<std::byte*>(copied_.data()) + copied_bytes(); }
  std::size_t copied_bytes() const { return copied_.size() / 2; }

 private:
  AttentionState state(std::int64_t i) const { return state(i, bench_.of_states); }
  AttentionState state(std::int64_t i, DType dtype) const {
    const auto at = static_cast<std::size_t>(i);
    std::byte* const o = static_cast<std::byte*>(o_.data()) + at * bench_.state_bytes();
    std::byte* const lse = static_cast<std::byte*>(lse_.data()) + at * bench_.lse_bytes();
    return {TensorView(static_cast<void*>(o), dtype, {1, bench_.tokens, bench_.h_q, bench_.d}).swap_axes(1, 2),
            TensorView(static_cast<void*>(lse), DType::f32, {1, bench_.h_q, bench_.tokens})};
  }

  MergeBench bench_;
  DeviceBuffer o_, lse_, copied_;
  std::vector<AttentionState> states_;
};

struct Result {
  double merge_us = 0, copy_us = 0;
};

Result measure(const Gpu& gpu, const CopyKernel& copy, const MergeBench& bench, const TimingOptions& timing) {
  AttentionConfig config;
  config.head_dim = static_cast<int>(bench.d);
  config.dtype = bench.dtype;
  const Attention attention = Attention::create(config, gpu.device());
  std::vector<MergeTensors> tensors;
  const std::size_t sets = timing.flush_l2 ? 4 * gpu.l2_bytes() / bench.bytes() + 2 : 1;
  const std::size_t count = std::min<std::size_t>(sets, kCalls);
  tensors.reserve(count);
  for (std::size_t i = 0; i < count; ++i) tensors.emplace_back(bench);
  const auto set = [&](int call) -> const MergeTensors& {
    return tensors[static_cast<std::size_t>(call) % tensors.size()];
  };
  attention.merge(tensors.front().inputs(), tensors.front().outputs(), gpu.stream());
  gpu.synchronize();
  const CallGraph merges(gpu, kCalls,
                         [&](int call) { attention.merge(set(call).inputs(), set(call).outputs(), gpu.stream()); });
  const CallGraph copies(gpu, kCalls, [&](int call) {
    copy.launch(set(call).source(), set(call).target(), set(call).copied_bytes(), gpu.stream());
  });
  std::vector<double> merge_us, copy_us;
  merges.time(), copies.time();
  for (int round = 0; round < timing.rounds; ++round) {
    merge_us.push_back(merges.time());
    copy_us.push_back(copies.time());
  }
  return {median(merge_us), median(copy_us)};
}

std::vector<MergeBench> benches(const BenchGrid& grid) {
  std::vector<MergeBench> all;
  for (const DType dtype : grid.dtypes) {
    for (const std::int64_t tokens : {64, 1024, 8192, 32768}) {
      for (const std::int64_t d : {64, 128, 256}) {
        MergeBench bench{dtype, dtype, 2, tokens};
        bench.d = d;
        if (grid.heads != 0) bench.h_q = grid.heads;
        bench.in_place = true;
        all.push_back(bench);
        if (d != 128) continue;
        bench.in_place = false;
        bench.states = 8;
        all.push_back(bench);
        bench.of_states = DType::f32;
        bench.stacked = true;
        all.push_back(bench);
        bench.states = 32;
        if (tokens <= 1024) all.push_back(bench);
      }
    }
  }
  return all;
}

}  // namespace

void bench_merge(int device, const BenchGrid& grid, const TimingOptions& timing, bool json) {
  const Gpu gpu(device);
  const CopyKernel copy(gpu);
  nlohmann::json records = nlohmann::json::array();
  if (!json) {
    fmt::print("{:<5} {:<6} {:>6} {:>6} {:>4} {:>4} {:<8} {:>9} {:>7} {:>9} {:>7} {:>6}\n", "dtype", "states", "count",
               "tokens", "h_q", "d", "kind", "us", "TB/s", "copy us", "TB/s", "ratio");
  }
  for (const MergeBench& bench : benches(grid)) {
    const Result result = measure(gpu, copy, bench, timing);
    const double ratio = result.copy_us / result.merge_us;
    const auto terabytes = [&](double us) { return static_cast<double>(bench.bytes()) / us / 1e6; };
    const char* const kind = bench.in_place ? "in place" : bench.stacked ? "stacked" : "listed";
    if (!json) {
      fmt::print("{:<5} {:<6} {:>6} {:>6} {:>4} {:>4} {:<8} {:>9.2f} {:>7.2f} {:>9.2f} {:>7.2f} {:>6.2f}\n",
                 to_string(bench.dtype), to_string(bench.of_states), bench.states, bench.tokens, bench.h_q, bench.d,
                 kind, result.merge_us, terabytes(result.merge_us), result.copy_us, terabytes(result.copy_us), ratio);
      std::fflush(stdout);
    }
    records.push_back({{"dtype", to_string(bench.dtype)},
                       {"of_states", to_string(bench.of_states)},
                       {"states", bench.states},
                       {"tokens", bench.tokens},
                       {"h_q", bench.h_q},
                       {"d", bench.d},
                       {"kind", kind},
                       {"us", result.merge_us},
                       {"tbps", terabytes(result.merge_us)},
                       {"copy_us", result.copy_us},
                       {"ratio", ratio}});
  }
  if (json) print_json({{"gpu", to_json(gpu)}, {"flush_l2", timing.flush_l2}, {"merge", records}});
}

}  // namespace fa::cli
