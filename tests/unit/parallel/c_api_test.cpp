// The C ABI against the C++ one: models, plans, memory, rows, and transports of a program's own.

#include <fa/parallel.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstring>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "unit/parallel/parallel_case.hpp"

namespace fa {
namespace {

/// A group of ranks in this process, with an attention of the first.
class CAbiOfRanks : public testing::Test {
 protected:
  static constexpr int kRanks = 4;

  void SetUp() override {
    attention_.struct_size = sizeof attention_;
    attention_.head_dim = 8;
    attention_.dtype = FA_F64;
    attention_.causal = 1;
    config_.struct_size = sizeof config_;
    config_.layout = FA_LAYOUT_STRIPED;
    config_.attention = &attention_;
    shape_.struct_size = sizeof shape_;
    shape_.b = 1;
    shape_.h_q = shape_.h_kv = 8;
    shape_.s_q = shape_.s_kv = 64;
    ASSERT_EQ(fa_communicator_local_group(kRanks, 0, ranks_.data()), FA_OK);
    ASSERT_EQ(fa_parallel_create(&config_, ranks_[1], &parallel_), FA_OK);
  }
  void TearDown() override {
    fa_parallel_destroy(parallel_);
    for (fa_communicator* const rank : ranks_) fa_communicator_destroy(rank);
  }

  ContextParallelConfig config() const {
    ContextParallelConfig config;
    config.attention.head_dim = 8;
    config.attention.dtype = DType::f64;
    config.attention.causal = true;
    return config;
  }
  ContextParallel same() const {
    return ContextParallel::create(config(), make_local_group(kRanks)[1], ShardLayout::striped);
  }
  static constexpr ContextShape kShape{1, 8, 8, 64, 64};

  fa_config attention_{};
  fa_parallel_config config_{};
  fa_parallel_shape shape_{};
  std::array<fa_communicator*, kRanks> ranks_{};
  fa_parallel* parallel_ = nullptr;
};

TEST_F(CAbiOfRanks, SaysWhatCppSays) {
  const ContextParallel cpp = same();
  std::uint64_t hash = 0;
  std::int32_t layout = -1;
  ASSERT_EQ(fa_parallel_hash(parallel_, &hash), FA_OK);
  EXPECT_EQ(hash, cpp.hash());
  ASSERT_EQ(fa_parallel_layout(parallel_, &layout), FA_OK);
  EXPECT_EQ(layout, FA_LAYOUT_STRIPED);
  for (const bool backward : {false, true}) {
    fa_context_memory memory{};
    memory.struct_size = sizeof memory;
    ASSERT_EQ(fa_parallel_memory(parallel_, &shape_, backward, nullptr, 0, &memory), FA_OK);
    const ContextMemory expected = cpp.memory(kShape, backward);
    EXPECT_EQ(memory.shard_kv, expected.shard_kv);
    EXPECT_EQ(memory.kv_in_flight, expected.kv_in_flight);
    EXPECT_EQ(memory.scratch, expected.scratch);
    const std::string text = cpp.describe(kShape, backward);
    std::uint64_t length = 0;
    ASSERT_EQ(fa_parallel_describe(parallel_, &shape_, backward, nullptr, 0, nullptr, 0, &length), FA_OK);
    EXPECT_EQ(length, text.size());
    std::string given(length + 1, 'x');
    ASSERT_EQ(fa_parallel_describe(parallel_, &shape_, backward, nullptr, 0, given.data(), given.size(), &length),
              FA_OK);
    EXPECT_EQ(given.c_str(), text);
    given.assign(8, 'x');
    ASSERT_EQ(fa_parallel_describe(parallel_, &shape_, backward, nullptr, 0, given.data(), 5, &length), FA_OK);
    EXPECT_EQ(length, text.size());
    EXPECT_EQ(given, text.substr(0, 4) + std::string(1, '\0') + "xxx");
  }
}

TEST_F(CAbiOfRanks, TheModel) {
  fa_cluster_speeds speeds{};
  speeds.struct_size = sizeof speeds;
  speeds.flops = 1e6;
  speeds.link = 1e3;
  speeds.ranks_of_node = 2;
  ClusterSpeeds expected;
  expected.flops = 1e6;
  expected.link = 1e3;
  expected.ranks_of_node = 2;
  const auto all = compare_schemes(config(), ShardLayout::striped, kShape, kRanks, expected);
  std::uint64_t count = 0;
  ASSERT_EQ(fa_compare_schemes(&config_, &shape_, kRanks, &speeds, nullptr, 0, &count), FA_OK);
  ASSERT_EQ(count, all.size());
  ASSERT_GT(count, 2U);
  std::vector<fa_scheme_time> times(count, fa_scheme_time{});
  times.back().scheme = 77;
  ASSERT_EQ(fa_compare_schemes(&config_, &shape_, kRanks, &speeds, times.data(), count - 1, &count), FA_OK);
  EXPECT_EQ(times.back().scheme, 77);
  ASSERT_EQ(fa_compare_schemes(&config_, &shape_, kRanks, &speeds, times.data(), count, &count), FA_OK);
  for (std::size_t i = 0; i < all.size(); ++i) {
    EXPECT_EQ(times[i].scheme, static_cast<int>(all[i].scheme));
    EXPECT_EQ(times[i].ulysses, all[i].ulysses);
    EXPECT_EQ(times[i].forward, all[i].forward);
    EXPECT_EQ(times[i].backward, all[i].backward);
    EXPECT_EQ(times[i].single, all[i].single);
  }
  std::uint64_t before = 0, after = 0;
  ASSERT_EQ(fa_parallel_hash(parallel_, &before), FA_OK);
  ASSERT_EQ(fa_parallel_set_speeds(parallel_, &speeds), FA_OK);
  ASSERT_EQ(fa_parallel_hash(parallel_, &after), FA_OK);
  EXPECT_NE(before, after);
  fa_scheme_time time{};
  time.struct_size = sizeof time;
  ASSERT_EQ(fa_parallel_scheme_time(parallel_, &shape_, nullptr, 0, &time), FA_OK);
  EXPECT_EQ(time.forward, all.front().forward);
  speeds.latency = -1;
  EXPECT_EQ(fa_parallel_set_speeds(parallel_, &speeds), FA_INVALID_ARGUMENT);
  EXPECT_STREQ(fa_last_error_field("argument"), "speeds.latency");
  speeds.latency = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(fa_parallel_set_speeds(parallel_, &speeds), FA_INVALID_ARGUMENT);
  EXPECT_EQ(fa_compare_schemes(&config_, &shape_, kRanks, nullptr, nullptr, 1, &count), FA_INVALID_ARGUMENT);
  EXPECT_STREQ(fa_last_error_field("argument"), "times");
}

TEST(CAbi, RowsAndNames) {
  const std::int64_t lengths[] = {8, 16};
  for (const int layout : {FA_LAYOUT_CONTIGUOUS, FA_LAYOUT_ZIGZAG, FA_LAYOUT_STRIPED}) {
    const auto expected = shard_rows(static_cast<ShardLayout>(layout), 2, 1, lengths);
    std::vector<std::int64_t> rows(expected.size(), -1);
    std::uint64_t count = 0;
    ASSERT_EQ(fa_shard_rows(layout, 2, 1, lengths, 2, rows.data(), 3, &count), FA_OK);
    EXPECT_EQ(count, expected.size());
    EXPECT_EQ(rows[2], expected[2]);
    EXPECT_EQ(rows[3], -1);
    ASSERT_EQ(fa_shard_rows(layout, 2, 1, lengths, 2, rows.data(), rows.size(), &count), FA_OK);
    EXPECT_EQ(rows, expected);
    EXPECT_STREQ(fa_layout_name(layout), to_string(static_cast<ShardLayout>(layout)));
  }
  std::uint64_t count = 0;
  EXPECT_EQ(fa_shard_rows(3, 2, 1, lengths, 2, nullptr, 0, &count), FA_INVALID_ARGUMENT);
  EXPECT_STREQ(fa_last_error_field("argument"), "layout");
  EXPECT_STREQ(fa_layout_name(3), "unknown");
  EXPECT_STREQ(fa_layout_name(-1), "unknown");
  EXPECT_STREQ(fa_scheme_name(FA_SCHEME_ULYSSES), "ulysses");
  EXPECT_STREQ(fa_scheme_name(4), "unknown");
}

TEST_F(CAbiOfRanks, Exchanges) {
  double numbers[kRanks][2] = {};
  const auto problems = test::run_ranks(kRanks, [&](int rank) {
    const int next = (rank + 1) % kRanks, before = (rank + kRanks - 1) % kRanks;
    double* const own = numbers[rank];
    own[0] = rank + 1;
    const fa_transfer transfers[] = {{1, next, FA_F64, 0, own, 1}, {0, before, FA_F64, 0, own + 1, 1}};
    std::uint64_t group = 9;
    fa_communicator* const one = ranks_[static_cast<std::size_t>(rank)];
    if (fa_communicator_exchange(one, transfers, 2, nullptr, &group) != FA_OK || group != 0 ||
        fa_communicator_wait(one, group, nullptr) != FA_OK || fa_communicator_synchronize(one, nullptr) != FA_OK) {
      throw std::runtime_error(fa_last_error_message());
    }
  });
  for (const std::string& problem : problems) EXPECT_EQ(problem, "");
  for (int rank = 0; rank < kRanks; ++rank) EXPECT_EQ(numbers[rank][1], (rank + kRanks - 1) % kRanks + 1);
  fa_device device{};
  ASSERT_EQ(fa_communicator_device(ranks_[0], &device), FA_OK);
  EXPECT_EQ(device.kind, FA_DEVICE_HOST);
  const auto refused = [&](const fa_transfer& transfer) {
    EXPECT_EQ(fa_communicator_exchange(ranks_[0], &transfer, 1, nullptr, nullptr), FA_INVALID_ARGUMENT);
    return std::string(fa_last_error_field("argument"));
  };
  EXPECT_EQ(refused({1, kRanks, FA_F64, 0, numbers, 1}), "transfers[0].peer");
  EXPECT_EQ(refused({1, 1, 99, 0, numbers, 1}), "transfers[0].dtype");
  EXPECT_EQ(refused({1, 1, FA_F64, 0, numbers, -1}), "transfers[0].count");
  EXPECT_EQ(refused({1, 1, FA_F64, 0, nullptr, 1}), "transfers[0].data");
}

/// A transport of a program: it passes everything on to a rank of a local group, and counts.
struct Transport {
  fa_communicator* of = nullptr;
  std::atomic<int> exchanges{0}, destroyed{0}, aborted{0};
  int fails_at = -1;

  static Transport& in(void* user) { return *static_cast<Transport*>(user); }
  static int exchange(void* user, const fa_transfer* transfers, std::uint64_t count, void* stream,
                      std::uint64_t* group) {
    if (in(user).exchanges++ == in(user).fails_at) return FA_OUT_OF_MEMORY;
    return fa_communicator_exchange(in(user).of, transfers, count, stream, group);
  }
  static int wait(void* user, std::uint64_t group, void* stream) {
    return fa_communicator_wait(in(user).of, group, stream);
  }
  static int synchronize(void* user, void* stream) { return fa_communicator_synchronize(in(user).of, stream); }
  static int check(void* user) { return fa_communicator_check(in(user).of); }
  static void abort(void* user, const char* problem) {
    ++in(user).aborted;
    fa_communicator_abort(in(user).of, problem);
  }
  static void destroy(void* user) { ++in(user).destroyed; }

  fa_communicator_functions functions(int rank, int size) {
    fa_communicator_functions all{};
    all.struct_size = sizeof all;
    all.rank = rank;
    all.size = size;
    all.device = {FA_DEVICE_HOST, 0};
    all.user = this;
    all.exchange = exchange;
    all.wait = wait;
    all.synchronize = synchronize;
    all.check = check;
    all.abort = abort;
    all.destroy = destroy;
    return all;
  }
};

TEST_F(CAbiOfRanks, TakeATransportOfTheProgram) {
  for (const int fails_at : {-1, 0}) {
    std::array<fa_communicator*, kRanks> of{};
    ASSERT_EQ(fa_communicator_local_group(kRanks, 0, of.data()), FA_OK);
    std::array<Transport, kRanks> transports;
    const auto problems = test::run_ranks(kRanks, [&](int rank) {
      Transport& own = transports[static_cast<std::size_t>(rank)];
      own.of = of[static_cast<std::size_t>(rank)];
      if (rank == 2) own.fails_at = fails_at;
      const fa_communicator_functions functions = own.functions(rank, kRanks);
      fa_communicator* communicator = nullptr;
      fa_parallel* parallel = nullptr;
      int status = fa_communicator_create(&functions, &communicator);
      if (status == FA_OK) status = fa_parallel_create(&config_, communicator, &parallel);
      fa_communicator_destroy(communicator);
      if (status == FA_OK) status = fa_parallel_check_agreement(parallel, nullptr);
      const std::string problem = status == FA_OK ? "" : fa_last_error_message();
      // What a rank finds to fail it says to the others.
      if (status != FA_OK) fa_communicator_abort(own.of, problem.c_str());
      fa_parallel_destroy(parallel);
      if (status != FA_OK) throw std::runtime_error(problem);
    });
    for (int rank = 0; rank < kRanks; ++rank) {
      const std::string& problem = problems[static_cast<std::size_t>(rank)];
      const Transport& own = transports[static_cast<std::size_t>(rank)];
      EXPECT_EQ(problem.empty(), fails_at < 0) << problem;
      EXPECT_EQ(own.destroyed, 1);
      EXPECT_TRUE(own.exchanges == 1 || (fails_at >= 0 && own.exchanges == 0)) << own.exchanges;
      if (rank == 2 && fails_at == 0) {
        EXPECT_NE(problem.find("exchange of the program returned"), std::string::npos) << problem;
      }
      fa_communicator_destroy(of[static_cast<std::size_t>(rank)]);
    }
  }
  Transport transport;
  fa_communicator* out = nullptr;
  const auto refused = [&](auto change) {
    fa_communicator_functions functions = transport.functions(0, 2);
    change(functions);
    EXPECT_EQ(fa_communicator_create(&functions, &out), FA_INVALID_ARGUMENT);
    EXPECT_EQ(out, nullptr);
    return std::string(fa_last_error_field("argument"));
  };
  EXPECT_EQ(refused([](auto& f) { f.rank = 2; }), "functions.rank");
  EXPECT_EQ(refused([](auto& f) { f.size = 0; }), "functions.size");
  EXPECT_EQ(refused([](auto& f) { f.exchange = nullptr; }), "functions.exchange");
  EXPECT_EQ(refused([](auto& f) { f.abort = nullptr; }), "functions.abort");
  EXPECT_EQ(refused([](auto& f) { f.device.kind = 9; }), "functions.device.kind");
  EXPECT_EQ(transport.destroyed, 0);
}

TEST(CAbi, GroupsWithOptions) {
  struct Heard {
    std::atomic<int> calls{0};
    static int hear(void* user, std::int32_t rank, std::uint64_t) {
      ++static_cast<Heard*>(user)->calls;
      return rank == 1 ? FA_CUDA : FA_OK;
    }
  } heard;
  fa_local_group_options options{};
  options.struct_size = sizeof options;
  options.seed = 3;
  options.max_delay_us = 50;
  options.on_exchange = &Heard::hear;
  options.user = &heard;
  fa_communicator* ranks[2] = {};
  ASSERT_EQ(fa_communicator_local_group_of(2, &options, ranks), FA_OK);
  const auto problems = test::run_ranks(2, [&](int rank) {
    double number = 0;
    const fa_transfer transfer{rank == 0 ? 1 : 0, 1 - rank, FA_F64, 0, &number, 1};
    int status = fa_communicator_exchange(ranks[rank], &transfer, 1, nullptr, nullptr);
    if (status == FA_OK) status = fa_communicator_synchronize(ranks[rank], nullptr);
    if (status != FA_OK) throw std::runtime_error(fa_last_error_message());
  });
  for (const std::string& problem : problems) {
    EXPECT_NE(problem.find("on_exchange of the program returned"), std::string::npos) << problem;
  }
  EXPECT_GE(heard.calls, 1);
  for (fa_communicator* const rank : ranks) fa_communicator_destroy(rank);
  options.on_exchange = nullptr;
  options.shares_memory = 1;  // transfers of a program go where it says all the same
  ASSERT_EQ(fa_communicator_local_group_of(2, &options, ranks), FA_OK);
  const auto shared = test::run_ranks(2, [&](int rank) {
    double number = rank;
    const fa_transfer transfer{rank == 0 ? 1 : 0, 1 - rank, FA_F64, 0, &number, 1};
    if (fa_communicator_exchange(ranks[rank], &transfer, 1, nullptr, nullptr) != FA_OK ||
        fa_communicator_synchronize(ranks[rank], nullptr) != FA_OK || number != 0) {
      throw std::runtime_error(fa_last_error_message());
    }
  });
  for (const std::string& problem : shared) EXPECT_EQ(problem, "");
  for (fa_communicator* const rank : ranks) fa_communicator_destroy(rank);
  options.max_delay_us = -1;
  EXPECT_EQ(fa_communicator_local_group_of(2, &options, ranks), FA_INVALID_ARGUMENT);
  EXPECT_STREQ(fa_last_error_field("argument"), "options.max_delay_us");
  ASSERT_EQ(fa_communicator_local_group_of(2, nullptr, ranks), FA_OK);
  for (fa_communicator* const rank : ranks) fa_communicator_destroy(rank);
}

}  // namespace
}  // namespace fa
