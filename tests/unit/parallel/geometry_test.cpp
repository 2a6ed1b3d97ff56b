// Which keys rows see, and by which blocks.

#include "parallel/geometry.hpp"

#include <gtest/gtest.h>

#include "parallel/layout.hpp"

namespace fa::parallel {
namespace {

Problem causal(std::int64_t s_q, std::int64_t s_kv) {
  Problem problem;
  problem.lengths_q = {s_q};
  problem.lengths_kv = {s_kv};
  problem.causal = true;
  return problem;
}

Piece piece(std::int64_t begin, std::int64_t count, std::int64_t row = 0, std::int64_t step = 1) {
  return {0, begin, count, step, row, 1};
}

TEST(Geometry, KeysOfARow) {
  Problem problem = causal(8, 8);
  EXPECT_EQ(keys_of(problem, 0, 3).end, 4);
  problem = causal(4, 8);
  EXPECT_EQ(keys_of(problem, 0, 0).end, 5) << "the last row sees the last key";
  problem.bottom_right = false;
  EXPECT_EQ(keys_of(problem, 0, 0).end, 1);
  problem = causal(8, 4);
  EXPECT_EQ(keys_of(problem, 0, 2).end, 0) << "no key";
  problem = causal(8, 8);
  problem.window_left = 2;
  EXPECT_EQ(keys_of(problem, 0, 5).begin, 3);
  problem.window_left = -1;
  problem.causal = false;
  problem.chunk = 3;
  EXPECT_EQ(keys_of(problem, 0, 4).begin, 3);
  EXPECT_EQ(keys_of(problem, 0, 4).end, 6);
  problem.lengths_q = {10};  // rows in front of the first key are in chunks of their own
  EXPECT_EQ(keys_of(problem, 0, 0).end, 0);
}

TEST(Geometry, Visible) {
  const Problem problem = causal(16, 16);
  EXPECT_EQ(visible(problem, piece(4, 4), piece(0, 4)), Visible::all);
  EXPECT_EQ(visible(problem, piece(4, 4), piece(4, 4)), Visible::some);
  EXPECT_EQ(visible(problem, piece(4, 4), piece(8, 4)), Visible::none);
  EXPECT_EQ(visible(problem, piece(4, 4), piece(7, 4)), Visible::some);
  EXPECT_EQ(visible(problem, piece(4, 0), piece(0, 4)), Visible::none);
}

// What `visible` says of any two pieces is what their rows say.
TEST(Geometry, VisibleIsWhatRowsSay) {
  for (int kind = 0; kind < 5; ++kind) {
    Problem problem = causal(12, kind == 1 ? 20 : 12);
    problem.causal = kind < 3;
    if (kind == 2) problem.window_left = 3;
    if (kind == 3) problem.window_left = problem.window_right = 2;
    if (kind == 4) problem.chunk = 5;
    for (std::int64_t q = 0; q < 12; ++q) {
      for (std::int64_t kv = 0; kv < 12; ++kv) {
        for (const std::int64_t count : {1, 3}) {
          if (q + count > 12 || kv + count > 12) continue;
          std::int64_t kept = 0;
          for (std::int64_t i = q; i < q + count; ++i) {
            const KeyRange seen = keys_of(problem, 0, i);
            for (std::int64_t j = kv; j < kv + count; ++j) kept += j >= seen.begin && j < seen.end ? 1 : 0;
          }
          const Visible is = visible(problem, piece(q, count), piece(kv, count));
          EXPECT_TRUE(is != Visible::none || kept == 0);
          EXPECT_EQ(is == Visible::all, kept == count * count);
        }
      }
    }
  }
}

TEST(Geometry, ZigzagBlocks) {
  const Problem problem = causal(16, 16);
  const std::vector<std::int64_t> lengths{16};
  const auto blocks = [&](int q, int kv) {
    return blocks_of(problem, pieces_of(ShardLayout::zigzag, 2, lengths, q),
                     pieces_of(ShardLayout::zigzag, 2, lengths, kv));
  };
  // Rank 0 has 0 to 3 and 12 to 15, rank 1 has 4 to 11.
  ASSERT_EQ(blocks(0, 0).size(), 1U);
  EXPECT_EQ(blocks(0, 0)[0].mask, BlockMask::causal);
  EXPECT_EQ(blocks(0, 0)[0].rows, 8);
  ASSERT_EQ(blocks(0, 1).size(), 1U);  // the second half of rows, all keys
  EXPECT_EQ(blocks(0, 1)[0].mask, BlockMask::none);
  EXPECT_EQ(blocks(0, 1)[0].row, 4);
  EXPECT_EQ(blocks(0, 1)[0].rows, 4);
  EXPECT_EQ(blocks(0, 1)[0].keys, 8);
  ASSERT_EQ(blocks(1, 0).size(), 1U);  // all rows, the first half of keys
  EXPECT_EQ(blocks(1, 0)[0].rows, 8);
  EXPECT_EQ(blocks(1, 0)[0].keys, 4);
}

TEST(Geometry, Stripes) {
  const Problem problem = causal(8, 8);
  const auto blocks = [&](std::int64_t q, std::int64_t kv) {
    return blocks_of(problem, {piece(q, 4, 0, 2)}, {piece(kv, 4, 0, 2)});
  };
  ASSERT_EQ(blocks(1, 0).size(), 1U);
  EXPECT_EQ(blocks(1, 0)[0].rows, 4);
  EXPECT_EQ(blocks(1, 0)[0].keys, 4);
  ASSERT_EQ(blocks(0, 1).size(), 1U);  // one key less for each row, and none for the first
  EXPECT_EQ(blocks(0, 1)[0].row, 1);
  EXPECT_EQ(blocks(0, 1)[0].q, 2);
  EXPECT_EQ(blocks(0, 1)[0].rows, 3);
  EXPECT_EQ(blocks(0, 1)[0].keys, 3);
}

TEST(Geometry, FunctionsHavePlaces) {
  Problem problem = causal(16, 16);
  problem.functions = true;
  const std::vector<std::int64_t> lengths{16};
  const Pieces own = pieces_of(ShardLayout::zigzag, 2, lengths, 1);
  const std::vector<Block> blocks = blocks_of(problem, own, own);
  ASSERT_EQ(blocks.size(), 3U);  // all but the first rows over the last keys
  for (const Block& block : blocks) EXPECT_EQ(block.mask, BlockMask::placed);
  EXPECT_EQ(blocks[2].q, 8);
  EXPECT_EQ(blocks[2].kv, 8);
}

TEST(Geometry, ScoresOfBlocks) {
  const Problem problem = causal(16, 16);
  Block block;
  block.rows = 4;
  block.keys = 4;
  EXPECT_EQ(scores_of(problem, block), 16);
  block.mask = BlockMask::causal;
  EXPECT_EQ(scores_of(problem, block), 10);
  block.keys = 6;
  EXPECT_EQ(scores_of(problem, block), 3 + 4 + 5 + 6);
  block.keys = 2;
  EXPECT_EQ(scores_of(problem, block), 1 + 2);
  block.mask = BlockMask::placed;
  block.q = 2;
  block.keys = 4;
  block.kv = 1;
  EXPECT_EQ(scores_of(problem, block), 2 + 3 + 4 + 4);
  block.kv_step = 2;  // keys 1, 3, 5, 7
  EXPECT_EQ(scores_of(problem, block), 1 + 2 + 2 + 3);
}

}  // namespace
}  // namespace fa::parallel
