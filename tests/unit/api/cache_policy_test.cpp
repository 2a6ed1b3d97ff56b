// What CachePolicy and the environment make of a store, wherever the program runs.

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include <fa/attention.hpp>
#include <fa/log.hpp>

#include "api/build.hpp"
#include "cache/pack.hpp"
#include "expect_error.hpp"
#include "support/platform.hpp"
#include "tests/support/posix_names.hpp"
#include "tests/unit/cache/support.hpp"

namespace fa::api {
namespace {

using cache::testing::make_key;
using cache::testing::TemporaryDirectory;
using test::expect_invalid;
namespace fs = std::filesystem;

constexpr const char* kVariables[] = {"FA_CACHE_DIR",   "XDG_CACHE_HOME",     "HOME",
                                      "LOCALAPPDATA",   "USERPROFILE",        "FA_CACHE_MAX_BYTES",
                                      "FA_CACHE_PACKS", "FA_CACHE_COMPILERS", "FA_CACHE_MAX_ENTRIES"};
#if defined(_WIN32)
constexpr const char* kCaches = "LOCALAPPDATA";
constexpr const char* kBelowCaches = "fa/cache";
#else
constexpr const char* kCaches = "XDG_CACHE_HOME";
constexpr const char* kBelowCaches = "fa";
#endif

/// None of the variables is set; the test runs in a process of its own or puts up with that.
class CachePolicyTest : public testing::Test {
 protected:
  CachePolicyTest() {
    for (const char* name : kVariables) unsetenv(name);
  }
  ~CachePolicyTest() override {
    for (const char* name : kVariables) unsetenv(name);
  }
  static void set(const char* name, const std::string& value) { setenv(name, value.c_str(), 1); }
};

TEST_F(CachePolicyTest, CapsComeFromThePolicyThenTheEnvironment) {
  EXPECT_EQ(cache_limits({}), cache::kDefaultLimits);
  CachePolicy policy;
  policy.max_bytes = 5000;
  policy.max_entries = -1;
  EXPECT_EQ(cache_limits(policy), (cache::Limits{5000, 0}));
  set("FA_CACHE_MAX_BYTES", "3M");
  set("FA_CACHE_MAX_ENTRIES", "77");
  EXPECT_EQ(cache_limits({}), (cache::Limits{3U << 20U, 77}));
  EXPECT_EQ(cache_limits(policy), (cache::Limits{5000, 0}));
  set("FA_CACHE_MAX_BYTES", "-1");
  EXPECT_EQ(cache_limits({}), (cache::Limits{0, 77}));
  for (const char* wrong : {"lots", "3T", "M", "1.5G", "99999999999G", " 3M"}) {
    set("FA_CACHE_MAX_BYTES", wrong);
    expect_invalid("FA_CACHE_MAX_BYTES", [] { cache_limits({}); });
  }
}

TEST_F(CachePolicyTest, CompilersLikewise) {
  using Rule = cache::Acceptance::Rule;
  EXPECT_EQ(cache_acceptance({}).rule, Rule::any);
  set("FA_CACHE_COMPILERS", ">=12.8");
  EXPECT_EQ(cache_acceptance({}).rule, Rule::at_least);
  CachePolicy policy;
  policy.compilers = "13.0";
  EXPECT_EQ(cache_acceptance(policy), (cache::Acceptance{Rule::exactly, 13, 0, 0}));
  policy.compilers = "any";
  EXPECT_EQ(cache_acceptance(policy).rule, Rule::any);
  policy.compilers = "newest";
  expect_invalid("compilers", [&] { cache_acceptance(policy); });
  set("FA_CACHE_COMPILERS", "13");
  expect_invalid("FA_CACHE_COMPILERS", [] { cache_acceptance({}); });
}

TEST_F(CachePolicyTest, PacksOfThePolicyComeFirst) {
  const std::string separator(1, support::platform::list_separator());
  set("FA_CACHE_PACKS", separator + "/c" + separator + "/d");
  CachePolicy policy;
  policy.packs = {"/a", "/b"};
  EXPECT_EQ(cache_packs(policy), (std::vector<fs::path>{"/a", "/b", "/c", "/d"}));
}

TEST_F(CachePolicyTest, PinsAreHeldToTheirPacks) {
  CachePolicy policy;
  policy.packs = {"/a", "/b"};
  EXPECT_TRUE(cache_pack_pins(policy).empty());
  const std::string digest = "BA7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
  policy.pack_sha256 = {"", digest};
  EXPECT_EQ(cache_pack_pins(policy)[1], "ba" + digest.substr(2));
  policy.pack_sha256 = {"", digest, digest};
  expect_invalid("pack_sha256", [&] { cache_pack_pins(policy); });
  policy.pack_sha256 = {digest.substr(1)};
  expect_invalid("pack_sha256", [&] { cache_pack_pins(policy); });
  AttentionConfig config;
  config.head_dim = 8;
  config.cache = policy;
  expect_invalid("pack_sha256", [&] { Attention::create(config, Device::host()); });
}

/// A pack of another SHA-256 serves nothing, and a program that may not compile hears why.
TEST_F(CachePolicyTest, APackOfAnotherDigestIsAMiss) {
  const TemporaryDirectory directory;
  std::string problem;
  const auto written = cache::write_pack(directory / "pack", {cache::testing::make_entry(make_key())}, &problem);
  ASSERT_TRUE(written) << problem;
  CachePolicy policy;
  policy.mode = CachePolicy::Mode::memory;
  policy.packs = {(directory / "pack").string()};
  policy.pack_sha256 = {cache::to_hex(written->sha256)};
  EXPECT_EQ(open_store(policy)->get(make_key(), nullptr).origin, cache::Origin::pack);
  policy.pack_sha256[0].front() = policy.pack_sha256[0].front() == '0' ? '1' : '0';
  const auto store = open_store(policy);
  EXPECT_EQ(store->get(make_key(), nullptr).entry, nullptr);
  ASSERT_EQ(store->pack_problems().size(), 1U);
  EXPECT_NE(store->pack_problems()[0].find(policy.pack_sha256[0]), std::string::npos) << store->pack_problems()[0];
}

/// A program that opens, uses and closes its cache for each call, as `fa run` does.
TEST_F(CachePolicyTest, TheSameWarningIsSaidOnceAProcess) {
  const TemporaryDirectory directory;
  cache::testing::write_bytes(directory / "file", {std::byte{1}});
  CachePolicy policy;
  policy.directory = (directory / "file").string();
  policy.packs = {(directory / "missing").string()};
  std::vector<std::string> messages;
  set_log_callback([&messages](LogLevel, std::string_view message) { messages.emplace_back(message); });
  for (int i = 0; i < 3; ++i) open_store(policy);
  set_log_callback({});
  EXPECT_EQ(messages.size(), 2U) << "one of the pack, one of the directory";
}

#if !defined(_WIN32)
/// In a child, as a user whom permissions stop: three kernels are built, then served from memory, with one warning that
/// says `reason`; opening the store again adds none.
void expect_memory_with_one_warning(const fs::path& owned, const std::string& reason, const CachePolicy& policy,
                                    const std::function<void()>& prepare = nullptr) {
  SCOPED_TRACE(reason);
  const int status = cache::testing::run_as_plain_user(owned, [&] {
    if (prepare) prepare();
    std::vector<std::string> messages;
    set_log_callback([&messages](LogLevel, std::string_view message) { messages.emplace_back(message); });
    const auto store = open_store(policy);
    for (int i = 0; i < 3; ++i) {
      const cache::Key key = make_key("spec " + std::to_string(i));
      if (store->get(key, cache::testing::builder(key)).origin != cache::Origin::built) return 1;
      if (open_store(policy)->get(key, cache::testing::no_build()).origin != cache::Origin::memory) return 2;
    }
    if (messages.size() != 1) return 3;
    std::fprintf(stderr, "%s\n", messages[0].c_str());
    return messages[0].find(reason) == std::string::npos ? 4 : 0;
  });
  EXPECT_EQ(status, 0);
}

CachePolicy in(const fs::path& directory) {
  CachePolicy policy;
  policy.directory = directory.string();
  return policy;
}

TEST_F(CachePolicyTest, EveryUnusablePlaceCostsOneWarning) {
  const TemporaryDirectory directory;
  const fs::path owned = directory / "owned";
  fs::create_directory(owned);
  chmod(directory.path().c_str(), 0755);
  cache::testing::write_bytes(owned / "file", {std::byte{1}});
  fs::create_directory(owned / "read_only");
  fs::permissions(owned / "read_only", fs::perms{0500});
  expect_memory_with_one_warning(owned, "absolute", in("relative/path"));
  expect_memory_with_one_warning(owned, "not a directory", in(owned / "file"));
  expect_memory_with_one_warning(owned, "Permission denied", in(owned / "read_only"));
  expect_memory_with_one_warning(owned, "Permission denied", in(owned / "read_only" / "below"));
  expect_memory_with_one_warning(owned, "another user", in("/"));
  expect_memory_with_one_warning(owned, "HOME", {});
  expect_memory_with_one_warning(owned, "not an absolute path", {}, [] { set("FA_CACHE_DIR", "here"); });
  expect_memory_with_one_warning(owned, "more than it may hold", [&] {
    CachePolicy small = in(owned / "small");
    small.max_bytes = 100;
    return small;
  }());
  fs::permissions(owned / "read_only", fs::perms{0700});
}

TEST_F(CachePolicyTest, AUserWithoutANameHasTheHomeThatIsSet) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can become a user that does not exist";
  constexpr uid_t kNobodyAtAll = 54321;
  const TemporaryDirectory directory;
  ASSERT_EQ(chmod(directory.path().c_str(), 0755), 0);
  const auto run_with_home = [&](const fs::path& home) {
    return cache::testing::run_in_child([&] {
      if (setgid(kNobodyAtAll) != 0 || setuid(kNobodyAtAll) != 0) return 98;
      set("HOME", home.string());
      int messages = 0;
      set_log_callback([&messages](LogLevel, std::string_view) { ++messages; });
      const auto store = open_store({});
      const cache::Key key = make_key();
      if (store->get(key, cache::testing::builder(key)).origin != cache::Origin::built) return 1;
      return (store->directory().empty() ? 10 : 20) + messages;
    });
  };
  EXPECT_EQ(run_with_home("/"), 11);  // as containers set it: memory, one warning
  const fs::path home = directory / "home";
  fs::create_directory(home);
  ASSERT_EQ(chown(home.c_str(), kNobodyAtAll, kNobodyAtAll), 0);
  EXPECT_EQ(run_with_home(home), 20);
}
#endif

TEST_F(CachePolicyTest, AWrongRelativeDirectoryIsSaidAndPassedOver) {
  const TemporaryDirectory directory;
  set("FA_CACHE_DIR", "./cache");
  set(kCaches, directory.path().string());
  std::vector<std::string> messages;
  set_log_callback([&messages](LogLevel, std::string_view message) { messages.emplace_back(message); });
  EXPECT_EQ(open_store({})->directory(), directory / kBelowCaches);
  EXPECT_EQ(open_store({})->directory(), directory / kBelowCaches);
  set_log_callback({});
  ASSERT_EQ(messages.size(), 1U);
  EXPECT_NE(messages[0].find("FA_CACHE_DIR = ./cache"), std::string::npos) << messages[0];
}

TEST_F(CachePolicyTest, APackThatIsMissingIsSaid) {
  CachePolicy policy;
  policy.mode = CachePolicy::Mode::memory;
  policy.packs = {"/nowhere/kernels.fapack"};
  std::vector<std::string> messages;
  set_log_callback([&messages](LogLevel, std::string_view message) { messages.emplace_back(message); });
  EXPECT_EQ(open_store(policy)->pack_problems().size(), 1U);
  set_log_callback({});
  ASSERT_EQ(messages.size(), 1U);
  EXPECT_NE(messages[0].find("/nowhere/kernels.fapack"), std::string::npos) << messages[0];
}

}  // namespace
}  // namespace fa::api
