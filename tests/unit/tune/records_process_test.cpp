// Records in a directory that several processes use.

#include <algorithm>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "cache/records.hpp"
#include "cache/store.hpp"
#include "tests/unit/cache/support.hpp"

namespace fa::cache {
namespace {

using testing::TemporaryDirectory;

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
  EXPECT_TRUE(testing::is_private(directory / "cache" / "tuned" / "a.json"));
  EXPECT_TRUE(testing::is_private(directory / "cache" / "tuned"));
  records.remove("a.json");
  EXPECT_EQ(records.publish("a.json", "second", &problem), "second");
}

constexpr int kRecords = 8;

/// Directory and number: publishes records with texts of its own, and notes which stand.
int publish_records(const std::vector<std::string>& arguments) {
  const std::filesystem::path directory = arguments.at(0);
  testing::open_gate(directory / ("ready " + arguments.at(1)));
  testing::wait_for_gate(directory / "start");
  const Records records(directory / "cache");
  std::ofstream seen(directory / ("seen " + arguments.at(1)));
  for (int j = 0; j < kRecords; ++j) {
    std::string problem;
    const auto standing =
        records.publish(std::to_string(j), "of process " + arguments.at(1) + std::string(5000, '.'), &problem);
    if (!standing) return 1;
    seen << *standing << "\n";
  }
  return 0;
}
const testing::ChildProgram kPublishRecords("publish_records", publish_records);

TEST(TuneRecords, ProcessesAgreeWithoutTalking) {
#if defined(_WIN32)
  constexpr int kProcesses = 8;  // started anew, not forked
#else
  constexpr int kProcesses = 32;
#endif
  const TemporaryDirectory directory;
  std::vector<testing::Process> children;
  children.reserve(kProcesses);
  for (int i = 0; i < kProcesses; ++i) {
    children.emplace_back("publish_records", std::vector<std::string>{directory.path().string(), std::to_string(i)});
  }
  for (int i = 0; i < kProcesses; ++i) testing::wait_for_gate(directory / ("ready " + std::to_string(i)));
  testing::open_gate(directory / "start");
  for (testing::Process& child : children) EXPECT_EQ(child.wait(), 0);
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
  testing::let_others_write(directory / "cache" / "tuned" / "a.json");
  EXPECT_EQ(records.read("a.json", &problem), std::nullopt);
  EXPECT_NE(problem.find("a.json"), std::string::npos) << problem;
  if (!testing::have_links()) return;
  std::filesystem::create_symlink(directory / "cache" / "tuned" / "a.json", directory / "cache" / "tuned" / "b.json");
  EXPECT_EQ(records.read("b.json", &problem), std::nullopt);
}

#if !defined(_WIN32)
TEST(TuneRecords, ADirectoryThatTakesNothingIsNoFailure) {
  const TemporaryDirectory directory;
  std::string problem;
  EXPECT_EQ(Records({}).publish("a", "text", &problem), std::nullopt);
  EXPECT_EQ(Records({}).read("a", &problem), std::nullopt);
  std::filesystem::create_directory(directory / "cache");
  std::filesystem::permissions(directory / "cache",
                               std::filesystem::perms::owner_read | std::filesystem::perms::owner_exec);
  EXPECT_EQ(testing::run_as_plain_user(directory.path(),
                                       [&] {
                                         std::string reason;
                                         const bool kept =
                                             Records(directory / "cache").publish("a", "text", &reason).has_value();
                                         return kept || reason.empty() ? 1 : 0;
                                       }),
            0);
}
#endif

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
