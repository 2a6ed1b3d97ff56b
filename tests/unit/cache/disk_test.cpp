// What a store makes of directories and files that are not as it would have made them.

#include "cache/disk.hpp"

#include <chrono>

#include "cache/entry.hpp"
#include "expectations.hpp"
#include "support.hpp"

namespace fa::cache {
namespace {

using testing::builder;
using testing::entry_path;
using testing::expect_healed;
using testing::expect_memory_only;
using testing::Listener;
using testing::make_entry;
using testing::make_key;
using testing::no_build;
using testing::TemporaryDirectory;
namespace fs = std::filesystem;

TEST(Directory, UnusableOnesCostOneWarning) {
  const TemporaryDirectory directory;
  testing::write_bytes(directory / "file", {std::byte{1}});
  expect_memory_only("relative/cache", "absolute");
  expect_memory_only(directory / "file", "not a directory");
#if defined(_WIN32)  // which does not say what is in the way
  expect_memory_only(directory / "file" / "cache", "No such file");
#else
  expect_memory_only(directory / "file" / "cache", "not a directory");
  expect_memory_only("/proc/fa/cache", "No such file");
#endif
  EXPECT_FALSE(fs::exists("relative"));
}

TEST(Directory, SymbolicLinkIsRefusedAsRootAndServesAsParent) {
  if (!testing::have_links()) GTEST_SKIP() << "no symbolic links can be made here";
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
  if (!testing::have_links()) GTEST_SKIP() << "no symbolic links can be made here";
  const TemporaryDirectory directory;
  const Key key = make_key();
  fs::create_directories(directory / "cache" / testing::version_folder());
  fs::permissions(directory / "cache", fs::perms::owner_all);
  fs::permissions(directory / "cache" / testing::version_folder(), fs::perms::owner_all);
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
  testing::let_others_write(directory / "cache" / testing::version_folder() / "sm_90a");
  Store third({directory / "cache", nullptr});
  EXPECT_EQ(third.get(key, builder(key)).origin, Origin::built);
}

TEST(Directory, WritableByEverybodyIsRefused) {
  const TemporaryDirectory directory;
  testing::let_others_write(directory.path());
  expect_memory_only(directory.path(), "written by other users");
  EXPECT_TRUE(fs::is_empty(directory.path()));
}

TEST(Directory, EverythingMadeIsPrivate) {
  const TemporaryDirectory directory;
  const Key key = make_key();
  Store({directory / "a" / "b", nullptr}).get(key, builder(key));
  int files = 0;
  for (const auto& item : fs::recursive_directory_iterator(directory.path())) {
    EXPECT_TRUE(testing::is_private(item.path())) << item.path();
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
  const TemporaryDirectory directory;
  const std::size_t before = testing::open_handles();
  Store store({directory.path(), nullptr});
  for (int i = 0; i < 10; ++i) {
    const Key key = make_key("spec " + std::to_string(i));
    store.get(key, builder(key));
    if (i % 2 == 0) fs::resize_file(entry_path(directory.path(), key), 10);
    Store({directory.path(), nullptr}).get(key, builder(key));
  }
  list_entries(directory.path());
  EXPECT_EQ(testing::open_handles(), before);
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
  expect_healed("writable by others", [](const fs::path& file) { testing::let_others_write(file); });
  if (!testing::have_links()) return;
  expect_healed("symbolic link", [](const fs::path& file) {
    fs::rename(file, file.string() + ".elsewhere");
    fs::create_symlink(file.string() + ".elsewhere", file);
  });
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

TEST(Warnings, AThrowingCallbackDoesNotReachTheCaller) {
  Store store({"relative", [](const std::string&) { throw std::runtime_error("not now"); }});
  const Key key = make_key();
  EXPECT_EQ(store.get(key, builder(key)).origin, Origin::built);
}

}  // namespace
}  // namespace fa::cache
