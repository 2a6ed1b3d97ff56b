// The model of time that schemes are chosen by.

#include <gtest/gtest.h>

#include <algorithm>
#include <span>
#include <string>
#include <utility>
#include <vector>

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

// Of every scheme: keys of other ranks that a rank holds at a time. A ring has two shards. An all_gather has all keys
// of a piece, and twice what comes of one: two shards, where KV heads divide into enough pieces, else as few as they
// allow.
TEST(Model, MemoryOfKeysOfEveryScheme) {
  for (const int ranks : {2, 4, 8, 16}) {
    for (const std::int64_t heads : {2, 4, 8, 12, 16, 32}) {
      for (const bool varlen : {false, true}) {
        ContextParallelConfig config = usual();
        config.attention.dtype = DType::f32;
        config.attention.varlen = varlen;
        const ContextShape shape{1, heads, heads, 64 * ranks, 64 * ranks};
        std::vector<std::int64_t> lengths;
        if (varlen) lengths = {48 * ranks, 16 * ranks};
        const auto shards_of = [&](Scheme scheme, int ulysses, bool backward) {
          config.scheme = scheme;
          config.ulysses = ulysses;
          ContextParallel parallel = ContextParallel::create(config, make_local_group(ranks)[0]);
          parallel.set_speeds({.flops = 1, .backward_flops = 1});  // calls side by side, where there are such
          const ContextMemory memory = parallel.memory(shape, backward, lengths);
          EXPECT_EQ(memory.shard_kv, static_cast<std::size_t>(heads) * 64 * 256 * 4);
          EXPECT_GE(memory.scratch, memory.kv_in_flight);
          return static_cast<double>(memory.kv_in_flight) / static_cast<double>(memory.shard_kv);
        };
        for (const bool backward : {false, true}) {
          SCOPED_TRACE(std::to_string(ranks) + " ranks, heads " + std::to_string(heads));
          EXPECT_EQ(shards_of(Scheme::ring, 1, backward), 2);
          if (heads % ranks == 0) {
            EXPECT_EQ(shards_of(Scheme::ulysses, 0, backward), 0);
          }
          std::int64_t pieces = heads;
          for (std::int64_t n = heads; n >= std::max(4, (3 * ranks + 1) / 2); --n) pieces = heads % n == 0 ? n : pieces;
          const double expected = (3.0 * ranks - 2) / static_cast<double>(pieces);
          EXPECT_DOUBLE_EQ(shards_of(Scheme::all_gather, 1, backward), expected);
          if (2 * heads >= 3 * ranks) {
            EXPECT_LE(expected, 2);
          }
          if (ranks > 2) {
            EXPECT_EQ(shards_of(Scheme::ring, 2, backward), 2);
          }
        }
      }
    }
  }
}

// Own keys come last of half of the heads, where kernels of packed batches take long beside transfers.
TEST(Model, OwnKeysThatComeLast) {
  const std::vector<std::int64_t> lengths{65536, 32768, 32768};
  const auto late = [&](std::int64_t h_q, std::int64_t h_kv, bool varlen, Scheme scheme, double link) {
    ContextParallelConfig config = usual();
    config.attention.varlen = varlen;
    const ContextShape shape{1, h_q, h_kv, 1 << 17, 1 << 17};
    SchemeTime time;
    time.scheme = scheme;
    time.ulysses = 1;
    parallel::Problem problem =
        parallel::problem_of(config, ShardLayout::zigzag, 2, shape,
                             varlen ? std::span<const std::int64_t>(lengths) : std::span<const std::int64_t>(), time);
    ClusterSpeeds speeds;
    speeds.link = link;
    parallel::set_late_heads(problem, 2, speeds, false);
    return std::pair(problem.late_heads, problem.late_gradient_heads);
  };
  using Pair = std::pair<std::int64_t, std::int64_t>;
  EXPECT_EQ(late(32, 8, true, Scheme::ring, 300e9), Pair(4, 4));
  EXPECT_EQ(late(32, 8, false, Scheme::ring, 300e9), Pair(0, 0)) << "dense calls end evenly";
  EXPECT_EQ(late(32, 8, true, Scheme::all_gather, 300e9), Pair(0, 0));
  EXPECT_EQ(late(32, 8, true, Scheme::ring, 50e9), Pair(0, 4));
  EXPECT_EQ(late(32, 8, true, Scheme::ring, 20e9), Pair(0, 0));
  EXPECT_EQ(late(32, 1, true, Scheme::ring, 300e9), Pair(0, 0)) << "a head has no half";
}

}  // namespace
}  // namespace fa
