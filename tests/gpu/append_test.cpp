// Appends to KV caches on the device.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "gpu/captured_graph.hpp"
#include "gpu/device_case.hpp"
#include "gpu/scoped_stream.hpp"
#include "support/append_case.hpp"

namespace fa::test {
namespace {

const driver::Api& api() {
  return driver::api();
}

/// A call's memory on the device, with guards around each piece.
class DeviceAppendCase {
 public:
  explicit DeviceAppendCase(const AppendCase& c) : data_(c) {
    for (std::size_t i = 0; i < kAppendParts; ++i) {
      const AppendBuffer& buffer = data_.buffers()[i];
      if (!buffer.bytes.empty()) memory_[i] = std::make_unique<DeviceBuffer>(buffer.bytes);
    }
  }

  AppendInputs inputs() const {
    std::array<void*, kAppendParts> at{};
    for (std::size_t i = 0; i < kAppendParts; ++i) at[i] = memory_[i] == nullptr ? nullptr : memory_[i]->data();
    return data_.inputs(at);
  }

  AppendData& data() { return data_; }
  DeviceBuffer& memory(AppendPart part) { return *memory_[static_cast<std::size_t>(part)]; }

  /// Waits for the device.
  std::string judge() const {
    driver::check(api().cuCtxSynchronize(), "cuCtxSynchronize");
    std::array<std::vector<std::byte>, kAppendParts> after;
    for (std::size_t i = 0; i < kAppendParts; ++i) {
      if (memory_[i] == nullptr) continue;
      if (!memory_[i]->guards_intact()) return std::string("written beside ") + data_.buffers()[i].name;
      after[i] = memory_[i]->read();
    }
    return data_.judge(after);
  }

 private:
  AppendData data_;
  std::array<std::unique_ptr<DeviceBuffer>, kAppendParts> memory_;
};

AttentionConfig config_of(const AppendCase& c) {
  AttentionConfig config = c.config();
  config.tune = TunePolicy::off;
  return config;
}

void run(const AppendCase& c) {
  SCOPED_TRACE(to_string(c));
  const DeviceAppendCase device(c);
  Attention::create(config_of(c)).append(device.inputs());
  EXPECT_EQ(device.judge(), "");
}

class RandomAppends : public GpuTest, public ::testing::WithParamInterface<std::uint32_t> {};

TEST_P(RandomAppends, AreWhatAFormulaSays) {
  AppendCase c = random_append_case(GetParam(), false);
  for (std::uint32_t draw = 0; draw < 10; ++draw) {
    draw_requests(c, GetParam() * 100 + draw);
    run(c);
  }
}

// Wrong lengths, tables, rows and slots: nothing but what has a place is written.
TEST_P(RandomAppends, StayInTheirMemory) {
  AppendCase c = random_append_case(GetParam() + 1000, true);
  for (std::uint32_t draw = 0; draw < 10; ++draw) {
    draw_requests(c, GetParam() * 100 + draw);
    run(c);
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomAppends, ::testing::Range(0u, 40u));

using Append = GpuTest;

TEST_F(Append, PageSizesOfEngines) {
  for (const std::int64_t page_size : {1, 3, 8, 12, 16, 40, 64, 256}) {
    AppendCase c;
    c.page_size = page_size;
    c.d_qk = c.d_v = 128;
    c.h_kv = 8;
    c.h_q = 32;
    c.rotary_dims = 128;
    c.rows = {1, 1, 700, 1, 33, 0, 1};
    c.before = {99, 0, 0, 4000, 1000, 7, 12};
    run(c);
  }
}

TEST_F(Append, ManyRowsAndHeads) {
  AppendCase c;
  c.h_kv = 40;
  c.h_q = 80;
  c.rows = {3000, 1, 500};
  c.before = {1, 2, 3};
  c.rotary_dims = 64;
  run(c);
  c.h_kv = c.h_q = 1;
  c.rows.assign(5000, 1);
  c.before.assign(5000, 17);
  run(c);
}

TEST_F(Append, LatentRows) {
  for (const std::int64_t page_size : {0, 1, 16, 64}) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      for (const bool given : {false, true}) {
        AppendCase c;
        c.dtype = dtype;
        c.latent = true;
        c.k_dtype = DType::e4m3;
        c.d_qk = 576;
        c.d_v = 512;
        c.h_kv = 1;
        c.h_q = 16;
        c.page_size = page_size;
        c.rotary_dims = 64;
        c.interleaved = given;
        c.scales_given = given;
        c.rows = {1, 1, 700, 1, 33, 0, 1};
        c.before = {99, 0, 0, 4000, 1000, 7, 12};
        run(c);
      }
    }
  }
}

// One graph, whose lengths and tables change between replays.
TEST_F(Append, GraphsReadLengthsWhenTheyAreReplayed) {
  AppendCase c;
  c.rows = {1, 1, 1};
  c.before = {20, 3, 11};
  c.rotary_dims = 64;
  c.h_q = 4;
  AppendCase later = c;
  later.before = {21, 4, 12};
  const Attention attention = Attention::create(config_of(c));
  attention.prepare_append(c.shape());
  DeviceAppendCase device(c);
  const ScopedStream stream;
  const CapturedGraph graph(stream.get(), [&] { attention.append(device.inputs(), stream.get()); });
  graph.replay(stream.get());
  EXPECT_EQ(device.judge(), "");
  DeviceAppendCase other(later);
  for (const auto part : {AppendPart::k_cache, AppendPart::v_cache, AppendPart::used, AppendPart::table}) {
    device.memory(part).write(other.memory(part).read());
  }
  graph.replay(stream.get());
  driver::check(api().cuCtxSynchronize(), "cuCtxSynchronize");
  attention.append(other.inputs());
  driver::check(api().cuCtxSynchronize(), "cuCtxSynchronize");
  for (const auto part : {AppendPart::k_cache, AppendPart::v_cache, AppendPart::q_out}) {
    EXPECT_EQ(device.memory(part).read(), other.memory(part).read());
  }
}

// Calls of one stream follow each other: each turns in place what the one before has turned.
TEST_F(Append, EarlyStartsKeepTheOrder) {
  AppendCase c;
  c.dtype = DType::f32;
  c.rotary_dims = 64;
  c.h_q = 8;
  c.h_kv = 8;
  c.rows = {257};
  c.before = {0};
  c.in_place = true;
  c.packed = false;
  const Attention attention = Attention::create(config_of(c));
  DeviceAppendCase device(c);
  AppendInputs inputs = device.inputs();
  std::vector<std::int64_t> back(257);
  for (std::int64_t i = 0; i < 257; ++i) back[static_cast<std::size_t>(i)] = -i;
  std::vector<std::byte> bytes(back.size() * sizeof(std::int64_t));
  std::memcpy(bytes.data(), back.data(), bytes.size());
  const DeviceBuffer positions(bytes);
  AppendInputs backwards = inputs;
  backwards.rotary.positions_64 = static_cast<const std::int64_t*>(positions.data());
  for (int i = 0; i < 50; ++i) {
    attention.append(inputs);
    attention.append(backwards);
  }
  driver::check(api().cuCtxSynchronize(), "cuCtxSynchronize");
  const std::vector<std::byte> before = device.data().buffers()[static_cast<std::size_t>(AppendPart::q)].bytes;
  const std::vector<std::byte> after = device.memory(AppendPart::q).read();
  double worst = 0;
  device.data().for_each_row(AppendPart::q, [&](std::size_t offset, std::size_t count) {
    for (std::size_t at = offset; at < offset + count; at += sizeof(float)) {
      float was = 0, is = 0;
      std::memcpy(&was, &before[at], sizeof was);
      std::memcpy(&is, &after[at], sizeof is);
      worst = std::max(worst, static_cast<double>(std::abs(was - is)));
    }
  });
  EXPECT_LT(worst, 100 * 4 * 0x1p-22);  // numbers of up to 2, each turn within its bound
}

TEST_F(Append, WrongValuesAreRefusedWhereTheyAreChecked) {
  AppendCase c;
  c.rows = {2, 1};
  c.before = {20, 3};
  AttentionConfig config = config_of(c);
  config.check_sequences = true;
  const Attention attention = Attention::create(config);
  DeviceAppendCase device(c);
  attention.append(device.inputs());
  EXPECT_EQ(device.judge(), "");
  std::vector<std::byte> table = device.memory(AppendPart::table).read();
  const std::int32_t wrong = 1 << 20;
  std::memcpy(table.data() + sizeof wrong, &wrong, sizeof wrong);
  device.memory(AppendPart::table).write(table);
  try {
    attention.append(device.inputs());
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.field("argument"), "cache.block_table") << error.what();
  }
}

}  // namespace
}  // namespace fa::test
