// What a store makes of directories and files that are not as it would have made them.

#include "cache/disk.hpp"

#include <sys/resource.h>
#include <sys/time.h>

#include <chrono>

#include "cache/entry.hpp"
#include "support.hpp"

namespace fa::cache {
namespace {

using testing::builder;
using testing::entry_path;
using testing::Listener;
using testing::make_entry;
using testing::make_key;
using testing::no_build;
using testing::TemporaryDirectory;
namespace fs = std::filesystem;

/// A store at `directory` builds, remembers, writes nothing, and says so once.
void expect_memory_only(const fs::path& directory, const std::string& reason) {
  SCOPED_TRACE(directory);
  Listener listener;
  Store store({directory, listener.callback()});
  EXPECT_TRUE(store.directory().empty());
  for (int i = 0; i < 3; ++i) {
    const Key key = make_key("spec " + std::to_string(i));
    EXPECT_EQ(store.get(key, builder(key)).origin, Origin::built);
    EXPECT_EQ(store.get(key, no_build()).origin, Origin::memory);
  }
  ASSERT_EQ(listener.messages().size(), 1U);
  EXPECT_NE(listener.messages()[0].find(reason), std::string::npos) << listener.messages()[0];
}

TEST(Directory, UnusableOnesCostOneWarning) {
  const TemporaryDirectory directory;
  testing::write_bytes(directory / "file", {std::byte{1}});
  expect_memory_only("relative/cache", "absolute");
  expect_memory_only(directory / "file", "not a directory");
  expect_memory_only(directory / "file" / "cache", "not a directory");
  expect_memory_only("/proc/fa/cache", "No such file");
  EXPECT_FALSE(fs::exists("relative"));
}

TEST(Directory, WritableByOthersIsRefused) {
  const TemporaryDirectory directory;
  for (const mode_t mode : {mode_t{0770}, mode_t{0702}, mode_t{01777}, mode_t{0720}}) {
    ASSERT_EQ(chmod(directory.path().c_str(), mode), 0);
    expect_memory_only(directory.path(), "written by other users");
    EXPECT_TRUE(fs::is_empty(directory.path()));
  }
  ASSERT_EQ(chmod(directory.path().c_str(), 0755), 0);
  EXPECT_EQ(Store({directory.path(), nullptr}).directory(), directory.path());
}

TEST(Directory, OfAnotherUserIsRefused) {
  if (geteuid() != 0) {
    expect_memory_only("/", "another user");
    return;
  }
  const TemporaryDirectory directory;
  ASSERT_EQ(chown(directory.path().c_str(), testing::kPlainUser, testing::kPlainUser), 0);
  expect_memory_only(directory.path(), "another user");
  EXPECT_TRUE(fs::is_empty(directory.path()));
}

TEST(Directory, SymbolicLinkIsRefusedAsRootAndServesAsParent) {
  const TemporaryDirectory directory;
  fs::create_directory(directory / "real");
  fs::create_directory_symlink("real", directory / "link");
  expect_memory_only(directory / "link", "symbolic link");
  expect_memory_only((directory / "link").string() + "/", "symbolic link");
  expect_memory_only((directory / "link").string() + "/.", "symbolic link");
  EXPECT_TRUE(fs::is_empty(directory / "real"));
  Store store({directory / "link" / "cache", nullptr});
  const Key key = make_key();
  store.get(key, builder(key));
  EXPECT_TRUE(fs::exists(entry_path(directory / "real" / "cache", key)));
}

TEST(Directory, NoFolderInsideIsFollowedOrTrustedBlindly) {
  const TemporaryDirectory directory;
  const Key key = make_key();
  fs::create_directories(directory / "cache" / testing::version_folder());
  ASSERT_EQ(chmod((directory / "cache").c_str(), 0700), 0);
  ASSERT_EQ(chmod((directory / "cache" / testing::version_folder()).c_str(), 0700), 0);
  fs::create_directory(directory / "outside");
  fs::create_directory_symlink(directory / "outside", directory / "cache" / testing::version_folder() / "sm_90a");
  Listener listener;
  Store store({directory / "cache", listener.callback()});
  EXPECT_EQ(store.get(key, builder(key)).origin, Origin::built);
  EXPECT_TRUE(fs::is_empty(directory / "outside"));
  EXPECT_EQ(store.counters().publish_failures, 1U);
  EXPECT_EQ(listener.messages().size(), 1U);

  fs::remove(directory / "cache" / testing::version_folder() / "sm_90a");
  Store second({directory / "cache", nullptr});
  second.get(key, builder(key));
  ASSERT_EQ(chmod((directory / "cache" / testing::version_folder() / "sm_90a").c_str(), 0777), 0);
  Store third({directory / "cache", nullptr});
  EXPECT_EQ(third.get(key, builder(key)).origin, Origin::built);
}

TEST(Directory, EverythingMadeIsPrivateWhateverTheUmask) {
  const TemporaryDirectory directory;
  const mode_t before = umask(0);
  {
    const Key key = make_key();
    Store store({directory / "a" / "b", nullptr});
    store.get(key, builder(key));
  }
  umask(before);
  int files = 0;
  for (const auto& item : fs::recursive_directory_iterator(directory.path())) {
    EXPECT_EQ(testing::mode_of(item.path()), item.is_directory() ? 0700U : 0600U) << item.path();
    files += item.is_directory() ? 0 : 1;
  }
  EXPECT_EQ(files, 1);
}

TEST(Directory, ATargetCannotLeadOutOfIt) {
  const TemporaryDirectory directory;
  Store store({directory / "cache", nullptr});
  std::vector<Key> keys;
  for (const char* target : {"../../../out", "/tmp", "", ".", "..", "tmp", "locks", "sm_90a/x"}) {
    keys.push_back(make_key());
    keys.back().target = target;
    store.get(keys.back(), builder(keys.back()));
  }
  EXPECT_EQ(testing::files_under(directory / "cache"), keys.size());
  EXPECT_EQ(testing::files_under(directory.path()), keys.size());
  EXPECT_EQ(store.counters().publish_failures, 0U);
  EXPECT_EQ(list_entries(directory / "cache").size(), keys.size());
  Store again({directory / "cache", nullptr});
  for (const Key& key : keys) EXPECT_EQ(again.get(key, no_build()).origin, Origin::disk) << key.target;
}

TEST(Directory, ReadOnlyStillServesWhatItHolds) {
  const TemporaryDirectory directory;
  const Key old = make_key("old");
  Store({directory.path(), nullptr}).get(old, builder(old));
  for (const auto& item : fs::recursive_directory_iterator(directory.path())) {
    fs::permissions(item.path(), item.is_directory() ? fs::perms{0500} : fs::perms{0400});
  }
  fs::permissions(directory.path(), fs::perms{0500});
  const int status = testing::run_as_plain_user(directory.path(), [&] {
    Listener listener;
    Store store({directory.path(), listener.callback()});
    if (store.get(old, no_build()).origin != Origin::disk) return 1;
    for (int i = 0; i < 3; ++i) {
      const Key key = make_key("new " + std::to_string(i));
      if (store.get(key, builder(key)).origin != Origin::built) return 2;
      if (store.get(key, no_build()).origin != Origin::memory) return 3;
    }
    if (store.counters().publish_failures != 3) return 4;
    return listener.messages().size() == 1 ? 0 : 5;
  });
  EXPECT_EQ(status, 0);
  for (const auto& item : fs::recursive_directory_iterator(directory.path())) {
    if (item.is_directory()) fs::permissions(item.path(), fs::perms{0700});
  }
  fs::permissions(directory.path(), fs::perms{0700});
}

TEST(Directory, DeletedUnderARunningStoreComesBack) {
  const TemporaryDirectory directory;
  Listener listener;
  Store store({directory / "cache", listener.callback()});
  const Key first = make_key("first");
  const Key second = make_key("second");
  store.get(first, builder(first));
  fs::remove_all(directory / "cache");
  EXPECT_EQ(store.get(first, no_build()).origin, Origin::memory);
  EXPECT_EQ(store.get(second, builder(second)).origin, Origin::built);
  EXPECT_TRUE(fs::exists(entry_path(directory / "cache", second)));
  EXPECT_TRUE(listener.messages().empty());
}

TEST(Directory, StaleTemporaryFilesGo) {
  const TemporaryDirectory directory;
  const Key key = make_key();
  Store({directory.path(), nullptr}).get(key, builder(key));
  const fs::path stale = directory / testing::version_folder() / "tmp" / "stale";
  const fs::path fresh = directory / testing::version_folder() / "tmp" / "fresh";
  testing::write_bytes(stale, {std::byte{1}});
  testing::write_bytes(fresh, {std::byte{1}});
  fs::last_write_time(stale, fs::file_time_type::clock::now() - std::chrono::minutes(61));
  fs::last_write_time(fresh, fs::file_time_type::clock::now() - std::chrono::minutes(59));
  const Store store({directory.path(), nullptr});
  EXPECT_FALSE(fs::exists(stale));
  EXPECT_TRUE(fs::exists(fresh));
}

TEST(Directory, NoDescriptorStaysOpen) {
  const auto open_now = [] { return std::distance(fs::directory_iterator("/proc/self/fd"), fs::directory_iterator()); };
  const TemporaryDirectory directory;
  const auto before = open_now();
  Store store({directory.path(), nullptr});
  for (int i = 0; i < 10; ++i) {
    const Key key = make_key("spec " + std::to_string(i));
    store.get(key, builder(key));
    if (i % 2 == 0) fs::resize_file(entry_path(directory.path(), key), 10);
    Store({directory.path(), nullptr}).get(key, builder(key));
  }
  list_entries(directory.path());
  EXPECT_EQ(open_now(), before);
}

/// Spoils the stored entry of a key; the next store must count it, say so once, rebuild and heal the file.
void expect_healed(const std::string& what, const std::function<void(const fs::path&)>& spoil) {
  SCOPED_TRACE(what);
  const TemporaryDirectory directory;
  const Key key = make_key();
  Store({directory.path(), nullptr}).get(key, builder(key));
  const fs::path file = entry_path(directory.path(), key);
  spoil(file);

  Listener listener;
  Store store({directory.path(), listener.callback()});
  EXPECT_EQ(store.get(key, nullptr).entry, nullptr);
  EXPECT_EQ(store.counters().damaged, 1U);
  const Lookup built = store.get(key, builder(key));
  EXPECT_EQ(built.origin, Origin::built);
  testing::expect_same(*built.entry, make_entry(key));
  EXPECT_EQ(store.counters().damaged, 2U);
  EXPECT_EQ(store.counters().publish_failures, 0U);
  EXPECT_EQ(listener.messages().size(), 1U);

  Store after({directory.path(), nullptr});
  EXPECT_EQ(after.get(key, no_build()).origin, Origin::disk);
  EXPECT_EQ(after.counters().damaged, 0U);
  EXPECT_EQ(testing::mode_of(file), 0600U);
}

TEST(Damage, IsCountedAndReplaced) {
  expect_healed("truncated", [](const fs::path& file) { fs::resize_file(file, fs::file_size(file) - 1); });
  expect_healed("empty", [](const fs::path& file) { fs::resize_file(file, 0); });
  expect_healed("bit flip in the cubin", [](const fs::path& file) {
    std::vector<std::byte> bytes = testing::read_bytes(file);
    bytes[bytes.size() - 100] ^= std::byte{4};
    testing::write_bytes(file, bytes);
  });
  expect_healed("wrong key", [](const fs::path& file) {
    testing::write_bytes(file, encode_entry(make_entry(make_key("another spec"))));
  });
  expect_healed("sparse and huge", [](const fs::path& file) { fs::resize_file(file, kMaxEntryBytes + 1); });
  expect_healed("writable by others", [](const fs::path& file) { fs::permissions(file, fs::perms{0666}); });
  expect_healed("symbolic link", [](const fs::path& file) {
    fs::rename(file, file.string() + ".elsewhere");
    fs::create_symlink(file.string() + ".elsewhere", file);
  });
  expect_healed("fifo", [](const fs::path& file) {
    fs::remove(file);
    ASSERT_EQ(mkfifo(file.c_str(), 0600), 0);
  });
  if (geteuid() == 0) {
    expect_healed("of another user",
                  [](const fs::path& file) { ASSERT_EQ(chown(file.c_str(), testing::kPlainUser, 0), 0); });
  }
}

TEST(Damage, ADirectoryInPlaceOfTheEntryOnlyCostsSpeed) {
  const TemporaryDirectory directory;
  const Key key = make_key();
  Store({directory.path(), nullptr}).get(key, builder(key));
  fs::remove(entry_path(directory.path(), key));
  fs::create_directory(entry_path(directory.path(), key));
  Listener listener;
  Store store({directory.path(), listener.callback()});
  EXPECT_EQ(store.get(key, builder(key)).origin, Origin::built);
  EXPECT_EQ(store.counters().publish_failures, 1U);
  EXPECT_EQ(listener.messages().size(), 2U);  // the damage, and the refused file
}

TEST(Limits, AFileSizeLimitEndsNoProcess) {
  const TemporaryDirectory directory;
  const int status = testing::run_in_child([&] {
    const rlimit limit{200, 200};
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0) return 1;
    Listener listener;
    Store store({directory.path(), listener.callback()});
    const Key key = make_key();
    if (store.get(key, builder(key)).origin != Origin::built) return 2;
    if (store.get(key, no_build()).origin != Origin::memory) return 3;
    return store.counters().publish_failures == 1 && listener.messages().size() == 1 ? 0 : 4;
  });
  EXPECT_EQ(status, 0);
  EXPECT_EQ(testing::files_under(directory.path()), 0U);
}

TEST(Limits, NoFreeDescriptorIsNoDamage) {
  const TemporaryDirectory directory;
  const Key key = make_key();
  Store({directory.path(), nullptr}).get(key, builder(key));
  const int status = testing::run_in_child([&] {
    Store store({directory.path(), nullptr});
    const rlimit limit{0, 0};
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0) return 1;
    if (store.get(key, builder(key)).origin != Origin::built) return 2;
    return store.counters().damaged == 0 ? 0 : 3;
  });
  EXPECT_EQ(status, 0);
}

TEST(Warnings, AThrowingCallbackDoesNotReachTheCaller) {
  Store store({"relative", [](const std::string&) { throw std::runtime_error("not now"); }});
  const Key key = make_key();
  EXPECT_EQ(store.get(key, builder(key)).origin, Origin::built);
}

}  // namespace
}  // namespace fa::cache
