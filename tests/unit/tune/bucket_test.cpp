#include "tune/bucket.hpp"

#include <gtest/gtest.h>

#include <set>

#include "plan/planner.hpp"

namespace fa::tune {
namespace {

plan::Problem problem(std::int64_t b, std::int64_t h, std::int64_t s) {
  plan::Problem result;
  result.arch = plan::parse_arch("sm_90a");
  result.d_qk = result.d_v = 128;
  result.b = b;
  result.h_q = result.h_kv = h;
  result.s_q = result.s_kv = s;
  return result;
}

std::string text(const plan::Problem& p) {
  return bucket_text(p, plan::plan_forward(p, {}).kernel);
}

TEST(Bucket, LengthsAreInHalfOctaves) {
  const auto limit = [](std::int64_t s) { return length_limit(bucket_of(problem(1, 1, s)).s_q); };
  EXPECT_EQ(limit(1), 1);
  EXPECT_EQ(limit(2), 2);
  EXPECT_EQ(limit(512), 512);
  EXPECT_EQ(limit(513), 768);
  EXPECT_EQ(limit(768), 768);
  EXPECT_EQ(limit(769), 1024);
  EXPECT_EQ(limit(16384), 16384);
  EXPECT_EQ(bucket_of(problem(1, 1, 65537)), bucket_of(problem(1, 1, 1 << 30)));
  for (std::int64_t s = 1; s < 5000; ++s) {
    ASSERT_GE(limit(s), s);
    ASSERT_LT(limit(s), 2 * s + 1);
    ASSERT_LE(limit(s), limit(s + 1));
  }
}

TEST(Bucket, EveryFactCountsInTextAndCode) {
  const plan::Problem base = problem(4, 16, 2048);
  std::set<std::string> texts{text(base)};
  std::set<std::uint64_t> codes{bucket_code(base, 0)};
  const auto differs = [&](plan::Problem changed, bool in_code) {
    EXPECT_TRUE(texts.insert(text(changed)).second) << text(changed);
    EXPECT_EQ(codes.insert(bucket_code(changed, 0)).second, in_code);
  };
  plan::Problem p = base;
  p.s_q = 3000;
  differs(p, true);
  p = base;
  p.s_kv = 3000;
  differs(p, true);
  p = base;
  p.b = 8;
  differs(p, true);
  p = base;
  p.h_kv = 4;
  differs(p, true);
  // What is the same for every call of an Attention stands in the text alone.
  p = base;
  p.causal = true;
  differs(p, false);
  p.causal_align = CausalAlign::top_left;
  differs(p, false);
  p = base;
  p.d_v = 64;
  differs(p, false);
  p = base;
  p.dtype = DType::f16;
  differs(p, false);
  p = base;
  p.positive_scale = false;
  differs(p, false);
  p = base;
  p.aligned = false;
  differs(p, false);
  for (const int slot : {1, 31, 255}) EXPECT_TRUE(codes.insert(bucket_code(base, slot)).second);
  EXPECT_FALSE(codes.contains(0));
}

TEST(Bucket, NeighboursShareOne) {
  EXPECT_EQ(text(problem(4, 16, 2048)), text(problem(2, 32, 2000)));
  EXPECT_EQ(bucket_code(problem(4, 16, 2048), 3), bucket_code(problem(3, 16, 1900), 3));
}

TEST(Bucket, WhatRunsForAMomentIsNotWorthIt) {
  EXPECT_FALSE(worth_tuning(problem(1, 1, 64), false));
  EXPECT_FALSE(worth_tuning(problem(1, 8, 256), false));
  EXPECT_TRUE(worth_tuning(problem(32, 16, 512), false));
  plan::Problem decode = problem(64, 8, 4096);
  decode.s_q = 1;
  EXPECT_TRUE(worth_tuning(decode, false)) << "a gigabyte of keys and values";
}

TEST(Bucket, TheRepresentativeIsSmallerAndStillFillsAGpu) {
  const plan::Problem small = problem(2, 16, 1024);
  EXPECT_EQ(representative(small, false).b, 2);
  for (const bool backward : {false, true}) {
    plan::Problem huge = problem(64, 32, 16384);
    huge.h_kv = 8;
    const plan::Problem measured = representative(huge, backward);
    EXPECT_EQ(measured.s_q, 16384);
    EXPECT_EQ(measured.h_q / measured.h_kv, 4);
    EXPECT_GE(measured.b * measured.h_q * 128, 1024);
    EXPECT_LE(tensor_bytes(measured, backward), std::int64_t{1} << 30);
    EXPECT_LT(measured.b * measured.h_q, huge.b * huge.h_q);
  }
}

}  // namespace
}  // namespace fa::tune
