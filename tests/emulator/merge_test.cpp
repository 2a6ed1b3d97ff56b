// Merges of partial results, by every kind of kernel on the CPU: what is written, and that nothing else is touched.

#include <gtest/gtest.h>

#include "emulator/fault.hpp"
#include "emulator/merge_run.hpp"
#include "emulator/merge_specs.hpp"

namespace emulator {
namespace {

using fa::test::MergeCase;
using fa::test::MergeData;

void run(const MergeCase& c, std::uint64_t seed, fa::plan::Arch arch = {9, 0, 'a'}) {
  SCOPED_TRACE(to_string(c));
  const MergeData data(c);
  try {
    EXPECT_EQ(data.judge(run_merge(c, data, merge_spec(c, arch), seed)), "");
  } catch (const Fault& fault) {
    ADD_FAILURE() << fault.what();
  }
}

class Merges : public testing::TestWithParam<std::size_t> {};

TEST_P(Merges, AreWhatAFormulaSays) {
  MergeCase c = merge_kinds()[GetParam()];
  for (std::uint32_t seed = 1; seed <= 12; ++seed) {
    draw_rows(c, static_cast<std::uint32_t>(GetParam()) * 100 + seed);
    if (c.kinds == MergeCase::Kinds::mixed && c.states < 2) c.states = 2;
    run(c, seed);
  }
}

INSTANTIATE_TEST_SUITE_P(Kind, Merges, testing::Range<std::size_t>(0, merge_kinds().size()));

// Launched in order, on GPUs that know no other way.
TEST(Merge, ForAmpere) {
  MergeCase c;
  c.states = 3;
  c.rows = MergeCase::Rows::without_keys;
  c.in_place = c.lse_in_place = 2;
  run(c, 1, {8, 0, '\0'});
}

// As many states as are listed, and more that are stacked.
TEST(Merge, ManyStates) {
  MergeCase c;
  c.s_q = 33;
  c.states = 16;
  c.spread = 30;
  run(c, 1);
  c.stacked = true;
  c.states = 100;
  c.in_place = c.lse_in_place = 57;
  run(c, 2);
}

}  // namespace
}  // namespace emulator
