// Ranges of calls, as a profiler sees them.

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
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

}  // namespace
}  // namespace fa
