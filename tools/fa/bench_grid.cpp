#include "bench_grid.hpp"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <string>

#include "choice.hpp"
#include "options.hpp"
#include "plan/arch.hpp"

namespace fa::cli {
namespace {

AttentionShape shape_of(const BenchGrid& options, int head_dim, int seq) {
  AttentionShape shape;
  shape.b = options.batch != 0 ? options.batch : std::max(options.tokens / seq, 1);
  shape.h_q = options.heads != 0 ? options.heads : std::max(options.width / head_dim, 1);
  shape.h_kv = options.heads_kv != 0 ? options.heads_kv : shape.h_q;
  shape.s_q = seq;
  shape.s_kv = options.seq_kv != 0 ? options.seq_kv : seq;
  return shape;
}

/// Sequences of lengths uniform in [1, s_q] in the place of equal ones.
void pack(BenchProblem* problem) {
  problem->layout = Layout::bshd;
  problem->cumulative = uniform_lengths(problem->shape.b, problem->shape.s_q);
  problem->shape.s_kv = problem->shape.s_q;
  problem->shape.total_q = problem->shape.total_kv = problem->cumulative.back();
}

}  // namespace

std::vector<BenchProblem> make_grid(const BenchGrid& options) {
  std::vector<BenchProblem> grid;
  for (const DType dtype : options.dtypes) {
    for (const int head_dim : options.head_dims) {
      for (const bool causal : options.causal) {
        for (const int seq : options.seqs) {
          grid.push_back({options.op, dtype, head_dim, options.head_dim_v != 0 ? options.head_dim_v : head_dim, causal,
                          options.causal_align, options.layout, shape_of(options, head_dim, seq), options.deterministic,
                          options.tune, options.packed, options.variant});
          if (options.packed.varlen) pack(&grid.back());
        }
      }
    }
  }
  return grid;
}

nlohmann::json to_json(const BenchProblem& problem) {
  const AttentionShape& shape = problem.shape;
  return {{"op", to_string(problem.op)},
          {"deterministic", problem.deterministic},
          {"dtype", to_string(problem.dtype)},
          {"b", shape.b},
          {"h_q", shape.h_q},
          {"h_kv", shape.h_kv},
          {"s_q", shape.s_q},
          {"s_kv", shape.s_kv},
          {"d_qk", problem.d_qk},
          {"d_v", problem.d_v},
          {"causal", problem.causal},
          {"variant", problem.variant_text()},
          {"layout", problem.layout == Layout::bshd ? "bshd" : "bhsd"}};
}

nlohmann::json to_json(const Gpu& gpu) {
  const driver::DeviceInfo& info = gpu.info();
  return {{"name", info.name},
          {"arch", plan::to_string(info.arch)},
          {"multiprocessors", info.multiprocessors},
          {"driver", driver::api().version},
          {"fa", version()}};
}

void add_grid_options(CLI::App& command, BenchGrid* options, bool appends) {
  const std::string group = "Grid";
  const Choices<Operation> operations{{"forward", Operation::forward}, {"backward", Operation::backward}};
  const Choices<Operation> with_append{
      {"forward", Operation::forward}, {"backward", Operation::backward}, {"append", Operation::append}};
  add_choice(command, "--op", &options->op, appends ? with_append : operations, "What to time")->group(group);
  command.add_flag("--deterministic", options->deterministic, "Make dq bitwise repeatable")->group(group);
  const Choices<Layout> layouts{{"bshd", Layout::bshd}, {"bhsd", Layout::bhsd}};
  add_dtype_list_option(command, &options->dtypes);
  add_causal_list_option(command, &options->causal);
  add_packed_options(command, &options->packed);
  add_causal_align_option(command, &options->causal_align);
  command.add_option("--head-dim", options->head_dims, "d_qk, a list")
      ->delimiter(',')
      ->check(whole_number(1))
      ->group(group);
  command.add_option("--head-dim-v", options->head_dim_v, "d_v (default: d_qk)")->check(whole_number())->group(group);
  command.add_option("--seq", options->seqs, "s_q, a list")->delimiter(',')->check(whole_number(1))->group(group);
  command.add_option("--seq-kv", options->seq_kv, "s_kv (default: s_q)")->check(whole_number())->group(group);
  command.add_option("--tokens", options->tokens, "b = tokens / s_q, unless --batch is given")
      ->check(whole_number())
      ->group(group);
  command.add_option("--width", options->width, "h_q = width / d_qk, unless --heads is given")
      ->check(whole_number())
      ->group(group);
  command.add_option("--batch", options->batch, "b")->check(whole_number())->group(group);
  command.add_option("--heads", options->heads, "h_q")->check(whole_number())->group(group);
  command.add_option("--heads-kv", options->heads_kv, "h_kv (default: h_q)")->check(whole_number())->group(group);
  add_choice(command, "--layout", &options->layout, layouts, "Memory order of q, k, v and o")->group(group);
}

}  // namespace fa::cli
