#include "api/ready_table.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

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

}  // namespace
}  // namespace fa::api
