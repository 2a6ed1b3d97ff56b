// Merges of partial results on the device, and forwards that add to one.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "gpu/backward_case.hpp"
#include "gpu/captured_graph.hpp"
#include "gpu/device_case.hpp"
#include "gpu/scoped_stream.hpp"
#include "support/merge_case.hpp"

namespace fa::test {
namespace {

/// A call's memory on the device, with guards around each piece.
class DeviceMergeCase {
 public:
  explicit DeviceMergeCase(const MergeCase& c) : data_(c) {
    for (const MergeData::Buffer& buffer : data_.buffers()) {
      memory_.push_back(std::make_unique<DeviceBuffer>(buffer.bytes));
    }
  }

  MergeData::Call call() const {
    std::vector<void*> at;
    for (const auto& memory : memory_) at.push_back(memory->data());
    return data_.call(at);
  }

  /// Waits for the device.
  std::string judge() const {
    driver::check(driver::api().cuCtxSynchronize(), "cuCtxSynchronize");
    std::vector<std::vector<std::byte>> after;
    for (std::size_t i = 0; i < memory_.size(); ++i) {
      if (!memory_[i]->guards_intact()) return "written beside " + data_.buffers()[i].name;
      after.push_back(memory_[i]->read());
    }
    return data_.judge(after);
  }

 private:
  MergeData data_;
  std::vector<std::unique_ptr<DeviceBuffer>> memory_;
};

void run(const MergeCase& c) {
  SCOPED_TRACE(to_string(c));
  const DeviceMergeCase device(c);
  const MergeData::Call call = device.call();
  Attention::create(c.config()).merge(call.inputs, call.outputs);
  EXPECT_EQ(device.judge(), "");
}

class RandomMerges : public GpuTest, public ::testing::WithParamInterface<std::uint32_t> {};

TEST_P(RandomMerges, AreWhatAFormulaSays) {
  MergeCase c = random_merge_case(GetParam());
  for (std::uint32_t draw = 0; draw < 10; ++draw) {
    draw_rows(c, GetParam() * 100 + draw);
    if (c.kinds == MergeCase::Kinds::mixed && c.states < 2) c.states = 2;
    run(c);
  }
}

TEST_P(RandomMerges, SumsHaveNoWeights) {
  MergeCase c = random_merge_case(GetParam());
  c.sum = true;
  for (std::uint32_t draw = 0; draw < 4; ++draw) {
    draw_rows(c, GetParam() * 100 + draw);
    if (c.kinds == MergeCase::Kinds::mixed && c.states < 2) c.states = 2;
    run(c);
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomMerges, ::testing::Range(0u, 40u));

using Merge = GpuTest;

TEST_F(Merge, ManyRowsAndStates) {
  MergeCase c;
  c.d_v = 128;
  c.b = 3;
  c.h_q = 32;
  c.s_q = 1001;
  c.in_place = c.lse_in_place = 0;
  run(c);
  c.s_q = 40;
  c.kinds = MergeCase::Kinds::floats;
  c.in_place = -1;
  c.stacked = true;
  c.states = 64;
  run(c);
}

// A captured merge reads its states when it is replayed.
TEST_F(Merge, IsCaptured) {
  MergeCase c;
  c.states = 3;
  const Attention attention = Attention::create(c.config());
  attention.prepare_merge(c.shape());
  const DeviceMergeCase device(c);
  const MergeData::Call call = device.call();
  const ScopedStream stream;
  const CapturedGraph graph(stream.get(), [&] { attention.merge(call.inputs, call.outputs, stream.get()); });
  graph.replay(stream.get());
  EXPECT_EQ(device.judge(), "");
}

// Calls of one stream follow each other: each adds in place to what the one before has written.
TEST_F(Merge, EarlyStartsKeepTheOrder) {
  constexpr std::int64_t kRows = 4096, kD = 128;
  const std::vector<float> ones(kRows * kD, 1.f), zeros(kRows, 0.f);
  const auto bytes = [](const std::vector<float>& values) {
    const auto* const first = reinterpret_cast<const std::byte*>(values.data());
    return std::vector<std::byte>(first, first + values.size() * sizeof(float));
  };
  const DeviceBuffer o(bytes(ones)), lse(bytes(zeros)), other_o(bytes(ones)), other_lse(bytes(zeros));
  AttentionConfig config;
  config.head_dim = kD;
  config.dtype = DType::f32;
  const Attention attention = Attention::create(config);
  const AttentionState state{{o.data(), DType::f32, {1, 1, kRows, kD}}, {lse.data(), DType::f32, {1, 1, kRows}}};
  const AttentionState other{{other_o.data(), DType::f32, {1, 1, kRows, kD}},
                             {other_lse.data(), DType::f32, {1, 1, kRows}}};
  for (int i = 0; i < 200; ++i) merge_states(attention, {state, other}, {state.o, state.lse});
  driver::check(driver::api().cuCtxSynchronize(), "cuCtxSynchronize");
  const std::vector<std::byte> sums = lse.read();
  for (std::int64_t row = 0; row < kRows; ++row) {
    float sum = 0;
    std::memcpy(&sum, &sums[static_cast<std::size_t>(row) * sizeof sum], sizeof sum);
    ASSERT_NEAR(sum, std::log(201.0), 1e-4) << row;
  }
}

/// A call whose keys are computed in three shards, added one after the other to o and lse.
class Shards : public GpuTest, public ::testing::WithParamInterface<const char*> {
 protected:
  static AttentionConfig config(const AttentionCase& c) {
    AttentionConfig config = config_of(c);
    config.tune = TunePolicy::off;
    if (GetParam()[0] == '\0') return config;
    config.kernel = KernelOverride{};
    config.kernel->kernel = GetParam();
    return config;
  }

  /// Keys [begin, end).
  static TensorView keys(const TensorView& of, std::int64_t begin, std::int64_t end) {
    TensorView part = of;
    const std::int64_t bytes = begin * of.strides[2] * static_cast<std::int64_t>(size_of(of.dtype));
    part.data = static_cast<std::byte*>(of.data) + bytes;
    part.shape[2] = end - begin;
    return part;
  }

  /// Of rows that keep keys up to the diagonal, or all.
  static AttentionConfig of_shard(AttentionConfig config, std::int64_t begin, std::int64_t end, std::int64_t s_kv) {
    if (!config.causal || (begin > 0 && end == s_kv)) return config;
    config.causal = false;
    config.mask.expression = "q + " + std::to_string(s_kv) + " - s_q >= kv + " + std::to_string(begin);
    return config;
  }

  static void run(const AttentionCase& c) {
    SCOPED_TRACE(to_string(c));
    DeviceCase device(c);
    const std::int64_t cuts[] = {0, c.s_kv / 3, c.s_kv / 3 + 65, c.s_kv};
    ForwardInputs inputs = device.inputs();
    const TensorView k = inputs.k, v = inputs.v;
    for (std::size_t i = 0; i < 3; ++i) {
      AttentionConfig shard = of_shard(config(c), cuts[i], cuts[i + 1], c.s_kv);
      shard.accumulate = i > 0;
      inputs.k = keys(k, cuts[i], cuts[i + 1]);
      inputs.v = keys(v, cuts[i], cuts[i + 1]);
      Attention::create(shard).forward(inputs, device.outputs());
    }
    expect_correct(device);
  }
};

TEST_P(Shards, AddUpToAllKeys) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const bool causal : {false, true}) {
      for (const std::int64_t d : {64, 128, 256}) {
        AttentionCase c;
        c.dtype = dtype;
        c.b = 2;
        c.h_q = 4;
        c.h_kv = 2;
        c.s_q = 333;
        c.s_kv = 700;
        c.d_qk = c.d_v = d;
        c.causal = causal;
        run(c);
      }
    }
  }
  AttentionCase decode;
  decode.b = 1;
  decode.h_q = 8;
  decode.h_kv = 1;
  decode.s_q = 1;
  decode.s_kv = 6000;
  decode.d_qk = decode.d_v = 128;
  run(decode);
}

INSTANTIATE_TEST_SUITE_P(Kernel, Shards, ::testing::Values("", "sm80", "sm90"),
                         [](const auto& test) { return std::string(test.param).empty() ? "Any" : test.param; });

TEST_F(Merge, AccumulateInF32) {
  AttentionCase c;
  c.dtype = DType::f32;
  c.b = 2;
  c.h_q = 2;
  c.h_kv = 2;
  c.s_q = 100;
  c.s_kv = 300;
  DeviceCase device(c);
  ForwardInputs inputs = device.inputs();
  AttentionConfig config = config_of(c);
  const TensorView k = inputs.k, v = inputs.v;
  for (std::int64_t i = 0; i < 3; ++i) {
    config.accumulate = i > 0;
    inputs.k.shape[2] = inputs.v.shape[2] = 100;
    inputs.k.data = static_cast<float*>(k.data) + 100 * i * k.strides[2];
    inputs.v.data = static_cast<float*>(v.data) + 100 * i * v.strides[2];
    Attention::create(config).forward(inputs, device.outputs());
  }
  expect_correct(device);
}

// Each shard's backward, given the o and lse of all keys, yields its part of the gradients.
TEST_F(Merge, GradientsOfShardsAreThoseOfAllKeys) {
  AttentionCase c;
  c.b = 2;
  c.h_q = 4;
  c.h_kv = 4;
  c.s_q = 257;
  c.s_kv = 512;
  c.d_qk = c.d_v = 128;
  DeviceBackwardCase device(c, true);
  const Attention attention = Attention::create(config_of(c));
  AttentionConfig adds = config_of(c);
  adds.accumulate = true;
  const Attention accumulating = Attention::create(adds);
  const auto half = [](TensorView of, std::int64_t part) {
    of.data =
        static_cast<std::byte*>(of.data) + 256 * part * of.strides[2] * static_cast<std::int64_t>(size_of(of.dtype));
    of.shape[2] = 256;
    return of;
  };
  ForwardInputs forward = device.forward.inputs();
  const TensorView k = forward.k, v = forward.v;
  for (std::int64_t part = 0; part < 2; ++part) {
    forward.k = half(k, part);
    forward.v = half(v, part);
    (part == 0 ? attention : accumulating).forward(forward, device.forward.outputs());
  }
  // dq of both shards is added on the host, in what is then held to the reference.
  HostTensor sum = device.host_gradients.dq;
  for (std::int64_t part = 0; part < 2; ++part) {
    BackwardInputs inputs = device.inputs();
    BackwardOutputs outputs = device.outputs();
    inputs.k = half(inputs.k, part);
    inputs.v = half(inputs.v, part);
    outputs.dk = half(outputs.dk, part);
    outputs.dv = half(outputs.dv, part);
    (part == 0 ? attention : accumulating).backward(inputs, outputs);
    driver::check(driver::api().cuCtxSynchronize(), "cuCtxSynchronize");
    HostTensor own = device.host_gradients.dq;
    device.dq.read(own);
    for (std::int64_t b = 0; b < c.b; ++b) {
      for (std::int64_t h = 0; h < c.h_q; ++h) {
        for (std::int64_t s = 0; s < c.s_q; ++s) {
          for (std::int64_t d = 0; d < c.d_qk; ++d) {
            sum.set(b, h, s, d, own.at(b, h, s, d) + (part == 0 ? 0 : sum.at(b, h, s, d)));
          }
        }
      }
    }
  }
  device.dq.buffer.write(sum.bytes());
  expect_correct(device);
}

}  // namespace
}  // namespace fa::test
