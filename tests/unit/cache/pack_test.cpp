// Packs: written once, trusted only as far as their digests reach.

#include "cache/pack.hpp"

#include <algorithm>
#include <fstream>
#include <random>
#include <stdexcept>

#include "cache/digest.hpp"
#include "cache/sha256.hpp"
#include "support.hpp"

namespace fa::cache {
namespace {

using testing::builder;
using testing::Listener;
using testing::make_entry;
using testing::make_key;
using testing::no_build;
using testing::TemporaryDirectory;
namespace fs = std::filesystem;
using Bytes = std::vector<std::byte>;

constexpr int kEntries = 12;

Key numbered(int i) {
  return make_key("spec " + std::to_string(i));
}

std::vector<Entry> make_entries(int count = kEntries, std::size_t cubin_bytes = 400) {
  std::vector<Entry> entries;
  for (int i = 0; i < count; ++i) entries.push_back(make_entry(numbered(i), cubin_bytes + static_cast<std::size_t>(i)));
  return entries;
}

void write(const fs::path& file, const std::vector<Entry>& entries) {
  std::string problem;
  ASSERT_TRUE(write_pack(file, entries, &problem)) << problem;
}

StoreOptions with_pack(const fs::path& pack, const fs::path& directory = {}) {
  StoreOptions options;
  options.packs = {pack};
  options.directory = directory;
  return options;
}

TEST(Pack, ServesWhatWasPutIn) {
  const TemporaryDirectory directory;
  const fs::path file = directory / "kernels.fapack";
  write(file, make_entries());
  std::string problem;
  const std::optional<Pack> pack = Pack::open(file, &problem);
  ASSERT_TRUE(pack) << problem;
  EXPECT_EQ(pack->size(), static_cast<std::size_t>(kEntries));
  EXPECT_EQ(pack->file_bytes(), fs::file_size(file));
  for (Entry expected : make_entries()) {
    const Pack::Found found = pack->load(expected.key);
    ASSERT_TRUE(found.entry) << found.damage;
    expected.compile_ms = 0;
    testing::expect_same(*found.entry, expected);
  }
  const Pack::Found missing = pack->load(make_key("another"));
  EXPECT_FALSE(missing.entry);
  EXPECT_TRUE(missing.damage.empty());
}

TEST(Pack, EqualKernelsGiveEqualBytes) {
  const TemporaryDirectory directory;
  std::vector<Entry> entries = make_entries();
  write(directory / "a", entries);
  std::ranges::reverse(entries);
  entries.push_back(entries.front());
  for (Entry& entry : entries) entry.compile_ms += 17;
  write(directory / "b", entries);
  EXPECT_EQ(testing::read_bytes(directory / "a"), testing::read_bytes(directory / "b"));
  EXPECT_EQ(testing::files_under(directory.path()), 2U);
}

TEST(Pack, ComesBeforeTheDirectoryAndIsNeverWritten) {
  const TemporaryDirectory directory;
  const fs::path file = directory / "kernels.fapack";
  write(file, make_entries());
  const Bytes before = testing::read_bytes(file);
  {
    Store store({directory / "cache", nullptr});
    for (const int i : {0, 100}) store.get(numbered(i), builder(numbered(i)));
  }
  Store store(with_pack(file, directory / "cache"));
  EXPECT_EQ(store.get(numbered(0), no_build()).origin, Origin::pack);
  EXPECT_EQ(store.get(numbered(0), no_build()).origin, Origin::memory);
  EXPECT_EQ(store.get(numbered(1), nullptr).origin, Origin::pack);
  EXPECT_EQ(store.get(numbered(100), no_build()).origin, Origin::disk);
  EXPECT_EQ(store.get(numbered(200), builder(numbered(200))).origin, Origin::built);
  const Counters counters = store.counters();
  EXPECT_EQ(counters.pack_hits, 2U);
  EXPECT_EQ(counters.disk_hits, 1U);
  EXPECT_EQ(counters.memory_hits, 1U);
  EXPECT_EQ(counters.builds, 1U);
  EXPECT_EQ(testing::read_bytes(file), before);
  EXPECT_EQ(testing::files_under(directory / "cache"), 3U);
}

TEST(Pack, TheFirstOfSeveralServes) {
  const TemporaryDirectory directory;
  std::vector<Entry> entries = make_entries(2);
  write(directory / "first", {entries[0]});
  entries[0].registers = 99;
  write(directory / "second", entries);
  StoreOptions options;
  options.packs = {directory / "first", directory / "second"};
  Store store(options);
  EXPECT_EQ(store.get(numbered(0), no_build()).entry->registers, 168);
  EXPECT_EQ(store.get(numbered(1), no_build()).origin, Origin::pack);
}

/// Keys that serve in the place of numbered(0), and how often they were asked for.
struct Substitutes {
  std::vector<Key> keys;
  int asked = 0;
  Store::Substitutes function() {
    return [this] {
      ++asked;
      return keys;
    };
  }
};

TEST(Pack, SubstitutesServeBehindTheKeyAndBeforeABuild) {
  const TemporaryDirectory directory;
  write(directory / "pack", make_entries(4));
  const Key missing = make_key("missing");
  Substitutes substitutes{{numbered(100), numbered(2), numbered(1)}};
  {
    Store store(with_pack(directory / "pack", directory / "cache"));
    EXPECT_EQ(store.get(numbered(0), no_build(), substitutes.function()).entry->key, numbered(0));
    EXPECT_EQ(substitutes.asked, 0);
    const Lookup found = store.get(missing, no_build(), substitutes.function());
    EXPECT_EQ(found.origin, Origin::pack);
    EXPECT_EQ(found.entry->key, numbered(2));
    EXPECT_EQ(store.get(missing, nullptr).entry, found.entry) << "memory keeps it";
    EXPECT_EQ(store.get(numbered(2), no_build()).origin, Origin::pack) << "under the key that was asked for";
    EXPECT_EQ(substitutes.asked, 1);
    EXPECT_EQ(store.counters().pack_hits, 3U);
    EXPECT_EQ(store.counters().builds, 0U);
    EXPECT_EQ(testing::files_under(directory / "cache"), 0U);
    store.get(numbered(100), builder(numbered(100)));
    store.get(make_key("own"), builder(make_key("own")));
  }
  Store store(with_pack(directory / "pack", directory / "cache"));
  EXPECT_EQ(store.get(make_key("own"), no_build(), substitutes.function()).origin, Origin::disk);
  EXPECT_EQ(store.get(missing, no_build(), substitutes.function()).entry->key, numbered(2)) << "not of the directory";
  substitutes.keys = {numbered(100)};
  EXPECT_EQ(store.get(make_key("built"), builder(make_key("built")), substitutes.function()).origin, Origin::built);
}

TEST(Pack, ASubstituteHasToBeAcceptedAndWhole) {
  const TemporaryDirectory directory;
  std::vector<Entry> entries = make_entries(2);
  entries[0].min_driver = 13020;
  write(directory / "pack", entries);
  StoreOptions options = with_pack(directory / "pack");
  options.accept.driver = 13000;
  const Key missing = make_key("missing");
  Substitutes substitutes{{numbered(0)}};
  Store store(options);
  const Lookup refused = store.get(missing, nullptr, substitutes.function());
  EXPECT_EQ(refused.entry, nullptr);
  EXPECT_FALSE(refused.refused.empty());
  substitutes.keys.push_back(numbered(1));
  EXPECT_EQ(store.get(missing, no_build(), substitutes.function()).entry->key, numbered(1));

  Store without({{}, nullptr});
  substitutes.asked = 0;
  EXPECT_EQ(without.get(missing, nullptr, substitutes.function()).entry, nullptr);
  EXPECT_EQ(substitutes.asked, 0) << "there is no pack";
  const Store::Substitutes failing = []() -> std::vector<Key> { throw std::runtime_error("no keys"); };
  EXPECT_THROW(store.get(make_key("other"), nullptr, failing), std::runtime_error);
  EXPECT_EQ(store.get(make_key("other"), builder(make_key("other"))).origin, Origin::built) << "the next call tries";
}

TEST(Pack, ReadableByOthersAndReachedThroughALink) {
  const TemporaryDirectory directory;
  write(directory / "real", make_entries(1));
  if (!testing::have_links()) GTEST_SKIP() << "no symbolic links can be made here";
  fs::permissions(directory / "real", fs::perms{0444});
  fs::create_symlink("real", directory / "link");
  Store store(with_pack(directory / "link"));
  EXPECT_EQ(store.get(numbered(0), no_build()).origin, Origin::pack);
}

TEST(Pack, ARelativePathSurvivesAChangeOfDirectory) {
  const TemporaryDirectory directory;
  write(directory / "pack", make_entries(1));
  const fs::path before = fs::current_path();
  fs::current_path(directory.path());
  Store store(with_pack("pack"));
  fs::current_path(before);
  EXPECT_EQ(store.get(numbered(0), no_build()).origin, Origin::pack);
}

TEST(Pack, OneThatCannotBeTrustedCostsOneWarning) {
  const TemporaryDirectory directory;
  const fs::path good = directory / "good";
  write(good, make_entries(1));
  write(directory / "open", make_entries(1));
  testing::let_others_write(directory / "open");
  fs::create_directory(directory / "folder");
  testing::write_bytes(directory / "empty", {});
  testing::write_bytes(directory / "text", Bytes(100, std::byte{'x'}));
  std::vector<fs::path> bad = {directory / "open", directory / "folder", directory / "empty", directory / "text",
                               directory / "missing"};
#if !defined(_WIN32)
  ASSERT_EQ(mkfifo((directory / "fifo").c_str(), 0600), 0);
  bad.push_back(directory / "fifo");
  if (geteuid() == 0) {
    write(directory / "foreign", make_entries(1));
    ASSERT_EQ(chown((directory / "foreign").c_str(), testing::kPlainUser, testing::kPlainUser), 0);
    bad.push_back(directory / "foreign");
  }
#endif
  Listener listener;
  StoreOptions options;
  options.packs = bad;
  options.packs.push_back(good);
  options.warn = listener.callback();
  Store store(options);
  EXPECT_EQ(store.pack_problems().size(), bad.size());
  ASSERT_EQ(listener.messages().size(), 1U);
  for (const fs::path& file : bad) EXPECT_NE(listener.messages()[0].find(file.string()), std::string::npos) << file;
  EXPECT_EQ(store.get(numbered(0), no_build()).origin, Origin::pack);
}

TEST(Pack, EveryTruncationIsRefused) {
  const TemporaryDirectory directory;
  const fs::path file = directory / "pack";
  write(file, make_entries(2, 40));
  const Bytes good = testing::read_bytes(file);
  std::string problem;
  constexpr std::size_t kHead = 24 + 2 * 32 + 16;  // header, index, digest: every length; of the entries every fifth
  for (std::size_t size = 0; size < good.size(); size += size < kHead ? 1 : 5) {
    testing::write_bytes(file, Bytes(good.begin(), good.begin() + static_cast<std::ptrdiff_t>(size)));
    EXPECT_FALSE(Pack::open(file, &problem)) << size;
  }
  Bytes longer = good;
  longer.push_back(std::byte{0});
  testing::write_bytes(file, longer);
  EXPECT_FALSE(Pack::open(file, &problem));
}

/// Everything the pack gives out is what was put in.
void expect_nothing_wrong(const fs::path& file, const std::vector<Entry>& entries) {
  std::string problem;
  const std::optional<Pack> pack = Pack::open(file, &problem);
  if (!pack) return;
  for (const Entry& expected : entries) {
    const Pack::Found found = pack->load(expected.key);
    if (found.entry) {
      ASSERT_EQ(found.entry->cubin, expected.cubin);
    }
  }
  for (std::size_t i = 0; i < pack->size(); ++i) pack->read(i);
}

TEST(Pack, NoFlippedByteIsEverServed) {
  const TemporaryDirectory directory;
  const fs::path file = directory / "pack";
  const std::vector<Entry> entries = make_entries(3, 60);
  write(file, entries);
  const Bytes good = testing::read_bytes(file);
  std::mt19937_64 random(1);
  constexpr std::size_t kHead = 24 + 3 * 32 + 16;  // header, index, digest: every byte; of the entries every fourth
  for (std::size_t i = 0; i < good.size(); i += i < kHead ? 1 : 4) {
    Bytes bad = good;
    bad[i] ^= std::byte{1} << (random() % 8);
    testing::write_bytes(file, bad);
    std::string problem;
    const std::optional<Pack> pack = Pack::open(file, &problem);
    int refused = 0;
    for (std::size_t j = 0; pack && j < pack->size(); ++j) refused += pack->read(j).entry ? 0 : 1;
    EXPECT_TRUE(!pack || refused == 1) << i;
    expect_nothing_wrong(file, entries);
  }
}

TEST(Pack, AForgedIndexDoesNotMakeTheReaderUnsafe) {
  const TemporaryDirectory directory;
  const fs::path file = directory / "pack";
  const std::vector<Entry> entries = make_entries(3, 60);
  write(file, entries);
  const Bytes good = testing::read_bytes(file);
  constexpr std::size_t kIndexEnd = 24 + 3 * 32;
  std::mt19937_64 random(2);
  for (int i = 0; i < 400; ++i) {
    Bytes bad = good;
    const std::size_t where = 16 + random() % (kIndexEnd - 16);
    bad[where] = random() % 3 == 0 ? std::byte{0xff} : static_cast<std::byte>(random());
    const DigestBytes sealed = digest_bytes(std::span(bad).first(kIndexEnd));
    std::ranges::copy(sealed, bad.begin() + kIndexEnd);
    testing::write_bytes(file, bad);
    expect_nothing_wrong(file, entries);
  }
}

TEST(Pack, DamageIsCountedAndTheNextLayerServes) {
  const TemporaryDirectory directory;
  const fs::path file = directory / "pack";
  write(file, make_entries(1));
  Bytes bytes = testing::read_bytes(file);
  bytes[bytes.size() - 30] ^= std::byte{1};
  testing::write_bytes(file, bytes);
  Listener listener;
  StoreOptions options = with_pack(file, directory / "cache");
  options.warn = listener.callback();
  Store store(options);
  const Lookup refused = store.get(numbered(0), nullptr);
  EXPECT_EQ(refused.entry, nullptr);
  EXPECT_NE(refused.refused.find("digest"), std::string::npos) << refused.refused;
  EXPECT_EQ(store.get(numbered(0), builder(numbered(0))).origin, Origin::built);
  EXPECT_EQ(store.counters().damaged, 2U);
  EXPECT_EQ(listener.messages().size(), 1U);
  EXPECT_EQ(Store(options).get(numbered(0), no_build()).origin, Origin::disk);
}

Sha256Bytes sha256_of(const fs::path& file) {
  return sha256(testing::read_bytes(file));
}

TEST(Pack, APinTakesTheFileThatItNamesAlone) {
  const TemporaryDirectory directory;
  const fs::path file = directory / "pack";
  std::string problem;
  const std::optional<WrittenPack> written = write_pack(file, make_entries(), &problem);
  ASSERT_TRUE(written) << problem;
  EXPECT_EQ(written->sha256, sha256_of(file));
  EXPECT_EQ(written->entries, static_cast<std::size_t>(kEntries));
  EXPECT_EQ(written->bytes, fs::file_size(file));
  const std::optional<Pack> pack = Pack::open(file, &problem, written->sha256);
  ASSERT_TRUE(pack) << problem;
  for (int i = 0; i < kEntries; ++i) EXPECT_TRUE(pack->load(numbered(i)).entry);
  // Sound to its last digest, and not what was pinned: another cubin under a right key.
  std::vector<Entry> forged = make_entries();
  forged[3].cubin[0] ^= std::byte{1};
  write(file, forged);
  ASSERT_TRUE(Pack::open(file, &problem)) << "without a pin it serves: " << problem;
  EXPECT_FALSE(Pack::open(file, &problem, written->sha256));
  EXPECT_NE(problem.find(to_hex(written->sha256)), std::string::npos) << problem;
  EXPECT_NE(problem.find(to_hex(sha256_of(file))), std::string::npos) << problem;
}

/// Whoever may write the file may also set back its time: what was hashed is what is served.
TEST(Pack, WhatAPinnedPackServesIsWhatWasHashed) {
  const TemporaryDirectory directory;
  const fs::path file = directory / "pack";
  write(file, make_entries(2));
  const Bytes before = testing::read_bytes(file);
  std::vector<Entry> forged = make_entries(2);
  for (Entry& entry : forged) entry.cubin[7] ^= std::byte{1};
  write(directory / "other", forged);
  const Bytes after = testing::read_bytes(directory / "other");
  ASSERT_EQ(before.size(), after.size());
  std::string problem;
  const std::optional<Pack> pinned = Pack::open(file, &problem, sha256(before));
  const std::optional<Pack> trusting = Pack::open(file, &problem);
  ASSERT_TRUE(pinned && trusting) << problem;
  const fs::file_time_type time = fs::last_write_time(file);
  {
    std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
    stream.write(reinterpret_cast<const char*>(after.data()), static_cast<std::streamsize>(after.size()));
  }
  fs::last_write_time(file, time);
#if !defined(_WIN32)  // where a time is set to the second
  ASSERT_TRUE(trusting->load(numbered(0)).entry) << "the forgery looks like the file that was opened";
#endif
  const Pack::Found found = pinned->load(numbered(0));
  EXPECT_FALSE(found.entry);
#if !defined(_WIN32)
  EXPECT_NE(found.damage.find("pinned"), std::string::npos) << found.damage;
#endif
}

TEST(Pack, AStoreHoldsEachPackToItsPin) {
  const TemporaryDirectory directory;
  write(directory / "a", make_entries(1));
  write(directory / "b", {make_entry(numbered(1))});
  write(directory / "c", {make_entry(numbered(2))});
  Listener listener;
  StoreOptions options;
  options.packs = {directory / "a", directory / "b", directory / "c"};
  options.warn = listener.callback();
  options.pack_sha256 = {to_hex(sha256_of(directory / "a")), to_hex(sha256_of(directory / "a"))};
  const std::shared_ptr<Store> store = Store::shared(options);
  EXPECT_EQ(store->get(numbered(0), nullptr).origin, Origin::pack);
  EXPECT_EQ(store->get(numbered(1), nullptr).entry, nullptr) << "pinned to another file";
  EXPECT_EQ(store->get(numbered(2), nullptr).origin, Origin::pack) << "without a pin";
  EXPECT_EQ(listener.messages().size(), 1U);
  options.pack_sha256[1].clear();
  const std::shared_ptr<Store> other = Store::shared(options);
  EXPECT_NE(other, store);
  EXPECT_EQ(other->get(numbered(1), nullptr).origin, Origin::pack);
  options.pack_sha256[0] = "abc";
  EXPECT_EQ(Store(options).get(numbered(0), nullptr).entry, nullptr) << "no pin is met by what is not one";
}

TEST(Pack, CutReplacedOrDeletedUnderARunningProcessIsAMiss) {
  const TemporaryDirectory directory;
  const fs::path file = directory / "pack";
  for (const char* what : {"cut", "replaced", "deleted"}) {
    SCOPED_TRACE(what);
    write(file, make_entries());
    Store store(with_pack(file));
    EXPECT_EQ(store.get(numbered(0), no_build()).origin, Origin::pack);
    if (std::string(what) == "cut") fs::resize_file(file, 700);
    if (std::string(what) == "replaced") write(file, make_entries(3));
    if (std::string(what) == "deleted") fs::remove(file);
    EXPECT_EQ(store.get(numbered(1), builder(numbered(1))).origin, Origin::built);
    EXPECT_EQ(store.get(numbered(0), no_build()).origin, Origin::memory);
  }
}

TEST(Pack, ACopyOfTheDirectoryAsAPackKeepsEveryHit) {
  const TemporaryDirectory directory;
  {
    Store store({directory / "cache", nullptr});
    for (int i = 0; i < 5; ++i) store.get(numbered(i), builder(numbered(i)));
  }
  write(directory / "pack", list_entries(directory / "cache"));
  fs::remove_all(directory / "cache");
  Store store(with_pack(directory / "pack"));
  for (int i = 0; i < 5; ++i) EXPECT_EQ(store.get(numbered(i), no_build()).origin, Origin::pack);
  std::string problem;
  EXPECT_EQ(list_pack(directory / "pack", &problem).size(), 5U);
}

TEST(Pack, WhatCannotBeWrittenLeavesNothingBehind) {
  const TemporaryDirectory directory;
  std::string problem;
  EXPECT_FALSE(write_pack(directory / "missing" / "pack", make_entries(), &problem));
  EXPECT_FALSE(problem.empty());
  EXPECT_FALSE(write_pack(directory / "pack", {make_entry(make_key(), 0)}, &problem));
  EXPECT_EQ(testing::files_under(directory.path()), 0U);
}

}  // namespace
}  // namespace fa::cache
