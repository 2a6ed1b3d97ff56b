#include "plan/arch.hpp"

#include <gtest/gtest.h>

#include <fa/error.hpp>

namespace fa::plan {
namespace {

TEST(Arch, PrintsAndParses) {
  for (const char* text : {"sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103f", "sm_120a"}) {
    EXPECT_EQ(to_string(parse_arch(text)), text);
  }
  EXPECT_EQ(parse_arch("90a"), (Arch{9, 0, 'a'}));
  EXPECT_EQ(parse_arch("sm_121"), (Arch{12, 1, '\0'}));
}

TEST(Arch, RefusesWhatItCannotMean) {
  for (const char* text : {"", "sm_", "a", "sm_9", "sm_70", "sm_90b", "sm_1000", "compute_90", "sm_90 a", "90aa"}) {
    try {
      parse_arch(text);
      FAIL() << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      EXPECT_EQ(error.field("value"), text);
      EXPECT_FALSE(error.field("accepted").empty());
    }
  }
}

TEST(Arch, LimitsFollowTheProgrammingGuide) {
  EXPECT_EQ(limits({8, 0}).shared_per_block, 163 * 1024);
  EXPECT_EQ(limits({8, 7}).shared_per_sm, 164 * 1024);
  EXPECT_EQ(limits({8, 9}).shared_per_block, 99 * 1024);
  EXPECT_EQ(limits({9, 0, 'a'}).shared_per_block, 227 * 1024);
  EXPECT_EQ(limits({10, 3, 'a'}).shared_per_sm, 228 * 1024);
  EXPECT_EQ(limits({11, 0, 'a'}).shared_per_block, 227 * 1024);
  EXPECT_EQ(limits({12, 1, 'a'}).shared_per_sm, 100 * 1024);
  EXPECT_EQ(limits({8, 6}).registers_per_sm, 65536);
  EXPECT_THROW(limits({7, 0}), Error);
  EXPECT_EQ(limits({7, 5}).shared_per_block, 64 * 1024);
}

TEST(Arch, LowerDesktopTargetsStandInWithinAMajorVersion) {
  EXPECT_EQ(substitute_targets({8, 9}), (std::vector<Arch>{{8, 6}, {8, 0}}));
  EXPECT_EQ(substitute_targets({8, 6}), (std::vector<Arch>{{8, 0}}));
  const std::vector<Arch> none = {{8, 0}, {8, 7}, {8, 8}, {8, 9, 'a'}, {9, 0, 'a'}, {9, 0}, {10, 3, 'a'}, {12, 1, 'a'}};
  for (const Arch target : none) EXPECT_TRUE(substitute_targets(target).empty()) << to_string(target);
}

TEST(Arch, ATargetIsWhatAGpuLooksUp) {
  for (const char* text : {"sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"}) {
    EXPECT_EQ(to_string(parse_target(text)), text);
  }
  for (const char* text : {"sm_90", "sm_100", "sm_103f", "sm_120", "sm_80a"}) {
    try {
      parse_target(text);
      ADD_FAILURE() << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument) << text;
      EXPECT_NE(std::string(error.what()).find("look up"), std::string::npos) << error.what();
    }
  }
}

}  // namespace
}  // namespace fa::plan
