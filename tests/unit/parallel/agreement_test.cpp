// Configurations: what is refused, and ranks that differ.

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <limits>

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

// Speeds tell which heads of a ring's own keys come last, whatever the scheme is.
TEST(Agreement, OtherSpeedsAreFound) {
  const auto group = make_local_group(3);
  const auto problems = test::run_ranks(3, [&](int rank) {
    ContextParallelConfig config = usual();
    config.scheme = Scheme::ring;
    auto parallel = ContextParallel::create(config, group[static_cast<std::size_t>(rank)]);
    if (rank == 1) parallel.set_speeds({.link = 1e9});
    parallel.check_agreement();
  });
  for (const std::string& problem : problems) EXPECT_NE(problem.find("configuration"), std::string::npos);
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
  EXPECT_EQ(call_refused(set([](auto& in, auto&, auto&) { in.max_multiprocessors = -2; })), "max_multiprocessors");
  EXPECT_EQ(call_refused(set([&](auto& in, auto&, auto&) { in.schedule = {other.data(), 4096}; })), "schedule");
  EXPECT_EQ(call_refused(set([&](auto& in, auto&, auto&) {
              in.cache.block_table = TensorView(other.data(), DType::i32, {1, 1});
            })),
            "cache");
  const SharedPrefix prefix{};
  EXPECT_EQ(call_refused(set([&](auto& in, auto&, auto&) { in.prefixes = std::span(&prefix, 1); })), "prefixes");
  EXPECT_EQ(call_refused(set([&](auto& in, auto&, auto&) {
              in.q_scale = TensorView(other.data(), DType::f32, {1, 2});
            })),
            "q_scale");
  const std::int32_t used = 3;
  EXPECT_EQ(call_refused(set([&](auto& in, auto&, auto&) { in.sequences.seqused_kv = &used; })), "sequences");
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

/// A rank of two, and tensors of forward and backward, each with memory of its own.
class EveryShard : public testing::Test {
 protected:
  struct Slot {
    std::string name;
    TensorView* view;
    bool written;
  };

  TensorView tensor(std::initializer_list<std::int64_t> shape) {
    memory_.emplace_back(1024, 1.0F);
    return TensorView(static_cast<void*>(memory_.back().data()), DType::f32, shape);
  }

  /// What is refused, in words; nothing was sent, so that the group serves calls as before.
  std::string refused(bool backward) {
    try {
      if (backward) {
        parallel_.backward({q_, k_, v_, o_, lse_, dout_, dlse_, {}, sink_}, {dq_, dk_, dv_, {}, dsink_});
      } else {
        parallel_.forward({q_, k_, v_, {}, sink_}, {o_, lse_});
      }
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument) << error.what();
      EXPECT_NO_THROW(parallel_.communicator().check()) << error.what();
      return error.what();
    }
    return "";
  }

  std::vector<Slot> slots(bool backward) {
    std::vector<Slot> all{{"q", &q_, false},       {"k", &k_, false},     {"v", &v_, false},
                          {"sink", &sink_, false}, {"o", &o_, !backward}, {"lse", &lse_, !backward}};
    if (!backward) return all;
    all.insert(all.end(), {{"dout", &dout_, false},
                           {"dlse", &dlse_, false},
                           {"dq", &dq_, true},
                           {"dk", &dk_, true},
                           {"dv", &dv_, true},
                           {"dsink", &dsink_, true}});
    return all;
  }

  static ContextParallelConfig with_sink() {
    ContextParallelConfig config = usual();
    config.attention.sink = true;
    return config;
  }

  std::vector<std::shared_ptr<Communicator>> group_ = make_local_group(2);
  ContextParallel parallel_ = ContextParallel::create(with_sink(), group_[0]);
  std::vector<std::vector<float>> memory_;
  TensorView q_ = tensor({1, 2, 16, 8}), k_ = tensor({1, 1, 16, 8}), v_ = tensor({1, 1, 16, 8}),
             o_ = tensor({1, 2, 16, 8}), lse_ = tensor({1, 2, 16}), sink_ = tensor({2}), dout_ = tensor({1, 2, 16, 8}),
             dlse_ = tensor({1, 2, 16}), dq_ = tensor({1, 2, 16, 8}), dk_ = tensor({1, 1, 16, 8}),
             dv_ = tensor({1, 1, 16, 8}), dsink_ = tensor({2});
};

TEST_F(EveryShard, IsRefusedWithEachFieldThatCannotBe) {
  for (const bool backward : {false, true}) {
    for (const Slot& slot : slots(backward)) {
      const TensorView good = *slot.view;
      const auto expect_refused = [&](const std::function<void(TensorView&)>& spoil) {
        spoil(*slot.view);
        EXPECT_EQ(refused(backward).find(slot.name + " = "), 0U) << slot.name << ": " << refused(backward);
        *slot.view = good;
      };
      const auto last = static_cast<std::size_t>(good.rank - 1);
      for (std::size_t axis = 0; axis <= last; ++axis) {
        if (good.shape[axis] == 1) continue;
        for (const std::int64_t stride :
             {std::int64_t{1} << 62, -(std::int64_t{1} << 58), std::numeric_limits<std::int64_t>::min()}) {
          expect_refused([&](TensorView& view) { view.strides[axis] = stride; });
        }
      }
      for (const int rank : {-1, 5, 1'000'000}) expect_refused([&](TensorView& view) { view.rank = rank; });
      expect_refused([&](TensorView& view) { view.shape[last] = -4; });
      expect_refused([](TensorView& view) { view.data = nullptr; });
      expect_refused([](TensorView& view) { view.data = static_cast<std::byte*>(view.data) + 1; });
      expect_refused([](TensorView& view) { view.dtype = static_cast<DType>(99); });
      if (slot.written) expect_refused([](TensorView& view) { view.read_only = true; });
    }
  }
}

TEST_F(EveryShard, SharesNoMemoryWithWhatIsWritten) {
  for (const bool backward : {false, true}) {
    for (const Slot& written : slots(backward)) {
      for (const Slot& other : slots(backward)) {
        if (!written.written || written.view == other.view) continue;
        const TensorView good = *written.view;
        written.view->data = static_cast<float*>(other.view->data) + (other.view->elements() - 1);
        const std::string text = refused(backward);
        EXPECT_NE(text.find("memory shared with "), std::string::npos) << written.name << " over " << other.name;
        *written.view = good;
      }
    }
  }
}

TEST_F(EveryShard, SizesThatNoProductHoldsAreRefused) {
  constexpr std::int64_t kHuge = std::int64_t{1} << 62;
  for (TensorView* const view : {&q_, &o_}) {
    view->shape[2] = kHuge;
    view->strides[2] = 0;
  }
  EXPECT_NE(refused(false), "");
  for (const ContextShape& shape :
       {ContextShape{kHuge, 2, 1, 32, 32}, ContextShape{1, kHuge, 1, 32, 32}, ContextShape{1, 2, kHuge, 32, 32},
        ContextShape{1, 2, 1, kHuge, 32}, ContextShape{1, 2, 1, 32, kHuge}, ContextShape{-1, 2, 1, 32, 32},
        ContextShape{1, 2, 0, 32, 32}, ContextShape{1, -2, -1, 32, 32},
        ContextShape{1 << 20, 1 << 20, 1 << 20, 1 << 20, 1 << 20}}) {
    EXPECT_THROW(parallel_.prepare(shape, true), Error);
    EXPECT_THROW(static_cast<void>(parallel_.scheme(shape)), Error);
    EXPECT_THROW(static_cast<void>(parallel_.memory(shape, true)), Error);
    EXPECT_THROW(static_cast<void>(parallel_.describe(shape, false)), Error);
    EXPECT_THROW(static_cast<void>(compare_schemes(usual(), ShardLayout::zigzag, shape, 2)), Error);
  }
  constexpr int kMost = std::numeric_limits<int>::max();
  for (const int ranks : {std::numeric_limits<int>::min(), 0, 1 << 17, kMost}) {
    EXPECT_THROW(static_cast<void>(compare_schemes(usual(), ShardLayout::contiguous, {1, 2, 1, kMost, kMost}, ranks)),
                 Error);
    EXPECT_THROW(static_cast<void>(make_local_group(ranks)), Error);
    EXPECT_THROW(static_cast<void>(shard_rows(ShardLayout::zigzag, ranks, 0, {})), Error);
  }
}

}  // namespace
}  // namespace fa
