// Caps: what goes, what stays, and what is never touched.

#include <chrono>
#include <optional>

#include "cache/disk.hpp"
#include "cache/entry.hpp"
#include "quota_cases.hpp"
#include "support.hpp"

namespace fa::cache {
namespace {

using testing::age;
using testing::builder;
using testing::capped;
using testing::entry_path;
using testing::fill;
using testing::Listener;
using testing::make_entry;
using testing::make_key;
using testing::no_build;
using testing::numbered;
using testing::stored;
using testing::TemporaryDirectory;
namespace fs = std::filesystem;
using namespace std::chrono_literals;

TEST(Quota, CountIsKeptAndTheOldestGo) {
  const TemporaryDirectory directory;
  Store store(capped(directory.path(), {0, 8}));
  for (int i = 0; i < 30; ++i) {
    store.get(numbered(i), builder(numbered(i)));
    EXPECT_LE(testing::files_under(directory.path()), 8U);
    EXPECT_TRUE(stored(directory.path(), i));
  }
  EXPECT_EQ(store.counters().evictions, 22U);
  EXPECT_EQ(store.counters().publish_failures, 0U);
  for (int i = 0; i < 30; ++i) EXPECT_EQ(store.get(numbered(i), no_build()).origin, Origin::memory);
}

TEST(Quota, BytesAreKept) {
  const TemporaryDirectory directory;
  const std::uint64_t size = encoded_size(make_entry(numbered(10)));
  Store store(capped(directory.path(), {10 * size, 0}));
  for (int i = 10; i < 60; ++i) {
    store.get(numbered(i), builder(numbered(i)));
    const Usage usage = directory_usage(directory.path());
    EXPECT_LE(usage.bytes, 10 * size);
    EXPECT_EQ(usage.bytes, usage.entries * size);
  }
  EXPECT_GE(store.counters().evictions, 40U);
}

TEST(Quota, UseKeepsAnEntryAlive) {
  const TemporaryDirectory directory;
  fill(directory.path(), 6);
  for (int i = 0; i < 6; ++i) age(directory.path(), i, std::chrono::hours(20 - i));
  EXPECT_EQ(Store({directory.path(), nullptr}).get(numbered(0), no_build()).origin, Origin::disk);
  const Collected collected = collect_garbage(directory.path(), {.limits = {0, 3}});
  EXPECT_EQ(collected.removed.entries, 3U);
  EXPECT_EQ(collected.left.entries, 3U);
  for (int i = 0; i < 6; ++i) EXPECT_EQ(stored(directory.path(), i), i == 0 || i > 3) << i;
}

TEST(Quota, AnEntryInUseIsMarkedOnceAnHour) {
  const TemporaryDirectory directory;
  fill(directory.path(), 1);
  const fs::path file = entry_path(directory.path(), numbered(0));
  const auto use = [&] {
    Store({directory.path(), nullptr}).get(numbered(0), no_build());
    return fs::last_write_time(file);
  };
  age(directory.path(), 0, 2h);
  const auto marked = use();
  EXPECT_LT(fs::file_time_type::clock::now() - marked, 1min);
  fs::last_write_time(file, marked - 30min);
  EXPECT_EQ(use(), marked - 30min);
  list_stored(directory.path());
  age(directory.path(), 0, 2h);
  const auto old = fs::last_write_time(file);
  list_stored(directory.path());
  EXPECT_EQ(fs::last_write_time(file), old) << "looking is not using";
}

TEST(Quota, WhatIsBeingReadStays) {
  const TemporaryDirectory directory;
  fill(directory.path(), 4);
  for (int i = 0; i < 4; ++i) age(directory.path(), i, std::chrono::hours(20 - i));
  std::optional<Descriptor> reader(platform::open_file(platform::kHere, entry_path(directory.path(), numbered(0))));
  ASSERT_TRUE(platform::try_lock(reader->get(), platform::Lock::shared));  // as every reader does
  EXPECT_EQ(collect_garbage(directory.path(), {.limits = {0, 2}}).removed.entries, 2U);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(stored(directory.path(), i), i == 0 || i == 3) << i;
  reader.reset();
  EXPECT_EQ(collect_garbage(directory.path(), {.limits = {0, 1}}).removed.entries, 1U);
  EXPECT_FALSE(stored(directory.path(), 0));
}

TEST(Quota, AKernelLargerThanTheCapStaysInMemory) {
  const TemporaryDirectory directory;
  fill(directory.path(), 2);
  Listener listener;
  StoreOptions options = capped(directory.path(), {100'000, 0});
  options.warn = listener.callback();
  Store store(options);
  for (int i = 0; i < 3; ++i) {
    const Key key = make_key("large " + std::to_string(i));
    EXPECT_EQ(store.get(key, [&] { return make_entry(key, 100'001); }).origin, Origin::built);
    EXPECT_EQ(store.get(key, no_build()).origin, Origin::memory);
  }
  EXPECT_EQ(store.counters().publish_failures, 3U);
  EXPECT_EQ(listener.messages().size(), 1U);
  EXPECT_EQ(testing::files_under(directory.path()), 2U);
}

TEST(Quota, TheKernelJustBuiltStaysHoweverLargeItIs) {
  const TemporaryDirectory directory;
  fill(directory.path(), 3);
  const std::uint64_t size = encoded_size(make_entry(make_key("large 0"), 50'000));
  Store store(capped(directory.path(), {size, 0}));
  for (int i = 0; i < 3; ++i) {
    const Key key = make_key("large " + std::to_string(i));
    store.get(key, [&] { return make_entry(key, 50'000); });
    EXPECT_TRUE(fs::exists(entry_path(directory.path(), key)));
    EXPECT_EQ(testing::files_under(directory.path()), 1U);
  }
  EXPECT_EQ(store.counters().publish_failures, 0U);
}

TEST(Quota, SeveralStoresOverOneDirectoryStayNearTheCap) {
  const TemporaryDirectory directory;
  constexpr int kStores = 4;
  constexpr int kEach = 100;
  testing::run_in_threads(kStores, [&](int t) {
    Store store(capped(directory.path(), {0, 32}));
    for (int i = 0; i < kEach; ++i) {
      const Key key = numbered(1000 * t + i);
      store.get(key, builder(key));
    }
  });
  // What the others add between two looks at the directory.
  EXPECT_LE(testing::files_under(directory.path()), 32U + kStores * 64U);
  EXPECT_LE(collect_garbage(directory.path(), {.limits = {0, 32}}).left.entries, 32U);
}

TEST(Quota, TheSourceLiesBesideItsEntryAndGoesWithIt) {
  const TemporaryDirectory directory;
  Store store(capped(directory.path(), {0, 3}));
  for (int i = 0; i < 6; ++i) {
    store.get(numbered(i), [i] {
      Entry entry = make_entry(numbered(i));
      entry.source = "// source of " + std::to_string(i) + "\n";
      return entry;
    });
    const fs::path source = entry_path(directory.path(), numbered(i)).replace_extension(".cu");
    const std::vector<std::byte> bytes = testing::read_bytes(source);
    EXPECT_EQ(std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()),
              "// source of " + std::to_string(i) + "\n");
    EXPECT_TRUE(testing::is_private(source));
  }
  EXPECT_EQ(testing::files_under(directory.path()), 6U);  // three entries, three sources
  const std::vector<StoredEntry> all = list_stored(directory.path());
  ASSERT_EQ(all.size(), 3U);
  for (const StoredEntry& item : all) EXPECT_EQ(item.file_bytes, fs::file_size(item.path) + 15);
}

TEST(Garbage, DamagedEntriesStaleFilesAndOtherVersionsGoOnRequest) {
  const TemporaryDirectory directory;
  fill(directory.path(), 4);
  fs::resize_file(entry_path(directory.path(), numbered(2)), 50);
  fs::create_directories(directory / "v1" / "sm_80");
  testing::write_bytes(directory / "v1" / "sm_80" / "old.fac", {std::byte{1}});
  testing::write_bytes(directory / "mine.txt", {std::byte{1}});
  EXPECT_EQ(collect_garbage(directory.path(), {}).removed.entries, 0U);
  EXPECT_TRUE(fs::exists(directory / "v1"));
  const Collected collected = collect_garbage(directory.path(), {.damaged = true, .other_versions = true});
  EXPECT_EQ(collected.removed.entries, 1U);
  EXPECT_EQ(collected.removed.bytes, 50U);
  EXPECT_EQ(collected.left.entries, 3U);
  EXPECT_FALSE(stored(directory.path(), 2));
  EXPECT_FALSE(fs::exists(directory / "v1"));
  EXPECT_TRUE(fs::exists(directory / "mine.txt"));
  EXPECT_EQ(collect_garbage(directory / "missing", {.damaged = true, .other_versions = true}).left.entries, 0U);
}

}  // namespace
}  // namespace fa::cache
