// Debug calls on the GPU: they name what the host device names, and write the P that it writes.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "compile/compiler.hpp"
#include "device_case.hpp"
#include "driver/debug_report.hpp"
#include "driver/driver.hpp"
#include "render/templates.hpp"
#include "support/statistics_case.hpp"

namespace fa {
namespace {

using test::attention_of;
using test::AttentionCase;
using test::DeviceBuffer;
using test::StatisticsCase;
using test::StatisticsData;
using test::StatisticsMemory;
using test::StatisticsResults;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Bytes of the host on the device.
class Copies {
 public:
  StatisticsMemory memory() {
    const auto place = [this](const void* bytes, std::size_t size) { return add(bytes, size); };
    return {place, place};
  }
  void* add(const void* bytes, std::size_t size) {
    std::vector<std::byte> copy(size);
    if (size != 0) std::memcpy(copy.data(), bytes, size);
    return buffers_.emplace_back(copy).data();
  }
  std::vector<std::byte> last() const { return buffers_.back().read(); }

 private:
  std::deque<DeviceBuffer> buffers_;
};

StatisticsMemory host_memory() {
  return {[](const void* bytes, std::size_t) { return const_cast<void*>(bytes); },
          [](void* bytes, std::size_t) { return bytes; }};
}

struct Outcome {
  std::optional<ErrorLocation> location;
  std::vector<float> p;  ///< [s_q, s_kv]
};

class GpuInspect : public test::GpuTest {
 protected:
  static AttentionConfig config_of(const StatisticsCase& c, const StatisticsData& data) {
    AttentionConfig config = data.variant.config;
    config.kernel = c.kernel.kernel.empty() ? std::nullopt : std::optional(c.kernel);
    config.debug = true;
    return config;
  }

  static Outcome run(const StatisticsCase& c, const StatisticsData& data, bool on_host, std::int64_t b = 0,
                     std::int64_t h = 0) {
    StatisticsResults results(c);
    Copies copies;
    const StatisticsMemory memory = on_host ? host_memory() : copies.memory();
    Outcome outcome;
    outcome.p.assign(static_cast<std::size_t>(c.attention.s_q * c.attention.s_kv), NAN);
    const std::size_t bytes = outcome.p.size() * sizeof(float);
    AttentionConfig config = config_of(c, data);
    if (on_host) config.kernel.reset();
    const Attention attention = Attention::create(config, on_host ? Device::host() : Device::current());
    const ForwardInputs inputs = test::inputs_of(c, data, memory);
    ForwardOutputs outputs = test::outputs_of(c, results, memory);
    void* const p = on_host ? outcome.p.data() : copies.add(outcome.p.data(), bytes);
    outputs.dump = {TensorView(p, DType::f32, {c.attention.s_q, c.attention.s_kv}), b, h};
    try {
      attention.forward(inputs, outputs);
      driver::check(driver::api().cuCtxSynchronize(), "cuCtxSynchronize");
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::not_finite) << error.what();
      if (error.location() != nullptr) outcome.location = *error.location();
    }
    if (!on_host) std::memcpy(outcome.p.data(), copies.last().data(), bytes);
    return outcome;
  }

  static void expect_equal(const std::optional<ErrorLocation>& actual, const std::optional<ErrorLocation>& expected) {
    ASSERT_EQ(actual.has_value(), expected.has_value());
    if (!actual) return;
    EXPECT_EQ(actual->tensor, expected->tensor);
    EXPECT_EQ(actual->result, expected->result);
    EXPECT_EQ(actual->b, expected->b);
    EXPECT_EQ(actual->h, expected->h);
    EXPECT_EQ(actual->q, expected->q);
    EXPECT_EQ(actual->kv, expected->kv);
    EXPECT_EQ(actual->d, expected->d);
    EXPECT_EQ(actual->index, expected->index);
  }

  /// Broken by `change`, a call is said to be broken where the host says so.
  static void expect_same(const StatisticsCase& c, const std::function<void(StatisticsData&)>& change) {
    SCOPED_TRACE(c.name + " " + to_string(c.attention));
    StatisticsData data(c);
    EXPECT_FALSE(run(c, data, false).location);
    change(data);
    const Outcome expected = run(c, data, true);
    ASSERT_TRUE(expected.location);
    expect_equal(run(c, data, false).location, expected.location);
  }

  static void expect_p(const StatisticsCase& c, std::int64_t b, std::int64_t h) {
    SCOPED_TRACE(c.name + " " + to_string(c.attention));
    const StatisticsData data(c);
    const Outcome expected = run(c, data, true, b, h), actual = run(c, data, false, b, h);
    for (std::size_t i = 0; i < actual.p.size(); ++i) {
      // The log-sum-exp is that of a kernel in 16 bits, with approximate exponentials.
      ASSERT_NEAR(actual.p[i], expected.p[i], 1e-4 + 4e-3 * double{expected.p[i]}) << i;
    }
  }
};

StatisticsCase packed_case() {
  StatisticsCase c{"packed", attention_of(DType::bf16, {1, 4, 2, 300, 330, 64, 64}, true), {}};
  c.cu_q = {2, 140, 140, 285};
  c.cu_kv = {0, 130, 150, 330};
  c.config.varlen = true;
  return c;
}

StatisticsCase paged_case() {
  StatisticsCase c{"pages", attention_of(DType::bf16, {3, 4, 2, 3, 400, 64, 64}, true), {}};
  c.config.page_size = 16;
  c.used_kv = {400, 0, 141};
  return c;
}

TEST_F(GpuInspect, NamesInputs) {
  for (const char* const family : {"", "sm80"}) {
    for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
      const StatisticsCase c{family, attention_of(dtype, {2, 4, 2, 200, 250, 64, 128}, true), {}, {family}};
      if (dtype == DType::f32 && c.kernel.kernel.empty()) continue;
      expect_same(c, [](StatisticsData& data) { data.inputs.q.set(1, 2, 77, 13, kNaN); });
      expect_same(c, [](StatisticsData& data) { data.inputs.k.set(1, 1, 130, 63, kNaN); });
      expect_same(c, [](StatisticsData& data) { data.inputs.v.set(0, 1, 249, 127, kInfinity); });
    }
  }
}

TEST_F(GpuInspect, NamesRowsOfPackedBatchesAndPages) {
  expect_same(packed_case(), [](StatisticsData& data) { data.inputs.k.set(0, 1, 200, 5, kNaN); });
  expect_same(paged_case(), [](StatisticsData& data) {
    // Page 18 of a pool of 75 in the opposite order is one of the third request.
    data.inputs.v.set(18, 1, 3, 9, kNaN);
  });
}

TEST_F(GpuInspect, NamesWhatFunctionsMake) {
  StatisticsCase c{"score", attention_of(DType::bf16, {2, 2, 2, 100, 150, 64, 64}, false), {}};
  c.config.score = ScoreFunction{"score + bias[h, kv]", {{"bias", DType::f32}}};
  expect_same(c, [](StatisticsData& data) {
    auto& bias = data.variant.captures.front();
    const float infinite = std::numeric_limits<float>::infinity();
    std::memcpy(bias.bytes.data() + 70 * sizeof infinite, &infinite, sizeof infinite);
  });
}

TEST_F(GpuInspect, WritesP) {
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
    expect_p({"dense", attention_of(dtype, {2, 4, 2, 200, 250, 64, 64}, true), {}}, 1, 3);
  }
  StatisticsCase function{"function", attention_of(DType::bf16, {2, 2, 1, 150, 200, 64, 64}, false), {}};
  function.config.score = ScoreFunction{"score - slope[h] * float(abs(q - kv))", {{"slope", DType::f32}}};
  function.config.mask = MaskFunction{"(q + kv) % 3 != 0"};
  expect_p(function, 1, 1);
  StatisticsCase window{"window", attention_of(DType::bf16, {1, 2, 1, 300, 300, 64, 64}, true), {}};
  window.config.window_left = 40;
  window.config.sink = true;
  expect_p(window, 0, 1);
  StatisticsCase drops{"dropout", attention_of(DType::f16, {2, 2, 1, 150, 200, 64, 64}, false), {}};
  drops.config.dropout = 0.25f;
  expect_p(drops, 1, 0);
  expect_p(packed_case(), 2, 3);
  expect_p(paged_case(), 2, 1);
}

/// A backward whose inputs are broken one after the other, on both devices.
class GpuInspectBackward : public test::GpuTest {};

TEST_F(GpuInspectBackward, NamesWhatTheHostNames) {
  AttentionCase c = attention_of(DType::bf16, {2, 4, 2, 200, 200, 64, 64}, true);
  test::AttentionInputs in = test::make_inputs(c);
  test::AttentionOutputs out = test::make_outputs(c);
  test::HostTensor dout = test::make_dout(c);
  AttentionConfig config;
  config.head_dim = config.head_dim_v = 64;
  config.dtype = c.dtype;
  config.causal = true;
  Attention::create(config, Device::host())
      .forward({in.q.view(), in.k.view(), in.v.view()}, {out.o.view(), out.lse.view()});
  config.debug = true;
  const auto location = [&](bool on_host, const Gradients& wanted) -> std::optional<ErrorLocation> {
    test::AttentionGradients grad = test::make_gradients(c);
    std::deque<test::DeviceTensor> copies;
    const auto view = [&](test::HostTensor& tensor) {
      return on_host ? tensor.view() : copies.emplace_back(tensor).view();
    };
    BackwardOutputs outputs{view(grad.dq), view(grad.dk), view(grad.dv)};
    if (!wanted.dq) outputs.dq = {};
    if (!wanted.dk) outputs.dk = {};
    try {
      Attention::create(config, on_host ? Device::host() : Device::current())
          .backward({view(in.q), view(in.k), view(in.v), view(out.o), view(out.lse), view(dout)}, outputs);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::not_finite) << error.what();
      if (error.location() != nullptr) return *error.location();
    }
    return std::nullopt;
  };
  const auto expect_same = [&](const char* tensor, const Gradients& wanted) {
    const auto expected = location(true, wanted), actual = location(false, wanted);
    ASSERT_TRUE(expected && actual) << tensor;
    EXPECT_EQ(expected->tensor, tensor);
    EXPECT_EQ(std::pair(actual->tensor, actual->result), std::pair(expected->tensor, expected->result));
    EXPECT_EQ(std::tie(actual->b, actual->h, actual->q, actual->kv, actual->d),
              std::tie(expected->b, expected->h, expected->q, expected->kv, expected->d));
  };
  EXPECT_FALSE(location(false, {}));
  dout.set(1, 3, 40, 5, kNaN);
  expect_same("dout", {});
  expect_same("dout", {false, true, true});
  expect_same("dout", {false, false, true});
  out.lse.set(1, 3, 40, 0, kNaN);
  expect_same("lse", {});
  in.v.set(1, 1, 2, 1, kNaN);
  expect_same("v", {});
}

// ---- kernels that stop ----

/// A debug kernel of one block, of 64 threads that do the same.
render::Source stopping(const std::string& body) {
  render::Source source{"fa_stops",
                        "#define FA_DEBUG_KERNELS 1\n#include <ptx/mbarrier.cuh>\n#include <ptx/memory.cuh>\n"
                        "using namespace fa::ptx;\n"
                        "extern \"C\" __global__ void fa_stops(int number) {\n" +
                            body + "\n}\n",
                        {}};
  for (const render::Header* const header : render::templates().included_by(source.unit).headers) {
    source.headers.push_back(*header);
  }
  return source;
}

/// Whether the wait for it says `words`. Costs the context.
bool says(const std::string& body, const std::string& words) {
  const driver::ContextRef context = driver::ContextRef::acquire(Device::current());
  const driver::ContextScope scope(context.context());
  const compile::Cubin cubin = compile::compile(stopping(body), context.info().arch);
  const driver::LoadedKernel kernel(cubin.bytes, "fa_stops", 1024, context.context(), true);
  int number = 2;
  driver::launch(kernel.function(), 1, 64, 1024, nullptr, &number);
  try {
    driver::check(driver::api().cuStreamSynchronize(nullptr), "cuStreamSynchronize");
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return std::string(error.field("stopped")).find(words) == 0 && driver::take_debug_report().empty();
  }
  return false;
}

class GpuDebugStopDeathTest : public test::GpuTest {
 protected:
  static void expect(const std::string& body, const std::string& words) {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    EXPECT_EXIT(_Exit(says(body, words) ? 0 : 1), testing::ExitedWithCode(0), "");
  }
};

TEST_F(GpuDebugStopDeathTest, AWaitWithoutAnEnd) {
  if (driver::ContextRef::acquire(Device::current()).info().arch.major < 9) GTEST_SKIP() << "no mbarrier.try_wait";
  expect(
      "const fa::uint32_t never = dynamic_shared();\n"
      "if (threadIdx.x == 0) mbarrier_init(never, 100);\n"
      "__syncthreads();\n"
      "mbarrier_wait(never, 0);",
      "a barrier is never complete: never, 0, at ");
}

TEST_F(GpuDebugStopDeathTest, WrongAddresses) {
  expect("st_shared_b32(dynamic_shared() + number, 1);", "a wrong address in shared memory, of 4 bytes, at ptx/memory");
  expect("st_shared_b32(dynamic_shared() + 1024 * number, 1);", "a wrong address in shared memory, of 4 bytes");
  expect("st_global_chunk(reinterpret_cast<void*>(size_t(8) * number + 1), {});",
         "a wrong address in global memory, of 16 bytes");
}

}  // namespace
}  // namespace fa
