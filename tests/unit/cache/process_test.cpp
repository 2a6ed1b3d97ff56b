// Several processes over one directory.

#include <atomic>
#include <chrono>
#include <deque>
#include <fstream>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cache/disk.hpp"
#include "support.hpp"

namespace fa::cache {
namespace {

using testing::builder;
using testing::ChildProgram;
using testing::Listener;
using testing::make_entry;
using testing::make_key;
using testing::no_build;
using testing::Process;
using testing::TemporaryDirectory;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using Arguments = std::vector<std::string>;

#if defined(_WIN32)
// Processes are started anew there, which takes far longer than a fork.
constexpr int kManyProcesses = 16;
constexpr int kKills = 100;
constexpr int kLongestLifeMicroseconds = 250'000;
#else
constexpr int kManyProcesses = 64;
constexpr int kKills = 1000;
constexpr int kLongestLifeMicroseconds = 2'500;
#endif

/// A file of its own for each build, so that they can be counted whoever made them.
void note_build(const std::filesystem::path& directory, const std::string& stem) {
  std::ofstream(directory / temporary_name(stem + " built")) << "x";
}

std::size_t builds_noted(const std::filesystem::path& directory, const std::string& stem) {
  std::size_t count = 0;
  for (const auto& item : std::filesystem::directory_iterator(directory)) {
    count += item.path().filename().string().starts_with(stem + " built") ? 1U : 0U;
  }
  return count;
}

/// Directory, name of the cache, number of keys, milliseconds of a build, and a name of its own: waits for the gate and
/// takes all keys in the same order, with a stand-in for the compiler.
int use_kernels(const Arguments& arguments) {
  const std::filesystem::path directory = arguments.at(0);
  const std::string& cache = arguments.at(1);
  const int keys = std::stoi(arguments.at(2));
  testing::open_gate(directory / ("ready " + arguments.at(4)));
  testing::wait_for_gate(directory / "start");
  Store store({directory / cache, nullptr});
  for (int j = 0; j < keys; ++j) {
    const Key key = make_key("spec " + std::to_string(j));
    const Lookup found = store.get(key, [&] {
      note_build(directory, cache + " " + std::to_string(j));
      std::this_thread::sleep_for(std::chrono::milliseconds(std::stoi(arguments.at(3))));
      return make_entry(key);
    });
    if (!found.entry || found.entry->cubin != make_entry(key).cubin) return 1;
  }
  const Counters counters = store.counters();
  return counters.builds + counters.disk_hits == static_cast<std::uint64_t>(keys) ? 0 : 2;
}
const ChildProgram kUseKernels("use_kernels", use_kernels);

/// Seconds that so many processes take, from their common start, and that each kernel is built once.
double use_in_processes(int processes, int keys, int build_ms) {
  const TemporaryDirectory directory;
  std::vector<Process> children;
  children.reserve(static_cast<std::size_t>(processes));
  for (int i = 0; i < processes; ++i) {
    children.emplace_back("use_kernels", Arguments{directory.path().string(), "cache", std::to_string(keys),
                                                   std::to_string(build_ms), std::to_string(i)});
  }
  for (int i = 0; i < processes; ++i) testing::wait_for_gate(directory / ("ready " + std::to_string(i)));
  const auto begin = Clock::now();
  testing::open_gate(directory / "start");
  for (Process& child : children) EXPECT_EQ(child.wait(), 0);
  const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  for (int j = 0; j < keys; ++j) {
    EXPECT_EQ(builds_noted(directory.path(), "cache " + std::to_string(j)), 1U) << j;
  }
  EXPECT_EQ(testing::files_under(directory / "cache"), static_cast<std::size_t>(keys));
  return seconds;
}

TEST(Processes, EightBuildEachKernelOnce) {
  use_in_processes(8, 3, 150);
}

TEST(Processes, ManyTakeAsLongAsOne) {
  const double one = use_in_processes(1, 8, 80);
  const double many = use_in_processes(kManyProcesses, 8, 80);
  RecordProperty("one_process_s", std::to_string(one));
  RecordProperty("many_processes_s", std::to_string(many));
#if !defined(_WIN32)  // Wine, where it runs, has one server for the files of all processes
  EXPECT_LE(many, 1.3 * one + 1);
#endif
}

/// Directory and seed: publishes, reads and evicts for ever; ends only when it is killed or meets a wrong entry.
int churn(const Arguments& arguments) {
  std::mt19937 random(static_cast<unsigned>(std::stoi(arguments.at(1))));
  while (true) {
    StoreOptions options{arguments.at(0), nullptr, 200ms};
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
const ChildProgram kChurn("churn", churn);

TEST(Processes, KillsLeaveNoBadEntryAndNoHang) {
  constexpr int kAtOnce = 2;
  const TemporaryDirectory directory;
  std::mt19937 random(1);
  std::deque<Process> running;
  for (int i = 0; i < kKills + kAtOnce; ++i) {
    if (i < kKills) running.emplace_back("churn", Arguments{(directory / "cache").string(), std::to_string(i)});
    if (i < kAtOnce) continue;
    std::this_thread::sleep_for(std::chrono::microseconds(random() % kLongestLifeMicroseconds));
    running.front().kill();
    ASSERT_EQ(running.front().wait(), Process::kKilled) << i;
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

/// Directory and a gate to open: takes the lock of the key and keeps it until it is killed.
int hold_lock(const Arguments& arguments) {
  std::string problem;
  const std::optional<Disk> disk = Disk::open(arguments.at(0), &problem);
  if (!disk) return 1;
  const BuildLock lock = disk->lock(make_key(), 1s, &problem);
  if (!lock.held()) return 2;
  testing::open_gate(arguments.at(1));
  std::this_thread::sleep_for(100s);
  return 3;
}
const ChildProgram kHoldLock("hold_lock", hold_lock);

/// A process that has the lock of `make_key()`, until it is killed.
Process start_holder(const TemporaryDirectory& directory) {
  const std::filesystem::path taken = directory / "taken";
  Process holder("hold_lock", {(directory / "cache").string(), taken.string()});
  testing::wait_for_gate(taken);
  return holder;
}

TEST(Processes, AKilledHolderBlocksNobody) {
  const TemporaryDirectory directory;
  const Key key = make_key();
  Process holder = start_holder(directory);
  const auto begin = Clock::now();
  std::jthread killer([&holder] {
    std::this_thread::sleep_for(200ms);
    holder.kill();
  });
  Listener listener;
  Store store({directory / "cache", listener.callback()});
  EXPECT_EQ(store.get(key, builder(key)).origin, Origin::built);
  const auto waited = Clock::now() - begin;
  EXPECT_GE(waited, 200ms);
  EXPECT_LT(waited, 10s);
  EXPECT_TRUE(listener.messages().empty());
  killer.join();
  EXPECT_EQ(holder.wait(), Process::kKilled);
  EXPECT_EQ(Store({directory / "cache", nullptr}).get(key, no_build()).origin, Origin::disk);
}

TEST(Processes, AHolderThatNeverEndsIsWaitedForWithinBounds) {
  const TemporaryDirectory directory;
  const Key key = make_key();
  const Key other = make_key("other");
  Process holder = start_holder(directory);
  Listener listener;
  Store store({directory / "cache", listener.callback(), 300ms});
  EXPECT_EQ(store.get(other, builder(other)).origin, Origin::built);
  EXPECT_TRUE(listener.messages().empty());
  const auto begin = Clock::now();
  EXPECT_EQ(store.get(key, builder(key)).origin, Origin::built);
  EXPECT_GE(Clock::now() - begin, 300ms);
  EXPECT_LT(Clock::now() - begin, 10s);
  EXPECT_EQ(listener.messages().size(), 1U);
  EXPECT_TRUE(std::filesystem::exists(testing::entry_path(directory / "cache", key)));
  holder.kill();
  EXPECT_EQ(holder.wait(), Process::kKilled);
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
