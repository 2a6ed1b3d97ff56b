#include "bench_append.hpp"

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

struct AppendBench {
  DType dtype = DType::bf16;
  std::int64_t b = 1, s_new = 1, h_q = 32, h_kv = 8, d = 128;
  std::int64_t page_size = 16;  ///< 0: contiguous
  bool rotary = false;          ///< of k and q, all columns

  std::int64_t rows() const { return b * s_new; }
  /// Of new keys and values, and of q: what is read, and as much is written.
  std::size_t bytes() const {
    const std::int64_t heads = 2 * h_kv + (rotary ? h_q : 0);
    return static_cast<std::size_t>(rows() * heads * d) * size_of(dtype);
  }
};

template <class Number>
DeviceBuffer upload(const std::vector<Number>& numbers) {
  DeviceBuffer buffer(numbers.size() * sizeof(Number));
  buffer.upload(numbers.data(), buffer.size());
  return buffer;
}

/// The tensors of one call; the pages of a request lie apart.
class AppendTensors {
 public:
  explicit AppendTensors(const AppendBench& bench)
      : bench_(bench),
        pages_of_request_(bench.page_size > 0 ? (bench.s_new + bench.page_size - 1) / bench.page_size + 1 : 1),
        page_rows_(bench.page_size > 0 ? bench.page_size : bench.s_new + 1),
        rows_(2 * bench.bytes()),
        cache_(size_t_of(2 * bench.b * pages_of_request_ * page_rows_ * bench.h_kv * bench.d) * size_of(bench.dtype)),
        table_(upload(table())),
        used_(upload(std::vector<std::int32_t>(size_t_of(bench.b), static_cast<std::int32_t>(bench.s_new + 1)))) {
    const std::vector<std::byte> block = normal_block(bench.dtype, 1);
    rows_.tile(block.data(), block.size());
  }

  AppendInputs inputs() const {
    const AppendBench& c = bench_;
    std::byte* rows = static_cast<std::byte*>(rows_.data());
    const auto take = [&](std::int64_t heads) {
      const TensorView view(static_cast<void*>(rows), c.dtype, {c.b, c.s_new, heads, c.d});
      rows += size_t_of(view.elements()) * size_of(c.dtype);
      return view.swap_axes(1, 2);
    };
    const std::int64_t pages = c.b * pages_of_request_;
    const TensorView cache(cache_.data(), c.dtype, {2 * pages, page_rows_, c.h_kv, c.d});
    AppendInputs inputs{take(c.h_kv), take(c.h_kv), cache.swap_axes(1, 2), cache.swap_axes(1, 2)};
    inputs.k_cache.shape[0] = inputs.v_cache.shape[0] = pages;
    inputs.v_cache.data =
        static_cast<std::byte*>(cache_.data()) + size_t_of(pages * cache.strides[0]) * size_of(c.dtype);
    inputs.seqused_kv = static_cast<const std::int32_t*>(used_.data());
    if (c.page_size > 0) inputs.cache.block_table = TensorView(table_.data(), DType::i32, {c.b, pages_of_request_});
    if (!c.rotary) return inputs;
    inputs.rotary.dims = static_cast<int>(c.d);
    inputs.q = take(c.h_q);
    inputs.q_out = take(c.h_q);
    return inputs;
  }

  /// As many bytes as the call reads, and as it writes.
  const void* source() const { return rows_.data(); }
  void* target() const { return static_cast<std::byte*>(rows_.data()) + bench_.bytes(); }

 private:
  static std::size_t size_t_of(std::int64_t value) { return static_cast<std::size_t>(value); }

  std::vector<std::int32_t> table() const {
    const std::int64_t pages = bench_.b * pages_of_request_;
    std::vector<std::int32_t> table(size_t_of(pages));
    for (std::int64_t i = 0; i < pages; ++i) {
      table[size_t_of(i)] = static_cast<std::int32_t>(i % pages_of_request_ * bench_.b + i / pages_of_request_);
    }
    return table;
  }

  AppendBench bench_;
  std::int64_t pages_of_request_, page_rows_;
  DeviceBuffer rows_;  // k, v, q, and as much to write to
  DeviceBuffer cache_;
  DeviceBuffer table_, used_;
};

struct Result {
  AppendBench bench;
  double append_us = 0, copy_us = 0;
};

Result measure(const Gpu& gpu, const CopyKernel& copy, const AppendBench& bench, const TimingOptions& timing) {
  AttentionConfig config;
  config.head_dim = static_cast<int>(bench.d);
  config.dtype = bench.dtype;
  config.page_size = bench.page_size;
  const Attention attention = Attention::create(config, gpu.device());
  std::vector<AppendTensors> tensors;
  const std::size_t sets = timing.flush_l2 ? 4 * gpu.l2_bytes() / (2 * bench.bytes()) + 2 : 1;
  for (std::size_t i = 0; i < std::min<std::size_t>(sets, kCalls); ++i) tensors.emplace_back(bench);
  const auto set = [&](int call) -> const AppendTensors& {
    return tensors[static_cast<std::size_t>(call) % tensors.size()];
  };
  attention.append(tensors.front().inputs(), gpu.stream());
  gpu.synchronize();
  const CallGraph appends(gpu, kCalls, [&](int call) { attention.append(set(call).inputs(), gpu.stream()); });
  const CallGraph copies(
      gpu, kCalls, [&](int call) { copy.launch(set(call).source(), set(call).target(), bench.bytes(), gpu.stream()); });
  std::vector<double> append_us, copy_us;
  appends.time(), copies.time();
  for (int round = 0; round < timing.rounds; ++round) {
    append_us.push_back(appends.time());
    copy_us.push_back(copies.time());
  }
  return {bench, median(append_us), median(copy_us)};
}

double terabytes(const Result& result, double microseconds) {
  return 2 * static_cast<double>(result.bench.bytes()) / microseconds / 1e6;
}

std::vector<AppendBench> benches(const BenchGrid& grid) {
  constexpr std::int64_t kBatches[][2] = {{1, 1},    {16, 1},  {64, 1},   {256, 1},
                                          {1024, 1}, {1, 512}, {1, 4096}, {4, 8192}};
  std::vector<AppendBench> all;
  for (const DType dtype : grid.dtypes) {
    for (const auto& [b, s_new] : kBatches) {
      for (const int d : or_default<int>(grid.head_dims, {128})) {
        for (const std::int64_t page_size : or_default<std::int64_t>(grid.page_sizes, {0, 16})) {
          for (const bool rotary : {false, true}) {
            AppendBench bench{dtype, b, s_new};
            if (grid.heads != 0) bench.h_q = grid.heads;
            if (grid.heads_kv != 0) bench.h_kv = grid.heads_kv;
            bench.d = d;
            bench.page_size = page_size;
            bench.rotary = rotary;
            all.push_back(bench);
          }
        }
      }
    }
  }
  return all;
}

}  // namespace

void bench_append(int device, const BenchGrid& grid, const TimingOptions& timing, bool json) {
  const Gpu gpu(device);
  const CopyKernel copy(gpu);
  nlohmann::json records = nlohmann::json::array();
  if (!json) {
    fmt::print("{:<5} {:>5} {:>6} {:>4} {:>4} {:>4} {:>4} {:>6} {:>9} {:>7} {:>9} {:>7} {:>6}\n", "dtype", "b", "s_new",
               "h_q", "h_kv", "d", "page", "rotary", "us", "TB/s", "copy us", "TB/s", "ratio");
  }
  for (const AppendBench& bench : benches(grid)) {
    const Result result = measure(gpu, copy, bench, timing);
    const double ratio = result.copy_us / result.append_us;
    if (!json) {
      fmt::print("{:<5} {:>5} {:>6} {:>4} {:>4} {:>4} {:>4} {:>6} {:>9.2f} {:>7.2f} {:>9.2f} {:>7.2f} {:>6.2f}\n",
                 to_string(bench.dtype), bench.b, bench.s_new, bench.h_q, bench.h_kv, bench.d, bench.page_size,
                 bench.rotary ? "k, q" : "no", result.append_us, terabytes(result, result.append_us), result.copy_us,
                 terabytes(result, result.copy_us), ratio);
      std::fflush(stdout);
    }
    records.push_back({{"dtype", to_string(bench.dtype)},
                       {"b", bench.b},
                       {"s_new", bench.s_new},
                       {"h_q", bench.h_q},
                       {"h_kv", bench.h_kv},
                       {"d", bench.d},
                       {"page_size", bench.page_size},
                       {"rotary", bench.rotary},
                       {"us", result.append_us},
                       {"tbps", terabytes(result, result.append_us)},
                       {"copy_us", result.copy_us},
                       {"ratio", ratio}});
  }
  if (json) print_json({{"gpu", to_json(gpu)}, {"flush_l2", timing.flush_l2}, {"append", records}});
}

}  // namespace fa::cli
