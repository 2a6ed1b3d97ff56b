#include "cache/store.hpp"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>

#include "latch.hpp"
#include "support.hpp"
#include "tests/support/posix_names.hpp"

namespace fa::cache {
namespace {

using testing::builder;
using testing::make_entry;
using testing::make_key;
using testing::no_build;
using testing::TemporaryDirectory;
using namespace std::chrono_literals;

TEST(Store, MemoryOverDiskOverBuild) {
  const TemporaryDirectory directory;
  const Key key = make_key();
  Store store({directory / "cache", nullptr});
  EXPECT_EQ(store.directory(), directory / "cache");
  EXPECT_EQ(store.get(key, nullptr).entry, nullptr);
  const Lookup built = store.get(key, builder(key));
  EXPECT_EQ(built.origin, Origin::built);
  testing::expect_same(*built.entry, make_entry(key));
  const Lookup again = store.get(key, no_build());
  EXPECT_EQ(again.origin, Origin::memory);
  EXPECT_EQ(again.entry, built.entry);

  Store other({directory / "cache", nullptr});
  const Lookup stored = other.get(key, nullptr);
  ASSERT_NE(stored.entry, nullptr);
  EXPECT_EQ(stored.origin, Origin::disk);
  testing::expect_same(*stored.entry, make_entry(key));
  EXPECT_EQ(store.counters().builds, 1U);
  EXPECT_EQ(store.counters().memory_hits, 1U);
  EXPECT_EQ(other.counters().disk_hits, 1U);
  EXPECT_EQ(other.counters().builds, 0U);
}

/// Waiting for it would be waiting for ever.
TEST(Store, ABuilderFindsItsOwnKeyBusy) {
  const Key key = make_key(), other = make_key("other");
  Store store(StoreOptions{});
  bool asked = false;
  const Lookup built = store.get(key, [&] {
    const Lookup own = store.get(key, no_build());
    EXPECT_TRUE(own.busy);
    EXPECT_EQ(own.entry, nullptr);
    EXPECT_FALSE(store.get(other, builder(other)).busy);
    asked = true;
    return make_entry(key);
  });
  EXPECT_TRUE(asked);
  EXPECT_FALSE(built.busy);
  EXPECT_EQ(store.get(key, no_build()).origin, Origin::memory);
}

TEST(Store, WhoMustNotWaitFindsAKeyOfOthersBusy) {
  const Key key = make_key();
  Store store(StoreOptions{});
  testing::Latch started(1), asked(1);
  std::jthread leader([&] {
    store.get(key, [&] {
      started.count_down();
      asked.wait();
      return make_entry(key);
    });
  });
  started.wait();
  EXPECT_TRUE(store.get(key, no_build(), nullptr, Wait::never).busy);
  asked.count_down();
  EXPECT_NE(store.get(key, no_build()).entry, nullptr);
}

TEST(Store, OneFileAKernelAndNothingElse) {
  const TemporaryDirectory directory;
  Store store({directory.path(), nullptr});
  for (int i = 0; i < 5; ++i) {
    const Key key = make_key("spec " + std::to_string(i));
    store.get(key, builder(key));
    EXPECT_TRUE(std::filesystem::is_regular_file(testing::entry_path(directory.path(), key)));
  }
  EXPECT_EQ(testing::files_under(directory.path()), 5U);
}

TEST(Store, WithoutADirectoryKeepsToMemory) {
  testing::Listener listener;
  Store store({{}, listener.callback()});
  const Key key = make_key();
  EXPECT_EQ(store.get(key, builder(key)).origin, Origin::built);
  EXPECT_EQ(store.get(key, no_build()).origin, Origin::memory);
  EXPECT_TRUE(store.directory().empty());
  EXPECT_TRUE(listener.messages().empty());
}

TEST(Store, AnEntryWithoutACubinIsHandedOnAndNotKept) {
  const TemporaryDirectory directory;
  Store store({directory.path(), nullptr});
  const Key key = make_key();
  const auto empty = [&key] { return make_entry(key, 0); };
  ASSERT_NE(store.get(key, empty).entry, nullptr);
  EXPECT_EQ(testing::files_under(directory.path()), 0U);
  EXPECT_EQ(store.counters().publish_failures, 0U);
  EXPECT_EQ(store.get(key, builder(key)).origin, Origin::built);
  EXPECT_EQ(testing::files_under(directory.path()), 1U);
}

TEST(Store, ABuildMayUseTheStoreForOtherKeys) {
  const TemporaryDirectory directory;
  Store store({directory.path(), nullptr});
  const Key outer = make_key("outer");
  const Key inner = make_key("inner");
  store.get(outer, [&] {
    EXPECT_EQ(store.get(inner, builder(inner)).origin, Origin::built);
    return make_entry(outer);
  });
  EXPECT_EQ(store.counters().builds, 2U);
}

TEST(Store, SixteenThreadsBuildOnce) {
  const TemporaryDirectory directory;
  Store store({directory.path(), nullptr});
  const Key key = make_key();
  constexpr int kThreads = 16;
  testing::Latch start(kThreads);
  std::atomic<int> builds{0};
  std::vector<std::shared_ptr<const Entry>> entries(kThreads);
  const auto slow = [&] {
    ++builds;
    std::this_thread::sleep_for(100ms);
    return make_entry(key);
  };
  testing::run_in_threads(kThreads, [&](int i) {
    start.arrive_and_wait();
    entries[static_cast<std::size_t>(i)] = store.get(key, slow).entry;
  });
  EXPECT_EQ(builds, 1);
  for (const auto& entry : entries) EXPECT_EQ(entry, entries[0]);
  EXPECT_NE(entries[0], nullptr);
  EXPECT_EQ(store.counters().builds, 1U);
  EXPECT_EQ(store.counters().memory_hits, kThreads - 1U);
}

TEST(Store, DifferentKeysAreBuiltAtTheSameTime) {
  const TemporaryDirectory directory;
  Store store({directory.path(), nullptr});
  constexpr int kThreads = 6;
  std::mutex mutex;
  std::condition_variable all_inside;
  int inside = 0;
  std::atomic<int> met{0};
  testing::run_in_threads(kThreads, [&](int i) {
    const Key key = make_key("spec " + std::to_string(i));
    store.get(key, [&] {
      std::unique_lock lock(mutex);
      ++inside;
      all_inside.notify_all();
      if (all_inside.wait_for(lock, 20s, [&] { return inside == kThreads; })) ++met;
      return make_entry(key);
    });
  });
  EXPECT_EQ(met, kThreads);
}

TEST(Store, ManyThreadsOverManyKeys) {
  const TemporaryDirectory directory;
  Store store({directory.path(), nullptr});
  constexpr int kThreads = 8;
  constexpr int kKeys = 12;
  std::atomic<int> wrong{0};
  testing::run_in_threads(kThreads, [&](int i) {
    for (int j = 0; j < 3 * kKeys; ++j) {
      const Key key = make_key("spec " + std::to_string((i * 5 + j) % kKeys));
      const Lookup found = store.get(key, j % 3 == 0 ? Store::Build() : builder(key));
      if (found.entry && found.entry->key != key) ++wrong;
    }
  });
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(store.counters().builds, static_cast<std::uint64_t>(kKeys));
  EXPECT_EQ(testing::files_under(directory.path()), static_cast<std::size_t>(kKeys));
}

TEST(Store, AFailedBuildReachesEveryWaiterAndIsForgotten) {
  const TemporaryDirectory directory;
  Store store({directory.path(), nullptr});
  const Key key = make_key();
  constexpr int kThreads = 8;
  std::atomic<int> started{0};
  std::atomic<int> builds{0};
  std::atomic<int> told{0};
  const Store::Build failing = [&]() -> Entry {
    ++builds;
    while (started < kThreads) std::this_thread::yield();
    std::this_thread::sleep_for(500ms);  // for the last one to get from there into its wait
    throw std::domain_error("no such instruction");
  };
  testing::run_in_threads(kThreads, [&](int) {
    ++started;
    try {
      store.get(key, failing);
    } catch (const std::domain_error& error) {
      if (std::string(error.what()) == "no such instruction") ++told;
    }
  });
  EXPECT_EQ(told, kThreads);
  EXPECT_EQ(builds, 1);
  EXPECT_EQ(store.counters().builds, 0U);
  EXPECT_EQ(testing::files_under(directory.path()), 0U);
  EXPECT_EQ(store.get(key, builder(key)).origin, Origin::built);
}

TEST(Store, ACopiedDirectoryKeepsEveryHit) {
  const TemporaryDirectory directory;
  {
    Store store({directory / "here", nullptr});
    for (int i = 0; i < 20; ++i) {
      const Key key = make_key("spec " + std::to_string(i));
      store.get(key, builder(key));
    }
  }
  std::filesystem::create_directory(directory / "else");
  std::filesystem::copy(directory / "here", directory / "else" / "where", std::filesystem::copy_options::recursive);
  std::filesystem::remove_all(directory / "here");
  Store copy({directory / "else" / "where", nullptr});
  for (int i = 0; i < 20; ++i) {
    const Key key = make_key("spec " + std::to_string(i));
    const Lookup found = copy.get(key, no_build());
    EXPECT_EQ(found.origin, Origin::disk);
    testing::expect_same(*found.entry, make_entry(key));
  }
  EXPECT_EQ(copy.counters().disk_hits, 20U);
}

TEST(Store, SharedByDirectoryWhateverItsSpelling) {
  if (!testing::have_links()) GTEST_SKIP() << "no symbolic links can be made here";
  const TemporaryDirectory directory;
  std::filesystem::create_directory(directory / "real");
  std::filesystem::create_directory_symlink("real", directory / "link");
  const std::shared_ptr<Store> store = Store::shared({directory / "real" / "cache", nullptr});
  EXPECT_EQ(store, Store::shared({directory / "real" / "cache" / "", nullptr}));
  EXPECT_EQ(store, Store::shared({directory / "real" / "." / "x" / ".." / "cache", nullptr}));
  EXPECT_EQ(store, Store::shared({directory / "link" / "cache", nullptr}));
  EXPECT_NE(store, Store::shared({directory / "real" / "other", nullptr}));
  EXPECT_NE(store, Store::shared({}));
  const std::shared_ptr<Store> memory = Store::shared({});
  EXPECT_EQ(memory, Store::shared({}));

  const Key key = make_key();
  std::weak_ptr<Store> gone = Store::shared({directory / "real" / "other", nullptr});
  EXPECT_TRUE(gone.expired());
  store->get(key, builder(key));
  EXPECT_EQ(Store::shared({directory / "link" / "cache", nullptr})->get(key, no_build()).origin, Origin::memory);
}

TEST(Store, SharedMayBeAskedByItsOwnWarning) {
  const TemporaryDirectory directory;
  int told = 0;
  const StoreOptions options{"relative/path", [&told](const std::string&) {
                               ++told;
                               Store::shared({"relative/path", nullptr});
                             }};
  const std::shared_ptr<Store> store = Store::shared(options);
  EXPECT_EQ(told, 1);
  EXPECT_EQ(store, Store::shared(options));
  EXPECT_EQ(told, 1);
}

TEST(ListEntries, SortedAndTrustedOnly) {
  const TemporaryDirectory directory;
  Store store({directory.path(), nullptr});
  std::vector<Key> keys = {make_key("b"), make_key("a"), make_key("c")};
  keys[2].target = "sm_80";
  for (const Key& key : keys) store.get(key, builder(key));
  int damaged = -1;
  std::vector<Entry> entries = list_entries(directory.path(), &damaged);
  EXPECT_EQ(damaged, 0);
  ASSERT_EQ(entries.size(), 3U);
  testing::expect_same(entries[0], make_entry(keys[2]));
  testing::expect_same(entries[1], make_entry(keys[1]));
  testing::expect_same(entries[2], make_entry(keys[0]));

  const auto truncated = testing::entry_path(directory.path(), keys[0]);
  std::filesystem::resize_file(truncated, 100);
  const auto misnamed = testing::entry_path(directory.path(), keys[1]);
  std::filesystem::rename(misnamed, misnamed.parent_path() / (std::string(32, '0') + ".fac"));
  entries = list_entries(directory.path(), &damaged);
  EXPECT_EQ(damaged, 2);
  ASSERT_EQ(entries.size(), 1U);
  EXPECT_EQ(entries[0].key, keys[2]);
  EXPECT_TRUE(list_entries(directory / "missing", &damaged).empty());
  EXPECT_EQ(damaged, 0);
}

/// Sets or unsets a variable for a scope.
class Environment {
 public:
  Environment(std::string name, const char* value) : name_(std::move(name)) {
    if (const char* before = std::getenv(name_.c_str())) before_ = before;
    set(value);
  }
  ~Environment() { set(before_ ? before_->c_str() : nullptr); }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;

 private:
  void set(const char* value) {
    if (value == nullptr) {
      unsetenv(name_.c_str());
    } else {
      setenv(name_.c_str(), value, 1);
    }
  }
  std::string name_;
  std::optional<std::string> before_;
};

TEST(DefaultDirectory, FirstAbsolutePathWins) {
  struct Case {
    const char* own;
    const char* caches;
    const char* home;
    const char* expected;
  };
#if defined(_WIN32)
  constexpr const char* kCaches = "LOCALAPPDATA";
  constexpr const char* kHome = "USERPROFILE";
  constexpr Case kCases[] = {
      {"C:/own", "C:/caches", "C:/home", "C:/own"},
      {nullptr, "C:/caches", "C:/home", "C:/caches/fa/cache"},
      {nullptr, nullptr, "C:/home", "C:/home/AppData/Local/fa/cache"},
      {nullptr, nullptr, nullptr, ""},
      {"own", "C:/caches", "C:/home", "C:/caches/fa/cache"},
      {"/own", "C:own", "C:/home", "C:/home/AppData/Local/fa/cache"},
  };
#else
  constexpr const char* kCaches = "XDG_CACHE_HOME";
  constexpr const char* kHome = "HOME";
  constexpr Case kCases[] = {
      {"/own", "/caches", "/home", "/own"},
      {nullptr, "/caches", "/home", "/caches/fa"},
      {nullptr, nullptr, "/home", "/home/.cache/fa"},
      {nullptr, nullptr, nullptr, ""},
      {"own", "/caches", "/home", "/caches/fa"},
      {"", "caches", "/home", "/home/.cache/fa"},
      {"./own", "caches", "home", ""},
      {"~/own", "", "", ""},
  };
#endif
  for (const Case& item : kCases) {
    const Environment own("FA_CACHE_DIR", item.own);
    const Environment caches(kCaches, item.caches);
    const Environment home(kHome, item.home);
    EXPECT_EQ(default_directory(), item.expected);
  }
}

TEST(DefaultDirectory, WithoutAHomeTheStoreStillWorks) {
  const Environment own("FA_CACHE_DIR", nullptr);
  const Environment caches("XDG_CACHE_HOME", nullptr);
  const Environment home("HOME", nullptr);
  const Environment local("LOCALAPPDATA", nullptr);
  const Environment profile("USERPROFILE", nullptr);
  Store store({default_directory(), nullptr});
  const Key key = make_key();
  EXPECT_EQ(store.get(key, builder(key)).origin, Origin::built);
  EXPECT_EQ(store.get(key, no_build()).origin, Origin::memory);
}

}  // namespace
}  // namespace fa::cache
