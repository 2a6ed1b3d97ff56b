// A KV cache in pages on the device.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "api/problem.hpp"
#include "api/validate.hpp"
#include "gpu/captured_graph.hpp"
#include "gpu/paged_case.hpp"
#include "gpu/paged_runs.hpp"
#include "gpu/scoped_stream.hpp"
#include "plan/planner.hpp"
#include "reference/forward.hpp"
#include "support/paged_case.hpp"
#include "support/schedule_lists.hpp"

namespace fa::test {
namespace {

using Paged = GpuTest;

class RandomPaged : public GpuTest, public ::testing::WithParamInterface<std::uint32_t> {};

TEST_P(RandomPaged, MatchFloat64) {
  run(random_case(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomPaged, ::testing::Range(0u, 120u));

/// The same over K or V of 8 bits, whose head dims are multiples of 16.
PagedCase stored_case(std::uint32_t seed) {
  PagedCase c = random_case(seed);
  std::mt19937 random(seed + 7);
  AttentionCase& a = c.attention;
  if (a.dtype == DType::f32) a.dtype = DType::bf16;
  a.d_qk = (a.d_qk + 15) / 16 * 16;
  a.d_v = (a.d_v + 15) / 16 * 16;
  constexpr std::array<std::optional<DType>, 3> kStored{DType::e4m3, DType::i8, std::nullopt};
  c.k_dtype = pick(random, kStored);
  c.v_dtype = c.k_dtype ? pick(random, kStored) : std::optional(DType::e4m3);
  return c;
}

class RandomStored : public GpuTest, public ::testing::WithParamInterface<std::uint32_t> {};

TEST_P(RandomStored, MatchFloat64) {
  run(stored_case(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomStored, ::testing::Range(200u, 280u));

/// K or V of 4 bits, beside others.
PagedCase u4_case(std::uint32_t seed) {
  PagedCase c = stored_case(seed);
  std::mt19937 random(seed + 11);
  AttentionCase& a = c.attention;
  c.group_size = pick(random, std::array{32, 64, 128});
  a.d_qk = (a.d_qk + c.group_size - 1) / c.group_size * c.group_size;
  a.d_v = (a.d_v + c.group_size - 1) / c.group_size * c.group_size;
  if (random() % 2 == 0) {
    c.k_dtype = DType::u4x2;
    if (random() % 2 == 0) c.v_dtype = DType::u4x2;
  } else {
    c.v_dtype = DType::u4x2;
  }
  return c;
}

class RandomU4 : public GpuTest, public ::testing::WithParamInterface<std::uint32_t> {};

TEST_P(RandomU4, MatchFloat64) {
  run(u4_case(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomU4, ::testing::Range(300u, 380u));

TEST_F(Paged, LongDecodesOverFourBits) {
  for (const int group : {32, 64, 128}) {
    for (const DType dtype : {DType::f16, DType::bf16}) {
      for (const std::int64_t d : {128, 256}) {
        PagedCase c;
        c.attention.dtype = dtype;
        c.attention.d_qk = c.attention.d_v = d;
        c.attention.h_q = 8;
        c.attention.h_kv = 2;
        c.attention.causal = true;
        c.keys = {5000, 1, 0, 900, 4096};
        c.rows = {1, 1, 1, 1, 1};
        c.k_dtype = c.v_dtype = DType::u4x2;
        c.group_size = group;
        run(c);
      }
    }
  }
}

/// All requests decode, so that blocks share keys.
TEST_F(Paged, LongDecodesOverEightBits) {
  for (const DType stored : {DType::e4m3, DType::i8}) {
    for (const std::int64_t d : {64, 128, 256}) {
      PagedCase c;
      c.attention.dtype = stored == DType::i8 ? DType::f16 : DType::bf16;
      c.attention.d_qk = c.attention.d_v = d;
      c.attention.h_q = 8;
      c.attention.h_kv = 2;
      c.attention.causal = true;
      c.keys = {5000, 1, 0, 900, 4096};
      c.rows = {1, 1, 1, 1, 1};
      c.k_dtype = c.v_dtype = stored;
      run(c);
    }
  }
}

/// Of a contiguous cache, split or not, with one scale for a head.
TEST_F(Paged, ContiguousCachesOfEightBits) {
  for (const std::int64_t s_q : {1, 7, 200}) {
    constexpr std::int64_t kB = 2, kHeadsQ = 8, kHeadsKv = 2, kKeys = 3000, kD = 128;
    AttentionCase of_q;
    of_q.dtype = DType::bf16;
    of_q.b = kB;
    of_q.h_q = kHeadsQ;
    of_q.h_kv = kHeadsKv;
    of_q.s_q = s_q;
    of_q.s_kv = 1;
    of_q.d_qk = of_q.d_v = kD;
    const HostTensor q = make_inputs(of_q).q;
    HostTensor k(DType::e4m3, kB, kHeadsKv, kKeys, kD, Layout::bhsd),
        v(DType::i8, kB, kHeadsKv, kKeys, kD, Layout::bhsd);
    std::mt19937 random(3);
    for (HostTensor* const tensor : {&k, &v}) {
      for (std::byte& byte : tensor->bytes()) byte = static_cast<std::byte>(random() % 0x7f | (random() % 2) << 7);
    }
    HostTensor scales(DType::f32, 1, kHeadsKv, 1);
    scales.set(0, 0, 0, 0, 0.004);
    scales.set(0, 1, 0, 0, -0.01);
    HostTensor o(DType::bf16, kB, kHeadsQ, s_q, kD, Layout::bshd), lse(DType::f32, kB, kHeadsQ, s_q);
    HostTensor expected_o(DType::f64, kB, kHeadsQ, s_q, kD, Layout::bshd), expected_lse(DType::f64, kB, kHeadsQ, s_q);
    o.fill_with_nan();
    lse.fill_with_nan();
    const DeviceTensor on_q(q), on_k(k), on_v(v), on_scales(scales), on_o(o), on_lse(lse);
    AttentionConfig config{.head_dim = kD, .dtype = DType::bf16, .causal = true};
    config.k_dtype = DType::e4m3;
    config.v_dtype = DType::i8;
    config.tune = TunePolicy::off;
    ForwardInputs in{on_q.const_view(), on_k.const_view(), on_v.const_view()};
    const auto broadcast = [&](TensorView view) {
      view.shape = {kB, kHeadsKv, kKeys};
      view.strides = {0, 1, 0};
      return view;
    };
    in.k_scale = in.v_scale = broadcast(on_scales.const_view());
    Attention::create(config).forward(in, {on_o.view(), on_lse.view()});
    driver::check(driver::api().cuCtxSynchronize(), "cuCtxSynchronize");
    on_o.read(o);
    on_lse.read(lse);
    reference::ForwardArgs args;
    args.q = q.view();
    args.k = k.view();
    args.v = v.view();
    args.k_scale = args.v_scale = broadcast(scales.view());
    args.o = expected_o.view();
    args.lse = expected_lse.view();
    args.scale = 1 / std::sqrt(static_cast<double>(kD));
    args.causal = args.f64 = true;
    reference::forward(args);
    EXPECT_LE(compare(o.view(), expected_o.view()).max_abs, 2e-2) << s_q;
    EXPECT_LE(compare(lse.view(), expected_lse.view()).max_abs, 1e-2) << s_q;
  }
}

/// Captures are read by request and position.
TEST_F(Paged, FunctionsWindowsAndSinksMatchFloat64) {
  for (const VariantChoice& choice : variant_choices(false)) {
    for (const bool packed : {false, true}) {
      PagedCase c;
      c.attention = {.h_q = 6, .h_kv = 2, .dtype = packed ? DType::f16 : DType::bf16, .causal = true};
      c.attention.causal = choice.config.window_right < 0 && choice.name != "prefix";
      c.variant = choice;
      c.page_size = packed ? 12 : 64;
      c.packed = packed;
      c.rows = packed ? std::vector<std::int32_t>{1, 70, 3, 1} : std::vector<std::int32_t>{2, 2, 2, 2};
      c.keys = {300, 70, 129, 1};
      c.begin = {40, 0, 3, 0};
      run(c);
    }
  }
}

/// Of a Hopper GPU, where the copy engine brings boxes of pages.
TEST_F(Paged, PagesOfEightKeysAndMoreByTheCopyEngine) {
  if (driver::device_info(0).arch != plan::parse_arch("sm_90a")) GTEST_SKIP() << "GPU 0 is no Hopper";
  std::mt19937 random(5);
  for (const std::int64_t page_size : {8, 16, 24, 64, 128, 256}) {
    for (const std::int64_t d : {40, 64, 96, 128, 192, 256}) {
      for (const bool packed : {false, true}) {
        PagedCase c;
        c.attention = {.h_q = 8, .h_kv = 2, .d_qk = d, .d_v = d, .causal = random() % 4 != 0, .layout = Layout::bshd};
        c.attention.dtype = random() % 3 == 0 ? DType::f16 : DType::bf16;
        if (random() % 2 == 0) c.attention.layout = Layout::bhsd;
        c.page_size = page_size;
        c.packed = packed;
        c.indexed = random() % 2 == 0;
        c.bounded = random() % 2 == 0;
        for (int i = 0; i < 4; ++i) {
          c.rows.push_back(packed ? static_cast<std::int32_t>(random() % 500 + 100) : 130);
          c.keys.push_back(static_cast<std::int32_t>(random() % 1200));
        }
        if (random() % 3 == 0) c.variant.config.window_left = static_cast<std::int64_t>(256 + random() % 200);
        if (random() % 3 == 0) c.variant.config.sink = true;
        const AttentionConfig config = config_of(c);
        const AttentionCase whole = attention_of(c);
        const KernelInfo info = Attention::create(config).kernel_info({.b = c.b(),
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
}

TEST_F(Paged, FunctionsByTheCopyEngineMatchFloat64) {
  for (const VariantChoice& choice : variant_choices(false)) {
    PagedCase c;
    c.attention = {.h_q = 6, .h_kv = 2, .causal = choice.config.window_right < 0 && choice.name != "prefix"};
    c.variant = choice;
    c.page_size = 16;
    c.packed = true;
    c.rows = {100, 270, 3, 90};
    c.keys = {300, 270, 129, 90};
    run(c);
  }
}

/// Two prefills, chunks of others, and decodes with and without drafts in one launch.
TEST_F(Paged, PrefillsChunksAndDecodesAreOneLaunch) {
  for (const std::int64_t page_size : {1, 16, 64}) {
    PagedCase c;
    c.attention = {.h_q = 32, .h_kv = 8, .d_qk = 128, .d_v = 128, .causal = true, .layout = Layout::bshd};
    c.page_size = page_size;
    c.packed = true;
    c.rows = {300, 512, 128, 200};
    c.keys = {300, 512, 900, 1000};
    for (int i = 0; i < 40; ++i) {
      c.rows.push_back(i % 4 == 3 ? 5 : 1);
      c.keys.push_back(20 + 37 * i);
    }
    run(c);
  }
}

/// What the table and the lengths say when a graph is replayed counts; the bits are those of fresh calls.
TEST_F(Paged, ACapturedCallReadsLengthsAndTablesWhenItRuns) {
  PagedCase c;
  c.attention = {.h_q = 8, .h_kv = 2, .d_qk = 128, .d_v = 128, .causal = true};
  c.page_size = 16;
  c.rows = {1, 1, 1, 1, 1};
  c.keys = {500, 500, 500, 500, 500};
  DevicePaged device(c);
  const Attention attention = Attention::create(config_of(c));
  attention.forward(device.inputs(), device.outputs());
  device.expect_forward();
  const ScopedStream stream;
  const CapturedGraph graph(stream.get(), [&] { attention.forward(device.inputs(), device.outputs(), stream.get()); });
  std::mt19937 random(3);
  for (int round = 0; round < 50; ++round) {
    PagedCase next = c;
    for (std::int32_t& keys : next.keys) keys = static_cast<std::int32_t>(random() % 501);
    next.keys[static_cast<std::size_t>(round % 5)] = 500;  // the table keeps its width
    next.attention.seed = c.attention.seed;
    PagedData data = make_data(next);
    // Into the pool of the first call, whose pages are at least as many.
    PagedData placed = device.host;
    placed.used_kv = data.used_kv;
    placed.table = data.table;
    placed.needed.assign(placed.needed.size(), false);
    std::copy(data.needed.begin(), data.needed.end(), placed.needed.begin());
    std::copy(data.k.bytes().begin(), data.k.bytes().end(), placed.k.bytes().begin());
    std::copy(data.v.bytes().begin(), data.v.bytes().end(), placed.v.bytes().begin());
    device.become(next, placed);
    graph.replay(stream.get());
    const AttentionOutputs replayed = device.results();
    device.expect_forward();
    device.become(next, placed);
    attention.forward(device.inputs(), device.outputs());
    const AttentionOutputs fresh = device.results();
    EXPECT_EQ(replayed.o.bytes(), fresh.o.bytes()) << "round " << round;
    EXPECT_EQ(replayed.lse.bytes(), fresh.lse.bytes()) << "round " << round;
  }
}

// ---- schedules ----

class RandomScheduled : public GpuTest, public ::testing::WithParamInterface<std::uint32_t> {};

TEST_P(RandomScheduled, MatchFloat64AndRepeatBitForBit) {
  run_scheduled(long_case(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomScheduled, ::testing::Range(0u, 120u));

TEST_F(Paged, AFewLongDecodesShareKeys) {
  for (const std::int64_t b : {1, 2, 7}) {
    for (const std::int64_t d : {64, 128, 256}) {
      PagedCase c;
      c.attention = {.h_q = 8, .h_kv = 2, .d_qk = d, .d_v = d, .causal = true};
      c.page_size = 16;
      c.rows.assign(static_cast<std::size_t>(b), 1);
      for (std::int32_t i = 0; i < b; ++i) c.keys.push_back(9000 + 1500 * i);
      run_scheduled(c);
    }
  }
}

/// Few rows by the copy engine, with and without a schedule.
TEST_F(Paged, TheHopperForwardSharesTheKeysOfFewRows) {
  if (driver::device_info(0).arch != plan::parse_arch("sm_90a")) GTEST_SKIP() << "GPU 0 is no Hopper";
  for (const std::int64_t page_size : {std::int64_t{8}, std::int64_t{64}, kContiguous}) {
    for (const std::int64_t d : {64, 128, 192, 256}) {
      if (page_size == 64 && d != 128) continue;  // each is several compilations
      for (const std::int32_t b : {1, 5, 36}) {
        PagedCase c;
        c.attention = {.h_q = 8, .h_kv = 2, .d_qk = d, .d_v = d, .causal = b != 5};
        c.attention.dtype = b == 5 ? DType::f16 : DType::bf16;
        c.variant.config.kernel = KernelOverride{"sm90", b == 5 ? "evict_first=1" : ""};
        c.variant.config.sink = b == 36;
        c.page_size = page_size;
        c.packed = b == 5;
        for (std::int32_t i = 0; i < b; ++i) {
          c.rows.push_back(c.packed ? 1 + i : 2);
          c.keys.push_back(i % 7 == 3 ? 0 : 5000 / b * (1 + i % 3) + 40 * i);
        }
        run_scheduled(c);
      }
    }
  }
}

/// The keys of one request in equal parts, which a cluster merges.
TEST_F(Paged, ClustersMergeTheSplitsOfARequest) {
  if (driver::device_info(0).arch != plan::parse_arch("sm_90a")) GTEST_SKIP() << "GPU 0 is no Hopper";
  for (const int blocks : {2, 8, 16}) {
    for (const std::int64_t d : {64, 128, 256}) {
      for (const std::int32_t keys : {0, 3, 700, 9000}) {
        PagedCase c;
        c.attention = {.h_q = 8, .h_kv = 2, .d_qk = d, .d_v = d, .causal = d != 64};
        c.variant.config.kernel = KernelOverride{"sm90", fmt::format("splits=2 split_blocks={}", blocks)};
        c.variant.config.sink = d == 64;
        c.page_size = blocks == 2 ? kContiguous : 16;
        c.rows = {3};
        c.keys = {keys};
        SCOPED_TRACE(fmt::format("{} blocks, d {}, {} keys", blocks, d, keys));
        const DevicePaged device(c);
        const Attention attention = Attention::create(config_of(c));
        const std::string spec = attention.kernel_info(limits_of(device)).spec;
        EXPECT_NE(spec.find(fmt::format(" split_blocks={}", blocks)), std::string::npos) << spec;
        attention.forward(device.inputs(), device.outputs());
        device.expect_forward();
      }
    }
  }
}

TEST_F(Paged, QueryTilesOfHopperForwardsComeFromACounter) {
  if (driver::device_info(0).arch != plan::parse_arch("sm_90a")) GTEST_SKIP() << "GPU 0 is no Hopper";
  for (const std::int64_t page_size : {std::int64_t{16}, kContiguous}) {
    for (const std::int64_t d : {64, 128, 256}) {
      PagedCase c;
      c.attention = {.h_q = 8, .h_kv = 2, .d_qk = d, .d_v = d, .causal = true, .layout = Layout::bshd};
      c.variant.config.kernel = KernelOverride{"sm90", "dynamic=1"};
      c.variant.config.sink = d == 64;
      c.page_size = page_size;
      c.packed = true;
      c.rows = {300, 512, 1, 0, 700, 5, 130};
      c.keys = {300, 900, 2000, 40, 1500, 0, 128};
      SCOPED_TRACE(fmt::format("d {}, page size {}", d, page_size));
      const DevicePaged device(c);
      const Attention attention = Attention::create(config_of(c));
      const std::string spec = attention.kernel_info(limits_of(device)).spec;
      EXPECT_NE(spec.find(" dynamic=1"), std::string::npos) << spec;
      for (int i = 0; i < 3; ++i) attention.forward(device.inputs(), device.outputs());
      device.expect_forward();
    }
  }
}

TEST_F(Paged, SchedulesOfPrefillsChunksDecodesAndEmptyRequests) {
  PagedCase c;
  c.attention = {.h_q = 32, .h_kv = 8, .d_qk = 128, .d_v = 128, .causal = true, .layout = Layout::bshd};
  c.page_size = 64;
  c.packed = true;
  c.rows = {300, 512, 128, 200};
  c.keys = {300, 512, 900, 1000};
  for (int i = 0; i < 40; ++i) {
    c.rows.push_back(i % 4 == 3 ? 5 : i % 5 == 0 ? 0 : 1);
    c.keys.push_back(i % 3 == 0 ? 0 : 20 + 137 * i);
  }
  run_scheduled(c);
}

/// A step of three layers, captured once: lengths and tables are others at each replay.
TEST_F(Paged, ACapturedStepMakesItsScheduleWhenItRuns) {
  PagedCase c;
  c.attention = {.h_q = 8, .h_kv = 2, .d_qk = 128, .d_v = 128, .causal = true};
  c.page_size = 16;
  c.rows = {1, 1, 1};
  c.keys = {3000, 3000, 3000};
  DevicePaged device(c);
  const Attention attention = Attention::create(config_of(c));
  const DeviceBuffer memory(attention.schedule_size(limits_of(device)));
  ForwardInputs in = device.inputs();
  in.schedule = {memory.data(), memory.size()};
  attention.schedule(schedule_inputs(device), in.schedule);
  attention.forward(in, device.outputs());
  device.expect_forward();
  const ScopedStream stream;
  const CapturedGraph graph(stream.get(), [&] {
    attention.schedule(schedule_inputs(device), in.schedule, stream.get());
    for (int layer = 0; layer < 3; ++layer) attention.forward(in, device.outputs(), stream.get());
  });
  std::mt19937 random(5);
  for (int round = 0; round < 30; ++round) {
    PagedCase next = c;
    for (std::int32_t& keys : next.keys) keys = random() % 4 == 0 ? 0 : static_cast<std::int32_t>(random() % 3001);
    next.keys[static_cast<std::size_t>(round % 3)] = 3000;  // the table keeps its width
    const PagedData data = make_data(next);
    PagedData placed = device.host;  // into the pool of the first call, whose pages are at least as many
    placed.used_kv = data.used_kv;
    placed.table = data.table;
    std::copy(data.k.bytes().begin(), data.k.bytes().end(), placed.k.bytes().begin());
    std::copy(data.v.bytes().begin(), data.v.bytes().end(), placed.v.bytes().begin());
    device.become(next, placed);
    graph.replay(stream.get());
    device.expect_forward();
  }
}

TEST_F(Paged, ASchedulesListsAreThoseOfTheHost) {
  for (const std::int64_t b : {1, 1000, 16384}) {
    for (const bool packed : {false, true}) {
      AttentionConfig config;
      config.head_dim = 128;
      config.causal = true;
      config.page_size = 16;
      config.varlen = packed;
      config.tune = TunePolicy::off;
      AttentionShape limits{.b = b, .h_q = 32, .h_kv = 8, .s_q = packed ? 3 : 1, .s_kv = 20000};
      if (packed) limits.total_q = 2 * b;
      std::mt19937 random(static_cast<unsigned>(b));
      std::vector<std::int32_t> keys, cu_q{0};
      for (std::int64_t i = 0; i < b; ++i) {
        keys.push_back(random() % 5 == 0 ? 0 : static_cast<std::int32_t>(random() % 20000));
        cu_q.push_back(
            std::min(cu_q.back() + static_cast<std::int32_t>(random() % 4), static_cast<std::int32_t>(limits.total_q)));
      }
      const Attention attention = Attention::create(config);
      const DeviceBuffer used(bytes_of(keys)), cu(bytes_of(cu_q)), memory(attention.schedule_size(limits));
      ScheduleInputs in;
      in.limits = limits;
      in.sequences.seqused_kv = ints(used);
      if (packed) in.sequences.cu_seqlens_q = ints(cu);
      attention.schedule(in, {memory.data(), memory.size()});
      driver::check(driver::api().cuCtxSynchronize(), "cuCtxSynchronize");
      const driver::DeviceInfo gpu = driver::ContextRef::acquire(Device::current()).info();
      plan::Problem problem = api::make_problem(config, api::checked(config, limits), gpu.arch, nullptr);
      problem.given_schedule = true;
      const plan::KernelSpec spec = plan::plan_forward(problem, {}).kernel;
      const std::vector<std::byte> bytes = memory.read();
      const ScheduleLists lists = read_schedule(bytes.data(), plan::schedule_shape(problem, spec, gpu.multiprocessors));
      plan::HostLengths lengths;
      lengths.used_kv = keys;
      if (packed) lengths.cu_q = cu_q;
      const int parts = static_cast<int>(lists.starts.size()) - 1;
      EXPECT_EQ(difference(lists, schedule_on_host(problem, spec, lengths, parts)), "")
          << "b = " << b << ", packed = " << packed;
    }
  }
}

/// Whatever tables and lengths hold, nothing outside of the pools is read: compute-sanitizer looks, too.
TEST_F(Paged, WrongTablesAndLengthsReadNothingElse) {
  for (const std::uint32_t seed : {1u, 2u, 3u, 4u, 5u, 6u}) {
    const PagedCase c = random_case(seed);
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
    spoil(data.table);
    spoil(data.used_kv);
    spoil(data.begin);
    spoil(data.batch_index);
    const DevicePaged device(c, data);
    Attention::create(config_of(c)).forward(device.inputs(), device.outputs());
    device.results();
  }
}

TEST_F(Paged, WrongTablesAndLengthsAreNamedOnRequest) {
  PagedCase c;
  c.attention = {.h_q = 2, .h_kv = 1, .causal = true};
  c.page_size = 8;
  c.rows = {1, 1};
  c.keys = {30, 17};
  AttentionConfig config = config_of(c);
  config.check_sequences = true;
  const Attention attention = Attention::create(config);
  const PagedData right = make_data(c);
  const DevicePaged device(c, right);
  attention.forward(device.inputs(), device.outputs());
  device.expect_forward();
  PagedData wrong = right;
  wrong.table[static_cast<std::size_t>(right.max_pages) + 2] = -1;
  expect_refused(attention, c, wrong, "cache.block_table[1][2]");
  wrong = right;
  wrong.used_kv[1] = static_cast<std::int32_t>(right.max_pages * right.page_rows) + 1;
  expect_refused(attention, c, wrong, "seqused_kv[1]");
  wrong = right;
  wrong.begin = {0, 18};
  expect_refused(attention, c, wrong, "cache.seq_begin[1]");
}

/// K and V interleaved in one tensor [pages, 2, page, h_kv, d], and heads in reverse order.
TEST_F(Paged, PoolsHaveAnyStrides) {
  PagedCase c;
  c.attention = {.h_q = 8, .h_kv = 2, .d_qk = 128, .d_v = 128, .causal = true, .layout = Layout::bshd};
  c.page_size = 16;
  c.rows = {1, 1, 1};
  c.keys = {100, 33, 400};
  const PagedData data = make_data(c);
  const DevicePaged device(c, data);
  const std::vector<std::byte>& k = data.k.bytes();
  const std::vector<std::byte>& v = data.v.bytes();
  const std::int64_t pages = data.k.view().shape[0];
  const std::size_t page_bytes = k.size() / static_cast<std::size_t>(pages);
  std::vector<std::byte> both;
  for (std::size_t page = 0; page < static_cast<std::size_t>(pages); ++page) {
    for (const std::vector<std::byte>* from : {&k, &v}) {
      const auto first = from->begin() + static_cast<std::ptrdiff_t>(page * page_bytes);
      both.insert(both.end(), first, first + static_cast<std::ptrdiff_t>(page_bytes));
    }
  }
  const DeviceBuffer buffer(both);
  ForwardInputs in = device.inputs();
  in.k.data = buffer.data();
  in.v.data = static_cast<std::byte*>(buffer.data()) + page_bytes;
  in.k.strides[0] *= 2;
  in.v.strides[0] *= 2;
  Attention::create(config_of(c)).forward(in, device.outputs());
  device.expect_forward();
}

}  // namespace
}  // namespace fa::test
