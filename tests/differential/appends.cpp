#include "differential/appends.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <fa/attention.hpp>

#include "driver/driver.hpp"
#include "support/append_case.hpp"

namespace fa::differential {
namespace {

using test::AppendCase;
using test::AppendData;
using test::kAppendParts;
using Memories = std::array<std::vector<std::byte>, kAppendParts>;

/// Hostile lengths, tables and slots are refused by the host, and written nowhere by a kernel.
AppendCase case_of(const Options& options, std::uint64_t config, std::uint64_t shape) {
  const auto seed = static_cast<std::uint32_t>(options.seed * 1000003 + config);
  AppendCase c = test::random_append_case(seed, options.where == Where::cuda && config % 4 == 3);
  if (options.where == Where::host && config % 5 == 4) {
    c.dtype = DType::f64;
    c.k_dtype = c.v_dtype = std::nullopt;
    c.group_size = 0;
    c.scales_given = c.latent = false;
    if (c.table) c.table = DType::f64;
  }
  test::draw_requests(c, static_cast<std::uint32_t>(seed * 1009u + shape + 17));
  return c;
}

/// A piece of memory on a device between guards.
class Guarded {
 public:
  Guarded(Where where, const std::vector<std::byte>& bytes) : image_(2 * guard() + bytes.size(), std::byte{0xff}) {
    std::copy(bytes.begin(), bytes.end(), image_.begin() + static_cast<std::ptrdiff_t>(guard()));
    memory_ = std::make_unique<Memory>(where, image_);
  }
  void* data() const { return memory_->data() + guard(); }

  /// Without the guards; nothing where these have changed.
  std::vector<std::byte> read() const {
    const std::vector<std::byte> now = memory_->read();
    const auto size = static_cast<std::ptrdiff_t>(guard());
    const bool intact = std::equal(now.begin(), now.begin() + size, image_.begin()) &&
                        std::equal(now.end() - size, now.end(), image_.end() - size);
    return intact ? std::vector<std::byte>(now.begin() + size, now.end() - size) : std::vector<std::byte>();
  }

 private:
  std::vector<std::byte> image_;
  std::unique_ptr<Memory> memory_;
};

AttentionConfig config_of(const AppendCase& c, const std::string& cache) {
  AttentionConfig config = c.config();
  config.tune = TunePolicy::off;
  if (!cache.empty()) config.cache.directory = cache;
  return config;
}

/// What is wrong; empty: nothing. `change` makes a mistake in the call, `damage` in its result.
std::string run_one(const Attention& attention, Where where, const AppendCase& c, bool judge,
                    const std::function<void(AppendInputs&)>& change = nullptr,
                    const std::function<void(AppendData&, Memories&)>& damage = nullptr) {
  AppendData data(c);
  std::array<std::unique_ptr<Guarded>, kAppendParts> memory;
  std::array<void*, kAppendParts> at{};
  for (std::size_t i = 0; i < kAppendParts; ++i) {
    if (data.buffers()[i].bytes.empty()) continue;
    memory[i] = std::make_unique<Guarded>(where, data.buffers()[i].bytes);
    at[i] = memory[i]->data();
  }
  AppendInputs inputs = data.inputs(at);
  if (change) change(inputs);
  attention.append(inputs);
  if (where == Where::cuda) driver::check(driver::api().cuCtxSynchronize(), "cuCtxSynchronize");
  if (!judge) return {};
  Memories after;
  for (std::size_t i = 0; i < kAppendParts; ++i) {
    if (memory[i] == nullptr) continue;
    after[i] = memory[i]->read();
    if (after[i].empty()) return std::string("written beside ") + data.buffers()[i].name;
  }
  if (damage) damage(data, after);
  return data.judge(after);
}

/// As run_one, of a library that refuses or fails.
std::string verdict_of(const Attention& attention, const Options& options, const AppendCase& c, bool* lost) {
  try {
    return run_one(attention, options.where, c, !options.calls_only);
  } catch (const Error& error) {
    *lost = error.code() == ErrorCode::cuda;
    return std::string(fa::to_string(error.code())) + ": " + error.what();
  }
}

Device device_of(Where where) {
  return where == Where::host ? Device::host() : Device::cuda(0);
}

std::string replay_text(const Options& options, std::uint64_t config, std::uint64_t shape) {
  return std::string("fa_differential --appends --device ") + (options.where == Where::host ? "host" : "cuda") +
         " --seed " + std::to_string(options.seed) + " --case " + std::to_string(config) + " --shape " +
         std::to_string(shape);
}

/// The device's context, current in this thread as long as it is in scope.
class InContext {
 public:
  explicit InContext(Where where) {
    if (where == Where::host) return;
    context_ = std::make_unique<driver::ContextRef>(driver::ContextRef::acquire(Device::cuda(0)));
    driver::check(driver::api().cuCtxSetCurrent(context_->context()), "cuCtxSetCurrent");
  }

 private:
  std::unique_ptr<driver::ContextRef> context_;
};

/// What threads share.
struct Progress {
  std::atomic<std::uint64_t> next = 0, calls = 0, failures = 0;
  std::atomic<bool> lost = false;
  std::mutex printing;
};

void run_config(const Options& options, std::uint64_t config, Progress* progress) {
  const Attention attention =
      Attention::create(config_of(case_of(options, config, 0), options.cache), device_of(options.where));
  for (std::uint64_t shape = 0; shape < options.shapes && !progress->lost; ++shape) {
    const AppendCase c = case_of(options, config, shape);
    bool lost = false;
    const std::string problem = verdict_of(attention, options, c, &lost);
    ++progress->calls;
    if (lost) progress->lost = true;
    if (problem.empty()) continue;
    ++progress->failures;
    const std::lock_guard lock(progress->printing);
    std::printf("FAILED %s\n  %s\n  %s\n", problem.c_str(), to_string(c).c_str(),
                replay_text(options, config, shape).c_str());
    std::fflush(stdout);
  }
}

void work(const Options& options, Progress* progress) {
  const InContext context(options.where);
  while (!progress->lost) {
    const std::uint64_t n = progress->next++;
    if (n >= options.configs) return;
    const std::uint64_t config = options.first + n * options.step;
    try {
      run_config(options, config, progress);
    } catch (const Error& error) {  // of Attention::create
      ++progress->failures;
      const std::lock_guard lock(progress->printing);
      std::printf("FAILED %s\n  %s\n", error.what(), replay_text(options, config, 0).c_str());
    }
  }
}

// ---- the self-test ----

constexpr std::uint64_t kConfigs = 150;
constexpr int kEnough = 3;

struct AppendMistake {
  const char* name;
  std::function<bool(const AppendCase&)> applies;
  std::function<void(AppendInputs&)> change;
};

std::vector<AppendMistake> mistakes() {
  const auto rotary = [](const AppendCase& c) { return c.rotary_dims > 2; };
  const auto by_base = [](const AppendCase& c) { return c.rotary_dims > 2 && !c.table && c.base != 1; };
  const auto by_numbers = [](const AppendCase& c) { return c.positions != test::RowNumbers::none; };
  const auto always = [](const AppendCase&) { return true; };
  return {
      {"pairs of another kind", rotary, [](AppendInputs& in) { in.rotary.interleaved = !in.rotary.interleaved; }},
      {"another base", by_base, [](AppendInputs& in) { in.rotary.base *= 1.25; }},
      {"no rotary embedding", rotary, [](AppendInputs& in) { in.rotary = {}, in.q = in.q_out = {}; }},
      {"positions of the cache, not those given", by_numbers,
       [](AppendInputs& in) { in.rotary.positions = nullptr, in.rotary.positions_64 = nullptr; }},
      {"heads backwards", [](const AppendCase& c) { return c.h_kv > 1; },
       [](AppendInputs& in) {
         constexpr std::size_t axis = 1;  // packed or not
         in.k.data = static_cast<std::byte*>(in.k.data) +
                     (in.k.shape[axis] - 1) * in.k.strides[axis] * static_cast<std::int64_t>(size_of(in.k.dtype));
         in.k.strides[axis] *= -1;
       }},
      {"keys for values", [](const AppendCase& c) { return c.d_qk == c.d_v; },
       [](AppendInputs& in) { std::swap(in.k_cache, in.v_cache); }},
      {"slots ignored", [](const AppendCase& c) { return c.slots != test::RowNumbers::none; },
       [](AppendInputs& in) { in.slots = nullptr, in.slots_64 = nullptr; }},
      {"nothing written", always, nullptr},
  };
}

Options self_test_options() {
  Options options;
  options.seed = 4711;
  return options;
}

int times_caught(const AppendMistake& mistake) {
  int caught = 0;
  for (std::uint64_t config = 0; config < kConfigs && caught < kEnough; ++config) {
    const AppendCase c = case_of(self_test_options(), config, 0);
    if (!mistake.applies(c) || c.new_rows() == 0) continue;
    const Attention attention = Attention::create(config_of(c, {}), Device::host());
    const auto unwritten = [](AppendData& data, Memories& after) {
      for (std::size_t i = 0; i < kAppendParts; ++i) after[i] = data.buffers()[i].bytes;
    };
    try {
      const std::string problem = mistake.change ? run_one(attention, Where::host, c, true, mistake.change)
                                                 : run_one(attention, Where::host, c, true, nullptr, unwritten);
      caught += problem.empty() ? 0 : 1;
    } catch (const Error&) {  // the host refuses it: no proof of the judge
    }
  }
  if (caught < kEnough) std::printf("append, %s: caught %d times only\n", mistake.name, caught);
  return caught;
}

/// Changes a bit of weight in one byte of what is written.
void flip(AppendData& data, Memories& after, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::size_t> written;
  for (std::size_t i = 0; i < kAppendParts; ++i) {
    if (data.buffers()[i].written && !after[i].empty()) written.push_back(i);
  }
  std::vector<std::byte>& bytes = after[written[random() % written.size()]];
  bytes[random() % bytes.size()] ^= std::byte{0x40};
}

/// A flipped bit of a low byte may be within rounding.
bool flips_are_found() {
  int found = 0, calls = 0;
  for (std::uint64_t config = 0; config < kConfigs; ++config, ++calls) {
    const AppendCase c = case_of(self_test_options(), config, 0);
    const Attention attention = Attention::create(config_of(c, {}), Device::host());
    if (!run_one(attention, Where::host, c, true).empty()) return false;
    found += run_one(
                 attention, Where::host, c, true, nullptr,
                 [&](AppendData& data, Memories& after) {
                   flip(data, after, config);
                 }).empty()
                 ? 0
                 : 1;
  }
  std::printf("self-test of appends: %d of %d flipped bits found\n", found, calls);
  return found > calls * 9 / 10;
}

}  // namespace

std::uint64_t run_appends(const Options& options) {
  Progress progress;
  std::vector<std::thread> threads;
  for (int i = 0; i < std::max(options.jobs, 1); ++i) threads.emplace_back([&] { work(options, &progress); });
  for (std::thread& thread : threads) thread.join();
  std::printf("%llu appends of %llu configurations, %llu failed%s\n", static_cast<unsigned long long>(progress.calls),
              static_cast<unsigned long long>(options.configs), static_cast<unsigned long long>(progress.failures),
              progress.lost ? "; the device was lost" : "");
  return progress.failures;
}

int replay_append(const Options& options, const CaseId& id) {
  const InContext context(options.where);
  const AppendCase c = case_of(options, id.config, id.shape);
  std::printf("%s\n", to_string(c).c_str());
  std::fflush(stdout);
  const Attention attention = Attention::create(config_of(c, options.cache), device_of(options.where));
  bool lost = false;
  const std::string problem = verdict_of(attention, options, c, &lost);
  std::printf("%s\n", problem.empty() ? "right" : ("FAILED " + problem).c_str());
  return problem.empty() ? 0 : 1;
}

int self_test_appends() {
  int missed = flips_are_found() ? 0 : 1;
  for (const AppendMistake& mistake : mistakes()) missed += times_caught(mistake) < kEnough ? 1 : 0;
  return missed;
}

}  // namespace fa::differential
