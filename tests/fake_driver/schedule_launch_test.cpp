#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include <fa/error.hpp>

#include "fake_driver/launches_test.hpp"

// What calls over pages queue, with schedules and without.
namespace fa {
namespace {

constexpr std::int64_t kMaxPages = 512;

void* at(std::uintptr_t page) {
  return reinterpret_cast<void*>((std::uintptr_t{1} << 40) + (page << 32));
}

const std::int32_t* ints(std::uintptr_t page) {
  return static_cast<const std::int32_t*>(at(page));
}

class ScheduleLaunches : public LaunchesTest {
 protected:
  ScheduleLaunches() {
    config_.head_dim = 128;
    config_.causal = true;
    config_.page_size = 16;
  }

  static ForwardInputs inputs(std::int64_t b, std::int64_t max_pages = kMaxPages) {
    ForwardInputs in;
    in.q = TensorView(at(1), DType::bf16, {b, 32, 1, 128});
    in.k = TensorView(at(2), DType::bf16, {64, 8, 16, 128});
    in.v = TensorView(at(3), DType::bf16, {64, 8, 16, 128});
    in.sequences.seqused_kv = ints(4);
    in.cache.block_table = TensorView(at(5), DType::i32, {b, max_pages});
    return in;
  }
  static ForwardOutputs outputs(std::int64_t b) { return {TensorView(at(6), DType::bf16, {b, 32, 1, 128})}; }

  static AttentionShape limits(std::int64_t b) {
    return {.b = b, .h_q = 32, .h_kv = 8, .s_q = 1, .s_kv = kMaxPages * 16};
  }
  static ScheduleInputs schedule_inputs(std::int64_t b) {
    ScheduleInputs in;
    in.limits = limits(b);
    in.sequences.seqused_kv = ints(4);
    return in;
  }

  /// In a workspace of what a call of such limits needs at most.
  void call(const Attention& attention, const ForwardInputs& in, std::int64_t b) {
    launches_().clear();
    AttentionShape shape = limits(b);
    shape.s_kv = in.cache.block_table.shape[1] * 16;
    attention.forward(in, outputs(b), nullptr, {at(10), attention.workspace_size(shape)});
  }

  std::vector<std::string> names() {
    std::vector<std::string> result;
    for (const fake_driver::Launch& launch : launches_()) result.push_back(launch.kernel);
    return result;
  }

  static std::string refused(const Attention& attention, const ForwardInputs& in, std::int64_t b) {
    try {
      attention.forward(in, outputs(b));
    } catch (const Error& error) {
      return std::string(error.field("argument"));
    }
    return "";
  }
};

using Names = std::vector<std::string>;

TEST_F(ScheduleLaunches, ACallMakesItsOwn) {
  const Attention attention = Attention::create(config_);
  attention.prepare(limits(64));
  call(attention, inputs(64), 64);
  ASSERT_EQ(names(), (Names{"fa_schedule", "fa_sm90_forward"}));
  EXPECT_TRUE(launches_()[0].early);
  EXPECT_TRUE(launches_()[1].early);
  EXPECT_EQ(launches_()[0].grid, 1U);
}

TEST_F(ScheduleLaunches, OneLaunchWithASchedule) {
  const Attention attention = Attention::create(config_);
  const Schedule schedule{at(9), attention.schedule_size(limits(64))};
  ASSERT_GT(schedule.size, 0U);
  launches_().clear();
  attention.schedule(schedule_inputs(64), schedule);
  ASSERT_EQ(names(), Names{"fa_schedule"});
  const unsigned grid = launches_()[0].grid;
  EXPECT_EQ(grid, 1U);
  ForwardInputs in = inputs(64);
  in.schedule = schedule;
  for (int layer = 0; layer < 3; ++layer) {
    call(attention, in, 64);
    ASSERT_EQ(names(), Names{"fa_sm90_forward"});
    EXPECT_EQ(launches_()[0].grid % 132, 0U);
  }
}

/// The grid is a function of the limits: lengths are read when the kernels run.
TEST_F(ScheduleLaunches, GridsDoNotDependOnTheNumberOfRequests) {
  const Attention attention = Attention::create(config_);
  const auto grid = [&](std::int64_t b) {
    call(attention, inputs(b), b);
    return launches_().back().grid;
  };
  EXPECT_EQ(grid(4), grid(64));
  EXPECT_EQ(grid(64), grid(2000));
  EXPECT_EQ(grid(2), 264U) << "blocks find their parts";
}

/// A contiguous cache [rows, h_kv, s_max, d] takes the same kernels, without a table.
TEST_F(ScheduleLaunches, OfAContiguousCache) {
  config_.page_size = kContiguous;
  const Attention attention = Attention::create(config_);
  const auto contiguous = [](std::int64_t b) {
    ForwardInputs in = inputs(b);
    in.k = TensorView(at(2), DType::bf16, {b, 8, kMaxPages * 16, 128});
    in.v = TensorView(at(3), DType::bf16, {b, 8, kMaxPages * 16, 128});
    in.cache = {};
    return in;
  };
  const auto call_names = [&](const ForwardInputs& in, std::int64_t b) {
    launches_().clear();
    attention.forward(in, outputs(b), nullptr, {at(10), attention.workspace_size(limits(b))});
    return names();
  };
  EXPECT_EQ(call_names(contiguous(64), 64), (Names{"fa_schedule", "fa_sm90_forward"}));
  const unsigned grid = launches_().back().grid;
  ForwardInputs many = contiguous(64);
  many.q.shape[0] = 2000;
  many.cache.batch_index = ints(7);
  EXPECT_EQ(call_names(many, 2000), (Names{"fa_schedule", "fa_sm90_forward"}));
  EXPECT_EQ(launches_().back().grid, grid);
  EXPECT_EQ(call_names(contiguous(2), 2), Names{"fa_sm90_forward"}) << "blocks find their parts";
  EXPECT_EQ(call_names(contiguous(1), 1), (Names{"fa_sm90_forward", "fa_forward_combine"})) << "splits";
  const Schedule schedule{at(9), attention.schedule_size(limits(64))};
  ASSERT_GT(schedule.size, 0U);
  launches_().clear();
  attention.schedule(schedule_inputs(64), schedule);
  EXPECT_EQ(names(), Names{"fa_schedule"});
  ForwardInputs in = contiguous(64);
  in.schedule = schedule;
  EXPECT_EQ(call_names(in, 64), Names{"fa_sm90_forward"});
  in = contiguous(63);
  in.schedule = schedule;
  EXPECT_EQ(refused(attention, in, 63), "schedule") << "of other limits";
  in = contiguous(64);
  in.sequences.max_s_kv = 4096;
  in.schedule = schedule;
  EXPECT_EQ(refused(attention, in, 64), "schedule") << "likewise";
  in.cache.batch_index = ints(7);
  in.sequences.max_s_kv = 0;
  EXPECT_EQ(call_names(in, 64), Names{"fa_sm90_forward"});
}

/// The kernel that merges starts while the splits are read; a schedule is not needed.
TEST_F(ScheduleLaunches, OneRequestHasSplits) {
  const Attention attention = Attention::create(config_);
  ForwardInputs in = inputs(1);
  for (const bool given : {false, true}) {
    if (given) in.schedule = {at(9), attention.schedule_size(limits(1))};
    call(attention, in, 1);
    ASSERT_EQ(names(), (Names{"fa_sm90_forward", "fa_forward_combine"}));
    EXPECT_EQ(launches_()[0].grid, 128U);
    EXPECT_TRUE(launches_()[0].early && launches_()[1].early);
  }
}

/// First positions leave the copy engine out, of the schedule and of the calls.
TEST_F(ScheduleLaunches, WithFirstPositions) {
  const Attention attention = Attention::create(config_);
  const Schedule schedule{at(9), attention.schedule_size(limits(64))};
  ScheduleInputs lengths = schedule_inputs(64);
  lengths.seq_begin = ints(8);
  launches_().clear();
  attention.schedule(lengths, schedule);
  EXPECT_EQ(names(), Names{"fa_schedule"});
  ForwardInputs in = inputs(64);
  in.schedule = schedule;
  EXPECT_EQ(refused(attention, in, 64), "schedule") << "of calls with first positions";
  in.cache.seq_begin = ints(8);
  call(attention, in, 64);
  EXPECT_EQ(names(), Names{"fa_sm80_forward"});
}

TEST_F(ScheduleLaunches, ThousandsOfRequestsTakeSeveralBlocksThatCount) {
  const Attention attention = Attention::create(config_);
  const Schedule schedule{at(9), attention.schedule_size(limits(5000))};
  launches_().clear();
  attention.schedule(schedule_inputs(5000), schedule);
  ASSERT_EQ(names(), (Names{fake_driver::kMemset, "fa_schedule"}));
  EXPECT_EQ(launches_()[0].address, reinterpret_cast<std::uintptr_t>(schedule.data));
  EXPECT_EQ(launches_()[0].bytes, sizeof(std::int32_t));
  EXPECT_EQ(launches_()[1].grid, 5U);
  EXPECT_FALSE(launches_()[1].early) << "before the counter is cleared";
  call(attention, inputs(5000), 5000);
  EXPECT_EQ(names(), (Names{fake_driver::kMemset, "fa_schedule", "fa_sm90_forward"}));
}

TEST_F(ScheduleLaunches, ShortRequestsTakeNone) {
  const Attention attention = Attention::create(config_);
  AttentionShape few = limits(4);
  few.s_kv = 256;
  EXPECT_EQ(attention.schedule_size(few), 0U);
  ScheduleInputs in = schedule_inputs(4);
  in.limits = few;
  launches_().clear();
  attention.schedule(in, {});
  EXPECT_TRUE(launches_().empty());
  call(attention, inputs(4, 16), 4);
  EXPECT_EQ(names(), Names{"fa_sm90_forward"});
}

TEST_F(ScheduleLaunches, AnOverrideTurnsThemOff) {
  config_.kernel = KernelOverride{"sm80", "scheduled=0"};
  const Attention attention = Attention::create(config_);
  EXPECT_EQ(attention.schedule_size(limits(4)), 0U);
  call(attention, inputs(4), 4);
  EXPECT_EQ(names(), Names{"fa_sm80_forward"});
}

TEST_F(ScheduleLaunches, OneOfOtherLimitsIsRefused) {
  const Attention attention = Attention::create(config_);
  const Schedule schedule{at(9), attention.schedule_size(limits(64))};
  attention.schedule(schedule_inputs(64), schedule);
  launches_().clear();
  ForwardInputs in = inputs(63);
  in.schedule = schedule;
  EXPECT_EQ(refused(attention, in, 63), "schedule");
  in = inputs(64, kMaxPages - 1);
  in.schedule = schedule;
  EXPECT_EQ(refused(attention, in, 64), "schedule");
  in = inputs(64);
  in.schedule = {at(11), schedule.size};
  EXPECT_EQ(refused(attention, in, 64), "schedule") << "memory of nothing";
  in.schedule = {at(9), 4096};
  EXPECT_EQ(refused(attention, in, 64), "schedule") << "too little";
  in.schedule = {static_cast<std::byte*>(at(9)) + 16, schedule.size};
  EXPECT_EQ(refused(attention, in, 64), "schedule") << "misaligned";
  AttentionConfig window = config_;
  window.window_left = 4000;
  in.schedule = schedule;
  EXPECT_EQ(refused(Attention::create(window), in, 64), "schedule") << "of other masks";
  EXPECT_TRUE(launches_().empty());
  call(attention, in, 64);
  EXPECT_EQ(names(), Names{"fa_sm90_forward"});
}

TEST_F(ScheduleLaunches, WrongInputsAreRefused) {
  const Attention attention = Attention::create(config_);
  const Schedule schedule{at(9), attention.schedule_size(limits(64))};
  const auto refusal = [&](auto&& change) {
    ScheduleInputs in = schedule_inputs(64);
    Schedule memory = schedule;
    change(in, memory);
    launches_().clear();
    try {
      attention.schedule(in, memory);
    } catch (const Error& error) {
      EXPECT_TRUE(launches_().empty());
      return std::string(error.field("argument"));
    }
    return std::string();
  };
  EXPECT_EQ(refusal([](ScheduleInputs&, Schedule&) {}), "");
  EXPECT_EQ(refusal([](ScheduleInputs& in, Schedule&) { in.sequences.seqused_kv = nullptr; }), "seqused_kv");
  EXPECT_EQ(refusal([](ScheduleInputs& in, Schedule&) { in.sequences.cu_seqlens_q = ints(7); }), "cu_seqlens_q");
  EXPECT_EQ(refusal([](ScheduleInputs& in, Schedule&) { in.sequences.cu_seqlens_kv = ints(7); }), "cu_seqlens_kv");
  EXPECT_EQ(refusal([](ScheduleInputs& in, Schedule&) { in.sequences.b = 63; }), "sequences.b");
  EXPECT_EQ(refusal([](ScheduleInputs& in, Schedule&) { in.limits.s_kv = -1; }), "s_kv");
  EXPECT_EQ(refusal([](ScheduleInputs&, Schedule& memory) { memory.data = nullptr; }), "schedule");
  EXPECT_EQ(refusal([](ScheduleInputs&, Schedule& memory) { memory.size = 4096; }), "schedule");
}

}  // namespace
}  // namespace fa
