#include <gtest/gtest.h>

#include <memory>
#include <thread>
#include <vector>

#include "gpu/backward_case.hpp"
#include "gpu/scoped_stream.hpp"

namespace fa::test {
namespace {

using BackwardStream = GpuTest;

const driver::Api& api() {
  return driver::api();
}

/// Key tiles enough to go unsplit, and few with many query rows: split.
std::vector<AttentionCase> stream_cases() {
  return {{.b = 4, .h_q = 16, .h_kv = 8, .s_q = 600, .s_kv = 600, .causal = true},
          {.b = 1, .h_q = 4, .h_kv = 1, .s_q = 2000, .s_kv = 500, .d_qk = 128, .d_v = 128}};
}

TEST_F(BackwardStream, CapturedGraphReplays) {
  for (const AttentionCase& c : stream_cases()) {
    for (const bool with_workspace : {true, false}) {
      DeviceBackwardCase device(c);
      const Attention attention = Attention::create(config_of(c));
      attention.prepare_backward(shape_of(c));
      DeviceBuffer scratch(attention.backward_workspace_size(shape_of(c)));
      const Workspace workspace = with_workspace ? Workspace{scratch.data(), scratch.size()} : Workspace{};
      const ScopedStream stream;
      CUgraph graph = nullptr;
      CUgraphExec executable = nullptr;
      driver::check(api().cuStreamBeginCapture(stream.get(), CU_STREAM_CAPTURE_MODE_GLOBAL), "cuStreamBeginCapture");
      attention.backward(device.inputs(), device.outputs(), stream.get(), workspace);
      driver::check(api().cuStreamEndCapture(stream.get(), &graph), "cuStreamEndCapture");
      driver::check(api().cuGraphInstantiateWithFlags(&executable, graph, 0), "cuGraphInstantiateWithFlags");
      for (int replay = 0; replay < 3; ++replay) {
        device.forget();
        driver::check(api().cuGraphLaunch(executable, stream.get()), "cuGraphLaunch");
        driver::check(api().cuStreamSynchronize(stream.get()), "cuStreamSynchronize");
        if (replay != 1) expect_correct(device);
      }
      EXPECT_TRUE(scratch.guards_intact());
      api().cuGraphExecDestroy(executable);
      api().cuGraphDestroy(graph);
    }
  }
}

TEST_F(BackwardStream, ThreadsAndStreamsShareOneAttention) {
  const AttentionCase c{.b = 2, .h_q = 4, .h_kv = 4, .s_q = 257, .s_kv = 1000, .causal = true};
  const Attention attention = Attention::create(config_of(c));
  std::vector<std::unique_ptr<DeviceBackwardCase>> devices;
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    AttentionCase seeded = c;
    seeded.seed = seed;
    devices.push_back(std::make_unique<DeviceBackwardCase>(seeded));
  }
  CUcontext context = driver::current_context();
  std::vector<std::thread> threads;
  for (auto& device : devices) {
    threads.emplace_back([&, target = device.get()] {
      driver::check(api().cuCtxPushCurrent(context), "cuCtxPushCurrent");
      const ScopedStream stream;
      for (int i = 0; i < 20; ++i) attention.backward(target->inputs(), target->outputs(), stream.get());
      driver::check(api().cuStreamSynchronize(stream.get()), "cuStreamSynchronize");
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (auto& device : devices) expect_correct(*device);
}

/// dK and dV always, dQ too where it is promised.
TEST_F(BackwardStream, RepeatsAreBitwiseEqual) {
  for (const AttentionCase& c : stream_cases()) {
    for (const bool deterministic : {false, true}) {
      DeviceBackwardCase device(c);
      AttentionConfig config = config_of(c);
      config.deterministic = deterministic;
      const Attention attention = Attention::create(config);
      std::vector<std::byte> first;
      for (int i = 0; i < 200; ++i) {
        attention.backward(device.inputs(), device.outputs());
        driver::check(api().cuCtxSynchronize(), "cuCtxSynchronize");
        const std::vector<std::byte> now = device.bits(deterministic);
        if (first.empty()) first = now;
        ASSERT_TRUE(now == first) << "run " << i << ", deterministic " << deterministic;
      }
      expect_correct(device);
    }
  }
}

TEST_F(BackwardStream, ATooSmallWorkspaceIsRefused) {
  const AttentionCase c = stream_cases()[1];
  DeviceBackwardCase device(c);
  const Attention attention = Attention::create(config_of(c));
  const std::size_t needed = attention.backward_workspace_size(shape_of(c));
  DeviceBuffer scratch(needed);
  EXPECT_THROW(attention.backward(device.inputs(), device.outputs(), nullptr, {scratch.data(), needed - 1}), Error);
  attention.backward(device.inputs(), device.outputs(), nullptr, {scratch.data(), needed});
  expect_correct(device);
  EXPECT_TRUE(scratch.guards_intact());
}

}  // namespace
}  // namespace fa::test
