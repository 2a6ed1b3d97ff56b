// CompilePolicy::background, and preparing beside calls.

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <future>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fake_driver/launches_test.hpp"

namespace fa {
namespace {

using std::chrono::seconds;

/// Compilations, all or those of specs with a word, that wait at their start while it is closed; and which threads they
/// are on.
class Gate {
 public:
  void close(std::string word = "") {
    word_ = std::move(word);
    set(false);
  }
  void open() { set(true); }

  void pass(const std::string& spec) {
    std::unique_lock lock(mutex_);
    threads_.push_back(std::this_thread::get_id());
    changed_.notify_all();
    EXPECT_TRUE(changed_.wait_for(lock, seconds(30), [&] { return open_ || spec.find(word_) == std::string::npos; }));
  }

  /// Waits for the start of compilation number `count`.
  void expect_started(std::size_t count) {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(changed_.wait_for(lock, seconds(30), [&] { return threads_.size() >= count; }));
  }

  std::vector<std::thread::id> threads() {
    const std::scoped_lock lock(mutex_);
    return threads_;
  }

 private:
  void set(bool open) {
    const std::scoped_lock lock(mutex_);
    open_ = open;
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = true;
  std::string word_;
  std::vector<std::thread::id> threads_;
};

class Background : public LaunchesTest {
 protected:
  void SetUp() override {
    LaunchesTest::SetUp();
    const testing::TestInfo& test = *testing::UnitTest::GetInstance()->current_test_info();
    folder_ = std::filesystem::temp_directory_path() /
              ("fa_background_" + std::to_string(getpid()) + "_" + std::string(test.name()));
    std::filesystem::create_directories(folder_);
    std::filesystem::permissions(folder_, std::filesystem::perms::owner_all);
    config_.cache.mode = CachePolicy::Mode::disk;
    config_.cache.directory = folder_.string();
    config_.head_dim = 128;
    config_.compile = CompilePolicy::background;
    setenv("FA_FAKE_NVRTC_SPILLS", "0", 1);  // first choices alone are compiled
    config_.on_compile = [this](const CompileEvent& event) {
      if (event.phase == CompileEvent::Phase::started) gate_.pass(event.spec);
    };
  }

  void TearDown() override {
    unsetenv("FA_FAKE_NVRTC_SPILLS");
    std::filesystem::remove_all(folder_);
  }

  static AttentionShape shape_of(std::int64_t s_q, std::int64_t s_kv) {
    return {.b = 1, .h_q = 4, .h_kv = 4, .s_q = s_q, .s_kv = s_kv};
  }

  static TensorView tensor(std::uintptr_t page, std::int64_t s) {
    return {reinterpret_cast<void*>((std::uintptr_t{1} << 40) + (page << 32)), DType::bf16, {1, 4, s, 128}};
  }

  /// The attention kernel that a call launches.
  fake_driver::Launch forward(const Attention& attention, std::int64_t s_q, std::int64_t s_kv,
                              Workspace workspace = {}) {
    launches_().clear();
    attention.forward({tensor(1, s_q), tensor(2, s_kv), tensor(3, s_kv)}, {tensor(4, s_q), {}}, nullptr, workspace);
    for (const fake_driver::Launch& launch : launches_()) {
      if (launch.kernel == "fa_sm90_forward" || launch.kernel == "fa_sm80_forward") return launch;
    }
    ADD_FAILURE() << "no attention kernel was launched";
    return {};
  }

  static void expect_ready(const Attention& attention, const AttentionShape& shape) {
    const auto end = std::chrono::steady_clock::now() + seconds(30);
    while (!attention.is_ready(shape) && std::chrono::steady_clock::now() < end) std::this_thread::yield();
    EXPECT_TRUE(attention.is_ready(shape));
  }

  std::filesystem::path folder_;
  Gate gate_;
};

TEST_F(Background, AKernelOfOtherShapesServesUntilThePlannedOneIsThere) {
  const Attention attention = Attention::create(config_);
  attention.prepare(shape_of(300, 300));
  const fake_driver::Launch small = forward(attention, 300, 300);
  const std::size_t before = gate_.threads().size();
  gate_.close();
  EXPECT_FALSE(attention.is_ready(shape_of(16384, 16384)));
  const fake_driver::Launch served = forward(attention, 16384, 16384);
  EXPECT_EQ(served.threads, small.threads);
  EXPECT_EQ(served.shared_bytes, small.shared_bytes);
  EXPECT_FALSE(attention.is_ready(shape_of(16384, 16384)));
  gate_.expect_started(before + 1);
  EXPECT_NE(gate_.threads().back(), std::this_thread::get_id());
  EXPECT_EQ(forward(attention, 16384, 16384).shared_bytes, small.shared_bytes);
  gate_.open();
  expect_ready(attention, shape_of(16384, 16384));
  const fake_driver::Launch planned = forward(attention, 16384, 16384);
  EXPECT_NE(planned.threads, small.threads);
  EXPECT_EQ(attention.kernel_info(shape_of(16384, 16384)).chosen_by, "planner");
  EXPECT_EQ(forward(attention, 300, 300).threads, small.threads);
}

/// A graph has the function that its call was captured with, whatever serves later calls.
TEST_F(Background, ACapturedStandInStaysLoaded) {
  const auto driver = support::DynamicLibrary::open("libcuda.so.1", nullptr);
  std::atomic<bool>& capturing = driver.function<fake_driver::Capturing>(fake_driver::kCapturing)();
  const auto is_loaded = driver.function<fake_driver::IsLoaded>(fake_driver::kIsLoaded);
  fake_driver::Launch captured;
  {
    const Attention attention = Attention::create(config_);
    attention.prepare(shape_of(300, 300));
    gate_.close();
    capturing = true;
    captured = forward(attention, 16384, 16384);
    capturing = false;
    EXPECT_EQ(attention.kernel_info(shape_of(300, 300)).shared_bytes, static_cast<int>(captured.shared_bytes));
    EXPECT_FALSE(attention.is_ready(shape_of(16384, 16384)));
    ASSERT_TRUE(is_loaded(captured.library));
    gate_.open();
    expect_ready(attention, shape_of(16384, 16384));
    const fake_driver::Launch planned = forward(attention, 16384, 16384);
    EXPECT_NE(planned.library, captured.library);
    EXPECT_TRUE(is_loaded(planned.library));
    EXPECT_TRUE(is_loaded(captured.library));
    // While others are captured, the planned kernel is what they get.
    capturing = true;
    EXPECT_EQ(forward(attention, 16384, 16384).library, planned.library);
    capturing = false;
  }
  EXPECT_TRUE(is_loaded(captured.library)) << "a graph may outlive the Attention";
}

TEST_F(Background, WhatIsStoredOfAnyFamilyServes) {
  {
    AttentionConfig generic = config_;
    generic.kernel = KernelOverride{.kernel = "sm80", .text = "splits=1"};
    Attention::create(generic).prepare(shape_of(4096, 4096));
  }
  gate_.close();
  const Attention attention = Attention::create(config_);
  EXPECT_EQ(forward(attention, 4096, 4096).kernel, "fa_sm80_forward");
  gate_.open();
  expect_ready(attention, shape_of(4096, 4096));
  EXPECT_EQ(forward(attention, 4096, 4096).kernel, "fa_sm90_forward");
}

TEST_F(Background, WhereNothingServesACallWaits) {
  const Attention attention = Attention::create(config_);
  forward(attention, 4096, 4096);
  ASSERT_FALSE(gate_.threads().empty());
  EXPECT_EQ(gate_.threads().front(), std::this_thread::get_id());
  EXPECT_TRUE(attention.is_ready(shape_of(4096, 4096)));
}

TEST_F(Background, ACallWithAnOverrideHasNoOther) {
  const Attention attention = Attention::create(config_);
  attention.prepare(shape_of(300, 300));
  config_.kernel = KernelOverride{.kernel = "sm90", .text = "tile_m=128 tile_n=64"};
  const Attention fixed = Attention::create(config_);
  forward(fixed, 4096, 4096);
  EXPECT_TRUE(fixed.is_ready(shape_of(4096, 4096)));
}

TEST_F(Background, PrepareWaitsForThePlannedKernel) {
  const Attention attention = Attention::create(config_);
  attention.prepare(shape_of(300, 300));
  gate_.close();
  const std::size_t before = gate_.threads().size();
  forward(attention, 4096, 4096);
  gate_.expect_started(before + 1);
  std::jthread opens([this] { gate_.open(); });
  attention.prepare(shape_of(4096, 4096));
  EXPECT_TRUE(attention.is_ready(shape_of(4096, 4096)));
}

TEST_F(Background, StandInsTakeNoMoreScratchThanIsSaid) {
  const Attention attention = Attention::create(config_);
  attention.prepare(shape_of(300, 300));
  attention.prepare(shape_of(1, 4096));
  gate_.close("backward");  // behind which all others of that thread wait
  const std::size_t before = gate_.threads().size();
  attention.prepare_backward_async(shape_of(300, 300));
  gate_.expect_started(before + 1);
  for (const auto& [s_q, s_kv] : {std::pair{1, 8192}, std::pair{64, 20000}, std::pair{4096, 4096}, std::pair{7, 7},
                                  std::pair{100, 30000}, std::pair{16384, 64}, std::pair{5000, 9000}}) {
    const std::size_t size = attention.workspace_size(shape_of(s_q, s_kv));
    void* const memory = reinterpret_cast<void*>(std::uintptr_t{1} << 50);
    EXPECT_NO_THROW(forward(attention, s_q, s_kv, {memory, size})) << s_q << ' ' << s_kv;
  }
  gate_.open();
}

TEST_F(Background, ABoundedCallWaits) {
  {
    AttentionConfig generic = config_;
    generic.kernel = KernelOverride{.kernel = "sm80", .text = "splits=1"};
    Attention::create(generic).prepare(shape_of(4096, 4096));
  }
  const Attention attention = Attention::create(config_);
  ForwardInputs in{tensor(1, 4096), tensor(2, 4096), tensor(3, 4096)};
  in.max_multiprocessors = 20;
  launches_().clear();
  attention.forward(in, {tensor(4, 4096), {}});
  ASSERT_FALSE(launches_().empty());
  EXPECT_EQ(launches_().back().kernel, "fa_sm90_forward");
}

TEST_F(Background, BackwardHasStandInsToo) {
  const Attention attention = Attention::create(config_);
  attention.prepare_backward(shape_of(100, 100));
  gate_.close();
  BackwardInputs in;
  in.q = tensor(1, 5000);
  in.k = tensor(2, 5000);
  in.v = tensor(3, 5000);
  in.o = tensor(4, 5000);
  in.dout = tensor(5, 5000);
  in.lse = TensorView(tensor(6, 1).data, DType::f32, {1, 4, 5000});
  launches_().clear();
  attention.backward(in, {tensor(7, 5000), tensor(8, 5000), tensor(9, 5000)});
  EXPECT_FALSE(launches_().empty());
  gate_.open();
  attention.prepare_backward(shape_of(5000, 5000));
  EXPECT_TRUE(attention.backward_is_ready(shape_of(5000, 5000)));
}

TEST_F(Background, PreparingGoesOnBesideCalls) {
  config_.compile = CompilePolicy::allow;
  const Attention attention = Attention::create(config_);
  gate_.close();
  const std::shared_future<void> ready = attention.prepare_async(shape_of(300, 300));
  gate_.expect_started(1);
  EXPECT_NE(gate_.threads().front(), std::this_thread::get_id());
  EXPECT_FALSE(attention.is_ready(shape_of(300, 300)));
  gate_.open();
  ready.get();
  EXPECT_TRUE(attention.is_ready(shape_of(300, 300)));
  const std::size_t before = gate_.threads().size();
  forward(attention, 300, 300);
  EXPECT_EQ(gate_.threads().size(), before);
  attention.prepare_backward_async(shape_of(300, 300)).get();
  EXPECT_TRUE(attention.backward_is_ready(shape_of(300, 300)));
  EXPECT_THROW(attention.prepare_async(shape_of(-1, 300)), Error);
  EXPECT_THROW(static_cast<void>(attention.is_ready(shape_of(-1, 300))), Error);
}

TEST_F(Background, WhatGoesWrongIsInTheFuture) {
  config_.on_compile = [](const CompileEvent& event) {
    if (event.phase == CompileEvent::Phase::started) throw std::runtime_error("not now");
  };
  const Attention attention = Attention::create(config_);
  const std::shared_future<void> ready = attention.prepare_async(shape_of(300, 300));
  EXPECT_THROW(ready.get(), std::runtime_error);
  EXPECT_FALSE(attention.is_ready(shape_of(300, 300)));
}

TEST_F(Background, TheEndOfAnAttentionWaitsForWhatHasBegunAndDropsTheRest) {
  std::optional<Attention> attention(Attention::create(config_));
  gate_.close();
  const std::shared_future<void> first = attention->prepare_async(shape_of(300, 300));
  gate_.expect_started(1);
  const std::shared_future<void> second = attention->prepare_backward_async(shape_of(300, 300));
  std::jthread opens([this] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    gate_.open();
  });
  attention.reset();
  EXPECT_NO_THROW(first.get());
  EXPECT_THROW(second.get(), std::future_error);
}

TEST_F(Background, IsRefusedWhereBitsMayNotChange) {
  for (const auto& change : {+[](AttentionConfig& config) { config.deterministic = true; },
                             +[](AttentionConfig& config) { config.invariance = Invariance::rows; }}) {
    AttentionConfig config = config_;
    change(config);
    try {
      Attention::create(config);
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      EXPECT_NE(std::string(error.what()).find("compile"), std::string::npos) << error.what();
    }
  }
}

TEST_F(Background, TheKernelOfAScheduleIsWaitedFor) {
  config_.page_size = 16;
  const Attention attention = Attention::create(config_);
  const AttentionShape limits{.b = 64, .h_q = 32, .h_kv = 8, .s_q = 1, .s_kv = 8192};
  attention.prepare({.b = 64, .h_q = 32, .h_kv = 8, .s_q = 16, .s_kv = 16});
  void* const memory = reinterpret_cast<void*>(std::uintptr_t{1} << 50);
  const Schedule schedule{memory, attention.schedule_size(limits)};
  ASSERT_GT(schedule.size, 0U);
  const std::size_t before = gate_.threads().size();
  ScheduleInputs in;
  in.limits = limits;
  in.sequences.seqused_kv = reinterpret_cast<const std::int32_t*>(std::uintptr_t{1} << 49);
  attention.schedule(in, schedule);
  const std::vector<std::thread::id> threads = gate_.threads();
  ASSERT_GT(threads.size(), before);
  EXPECT_EQ(threads[before], std::this_thread::get_id());
}

}  // namespace
}  // namespace fa
