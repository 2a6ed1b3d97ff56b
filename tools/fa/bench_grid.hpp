#ifndef FA_TOOLS_FA_BENCH_GRID_HPP_
#define FA_TOOLS_FA_BENCH_GRID_HPP_

#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "bench_problem.hpp"
#include "gpu.hpp"
#include "options.hpp"
#include "variant_options.hpp"

namespace CLI {
class App;
}

namespace fa::cli {

/// The product of these is what `fa bench` and `fa tune` go through.
struct BenchGrid {
  Operation op = Operation::forward;
  bool deterministic = false;
  Gradients gradients = {};  ///< of backward
  std::vector<DType> dtypes{DType::bf16};
  std::vector<int> head_dims;  ///< empty: 64, 128 and 256, of append and decode 128
  int head_dim_v = 0;
  std::vector<int> seqs;                        ///< empty: 512 to 16384, of decode 1
  std::vector<int> seqs_kv;                     ///< empty: as seqs, of decode 1k to 128k
  std::optional<DType> k_dtype = std::nullopt;  ///< of forward and decode: what K is stored as
  std::optional<DType> v_dtype = std::nullopt;
  int group_size = 0;       ///< of u4x2
  bool key_scales = false;  ///< of 8-bit floats
  bool value_scales = false;
  bool precise = false;
  std::vector<std::int64_t> page_sizes;  ///< empty: 0, of append 0 and 16, of decode 0, 16 and 64
  std::string lengths;                   ///< of decode, as --lengths has it
  std::vector<bool> causal{false, true};
  CausalAlign causal_align = CausalAlign::bottom_right;
  Invariance invariance = Invariance::none;
  Statistics statistics = {};  ///< of forward
  Layout layout = Layout::bshd;
  int tokens = 16384;
  int width = 2048;
  int batch = 0;
  int heads = 0;
  int heads_kv = 0;
  std::int64_t at_q = 0, at_kv = 0;  ///< where rows and keys stand in a whole that ends with the later of them
  int max_multiprocessors = 0;
  PackedOptions packed;
  VariantOptions variant;
  TunePolicy tune = TunePolicy::cached;
};

/// `bench`: with what `fa bench` alone times, appends, decodes, merges and pages.
void add_grid_options(CLI::App& command, BenchGrid* grid, bool bench = false);

/// `given`, or `fallback` where that is empty.
template <typename Value>
std::vector<Value> or_default(const std::vector<Value>& given, std::initializer_list<Value> fallback) {
  return given.empty() ? std::vector<Value>(fallback) : given;
}

/// "100,200*3" are the lengths 100, 200, 200, 200; "log-uniform:16:32768" and "uniform:1:4096" are `b` seeded ones,
/// both ends included. Throws fa::Error(invalid_argument).
std::vector<std::int32_t> parse_lengths(std::string_view text, int b);

/// The problems of --op decode and mla. Without --lengths, --batch and --seq-kv those whose K and V are 24 GB at most.
std::vector<BenchProblem> make_decodes(const BenchGrid& grid);

std::vector<BenchProblem> make_grid(const BenchGrid& grid);

nlohmann::json to_json(const BenchProblem& problem);
nlohmann::json to_json(const Gpu& gpu);

}  // namespace fa::cli

#endif  // FA_TOOLS_FA_BENCH_GRID_HPP_
