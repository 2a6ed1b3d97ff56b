#include "bench_shared.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <fa/attention.hpp>

#include "bench_graph.hpp"
#include "elements.hpp"
#include "gpu.hpp"
#include "terminal.hpp"

namespace fa::cli {
namespace {

constexpr int kCalls = 20;         // of a graph
constexpr double kAllowed = 0.02;  // between two roundings of one number

struct SharedBench {
  DType dtype = DType::bf16;
  std::int64_t b = 256, own = 256, h_q = 32, h_kv = 8, d = 128, page = 16;
  /// Of each level: groups, of equally many requests, and keys.
  struct Level {
    std::int64_t groups = 1, keys = 8192;
  };
  std::vector<Level> levels = {{}};

  std::int64_t prefix() const {
    return std::accumulate(levels.begin(), levels.end(), std::int64_t{0},
                           [](auto sum, const Level& level) { return sum + level.keys; });
  }
  std::int64_t keys() const { return prefix() + own; }
  std::int64_t pages() const {
    std::int64_t result = b * ((own + page - 1) / page);
    for (const Level& level : levels) result += level.groups * (level.keys / page);
    return result;
  }
  std::size_t pool_bytes() const { return static_cast<std::size_t>(pages() * page * h_kv * d) * size_of(dtype); }
  double multiplications() const { return 4.0 * static_cast<double>(b * h_q * d) * static_cast<double>(keys()); }
  std::string text() const {
    std::string result;
    for (const Level& level : levels)
      result += fmt::format("{}{}x{}", result.empty() ? "" : "+", level.groups, level.keys);
    return result;
  }
};

DeviceBuffer upload(const std::vector<std::int32_t>& values) {
  DeviceBuffer buffer(values.size() * sizeof(std::int32_t));
  buffer.upload(values.data(), buffer.size());
  return buffer;
}

/// The tensors and arrays of a call, on the device.
class SharedTensors {
 public:
  explicit SharedTensors(const SharedBench& of)
      : bench_(of),
        q_(static_cast<std::size_t>(of.b * of.h_q * of.d) * size_of(of.dtype)),
        k_(of.pool_bytes()),
        v_(of.pool_bytes()),
        o_(q_.size()) {
    for (DeviceBuffer* const buffer : {&q_, &k_, &v_}) {
      const std::vector<std::byte> block = normal_block(of.dtype, static_cast<unsigned>(1 + arrays_.size()));
      buffer->tile(block.data(), block.size());
    }
    make_tables();
  }

  ForwardInputs inputs(bool shared) const {
    const std::int64_t width = (bench_.keys() + bench_.page - 1) / bench_.page;
    ForwardInputs in{TensorView(q_.data(), bench_.dtype, {bench_.b, bench_.h_q, 1, bench_.d}), pool(k_), pool(v_)};
    in.sequences.seqused_kv = ints(0);
    in.cache.block_table = TensorView(static_cast<const void*>(ints(1)), DType::i32, {bench_.b, width});
    if (!shared) return in;
    in.cache.seq_begin = ints(2);
    in.prefixes = levels_;
    return in;
  }
  ForwardOutputs outputs() const { return {TensorView(o_.data(), bench_.dtype, {bench_.b, bench_.h_q, 1, bench_.d})}; }
  AttentionShape shape() const {
    return {.b = bench_.b,
            .h_q = bench_.h_q,
            .h_kv = bench_.h_kv,
            .s_q = 1,
            .s_kv = (bench_.keys() + bench_.page - 1) / bench_.page * bench_.page};
  }
  std::vector<SharedPrefixShape> shapes() const {
    std::vector<SharedPrefixShape> result;
    for (const SharedPrefix& level : levels_) {
      result.push_back({level.block_table.shape[0], level.max_rows, level.max_length, level.begin != nullptr});
    }
    return result;
  }
  std::vector<double> results() const {
    std::vector<std::byte> bytes(o_.size());
    o_.download(bytes.data(), bytes.size());
    std::vector<double> values(bytes.size() / size_of(bench_.dtype));
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = load_element(bytes.data(), bench_.dtype, i);
    return values;
  }
  std::array<ReadKernel::Region, 4> regions() const {
    return {ReadKernel::Region{k_.data(), k_.size()},
            {v_.data(), v_.size()},
            {q_.data(), q_.size()},
            {o_.data(), o_.size()}};
  }

 private:
  const std::int32_t* ints(std::size_t i) const { return static_cast<const std::int32_t*>(arrays_[i].data()); }
  TensorView pool(const DeviceBuffer& buffer) const {
    return TensorView(buffer.data(), bench_.dtype, {bench_.pages(), bench_.page, bench_.h_kv, bench_.d})
        .swap_axes(1, 2);
  }

  /// Pages in any order. A request's row has those of its groups, too, for the call that shares nothing.
  void make_tables() {
    std::vector<std::int32_t> order(static_cast<std::size_t>(bench_.pages()));
    std::iota(order.begin(), order.end(), 0);
    std::mt19937 generator(7);
    for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[generator() % i]);
    std::size_t next = 0;
    const auto width = static_cast<std::size_t>((bench_.keys() + bench_.page - 1) / bench_.page);
    std::vector<std::int32_t> table(static_cast<std::size_t>(bench_.b) * width, -1);
    std::vector<std::vector<std::int32_t>> of_levels;
    std::int64_t position = 0;
    const auto fill = [&](std::vector<std::int32_t>& to, std::size_t row, std::int64_t first, std::int64_t keys) {
      for (std::int64_t page = first / bench_.page; page * bench_.page < first + keys; ++page) {
        to[row * width + static_cast<std::size_t>(page)] = order[next++];
      }
    };
    for (const SharedBench::Level& level : bench_.levels) {
      std::vector<std::int32_t> own(static_cast<std::size_t>(level.groups) * width, -1);
      for (std::int64_t g = 0; g < level.groups; ++g) fill(own, static_cast<std::size_t>(g), position, level.keys);
      for (std::int64_t i = 0; i < bench_.b; ++i) {
        const auto group = static_cast<std::size_t>(i * level.groups / bench_.b);
        for (std::int64_t page = position / bench_.page; page * bench_.page < position + level.keys; ++page) {
          const auto column = static_cast<std::size_t>(page);
          table[static_cast<std::size_t>(i) * width + column] = own[group * width + column];
        }
      }
      of_levels.push_back(std::move(own));
      position += level.keys;
    }
    for (std::int64_t i = 0; i < bench_.b; ++i) fill(table, static_cast<std::size_t>(i), position, bench_.own);
    const auto same = [&](std::int64_t count, std::int64_t value) {
      return upload(std::vector<std::int32_t>(static_cast<std::size_t>(count), static_cast<std::int32_t>(value)));
    };
    arrays_.push_back(same(bench_.b, bench_.keys()));
    arrays_.push_back(upload(table));
    arrays_.push_back(same(bench_.b, position));
    position = 0;
    for (std::size_t i = 0; i < of_levels.size(); ++i) {
      const SharedBench::Level& level = bench_.levels[i];
      std::vector<std::int32_t> cu_rows;
      for (std::int64_t g = 0; g <= level.groups; ++g)
        cu_rows.push_back(static_cast<std::int32_t>(g * bench_.b / level.groups));
      const std::size_t at = arrays_.size();
      arrays_.push_back(upload(of_levels[i]));
      arrays_.push_back(upload(cu_rows));
      arrays_.push_back(same(level.groups, position + level.keys));
      arrays_.push_back(same(level.groups, position));
      SharedPrefix prefix{
          TensorView(static_cast<const void*>(ints(at)), DType::i32, {level.groups, static_cast<std::int64_t>(width)}),
          ints(at + 1), ints(at + 2)};
      if (i > 0) prefix.begin = ints(at + 3);
      prefix.max_rows = (bench_.b + level.groups - 1) / level.groups;
      prefix.max_length = position += level.keys;
      levels_.push_back(prefix);
    }
  }

  SharedBench bench_;
  DeviceBuffer q_, k_, v_, o_;
  std::vector<DeviceBuffer> arrays_;
  std::vector<SharedPrefix> levels_;
};

struct Result {
  std::string refusal;
  double shared_us = 0, apart_us = 0, read_us = 0;
};

/// Made once for all calls.
DeviceBuffer schedule_of(const Gpu& gpu, const Attention& attention, const AttentionShape& shape,
                         const ForwardInputs& in) {
  DeviceBuffer memory(attention.schedule_size(shape));
  if (memory.size() > 0) {
    attention.schedule({shape, in.sequences, in.cache.seq_begin}, {memory.data(), memory.size()}, gpu.stream());
  }
  return memory;
}

Result measure(const Gpu& gpu, const ReadKernel& read, const SharedBench& bench, const TimingOptions& timing) {
  AttentionConfig config;
  config.head_dim = static_cast<int>(bench.d);
  config.dtype = bench.dtype;
  config.page_size = bench.page;
  const Attention attention = Attention::create(config, gpu.device());
  const SharedTensors tensors(bench);
  const AttentionShape shape = tensors.shape();
  const DeviceBuffer memory(
      std::max(attention.workspace_size(shape, tensors.shapes()), attention.workspace_size(shape)));
  const Workspace workspace{memory.data(), memory.size()};
  ForwardInputs shared = tensors.inputs(true), apart = tensors.inputs(false);
  const DeviceBuffer shared_schedule = schedule_of(gpu, attention, shape, shared);
  const DeviceBuffer apart_schedule = schedule_of(gpu, attention, shape, apart);
  if (shared_schedule.size() > 0) shared.schedule = {shared_schedule.data(), shared_schedule.size()};
  if (apart_schedule.size() > 0) apart.schedule = {apart_schedule.data(), apart_schedule.size()};
  attention.forward(apart, tensors.outputs(), gpu.stream(), workspace);
  gpu.synchronize();
  const std::vector<double> expected = tensors.results();
  attention.forward(shared, tensors.outputs(), gpu.stream(), workspace);
  gpu.synchronize();
  const std::vector<double> actual = tensors.results();
  for (std::size_t i = 0; i < actual.size(); ++i) {
    if (std::abs(actual[i] - expected[i]) <= kAllowed) continue;
    return {fmt::format("wrong result: {} in the place of {}", actual[i], expected[i])};
  }
  const auto call = [&](const ForwardInputs& in) {
    return CallGraph(gpu, kCalls, [&](int) { attention.forward(in, tensors.outputs(), gpu.stream(), workspace); });
  };
  const CallGraph shared_calls = call(shared), apart_calls = call(apart);
  const CallGraph reads(gpu, kCalls, [&](int) { read.launch(tensors.regions(), gpu.stream()); });
  std::array<std::vector<double>, 3> us;
  for (int round = 0; round < timing.rounds; ++round) {
    us[0].push_back(shared_calls.time());
    us[1].push_back(apart_calls.time());
    us[2].push_back(reads.time());
  }
  return {"", median(us[0]), median(us[1]), median(us[2])};
}

std::vector<SharedBench> benches(const BenchGrid& grid) {
  std::vector<SharedBench> all;
  for (const DType dtype : grid.dtypes) {
    for (const std::int64_t page : or_default<std::int64_t>(grid.page_sizes, {16, 64})) {
      for (SharedBench bench :
           {SharedBench{}, SharedBench{.b = 64}, SharedBench{.b = 16, .own = 1024, .levels = {{1, 32768}}},
            SharedBench{.own = 1024, .levels = {{1, 2048}}}, SharedBench{.levels = {{1, 2048}, {16, 4096}}},
            SharedBench{.levels = {{32, 2048}}}}) {
        bench.dtype = dtype;
        bench.page = page;
        if (grid.batch != 0) bench.b = grid.batch;
        if (grid.heads != 0) bench.h_q = grid.heads;
        if (grid.heads_kv != 0) bench.h_kv = grid.heads_kv;
        if (!grid.head_dims.empty()) bench.d = grid.head_dims.front();
        all.push_back(bench);
      }
    }
  }
  return all;
}

}  // namespace

bool bench_shared(int device, const BenchGrid& grid, const TimingOptions& timing, bool json) {
  const Gpu gpu(device);
  const ReadKernel read(gpu);
  nlohmann::json records = nlohmann::json::array();
  bool all = true;
  if (!json) {
    fmt::print("{:<5} {:>5} {:>4} {:>4} {:>4} {:>4} {:>14} {:>6} | {:>9} {:>9} {:>7} | {:>9} {:>8}\n", "dtype", "b",
               "h_q", "h_kv", "d", "page", "prefixes", "own", "us", "apart us", "times", "read us", "TFLOP/s");
  }
  for (const SharedBench& bench : benches(grid)) {
    const Result result = measure(gpu, read, bench, timing);
    all = all && result.refusal.empty();
    const double rate = bench.multiplications() / result.shared_us / 1e6;
    if (!json) {
      fmt::print("{:<5} {:>5} {:>4} {:>4} {:>4} {:>4} {:>14} {:>6} | ", to_string(bench.dtype), bench.b, bench.h_q,
                 bench.h_kv, bench.d, bench.page, bench.text(), bench.own);
      if (!result.refusal.empty()) {
        fmt::print("refused: {}\n", result.refusal);
      } else {
        fmt::print("{:>9.2f} {:>9.2f} {:>7.2f} | {:>9.2f} {:>8.1f}\n", result.shared_us, result.apart_us,
                   result.apart_us / result.shared_us, result.read_us, rate);
      }
      std::fflush(stdout);
    }
    nlohmann::json record = {{"dtype", to_string(bench.dtype)},
                             {"b", bench.b},
                             {"h_q", bench.h_q},
                             {"h_kv", bench.h_kv},
                             {"d", bench.d},
                             {"page_size", bench.page},
                             {"prefixes", bench.text()},
                             {"own", bench.own}};
    if (!result.refusal.empty()) {
      record["refused"] = result.refusal;
    } else {
      record.update(
          {{"us", result.shared_us}, {"apart_us", result.apart_us}, {"read_us", result.read_us}, {"tflops", rate}});
    }
    records.push_back(record);
  }
  if (json) print_json({{"gpu", to_json(gpu)}, {"rounds", timing.rounds}, {"shared", records}});
  return all;
}

}  // namespace fa::cli
