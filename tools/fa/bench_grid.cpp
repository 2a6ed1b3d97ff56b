#include "bench_grid.hpp"

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <utility>

#include "choice.hpp"
#include "options.hpp"
#include "plan/arch.hpp"
#include "support/text.hpp"

namespace fa::cli {
namespace {

constexpr std::int64_t kLongest = std::numeric_limits<std::int32_t>::max();
constexpr std::int64_t kMostRequests = 1 << 20;

constexpr double kMostBytes = 24e9;  // of K and V, of decodes that nobody asked for one by one, and of caches

AttentionShape shape_of(const BenchGrid& options, int head_dim, int seq, int seq_kv) {
  AttentionShape shape;
  shape.b = options.batch != 0 ? options.batch : std::max(options.tokens / seq, 1);
  shape.h_q = options.heads != 0 ? options.heads : std::max(options.width / head_dim, 1);
  shape.h_kv = options.heads_kv != 0 ? options.heads_kv : shape.h_q;
  shape.s_q = seq;
  shape.s_kv = seq_kv != 0 ? seq_kv : seq;
  return shape;
}

/// Sequences of lengths uniform in [1, s_q] in the place of equal ones.
void pack(BenchProblem* problem) {
  if (problem->page_size == 0) problem->layout = Layout::bshd;
  problem->cumulative = uniform_lengths(problem->shape.b, problem->shape.s_q);
  problem->shape.s_kv = problem->shape.s_q;
  problem->shape.total_q = problem->cumulative.back();
  problem->shape.total_kv = problem->page_size == 0 ? problem->cumulative.back() : 0;
}

/// Somewhere in a whole, whose rows and keys end together.
void place(const BenchGrid& options, BenchProblem* problem) {
  AttentionShape& shape = problem->shape;
  problem->max_multiprocessors = options.max_multiprocessors;
  shape.bounded = options.max_multiprocessors > 0;
  if (options.at_q == 0 && options.at_kv == 0) return;
  const std::int64_t end = std::max(options.at_q + shape.s_q, options.at_kv + shape.s_kv);
  problem->place = ShardPlace{.q = options.at_q,
                              .kv = options.at_kv,
                              .whole_b = shape.b,
                              .whole_h_q = shape.h_q,
                              .whole_s_q = end,
                              .whole_s_kv = end};
  shape.placed = true;
}

std::int64_t number(std::string_view whole, std::string_view text) {
  std::int64_t value = 0;
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (problem != std::errc() || end != text.data() + text.size() || value < 1 || value > kLongest) {
    support::throw_invalid("--lengths", whole,
                           "lengths from 1 on as 100,200*3, or log-uniform:16:32768, or uniform:1:4096");
  }
  return value;
}

std::vector<std::string_view> parts_of(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(separator, begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

/// Whether a contiguous cache, whose rows are as long as the longest request, may be had.
bool fits_contiguous(const BenchProblem& problem) {
  const AttentionShape& shape = problem.shape;
  const auto columns = static_cast<double>(shape.h_kv * (problem.d_qk + problem.d_v));
  return static_cast<double>(shape.b * shape.s_kv) * columns * static_cast<double>(size_of(problem.dtype)) <=
         kMostBytes;
}

/// A decode over `keys`: pages, or one tensor. Where lengths differ it is a contiguous cache, or packed if that would
/// take too much memory.
BenchProblem decode_of(const BenchGrid& options, DType dtype, int d, int s_q, std::int64_t page_size,
                       const std::vector<std::int32_t>& keys) {
  BenchProblem problem;
  problem.op = Operation::decode;
  problem.dtype = dtype;
  problem.d_qk = d;
  problem.d_v = options.head_dim_v != 0 ? options.head_dim_v : d;
  problem.causal = s_q > 1;
  problem.layout = options.layout;
  problem.tune = options.tune;
  problem.variant = options.variant;
  problem.page_size = page_size;
  problem.k_dtype = options.k_dtype;
  problem.v_dtype = options.v_dtype;
  problem.group_size = options.group_size;
  problem.key_scales = options.key_scales;
  problem.value_scales = options.value_scales;
  problem.precise = options.precise;
  problem.invariance = options.invariance;
  AttentionShape& shape = problem.shape;
  shape.b = static_cast<std::int64_t>(keys.size());
  shape.h_q = options.heads != 0 ? options.heads : 32;
  shape.h_kv = options.heads_kv != 0 ? options.heads_kv : options.heads != 0 ? options.heads : 8;
  if (options.op == Operation::mla) {
    problem.value_in_key = true;
    shape.h_kv = 1;
  }
  shape.s_q = s_q;
  shape.s_kv = *std::ranges::max_element(keys);
  if (std::ranges::all_of(keys, [&](std::int32_t length) { return length == keys.front(); })) return problem;
  std::int64_t sum = 0;
  for (const std::int32_t length : keys) sum += length;
  if (sum > kLongest) support::throw_invalid("--lengths", sum, fmt::format("at most {} keys in all", kLongest));
  problem.cumulative_kv = {0};
  for (const std::int32_t length : keys) problem.cumulative_kv.push_back(problem.cumulative_kv.back() + length);
  if (page_size == 0 && fits_contiguous(problem)) problem.page_size = kContiguous;
  if (problem.page_size != 0) return problem;
  problem.packed.varlen = true;
  problem.layout = Layout::bshd;
  for (std::size_t i = 0; i <= keys.size(); ++i) problem.cumulative.push_back(static_cast<std::int32_t>(i) * s_q);
  shape.total_q = problem.cumulative.back();
  shape.total_kv = sum;
  return problem;
}

/// The lengths of every batch that is decoded.
std::vector<std::vector<std::int32_t>> batches_of(const BenchGrid& options) {
  if (!options.lengths.empty()) return {parse_lengths(options.lengths, options.batch)};
  std::vector<std::vector<std::int32_t>> batches;
  const std::vector<int> given = options.batch != 0 ? std::vector{options.batch} : std::vector<int>{};
  for (const int b : or_default(given, {1, 4, 16, 64, 256})) {
    for (const int keys : or_default(options.seqs_kv, {1024, 8192, 32768, 131072})) {
      if (keys == 0) support::throw_invalid("--seq-kv", keys, "a whole number from 1 on for decode");
      batches.emplace_back(static_cast<std::size_t>(b), keys);
    }
  }
  return batches;
}

}  // namespace

std::vector<std::int32_t> parse_lengths(std::string_view text, int b) {
  const std::vector<std::string_view> words = parts_of(text, ':');
  std::vector<std::int32_t> lengths;
  if (words[0] == "uniform" || words[0] == "log-uniform") {
    if (words.size() != 3) number(text, "");
    const std::int64_t least = number(text, words[1]), most = number(text, words[2]);
    if (least > most) number(text, "");
    std::mt19937_64 generator(64);
    for (int i = 0; i < std::max(b, 1); ++i) {
      const double share = static_cast<double>(generator() >> 11) * 0x1p-53;
      const auto low = static_cast<double>(least), high = static_cast<double>(most) + 1;
      const double length = words[0] == "uniform" ? low + share * (high - low) : low * std::pow(high / low, share);
      lengths.push_back(static_cast<std::int32_t>(std::clamp(static_cast<std::int64_t>(length), least, most)));
    }
    return lengths;
  }
  for (const std::string_view part : parts_of(text, ',')) {
    const std::vector<std::string_view> factors = parts_of(part, '*');
    const std::int64_t count = factors.size() == 2 ? number(text, factors[1]) : 1;
    if (factors.size() > 2 || count > kMostRequests) number(text, "");
    lengths.insert(lengths.end(), static_cast<std::size_t>(count), static_cast<std::int32_t>(number(text, factors[0])));
  }
  if (b != 0 && lengths.size() != static_cast<std::size_t>(b)) {
    support::throw_invalid("--lengths", lengths.size(), fmt::format("as many as --batch has, {}", b));
  }
  return lengths;
}

namespace {

std::vector<BenchProblem> decodes_of(const BenchGrid& options) {
  const bool asked_for = options.batch != 0 || !options.seqs_kv.empty() || !options.lengths.empty();
  std::vector<BenchProblem> problems;
  for (const DType dtype : options.dtypes) {
    for (const int d : or_default(options.head_dims, {128})) {
      for (const std::vector<std::int32_t>& keys : batches_of(options)) {
        for (const int s_q : or_default(options.seqs, {1})) {
          for (const std::int64_t page_size : or_default<std::int64_t>(options.page_sizes, {0, 16, 64})) {
            problems.push_back(decode_of(options, dtype, d, s_q, page_size, keys));
            if (!asked_for && problems.back().bytes() > kMostBytes) problems.pop_back();
          }
        }
      }
    }
  }
  return problems;
}

/// Absorbed decodes of DeepSeek's models, of a GPU's share of the heads.
std::vector<BenchProblem> make_mla(const BenchGrid& given) {
  std::vector<BenchProblem> problems;
  for (const int heads : or_default(given.heads != 0 ? std::vector{given.heads} : std::vector<int>{}, {16, 128})) {
    BenchGrid options = given;
    options.heads = heads;
    options.head_dims = or_default(given.head_dims, {576});
    if (given.head_dim_v == 0) options.head_dim_v = 512;
    options.page_sizes = or_default<std::int64_t>(given.page_sizes, {64});
    options.seqs = or_default(given.seqs, {1, 2});
    const bool has_batch = given.batch != 0 || !given.lengths.empty();  // which may follow from the lengths
    for (const int b : has_batch ? std::vector{given.batch} : std::vector{1, 4, 64, 128}) {
      options.batch = b;
      options.seqs_kv = or_default(given.seqs_kv, {4096, 32768});
      for (BenchProblem& problem : decodes_of(options)) problems.push_back(std::move(problem));
    }
  }
  return problems;
}

}  // namespace

std::vector<BenchProblem> make_decodes(const BenchGrid& options) {
  return options.op == Operation::mla ? make_mla(options) : decodes_of(options);
}

std::vector<BenchProblem> make_grid(const BenchGrid& options) {
  std::vector<BenchProblem> grid;
  const auto add = [&](DType dtype, int head_dim, bool causal, int seq, int seq_kv, std::int64_t page_size) {
    BenchProblem problem{options.op,
                         dtype,
                         head_dim,
                         options.head_dim_v != 0 ? options.head_dim_v : head_dim,
                         causal,
                         options.causal_align,
                         options.layout,
                         shape_of(options, head_dim, seq, seq_kv),
                         options.deterministic,
                         options.tune,
                         options.packed,
                         options.variant};
    problem.page_size = page_size;
    problem.shape.gradients = options.gradients;
    problem.k_dtype = options.k_dtype;
    problem.v_dtype = options.v_dtype;
    problem.group_size = options.group_size;
    problem.key_scales = options.key_scales;
    problem.value_scales = options.value_scales;
    problem.precise = options.precise;
    problem.invariance = options.invariance;
    problem.statistics = options.statistics;
    if (options.packed.varlen) pack(&problem);
    place(options, &problem);
    grid.push_back(std::move(problem));
  };
  for (const DType dtype : options.dtypes) {
    for (const int head_dim : or_default(options.head_dims, {64, 128, 256})) {
      for (const bool causal : options.causal) {
        for (const int seq : or_default(options.seqs, {512, 1024, 2048, 4096, 8192, 16384})) {
          for (const int seq_kv : or_default(options.seqs_kv, {0})) {
            for (const std::int64_t page_size : or_default<std::int64_t>(options.page_sizes, {0})) {
              add(dtype, head_dim, causal, seq, seq_kv, page_size);
            }
          }
        }
      }
    }
  }
  return grid;
}

nlohmann::json to_json(const BenchProblem& problem) {
  const AttentionShape& shape = problem.shape;
  const auto [dq, dk, dv] = shape.gradients;
  return {{"op", to_string(problem.op)},
          {"deterministic", problem.deterministic},
          {"gradients", {{"dq", dq}, {"dk", dk}, {"dv", dv}}},
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
          {"layout", problem.layout == Layout::bshd ? "bshd" : "bhsd"},
          {"invariance", to_string(problem.invariance)},
          {"at_q", problem.place ? problem.place->q : 0},
          {"at_kv", problem.place ? problem.place->kv : 0},
          {"max_multiprocessors", problem.max_multiprocessors},
          {"page_size", problem.page_size}};
}

nlohmann::json to_json(const Gpu& gpu) {
  const driver::DeviceInfo& info = gpu.info();
  return {{"name", info.name},
          {"arch", plan::to_string(info.arch)},
          {"multiprocessors", info.multiprocessors},
          {"driver", driver::api().version},
          {"fa", version()}};
}

void add_grid_options(CLI::App& command, BenchGrid* options, bool bench) {
  const std::string group = "Grid";
  const auto of_decode = [&](const char* value) { return bench ? std::string("; decode ") + value + ")" : ")"; };
  const Choices<Operation> operations{{"forward", Operation::forward}, {"backward", Operation::backward}};
  const Choices<Operation> of_bench{{"forward", Operation::forward}, {"backward", Operation::backward},
                                    {"append", Operation::append},   {"decode", Operation::decode},
                                    {"merge", Operation::merge},     {"shared", Operation::shared},
                                    {"mla", Operation::mla}};
  add_choice(command, "--op", &options->op, bench ? of_bench : operations, "What to time")->group(group);
  if (bench) {
    add_stored_options(command, &options->k_dtype, &options->v_dtype, &options->group_size);
    add_key_scales_options(command, &options->key_scales, &options->value_scales, &options->precise);
    command
        .add_option("--page-size", options->page_sizes,
                    "k and v in pages of so many keys, a list; 0: not in pages; -1: a contiguous cache, whose lengths "
                    "the GPU alone knows (default: 0; append 0,16; decode 0,16,64)")
        ->delimiter(',')
        ->check(CLI::Range(kContiguous, kLongest))
        ->group(group);
    command
        .add_option("--lengths", options->lengths,
                    "decode: the keys of each request, as 100,200*3, or of --batch requests log-uniform:16:32768 or "
                    "uniform:1:4096")
        ->check(CLI::Validator(
            [](const std::string& text) { return text.empty() ? "'': accepted is one length or more" : ""; }, "",
            "lengths"))
        ->group(group);
  }
  add_invariance_option(command, &options->invariance);
  if (bench) add_statistics_options(command, &options->statistics);
  command.add_flag("--deterministic", options->deterministic, "Make dq bitwise repeatable")->group(group);
  if (bench) add_outputs_option(command, &options->gradients)->group(group);
  const Choices<Layout> layouts{{"bshd", Layout::bshd}, {"bhsd", Layout::bhsd}};
  add_dtype_list_option(command, &options->dtypes);
  add_causal_list_option(command, &options->causal);
  add_packed_options(command, &options->packed);
  add_causal_align_option(command, &options->causal_align);
  command
      .add_option("--head-dim", options->head_dims, "d_qk, a list (default: 64,128,256" + of_decode("128, append 128"))
      ->delimiter(',')
      ->check(whole_number(1))
      ->group(group);
  command.add_option("--head-dim-v", options->head_dim_v, "d_v (default: d_qk)")->check(whole_number())->group(group);
  command.add_option("--seq", options->seqs, "s_q, a list (default: 512 to 16384" + of_decode("1"))
      ->delimiter(',')
      ->check(whole_number(1))
      ->group(group);
  command.add_option("--seq-kv", options->seqs_kv, "s_kv, a list (default: s_q" + of_decode("1024,8192,32768,131072"))
      ->delimiter(',')
      ->check(whole_number())
      ->group(group);
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
  if (!bench) return;
  command.add_option("--at-q", options->at_q, "Forward and backward: position of the first row in a larger attention")
      ->check(whole_number())
      ->group(group);
  command.add_option("--at-kv", options->at_kv, "Likewise of the first key")->check(whole_number())->group(group);
  command
      .add_option("--max-multiprocessors", options->max_multiprocessors,
                  "Forward and backward: multiprocessors that the attention kernel takes; 0: all")
      ->check(whole_number())
      ->group(group);
}

}  // namespace fa::cli
