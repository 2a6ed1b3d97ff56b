// What may decide about a kernel, and what becomes of a decision's turn, without a GPU.

#include <gtest/gtest.h>

#include <cstdlib>

#include "api/tuning.hpp"
#include "tests/support/posix_names.hpp"
#include "tests/unit/api/expect_error.hpp"

namespace fa::api {
namespace {

class TunePolicies : public ::testing::Test {
 protected:
  void SetUp() override { unsetenv("FA_TUNE"); }
  void TearDown() override { unsetenv("FA_TUNE"); }

  static void expect_sources(const AttentionConfig& config, bool tables, bool records, bool tunes,
                             Operation op = Operation::forward) {
    const TuneSources sources = tune_sources(config, op);
    EXPECT_EQ(sources.tables, tables);
    EXPECT_EQ(sources.records, records);
    EXPECT_EQ(sources.tunes, tunes);
  }
};

TEST_F(TunePolicies, SayWhatMayDecide) {
  AttentionConfig config;
  expect_sources(config, true, true, true);
  config.tune = TunePolicy::cached;
  expect_sources(config, true, true, false);
  config.tune = TunePolicy::off;
  expect_sources(config, false, false, false);
}

TEST_F(TunePolicies, TheEnvironmentOverrides) {
  AttentionConfig config;
  setenv("FA_TUNE", "off", 1);
  expect_sources(config, false, false, false);
  setenv("FA_TUNE", "cached", 1);
  expect_sources(config, true, true, false);
  config.tune = TunePolicy::off;
  setenv("FA_TUNE", "on", 1);
  expect_sources(config, true, true, true);
  setenv("FA_TUNE", "always", 1);
  test::expect_invalid("FA_TUNE", [&] { tune_sources(config, Operation::forward); });
}

TEST_F(TunePolicies, PackedBatchesAndDropoutAreThePlannersAlone) {
  for (const Operation op : {Operation::forward, Operation::backward}) {
    AttentionConfig config;
    config.varlen = true;
    expect_sources(config, false, false, false, op);
    config.varlen = false;
    config.dropout = 0.1f;
    expect_sources(config, false, false, false, op);
  }
}

TEST_F(TunePolicies, DeterministicTakesTablesAlone) {
  AttentionConfig config;
  config.deterministic = true;
  expect_sources(config, true, false, false);
  expect_sources(config, false, false, false, Operation::backward);
  config.compile = CompilePolicy::never;
  expect_sources(config, false, false, false);
}

TEST_F(TunePolicies, WithoutCompilingNothingIsTuned) {
  AttentionConfig config;
  config.compile = CompilePolicy::never;
  expect_sources(config, true, true, false);
}

TEST_F(TunePolicies, AFixedTileIsNotTuned) {
  AttentionConfig config;
  config.kernel = KernelOverride{"", "tile_m=64"};
  expect_sources(config, false, false, false);
  expect_sources(config, true, true, true, Operation::backward);
  config.kernel = KernelOverride{"sm80"};
  expect_sources(config, true, true, true);
  config.kernel_backward = KernelOverride{"", "stages=2"};
  expect_sources(config, false, false, false, Operation::backward);
}

}  // namespace
}  // namespace fa::api
