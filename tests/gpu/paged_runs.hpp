#ifndef FA_TESTS_GPU_PAGED_RUNS_HPP_
#define FA_TESTS_GPU_PAGED_RUNS_HPP_

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <random>
#include <string>
#include <utility>

#include "gpu/paged_case.hpp"
#include "support/paged_case.hpp"

namespace fa::test {

template <class T, std::size_t kCount>
T pick(std::mt19937& random, const std::array<T, kCount>& values) {
  return values[random() % kCount];
}

/// Any requests over pages.
inline PagedCase random_case(std::uint32_t seed) {
  std::mt19937 random(seed);
  PagedCase c;
  AttentionCase& a = c.attention;
  a.seed = seed;
  a.dtype = pick(random, std::array{DType::bf16, DType::f16, DType::f32});
  a.d_qk = pick(random, std::array<std::int64_t, 8>{8, 24, 40, 64, 96, 128, 192, 256});
  a.d_v = random() % 3 == 0 ? pick(random, std::array<std::int64_t, 4>{8, 64, 72, 128}) : a.d_qk;
  a.h_kv = pick(random, std::array<std::int64_t, 3>{1, 2, 4});
  a.h_q = a.h_kv * pick(random, std::array<std::int64_t, 4>{1, 2, 5, 8});
  a.causal = random() % 4 != 0;
  a.layout = pick(random, std::array{Layout::bshd, Layout::bhsd});
  if (random() % 5 == 0) a.scale = pick(random, std::array{-0.1f, 0.05f});
  c.page_size = pick(random, std::array<std::int64_t, 8>{1, 3, 8, 12, 16, 40, 64, 256});
  c.packed = random() % 2 == 0;
  c.indexed = random() % 3 == 0;
  c.bounded = random() % 2 == 0;
  const std::size_t count = pick(random, std::array<std::size_t, 4>{1, 3, 9, 40});
  const std::int32_t rows = pick(random, std::array<std::int32_t, 5>{1, 1, 4, 17, 130});
  for (std::size_t i = 0; i < count; ++i) {
    const auto keys = static_cast<std::int32_t>(random() % (random() % 4 == 0 ? 2000 : 200));
    c.keys.push_back(random() % 8 == 0 ? 0 : keys);
    c.rows.push_back(!c.packed ? rows : random() % 3 != 0 ? 1 : static_cast<std::int32_t>(random() % 200));
  }
  if (random() % 2 == 0) {
    for (const std::int32_t keys : c.keys) {
      c.begin.push_back(static_cast<std::int32_t>(random() % static_cast<unsigned>(keys + 1)));
    }
  }
  AttentionConfig& config = c.variant.config;
  if (random() % 3 == 0) config.window_left = pick(random, std::array<std::int64_t, 3>{0, 50, 300});
  if (random() % 6 == 0) config.chunk = 96;
  if (random() % 4 == 0) config.sink = true;
  return c;
}

/// The limits of a case's calls.
inline AttentionShape limits_of(const DevicePaged& device) {
  const PagedData& host = device.host;
  const AttentionCase& a = device.problem.attention;
  AttentionShape limits{.b = device.problem.b(), .h_q = a.h_q, .h_kv = a.h_kv, .s_q = host.q.view().shape[2]};
  limits.s_kv = host.max_pages * host.page_rows;
  if (host.max_s_kv != 0) limits.s_kv = std::min(limits.s_kv, host.max_s_kv);
  if (device.problem.packed) {
    limits.total_q = limits.s_q;
    limits.s_q = host.max_s_q;
  }
  const ForwardInputs in = device.inputs();
  const auto aligned = [](const TensorView& view) {
    const auto bytes = static_cast<std::int64_t>(size_of(view.dtype));
    bool whole = reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0;
    for (std::size_t axis = 0; axis < 3; ++axis) {
      whole = whole && (view.shape[axis] == 1 || view.strides[axis] * bytes % 16 == 0);
    }
    return whole;
  };
  limits.aligned = aligned(in.q) && aligned(in.k) && aligned(in.v) && aligned(device.outputs().o);
  return limits;
}

inline ScheduleInputs schedule_inputs(const DevicePaged& device) {
  const ForwardInputs in = device.inputs();
  return {limits_of(device), in.sequences, in.cache.seq_begin};
}

/// Forward several times with one schedule, and without; the bits are the same, but for those of another kernel:
/// without one, blocks find their parts of a few requests by themselves.
inline void run_scheduled(const PagedCase& c) {
  SCOPED_TRACE(::testing::PrintToString(c));
  const DevicePaged device(c);
  const Attention attention = Attention::create(config_of(c));
  const DeviceBuffer memory(std::max<std::size_t>(attention.schedule_size(limits_of(device)), 1));
  ForwardInputs in = device.inputs();
  in.schedule = {memory.data(), memory.size()};
  attention.schedule(schedule_inputs(device), in.schedule);
  attention.forward(in, device.outputs());
  device.expect_forward();
  AttentionOutputs first = device.results();
  const bool alone = attention.kernel_info(limits_of(device)).spec.find(" own_parts=1") != std::string::npos;
  bool had_schedule = true;
  for (const bool own : {false, false, true, true}) {
    if (own) in.schedule = {};
    attention.forward(in, device.outputs());
    if (own && std::exchange(had_schedule, false) && alone) {
      device.expect_forward();
      first = device.results();
    }
    const AttentionOutputs again = device.results();
    EXPECT_EQ(first.o.bytes(), again.o.bytes()) << "own = " << own;
    EXPECT_EQ(first.lse.bytes(), again.lse.bytes()) << "own = " << own;
  }
  EXPECT_TRUE(memory.guards_intact());
}

/// Whose keys are worth sharing.
inline PagedCase long_case(std::uint32_t seed) {
  PagedCase c = random_case(seed);
  std::mt19937 random(seed + 1000);
  if (c.begin.empty()) c.keys[random() % c.keys.size()] = 600 + static_cast<std::int32_t>(random() % 9000);
  return c;
}

}  // namespace fa::test

#endif  // FA_TESTS_GPU_PAGED_RUNS_HPP_
