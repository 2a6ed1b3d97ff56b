// Ranks that fail, are late or differ: every rank gets an error within the bound.

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <limits>
#include <memory>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include <fa/parallel.h>

#include "unit/parallel/parallel_case.hpp"

namespace fa {
namespace {

using test::ParallelCase;
using Clock = std::chrono::steady_clock;

constexpr auto kBound = std::chrono::milliseconds(400);

ParallelCase usual(Scheme scheme) {
  ParallelCase c;
  c.ranks = 4;
  c.scheme = scheme;
  c.h_q = c.h_kv = 4;
  return c;
}

/// A rank's calls, on memory of its own.
void run_rank(const ParallelCase& c, std::shared_ptr<Communicator> communicator) {
  ContextParallel parallel = ContextParallel::create(c.config(), std::move(communicator), c.layout);
  const std::int64_t rows = c.s_q / c.ranks;
  std::vector<double> memory(static_cast<std::size_t>(c.h_q * rows * c.d_qk), 0.5);
  std::vector<double> o(memory.size()), dq(memory.size()), dk(memory.size()), dv(memory.size());
  std::vector<double> lse(static_cast<std::size_t>(c.h_q * rows));
  const auto view = [&](std::vector<double>& data) {
    return TensorView(data.data(), DType::f64, {1, c.h_q, rows, c.d_qk});
  };
  const TensorView x = view(memory), logs(lse.data(), DType::f64, {1, c.h_q, rows});
  parallel.forward({x, x, x}, {view(o), logs});
  parallel.backward({x, x, x, view(o), logs, x}, {view(dq), view(dk), view(dv)});
}

class Failing : public testing::TestWithParam<Scheme> {};

TEST_P(Failing, ARankThatThrowsEndsAll) {
  const ParallelCase c = usual(GetParam());
  for (const std::uint64_t at : {0, 1, 2}) {
    LocalGroupOptions options;
    options.timeout = std::chrono::seconds(60);
    options.max_delay = std::chrono::microseconds(2000);  // copies are under way when it happens
    options.on_exchange = [at](int rank, std::uint64_t group) {
      if (rank == 2 && group == at) throw std::runtime_error("the link is down");
    };
    const auto group = make_local_group(c.ranks, options);
    const auto begin = Clock::now();
    const auto problems =
        test::run_ranks(c.ranks, [&](int rank) { run_rank(c, group[static_cast<std::size_t>(rank)]); });
    EXPECT_LT(Clock::now() - begin, std::chrono::seconds(10));
    for (const std::string& problem : problems)
      EXPECT_NE(problem.find("the link is down"), std::string::npos) << problem;
  }
}

/// A rank whose `wait` fails, as a kernel's call between two transfers may.
class Interrupted final : public Communicator {
 public:
  Interrupted(std::shared_ptr<Communicator> of, int waits) : of_(std::move(of)), waits_(waits) {}
  int rank() const noexcept override { return of_->rank(); }
  int size() const noexcept override { return of_->size(); }
  Device device() const noexcept override { return of_->device(); }
  std::uint64_t exchange(std::span<const Transfer> group, Stream stream) override {
    return of_->exchange(group, stream);
  }
  void wait(std::uint64_t group, Stream stream) override {
    if (waits_-- == 0) throw std::runtime_error("out of memory");
    of_->wait(group, stream);
  }
  void synchronize(Stream stream) override { of_->synchronize(stream); }
  void check() override { of_->check(); }
  void abort(const std::string& problem) noexcept override { of_->abort(problem); }

 private:
  std::shared_ptr<Communicator> of_;
  int waits_;
};

TEST_P(Failing, ACallThatThrowsBetweenTransfersEndsAll) {
  const ParallelCase c = usual(GetParam());
  LocalGroupOptions options;
  options.timeout = std::chrono::seconds(60);
  const auto group = make_local_group(c.ranks, options);
  const auto begin = Clock::now();
  const auto problems = test::run_ranks(c.ranks, [&](int rank) {
    std::shared_ptr<Communicator> own = group[static_cast<std::size_t>(rank)];
    if (rank == 2) own = std::make_shared<Interrupted>(own, 0);
    run_rank(c, own);
  });
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(10));
  for (const std::string& problem : problems) EXPECT_NE(problem.find("out of memory"), std::string::npos) << problem;
}

TEST_P(Failing, ALateRankEndsAllWithinTheBound) {
  const ParallelCase c = usual(GetParam());
  LocalGroupOptions options;
  options.timeout = kBound;
  const auto group = make_local_group(c.ranks, options);
  const auto begin = Clock::now();
  std::atomic<int> ended{0};
  const auto problems = test::run_ranks(c.ranks, [&](int rank) {
    if (rank == 1) {
      while (ended < c.ranks - 1) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    struct Count {
      std::atomic<int>& of;
      ~Count() { ++of; }
    } const count{ended};
    run_rank(c, group[static_cast<std::size_t>(rank)]);
  });
  EXPECT_GE(Clock::now() - begin, kBound);
  EXPECT_LT(Clock::now() - begin, 10 * kBound);
  for (const std::string& problem : problems)
    EXPECT_NE(problem.find("has waited for rank"), std::string::npos) << problem;
}

TEST_P(Failing, ARankThatLeavesEndsAll) {
  const ParallelCase c = usual(GetParam());
  LocalGroupOptions options;
  options.timeout = std::chrono::seconds(60);
  auto group = make_local_group(c.ranks, options);
  const auto begin = Clock::now();
  const auto problems = test::run_ranks(c.ranks, [&](int rank) {
    std::shared_ptr<Communicator> own = std::move(group[static_cast<std::size_t>(rank)]);
    if (rank == 3) return own.reset();
    run_rank(c, std::move(own));
  });
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(10));
  for (std::size_t rank = 0; rank < 3; ++rank) EXPECT_NE(problems[rank], "") << rank;
}

INSTANTIATE_TEST_SUITE_P(Every, Failing, testing::Values(Scheme::ring, Scheme::all_gather, Scheme::ulysses),
                         [](const auto& scheme) { return std::string(to_string(scheme.param)); });

// Memory that ranks share: as many bytes on all, within the bound, and only writes to where they are expected.
TEST(Failure, SharedMemory) {
  LocalGroupOptions options;
  options.shares_memory = true;
  options.timeout = kBound;
  const auto problems_of = [&](const std::function<void(Communicator&)>& body) {
    const auto group = make_local_group(3, options);
    return test::run_ranks(3, [&](int rank) { body(*group[static_cast<std::size_t>(rank)]); });
  };
  for (const std::string& problem :
       problems_of([](Communicator& own) { own.unshare(own.share(own.rank() == 1 ? 64 : 128)); })) {
    EXPECT_NE(problem.find("where others share"), std::string::npos) << problem;
  }
  const auto begin = Clock::now();
  const auto late = problems_of([](Communicator& own) {
    if (own.rank() == 2) std::this_thread::sleep_for(3 * kBound);
    own.unshare(own.share(64));
  });
  EXPECT_LT(Clock::now() - begin, 10 * kBound);
  for (const std::string& problem : late)
    EXPECT_NE(problem.find("has waited for rank 2"), std::string::npos) << problem;
  // Of rank 0 to rank 1: right, elsewhere, beyond the end, and without a place.
  for (const std::size_t place : {1, 2, 8, 0}) {
    const auto problems = problems_of([place](Communicator& own) {
      auto* const memory = static_cast<double*>(own.share(64));
      memory[0] = 42 + own.rank();
      if (own.rank() < 2) {
        const Communicator::Transfer transfer{
            own.rank() == 0,     1 - own.rank(),
            memory + own.rank(), 1,
            DType::f64,          own.rank() == 1 ? memory + 1 : place == 0 ? nullptr : memory + place};
        own.wait(own.exchange(std::span(&transfer, 1), nullptr), nullptr);
        if (own.rank() == 1 && memory[1] != 42) throw std::runtime_error("other bytes");
      }
      own.unshare(memory);
    });
    EXPECT_EQ(problems[1].empty(), place == 1) << problems[1];
    EXPECT_EQ(problems[1].find("shared memory") == std::string::npos, place == 1) << problems[1];
  }
  const auto messages = make_local_group(1);
  EXPECT_FALSE(messages[0]->shares_memory());
  EXPECT_THROW(messages[0]->share(64), Error);
}

TEST(Failure, AnAbortedGroupServesNoMoreCalls) {
  const ParallelCase c = usual(Scheme::ring);
  const auto group = make_local_group(c.ranks);
  group[2]->abort("the application ends");
  for (const auto& communicator : group) {
    EXPECT_THROW(run_rank(c, communicator), Error);
    EXPECT_THROW(communicator->synchronize(nullptr), Error);
  }
}

// Ranks that send other sizes than are expected.
TEST(Failure, OtherSizes) {
  ParallelCase c = usual(Scheme::ring);
  LocalGroupOptions options;
  options.timeout = std::chrono::seconds(60);
  const auto group = make_local_group(c.ranks, options);
  const auto problems = test::run_ranks(c.ranks, [&](int rank) {
    ParallelCase own = c;
    if (rank == 1) own.s_q = own.s_kv = 64;
    run_rank(own, group[static_cast<std::size_t>(rank)]);
  });
  for (const std::string& problem : problems) EXPECT_NE(problem.find("are expected"), std::string::npos) << problem;
}

// Bounds beyond what a clock counts to: no rank is late.
TEST(Failure, TheLongestBound) {
  const ParallelCase c = usual(Scheme::ring);
  for (const std::chrono::milliseconds timeout :
       {std::chrono::milliseconds::max(), std::chrono::milliseconds(1LL << 45)}) {
    LocalGroupOptions options;
    options.timeout = timeout;
    options.max_delay = std::chrono::microseconds(500);
    const auto group = make_local_group(c.ranks, options);
    const auto problems =
        test::run_ranks(c.ranks, [&](int rank) { run_rank(c, group[static_cast<std::size_t>(rank)]); });
    for (const std::string& problem : problems) EXPECT_EQ(problem, "");
  }
}

TEST(CAbi, PrefixesAreRefused) {
  fa_communicator* communicator = nullptr;
  ASSERT_EQ(fa_communicator_local_group(1, std::numeric_limits<std::int64_t>::max(), &communicator), FA_OK);
  fa_config attention{};
  attention.struct_size = sizeof attention;
  attention.head_dim = 8;
  attention.dtype = FA_F32;
  fa_parallel_config config{};
  config.struct_size = sizeof config;
  config.attention = &attention;
  fa_parallel* parallel = nullptr;
  ASSERT_EQ(fa_parallel_create(&config, communicator, &parallel), FA_OK);
  fa_communicator_destroy(communicator);
  std::vector<float> memory(64), result(64);
  fa_tensor x{sizeof(fa_tensor), FA_F32, 4, FA_TENSOR_ROW_MAJOR, memory.data(), {1, 1, 8, 8}, {}};
  fa_tensor o = x;
  o.data = result.data();
  fa_forward_inputs inputs{};
  inputs.struct_size = sizeof inputs;
  inputs.q = inputs.k = inputs.v = &x;
  fa_forward_outputs outputs{};
  outputs.struct_size = sizeof outputs;
  outputs.o = &o;
  EXPECT_EQ(fa_parallel_forward(parallel, &inputs, &outputs, nullptr, nullptr, 0), FA_OK);
  inputs.prefix_count = 1;
  EXPECT_EQ(fa_parallel_forward(parallel, &inputs, &outputs, nullptr, nullptr, 0), FA_UNSUPPORTED);
  EXPECT_STREQ(fa_last_error_field("argument"), "prefixes");
  fa_parallel_destroy(parallel);
}

TEST(CAbi, AnAbortEndsAllRanks) {
  fa_communicator* ranks[2] = {nullptr, nullptr};
  ASSERT_EQ(fa_communicator_local_group(2, 0, ranks), FA_OK);
  EXPECT_EQ(fa_communicator_check(ranks[1]), FA_OK);
  EXPECT_EQ(fa_communicator_abort(ranks[0], "the data are at an end"), FA_OK);
  EXPECT_EQ(fa_communicator_abort(ranks[0], nullptr), FA_OK) << "again";
  for (fa_communicator* const rank : ranks) {
    EXPECT_EQ(fa_communicator_check(rank), FA_CUDA);
    EXPECT_NE(std::string(fa_last_error_message()).find("the data are at an end"), std::string::npos);
    fa_communicator_destroy(rank);
  }
  EXPECT_EQ(fa_communicator_abort(nullptr, "x"), FA_INVALID_ARGUMENT);
  EXPECT_EQ(fa_communicator_check(nullptr), FA_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace fa
