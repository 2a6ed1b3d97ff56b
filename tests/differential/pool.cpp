#include "differential/pool.hpp"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <map>
#include <new>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "driver/driver.hpp"

namespace fa::differential {
namespace {

constexpr std::size_t kMostJobs = 256, kMostNotes = 64, kNote = 600;
constexpr int kLost = 3;  // exit status: the device is of no use to this process any more

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Note {
  std::uint64_t config, shape;
  char text[kNote];
};

/// A list that processes add to.
struct Notes {
  std::atomic<std::uint64_t> count;
  std::array<Note, kMostNotes> notes;

  void add(std::uint64_t config, std::uint64_t shape, const std::string& text) {
    const std::uint64_t n = count++;
    if (n >= kMostNotes) return;
    notes[n].config = config, notes[n].shape = shape;
    std::snprintf(notes[n].text, kNote, "%s", text.c_str());
  }
  std::size_t kept() const { return std::min<std::size_t>(count, kMostNotes); }
};

/// What a worker is at.
struct Slot {
  std::atomic<std::uint64_t> config, shape;
  std::atomic<double> since;
  std::atomic<bool> busy;
};

/// Memory that all processes see.
struct Shared {
  std::atomic<std::uint64_t> next, passed, skipped, checked, loose, compilations;
  std::atomic<double> worst;
  Notes failures, skips;
  std::array<Slot, kMostJobs> slots;
};

Shared* make_shared_memory() {
  void* memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return new (memory) Shared{};
}

void count(const Options& options, Shared* shared, const CaseId& id, const Verdict& verdict) {
  shared->checked += verdict.checked;
  shared->loose += verdict.loose;
  for (double worst = shared->worst; verdict.kind == Verdict::Kind::passed && verdict.worst > worst;) {
    if (shared->worst.compare_exchange_weak(worst, verdict.worst)) break;
  }
  switch (verdict.kind) {
    case Verdict::Kind::passed:
      ++shared->passed;
      break;
    case Verdict::Kind::skipped:
      ++shared->skipped;
      shared->skips.add(id.config, id.shape, verdict.message);
      break;
    case Verdict::Kind::failed: {
      shared->failures.add(id.config, id.shape, verdict.message);
      std::fprintf(stderr, "FAILED %s\n  %s\n", replay_line(options, id).c_str(), verdict.message.c_str());
      break;
    }
  }
  if (options.verbose && verdict.kind == Verdict::Kind::passed) {
    std::printf("config %llu shape %llu: %s worst %.3f (%s)\n", static_cast<unsigned long long>(id.config),
                static_cast<unsigned long long>(id.shape), "ok", verdict.worst, verdict.worst_of.c_str());
  }
}

Configuration configuration_of(const Options& options, std::uint64_t config) {
  Configuration result = random_configuration(options.seed, config, options.where, options.size);
  if (options.calls_only) result.config.check_sequences = false;  // a driver without memory has no lengths to read
  return result;
}

Verdict judged(const Options& options, Runner& runner, const Call& call) {
  return options.calls_only ? runner.call_only(call) : runner.run(call);
}

/// The calls of one configuration from `shape` on. False when the device is lost.
bool run_configuration(const Options& options, Shared* shared, Slot* slot, std::uint64_t config, std::uint64_t shape) {
  const auto at = [&](std::uint64_t n) {
    slot->config = config, slot->shape = n;
    slot->since = now();
    slot->busy = true;
  };
  at(shape);
  const Configuration configuration = configuration_of(options, config);
  std::optional<Runner> runner;
  try {
    if (!options.formula_only) runner.emplace(configuration, options.where, options.cache);
  } catch (const Error& error) {
    const bool unsupported = error.code() == ErrorCode::unsupported;
    for (; shape < options.shapes; ++shape) {
      Verdict verdict{unsupported ? Verdict::Kind::skipped : Verdict::Kind::failed,
                      std::string(to_string(error.code())) + ": " + error.what()};
      count(options, shared, {config, shape}, verdict);
    }
    slot->busy = false;
    return true;
  }
  for (; shape < options.shapes; ++shape) {
    at(shape);
    const Call call = random_call(configuration, options.seed, config, shape, options.where, options.size);
    const Verdict verdict = runner ? judged(options, *runner, call) : evaluate_only(configuration, call, options.where);
    count(options, shared, {config, shape}, verdict);
    slot->busy = false;
    if (verdict.context_lost) return false;
  }
  if (runner) shared->compilations += runner->compilations();
  return true;
}

/// Takes configurations until there are no more.
int work(const Options& options, Shared* shared, Slot* slot,
         std::optional<std::pair<std::uint64_t, std::uint64_t>> resume) {
  if (resume && resume->second < options.shapes) {
    if (!run_configuration(options, shared, slot, resume->first, resume->second)) return kLost;
  }
  for (;;) {
    const std::uint64_t n = shared->next++;
    if (n >= options.configs) return 0;
    if (!run_configuration(options, shared, slot, options.first + n * options.step, 0)) return kLost;
  }
}

/// Runs `task` in a child, whose exit status it is.
template <class Task>
pid_t start(const Task& task) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child < 0) throw std::runtime_error(std::string("fork: ") + std::strerror(errno));
  if (child != 0) return child;
  int status = 99;
  try {
    status = task();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "worker: %s\n", error.what());
  }
  std::fflush(nullptr);
  _exit(status);
}

std::string death(int status) {
  if (WIFSIGNALED(status)) return std::string("ended by signal: ") + strsignal(WTERMSIG(status));
  return "ended with status " + std::to_string(WEXITSTATUS(status));
}

/// Workers that are replaced when they end before their time, or take too long.
class Pool {
 public:
  Pool(const Options& options, Shared* shared)
      : options_(options), shared_(shared), workers_(static_cast<std::size_t>(options.jobs)) {}

  void run() {
    for (std::size_t n = 0; n < workers_.size(); ++n) launch(n, std::nullopt);
    double reported = now();
    while (std::ranges::any_of(workers_, [](pid_t worker) { return worker != 0; })) {
      for (std::size_t n = 0; n < workers_.size(); ++n) look_after(n);
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      if (now() - reported < 30) continue;
      reported = now();
      std::fprintf(stderr, "%llu of %llu configurations begun, %llu calls right, %llu failed\n",
                   as_long(std::min<std::uint64_t>(shared_->next, options_.configs)), as_long(options_.configs),
                   as_long(shared_->passed), as_long(shared_->failures.count));
    }
  }

  static unsigned long long as_long(std::uint64_t value) { return value; }

 private:
  void launch(std::size_t n, std::optional<std::pair<std::uint64_t, std::uint64_t>> resume) {
    shared_->slots[n].busy = false;
    workers_[n] = start([&] { return work(options_, shared_, &shared_->slots[n], resume); });
  }

  void look_after(std::size_t n) {
    if (workers_[n] == 0) return;
    Slot& slot = shared_->slots[n];
    int status = 0;
    const bool late = slot.busy && now() - slot.since > options_.limit;
    if (late) kill(workers_[n], SIGKILL);
    if (waitpid(workers_[n], &status, late ? 0 : WNOHANG) == 0) return;
    workers_[n] = 0;
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0 && !late) return;
    const std::pair<std::uint64_t, std::uint64_t> resume{slot.config, slot.shape + 1};
    if (slot.busy) {
      std::ostringstream text;
      if (late)
        text << "no answer within " << options_.limit << " s";
      else
        text << death(status);
      count(options_, shared_, {slot.config, slot.shape}, {Verdict::Kind::failed, text.str()});
    }
    launch(n, resume);
  }

  const Options& options_;
  Shared* shared_;
  std::vector<pid_t> workers_;
};

// ---- smaller failures ----

/// What failures have in common: the error's name, or that a result is wrong.
std::string kind_of(const std::string& message) {
  for (int code = 1; code <= 10; ++code) {
    const std::string name = fa::to_string(static_cast<ErrorCode>(code));
    if (message.starts_with(name + ":")) return name;
  }
  return message.starts_with("no answer") || message.starts_with("ended") ? message.substr(0, 5) : "result";
}

class Shrinker {
 public:
  Shrinker(const Options& options, CaseId id, const std::string& message)
      : options_(options),
        id_(std::move(id)),
        kind_(kind_of(message)),
        message_(message),
        end_(now() + options.shrink_seconds) {
    void* memory = mmap(nullptr, sizeof(Notes), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    notes_ = new (memory) Notes{};
  }
  ~Shrinker() { munmap(notes_, sizeof(Notes)); }
  Shrinker(const Shrinker&) = delete;
  Shrinker& operator=(const Shrinker&) = delete;

  void run() {
    while (now() < end_ && step()) {
    }
  }
  const CaseId& id() const { return id_; }
  const std::string& message() const { return message_; }

 private:
  /// The first of the possible edits with which it still fails, many tried at once.
  bool step() {
    const Case current = make_case(options_, id_);
    const std::vector<std::string> names = edits_for(current.configuration, current.call);
    const auto jobs = static_cast<std::size_t>(std::max(1, options_.jobs));
    for (std::size_t first = 0; first < names.size() && now() < end_; first += jobs) {
      const std::size_t count = std::min(jobs, names.size() - first);
      const std::optional<std::size_t> found = first_failure(names, first, count);
      if (!found) continue;
      id_.edits.push_back(names[*found]);
      return true;
    }
    return false;
  }

  std::optional<std::size_t> first_failure(const std::vector<std::string>& names, std::size_t first,
                                           std::size_t count) {
    std::vector<pid_t> children;
    for (std::size_t n = 0; n < count; ++n) {
      notes_->notes[n % kMostNotes].text[0] = 0;
      children.push_back(start([&, n] {
        CaseId id = id_;
        id.edits.push_back(names[first + n]);
        const Verdict verdict = run_case(options_, id);
        std::snprintf(notes_->notes[n % kMostNotes].text, kNote, "%s", verdict.message.c_str());
        return verdict.kind == Verdict::Kind::failed ? 1 : 0;
      }));
    }
    std::optional<std::size_t> found;
    const double until = now() + options_.limit;
    for (std::size_t n = 0; n < count; ++n) {
      const std::string message = outcome(children[n], until, notes_->notes[n % kMostNotes].text);
      if (found || message.empty() || kind_of(message) != kind_) continue;
      found = first + n;
      message_ = message;
    }
    return found;
  }

  /// The message of a failure, empty for a success.
  std::string outcome(pid_t child, double until, const char* text) const {
    int status = 0;
    bool late = false;
    while (waitpid(child, &status, late ? 0 : WNOHANG) == 0) {
      late = now() > until;
      if (late) kill(child, SIGKILL);
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    if (late) return "no answer";
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return {};
    return WIFEXITED(status) && WEXITSTATUS(status) == 1 ? text : death(status);
  }

  const Options& options_;
  CaseId id_;
  std::string kind_, message_;
  double end_;
  Notes* notes_ = nullptr;
};

void report(const Options& options, Shared* shared, double seconds) {
  const auto as_long = Pool::as_long;
  std::map<std::string, std::pair<int, std::uint64_t>> reasons;
  for (std::size_t n = 0; n < shared->skips.kept(); ++n) {
    auto& [count, config] = reasons[std::string(shared->skips.notes[n].text).substr(0, 160)];
    ++count, config = shared->skips.notes[n].config;
  }
  for (const auto& [reason, what] : reasons)
    std::printf("skipped (config %llu): %s\n", as_long(what.second), reason.c_str());
  const std::size_t failures = shared->failures.kept();
  for (std::size_t n = 0; n < failures && n < static_cast<std::size_t>(options.shrink) && !options.in_process; ++n) {
    const Note& note = shared->failures.notes[n];
    Shrinker shrinker(options, {note.config, note.shape}, note.text);
    shrinker.run();
    std::string what;
    try {
      const Case smaller = make_case(options, shrinker.id());
      what = to_string(smaller.configuration, smaller.call);
    } catch (const std::exception& error) {
      what = error.what();
    }
    std::printf("failure: %s\n  smaller: %s\n  %s\n  %s\n", note.text, replay_line(options, shrinker.id()).c_str(),
                what.c_str(), shrinker.message().c_str());
  }
  std::printf(
      "%llu configurations, %llu calls right, %llu failed, %llu skipped; %llu elements, %.2f %% of them loosely; "
      "greatest error %.2f of its bound; %llu compilations; %.1f s\n",
      as_long(options.configs), as_long(shared->passed), as_long(shared->failures.count), as_long(shared->skipped),
      as_long(shared->checked),
      100 * static_cast<double>(shared->loose) / static_cast<double>(std::max<std::uint64_t>(shared->checked, 1)),
      shared->worst.load(), as_long(shared->compilations), seconds);
}

}  // namespace

Case make_case(const Options& options, const CaseId& id) {
  Case result;
  result.configuration = configuration_of(options, id.config);
  result.call = random_call(result.configuration, options.seed, id.config, id.shape, options.where, options.size);
  for (const std::string& name : id.edits) {
    if (!edit(name, result.configuration, result.call))
      throw std::invalid_argument("edit '" + name + "' is not known, or changes nothing here");
  }
  return result;
}

std::string replay_line(const Options& options, const CaseId& id) {
  std::ostringstream out;
  out << "fa_differential --device " << (options.where == Where::host ? "host" : "cuda");
  if (options.size == Size::small) out << " --small";
  if (options.calls_only) out << " --calls-only";
  out << " --seed " << options.seed << " --case " << id.config << " --shape " << id.shape;
  for (std::size_t i = 0; i < id.edits.size(); ++i) out << (i == 0 ? " --edits " : ",") << id.edits[i];
  return out.str();
}

Verdict run_case(const Options& options, const CaseId& id) {
  const Case one = make_case(options, id);
  try {
    Runner runner(one.configuration, options.where, options.cache);
    return judged(options, runner, one.call);
  } catch (const Error& error) {
    return {error.code() == ErrorCode::unsupported ? Verdict::Kind::skipped : Verdict::Kind::failed,
            std::string(to_string(error.code())) + ": " + error.what()};
  }
}

bool has_gpu() {
  const pid_t child = start([] {
    try {
      return driver::list_devices().empty() ? 1 : 0;
    } catch (const Error& error) {
      std::fprintf(stderr, "skipped: %s\n", error.what());
      return 1;
    }
  });
  int status = 0;
  return waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

std::uint64_t run_all(const Options& options) {
  Shared* const shared = make_shared_memory();
  const double begin = now();
  if (options.in_process) {
    work(options, shared, shared->slots.data(), std::nullopt);
  } else {
    Pool(options, shared).run();
  }
  report(options, shared, now() - begin);
  std::fflush(nullptr);
  const std::uint64_t failures = shared->failures.count;
  munmap(shared, sizeof(Shared));
  return failures;
}

}  // namespace fa::differential
