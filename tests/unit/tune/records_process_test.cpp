// Records in a directory that several processes use.

#include <fcntl.h>

#include <array>
#include <fstream>
#include <iterator>

#include "cache/records.hpp"
#include "cache/store.hpp"
#include "tests/unit/cache/support.hpp"

namespace fa::cache {
namespace {

using testing::run_as_plain_user;
using testing::start_child;
using testing::TemporaryDirectory;
using testing::wait_for;

std::string file_text(const std::filesystem::path& file) {
  std::ifstream stream(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

TEST(TuneRecords, TheFirstOneStays) {
  const TemporaryDirectory directory;
  const Records records(directory / "cache");
  std::string problem;
  EXPECT_EQ(records.read("a.json", &problem), std::nullopt);
  EXPECT_EQ(problem, "");
  EXPECT_EQ(records.publish("a.json", "first", &problem), "first");
  EXPECT_EQ(records.publish("a.json", "second", &problem), "first");
  EXPECT_EQ(records.publish("b.json", "other", &problem), "other");
  EXPECT_EQ(records.read("a.json", &problem), "first");
  EXPECT_EQ(records.names(), (std::vector<std::string>{"a.json", "b.json"}));
  EXPECT_EQ(testing::files_under(directory / "cache"), 2U) << "nothing is left on its way in";
  EXPECT_EQ(testing::mode_of(directory / "cache" / "tuned" / "a.json"), 0600U);
  EXPECT_EQ(testing::mode_of(directory / "cache" / "tuned"), 0700U);
  records.remove("a.json");
  EXPECT_EQ(records.publish("a.json", "second", &problem), "second");
}

TEST(TuneRecords, ThirtyTwoProcessesAgreeWithoutTalking) {
  constexpr int kProcesses = 32;
  constexpr int kRecords = 8;
  const TemporaryDirectory directory;
  std::array<int, 2> gate{};
  ASSERT_EQ(pipe2(gate.data(), O_CLOEXEC), 0);
  std::vector<pid_t> children;
  for (int i = 0; i < kProcesses; ++i) {
    children.push_back(start_child([&, i] {
      char token = 0;
      if (read(gate[0], &token, 1) != 1) return 3;
      const Records records(directory / "cache");
      std::ofstream seen(directory / ("seen " + std::to_string(i)));
      for (int j = 0; j < kRecords; ++j) {
        std::string problem;
        const auto standing =
            records.publish(std::to_string(j), "of process " + std::to_string(i) + std::string(5000, '.'), &problem);
        if (!standing) return 1;
        seen << *standing << "\n";
      }
      return 0;
    }));
  }
  for (int i = 0; i < kProcesses; ++i) ASSERT_EQ(write(gate[1], "x", 1), 1);
  for (const pid_t child : children) EXPECT_EQ(wait_for(child), 0);
  close(gate[0]);
  close(gate[1]);
  const std::string first = file_text(directory / "seen 0");
  EXPECT_EQ(std::count(first.begin(), first.end(), '\n'), kRecords);
  for (int i = 1; i < kProcesses; ++i) EXPECT_EQ(file_text(directory / ("seen " + std::to_string(i))), first) << i;
  EXPECT_EQ(testing::files_under(directory / "cache"), static_cast<std::size_t>(kRecords));
}

TEST(TuneRecords, WhatIsNotOursIsNotRead) {
  const TemporaryDirectory directory;
  const Records records(directory / "cache");
  std::string problem;
  ASSERT_TRUE(records.publish("a.json", "ours", &problem));
  std::filesystem::permissions(directory / "cache" / "tuned" / "a.json", std::filesystem::perms::all);
  EXPECT_EQ(records.read("a.json", &problem), std::nullopt);
  EXPECT_NE(problem.find("a.json"), std::string::npos) << problem;
  std::filesystem::create_symlink(directory / "cache" / "tuned" / "a.json", directory / "cache" / "tuned" / "b.json");
  EXPECT_EQ(records.read("b.json", &problem), std::nullopt);
}

TEST(TuneRecords, ADirectoryThatTakesNothingIsNoFailure) {
  const TemporaryDirectory directory;
  std::string problem;
  EXPECT_EQ(Records({}).publish("a", "text", &problem), std::nullopt);
  EXPECT_EQ(Records({}).read("a", &problem), std::nullopt);
  std::filesystem::create_directory(directory / "cache");
  std::filesystem::permissions(directory / "cache",
                               std::filesystem::perms::owner_read | std::filesystem::perms::owner_exec);
  EXPECT_EQ(run_as_plain_user(directory.path(),
                              [&] {
                                std::string reason;
                                const bool kept =
                                    Records(directory / "cache").publish("a", "text", &reason).has_value();
                                return kept || reason.empty() ? 1 : 0;
                              }),
            0);
}

TEST(TuneRecords, AStoreInTheSameDirectoryLeavesThemAlone) {
  const TemporaryDirectory directory;
  const Records records(directory / "cache");
  std::string problem;
  ASSERT_TRUE(records.publish("a.json", "text", &problem));
  Store store({directory / "cache", nullptr});
  store.get(testing::make_key(), testing::builder(testing::make_key()));
  collect_garbage(directory / "cache", {.limits = {1, 1}, .damaged = true, .other_versions = true});
  EXPECT_EQ(records.read("a.json", &problem), "text");
  EXPECT_EQ(directory_usage(directory / "cache").entries, 0U);
}

}  // namespace
}  // namespace fa::cache
