#include "fuzz/calls.hpp"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <fa/fa.h>

extern "C" {
__attribute__((weak)) void __sanitizer_set_death_callback(void (*callback)(void));

// What the sanitizers' defaults leave out: signals of arithmetic, and aborts, which are how the second one ends here.
__attribute__((visibility("default"))) const char* __asan_default_options() {
  return "handle_abort=1:handle_sigfpe=1:detect_stack_use_after_return=1";
}
__attribute__((visibility("default"))) const char* __ubsan_default_options() {
  return "print_stacktrace=1:abort_on_error=1";
}
}

namespace fa::fuzz {
namespace {

struct Options {
  std::uint64_t calls = 1000000;
  std::uint64_t seed = 1;
  std::uint64_t threads = 1;
  std::optional<std::uint64_t> index;
};

constexpr std::uint64_t kNone = ~std::uint64_t{0};
const char* g_program = "";
std::uint64_t g_seed = 0;
std::atomic<std::uint64_t> g_newest{0};
thread_local std::uint64_t t_case = kNone;  // of the library's own threads

/// Says which case it was, with nothing that a broken process may not do.
void say_where() {
  char text[128];
  const std::uint64_t index = t_case == kNone ? g_newest.load() : t_case;
  const int length = std::snprintf(text, sizeof text, "\nreplay: %s --seed %llu --case %llu\n", g_program,
                                   static_cast<unsigned long long>(g_seed), static_cast<unsigned long long>(index));
  if (write(STDERR_FILENO, text, static_cast<std::size_t>(length)) < 0) _exit(3);
}

void on_signal(int number) {
  say_where();
  signal(number, SIG_DFL);
  raise(number);
}

void watch_for_death() {
  if (__sanitizer_set_death_callback != nullptr) {
    __sanitizer_set_death_callback(say_where);
  } else {
    for (const int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) signal(number, on_signal);
  }
  signal(SIGALRM, on_signal);
}

/// Nothing outside of the process has a say: no GPU, no compiler, no cache but one of our own.
void isolate(const std::filesystem::path& folder) {
  setenv("CUDA_VISIBLE_DEVICES", "", 1);
  setenv("FA_NVRTC_PATH", "/dev/null", 1);
  setenv("FA_NCCL_PATH", "/dev/null", 1);
  setenv("FA_CACHE_DIR", folder.c_str(), 1);
  for (const char* const name : {"FA_TUNE", "FA_LOG", "FA_CACHE_PACKS", "FA_CACHE_COMPILERS", "FA_CACHE_MAX_BYTES",
                                 "FA_CACHE_MAX_ENTRIES", "FA_TEMPLATE_DIR", "FA_KEEP_SOURCE"}) {
    unsetenv(name);
  }
  fa_set_log_level(FA_LOG_ERROR);
}

std::optional<Options> parse(int count, char** arguments) {
  Options options;
  for (int i = 1; i < count; i += 2) {
    const std::string_view name = arguments[i];
    std::uint64_t value = 0;
    const std::string_view text = i + 1 < count ? arguments[i + 1] : "";
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (text.empty() || error != std::errc() || end != text.data() + text.size()) return std::nullopt;
    if (name == "--calls") {
      options.calls = value;
    } else if (name == "--seed") {
      options.seed = value;
    } else if (name == "--threads" && value > 0) {
      options.threads = value;
    } else if (name == "--case") {
      options.index = value;
    } else {
      return std::nullopt;
    }
  }
  return options;
}

/// Cases until there were enough calls.
Tally run(const Options& options, RunCase run_case) {
  Tally all;
  std::mutex mutex;
  std::atomic<std::uint64_t> next{0}, calls{0};
  std::atomic<bool> failed{false};
  const auto work = [&] {
    Tally own;
    while (calls < options.calls && !failed) {
      g_newest = t_case = next++;
      const std::uint64_t before = own.calls;
      try {
        run_case(options.seed, t_case, &own);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        say_where();
        failed = true;
      }
      calls += own.calls - before;
      if (t_case % 16 == 0) alarm(120);  // for a call that does not come back, also where little time is left to us
    }
    const std::scoped_lock lock(mutex);
    all.add(own);
  };
  std::vector<std::thread> threads;
  for (std::uint64_t i = 1; i < options.threads; ++i) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
  if (failed) std::exit(1);
  std::printf("%s%llu calls in %llu cases of seed %llu: nothing found\n", all.text().c_str(),
              static_cast<unsigned long long>(all.calls), static_cast<unsigned long long>(next.load()),
              static_cast<unsigned long long>(options.seed));
  return all;
}

}  // namespace

void Tally::add(const Tally& other) {
  calls += other.calls;
  for (const auto& [function, statuses] : other.outcomes) {
    for (const auto& [status, count] : statuses) outcomes[function][status] += count;
  }
}

std::string Tally::text() const {
  std::string result;
  for (const auto& [function, statuses] : outcomes) {
    result += function + ":";
    for (const auto& [status, count] : statuses) {
      result += std::string(" ") + fa_status_name(status) + " " + std::to_string(count);
    }
    result += "\n";
  }
  return result;
}

std::uint64_t current_case() {
  return t_case;
}

void set_current_case(std::uint64_t index) {
  t_case = index;
}

int main_of(const char* program, RunCase run_case, int count, char** arguments) {
  const std::optional<Options> options = parse(count, arguments);
  if (!options) {
    std::fprintf(stderr, "usage: %s [--calls N] [--seed S] [--threads N] [--case INDEX]\n", program);
    return 2;
  }
  g_program = program;
  g_seed = options->seed;
  watch_for_death();
  std::string folder = (std::filesystem::temp_directory_path() / (std::string(program) + "_XXXXXX")).string();
  if (mkdtemp(folder.data()) == nullptr) return 2;
  isolate(folder);
  int status = 0;
  if (options->index) {
    Tally tally;
    g_newest = t_case = *options->index;
    try {
      run_case(options->seed, t_case, &tally);
      std::printf("%s", tally.text().c_str());
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
      status = 1;
    }
  } else {
    run(*options, run_case);
  }
  std::filesystem::remove_all(folder);
  return status;
}

}  // namespace fa::fuzz
