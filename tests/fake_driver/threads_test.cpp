#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <fa/log.hpp>
#include <filesystem>
#include <functional>
#include <latch>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "fake_driver/launches_test.hpp"

// Threads that share what is meant to be shared. What they see is checked here; that they do not race, ThreadSanitizer
// says, with which the tsan preset builds this.
namespace fa {
namespace {

constexpr int kThreads = 4;

AttentionShape shape_of(std::int64_t s) {
  return {.b = 2, .h_q = 8, .h_kv = 8, .s_q = s, .s_kv = s};
}

/// Runs `work(thread)` on all threads at once.
void at_once(const std::function<void(int)>& work) {
  std::latch start(kThreads);
  std::vector<std::jthread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      start.arrive_and_wait();
      EXPECT_NO_THROW(work(thread)) << "thread " << thread;
    });
  }
}

class Threads : public LaunchesTest {
 protected:
  Threads() { config_.head_dim = 128; }

  void TearDown() override { set_log_callback(nullptr); }

  static TensorView tensor(std::uintptr_t page, std::int64_t s) {
    return {reinterpret_cast<void*>((std::uintptr_t{1} << 40) + (page << 32)), DType::bf16, {2, 8, s, 128}};
  }

  static void forward(const Attention& attention, std::int64_t s) {
    attention.forward({tensor(1, s), tensor(2, s), tensor(3, s)}, {tensor(4, s), {}});
  }

  static void backward(const Attention& attention, std::int64_t s) {
    BackwardInputs given;
    given.q = tensor(1, s);
    given.k = tensor(2, s);
    given.v = tensor(3, s);
    given.o = tensor(4, s);
    given.dout = tensor(5, s);
    given.lse = TensorView(tensor(6, s).data, DType::f32, {2, 8, s});
    attention.backward(given, {tensor(7, s), tensor(8, s), tensor(9, s)});
  }

  int launched(const std::string& kernel) const {
    int count = 0;
    for (const fake_driver::Launch& launch : launches_()) count += launch.kernel == kernel;
    return count;
  }

  /// Counts decisions from now on.
  static void count_decisions(std::atomic<int>& decisions) {
    set_log_level(LogLevel::info);
    set_log_callback(
        [&decisions](LogLevel, std::string_view message) { decisions += message.starts_with("tuned in"); });
  }
};

TEST_F(Threads, ShareAnAttention) {
  const std::vector<std::int64_t> lengths = {64, 300, 512, 1000, 2048};
  constexpr int kCalls = 6;
  const Attention alone = Attention::create(config_);
  for (const std::int64_t s : lengths) {
    forward(alone, s);
    backward(alone, s);
  }
  launches_().clear();

  const Attention shared = Attention::create(config_);
  std::vector<std::vector<std::string>> specs(kThreads);
  at_once([&](int thread) {
    for (int call = 0; call < kCalls; ++call) {
      for (const std::int64_t s : lengths) {
        forward(shared, s);
        backward(shared, s);
      }
    }
    for (const std::int64_t s : lengths) {
      specs[static_cast<std::size_t>(thread)].push_back(shared.kernel_info(shape_of(s)).spec);
      specs[static_cast<std::size_t>(thread)].push_back(shared.backward_kernel_info(shape_of(s)).spec);
    }
  });
  const int calls = kThreads * kCalls * static_cast<int>(lengths.size());
  EXPECT_EQ(launched("fa_sm90_forward"), calls);
  EXPECT_EQ(launched("fa_sm90_backward"), calls);
  for (const auto& of_thread : specs) EXPECT_EQ(of_thread, specs.front());
  EXPECT_EQ(shared.cache_counters().compiles, alone.cache_counters().compiles) << "a kernel was compiled twice";
}

// More shapes than an Attention keeps calls of: threads replace what others use, and each gets its own.
TEST_F(Threads, ReplaceEachOthersKnownCalls) {
  constexpr std::int64_t kShapes = 12;
  constexpr int kRounds = 40;
  const auto digests = [&] {
    std::map<std::uint64_t, int> count;
    for (const fake_driver::Launch& launch : launches_()) {
      if (launch.kernel.ends_with("forward")) ++count[launch.params];
    }
    return count;
  };
  std::map<std::uint64_t, int> expected;
  for (std::int64_t n = 1; n <= kShapes; ++n) {
    launches_().clear();
    forward(Attention::create(config_), 64 * n);
    for (const auto& [digest, count] : digests()) expected[digest] += count * kThreads * kRounds * 2;
  }
  const Attention attention = Attention::create(config_);
  launches_().clear();
  at_once([&](int thread) {
    for (int i = 0; i < kRounds * kShapes; ++i) {
      const std::int64_t n = (i + thread * 5) % kShapes + 1;
      forward(attention, 64 * n);
      forward(attention, 64 * n);
    }
  });
  EXPECT_EQ(digests(), expected);
}

TEST_F(Threads, MakeAttentionsOfOneDirectory) {
  std::uint64_t expected = 0;  // one kernel each, and those that are refused before
  for (const bool causal : {false, true}) {
    config_.causal = causal;
    const Attention alone = Attention::create(config_);
    forward(alone, 512);
    expected += alone.cache_counters().compiles;
  }
  launches_().clear();
  const std::filesystem::path directory =
      std::filesystem::path(testing::TempDir()) / ("fa-threads-" + std::to_string(::getpid()));
  config_.cache.mode = CachePolicy::Mode::disk;
  config_.cache.directory = directory.string();
  const Attention counting = Attention::create(config_);  // what it counts, those of its directory share
  at_once([&](int thread) {
    for (int i = 0; i < 3; ++i) {
      AttentionConfig config = config_;
      config.causal = (thread + i) % 2 == 0;
      const Attention attention = Attention::create(config);
      forward(attention, 512);
    }
  });
  EXPECT_EQ(launched("fa_sm90_forward"), 3 * kThreads);
  EXPECT_EQ(counting.cache_counters().compiles, expected) << "a kernel was compiled twice";
  std::filesystem::remove_all(directory);
}

TEST_F(Threads, ShareADecisionOfTheTuner) {
  config_.tune = TunePolicy::on;
  const std::vector<std::int64_t> lengths = {1500, 3000};  // of different buckets, each worth tuning
  std::atomic<int> decisions = 0;
  count_decisions(decisions);
  const Attention attention = Attention::create(config_);
  at_once([&](int thread) {
    for (int call = 0; call < 4; ++call) {
      forward(attention, lengths[static_cast<std::size_t>(thread + call) % lengths.size()]);
    }
  });
  EXPECT_EQ(decisions, 2);
  for (const std::int64_t s : lengths) EXPECT_EQ(attention.kernel_info(shape_of(s)).chosen_by, "tuner") << s;
}

TEST_F(Threads, CallsGoOnWhileKernelsAreCompiled) {
  config_.compile = CompilePolicy::background;
  config_.head_dim = 128;
  const std::vector<std::int64_t> lengths = {64, 300, 512, 1000, 2048, 4096};
  const Attention attention = Attention::create(config_);
  attention.prepare(shape_of(100));
  at_once([&](int thread) {
    for (std::size_t call = 0; call < 8 * lengths.size(); ++call) {
      const std::int64_t s = lengths[(call + static_cast<std::size_t>(thread)) % lengths.size()];
      forward(attention, s);
      if (thread == 0) attention.prepare_backward_async(shape_of(s));
      attention.is_ready(shape_of(s));
    }
  });
  for (const std::int64_t s : lengths) {
    attention.prepare(shape_of(s));
    EXPECT_TRUE(attention.is_ready(shape_of(s)));
  }
}

// Each finds the record of the first, or decides for itself where it comes at the same time: the kernel is the same.
TEST_F(Threads, AgreeAboutWhatTheyTuneApart) {
  config_.tune = TunePolicy::on;
  config_.causal = true;
  std::atomic<int> decisions = 0;
  count_decisions(decisions);
  std::vector<std::string> specs(kThreads);
  at_once([&](int thread) {
    const Attention attention = Attention::create(config_);
    forward(attention, 1500);
    specs[static_cast<std::size_t>(thread)] = attention.kernel_info(shape_of(1500)).spec;
  });
  EXPECT_GE(decisions, 1);
  EXPECT_LE(decisions, kThreads);
  for (const std::string& spec : specs) EXPECT_EQ(spec, specs.front());
}

}  // namespace
}  // namespace fa
