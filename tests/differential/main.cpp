// Random configurations and calls, on the host or a GPU, against a formula of the tester's own in float64.

#include <stdlib.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>

#include "differential/appends.hpp"
#include "differential/pool.hpp"
#include "differential/self_test.hpp"

namespace fa::differential {
namespace {

constexpr const char* kUsage =
    "usage: fa_differential [--device host|cuda] [--configs N] [--shapes N] [--seed S] [--jobs N] [--small]\n"
    "                       [--case K [--shape N] [--edits a,b,c]]   one call, in this process\n"
    "                       [--limit SECONDS] [--shrink N] [--shrink-seconds S] [--cache DIRECTORY] [--verbose]\n"
    "                       [--in-process] [--first K] [--step N] [--no-guards]   for memory checkers\n"
    "                       [--formula-only]   runs nothing: what the formula takes\n"
    "                       [--calls-only]   judges no results: what the library refuses\n"
    "                       [--appends]     appends to KV caches, instead\n"
    "                       [--list]        prints the calls instead of running them\n"
    "                       [--self-test]   sees that wrong results are found\n";
constexpr int kSkipped = 77;

struct Command {
  Options options;
  CaseId one;
  bool replay = false, self_test = false, list = false, any_shape = true, appends = false;
};

std::uint64_t number(const std::string& option, const std::string& text) {
  std::size_t end = 0;
  const std::uint64_t value = text.empty() || text[0] == '-'
                                  ? throw std::invalid_argument(option + ": a number, not '" + text + "'")
                                  : std::stoull(text, &end);
  if (end != text.size()) throw std::invalid_argument(option + ": a number, not '" + text + "'");
  return value;
}

void set_device(const std::string& value, Options* options) {
  if (value != "host" && value != "cuda") throw std::invalid_argument("--device: host or cuda, not '" + value + "'");
  options->where = value == "host" ? Where::host : Where::cuda;
}

Command parse(int argc, char** argv) {
  Command command;
  Options& o = command.options;
  o.jobs = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  for (int i = 1; i < argc; ++i) {
    const std::string option = argv[i];
    const auto value = [&]() -> std::string {
      if (i + 1 >= argc) throw std::invalid_argument(option + " takes a value");
      return argv[++i];
    };
    if (option == "--device")
      set_device(value(), &o);
    else if (option == "--configs")
      o.configs = number(option, value());
    else if (option == "--shapes")
      o.shapes = number(option, value());
    else if (option == "--seed")
      o.seed = number(option, value());
    else if (option == "--jobs")
      o.jobs = static_cast<int>(std::clamp<std::uint64_t>(number(option, value()), 1, 64));
    else if (option == "--limit")
      o.limit = static_cast<double>(number(option, value()));
    else if (option == "--shrink")
      o.shrink = static_cast<int>(number(option, value()));
    else if (option == "--shrink-seconds")
      o.shrink_seconds = static_cast<double>(number(option, value()));
    else if (option == "--cache")
      o.cache = value();
    else if (option == "--first")
      o.first = number(option, value());
    else if (option == "--step")
      o.step = number(option, value());
    else if (option == "--case")
      command.one.config = number(option, value()), command.replay = true;
    else if (option == "--shape")
      command.one.shape = number(option, value()), command.any_shape = false;
    else if (option == "--edits") {
      std::istringstream edits(value());
      for (std::string name; std::getline(edits, name, ',');) command.one.edits.push_back(name);
    } else if (option == "--small")
      o.size = Size::small;
    else if (option == "--formula-only")
      o.formula_only = true;
    else if (option == "--calls-only")
      o.calls_only = true;
    else if (option == "--verbose")
      o.verbose = true;
    else if (option == "--in-process")
      o.in_process = true;
    else if (option == "--no-guards")
      set_guard(0);
    else if (option == "--appends")
      command.appends = true;
    else if (option == "--list")
      command.list = true;
    else if (option == "--self-test")
      command.self_test = true;
    else
      throw std::invalid_argument("unknown option " + option);
  }
  return command;
}

int replay(const Command& command) {
  int status = 0;
  for (std::uint64_t shape = 0; shape < command.options.shapes; ++shape) {
    if (!command.any_shape && shape != command.one.shape) continue;
    CaseId id = command.one;
    id.shape = shape;
    const Case one = make_case(command.options, id);
    std::printf("%s\n", to_string(one.configuration, one.call).c_str());
    std::fflush(nullptr);
    const Verdict verdict = run_case(command.options, id);
    const char* kind = verdict.kind == Verdict::Kind::passed   ? "right"
                       : verdict.kind == Verdict::Kind::failed ? "FAILED"
                                                               : "skipped";
    std::printf("shape %llu: %s %s (greatest error %.3f of its bound, of %s; %llu elements, %llu loosely)\n",
                static_cast<unsigned long long>(shape), kind, verdict.message.c_str(), verdict.worst,
                verdict.worst_of.c_str(), static_cast<unsigned long long>(verdict.checked),
                static_cast<unsigned long long>(verdict.loose));
    if (verdict.kind == Verdict::Kind::failed) status = 1;
    if (verdict.context_lost) break;
  }
  return status;
}

int list(const Command& command) {
  for (std::uint64_t n = 0; n < command.options.configs; ++n) {
    for (std::uint64_t shape = 0; shape < command.options.shapes; ++shape) {
      const std::uint64_t config = command.options.first + n * command.options.step;
      const Case one = make_case(command.options, {config, shape});
      std::printf("%llu.%llu %s\n", static_cast<unsigned long long>(config), static_cast<unsigned long long>(shape),
                  to_string(one.configuration, one.call).c_str());
    }
  }
  return 0;
}

/// A directory for the kernels of a run.
class Scratch {
 public:
  Scratch() {
    std::string name = (std::filesystem::temp_directory_path() / "fa_differential_XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("no temporary directory");
    path_ = name;
  }
  ~Scratch() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

int run(int argc, char** argv) {
  Command command = parse(argc, argv);
  if (command.appends && (command.list || command.options.formula_only || !command.one.edits.empty())) {
    throw std::invalid_argument("--appends: without --list, --formula-only and --edits");
  }
  if (command.list) return list(command);
  if (command.self_test) return (command.appends ? self_test_appends() : self_test()) == 0 ? 0 : 1;
  std::optional<Scratch> scratch;
  if (command.options.cache.empty() && command.options.where == Where::cuda)
    command.options.cache = scratch.emplace().path();
  if (command.options.where == Where::cuda && !command.options.formula_only && !has_gpu()) return kSkipped;
  if (command.appends && command.replay) return replay_append(command.options, command.one);
  if (command.appends) return run_appends(command.options) == 0 ? 0 : 1;
  if (command.replay) return replay(command);
  return run_all(command.options) == 0 ? 0 : 1;
}

}  // namespace
}  // namespace fa::differential

int main(int argc, char** argv) {
  try {
    return fa::differential::run(argc, argv);
  } catch (const std::invalid_argument& error) {
    std::fprintf(stderr, "%s\n%s", error.what(), fa::differential::kUsage);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
  }
  return 2;
}
