// Ranges of calls, as a profiler sees them.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <tuple>
#include <vector>

#include "fake_driver/fake_nvtx.hpp"
#include "fake_driver/launches_test.hpp"

namespace fa {
namespace {

/// NVTX asks at the first range of a process.
const int g_named = setenv("NVTX_INJECTION64_PATH", FA_FAKE_NVTX, 1);

class Nvtx : public LaunchesTest {
 protected:
  void SetUp() override {
    LaunchesTest::SetUp();
    ASSERT_EQ(g_named, 0);
    const auto loaded = support::DynamicLibrary::open(FA_FAKE_NVTX, nullptr);
    ranges_ = loaded.function<fake_driver::NvtxRanges>("fa_fake_nvtx_ranges");
    ASSERT_NE(ranges_, nullptr);
  }

  static TensorView tensor(std::uintptr_t page) {
    return {reinterpret_cast<void*>((std::uintptr_t{1} << 40) + (page << 32)), DType::bf16, {1, 4, 300, 64}};
  }

  /// How the specs of ranges begin, none of which holds another; of families' kernels without the family.
  std::vector<std::string> kinds() const {
    std::vector<std::string> all;
    for (std::size_t i = 0; i + 1 < ranges_().size(); i += 2) {
      EXPECT_EQ(ranges_()[i + 1], "end");
      std::string kind = ranges_()[i].substr(0, ranges_()[i].find(' '));
      if (kind.starts_with("sm")) kind = kind.substr(kind.find('_') + 1);
      all.push_back(kind);
    }
    return all;
  }
  /// How many were launched.
  std::size_t kernels() const {
    return static_cast<std::size_t>(
        std::ranges::count_if(launches_(), [](const fake_driver::Launch& launch) { return launch.threads != 0; }));
  }

  fake_driver::NvtxRanges ranges_ = nullptr;
};

TEST_F(Nvtx, ACallIsARangeWithItsSpec) {
  config_.head_dim = 64;
  const Attention attention = Attention::create(config_);
  const std::string spec = attention.kernel_info({.b = 1, .h_q = 4, .s_q = 300, .s_kv = 300}).spec;
  attention.forward({tensor(1), tensor(2), tensor(3)}, {tensor(4), {}});
  if (ranges_().empty()) GTEST_SKIP() << "built without the headers of NVTX";
  ranges_().clear();
  attention.forward({tensor(1), tensor(2), tensor(3)}, {tensor(4), {}});
  EXPECT_EQ(ranges_(), (std::vector<std::string>{spec, "end"}));
}

/// What runs beside an attention kernel has ranges of its own.
TEST_F(Nvtx, EveryKernelIsInARange) {
  config_.head_dim = 64;
  config_.varlen = config_.zero_padding = config_.debug = true;
  const auto packed = [](std::uintptr_t page) { return TensorView(tensor(page).data, DType::bf16, {300, 4, 64}); };
  const auto* const cu = static_cast<const std::int32_t*>(tensor(9).data);
  ForwardInputs in{packed(1), packed(2), packed(3)};
  in.sequences = {2, cu, cu, nullptr, nullptr, 200, 200};
  ForwardOutputs out{packed(4), TensorView(tensor(5).data, DType::f32, {4, 300})};
  out.dump = {TensorView(tensor(6).data, DType::f32, {200, 200}), 0, 0};
  const Attention attention = Attention::create(config_);
  attention.forward(in, out);
  if (ranges_().empty()) GTEST_SKIP() << "built without the headers of NVTX";
  ranges_().clear();
  launches_().clear();
  attention.forward(in, out);
  EXPECT_EQ(kinds(),
            (std::vector<std::string>{"clear_padding", "clear_padding", "forward", "probabilities", "scan_results"}));
  EXPECT_EQ(kernels(), kinds().size());
}

TEST_F(Nvtx, EveryPassOfQuantizeIsARange) {
  config_.head_dim = 64;
  config_.dtype = DType::i8;
  QuantizeInputs in;
  in.q = tensor(1);
  in.k = tensor(2);
  for (auto [from, codes, scale] :
       {std::tuple{&in.q, &in.q_codes, &in.q_scale}, std::tuple{&in.k, &in.k_codes, &in.k_scale}}) {
    *codes = *from;
    codes->dtype = DType::i8;
    codes->data = static_cast<std::byte*>(from->data) + (std::uintptr_t{1} << 36);
    *scale = TensorView(static_cast<std::byte*>(from->data) + (std::uintptr_t{1} << 37), DType::f32, {1, 4, 300});
  }
  const Attention attention = Attention::create(config_);
  attention.quantize(in);
  if (ranges_().empty()) GTEST_SKIP() << "built without the headers of NVTX";
  ranges_().clear();
  launches_().clear();
  attention.quantize(in);
  EXPECT_EQ(kinds(), (std::vector<std::string>{"quantize", "quantize"}));
  EXPECT_EQ(kernels(), 2U);
}

}  // namespace
}  // namespace fa
