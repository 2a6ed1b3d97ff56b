// Several processes over one directory.

#include <fcntl.h>

#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <deque>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cache/disk.hpp"
#include "support.hpp"

namespace fa::cache {
namespace {

using testing::builder;
using testing::Listener;
using testing::make_entry;
using testing::make_key;
using testing::no_build;
using testing::start_child;
using testing::TemporaryDirectory;
using testing::wait_for;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

/// A pipe that children and parent use to wait for each other.
class Gate {
 public:
  Gate() {
    if (pipe2(ends_.data(), O_CLOEXEC) != 0) throw std::runtime_error("pipe2");
  }
  ~Gate() {
    close(ends_[0]);
    close(ends_[1]);
  }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;

  void pass(int tokens = 1) const {
    for (int i = 0; i < tokens; ++i) {
      if (::write(ends_[1], "x", 1) != 1) throw std::runtime_error("write");
    }
  }
  void wait() const {
    char token = 0;
    if (::read(ends_[0], &token, 1) != 1) throw std::runtime_error("read");
  }

 private:
  std::array<int, 2> ends_{};
};

void append_byte(const std::filesystem::path& file) {
  const int descriptor = open(file.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (descriptor < 0 || ::write(descriptor, "x", 1) != 1) throw std::runtime_error("append");
  close(descriptor);
}

TEST(Processes, EightBuildEachKernelOnce) {
  constexpr int kProcesses = 8;
  constexpr int kKeys = 3;
  const TemporaryDirectory directory;
  const Gate ready;
  const Gate start;
  std::vector<pid_t> children;
  children.reserve(kProcesses);
  for (int i = 0; i < kProcesses; ++i) {
    children.push_back(start_child([&] {
      ready.pass();
      start.wait();
      Store store({directory / "cache", nullptr});
      for (int j = 0; j < kKeys; ++j) {
        const Key key = make_key("spec " + std::to_string(j));
        const Lookup found = store.get(key, [&] {
          append_byte(directory / ("builds " + std::to_string(j)));
          std::this_thread::sleep_for(150ms);
          return make_entry(key);
        });
        if (!found.entry || found.entry->cubin != make_entry(key).cubin) return 1;
      }
      return store.counters().builds + store.counters().disk_hits == kKeys ? 0 : 2;
    }));
  }
  for (int i = 0; i < kProcesses; ++i) ready.wait();
  start.pass(kProcesses);
  for (const pid_t child : children) EXPECT_EQ(wait_for(child), 0);
  for (int j = 0; j < kKeys; ++j) {
    EXPECT_EQ(std::filesystem::file_size(directory / ("builds " + std::to_string(j))), 1U);
  }
  EXPECT_EQ(testing::files_under(directory / "cache"), static_cast<std::size_t>(kKeys));
}

/// One process after another's start gate: eight kernels with a stand-in for the compiler, in the same order.
int use_eight_kernels(const std::filesystem::path& directory, const std::filesystem::path& builds) {
  constexpr int kKeys = 8;
  Store store({directory, nullptr});
  for (int j = 0; j < kKeys; ++j) {
    const Key key = make_key("spec " + std::to_string(j));
    const Lookup found = store.get(key, [&] {
      append_byte(builds);
      std::this_thread::sleep_for(80ms);
      return make_entry(key);
    });
    if (!found.entry || found.entry->cubin != make_entry(key).cubin) return 1;
  }
  return store.counters().builds + store.counters().disk_hits == kKeys ? 0 : 2;
}

TEST(Processes, SixtyFourTakeAsLongAsOne) {
  constexpr int kProcesses = 64;
  const TemporaryDirectory directory;
  const auto wall = [&](int processes, const std::string& name) {
    const Gate start;
    std::vector<pid_t> children;
    for (int i = 0; i < processes; ++i) {
      children.push_back(start_child([&] {
        start.wait();
        return use_eight_kernels(directory / name, directory / (name + " builds"));
      }));
    }
    const auto begin = Clock::now();
    start.pass(processes);
    for (const pid_t child : children) EXPECT_EQ(wait_for(child), 0);
    EXPECT_EQ(std::filesystem::file_size(directory / (name + " builds")), 8U);
    return std::chrono::duration<double>(Clock::now() - begin).count();
  };
  const double one = wall(1, "one");
  const double many = wall(kProcesses, "many");
  RecordProperty("one_process_s", std::to_string(one));
  RecordProperty("sixty_four_processes_s", std::to_string(many));
  EXPECT_LE(many, 1.3 * one + 1);
}

/// Publishes, reads and evicts for ever; ends only when it is killed or meets a wrong entry.
int churn(const std::filesystem::path& directory, unsigned seed) {
  std::mt19937 random(seed);
  while (true) {
    StoreOptions options{directory, nullptr, 200ms};
    options.limits = {0, 5};
    Store store(options);
    for (int i = 0; i < 4; ++i) {
      const Key key = make_key("spec " + std::to_string(random() % 8));
      const Lookup found = store.get(key, [&] { return make_entry(key); });
      if (!found.entry || found.entry->cubin != make_entry(key).cubin) return 1;
    }
    if (store.counters().damaged != 0) return 2;
  }
}

TEST(Processes, AThousandKillsLeaveNoBadEntryAndNoHang) {
  constexpr int kKills = 1000;
  constexpr int kAtOnce = 2;
  const TemporaryDirectory directory;
  std::mt19937 random(1);
  std::deque<pid_t> running;
  for (int i = 0; i < kKills + kAtOnce; ++i) {
    if (i < kKills)
      running.push_back(start_child([&, i] { return churn(directory / "cache", static_cast<unsigned>(i)); }));
    if (i < kAtOnce) continue;
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 2500));
    kill(running.front(), SIGKILL);
    ASSERT_EQ(wait_for(running.front()), -SIGKILL) << i;
    running.pop_front();
  }
  const auto begin = Clock::now();
  Listener listener;
  Store store({directory / "cache", listener.callback()});
  for (int j = 0; j < 8; ++j) {
    const Key key = make_key("spec " + std::to_string(j));
    testing::expect_same(*store.get(key, builder(key)).entry, make_entry(key));
  }
  EXPECT_LT(Clock::now() - begin, 5s);
  EXPECT_EQ(store.counters().damaged, 0U);
  EXPECT_EQ(store.counters().publish_failures, 0U);
  EXPECT_TRUE(listener.messages().empty());
}

/// Starts a process that takes the lock of `key` and keeps it until it is killed.
pid_t start_holder(const std::filesystem::path& directory, const Key& key, const Gate& taken) {
  return start_child([&] {
    std::string problem;
    const std::optional<Disk> disk = Disk::open(directory, &problem);
    if (!disk) return 1;
    const BuildLock lock = disk->lock(key, 1s, &problem);
    if (!lock.held()) return 2;
    taken.pass();
    pause();
    return 3;
  });
}

TEST(Processes, AKilledHolderBlocksNobody) {
  const TemporaryDirectory directory;
  const Key key = make_key();
  const Gate taken;
  const pid_t holder = start_holder(directory.path(), key, taken);
  taken.wait();
  const auto begin = Clock::now();
  std::jthread killer([holder] {
    std::this_thread::sleep_for(200ms);
    kill(holder, SIGKILL);
  });
  Listener listener;
  Store store({directory.path(), listener.callback()});
  EXPECT_EQ(store.get(key, builder(key)).origin, Origin::built);
  const auto waited = Clock::now() - begin;
  EXPECT_GE(waited, 200ms);
  EXPECT_LT(waited, 10s);
  EXPECT_TRUE(listener.messages().empty());
  EXPECT_EQ(wait_for(holder), -SIGKILL);
  EXPECT_EQ(Store({directory.path(), nullptr}).get(key, no_build()).origin, Origin::disk);
}

TEST(Processes, AHolderThatNeverEndsIsWaitedForWithinBounds) {
  const TemporaryDirectory directory;
  const Key key = make_key();
  const Key other = make_key("other");
  const Gate taken;
  const pid_t holder = start_holder(directory.path(), key, taken);
  taken.wait();
  Listener listener;
  Store store({directory.path(), listener.callback(), 300ms});
  EXPECT_EQ(store.get(other, builder(other)).origin, Origin::built);
  EXPECT_TRUE(listener.messages().empty());
  const auto begin = Clock::now();
  EXPECT_EQ(store.get(key, builder(key)).origin, Origin::built);
  EXPECT_GE(Clock::now() - begin, 300ms);
  EXPECT_LT(Clock::now() - begin, 10s);
  EXPECT_EQ(listener.messages().size(), 1U);
  EXPECT_TRUE(std::filesystem::exists(testing::entry_path(directory.path(), key)));
  kill(holder, SIGKILL);
  EXPECT_EQ(wait_for(holder), -SIGKILL);
}

TEST(Processes, AForkedChildDoesNotKeepTheLockOfItsParent) {
  const TemporaryDirectory directory;
  const Key key = make_key();
  const Gate done;
  pid_t child = 0;
  Store store({directory.path(), nullptr});
  EXPECT_THROW(store.get(key,
                         [&]() -> Entry {
                           child = start_child([&] {
                             done.wait();
                             return 0;
                           });
                           throw std::runtime_error("failed after a fork");
                         }),
               std::runtime_error);
  Listener listener;
  Store next({directory.path(), listener.callback(), 5s});
  const auto begin = Clock::now();
  EXPECT_EQ(next.get(key, builder(key)).origin, Origin::built);
  EXPECT_LT(Clock::now() - begin, 4s);
  EXPECT_TRUE(listener.messages().empty());
  done.pass();
  EXPECT_EQ(wait_for(child), 0);
}

TEST(Processes, TwoStoresOfOneProcessShareTheLockToo) {
  const TemporaryDirectory directory;
  const Key key = make_key();
  std::atomic<int> builds{0};
  const auto slow = [&] {
    ++builds;
    std::this_thread::sleep_for(150ms);
    return make_entry(key);
  };
  testing::run_in_threads(4, [&](int) { Store({directory.path(), nullptr}).get(key, slow); });
  EXPECT_EQ(builds, 1);
}

}  // namespace
}  // namespace fa::cache
