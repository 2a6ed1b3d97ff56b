#include "api/ready_table.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

namespace fa::api {
namespace {

TEST(ReadyTable, FindsWhatWasPutAndKeepsWhatWasReplaced) {
  ReadyTable<std::uint64_t> table;
  EXPECT_EQ(table.find(7), nullptr);
  const std::uint64_t& first = table.put_first(7, 70);
  EXPECT_EQ(&table.put_first(7, 71), &first);
  EXPECT_EQ(*table.find(7), 70U);
  table.put(7, 72);
  EXPECT_EQ(*table.find(7), 72U);
  EXPECT_EQ(first, 70U);
  for (std::uint64_t code = 1; code <= 5000; ++code) table.put(code << 8 | 1, code);
  for (std::uint64_t code = 1; code <= 5000; ++code) ASSERT_EQ(*table.find(code << 8 | 1), code);
  EXPECT_EQ(*table.find(7), 72U);
  EXPECT_EQ(table.find(12345678), nullptr);
}

TEST(ReadyTable, ReadersNeverMissWhileItGrows) {
  ReadyTable<std::uint64_t> table;
  std::atomic<std::uint64_t> present{0};
  std::atomic<bool> wrong{false};
  std::vector<std::jthread> readers;
  for (int i = 0; i < 3; ++i) {
    readers.emplace_back([&] {
      while (present < 3000) {
        const std::uint64_t last = present;
        for (std::uint64_t code = 1; code <= last; ++code) {
          const std::uint64_t* found = table.find(code);
          if (found == nullptr || *found / 2 != code) wrong = true;
        }
      }
    });
  }
  for (std::uint64_t code = 1; code <= 3000; ++code) {
    table.put(code, 2 * code);
    if (code % 3 == 0) table.put(code, 2 * code + 1);
    present = code;
  }
  readers.clear();
  EXPECT_FALSE(wrong);
}

// Nothing but the table itself orders the reading of a value behind its writing.
TEST(ReadyTable, WhoFindsAValueSeesAllOfIt) {
  constexpr std::uint64_t kCodes = 3000;
  ReadyTable<std::string> table;
  std::atomic<int> wrong{0};
  std::vector<std::jthread> readers;
  for (int i = 0; i < 2; ++i) {
    readers.emplace_back([&] {
      for (std::uint64_t code = 1; code <= kCodes; ++code) {
        const std::string* found = nullptr;
        while ((found = table.find(code)) == nullptr) std::this_thread::yield();
        wrong += *found != "the kernels of problem " + std::to_string(code);
      }
    });
  }
  for (std::uint64_t code = 1; code <= kCodes; ++code)
    table.put(code, "the kernels of problem " + std::to_string(code));
  readers.clear();
  EXPECT_EQ(wrong, 0);
}

TEST(ReadyTable, WritersAgreeOnTheFirst) {
  constexpr std::uint64_t kCodes = 2000;
  constexpr std::uint64_t kWriters = 3;
  ReadyTable<std::uint64_t> table;
  std::vector<std::vector<const std::uint64_t*>> seen(kWriters);
  std::vector<std::jthread> writers;
  for (std::uint64_t writer = 0; writer < kWriters; ++writer) {
    writers.emplace_back([&, writer] {
      for (std::uint64_t code = 1; code <= kCodes; ++code) {
        seen[writer].push_back(&table.put_first(code, kWriters * code + writer));
      }
    });
  }
  writers.clear();
  for (std::uint64_t code = 1; code <= kCodes; ++code) {
    const std::uint64_t* found = table.find(code);
    ASSERT_NE(found, nullptr);
    EXPECT_EQ(*found / kWriters, code);
    for (const auto& of_writer : seen) EXPECT_EQ(of_writer[code - 1], found);
  }
}

}  // namespace
}  // namespace fa::api
