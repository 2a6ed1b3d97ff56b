#include "api/call_memo.hpp"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <utility>
#include <vector>

namespace fa::api {
namespace {

/// Too large to be written at once.
struct Entry {
  explicit Entry(std::uint64_t of) { numbers.fill(of); }
  std::array<std::uint64_t, 200> numbers;
};

using Memo = CallMemo<Entry>;

void put(Memo& memo, std::uint64_t code) {
  memo.put(code, [code] { return Entry(code); });
}

TEST(CallMemo, FindsWhatWasPut) {
  Memo memo;
  EXPECT_FALSE(memo.find(7));
  put(memo, 7);
  put(memo, 8);
  ASSERT_TRUE(memo.find(7));
  EXPECT_EQ(memo.find(7)->numbers[3], 7U);
  memo.put(7, [] { return Entry(70); });
  EXPECT_EQ(memo.find(7)->numbers[3], 70U);
  EXPECT_EQ(memo.find(8)->numbers[3], 8U);
}

TEST(CallMemo, KeepsTheLast) {
  Memo memo;
  for (std::uint64_t code = 1; code <= 100; ++code) put(memo, code);
  for (std::uint64_t code = 1; code <= 100 - Memo::kSlots; ++code) EXPECT_FALSE(memo.find(code));
  for (std::uint64_t code = 101 - Memo::kSlots; code <= 100; ++code) EXPECT_TRUE(memo.find(code));
}

TEST(CallMemo, ReplacesNothingThatIsInUse) {
  Memo memo;
  put(memo, 1);
  const auto held = memo.find(1);
  memo.put(1, [] { return Entry(10); });
  for (std::uint64_t code = 2; code <= 100; ++code) put(memo, code);
  EXPECT_EQ(held->numbers.front(), 1U);
  EXPECT_TRUE(memo.find(100));
  std::vector<Memo::Held> all;
  for (std::uint64_t code = 2; code <= 100; ++code) {
    if (auto other = memo.find(code)) all.push_back(std::move(other));
  }
  put(memo, 200);
  EXPECT_FALSE(memo.find(200));
  all.clear();
  put(memo, 200);
  EXPECT_TRUE(memo.find(200));
}

TEST(CallMemo, KnowsWhatItWasAskedLately) {
  Memo memo;
  EXPECT_FALSE(memo.was_asked(5));
  EXPECT_FALSE(memo.was_asked(6));
  EXPECT_TRUE(memo.was_asked(5));
}

// Nothing but the memo orders the reading of an entry behind its writing, and the next writing behind the reading.
TEST(CallMemo, WhoFindsAnEntrySeesAllOfIt) {
  constexpr std::uint64_t kCodes = 2 * Memo::kSlots + 1;
  Memo memo;
  std::atomic<int> wrong{0};
  std::atomic<int> found{0};
  {
    std::vector<std::jthread> threads;
    for (std::uint64_t thread = 0; thread < 4; ++thread) {
      threads.emplace_back([&, thread] {
        for (std::uint64_t i = 0; i < 20000; ++i) {
          const std::uint64_t code = (i * (thread + 1)) % kCodes + 1;
          if (i % 3 == 0) put(memo, code);
          const auto held = memo.find(code);
          if (!held) continue;
          ++found;
          for (const std::uint64_t number : held->numbers) wrong += number != code;
        }
      });
    }
  }
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(found, 1000);
}

}  // namespace
}  // namespace fa::api
