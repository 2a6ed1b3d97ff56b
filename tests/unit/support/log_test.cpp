#include "support/log.hpp"

#include <gtest/gtest.h>
#include <spdlog/spdlog.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/posix_names.hpp"

namespace fa {
namespace {

/// Collects what the library logs, and restores the defaults.
class LogTest : public testing::Test {
 protected:
  void SetUp() override {
    set_log_level(LogLevel::info);
    set_log_callback([this](LogLevel level, std::string_view message) {
      levels_.push_back(level);
      messages_.emplace_back(message);
    });
  }
  void TearDown() override {
    set_log_callback({});
    set_log_level(LogLevel::warning);
  }

  std::vector<LogLevel> levels_;
  std::vector<std::string> messages_;
};

TEST_F(LogTest, CallbackGetsLevelAndBareMessage) {
  support::log(LogLevel::error, "lost {}");
  support::logf(LogLevel::info, "{} of {}", 1, 2);
  EXPECT_EQ(messages_, (std::vector<std::string>{"lost {}", "1 of 2"}));
  EXPECT_EQ(levels_, (std::vector<LogLevel>{LogLevel::error, LogLevel::info}));
}

TEST_F(LogTest, LevelDropsWhatIsBelow) {
  set_log_level(LogLevel::error);
  EXPECT_FALSE(support::log_enabled(LogLevel::warning));
  EXPECT_TRUE(support::log_enabled(LogLevel::error));
  support::log(LogLevel::warning, "no");
  set_log_level(LogLevel::off);
  EXPECT_FALSE(support::log_enabled(LogLevel::off));
  support::log(LogLevel::error, "no");
  EXPECT_TRUE(messages_.empty());
}

#if !defined(_WIN32)
/// Whatever other threads were doing when it was made: their locks are the child's, and they are not.
TEST_F(LogTest, AChildOfForkLogsWhileItsParentsThreadsDo) {
  set_log_callback([](LogLevel, std::string_view) { std::this_thread::yield(); });
  std::atomic<bool> done{false};
  std::vector<std::jthread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      while (!done) support::log(LogLevel::error, "on and on");
    });
  }
  for (int i = 0; i < 50; ++i) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      alarm(20);  // ends a child that hangs
      support::log(LogLevel::error, "from the child");
      _exit(0);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status)) << "child " << i << " was ended by signal " << WTERMSIG(status);
    if (!WIFEXITED(status)) break;
  }
  done = true;
}

TEST_F(LogTest, TheCallbackMayFork) {
  int calls = 0;
  set_log_callback([&](LogLevel, std::string_view) {
    ++calls;
    const pid_t child = fork();
    if (child == 0) _exit(0);
    int status = 1;
    waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
  });
  support::log(LogLevel::error, "one");
  support::log(LogLevel::error, "two");
  EXPECT_EQ(calls, 2);
}
#endif

TEST_F(LogTest, CallbackMayThrowAndMayCallTheLibrary) {
  int calls = 0;
  set_log_callback([&](LogLevel, std::string_view) {
    ++calls;
    support::log(LogLevel::error, "from inside");
    throw std::runtime_error("no");
  });
  support::log(LogLevel::error, "one");
  support::log(LogLevel::error, "two");
  EXPECT_EQ(calls, 2);
}

TEST_F(LogTest, ThreadsMayLogWhileTheCallbackChanges) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([] {
      for (int n = 0; n < 200; ++n) support::logf(LogLevel::info, "{}", n);
    });
  }
  int late = 0;
  set_log_callback([&late](LogLevel, std::string_view) { ++late; });
  for (std::thread& thread : threads) thread.join();
  set_log_callback({});
  EXPECT_EQ(static_cast<int>(messages_.size()) + late, 800);
}

TEST_F(LogTest, LeavesTheHostsLoggersAlone) {
  support::log(LogLevel::error, "one");
  int registered = 0;
  spdlog::apply_all([&](const std::shared_ptr<spdlog::logger>& logger) { registered += logger->name() == "fa"; });
  EXPECT_EQ(registered, 0);
  EXPECT_EQ(spdlog::default_logger()->name(), "");
}

TEST_F(LogTest, DefaultsToStandardErrorAndNeverStandardOutput) {
  set_log_callback({});
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  support::log(LogLevel::warning, "disk is full");
  const std::string err = testing::internal::GetCapturedStderr();
  EXPECT_NE(err.find("fa warning: disk is full"), std::string::npos) << err;
  EXPECT_EQ(testing::internal::GetCapturedStdout(), "");
}

/// The first look at FA_LOG, in a process of its own.
void expect_at_start(const char* variable, const char* said) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(
      {
        setenv("FA_LOG", variable, 1);
        support::log_enabled(LogLevel::debug);
        support::log_enabled(LogLevel::debug);
        std::fputs("end", stderr);
        _exit(0);
      },
      testing::ExitedWithCode(0), said);
}

TEST(LogDeathTest, AnUnknownLevelIsSaidOnce) {
#if defined(_WIN32)  // where expressions are simple and lines end in two characters
  expect_at_start("loud", "FA_LOG = loud: accepted is debug, info, warning, error or off");
#else
  expect_at_start("loud", "^[^\n]*FA_LOG = loud: accepted is debug, info, warning, error or off\nend$");
#endif
  for (const char* level : {"", "debug", "info", "warning", "error", "off"}) expect_at_start(level, "^end$");
}

}  // namespace
}  // namespace fa
