#ifndef FA_SRC_API_TUNING_HPP_
#define FA_SRC_API_TUNING_HPP_

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <fa/attention.hpp>

#include "api/build.hpp"
#include "api/problem.hpp"
#include "api/ready_table.hpp"
#include "api/tune_subject.hpp"
#include "cache/records.hpp"
#include "driver/driver.hpp"
#include "plan/kernel_spec.hpp"
#include "tune/bucket.hpp"
#include "tune/record.hpp"
#include "tune/tuner.hpp"

namespace fa::api {

/// Values of KernelInfo::chosen_by.
inline constexpr const char* kByPlanner = "planner";
inline constexpr const char* kByTable = "table";
inline constexpr const char* kByRecord = "record";
inline constexpr const char* kByTuner = "tuner";
inline constexpr const char* kByStandIn = "stand-in";

/// What may decide about a kernel besides the planner.
struct TuneSources {
  bool tables = false;   ///< that come with the library
  bool records = false;  ///< of the cache directory
  bool tunes = false;

  bool any() const noexcept { return tables || records; }
};

/// What `config` and FA_TUNE allow for `op`. Throws fa::Error(invalid_argument) for another value of FA_TUNE.
TuneSources tune_sources(const AttentionConfig& config, Operation op);

/// How a decision is made. The defaults are those of a first call.
struct TuneOptions {
  tune::Budget budget = {};
  tune::RaceOptions race = {};
  std::size_t candidates = 10;
  bool publish = true;
  bool replace = false;  ///< publish over what is known
};

/// A decision with all that led to it.
struct TuneReport {
  tune::RecordKey key;
  std::vector<plan::KernelSpec> specs;  ///< the candidates, the planner's kernel first
  tune::Outcome outcome;
  std::string kernel;  ///< that serves from now on; another process may have decided otherwise before
  double seconds = 0;
};

/// The tuning of one operation of an Attention on a GPU: what is known, and how to find out. Threads may share it.
class Tuning {
 public:
  /// `context` outlives it.
  Tuning(const AttentionConfig& config, const driver::ContextRef& context, Operation op);

  const TuneSources& sources() const noexcept { return sources_; }

  /// What calls look their kernels up by: the bucket, or where nothing is tuned the planner's slot. Either with the
  /// facts that slots have not.
  std::uint64_t code(const plan::Problem& problem, int slot) const noexcept {
    if (sources_.any()) return tune::bucket_code(problem, slot);
    return std::uint64_t{1} << 63 | std::uint64_t{tune::call_facts(problem)} << 32 | static_cast<unsigned>(slot);
  }

  tune::RecordKey key(const plan::Problem& problem, const plan::KernelSpec& planned) const;

  /// The kernel that a record or a table names, if `candidates()` has it; called only when one names any.
  struct Known {
    plan::KernelSpec spec;
    const char* by = kByPlanner;
  };
  std::optional<Known> known(const tune::RecordKey& key,
                             const std::function<std::vector<plan::KernelSpec>()>& candidates) const;

  /// Whether a call on `stream` may tune a problem that is still open: not while it captures, not while another thread
  /// does it, not when this process has spent enough time on it. True takes the turn of `code`, to be given back.
  bool begin(std::uint64_t code, Stream stream);
  /// The same as far as it can be told before, without a turn.
  bool may_begin(Stream stream) const;
  void end(std::uint64_t code);

  /// Starts to get `candidates`, the first of which the caller gets itself meanwhile.
  static std::unique_ptr<Prefetch> prefetch(std::vector<plan::KernelSpec> candidates, cache::Store& store,
                                            const Supply& supply, const TuneOptions& options);

  /// Runs the contest. Throws what compiling, allocating and launching throw.
  TuneReport decide(const tune::RecordKey& key, const plan::Problem& problem, const Contest& contest, Stream stream,
                    const TuneOptions& options) const;

 private:
  std::optional<tune::Winner> recorded(const tune::RecordKey& key) const;
  std::optional<tune::Winner> tabulated(const tune::RecordKey& key) const;
  /// Forgets the record of `key`, which `reason` makes useless.
  void remove(const tune::RecordKey& key, std::string_view reason) const;
  std::string publish(const tune::RecordKey& key, const std::vector<plan::KernelSpec>& specs,
                      const tune::Outcome& outcome, bool replace) const;

  const driver::ContextRef& context_;
  Operation op_;
  TuneSources sources_;
  std::string directory_;  ///< empty: memory only
  cache::Records records_;
  std::mutex mutex_;  ///< guards busy_
  std::set<std::uint64_t> busy_;
};

/// Gives a turn back.
class TuningTurn {
 public:
  TuningTurn(Tuning& tuning, std::uint64_t code) : tuning_(tuning), code_(code) {}
  ~TuningTurn() { tuning_.end(code_); }
  TuningTurn(const TuningTurn&) = delete;
  TuningTurn& operator=(const TuningTurn&) = delete;

 private:
  Tuning& tuning_;
  std::uint64_t code_;
};

/// Says once a process that tuning failed, and why; the planner's kernel runs.
void warn_of_tuning(const char* problem);

/// What the first call of a kind of problem does, and later ones as long as it is open: makes the best known kernel
/// ready with `first()`, and if it is the turn of this thread lets `tune()` decide, after which `first()` knows. Others
/// run the best known kernel meanwhile. Whatever goes wrong with tuning, that one serves.
template <typename Ready, typename First, typename Tune>
const Ready& settle(ReadyTable<Ready>& table, Tuning& tuning, std::uint64_t code, Stream stream, const First& first,
                    const Tune& tune) {
  const Ready* ready = table.find(code);
  if (ready == nullptr) ready = &table.put_first(code, first());
  if (!ready->open || !tuning.begin(code, stream)) return *ready;
  const TuningTurn turn(tuning, code);
  ready = table.find(code);
  if (!ready->open) return *ready;  // its turn ended while this thread came here
  Ready settled = *ready;
  try {
    tune(*ready);
    settled = first();
    settled.info.chosen_by = kByTuner;
  } catch (const std::exception& exception) {
    warn_of_tuning(exception.what());
  }
  settled.open = false;
  return table.put(code, std::move(settled));
}

/// What `fa tune` asks of an Attention on a GPU: a decision for `shape`, whatever is known already.
struct TuningAccess {
  static TuneReport tune(const Attention& attention, Operation op, const AttentionShape& shape,
                         const TuneOptions& options);
};

}  // namespace fa::api

#endif  // FA_SRC_API_TUNING_HPP_
