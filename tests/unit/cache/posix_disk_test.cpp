// Owners, permission bits and limits of processes, where the system has them.

#include <sys/resource.h>
#include <sys/time.h>

#include <optional>

#include "cache/disk.hpp"
#include "cache/entry.hpp"
#include "expectations.hpp"
#include "support.hpp"

namespace fa::cache {
namespace {

using testing::builder;
using testing::expect_healed;
using testing::expect_memory_only;
using testing::Listener;
using testing::make_entry;
using testing::make_key;
using testing::no_build;
using testing::TemporaryDirectory;
namespace fs = std::filesystem;

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

TEST(ReadEntry, ReadsWhatIsOursAlone) {
  const TemporaryDirectory directory;
  const auto file = directory / "entry.fac";
  const Entry entry = make_entry(make_key());
  testing::write_bytes(file, encode_entry(entry));
  ASSERT_EQ(chmod(file.c_str(), 0644), 0);
  std::string problem;
  const std::optional<Entry> back = read_entry(file, &problem);
  ASSERT_TRUE(back) << problem;
  testing::expect_same(*back, entry);

  for (const mode_t mode : {mode_t{0620}, mode_t{0602}, mode_t{0666}}) {
    ASSERT_EQ(chmod(file.c_str(), mode), 0);
    EXPECT_FALSE(read_entry(file, &problem)) << mode;
    EXPECT_NE(problem.find("written by other users"), std::string::npos) << problem;
  }
  ASSERT_EQ(chmod(file.c_str(), 0600), 0);
  EXPECT_TRUE(read_entry(file));
}

TEST(ReadEntry, RefusesWhatIsNoFileOfOurs) {
  const TemporaryDirectory directory;
  const Entry entry = make_entry(make_key());
  testing::write_bytes(directory / "real", encode_entry(entry));
  ASSERT_EQ(chmod((directory / "real").c_str(), 0600), 0);
  std::filesystem::create_symlink("real", directory / "link");
  ASSERT_EQ(mkfifo((directory / "fifo").c_str(), 0600), 0);
  EXPECT_TRUE(read_entry(directory / "real"));
  for (const char* name : {"link", "fifo", "", "missing"}) {
    std::string problem;
    EXPECT_FALSE(read_entry(directory / name, &problem)) << name;
    EXPECT_FALSE(problem.empty()) << name;
  }
  if (geteuid() == 0) {
    ASSERT_EQ(chown((directory / "real").c_str(), testing::kPlainUser, testing::kPlainUser), 0);
    EXPECT_FALSE(read_entry(directory / "real"));
  } else {
    std::string problem;
    EXPECT_FALSE(read_entry("/etc/passwd", &problem));
    EXPECT_NE(problem.find("another user"), std::string::npos) << problem;
  }
}

TEST(Damage, OfWhatIsNoFileOfOursIsCountedAndReplaced) {
  expect_healed("fifo", [](const fs::path& file) {
    fs::remove(file);
    ASSERT_EQ(mkfifo(file.c_str(), 0600), 0);
  });
  if (geteuid() == 0) {
    expect_healed("of another user",
                  [](const fs::path& file) { ASSERT_EQ(chown(file.c_str(), testing::kPlainUser, 0), 0); });
  }
}

}  // namespace
}  // namespace fa::cache
