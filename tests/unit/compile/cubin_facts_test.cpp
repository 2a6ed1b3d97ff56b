#include <gtest/gtest.h>

#include <cstring>
#include <fa/error.hpp>
#include <random>

#include "compile/compiler.hpp"
#include "sources.hpp"

namespace fa::compile {
namespace {

using CubinFacts = NeedsNvrtc;

TEST_F(CubinFacts, SpillsShowAsLocalBytes) {
  for (const char* arch : {"sm_80", "sm_89", "sm_90a", "sm_120a"}) {
    const KernelFacts plain = compile(plain_source(), plan::parse_arch(arch)).facts;
    EXPECT_EQ(plain.local_bytes, 0) << arch;
    EXPECT_LT(plain.registers, 32) << arch;
    const KernelFacts spilling = compile(spilling_source(), plan::parse_arch(arch)).facts;
    EXPECT_GE(spilling.local_bytes, 32 * 4) << arch;
    EXPECT_EQ(spilling.registers, 64) << arch;
    EXPECT_EQ(spilling.static_shared, 512) << arch;
  }
}

TEST_F(CubinFacts, EveryTruncationIsRefused) {
  const Cubin cubin = compile(plain_source(), plan::parse_arch("sm_90a"));
  for (std::size_t size = 0; size < cubin.bytes.size(); size += 7) {
    const std::vector<std::byte> cut(cubin.bytes.begin(), cubin.bytes.begin() + static_cast<std::ptrdiff_t>(size));
    try {
      read_facts(cut, "fa_plain");  // what is cut off may be a part that holds no fact
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::internal);
    }
  }
  EXPECT_THROW(read_facts({}, "fa_plain"), Error);
  EXPECT_THROW(read_facts(std::vector<std::byte>(4096), "fa_plain"), Error);
}

TEST_F(CubinFacts, AnyBytesAreReadInBounds) {
  const Cubin cubin = compile(plain_source(), plan::parse_arch("sm_80"));
  std::mt19937 random(7);
  for (int round = 0; round < 3000; ++round) {
    std::vector<std::byte> damaged = cubin.bytes;
    for (int change = 0; change < 8; ++change) damaged[random() % damaged.size()] = std::byte(random() & 0xff);
    for (int change = 0; change < 2; ++change) damaged[random() % 64] = std::byte(random() & 0xff);
    std::memcpy(damaged.data(), cubin.bytes.data(), 16);
    try {
      read_facts(damaged, "fa_plain");
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::internal);
    }
  }
}

TEST_F(CubinFacts, OnlyInstructionsSetKernelsApart) {
  const auto bytes = [](const char* text) {
    return compile({"fa_kernel", text, {}}, plan::parse_arch("sm_90a")).bytes;
  };
  const auto plain = bytes("extern \"C\" __global__ void fa_kernel(float* p) { p[threadIdx.x] *= 2.0f; }");
  const auto renamed = bytes(
      "namespace other { __device__ int unused = 3; inline __device__ float twice(float x) { return 2.0f * x; } }\n"
      "extern \"C\" __global__ void fa_kernel(float* data) { data[threadIdx.x] = other::twice(data[threadIdx.x]); }");
  const auto changed = bytes("extern \"C\" __global__ void fa_kernel(float* p) { p[threadIdx.x] *= 3.0f; }");
  const auto bounded =
      bytes("extern \"C\" __global__ void __launch_bounds__(64) fa_kernel(float* p) { p[threadIdx.x] *= 2.0f; }");
  const auto more = bytes(
      "extern \"C\" __global__ void fa_kernel(float* p) { p[threadIdx.x] *= 2.0f; }"
      "extern \"C\" __global__ void fa_other(float* p) { p[threadIdx.x] *= 2.0f; }");
  EXPECT_NE(plain, renamed);
  EXPECT_EQ(instruction_difference(plain, renamed), "");
  EXPECT_EQ(instruction_difference(plain, plain), "");
  EXPECT_EQ(instruction_difference(plain, bounded), "") << "the bound changes no instruction";
  EXPECT_NE(instruction_difference(plain, changed).find(".text.fa_kernel differs"), std::string::npos);
  EXPECT_EQ(instruction_difference(plain, more), ".text.fa_other is new");
  EXPECT_EQ(instruction_difference(more, plain), ".text.fa_other is missing");
  EXPECT_THROW(instruction_difference(plain, {}), Error);
}

}  // namespace
}  // namespace fa::compile
