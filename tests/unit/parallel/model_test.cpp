// The model of time that schemes are chosen by.

#include <gtest/gtest.h>

#include <fa/parallel.hpp>

#include "parallel/config.hpp"

namespace fa {
namespace {

ContextParallelConfig usual() {
  ContextParallelConfig config;
  config.attention.head_dim = 128;
  config.attention.causal = true;
  return config;
}

constexpr ContextShape of_tokens(std::int64_t tokens, std::int64_t h_q = 16, std::int64_t h_kv = 16) {
  return {1, h_q, h_kv, tokens, tokens};
}

double efficiency(std::int64_t tokens, int ranks, const ClusterSpeeds& speeds = {}) {
  return compare_schemes(usual(), ShardLayout::zigzag, of_tokens(tokens), ranks, speeds).front().efficiency(ranks);
}

// More tokens, more work for each byte: the efficiency grows, and never exceeds one.
TEST(Model, EfficiencyGrowsWithTokens) {
  for (const int ranks : {2, 8, 64}) {
    double before = 0;
    for (std::int64_t tokens = 1 << 14; tokens <= 1 << 24; tokens *= 4) {
      const double is = efficiency(tokens, ranks);
      EXPECT_GE(is, before);
      EXPECT_LE(is, 1.0);
      before = is;
    }
    EXPECT_GT(before, 0.9);
  }
}

// Pieces that K and V come in: four, or as many as keep what is held to two shards, as far as heads divide.
TEST(Model, PiecesOfAllGatherDivideTheHeads) {
  ContextParallelConfig config = usual();
  config.scheme = Scheme::all_gather;
  const auto pieces = [&](int ranks, std::int64_t heads) {
    const ContextShape shape{1, heads, heads, 4096, 4096};
    const SchemeTime time = compare_schemes(config, ShardLayout::zigzag, shape, ranks).front();
    return parallel::problem_of(config, ShardLayout::zigzag, ranks, shape, {}, time).head_groups;
  };
  EXPECT_EQ(pieces(2, 16), 4);
  EXPECT_EQ(pieces(4, 16), 8);
  EXPECT_EQ(pieces(8, 24), 12);
  EXPECT_EQ(pieces(2, 7), 7);
  EXPECT_EQ(pieces(2, 2), 2);
  EXPECT_EQ(pieces(2, 2147418083), 2147418083) << "a prime, which is not searched for ever";
}

TEST(Model, SlowLinksCost) {
  ClusterSpeeds slow;
  slow.link = 10e9;
  EXPECT_LT(efficiency(1 << 16, 8, slow), efficiency(1 << 16, 8));
}

TEST(Model, ChoicesAreThoseThatSizesAllow) {
  // Two KV heads: Ulysses of 2 at most, alone or with rings.
  for (const SchemeTime& time : compare_schemes(usual(), ShardLayout::zigzag, of_tokens(1 << 16, 16, 2), 8)) {
    EXPECT_LE(time.ulysses, 2);
    EXPECT_NE(time.scheme, Scheme::ulysses);
  }
  ContextParallelConfig config = usual();
  config.scheme = Scheme::ring;
  EXPECT_EQ(compare_schemes(config, ShardLayout::zigzag, of_tokens(1 << 16), 8).size(), 1U);
  config.ulysses = 4;
  const auto times = compare_schemes(config, ShardLayout::zigzag, of_tokens(1 << 16), 8);
  ASSERT_EQ(times.size(), 1U);
  EXPECT_EQ(times[0].ulysses, 4);
  config.scheme = Scheme::ulysses;
  config.ulysses = 0;
  EXPECT_EQ(compare_schemes(config, ShardLayout::zigzag, of_tokens(1 << 16), 8)[0].scheme, Scheme::ulysses);
  EXPECT_THROW(compare_schemes(config, ShardLayout::zigzag, of_tokens(1 << 16, 16, 2), 8), Error);
  EXPECT_THROW(compare_schemes(usual(), ShardLayout::zigzag, of_tokens(1001), 8), Error);
}

// Where no choice serves, the error is that of the one which asks for the least.
TEST(Model, SizesThatNoChoiceTakesAreNamed) {
  for (const auto& [shape, argument] : {std::pair{of_tokens(1 << 16, 16, 0), "h_q"}, std::pair{of_tokens(1001), "s_q"},
                                        std::pair{of_tokens(1 << 16, std::int64_t{1} << 57, 1), "h_q"}}) {
    try {
      compare_schemes(usual(), ShardLayout::zigzag, shape, 8);
      ADD_FAILURE() << argument << " was accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      EXPECT_EQ(error.field("argument"), argument) << error.what();
      EXPECT_FALSE(std::string(error.field("accepted")).empty());
    }
  }
}

// Contiguous causal shards leave ranks idle, and the model knows.
TEST(Model, BalanceCounts) {
  ContextParallelConfig config = usual();
  config.scheme = Scheme::ring;
  const auto time = [&](ShardLayout layout) {
    return compare_schemes(config, layout, of_tokens(1 << 20), 8).front().forward;
  };
  EXPECT_NEAR(time(ShardLayout::contiguous) / time(ShardLayout::zigzag), 15.0 / 8, 0.05);
}

// Of ranks that share heads, the layout of rows changes nothing.
TEST(Model, UlyssesIsBalancedByItself) {
  ContextParallelConfig config = usual();
  config.scheme = Scheme::ulysses;
  const auto time = [&](ShardLayout layout) {
    return compare_schemes(config, layout, of_tokens(1 << 18), 8).front().forward;
  };
  EXPECT_NEAR(time(ShardLayout::contiguous), time(ShardLayout::zigzag), time(ShardLayout::zigzag) / 1000);
}

TEST(Model, SharesOfWork) {
  parallel::Problem problem;
  problem.ranks = 4;
  problem.layout = ShardLayout::zigzag;
  problem.causal = true;
  problem.lengths_q = problem.lengths_kv = {1024};
  const parallel::Shares shares = parallel::shares_of(problem);
  EXPECT_NEAR(shares.scores, 1024.0 * 1025 / 2, 1024);
  EXPECT_NEAR(shares.greatest, shares.scores / 4, 1024);
  EXPECT_EQ(shares.hops, 3);
  problem.layout = ShardLayout::contiguous;
  problem.window_left = 100;
  EXPECT_EQ(parallel::shares_of(problem).hops, 1);
}

TEST(Model, MemoryIsTold) {
  ContextParallelConfig config = usual();
  config.attention.dtype = DType::f32;
  config.scheme = Scheme::ring;
  const ContextParallel parallel = ContextParallel::create(config, make_local_group(4)[1]);
  const ContextMemory memory = parallel.memory(of_tokens(1 << 10), true);
  EXPECT_EQ(memory.shard_kv, std::size_t{16} * 256 * 256 * 4);
  EXPECT_EQ(memory.kv_in_flight, 2 * memory.shard_kv);
  EXPECT_GE(memory.scratch, memory.kv_in_flight);
  const std::string text = parallel.describe(of_tokens(1 << 10), false);
  EXPECT_NE(text.find("exchange 0: to 2 k"), std::string::npos) << text;
  EXPECT_NE(text.find("forward, adding,"), std::string::npos) << text;
}

}  // namespace
}  // namespace fa
