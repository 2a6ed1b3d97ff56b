// Caps, while others read and use what is to go.

#include <cerrno>
#include <chrono>

#include "cache/disk.hpp"
#include "faults.hpp"
#include "quota_cases.hpp"
#include "support.hpp"

namespace fa::cache {
namespace {

using testing::age;
using testing::builder;
using testing::capped;
using testing::entry_path;
using testing::faults;
using testing::FaultScope;
using testing::fill;
using testing::make_entry;
using testing::no_build;
using testing::numbered;
using testing::stored;
using testing::TemporaryDirectory;
namespace fs = std::filesystem;
using namespace std::chrono_literals;

TEST(Quota, AReaderKeepsEvictionsAwayFromItsFile) {
  const TemporaryDirectory directory;
  fill(directory.path(), 2);
  const fs::path read = entry_path(directory.path(), numbered(0));
  fs::last_write_time(read, fs::file_time_type::clock::now() - 30min);  // too lately used to be marked again
  const FaultScope scope;
  Store store({directory.path(), nullptr});
  Usage removed;
  faults().at = "read";
  faults().once = [&] { removed = collect_garbage(directory.path(), {.limits = {0, 1}}).removed; };
  EXPECT_EQ(store.get(numbered(0), no_build()).origin, Origin::disk);
  EXPECT_EQ(removed.entries, 1U);
  EXPECT_TRUE(stored(directory.path(), 0));
  EXPECT_FALSE(stored(directory.path(), 1));
}

TEST(Quota, AnEvictionInTheMiddleOfAReadTakesNothingFromIt) {
  const TemporaryDirectory directory;
  fill(directory.path(), 1);
  const FaultScope scope;
  Store store({directory.path(), nullptr});
  faults().at = "flock";  // the file is open, and not locked yet
  faults().once = [&] { fs::remove(entry_path(directory.path(), numbered(0))); };
  const Lookup found = store.get(numbered(0), no_build());
  ASSERT_NE(found.entry, nullptr);
  testing::expect_same(*found.entry, make_entry(numbered(0)));
  EXPECT_FALSE(stored(directory.path(), 0));
}

TEST(Quota, AnEntryUsedAfterTheListWasMadeStays) {
  const TemporaryDirectory directory;
  fill(directory.path(), 2);
  for (int i = 0; i < 2; ++i) age(directory.path(), i, std::chrono::hours(20 - i));
  const FaultScope scope;
  faults().at = "flock";  // of the eviction, with its list made
  faults().once = [&] {
    fs::last_write_time(entry_path(directory.path(), numbered(0)), fs::file_time_type::clock::now());
  };
  EXPECT_EQ(collect_garbage(directory.path(), {.limits = {0, 1}}).removed.entries, 1U);
  EXPECT_TRUE(stored(directory.path(), 0));
  EXPECT_FALSE(stored(directory.path(), 1));
}

TEST(Quota, IsKeptWhereLocksDoNotWork) {
  const TemporaryDirectory directory;
  const FaultScope scope;
  faults().flock_error = ENOLCK;
  Store store(capped(directory.path(), {0, 4}));
  for (int i = 0; i < 12; ++i) store.get(numbered(i), builder(numbered(i)));
  EXPECT_EQ(testing::files_under(directory / testing::version_folder() / "sm_90a"), 4U);
}

}  // namespace
}  // namespace fa::cache
