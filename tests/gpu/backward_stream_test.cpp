#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gpu/backward_case.hpp"
#include "gpu/captured_graph.hpp"
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
      const CapturedGraph graph(
          stream.get(), [&] { attention.backward(device.inputs(), device.outputs(), stream.get(), workspace); });
      for (int replay = 0; replay < 3; ++replay) {
        device.forget();
        graph.replay(stream.get());
        driver::check(api().cuStreamSynchronize(stream.get()), "cuStreamSynchronize");
        if (replay != 1) expect_correct(device);
      }
      EXPECT_TRUE(scratch.guards_intact());
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

/// Calls on one stream, one behind the other: short ones, whose kernels overlap most. Each has other inputs.
class BackToBack {
 public:
  static constexpr std::size_t kCalls = 5;

  BackToBack(AttentionCase c, const AttentionConfig& config)
      : attention_(Attention::create(config)),
        all_(config.deterministic),
        scratch_(attention_.backward_workspace_size(shape_of(c))),
        shared_(c) {
    for (std::size_t i = 0; i < kCalls; ++i) {
      c.seed = i + 1;
      calls_.push_back(std::make_unique<DeviceBackwardCase>(c));
      call(*calls_[i], nullptr);
      expect_correct(*calls_[i]);
      expected_.push_back(calls_[i]->bits(all_));
      expected_dq_.push_back(calls_[i]->host_gradients.dq);
    }
  }

  /// Nothing but the calls, each with its own tensors.
  void queue_calls(CUstream stream) {
    for (const auto& own : calls_) call(*own, stream);
  }

  /// All calls with the same tensors, which are written right before each and taken away right behind it.
  void queue_calls_on_shared_tensors(CUstream stream) {
    for (const auto& own : calls_) {
      for (const auto& [from, to] : inputs_of(*own)) copy(from->buffer, to->buffer, stream);
      call(shared_, stream);
      for (const auto& [to, from] : outputs_of(*own)) copy(from->buffer, to->buffer, stream);
      for (const auto& [from, to] : inputs_of(*own)) clear(to->buffer, stream);
      for (const auto& [to, from] : outputs_of(*own)) clear(from->buffer, stream);
    }
  }

  void forget() {
    for (const auto& own : calls_) own->forget();
    driver::check(api().cuCtxSynchronize(), "cuCtxSynchronize");
  }

  /// As when each call had the GPU to itself: bit for bit, but for the order of additions to dq.
  void expect_as_alone(const std::string& what) {
    SCOPED_TRACE(what);
    driver::check(api().cuCtxSynchronize(), "cuCtxSynchronize");
    for (std::size_t i = 0; i < kCalls; ++i) {
      ASSERT_TRUE(calls_[i]->bits(all_) == expected_[i]) << "call " << i;
      HostTensor dq = expected_dq_[i];
      calls_[i]->dq.read(dq);
      HostTensor zero = dq;
      std::ranges::fill(zero.bytes(), std::byte{0});
      const HostTensor& alone = expected_dq_[i];
      const double largest = compare(std::as_const(zero).view(), alone.view()).max_abs;
      // Sums that differ in their last bits round to the same value or its neighbour, 2^-8 away in bf16.
      ASSERT_LE(compare(std::as_const(dq).view(), alone.view()).max_abs, largest / 128) << "call " << i;
    }
    EXPECT_TRUE(scratch_.guards_intact());
  }

 private:
  using Pairs = std::vector<std::pair<const DeviceTensor*, const DeviceTensor*>>;

  void call(const DeviceBackwardCase& device, CUstream stream) {
    attention_.backward(device.inputs(), device.outputs(), stream, {scratch_.data(), scratch_.size()});
  }

  Pairs inputs_of(const DeviceBackwardCase& own) const {
    return {{&own.forward.q, &shared_.forward.q},     {&own.forward.k, &shared_.forward.k},
            {&own.forward.v, &shared_.forward.v},     {&own.forward.o, &shared_.forward.o},
            {&own.forward.lse, &shared_.forward.lse}, {&own.dout, &shared_.dout}};
  }
  Pairs outputs_of(const DeviceBackwardCase& own) const {
    return {{&own.dq, &shared_.dq}, {&own.dk, &shared_.dk}, {&own.dv, &shared_.dv}};
  }

  static CUdeviceptr address(const DeviceBuffer& buffer) { return reinterpret_cast<CUdeviceptr>(buffer.data()); }
  static void copy(const DeviceBuffer& from, const DeviceBuffer& to, CUstream stream) {
    driver::check(api().cuMemcpyDtoDAsync(address(to), address(from), from.size(), stream), "cuMemcpyDtoDAsync");
  }
  /// To NaNs.
  static void clear(const DeviceBuffer& buffer, CUstream stream) {
    driver::check(api().cuMemsetD8Async(address(buffer), 0xff, buffer.size(), stream), "cuMemsetD8Async");
  }

  Attention attention_;
  bool all_;
  DeviceBuffer scratch_;
  DeviceBackwardCase shared_;
  std::vector<std::unique_ptr<DeviceBackwardCase>> calls_;
  std::vector<std::vector<std::byte>> expected_;
  std::vector<HostTensor> expected_dq_;
};

/// Persistent blocks, a block a tile, splits, two and four blocks a tile, an odd number of rows; the pass for dQ.
struct BackToBackCase {
  AttentionCase problem;
  bool deterministic = false;
};
std::vector<BackToBackCase> back_to_back_cases() {
  const AttentionCase d64{.b = 4, .h_q = 8, .h_kv = 8, .s_q = 512, .s_kv = 512};
  const AttentionCase d128{
      .b = 2, .h_q = 8, .h_kv = 2, .s_q = 333, .s_kv = 512, .d_qk = 128, .d_v = 128, .causal = true};
  const AttentionCase split{.b = 1, .h_q = 4, .h_kv = 1, .s_q = 2000, .s_kv = 500, .d_qk = 128, .d_v = 128};
  const AttentionCase pair{.b = 1, .h_q = 8, .h_kv = 8, .s_q = 512, .s_kv = 512, .d_qk = 256, .d_v = 256};
  const AttentionCase wide{.b = 1, .h_q = 4, .h_kv = 2, .s_q = 333, .s_kv = 512, .d_qk = 512, .d_v = 512};
  const AttentionCase no_rows{.b = 2,
                              .h_q = 4,
                              .h_kv = 4,
                              .s_q = 64,
                              .s_kv = 900,
                              .d_qk = 96,
                              .d_v = 96,
                              .causal = true,
                              .causal_align = CausalAlign::top_left};  // for most keys
  return {{d64}, {d128}, {split}, {pair}, {wide}, {no_rows}, {d64, true}};
}

AttentionConfig config_of(const BackToBackCase& c) {
  AttentionConfig config = config_of(c.problem);
  config.deterministic = c.deterministic;
  return config;
}

TEST_F(BackwardStream, CallsBackToBackAreAsAlone) {
  for (const BackToBackCase& c : back_to_back_cases()) {
    SCOPED_TRACE(to_string(c.problem));
    BackToBack calls(c.problem, config_of(c));
    const ScopedStream stream;
    for (int round = 0; round < 20; ++round) {
      calls.forget();
      for (int i = 0; i < 4; ++i) calls.queue_calls(stream.get());
      calls.expect_as_alone("own tensors");
      calls.forget();
      calls.queue_calls_on_shared_tensors(stream.get());
      calls.expect_as_alone("shared tensors");
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(BackwardStream, ReplaysBackToBackAreAsAlone) {
  for (const BackToBackCase& c : back_to_back_cases()) {
    for (const bool shared : {false, true}) {
      SCOPED_TRACE(to_string(c.problem));
      BackToBack calls(c.problem, config_of(c));
      const ScopedStream stream;
      const CapturedGraph graph(stream.get(), [&] {
        shared ? calls.queue_calls_on_shared_tensors(stream.get()) : calls.queue_calls(stream.get());
      });
      for (int replay = 0; replay < 50; ++replay) {
        if (replay % 10 == 0) calls.forget();
        graph.replay(stream.get());
        if (replay % 10 == 9) calls.expect_as_alone("replay " + std::to_string(replay));
        if (HasFatalFailure()) break;
      }
      driver::check(api().cuCtxSynchronize(), "cuCtxSynchronize");
      if (HasFatalFailure()) return;
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
