// Tuning at first use, on a GPU. Every other test of this program runs with FA_TUNE=off.

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "api/tuning.hpp"
#include "cache/records.hpp"
#include "gpu/device_case.hpp"
#include "gpu/scoped_stream.hpp"
#include "tests/unit/cache/support.hpp"

namespace fa::test {
namespace {

using cache::testing::TemporaryDirectory;

const driver::Api& api() {
  return driver::api();
}

class Tuning : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    unsetenv("FA_TUNE");
  }
  void TearDown() override {
    set_log_callback({});
    set_log_level(LogLevel::warning);
    GpuTest::TearDown();
  }

  AttentionConfig config(const AttentionCase& c, const std::string& folder = "cache") const {
    AttentionConfig result = config_of(c);
    result.cache.directory = (directory_ / folder).string();
    return result;
  }
  std::size_t records(const std::string& folder = "cache") const {
    return cache::Records(directory_ / folder).names().size();
  }

  TemporaryDirectory directory_;
};

/// Long enough to be worth it, short enough for the reference.
AttentionCase worthy(bool causal = false) {
  if (causal) return {.b = 1, .h_q = 8, .h_kv = 8, .s_q = 2048, .s_kv = 2048, .causal = true};
  return {.b = 2, .h_q = 8, .h_kv = 8, .s_q = 1024, .s_kv = 1024};
}

AttentionShape shape_of(const AttentionCase& c) {
  return {.b = c.b, .h_q = c.h_q, .h_kv = c.h_kv, .s_q = c.s_q, .s_kv = c.s_kv};
}

std::size_t free_memory() {
  std::size_t free = 0;
  std::size_t all = 0;
  driver::check(api().cuCtxSynchronize(), "cuCtxSynchronize");
  driver::check(api().cuMemGetInfo(&free, &all), "cuMemGetInfo");
  return free;
}

TEST_F(Tuning, TheFirstCallDecidesAndOthersFollow) {
  const AttentionCase c = worthy();
  DeviceCase device(c);
  const Attention attention = Attention::create(config(c));
  attention.forward(device.inputs(), device.outputs());
  expect_correct(device);
  const KernelInfo info = attention.kernel_info(shape_of(c));
  EXPECT_EQ(info.chosen_by, "tuner");
  EXPECT_EQ(records(), 1U);

  const Attention other = Attention::create(config(c));
  EXPECT_EQ(other.kernel_info(shape_of(c)).chosen_by, "record");
  EXPECT_EQ(other.kernel_info(shape_of(c)).spec, info.spec);
  DeviceCase again(c);
  other.forward(again.inputs(), again.outputs());
  expect_correct(again);
  EXPECT_EQ(records(), 1U);
}

TEST_F(Tuning, PrepareTunesAheadAndGivesItsMemoryBack) {
  const AttentionCase c = worthy(true);
  const Attention warm = Attention::create(config(c, "warm"));
  warm.prepare(shape_of(c));  // modules stay loaded: they are no scratch
  const std::size_t before = free_memory();
  const Attention attention = Attention::create(config(c, "other"));
  attention.prepare(shape_of(c));
  EXPECT_EQ(attention.kernel_info(shape_of(c)).chosen_by, "tuner");
  EXPECT_GE(free_memory() + (std::size_t{16} << 20), before);
}

TEST_F(Tuning, PoliciesAreKept) {
  const AttentionCase c = worthy();
  const auto chosen_by = [&](AttentionConfig with) {
    return Attention::create(with).kernel_info(shape_of(c)).chosen_by;
  };
  AttentionConfig off = config(c, "policies");
  off.tune = TunePolicy::off;
  EXPECT_EQ(chosen_by(off), "planner");
  AttentionConfig cached = config(c, "policies");
  cached.tune = TunePolicy::cached;
  EXPECT_NE(chosen_by(cached), "tuner");
  AttentionConfig deterministic = config(c, "policies");
  deterministic.deterministic = true;
  EXPECT_NE(chosen_by(deterministic), "tuner");
  AttentionConfig never = config(c, "policies");
  never.compile = CompilePolicy::never;
  EXPECT_NE(chosen_by(never), "tuner");
  AttentionConfig fixed = config(c, "policies");
  fixed.kernel = KernelOverride{"sm80", "tile_n=32"};
  EXPECT_EQ(chosen_by(fixed), "planner");
  setenv("FA_TUNE", "off", 1);
  EXPECT_EQ(chosen_by(config(c, "policies")), "planner");
  EXPECT_EQ(records("policies"), 0U);
}

TEST_F(Tuning, TinyProblemsAreLeftAlone) {
  AttentionCase c = worthy();
  c.s_q = c.s_kv = 64;
  const Attention attention = Attention::create(config(c));
  EXPECT_EQ(attention.kernel_info(shape_of(c)).chosen_by, "planner");
  EXPECT_EQ(records(), 0U);
}

TEST_F(Tuning, DuringCaptureTheBestKnownKernelRunsAndANoteSaysSo) {
  const AttentionCase c = worthy();
  DeviceCase device(c);
  const Attention attention = Attention::create(config(c));
  std::vector<std::string> messages;
  set_log_level(LogLevel::info);
  set_log_callback([&](LogLevel, std::string_view message) { messages.emplace_back(message); });
  const ScopedStream stream;
  CUgraph graph = nullptr;
  CUgraphExec executable = nullptr;
  driver::check(api().cuStreamBeginCapture(stream.get(), CU_STREAM_CAPTURE_MODE_GLOBAL), "cuStreamBeginCapture");
  attention.forward(device.inputs(), device.outputs(), stream.get());
  driver::check(api().cuStreamEndCapture(stream.get(), &graph), "cuStreamEndCapture");
  EXPECT_EQ(records(), 0U);
  const auto note = [](const std::string& message) { return message.find("captured") != std::string::npos; };
  EXPECT_EQ(std::ranges::count_if(messages, note), 1);
  driver::check(api().cuGraphInstantiateWithFlags(&executable, graph, 0), "cuGraphInstantiateWithFlags");
  driver::check(api().cuGraphLaunch(executable, stream.get()), "cuGraphLaunch");
  expect_correct(device);

  attention.forward(device.inputs(), device.outputs(), stream.get());  // and now it is tuned
  EXPECT_EQ(records(), 1U);
  EXPECT_EQ(attention.kernel_info(shape_of(c)).chosen_by, "tuner");
  driver::check(api().cuGraphLaunch(executable, stream.get()), "cuGraphLaunch");  // the captured kernel still works
  expect_correct(device);
  api().cuGraphExecDestroy(executable);
  api().cuGraphDestroy(graph);
}

TEST_F(Tuning, AnotherThreadsCaptureIsNotBroken) {
  const AttentionCase c = worthy();
  const ScopedStream captured;
  CUgraph graph = nullptr;
  driver::check(api().cuStreamBeginCapture(captured.get(), CU_STREAM_CAPTURE_MODE_GLOBAL), "cuStreamBeginCapture");
  CUcontext context = driver::current_context();
  std::thread([&] {
    driver::check(api().cuCtxPushCurrent(context), "cuCtxPushCurrent");
    const Attention attention = Attention::create(config(c));
    try {
      attention.prepare(shape_of(c));
    } catch (const Error& error) {
      ADD_FAILURE() << error.what();
    }
  }).join();
  EXPECT_EQ(api().cuStreamEndCapture(captured.get(), &graph), CUDA_SUCCESS) << "the capture must stay valid";
  if (graph != nullptr) api().cuGraphDestroy(graph);
}

TEST_F(Tuning, ThreadsShareOneDecision) {
  const AttentionCase c = worthy(true);
  const Attention attention = Attention::create(config(c));
  std::vector<std::unique_ptr<DeviceCase>> devices;
  for (int i = 0; i < 4; ++i) devices.push_back(std::make_unique<DeviceCase>(c));
  std::atomic<int> decisions = 0;
  set_log_level(LogLevel::info);
  set_log_callback([&](LogLevel, std::string_view message) { decisions += message.starts_with("tuned in") ? 1 : 0; });
  CUcontext context = driver::current_context();
  std::vector<std::thread> threads;
  for (auto& device : devices) {
    threads.emplace_back([&, target = device.get()] {
      driver::check(api().cuCtxPushCurrent(context), "cuCtxPushCurrent");
      const ScopedStream stream;
      for (int i = 0; i < 5; ++i) attention.forward(target->inputs(), target->outputs(), stream.get());
      driver::check(api().cuStreamSynchronize(stream.get()), "cuStreamSynchronize");
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(decisions, 1);
  EXPECT_EQ(records(), 1U);
  for (auto& device : devices) expect_correct(*device);
}

TEST_F(Tuning, BackwardIsTunedToo) {
  const AttentionCase c = worthy(true);
  const Attention attention = Attention::create(config(c));
  attention.prepare_backward(shape_of(c));
  EXPECT_EQ(attention.backward_kernel_info(shape_of(c)).chosen_by, "tuner");
  EXPECT_EQ(records(), 1U);
}

TEST_F(Tuning, AHookThatRefusesCandidatesLeavesThePlannersKernel) {
  const AttentionCase c = worthy();
  AttentionConfig planned = config(c, "hook");
  planned.tune = TunePolicy::off;
  const std::string spec = Attention::create(planned).kernel_info(shape_of(c)).spec;
  AttentionConfig refusing = config(c, "hook");
  refusing.on_compile = [](const CompileEvent& event) {
    if (event.phase == CompileEvent::Phase::started) throw std::runtime_error("no more kernels");
  };
  const Attention attention = Attention::create(refusing);
  EXPECT_EQ(attention.kernel_info(shape_of(c)).spec, spec);
}

TEST_F(Tuning, ADecisionAmongCachedKernelsTakesASecondAtMost) {
  const AttentionCase c = worthy();
  const Attention attention = Attention::create(config(c));
  api::TuneOptions options;
  options.publish = false;
  for (const api::Operation op : {api::Operation::forward, api::Operation::backward}) {
    api::TuneReport report = api::TuningAccess::tune(attention, op, shape_of(c), options);
    RecordProperty(op == api::Operation::forward ? "forward_cold_s" : "backward_cold_s",
                   std::to_string(report.seconds));
    EXPECT_GE(report.specs.size(), 2U);
    EXPECT_LE(report.specs.size(), options.candidates);
    for (int i = 0; i < 3 && !report.outcome.complete; ++i) {  // few CPUs compile over several calls
      report = api::TuningAccess::tune(attention, op, shape_of(c), options);
    }
    report = api::TuningAccess::tune(attention, op, shape_of(c), options);
    EXPECT_LE(report.seconds, 1.0);
    for (const tune::Result& result : report.outcome.results) {
      EXPECT_EQ(result.refusal.find("where the default computed"), std::string::npos) << result.refusal;
    }
  }
}

TEST_F(Tuning, AWarmCallFindsItsKernelWithoutANewDecision) {
  const AttentionCase c = worthy();
  DeviceCase device(c);
  const Attention attention = Attention::create(config(c));
  attention.forward(device.inputs(), device.outputs());
  std::atomic<int> messages = 0;
  set_log_level(LogLevel::debug);
  set_log_callback([&](LogLevel, std::string_view) { ++messages; });
  for (int i = 0; i < 10; ++i) attention.forward(device.inputs(), device.outputs());
  EXPECT_EQ(messages, 0);
  expect_correct(device);
}

}  // namespace
}  // namespace fa::test
