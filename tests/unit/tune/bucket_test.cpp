#include "tune/bucket.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <initializer_list>
#include <map>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "plan/backward.hpp"
#include "plan/planner.hpp"
#include "support/thorough.hpp"

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
  // What is of calls, and of no kernel's text alone, stands in the code alone.
  plan::Variants strided;
  strided.placed = strided.strided = true;
  p = base;
  p.placed = true;
  EXPECT_TRUE(codes.insert(bucket_code(p, 0)).second);
  p.variants = &strided;
  EXPECT_TRUE(codes.insert(bucket_code(p, 0)).second);
  p = base;
  p.bounded = true;
  EXPECT_TRUE(codes.insert(bucket_code(p, 0)).second);
  p = base;
  p.placed = p.place_in_memory = true;
  EXPECT_TRUE(codes.insert(bucket_code(p, 0)).second);
  for (const int slot : {1, 31, 255, 256, 512, 1024, plan::Choice::kSlots - 1})
    EXPECT_TRUE(codes.insert(bucket_code(base, slot)).second);
  EXPECT_FALSE(codes.contains(0));
}

/// A problem of given classes: the greatest lengths and heads of them.
plan::Problem of_classes(int s_q, int s_kv, int heads, std::int64_t group) {
  plan::Problem result = problem(std::int64_t{1} << heads, 1, 1);
  result.s_q = length_limit(s_q);
  result.s_kv = length_limit(s_kv);
  result.h_q = group;
  result.b = std::max<std::int64_t>((std::int64_t{1} << heads) / group, 1);
  return result;
}

constexpr int kLengthClasses = 33;
constexpr int kHeadClasses = 13;

bool all_differ(std::vector<std::uint64_t> codes) {
  std::ranges::sort(codes);
  return std::ranges::adjacent_find(codes) == codes.end();
}

void add_codes_of_every_slot(std::vector<std::uint64_t>* codes, const plan::Problem& p) {
  for (int slot = 0; slot < plan::Choice::kSlots; ++slot) codes->push_back(bucket_code(p, slot));
}

// A slot is as wide as the planner makes it: no fact of it may reach into the classes beside it, nor any of these into
// another.
TEST(Bucket, EverySlotWithEveryLengthHasACodeOfItsOwn) {
  std::vector<std::uint64_t> codes;
  for (int s_q = 0; s_q < kLengthClasses; ++s_q) {
    for (int s_kv = 0; s_kv < kLengthClasses; ++s_kv) {
      if (s_q == 1 || s_kv == 1) continue;  // no length is between 1 and 2
      const plan::Problem p = of_classes(s_q, s_kv, 3, 1);
      ASSERT_EQ(bucket_of(p), (Bucket{s_q, s_kv, 3, 1}));
      const bool q_is_power = (s_q & (s_q - 1)) == 0, kv_is_power = (s_kv & (s_kv - 1)) == 0;
      if (test::thorough() ? q_is_power || kv_is_power : q_is_power && kv_is_power) {
        add_codes_of_every_slot(&codes, p);
      } else {
        codes.push_back(bucket_code(p, 0));
      }
    }
  }
  EXPECT_TRUE(all_differ(std::move(codes)));
}

TEST(Bucket, EverySlotWithEveryNumberOfHeadsHasACodeOfItsOwn) {
  std::vector<std::uint64_t> codes;
  for (const int s_kv : {0, 32}) {
    for (int heads = 0; heads < kHeadClasses; ++heads) {
      for (const std::int64_t group : {1, 2, 3, 64, 1 << 12}) {
        if (group > std::int64_t{1} << heads || (group == 3 && heads != 2)) continue;
        const plan::Problem p = of_classes(32, s_kv, heads, group);
        ASSERT_EQ(bucket_of(p), (Bucket{32, s_kv, heads, group}));
        add_codes_of_every_slot(&codes, p);
      }
    }
  }
  for (const std::int64_t group : {std::int64_t{1} << 30, (std::int64_t{1} << 31) - 65536}) {
    plan::Problem p = of_classes(32, 32, 12, 1);
    p.h_q = group;
    add_codes_of_every_slot(&codes, p);
  }
  EXPECT_TRUE(all_differ(std::move(codes)));
}

TEST(Bucket, RowsOfKernelsForLongRowsAreNotThoseOfOthers) {
  plan::Problem p = problem(1, 8, 512);
  std::map<std::uint64_t, std::string> kernels;
  for (const std::int64_t s_q : {512, 768, 1024, 1536, 2048, 3072, 4096}) {
    p.s_q = s_q;
    const std::uint64_t code = bucket_code(p, plan::choose(p, {}).slot());
    EXPECT_TRUE(kernels.try_emplace(code, text(p)).second) << s_q << " is taken for " << kernels[code];
  }
}

/// Lengths around every border that plans know.
void set_random_shape(std::mt19937& random, plan::Problem& p) {
  const auto one_of = [&](std::initializer_list<std::int64_t> values) {
    return values.begin()[random() % values.size()];
  };
  p.b = one_of({1, 1, 16});
  for (std::int64_t* s : {&p.s_q, &p.s_kv}) *s = one_of({1, 16, 64, 100, 448, 512, 768, 1024, 1536, 2048, 4096, 65537});
  p.s_q += static_cast<std::int64_t>(random() % 3) - (p.s_q > 1 ? 1 : 0);
  p.aligned = random() % 4 != 0;
  p.tensor_maps = random() % 4 != 0;
}

// Calls of an Attention are looked up by their code alone, so that the first of a code decides for the others.
TEST(Bucket, EqualCodesOfOneConfigurationHaveEqualTexts) {
  std::mt19937 random(31);
  for (int configuration = 0; configuration < 60; ++configuration) {
    plan::Problem p = problem(1, 1, 1);
    p.d_qk = p.d_v = random() % 2 == 0 ? 128 : 8 * (1 + static_cast<int>(random() % 32));
    p.h_kv = 1 << random() % 5;
    p.h_q = p.h_kv << random() % 3;
    p.causal = random() % 2 == 0;
    p.positive_scale = random() % 8 != 0;
    plan::Variants variants;
    if (random() % 3 == 0) {
      variants.mask = "q>=kv";
    } else if (random() % 3 == 0) {
      variants.score = "score-h*(q-kv)";
      variants.affine = true;
    }
    if (variants.any()) p.variants = &variants;
    std::map<std::uint64_t, std::string> forward;
    std::map<std::uint64_t, std::string> backward;
    const auto expect_known = [](auto& texts, std::uint64_t code, const std::string& now) {
      EXPECT_EQ(texts.try_emplace(code, now).first->second, now);
    };
    for (int call = 0; call < 200; ++call) {
      set_random_shape(random, p);
      expect_known(forward, bucket_code(p, plan::choose(p, {}).slot()), text(p));
      expect_known(backward, bucket_code(p, plan::choose_backward(p, {}).slot()),
                   bucket_text(p, plan::plan_backward(p, {}, false).main.front()));
    }
    ASSERT_FALSE(HasFailure()) << "d " << p.d_qk;
  }
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
