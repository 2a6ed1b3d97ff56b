// System calls that fail, and processes that die between any two of them.

#include "faults.hpp"

#include <cerrno>
#include <chrono>
#include <csignal>
#include <optional>
#include <string>
#include <thread>

#include "cache/disk.hpp"
#include "support.hpp"

namespace fa::cache {
namespace {

using testing::builder;
using testing::faults;
using testing::FaultScope;
using testing::Listener;
using testing::make_entry;
using testing::make_key;
using testing::no_build;
using testing::TemporaryDirectory;
using Clock = std::chrono::steady_clock;

/// Three kernels with a disk that refuses them: memory serves, one warning, nothing left behind.
void expect_refusal_costs_speed_only(int testing::Faults::*fault, int error) {
  SCOPED_TRACE(error);
  const TemporaryDirectory directory;
  const FaultScope scope;
  Listener listener;
  Store store({directory.path(), listener.callback()});
  faults().*fault = error;
  for (int i = 0; i < 3; ++i) {
    const Key key = make_key("spec " + std::to_string(i));
    EXPECT_EQ(store.get(key, builder(key)).origin, Origin::built);
    EXPECT_EQ(store.get(key, no_build()).origin, Origin::memory);
  }
  EXPECT_EQ(store.counters().publish_failures, 3U);
  EXPECT_EQ(listener.messages().size(), 1U);
  EXPECT_EQ(testing::files_under(directory.path()), 0U);
}

TEST(Faults, FullDisksAndFailingOnes) {
  expect_refusal_costs_speed_only(&testing::Faults::write_error, ENOSPC);
  expect_refusal_costs_speed_only(&testing::Faults::write_error, EDQUOT);
  expect_refusal_costs_speed_only(&testing::Faults::fsync_error, EIO);
  expect_refusal_costs_speed_only(&testing::Faults::renameat_error, ESTALE);
}

TEST(Faults, ShortWritesAndFileSystemsWithoutFsyncAreNoFailure) {
  const TemporaryDirectory directory;
  const FaultScope scope;
  faults().short_writes = true;
  faults().fsync_error = EINVAL;
  Store store({directory.path(), nullptr});
  const Key key = make_key();
  store.get(key, builder(key));
  EXPECT_EQ(store.counters().publish_failures, 0U);
  const Lookup found = Store({directory.path(), nullptr}).get(key, no_build());
  testing::expect_same(*found.entry, make_entry(key));
}

TEST(Faults, FileSystemsWithoutLocksAllowDuplicates) {
  for (const int error : {ENOLCK, EOPNOTSUPP, EINVAL}) {
    const TemporaryDirectory directory;
    const FaultScope scope;
    faults().flock_error = error;
    Listener listener;
    Store store({directory.path(), listener.callback()});
    const auto begin = Clock::now();
    for (int i = 0; i < 3; ++i) {
      const Key key = make_key("spec " + std::to_string(i));
      EXPECT_EQ(store.get(key, builder(key)).origin, Origin::built);
      EXPECT_EQ(Store({directory.path(), nullptr}).get(key, no_build()).origin, Origin::disk);
    }
    EXPECT_LT(Clock::now() - begin, std::chrono::seconds(5));
    EXPECT_EQ(store.counters().publish_failures, 0U);
    EXPECT_EQ(listener.messages().size(), 1U);
  }
}

TEST(Faults, ALockWhoseFileWasRemovedMeanwhileIsNoLock) {
  const TemporaryDirectory directory;
  const FaultScope scope;
  const Key key = make_key();
  std::string problem;
  const std::optional<Disk> disk = Disk::open(directory.path(), &problem);
  ASSERT_TRUE(disk) << problem;
  std::optional<BuildLock> first(disk->lock(key, std::chrono::seconds(1), &problem));
  ASSERT_TRUE(first->held());
  faults().at = "flock";
  faults().once = [&first] { first.reset(); };
  const BuildLock second = disk->lock(key, std::chrono::seconds(1), &problem);
  EXPECT_TRUE(second.held());
  EXPECT_FALSE(first);
  EXPECT_TRUE(std::filesystem::exists(directory / testing::version_folder() / "locks" / key.digest()));
  EXPECT_FALSE(disk->lock(key, std::chrono::milliseconds(20), &problem).held());
}

TEST(Faults, ABuilderThatMeetsALookupBuildsAfterIt) {
  const TemporaryDirectory directory;
  const FaultScope scope;
  const Key key = make_key();
  Store store({directory.path(), nullptr});
  std::jthread other;
  Lookup built;
  faults().at = "openat";
  faults().once = [&] {
    other = std::jthread([&] { built = store.get(key, builder(key)); });
    std::this_thread::sleep_for(std::chrono::milliseconds(100));  // for it to find the lookup under way
  };
  EXPECT_EQ(store.get(key, nullptr).entry, nullptr);
  other.join();
  ASSERT_NE(built.entry, nullptr);
  EXPECT_EQ(built.origin, Origin::built);
}

TEST(Faults, DeathAtAnySystemCallHeals) {
  int died = 0;
  for (int n = 1; n < 200; ++n) {
    SCOPED_TRACE(n);
    const TemporaryDirectory directory;
    const Key key = make_key();
    const int status = testing::run_in_child([&] {
      faults() = {};
      faults().kill_at = n;
      faults().short_writes = true;
      Store store({directory / "cache", nullptr});
      return store.get(key, builder(key)).origin == Origin::built ? 0 : 1;
    });
    if (status == 0) break;
    ASSERT_EQ(status, -SIGKILL);
    ++died;
    const auto begin = Clock::now();
    Store next({directory / "cache", nullptr});
    const Lookup found = next.get(key, builder(key));
    testing::expect_same(*found.entry, make_entry(key));
    EXPECT_EQ(next.counters().damaged, 0U);
    EXPECT_EQ(next.counters().publish_failures, 0U);
    EXPECT_LT(Clock::now() - begin, std::chrono::seconds(5));
    EXPECT_EQ(Store({directory / "cache", nullptr}).get(key, no_build()).origin, Origin::disk);
  }
  EXPECT_GT(died, 15);
  EXPECT_LT(died, 199);
}

}  // namespace
}  // namespace fa::cache
