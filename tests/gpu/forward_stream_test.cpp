#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

#include "gpu/captured_graph.hpp"
#include "gpu/device_case.hpp"
#include "gpu/scoped_stream.hpp"

namespace fa::test {
namespace {

using ForwardStream = GpuTest;

const driver::Api& api() {
  return driver::api();
}

/// One kernel, and two kernels with partial results in between.
std::vector<AttentionCase> captured_cases() {
  return {{.b = 2, .h_q = 4, .h_kv = 2, .s_q = 300, .s_kv = 300, .causal = true},
          {.b = 1, .h_q = 4, .h_kv = 1, .s_q = 2, .s_kv = 5000}};
}

TEST_F(ForwardStream, CapturedGraphReplays) {
  for (const AttentionCase& c : captured_cases()) {
    for (const bool with_workspace : {true, false}) {
      DeviceCase device(c);
      const Attention attention = Attention::create(config_of(c));
      const AttentionShape shape{.b = c.b, .h_q = c.h_q, .h_kv = c.h_kv, .s_q = c.s_q, .s_kv = c.s_kv};
      attention.prepare(shape);
      DeviceBuffer scratch(attention.workspace_size(shape) + 256);
      const Workspace workspace = with_workspace ? Workspace{scratch.data(), scratch.size()} : Workspace{};
      const ScopedStream stream;
      const CapturedGraph graph(stream.get(),
                                [&] { attention.forward(device.inputs(), device.outputs(), stream.get(), workspace); });
      for (int replay = 0; replay < 3; ++replay) {
        device.o.buffer.write(make_outputs(c).o.bytes());  // NaN again
        graph.replay(stream.get());
        expect_correct(device);
      }
    }
  }
}

/// Blocks take query tiles from a counter in the workspace, whatever was there before.
TEST_F(ForwardStream, TheCounterOfQueryTilesIsClearedInEveryCallAndReplay) {
  const AttentionCase c{
      .b = 2, .h_q = 2, .h_kv = 2, .s_q = 2060, .s_kv = 2060, .d_qk = 256, .d_v = 256, .causal = true};
  DeviceCase device(c);
  const Attention attention = Attention::create(config_of(c));
  const AttentionShape shape{.b = c.b, .h_q = c.h_q, .h_kv = c.h_kv, .s_q = c.s_q, .s_kv = c.s_kv};
  if (attention.kernel_info(shape).spec.find("dynamic=1") == std::string::npos) GTEST_SKIP() << "not on this GPU";
  DeviceBuffer scratch(attention.workspace_size(shape));
  const Workspace workspace{scratch.data(), scratch.size()};
  attention.forward(device.inputs(), device.outputs());
  expect_correct(device);
  const std::vector<std::byte> first = device.o.buffer.read();
  const ScopedStream stream;
  const CapturedGraph graph(stream.get(),
                            [&] { attention.forward(device.inputs(), device.outputs(), stream.get(), workspace); });
  for (int i = 0; i < 10; ++i) {
    device.o.buffer.write(make_outputs(c).o.bytes());  // NaN again
    if (i % 2 == 0) {
      graph.replay(stream.get());
    } else {
      attention.forward(device.inputs(), device.outputs(), stream.get(), workspace);
    }
    driver::check(api().cuStreamSynchronize(stream.get()), "cuStreamSynchronize");
    EXPECT_EQ(device.o.buffer.read(), first) << "call " << i;
  }
  EXPECT_TRUE(scratch.guards_intact());
}

/// Each call reads what the one before it writes, and writes over what that one reads, while kernels start early.
TEST_F(ForwardStream, EachCallWaitsForTheOneBefore) {
  for (const std::int64_t d : {64, 128, 256}) {
    const AttentionCase c{.b = 3, .h_q = 10, .h_kv = 10, .s_q = 1100, .s_kv = 1100, .d_qk = d, .d_v = d};
    DeviceCase device(c);
    AttentionConfig config = config_of(c);
    config.scale = 2.f;  // each row of O is nearly one of v: after any number of calls it depends on every one of them
    const Attention attention = Attention::create(config);
    const ScopedStream stream;
    const auto synchronize = [&] { driver::check(api().cuStreamSynchronize(stream.get()), "cuStreamSynchronize"); };
    ForwardInputs back = device.inputs();
    back.q = device.o.const_view();
    ForwardOutputs to_q = device.outputs();
    to_q.o = device.q.view();
    const auto queue = [&](bool waits) {
      for (int i = 0; i < 20; ++i) {
        attention.forward(device.inputs(), device.outputs(), stream.get());
        if (waits) synchronize();
        attention.forward(back, to_q, stream.get());
        if (waits) synchronize();
      }
    };
    const std::vector<std::byte> start = device.q.buffer.read();
    const auto result = [&](const auto& run) {
      device.q.buffer.write(start);
      run();
      synchronize();
      return device.q.buffer.read();
    };
    const std::vector<std::byte> expected = result([&] { queue(true); });
    for (int i = 0; i < 3; ++i) EXPECT_EQ(result([&] { queue(false); }), expected) << "d " << d;
    const CapturedGraph graph(stream.get(), [&] { queue(false); });
    for (int i = 0; i < 3; ++i) EXPECT_EQ(result([&] { graph.replay(stream.get()); }), expected) << "d " << d;
  }
}

/// What is queued in front need not be a kernel, in a graph either.
TEST_F(ForwardStream, WaitsForClearedAndCopiedMemory) {
  const AttentionCase c{.b = 2, .h_q = 4, .h_kv = 4, .s_q = 1000, .s_kv = 1000};
  DeviceCase device(c);
  const Attention attention = Attention::create(config_of(c));
  attention.forward(device.inputs(), device.outputs());  // compiled before anything is captured
  const DeviceBuffer values(device.q.buffer.read());
  const auto q = reinterpret_cast<CUdeviceptr>(device.q.buffer.data());
  const ScopedStream stream;
  const auto queue = [&] {
    driver::check(api().cuMemsetD8Async(q, 0xff, values.size(), stream.get()), "cuMemsetD8Async");  // NaN
    driver::check(api().cuMemcpyDtoDAsync(q, reinterpret_cast<CUdeviceptr>(values.data()), values.size(), stream.get()),
                  "cuMemcpyDtoDAsync");
    attention.forward(device.inputs(), device.outputs(), stream.get());
  };
  const std::vector<std::byte> nothing = make_outputs(c).o.bytes();  // NaN
  for (int i = 0; i < 5; ++i) {
    device.o.buffer.write(nothing);
    queue();
    expect_correct(device);
  }
  const CapturedGraph graph(stream.get(), queue);
  for (int i = 0; i < 5; ++i) {
    device.o.buffer.write(nothing);
    graph.replay(stream.get());
    expect_correct(device);
  }
}

TEST_F(ForwardStream, ThreadsAndStreamsShareOneAttention) {
  const AttentionCase c{.b = 2, .h_q = 4, .h_kv = 4, .s_q = 257, .s_kv = 3000, .causal = true};
  const Attention attention = Attention::create(config_of(c));
  std::vector<std::unique_ptr<DeviceCase>> devices;
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    AttentionCase seeded = c;
    seeded.seed = seed;
    devices.push_back(std::make_unique<DeviceCase>(seeded));
  }
  CUcontext context = driver::current_context();
  std::vector<std::thread> threads;
  for (auto& device : devices) {
    threads.emplace_back([&, target = device.get()] {
      driver::check(api().cuCtxPushCurrent(context), "cuCtxPushCurrent");
      const ScopedStream stream;
      for (int i = 0; i < 20; ++i) attention.forward(target->inputs(), target->outputs(), stream.get());
      driver::check(api().cuStreamSynchronize(stream.get()), "cuStreamSynchronize");
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (auto& device : devices) expect_correct(*device);
}

TEST_F(ForwardStream, RepeatsAreBitwiseEqual) {
  for (const AttentionCase& c : captured_cases()) {
    DeviceCase device(c);
    const Attention attention = Attention::create(config_of(c));
    std::vector<std::byte> first;
    for (int i = 0; i < 200; ++i) {
      attention.forward(device.inputs(), device.outputs());
      driver::check(api().cuCtxSynchronize(), "cuCtxSynchronize");
      std::vector<std::byte> now = device.o.buffer.read();
      const std::vector<std::byte> lse = device.lse.buffer.read();
      now.insert(now.end(), lse.begin(), lse.end());
      if (first.empty()) first = now;
      ASSERT_EQ(now, first) << "run " << i;
    }
    expect_correct(device);
  }
}

TEST_F(ForwardStream, ATooSmallWorkspaceIsRefused) {
  const AttentionCase c = captured_cases()[1];
  DeviceCase device(c);
  const Attention attention = Attention::create(config_of(c));
  const AttentionShape shape{.b = c.b, .h_q = c.h_q, .h_kv = c.h_kv, .s_q = c.s_q, .s_kv = c.s_kv};
  ASSERT_GT(attention.workspace_size(shape), 0u);
  DeviceBuffer scratch(attention.workspace_size(shape));
  EXPECT_THROW(attention.forward(device.inputs(), device.outputs(), nullptr, {scratch.data(), scratch.size() / 4}),
               Error);
  attention.forward(device.inputs(), device.outputs(), nullptr, {scratch.data(), scratch.size()});
  expect_correct(device);
  EXPECT_TRUE(scratch.guards_intact());
}

TEST_F(ForwardStream, WorksWithoutACurrentContext) {
  const AttentionCase c{.s_q = 64, .s_kv = 64};
  DeviceCase device(c);
  std::thread([&] {
    ASSERT_EQ(driver::current_context(), nullptr);
    const Attention attention = Attention::create(config_of(c), Device::cuda(0));
    attention.forward(device.inputs(), device.outputs());
    EXPECT_EQ(driver::current_context(), nullptr) << "the caller's thread must be left as it was";
  }).join();
  expect_correct(device);
}

}  // namespace
}  // namespace fa::test
