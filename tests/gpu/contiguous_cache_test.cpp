// A KV cache that is not in pages on the device: its lengths are read there, and keys are shared by schedules.

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gpu/captured_graph.hpp"
#include "gpu/paged_case.hpp"
#include "gpu/paged_runs.hpp"
#include "gpu/scoped_stream.hpp"
#include "plan/planner.hpp"

namespace fa::test {
namespace {

using ContiguousCaches = GpuTest;

PagedCase contiguous(PagedCase c) {
  c.page_size = kContiguous;
  return c;
}

class RandomContiguous : public GpuTest, public ::testing::WithParamInterface<std::uint32_t> {};

TEST_P(RandomContiguous, MatchFloat64) {
  run(contiguous(random_case(GetParam())));
}

TEST_P(RandomContiguous, WithASchedule) {
  run_scheduled(contiguous(long_case(GetParam())));
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomContiguous, ::testing::Range(400u, 480u));

TEST_F(ContiguousCaches, AFewLongDecodesShareKeys) {
  for (const std::int64_t b : {1, 2, 7, 48}) {
    for (const std::int64_t d : {64, 128, 256}) {
      PagedCase c;
      c.attention = {.h_q = 8, .h_kv = 2, .d_qk = d, .d_v = d, .causal = true};
      c.rows.assign(static_cast<std::size_t>(b), 1);
      for (std::int32_t i = 0; i < b; ++i) c.keys.push_back(b > 7 ? 10 + 70 * i : 9000 + 1500 * i);
      c.indexed = b == 7;
      run_scheduled(contiguous(c));
    }
  }
}

TEST_F(ContiguousCaches, OfEightAndFourBits) {
  constexpr std::array kStored{DType::e4m3, DType::i8, DType::u4x2};
  for (const DType stored : kStored) {
    for (const bool indexed : {false, true}) {
      PagedCase c;
      c.attention = {.h_q = 8, .h_kv = 2, .d_qk = 128, .d_v = 128, .causal = true};
      c.keys = {5000, 1, 0, 900, 4096};
      c.rows = {1, 1, 1, 1, 1};
      c.k_dtype = c.v_dtype = stored;
      c.group_size = stored == DType::u4x2 ? 64 : 0;
      c.indexed = indexed;
      run_scheduled(contiguous(c));
    }
  }
}

/// Packed queries, some of none, over requests without keys too.
TEST_F(ContiguousCaches, PrefillsChunksAndDecodesAreOneLaunch) {
  for (const Layout layout : {Layout::bshd, Layout::bhsd}) {
    PagedCase c;
    c.attention = {.h_q = 32, .h_kv = 8, .d_qk = 128, .d_v = 128, .causal = true, .layout = layout};
    c.packed = true;
    c.rows = {300, 512, 128, 200};
    c.keys = {300, 512, 900, 1000};
    for (int i = 0; i < 40; ++i) {
      c.rows.push_back(i % 4 == 3 ? 5 : i % 5 == 0 ? 0 : 1);
      c.keys.push_back(i % 3 == 0 ? 0 : 20 + 137 * i);
    }
    run_scheduled(contiguous(c));
  }
}

/// Of a Hopper GPU, where the copy engine brings rows of the cache.
TEST_F(ContiguousCaches, PrefillsByTheCopyEngine) {
  if (driver::device_info(0).arch != plan::parse_arch("sm_90a")) GTEST_SKIP() << "GPU 0 is no Hopper";
  std::mt19937 random(6);
  for (const std::int64_t d : {40, 64, 96, 128, 192, 256}) {
    for (const bool packed : {false, true}) {
      PagedCase c;
      c.attention = {.h_q = 8, .h_kv = 2, .d_qk = d, .d_v = d, .causal = random() % 4 != 0};
      c.attention.layout = packed ? Layout::bshd : Layout::bhsd;
      c.attention.dtype = random() % 3 == 0 ? DType::f16 : DType::bf16;
      c.packed = packed;
      c.indexed = random() % 2 == 0;
      c.bounded = random() % 2 == 0;
      for (int i = 0; i < 4; ++i) {
        c.rows.push_back(packed ? static_cast<std::int32_t>(random() % 500 + 100) : 130);
        c.keys.push_back(static_cast<std::int32_t>(random() % 1200));
      }
      if (random() % 2 == 0) c.variant.config.window_left = static_cast<std::int64_t>(256 + random() % 200);
      if (random() % 3 == 0) c.variant.config.sink = true;
      c = contiguous(c);
      const AttentionCase whole = attention_of(c);
      const KernelInfo info = Attention::create(config_of(c))
                                  .kernel_info({.b = c.b(),
                                                .h_q = 8,
                                                .h_kv = 2,
                                                .s_q = whole.s_q,
                                                .s_kv = whole.s_kv,
                                                .total_q = packed ? 4 * whole.s_q : 0});
      EXPECT_EQ(info.name, "fa_sm90_forward") << info.spec;
      EXPECT_EQ(info.local_bytes, 0) << info.spec;
      run(c);
    }
  }
}

TEST_F(ContiguousCaches, FunctionsWindowsAndSinksMatchFloat64) {
  for (const VariantChoice& choice : variant_choices(false)) {
    for (const bool packed : {false, true}) {
      PagedCase c;
      c.attention = {.h_q = 6, .h_kv = 2, .dtype = packed ? DType::f16 : DType::bf16, .causal = true};
      c.attention.causal = choice.config.window_right < 0 && choice.name != "prefix";
      c.variant = choice;
      c.packed = packed;
      c.rows = packed ? std::vector<std::int32_t>{1, 70, 3, 1} : std::vector<std::int32_t>{2, 2, 2, 2};
      c.keys = {300, 70, 129, 1};
      c.begin = {40, 0, 3, 0};
      run(contiguous(c));
    }
  }
}

/// One capture of a schedule and of calls with it and without, replayed with 50 sets of lengths: the bits are those of
/// fresh calls.
TEST_F(ContiguousCaches, ReplaysReadLengthsAndHaveTheBitsOfFreshCalls) {
  for (const std::size_t b : {std::size_t{5}, std::size_t{40}}) {
    PagedCase c;
    c.attention = {.h_q = 8, .h_kv = 2, .d_qk = 128, .d_v = 128, .causal = true};
    c.rows.assign(b, 1);
    c.keys.assign(b, 2000);
    c = contiguous(c);
    DevicePaged device(c);
    const Attention attention = Attention::create(config_of(c));
    const DeviceBuffer memory(attention.schedule_size(limits_of(device)));
    ForwardInputs with = device.inputs();
    with.schedule = {memory.data(), memory.size()};
    const auto scheduled = [&](Stream stream) {
      attention.schedule(schedule_inputs(device), with.schedule, stream);
      attention.forward(with, device.outputs(), stream);
    };
    const auto alone = [&](Stream stream) { attention.forward(device.inputs(), device.outputs(), stream); };
    scheduled(nullptr);
    alone(nullptr);
    device.expect_forward();
    const ScopedStream stream;
    const CapturedGraph of_scheduled(stream.get(), [&] { scheduled(stream.get()); });
    const CapturedGraph of_alone(stream.get(), [&] { alone(stream.get()); });
    std::mt19937 random(static_cast<unsigned>(b));
    for (int round = 0; round < (b > 5 ? 5 : 50); ++round) {
      PagedCase next = c;
      for (std::int32_t& keys : next.keys) keys = random() % 5 == 0 ? 0 : static_cast<std::int32_t>(random() % 2001);
      next.keys[static_cast<std::size_t>(round) % b] = 2000;  // the cache keeps its rows
      const PagedData data = make_data(next);
      const auto replay = [&](const CapturedGraph& graph, const auto& call) {
        device.become(next, data);
        graph.replay(stream.get());
        const AttentionOutputs replayed = device.results();
        device.expect_forward();
        device.become(next, data);
        call(nullptr);
        const AttentionOutputs fresh = device.results();
        EXPECT_EQ(replayed.o.bytes(), fresh.o.bytes()) << "round " << round;
        EXPECT_EQ(replayed.lse.bytes(), fresh.lse.bytes()) << "round " << round;
      };
      replay(of_scheduled, scheduled);
      replay(of_alone, alone);
    }
  }
}

/// Whatever lengths and indices hold, nothing outside of the cache is read: compute-sanitizer looks, too.
TEST_F(ContiguousCaches, WrongLengthsReadNothingElse) {
  for (const std::uint32_t seed : {1u, 2u, 3u, 4u, 5u, 6u}) {
    const PagedCase c = contiguous(random_case(seed));
    SCOPED_TRACE(::testing::PrintToString(c));
    PagedData data = make_data(c);
    std::mt19937 random(seed);
    const auto spoil = [&](std::vector<std::int32_t>& values) {
      constexpr std::array kWild{-1, std::numeric_limits<std::int32_t>::min(), std::numeric_limits<std::int32_t>::max(),
                                 1 << 20, 12345};
      for (std::int32_t& value : values) {
        if (random() % 2 == 0) value = pick(random, kWild);
      }
    };
    spoil(data.used_kv);
    spoil(data.begin);
    spoil(data.batch_index);
    const DevicePaged device(c, data);
    Attention::create(config_of(c)).forward(device.inputs(), device.outputs());
    device.results();
  }
}

TEST_F(ContiguousCaches, WrongLengthsAreNamedOnRequest) {
  PagedCase c;
  c.attention = {.h_q = 2, .h_kv = 1, .causal = true};
  c.rows = {1, 1};
  c.keys = {30, 17};
  c.indexed = true;
  c = contiguous(c);
  AttentionConfig config = config_of(c);
  config.check_sequences = true;
  const Attention attention = Attention::create(config);
  const PagedData right = make_data(c);
  const DevicePaged device(c, right);
  attention.forward(device.inputs(), device.outputs());
  device.expect_forward();
  PagedData wrong = right;
  wrong.used_kv[1] = static_cast<std::int32_t>(right.page_rows) + 1;
  expect_refused(attention, c, wrong, "seqused_kv[1]");
  wrong = right;
  wrong.begin = {0, 18};
  expect_refused(attention, c, wrong, "cache.seq_begin[1]");
  wrong = right;
  wrong.batch_index[0] = 4;
  expect_refused(attention, c, wrong, "cache.batch_index[0]");
}

}  // namespace
}  // namespace fa::test
