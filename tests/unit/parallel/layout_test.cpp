// Which rows ranks have.

#include "parallel/layout.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

namespace fa::parallel {
namespace {

constexpr ShardLayout kLayouts[] = {ShardLayout::contiguous, ShardLayout::zigzag, ShardLayout::striped};

std::vector<std::int64_t> positions(const Piece& piece) {
  std::vector<std::int64_t> all;
  for (std::int64_t i = 0; i < piece.count; ++i) all.push_back(piece.begin + i * piece.step);
  return all;
}

TEST(Layout, OfEightRowsAndTwoRanks) {
  const std::vector<std::int64_t> lengths{8};
  const auto rows = [&](ShardLayout layout, int rank) { return fa::shard_rows(layout, 2, rank, lengths); };
  using List = std::vector<std::int64_t>;
  EXPECT_EQ(rows(ShardLayout::contiguous, 0), (List{0, 1, 2, 3}));
  EXPECT_EQ(rows(ShardLayout::contiguous, 1), (List{4, 5, 6, 7}));
  EXPECT_EQ(rows(ShardLayout::zigzag, 0), (List{0, 1, 6, 7}));
  EXPECT_EQ(rows(ShardLayout::zigzag, 1), (List{2, 3, 4, 5}));
  EXPECT_EQ(rows(ShardLayout::striped, 0), (List{0, 2, 4, 6}));
  EXPECT_EQ(rows(ShardLayout::striped, 1), (List{1, 3, 5, 7}));
}

TEST(Layout, EveryRowHasOneRank) {
  for (const ShardLayout layout : kLayouts) {
    for (const int ranks : {1, 2, 3, 5, 8, 16}) {
      const std::vector<std::int64_t> lengths{4 * ranks, 0, 2 * ranks, 6 * ranks};
      std::set<std::int64_t> seen;
      std::size_t count = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        const std::vector<std::int64_t> rows = fa::shard_rows(layout, ranks, rank, lengths);
        EXPECT_EQ(rows.size(), 12U);
        count += rows.size();
        seen.insert(rows.begin(), rows.end());
      }
      EXPECT_EQ(seen.size(), count);
      EXPECT_EQ(*seen.rbegin(), 12 * ranks - 1);
    }
  }
}

// Groups of ranks have the rows of all of theirs, in ascending order, in as few pieces as there can be.
TEST(Layout, GroupsUnite) {
  for (const ShardLayout layout : kLayouts) {
    for (const int width : {1, 2, 4, 8}) {
      const std::vector<std::int64_t> lengths{32, 64};
      for (int group = 0; group < 8 / width; ++group) {
        std::vector<Pieces> members;
        std::multiset<std::pair<int, std::int64_t>> expected, is;
        for (int i = 0; i < width; ++i) {
          members.push_back(pieces_of(layout, 8, lengths, group * width + i));
          for (const Piece& piece : members.back()) {
            for (const std::int64_t at : positions(piece)) expected.emplace(piece.sequence, at);
          }
        }
        const Pieces whole = united(members);
        std::int64_t row = 0;
        for (const Piece& piece : whole) {
          EXPECT_EQ(piece.row, row);
          row += piece.count;
          for (const std::int64_t at : positions(piece)) is.emplace(piece.sequence, at);
        }
        EXPECT_EQ(is, expected);
        EXPECT_TRUE(width < 8 || whole.size() == 2U) << "all rows of two sequences";
        // Each member finds its rows.
        for (const Pieces& member : members) {
          for (const Piece& piece : placed_in(member, whole)) {
            for (std::int64_t i = 0; i < piece.count; ++i) {
              const std::int64_t at = piece.row + i * piece.row_step;
              const auto holds = [at](const Piece& other) { return at >= other.row && at < other.row + other.count; };
              const auto found = std::ranges::find_if(whole, holds);
              ASSERT_NE(found, whole.end());
              EXPECT_EQ(found->begin + (at - found->row) * found->step, piece.begin + i * piece.step);
            }
          }
        }
      }
    }
  }
}

TEST(Layout, LengthsThatDoNotDivideAreRefused) {
  const auto refused = [](ShardLayout layout, int ranks, std::int64_t length) {
    try {
      check_lengths(layout, ranks, std::vector<std::int64_t>{length}, "s_q");
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      EXPECT_EQ(error.field("argument"), "s_q");
      return true;
    }
    return false;
  };
  EXPECT_FALSE(refused(ShardLayout::contiguous, 3, 9));
  EXPECT_TRUE(refused(ShardLayout::contiguous, 3, 10));
  EXPECT_TRUE(refused(ShardLayout::zigzag, 3, 9));
  EXPECT_FALSE(refused(ShardLayout::zigzag, 3, 12));
  EXPECT_TRUE(refused(ShardLayout::striped, 4, -4));
  EXPECT_FALSE(refused(ShardLayout::striped, 4, 0));
}

}  // namespace
}  // namespace fa::parallel
