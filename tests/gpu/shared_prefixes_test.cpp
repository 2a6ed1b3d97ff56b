// Shared prefixes on the device: against float64 attention that shares nothing.

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <deque>
#include <vector>

#include "gpu/captured_graph.hpp"
#include "gpu/device_case.hpp"
#include "gpu/scoped_stream.hpp"
#include "support/shared_case.hpp"

namespace fa::test {
namespace {

using SharedPrefixes = GpuTest;

/// A call's tensors and arrays on the device.
class DeviceShared {
 public:
  explicit DeviceShared(const SharedCase& of) : c(of), host(make_data(of)) {
    q.emplace_back(host.q);
    k.emplace_back(host.k);
    v.emplace_back(host.v);
    const AttentionOutputs outputs = make_outputs(c, host);
    o.emplace_back(outputs.o);
    lse.emplace_back(outputs.lse);
    sink.emplace_back(host.sink);
    if (host.k_scales().defined()) k_scale.emplace_back(host.k_scale);
    if (host.v_scales().defined()) v_scale.emplace_back(host.v_scale);
  }

  ForwardInputs inputs() {
    ForwardInputs in{q[0].const_view(), k[0].const_view(), c.value_in_key ? TensorView() : v[0].const_view()};
    if (!k_scale.empty()) in.k_scale = k_scale[0].const_view();
    if (!v_scale.empty()) in.v_scale = v_scale[0].const_view();
    if (c.sink) in.sink = TensorView(static_cast<const void*>(sink[0].buffer.data()), DType::f32, {c.attention.h_q});
    in.sequences.b = c.b();
    if (c.packed) in.sequences.cu_seqlens_q = ints(host.cu_q);
    in.sequences.seqused_kv = ints(host.used_kv);
    in.sequences.max_s_q = host.max_s_q;
    in.sequences.max_s_kv = host.max_s_kv;
    in.cache.block_table = table(host.table, c.b());
    in.cache.seq_begin = ints(host.begin);
    for (const SharedData::Level& level : host.levels) {
      SharedPrefix prefix{table(level.table, level.groups), ints(level.cu_rows), ints(level.lengths)};
      if (!level.begin.empty()) prefix.begin = ints(level.begin);
      const auto width = static_cast<std::int64_t>(level.positions.size()) / level.groups;
      prefix.positions = TensorView(static_cast<const void*>(ints(level.positions)), DType::i32, {level.groups, width});
      prefix.max_rows = level.max_rows;
      prefix.max_length = level.max_length;
      levels.push_back(prefix);
      shapes.push_back({level.groups, level.max_rows,
                        level.max_length == 0 ? host.max_pages * c.page_size : level.max_length,
                        prefix.begin != nullptr});
    }
    in.prefixes = levels;
    for (const Captured& captured : host.captures(c)) {
      TensorView view = captured.tensor;  // of 4 bytes an element, without gaps
      const auto* const first = static_cast<const std::byte*>(view.data);
      view.data = arrays.emplace_back(std::vector<std::byte>(first, first + 4 * view.elements())).data();
      in.captures.add({captured.name, view});
    }
    return in;
  }
  ForwardOutputs outputs() const { return {o[0].view(), lse[0].view()}; }

  AttentionShape shape() const {
    const TensorView view = host.q.view();
    const std::int64_t keys = host.max_pages * c.page_size;
    return {.b = c.b(),
            .h_q = c.attention.h_q,
            .h_kv = c.attention.h_kv,
            .s_q = c.packed ? host.max_s_q : view.shape[2],
            .s_kv = host.max_s_kv == 0 ? keys : host.max_s_kv,
            .aligned = true,
            .total_q = c.packed ? view.shape[2] : 0};
  }

  /// Other lengths and pages of the same numbers of rows, in the same memory.
  void become(const SharedCase& of) {
    c = of;
    host = make_data(of);
    std::size_t at = 0;
    const auto put = [&](const std::vector<std::int32_t>& values) { arrays[at++].write(bytes_of(values)); };
    if (c.packed) put(host.cu_q);
    put(host.used_kv);
    put(host.table);
    put(host.begin);
    for (const SharedData::Level& level : host.levels) {
      put(level.table);
      put(level.cu_rows);
      put(level.lengths);
      if (!level.begin.empty()) put(level.begin);
      put(level.positions);
    }
    q[0].buffer.write(host.q.bytes());
    k[0].buffer.write(host.k.bytes());
    v[0].buffer.write(host.v.bytes());
    const AttentionOutputs fresh = make_outputs(c, host);
    o[0].buffer.write(fresh.o.bytes());
    lse[0].buffer.write(fresh.lse.bytes());
  }

  void expect_right() const {
    driver::check(driver::api().cuCtxSynchronize(), "cuCtxSynchronize");
    AttentionOutputs actual = make_outputs(c, host);
    o[0].read(actual.o);
    lse[0].read(actual.lse);
    const AttentionOutputs expected = reference_f64(c, host);
    const DType dtype = c.attention.dtype;
    EXPECT_LE(worst_of(c, host, actual.o, expected.o), dtype == DType::bf16  ? 3e-2
                                                       : dtype == DType::f16 ? 6e-3
                                                                             : 1e-4)
        << "o";
    EXPECT_LE(worst_of(c, host, actual.lse, expected.lse), dtype == DType::f32 ? 2e-4 : 1e-2) << "lse";
    for (const DeviceBuffer* buffer : {&q[0].buffer, &k[0].buffer, &v[0].buffer, &o[0].buffer, &lse[0].buffer}) {
      EXPECT_TRUE(buffer->guards_intact());
    }
    for (const DeviceBuffer& buffer : arrays) EXPECT_TRUE(buffer.guards_intact());
  }

  SharedCase c;
  SharedData host;
  std::vector<SharedPrefix> levels;
  std::vector<SharedPrefixShape> shapes;

 private:
  static std::vector<std::byte> bytes_of(const std::vector<std::int32_t>& values) {
    std::vector<std::byte> bytes(values.size() * sizeof(std::int32_t));
    if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
    return bytes;
  }
  const std::int32_t* ints(const std::vector<std::int32_t>& values) {
    return static_cast<const std::int32_t*>(arrays.emplace_back(bytes_of(values)).data());
  }
  TensorView table(const std::vector<std::int32_t>& entries, std::int64_t rows) {
    return TensorView(static_cast<const void*>(ints(entries)), DType::i32, {rows, host.max_pages});
  }

  std::deque<DeviceTensor> q, k, v, o, lse, sink, k_scale, v_scale;
  std::deque<DeviceBuffer> arrays;
};

class RandomSharedPrefixes : public GpuTest, public ::testing::WithParamInterface<std::uint32_t> {};

TEST_P(RandomSharedPrefixes, MatchFloat64) {
  const SharedCase c = random_shared_case(GetParam());
  SCOPED_TRACE(::testing::PrintToString(c));
  DeviceShared device(c);
  const ForwardInputs in = device.inputs();
  Attention::create(c.config()).forward(in, device.outputs());
  device.expect_right();
}

TEST_P(RandomSharedPrefixes, OverStoredPoolsMatchFloat64) {
  const SharedCase c = random_stored_case(GetParam());
  SCOPED_TRACE(::testing::PrintToString(c));
  DeviceShared device(c);
  const ForwardInputs in = device.inputs();
  Attention::create(c.config()).forward(in, device.outputs());
  device.expect_right();
}

TEST_P(RandomSharedPrefixes, OfFunctionsMatchFloat64) {
  const SharedCase c = random_function_case(GetParam());
  SCOPED_TRACE(::testing::PrintToString(c));
  DeviceShared device(c);
  const ForwardInputs in = device.inputs();
  Attention::create(c.config()).forward(in, device.outputs());
  device.expect_right();
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomSharedPrefixes, ::testing::Range(0u, 60u));

SharedCase serving(std::int32_t prefix, std::int32_t own, std::uint64_t seed) {
  SharedCase c;
  c.attention.h_q = 32;
  c.attention.h_kv = 8;
  c.attention.d_qk = c.attention.d_v = 128;
  c.attention.causal = true;
  c.attention.seed = seed;
  c.page_size = 16;
  c.least_pages = 160;
  c.levels = {{{40, prefix}, {24, prefix / 2}}, {{30, 128}, {10, 0}, {24, 64}}};
  for (int i = 0; i < 64; ++i) {
    c.rows.push_back(1);
    c.keys.push_back(1 + (own + 13 * i) % 250);
  }
  return c;
}

/// Levels with query tiles enough for a GPU, and without.
TEST_F(SharedPrefixes, OfManyRows) {
  SharedCase c = serving(300, 20, 5);
  c.attention.h_q = 10;
  c.attention.h_kv = 2;
  for (std::int32_t& rows : c.rows) rows = 40;
  for (std::int32_t& keys : c.keys) keys = std::max(keys, 40);
  DeviceShared device(c);
  const ForwardInputs in = device.inputs();
  Attention::create(c.config()).forward(in, device.outputs());
  device.expect_right();
}

/// A captured call reads the groups, their lengths and their pages at each replay, and needs nothing but its workspace.
TEST_F(SharedPrefixes, ChangeBetweenReplays) {
  // Maxima of the first call bound the others.
  SharedCase c = serving(2048, 0, 1);
  DeviceShared device(c);
  const ForwardInputs in = device.inputs();
  const Attention attention = Attention::create(c.config());
  attention.prepare(device.shape(), device.shapes);
  const DeviceBuffer memory(attention.workspace_size(device.shape(), device.shapes));
  const Workspace workspace{memory.data(), memory.size()};
  const ScopedStream stream;
  const CapturedGraph graph(stream.get(), [&] { attention.forward(in, device.outputs(), stream.get(), workspace); });
  for (const std::uint64_t seed : {1u, 2u, 3u}) {
    SharedCase next = serving(2048, 0, seed);  // pages lie elsewhere
    if (seed == 3) next.levels = {{{10, 2048}, {54, 1024}}, {{9, 128}, {1, 0}, {54, 64}}};
    device.become(next);
    graph.replay(stream.get());
    device.expect_right();
  }
  EXPECT_TRUE(memory.guards_intact());
  DeviceBuffer small(memory.size() - 256);
  try {
    attention.forward(in, device.outputs(), stream.get(), {small.data(), small.size()});
    ADD_FAILURE() << "too small a workspace was taken";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::out_of_memory) << error.what();
  }
}

}  // namespace
}  // namespace fa::test
