#include "api/tuning.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <utility>

#include "api/build.hpp"
#include "api/problem.hpp"
#include "api/variants.hpp"
#include "plan/candidates.hpp"
#include "render/source.hpp"
#include "support/log.hpp"
#include "support/text.hpp"

namespace fa::api {
namespace {

// First calls of ever new kinds of problems must not add up to a program that only tunes.
constexpr double kSecondsOfAProcess = 60;
std::atomic<std::int64_t> g_milliseconds_spent{0};

bool time_is_up() {
  return static_cast<double>(g_milliseconds_spent.load()) > 1000 * kSecondsOfAProcess;
}

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

TunePolicy policy_of(const AttentionConfig& config) {
  const std::string text = support::environment("FA_TUNE");
  if (text.empty()) return config.tune;
  if (text == "off") return TunePolicy::off;
  if (text == "cached") return TunePolicy::cached;
  if (text == "on") return TunePolicy::on;
  support::throw_invalid("FA_TUNE", text, "off, cached or on");
}

/// The digest of what a kernel is compiled from.
std::string templates_of(const plan::KernelSpec& spec) {
  return render::templates_digest(render::unit_of(spec));
}

/// Decisions of this process, by directory and record: what serves where nothing can be written.
struct Memory {
  std::mutex mutex;
  std::map<std::pair<std::string, std::string>, tune::Winner> winners;
};

Memory& memory() {
  static auto* const instance = new Memory;
  return *instance;
}

}  // namespace

TuneSources tune_sources(const AttentionConfig& config, Operation op) {
  const TunePolicy policy = policy_of(config);
  if (wants_debug_kernels(config)) return {};
  // What a packed batch, or a cache in pages, holds, only the device knows; and no table has kernels with dropout, or
  // with variants, whose captures a contest would have to invent.
  if (config.varlen || config.page_size != 0 || config.dropout > 0 || !is_plain(config)) return {};
  if (config.invariance != Invariance::none && op == Operation::forward) return {};  // bits would be the tuner's
  if (config.accumulate && op == Operation::forward) return {};                      // nor any that add to a state
  if (config.statistics.any() && op == Operation::forward) return {};                // nor any of statistics
  if (config.statistics.any_gradient()) return {};
  if (config.k_dtype || config.v_dtype || size_of(config.dtype) == 1) return {};  // nor any over 8 bits
  if (policy == TunePolicy::off || read_override(config, op).fixes_tile()) return {};
  const bool compiles = config.compile != CompilePolicy::never;
  // No table has the kernels of a deterministic dq. Where nothing may be compiled, a table's kernel may be absent; what
  // runs must not depend on that.
  if (config.deterministic) return {.tables = compiles && op == Operation::forward};
  const bool waits = config.compile == CompilePolicy::allow;
  return {.tables = true, .records = true, .tunes = waits && policy == TunePolicy::on};
}

Tuning::Tuning(const AttentionConfig& config, const driver::ContextRef& context, Operation op)
    : context_(context), op_(op), sources_(tune_sources(config, op)), records_({}) {
  std::string ignored;  // the store has told it
  directory_ = cache_directory(config.cache, &ignored).string();
  records_ = cache::Records(directory_);
}

tune::RecordKey Tuning::key(const plan::Problem& problem, const plan::KernelSpec& planned) const {
  return {templates_of(planned), context_.info().name, context_.info().multiprocessors,
          tune::bucket_text(problem, planned)};
}

std::optional<tune::Winner> Tuning::recorded(const tune::RecordKey& key) const {
  const std::string name = key.digest() + ".json";
  {
    const std::scoped_lock lock(memory().mutex);
    const auto found = memory().winners.find({directory_, name});
    if (found != memory().winners.end()) return found->second;
  }
  std::string problem;
  const std::optional<std::string> text = records_.read(name, &problem);
  if (!text) {
    if (!problem.empty()) support::logf(LogLevel::debug, "a tuning record is not used: {}", problem);
    return std::nullopt;
  }
  std::optional<tune::Record> record = tune::read_record(*text, &problem);
  if (record && record->key != key) problem = "it is about another problem";
  if (!problem.empty()) {
    remove(key, problem);
    return std::nullopt;
  }
  return std::move(record->winner);
}

void Tuning::remove(const tune::RecordKey& key, std::string_view reason) const {
  const std::string name = key.digest() + ".json";
  support::logf(LogLevel::debug, "the tuning record {} is removed: {}", name, reason);
  const std::scoped_lock lock(memory().mutex);
  memory().winners.erase({directory_, name});
  records_.remove(name);
}

std::optional<tune::Winner> Tuning::tabulated(const tune::RecordKey& key) const {
  for (const tune::Table& table : tune::shipped_tables()) {
    if (const tune::Table::Row* row = table.find(key)) return row->winner;
  }
  return std::nullopt;
}

std::optional<Tuning::Known> Tuning::known(const tune::RecordKey& key,
                                           const std::function<std::vector<plan::KernelSpec>()>& candidates) const {
  std::optional<tune::Winner> recorded_winner;
  if (sources_.records) recorded_winner = recorded(key);
  const char* const by = recorded_winner ? kByRecord : kByTable;
  const std::optional<tune::Winner> winner = recorded_winner || !sources_.tables ? recorded_winner : tabulated(key);
  if (!winner) return std::nullopt;
  const std::vector<plan::KernelSpec> all = candidates();
  const auto spec = std::ranges::find(all, winner->kernel, [](const plan::KernelSpec& s) { return canonical(s); });
  if (spec == all.end()) {
    support::logf(LogLevel::debug, "a {} names a kernel that this version does not plan: {}", by, winner->kernel);
    return std::nullopt;
  }
  if (winner->templates == templates_of(*spec)) return Known{*spec, by};
  if (by == kByRecord) {
    remove(key, "its kernel was measured with other templates");
  } else {
    support::logf(LogLevel::debug, "a table's kernel was measured with other templates: {}", winner->kernel);
  }
  return std::nullopt;
}

bool Tuning::may_begin(Stream stream) const {
  return !time_is_up() && !driver::is_capturing(stream);
}

std::unique_ptr<Prefetch> Tuning::prefetch(std::vector<plan::KernelSpec> candidates, cache::Store& store,
                                           const Supply& supply, const TuneOptions& options) {
  const unsigned threads = tune::threads_of(options.budget);
  if (threads < 2) return nullptr;
  candidates.erase(candidates.begin());
  return std::make_unique<Prefetch>(std::move(candidates), store, supply, threads - 1,
                                    options.budget.seconds - options.budget.timing_seconds);
}

bool Tuning::begin(std::uint64_t code, Stream stream) {
  if (time_is_up()) {
    static std::atomic<bool> told{false};
    if (!told.exchange(true)) {
      support::logf(LogLevel::info,
                    "this process has tuned for {:.0f} s: the planner's kernels serve from now on. "
                    "`fa tune` fills the cache ahead of time.",
                    kSecondsOfAProcess);
    }
    return false;
  }
  if (driver::is_capturing(stream)) {
    support::log(LogLevel::info, "a stream is being captured: nothing is tuned, the best known kernel runs");
    return false;
  }
  const std::scoped_lock lock(mutex_);
  return busy_.insert(code).second;
}

void Tuning::end(std::uint64_t code) {
  const std::scoped_lock lock(mutex_);
  busy_.erase(code);
}

std::string Tuning::publish(const tune::RecordKey& key, const std::vector<plan::KernelSpec>& specs,
                            const tune::Outcome& outcome, bool replace) const {
  const plan::KernelSpec& best = specs[outcome.winner];
  tune::Record record{key, {canonical(best), templates_of(best)}};
  for (std::size_t i = 0; i < specs.size(); ++i) {
    const tune::Result& result = outcome.results[i];
    if (result.rounds > 0 || !result.refusal.empty()) {
      record.times.push_back({canonical(specs[i]), result.ratio, result.milliseconds, result.refusal});
    }
  }
  tune::Winner winner = record.winner;
  const std::string name = key.digest() + ".json";
  if (replace) remove(key, "it is replaced");
  if (!directory_.empty()) {
    std::string problem;
    const std::optional<std::string> standing = records_.publish(name, tune::write_record(record), &problem);
    const std::optional<tune::Record> first = standing ? tune::read_record(*standing, &problem) : std::nullopt;
    if (first && first->key == key) {
      winner = first->winner;
    } else {
      support::logf(LogLevel::debug, "the tuning record stays in memory: {}", problem);
    }
  }
  const std::scoped_lock lock(memory().mutex);
  return memory().winners.try_emplace({directory_, name}, winner).first->second.kernel;
}

TuneReport Tuning::decide(const tune::RecordKey& key, const plan::Problem& problem, const Contest& contest,
                          Stream stream, const TuneOptions& options) const {
  TuneReport report;
  report.key = key;
  report.specs = contest.specs;
  const double begin = seconds_now();
  const std::function<double()> now = seconds_now;
  {
    GpuSubject subject(contest, problem, op_ == Operation::backward, context_, stream);
    report.outcome = tune::tune(subject, contest.specs.size(), options.budget, options.race, now);
  }
  report.kernel = options.publish ? publish(key, contest.specs, report.outcome, options.replace)
                                  : canonical(contest.specs[report.outcome.winner]);
  report.seconds = seconds_now() - begin;
  if (options.publish) g_milliseconds_spent += static_cast<std::int64_t>(1000 * report.seconds);
  support::logf(LogLevel::info, "tuned in {:.2f} s ({}): {}", report.seconds, report.outcome.reason, report.kernel);
  return report;
}

void warn_of_tuning(const char* problem) {
  static std::atomic<bool> told{false};
  support::logf(told.exchange(true) ? LogLevel::debug : LogLevel::warning,
                "tuning failed, and the planner's kernel runs: {}", problem);
}

}  // namespace fa::api
