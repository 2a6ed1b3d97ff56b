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

}  // namespace
}  // namespace fa::compile
