// Forwards of 8-bit floats by mma.sync on a GPU against float64 of the very inputs: the kernels of Ada and of
// Blackwell, which a Hopper GPU runs too where they are asked for.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "gpu/fp8_case.hpp"

namespace fa::test {
namespace {

class Sm80Fp8Forward : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    const support::Arch arch = driver::device_info(0).arch;
    if (10 * arch.major + arch.minor < 89) GTEST_SKIP() << "no products of 8-bit floats";
  }

  static AttentionConfig of_family(AttentionConfig config, const char* fields = "") {
    config.kernel = KernelOverride{"sm80_fp8", fields};
    return config;
  }
};

class Sm80Fp8Shapes : public Sm80Fp8Forward, public ::testing::WithParamInterface<AttentionCase> {};

TEST_P(Sm80Fp8Shapes, MatchesFloat64) {
  for (const bool scaled : {false, true}) {
    Fp8Call call(GetParam(), scaled);
    const Fp8Error error = call.run(of_family(config_of(GetParam())), !scaled);
    EXPECT_LE(error.relative, kRelative);
    if (!scaled) {
      EXPECT_LE(error.greatest, kGreatest);
    }
  }
}

std::vector<AttentionCase> shapes() {
  std::vector<AttentionCase> cases;
  const std::pair<std::int64_t, std::int64_t> rows[] = {{1024, 1024}, {500, 777}, {33, 2049}, {130, 100}, {1, 300}};
  std::size_t turn = 0;
  for (const std::int64_t d : {16, 64, 80, 128, 192, 256}) {
    for (const bool causal : {false, true}) {
      for (const auto& [s_q, s_kv] : rows) {
        const bool even = turn++ % 2 == 0;
        cases.push_back({.b = 2,
                         .h_q = 4,
                         .h_kv = 2,
                         .s_q = s_q,
                         .s_kv = s_kv,
                         .d_qk = d,
                         .d_v = d == 192 ? 128 : d,
                         .dtype = turn % 3 == 0 ? DType::e5m2 : DType::e4m3,
                         .o_dtype = even ? DType::bf16 : DType::f16,
                         .causal = causal,
                         .layout = even ? Layout::bshd : Layout::bhsd});
      }
    }
  }
  return cases;
}
INSTANTIATE_TEST_SUITE_P(Shapes, Sm80Fp8Shapes, ::testing::ValuesIn(shapes()),
                         [](const auto& test) { return to_string(test.param); });

TEST_F(Sm80Fp8Forward, KeysHaveScalesOfTheirOwn) {
  for (const std::int64_t d : {64, 96, 128, 256}) {
    Fp8Call call({.b = 2,
                  .h_q = 4,
                  .h_kv = 2,
                  .s_q = 400,
                  .s_kv = 733,
                  .d_qk = d,
                  .d_v = d,
                  .dtype = d == 96 ? DType::e5m2 : DType::e4m3,
                  .causal = d != 128},
                 true, true);
    AttentionConfig config = of_family(config_of(call.device.problem));
    config.key_scales = config.value_scales = true;
    EXPECT_LE(call.run(config).relative, kRelative) << "d " << d;
  }
}

TEST_F(Sm80Fp8Forward, SplitsMatchFloat64) {
  for (const std::int64_t d : {64, 128, 256}) {
    for (const char* const fields : {"splits=1", "splits=7"}) {
      Fp8Call call({.b = 1,
                    .h_q = 8,
                    .h_kv = 2,
                    .s_q = 4,
                    .s_kv = 5000,
                    .d_qk = d,
                    .d_v = d,
                    .dtype = DType::e4m3,
                    .causal = true},
                   true, false);
      EXPECT_LE(call.run(of_family(config_of(call.device.problem), fields)).relative, kRelative) << d << fields;
    }
  }
}

/// Two-level accumulation. Of equal weights and values of one sign, what an accumulator of few bits loses adds up.
TEST_F(Sm80Fp8Forward, LongRowsAreAsExactAsShortOnes) {
  for (const bool positive : {false, true}) {
    const double of_short = error_of_long_rows("sm80_fp8", 1 << 10, "", positive);
    const double of_long = error_of_long_rows("sm80_fp8", 1 << 17, "", positive);
    EXPECT_LE(of_long, positive ? std::max(1.1 * of_short, 0.004) : 1.1 * of_short) << positive;
  }
}

/// Requests over pages, and of a contiguous cache; packed and of equal numbers of rows.
TEST_F(Sm80Fp8Forward, PagesMatchFloat64) {
  for (const std::int64_t page_size : {std::int64_t{1}, std::int64_t{20}, std::int64_t{64}, kContiguous}) {
    for (const std::int64_t d : {64, 128, 256}) {
      PagedCase c = fp8_paged_case(page_size, d, page_size != 64);
      c.indexed = true;
      c.key_scales = c.value_scales = page_size != 20;
      SCOPED_TRACE(testing::PrintToString(c));
      DevicePaged device(c);
      Attention::create(of_family(config_of(c))).forward(device.inputs(), device.outputs());
      EXPECT_LE(relative_error(c, device.host, device.results()), kRelative);
    }
  }
}

TEST_F(Sm80Fp8Forward, WindowsFunctionsAndSinks) {
  for (const std::int64_t d : {64, 128}) {
    Fp8Call call({.b = 2, .h_q = 4, .h_kv = 2, .s_q = 300, .s_kv = 500, .d_qk = d, .d_v = d, .dtype = DType::e4m3});
    AttentionConfig config = of_family(config_of(call.device.problem));
    config.score = functions::softcap(20);
    config.mask = MaskFunction{"(q + kv) % 3 != 0"};
    EXPECT_GT(call.run(config, false).relative, kRelative) << "functions change the result";
    const Attention on_host = [&] {
      AttentionConfig same = config;
      same.kernel = {};
      same.host_f64 = true;
      return Attention::create(same, Device::host());
    }();
    AttentionOutputs expected = make_outputs(call.device.problem);
    const AttentionInputs& inputs = call.device.host_inputs;
    on_host.forward({inputs.q.view(), inputs.k.view(), inputs.v.view()}, {expected.o.view(), expected.lse.view()});
    EXPECT_LE(error_of(call.device.host_outputs.o, expected.o).relative, kRelative) << d;
  }
}

}  // namespace
}  // namespace fa::test
