#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <filesystem>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "api/build.hpp"
#include "cache/pack.hpp"
#include "cache/sha256.hpp"
#include "cache/store.hpp"
#include "choice.hpp"
#include "commands.hpp"
#include "compile_grid.hpp"
#include "options.hpp"
#include "output.hpp"
#include "terminal.hpp"
#include "variant_options.hpp"

namespace fa::cli {
namespace {

/// Shapes that stand for all that the planner serves with one kernel: what counts is whether the rows of a head fill a
/// large tile, whether query heads share one, and whether the keys are split.
const std::map<std::string, AttentionShape> kShapes{
    {"prefill", {.b = 16, .h_q = 16, .h_kv = 16, .s_q = 1024, .s_kv = 1024}},
    {"prefill-split", {.b = 1, .h_q = 8, .h_kv = 8, .s_q = 256, .s_kv = 8192}},
    {"decode", {.b = 64, .h_q = 32, .h_kv = 32, .s_q = 1, .s_kv = 2048}},
    {"decode-split", {.b = 1, .h_q = 8, .h_kv = 8, .s_q = 1, .s_kv = 8192}},
    {"gqa-decode", {.b = 64, .h_q = 32, .h_kv = 4, .s_q = 1, .s_kv = 2048}},
    {"gqa-decode-split", {.b = 1, .h_q = 32, .h_kv = 4, .s_q = 1, .s_kv = 8192}},
    {"gqa-chunk", {.b = 64, .h_q = 32, .h_kv = 4, .s_q = 32, .s_kv = 2048}},
    {"gqa-chunk-split", {.b = 1, .h_q = 32, .h_kv = 4, .s_q = 32, .s_kv = 8192}}};

/// Likewise for backward: what counts is whether the rows of a key tile are split.
const std::map<std::string, AttentionShape> kBackwardShapes{
    {"backward", {.b = 16, .h_q = 16, .h_kv = 16, .s_q = 1024, .s_kv = 1024}},
    {"backward-split", {.b = 1, .h_q = 8, .h_kv = 8, .s_q = 8192, .s_kv = 256}}};

constexpr const char* kDeterministic = "-deterministic";
constexpr const char* kAppend = "append";

struct PackOptions {
  std::string output;
  Grid grid{.archs = {},
            .dtypes = {DType::f16, DType::bf16},
            .head_dims = {64, 96, 128, 192, 256},
            .causal = {false, true},
            .problems = {}};
  std::vector<std::string> recordings;
  std::vector<std::string> shapes;
  PackedOptions packed;
  VariantOptions variant;
  std::vector<std::int64_t> page_sizes;
  AppendShape append;
  bool unaligned = false;
  std::string directory;
  int jobs = 0;
  bool dry_run = false;
  bool force = false;
};

/// Kernels that write a KV cache: without rotary embedding, and with the one that is asked for.
std::vector<PlanOptions> appends_of(const PackOptions& options) {
  const std::vector<std::string>& wanted = options.shapes;
  const bool named = std::ranges::find(wanted, kAppend) != wanted.end();
  if (!named && (!wanted.empty() || options.page_sizes.empty())) return {};
  std::vector<PlanOptions> problems;
  const auto add = [&](std::int64_t page_size, const AppendShape& shape) {
    PlanOptions& problem = problems.emplace_back();
    problem.page_size = page_size;
    problem.append = shape;
    problem.append->aligned = true;
    if (!options.unaligned) return;
    problems.push_back(problem);
    problems.back().append->aligned = false;
  };
  for (const std::int64_t page_size : options.page_sizes.empty() ? std::vector<std::int64_t>{0} : options.page_sizes) {
    add(page_size, {});
    if (options.append.rotary_dims > 0) add(page_size, options.append);
  }
  return problems;
}

/// Those of plain tensors, or of each page size.
std::vector<PlanOptions> problems_of(const PackOptions& options, std::int64_t page_size) {
  std::vector<PlanOptions> problems;
  const bool gradients = wants_gradients(options.variant);
  const auto add = [&](const std::string& name, const AttentionShape& shape, api::Operation op, bool deterministic) {
    const std::vector<std::string>& wanted = options.shapes;
    if (!wanted.empty() && std::find(wanted.begin(), wanted.end(), name) == wanted.end()) {
      return;
    }
    if (wanted.empty() && deterministic && gradients) {
      return;  // the sums that gradients of captures are have no fixed order
    }
    if (wanted.empty() && name == std::string("backward-split") + kDeterministic) {
      return;  // rare, and large: with --shapes
    }
    PlanOptions problem;
    problem.shape = shape;
    problem.packed = options.packed;
    problem.variant = options.variant;
    problem.page_size = page_size;
    problem.op = op;
    problem.deterministic = deterministic;
    problems.push_back(problem);
    if (options.unaligned) {
      problem.unaligned = true;
      problems.push_back(problem);
    }
  };
  for (const auto& [name, shape] : kShapes) {
    add(name, shape, api::Operation::forward, false);
  }
  for (const auto& [name, shape] : kBackwardShapes) {
    if (page_size != 0) break;  // there is none over a KV cache
    add(name, shape, api::Operation::backward, false);
    add(name + kDeterministic, shape, api::Operation::backward, true);
  }
  return problems;
}

std::vector<PlanOptions> problems_of(const PackOptions& options) {
  std::vector<PlanOptions> problems;
  for (const std::int64_t page_size : options.page_sizes.empty() ? std::vector<std::int64_t>{0} : options.page_sizes) {
    const std::vector<PlanOptions> more = problems_of(options, page_size);
    problems.insert(problems.end(), more.begin(), more.end());
  }
  const std::vector<PlanOptions> appends = appends_of(options);
  problems.insert(problems.end(), appends.begin(), appends.end());
  return problems;
}

/// What a program may look for: the chosen kernels, and those it skips because they spill.
std::vector<cache::Entry> entries_of(const std::vector<Job>& jobs) {
  std::vector<cache::Entry> entries;
  for (const Job& job : jobs) {
    entries.push_back(*job.lookup.entry);
    for (const cache::Lookup& lookup : job.passed_over) {
      entries.push_back(*lookup.entry);
    }
  }
  return entries;
}

int write(const PackOptions& options, const std::vector<Job>& jobs) {
  const std::size_t failed = count_failed(jobs);
  if (failed != 0) {
    print_failure(fmt::format("{} of {} kernels failed; {} is not written", failed, jobs.size(), options.output));
    return kFailure;
  }
  std::string problem;
  const std::optional<cache::WrittenPack> pack = cache::write_pack(options.output, entries_of(jobs), &problem);
  if (!pack) {
    throw Error(ErrorCode::io, fmt::format("{} cannot be written: {}", options.output, problem));
  }
  std::error_code ignored;  // what is written to a device is gone
  if (std::filesystem::is_regular_file(options.output, ignored) &&
      !cache::Pack::open(options.output, &problem, pack->sha256)) {
    throw Error(ErrorCode::io, fmt::format("what was written cannot be opened: {}", problem));
  }
  fmt::print("{}: {} kernels, {}, SHA-256 {}\n", options.output, pack->entries,
             format_bytes(static_cast<double>(pack->bytes)), cache::to_hex(pack->sha256));
  return kSuccess;
}

/// The packs that kernels may be taken from.
std::vector<std::string> inputs_of() {
  std::vector<std::string> files;
  for (const std::filesystem::path& file : api::cache_packs({})) files.push_back(file.string());
  return files;
}

int pack(PackOptions options) {
  options.grid.problems = problems_of(options);
  std::vector<Job> jobs = options.recordings.empty() ? make_jobs(options.grid) : make_jobs(options.recordings);
  if (jobs.empty()) {
    throw Error(ErrorCode::invalid_argument, "--record: nothing was recorded there; accepted are files with requests",
                {{"argument", "record"}, {"value", options.recordings.front()}});
  }
  if (options.dry_run) {
    for (const Job& job : jobs) {
      fmt::print("{}\n", canonical(job.specs.front()));
    }
    return kSuccess;
  }
  check_output(options.output, inputs_of(), options.force);
  CachePolicy policy;
  policy.directory = options.directory;
  const std::shared_ptr<cache::Store> store = api::open_store(policy);
  run_jobs(*store, api::Supply(CompilePolicy::allow), options.jobs, &jobs, [](const Job& job) {
    fmt::print("{}\n", describe(job));
    std::fflush(stdout);
  });
  return write(options, jobs);
}

}  // namespace

void add_pack(CLI::App& app, int* exit_code) {
  CLI::App* command = app.add_subcommand("pack", "Compile a grid of kernels into one file to ship; needs no GPU");
  command->footer(
      "A pack for sm_80,sm_86 serves GPUs of compute capability 8.0, 8.6 and 8.9. One for sm_80 alone serves those of "
      "8.6\n"
      "and 8.9 with the kernels that fit their smaller shared memory.");
  const auto options = std::make_shared<PackOptions>();
  std::vector<std::string> names;
  for (const auto& [name, shape] : kShapes) {
    names.push_back(name);
  }
  for (const auto& [name, shape] : kBackwardShapes) {
    names.insert(names.end(), {name, name + kDeterministic});
  }
  names.emplace_back(kAppend);
  command->add_option("output", options->output, "The file, as kernels.fapack")->required();
  command
      ->add_option("--record", options->recordings,
                   "Instead of a grid: what programs asked for that ran with FA_RECORD set to these files")
      ->check(CLI::ExistingFile);
  add_grid_options(*command, &options->grid);
  command->add_option("--shapes", options->shapes, "Classes of shapes, a list (default: all)")
      ->delimiter(',')
      ->check(offered(names))
      ->check(CLI::IsMember(names));
  command->add_flag("--unaligned", options->unaligned,
                    "Also kernels whose rows need not start at multiples of 16 bytes");
  command
      ->add_option(
          "--page-size", options->page_sizes,
          "k and v in pages of so many keys, a list; 0: not in pages; -1: a contiguous cache. Forwards, and appends "
          "to such caches")
      ->delimiter(',')
      ->check(CLI::Range(kContiguous, std::numeric_limits<std::int64_t>::max()));
  command->add_option("--rotary-dims", options->append.rotary_dims,
                      "Also appends with a rotary embedding of so many columns");
  command->add_flag("--rotary-interleaved", options->append.interleaved, "Its pairs are neighbours");
  const Choices<std::optional<DType>> tables{
      {"none", std::nullopt}, {"f32", DType::f32}, {"f16", DType::f16}, {"bf16", DType::bf16}};
  add_choice(*command, "--rotary-table", &options->append.table, tables, "Its cosines and sines are given, as");
  command->add_option("--directory", options->directory, "The cache to take kernels from and put them into");
  add_packed_options(*command, &options->packed);
  add_variant_options(*command, &options->variant);
  command->add_option("--jobs", options->jobs, "Threads that compile (default: one a CPU)")->check(whole_number());
  command->add_flag("--force", options->force, "Replace even a pack of FA_CACHE_PACKS, which kernels are taken from");
  command->add_flag("--dry-run", options->dry_run, "Only print the kernels");
  command->callback([command, options, exit_code] {
    if (!options->recordings.empty()) {
      check_nothing_beside(*command, "record", {"output", "directory", "jobs", "force", "dry-run"});
    }
    *exit_code = pack(*options);
  });
}

}  // namespace fa::cli
