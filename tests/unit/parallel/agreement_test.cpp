// Configurations: what is refused, and ranks that differ.

#include <gtest/gtest.h>

#include <functional>

#include "unit/parallel/parallel_case.hpp"

namespace fa {
namespace {

using test::ParallelCase;

ContextParallelConfig usual() {
  ParallelCase c;
  c.dtype = DType::f32;
  return c.config();
}

std::string refused(const ContextParallelConfig& config, ShardLayout layout, int ranks, ErrorCode code) {
  try {
    ContextParallel::create(config, make_local_group(ranks)[0], layout);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return std::string(error.field("argument"));
  }
  return "";
}

TEST(Agreement, TheSameOnAllRanks) {
  const auto group = make_local_group(3);
  const auto problems = test::run_ranks(3, [&](int rank) {
    ContextParallel parallel = ContextParallel::create(usual(), group[static_cast<std::size_t>(rank)]);
    parallel.check_agreement();
    parallel.check_agreement();
  });
  for (const std::string& problem : problems) EXPECT_EQ(problem, "");
}

TEST(Agreement, EveryDifferenceIsFound) {
  const std::vector<std::function<void(ContextParallelConfig&)>> changes{
      [](auto& config) { config.scheme = Scheme::all_gather; },
      [](auto& config) { config.head_groups = 1; },
      [](auto& config) { config.gradients = GradientTransfer::native; },
      [](auto& config) { config.ulysses = 1; },
      [](auto& config) { config.attention.causal = false; },
      [](auto& config) { config.attention.causal_align = CausalAlign::top_left; },
      [](auto& config) { config.attention.head_dim = 16; },
      [](auto& config) { config.attention.dtype = DType::f64; },
      [](auto& config) { config.attention.scale = 0.5F; },
      [](auto& config) { config.attention.window_left = 3; },
      [](auto& config) { config.attention.dropout = 0.5F; },
      [](auto& config) { config.attention.sink = true; },
      [](auto& config) { config.attention.score = functions::alibi(); },
      [](auto& config) { config.attention.mask = functions::documents(); },
      [](auto& config) { config.attention.deterministic = true; },
  };
  for (std::size_t i = 0; i <= changes.size(); ++i) {
    const auto group = make_local_group(3);
    const auto problems = test::run_ranks(3, [&](int rank) {
      ContextParallelConfig config = usual();
      if (rank == 1 && i < changes.size()) changes[i](config);
      const ShardLayout layout = rank == 1 && i == changes.size() ? ShardLayout::contiguous : ShardLayout::zigzag;
      ContextParallel::create(config, group[static_cast<std::size_t>(rank)], layout).check_agreement();
    });
    for (const std::string& problem : problems) EXPECT_NE(problem.find("configuration"), std::string::npos) << i;
  }
}

TEST(Agreement, WhatIsRefused) {
  EXPECT_EQ(refused(usual(), ShardLayout::zigzag, 2, ErrorCode::internal), "");
  const auto unsupported = [](auto change) {
    ContextParallelConfig config = usual();
    change(config.attention);
    return refused(config, ShardLayout::zigzag, 2, ErrorCode::unsupported);
  };
  EXPECT_EQ(unsupported([](auto& attention) { attention.page_size = 16; }), "page_size");
  EXPECT_EQ(unsupported([](auto& attention) { attention.accumulate = true; }), "accumulate");
  EXPECT_EQ(unsupported([](auto& attention) { attention.value_in_key = 8; }), "value_in_key");
  EXPECT_EQ(unsupported([](auto& attention) { attention.k_dtype = DType::i8; }), "k_dtype");
  EXPECT_EQ(unsupported([](auto& attention) { attention.dtype = DType::e4m3; }), "dtype");
  EXPECT_EQ(unsupported([](auto& attention) { attention.invariance = Invariance::rows; }), "invariance");
  EXPECT_EQ(unsupported([](auto& attention) { attention.zero_padding = attention.varlen = true; }), "zero_padding");
  EXPECT_EQ(unsupported([](auto& attention) { attention.score = functions::alibi(true); }),
            "requires_grad of capture slope");
  ContextParallelConfig config = usual();
  config.attention.dropout = 0.1F;
  EXPECT_EQ(refused(config, ShardLayout::striped, 2, ErrorCode::unsupported), "layout");
  config = usual();
  config.ulysses = 3;
  EXPECT_EQ(refused(config, ShardLayout::zigzag, 4, ErrorCode::invalid_argument), "ulysses");
  config.scheme = Scheme::ulysses;
  config.ulysses = 2;
  EXPECT_EQ(refused(config, ShardLayout::zigzag, 4, ErrorCode::invalid_argument), "ulysses");
  config = usual();
  config.attention.head_dim = 7;
  EXPECT_EQ(refused(config, ShardLayout::zigzag, 4, ErrorCode::invalid_argument), "head_dim");
}

TEST(Agreement, ANullCommunicator) {
  EXPECT_THROW(ContextParallel::create(usual(), nullptr), Error);
  EXPECT_THROW(make_local_group(0), Error);
}

/// The argument that a forward of one rank of two refuses.
std::string call_refused(const std::function<void(ForwardInputs&, ForwardOutputs&, std::vector<std::int64_t>&)>& change,
                         ContextParallelConfig config = usual()) {
  ContextParallel parallel = ContextParallel::create(config, make_local_group(2)[0]);
  std::vector<float> memory(2 * 16 * 8);
  const TensorView q(memory.data(), DType::f32, {1, 2, 16, 8}), k(memory.data(), DType::f32, {1, 1, 16, 8});
  std::vector<float> result(2 * 16 * 8);
  ForwardInputs inputs{q, k, k};
  ForwardOutputs outputs{TensorView(result.data(), DType::f32, {1, 2, 16, 8})};
  std::vector<std::int64_t> lengths;
  change(inputs, outputs, lengths);
  try {
    parallel.forward(inputs, outputs, nullptr, lengths);
  } catch (const Error& error) {
    return std::string(error.field("argument"));
  }
  return "";
}

TEST(Agreement, CallsThatAreRefused) {
  std::vector<float> other(4096);
  using Lengths = std::vector<std::int64_t>;
  const auto set = [&](auto which) {
    return [&, which](ForwardInputs& inputs, ForwardOutputs& outputs, Lengths& lengths) {
      which(inputs, outputs, lengths);
    };
  };
  EXPECT_EQ(call_refused(set([](auto& in, auto&, auto&) { in.q.dtype = DType::f16; })), "q");
  EXPECT_EQ(call_refused(set([](auto& in, auto&, auto&) { in.q = {}; })), "q");
  EXPECT_EQ(call_refused(set([&](auto& in, auto&, auto&) {
              in.v = TensorView(other.data(), DType::f32, {1, 1, 8, 8});
            })),
            "v");
  EXPECT_EQ(call_refused(set([](auto&, auto& out, auto&) { out.o = {}; })), "o");
  EXPECT_EQ(call_refused(set([](auto&, auto&, auto& lengths) { lengths = {32}; })), "lengths");
  EXPECT_EQ(call_refused(set([](auto& in, auto&, auto&) { in.place = ShardPlace{}; })), "place");
  EXPECT_EQ(call_refused(set([&](auto& in, auto&, auto&) { in.sink = TensorView(other.data(), DType::f32, {2}); })),
            "sink");
  // Zigzag of two ranks takes multiples of 4 rows: of a rank, of 2.
  EXPECT_EQ(call_refused(set([&](auto& in, auto& out, auto&) {
              in.q = TensorView(other.data(), DType::f32, {1, 2, 15, 8});
              out.o = TensorView(other.data() + 2048, DType::f32, {1, 2, 15, 8});
            })),
            "s_q");
  ContextParallelConfig dropout = usual();
  dropout.attention.dropout = 0.5F;
  EXPECT_EQ(call_refused(set([](auto&, auto&, auto&) {}), dropout), "s_q");
  ContextParallelConfig packed = usual();
  packed.attention.varlen = true;
  EXPECT_EQ(call_refused(set([&](auto& in, auto& out, auto& lengths) {
                           in.q = TensorView(other.data(), DType::f32, {16, 2, 8});
                           in.k = in.v = TensorView(other.data(), DType::f32, {16, 1, 8});
                           out.o = TensorView(other.data() + 2048, DType::f32, {16, 2, 8});
                           lengths = {16};
                         }),
                         packed),
            "q");
}

}  // namespace
}  // namespace fa
