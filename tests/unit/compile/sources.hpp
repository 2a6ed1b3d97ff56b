#ifndef FA_TESTS_UNIT_COMPILE_SOURCES_HPP_
#define FA_TESTS_UNIT_COMPILE_SOURCES_HPP_

#include <gtest/gtest.h>

#include "compile/compiler.hpp"
#include "render/source.hpp"

namespace fa::compile {

/// Skips its tests where no NVRTC can be found.
class NeedsNvrtc : public testing::Test {
 protected:
  void SetUp() override {
    const CompilerInfo info = compiler_info();
    if (!info.available) GTEST_SKIP() << info.problem;
  }
};

/// Doubles one number; no stack, no shared memory.
inline render::Source plain_source() {
  return {"fa_plain", "extern \"C\" __global__ void fa_plain(float* p) { p[threadIdx.x] *= 2.0f; }\n", {}};
}

/// Keeps 96 values alive in 64 registers, so that some live on the stack, and has 512 bytes of shared memory.
inline render::Source spilling_source() {
  return {"fa_spilling",
          R"(
extern "C" __global__ void __launch_bounds__(1024) fa_spilling(float* p) {
  __shared__ float s[128];
  float r[96];
#pragma unroll
  for (int i = 0; i < 96; ++i) r[i] = p[i * 1024 + threadIdx.x];
  s[threadIdx.x % 128] = r[3];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 96; ++i) p[(i + 96) * 1024 + threadIdx.x] = r[i] * s[i] + r[(i * 37 + 5) % 96];
}
)",
          {}};
}

}  // namespace fa::compile

#endif  // FA_TESTS_UNIT_COMPILE_SOURCES_HPP_
