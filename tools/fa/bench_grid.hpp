#ifndef FA_TOOLS_FA_BENCH_GRID_HPP_
#define FA_TOOLS_FA_BENCH_GRID_HPP_

#include <nlohmann/json.hpp>
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
  std::vector<DType> dtypes{DType::bf16};
  std::vector<int> head_dims{64, 128, 256};
  int head_dim_v = 0;
  std::vector<int> seqs{512, 1024, 2048, 4096, 8192, 16384};
  int seq_kv = 0;
  std::vector<bool> causal{false, true};
  CausalAlign causal_align = CausalAlign::bottom_right;
  Layout layout = Layout::bshd;
  int tokens = 16384;
  int width = 2048;
  int batch = 0;
  int heads = 0;
  int heads_kv = 0;
  PackedOptions packed;
  VariantOptions variant;
  TunePolicy tune = TunePolicy::cached;
};

/// `appends`: --op may be append.
void add_grid_options(CLI::App& command, BenchGrid* grid, bool appends = false);

std::vector<BenchProblem> make_grid(const BenchGrid& grid);

nlohmann::json to_json(const BenchProblem& problem);
nlohmann::json to_json(const Gpu& gpu);

}  // namespace fa::cli

#endif  // FA_TOOLS_FA_BENCH_GRID_HPP_
