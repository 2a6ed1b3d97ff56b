// Appends to KV caches, by every kind of kernel on the CPU: what is written, and that nothing else is touched.

#include <gtest/gtest.h>

#include <cstring>

#include "emulator/append_run.hpp"
#include "emulator/append_specs.hpp"
#include "emulator/fault.hpp"
#include "support/thorough.hpp"

namespace emulator {
namespace {

using fa::test::AppendCase;
using fa::test::AppendData;

class Appends : public testing::TestWithParam<std::size_t> {
 protected:
  static void run(const AppendCase& c, std::uint64_t seed) {
    SCOPED_TRACE(to_string(c));
    const AppendData data(c);
    try {
      EXPECT_EQ(data.judge(run_append(c, data, append_spec(c), seed)), "");
    } catch (const Fault& fault) {
      ADD_FAILURE() << fault.what();
    }
  }
};

TEST_P(Appends, WriteWhatTheFormulaSays) {
  AppendCase c = append_kinds()[GetParam()];
  for (std::uint32_t seed = 1; seed <= (fa::test::thorough() ? 12U : 6U); ++seed) {
    draw_requests(c, static_cast<std::uint32_t>(GetParam()) * 100 + seed);
    run(c, seed);
  }
}

// Wrong lengths, tables, rows and slots: what they mean is skipped, and every access stays in its tensor.
TEST_P(Appends, StayInTheirMemory) {
  AppendCase c = append_kinds()[GetParam()];
  c.hostile = true;
  for (std::uint32_t seed = 1; seed <= (fa::test::thorough() ? 8U : 4U); ++seed) {
    draw_requests(c, static_cast<std::uint32_t>(GetParam()) * 100 + 50 + seed);
    run(c, seed);
  }
}

INSTANTIATE_TEST_SUITE_P(Kind, Appends, testing::Range<std::size_t>(0, append_kinds().size()));

// Launched in order, on GPUs that know no other way.
TEST(Append, ForAmpere) {
  AppendCase c;
  c.rotary_dims = 64;
  c.rows = {3, 0, 5};
  c.before = {7, 9, 30};
  c.h_q = 6;
  const AppendData data(c);
  EXPECT_EQ(data.judge(run_append(c, data, append_spec(c, {8, 0, '\0'}), 1)), "");
}

// More heads than a block has threads for, and more rows than one block has.
TEST(Append, ManyHeadsAndRows) {
  AppendCase c;
  c.rotary_dims = 64;
  c.h_kv = 67;
  c.h_q = 134;
  c.rows = {2};
  c.before = {15};
  const AppendData heads(c);
  EXPECT_EQ(heads.judge(run_append(c, heads, append_spec(c), 1)), "");
  c.h_kv = c.h_q = 1;
  c.rows = {150, 1, 0, 70};
  c.before = {0, 3, 9, 1};
  const AppendData rows(c);
  EXPECT_EQ(rows.judge(run_append(c, rows, append_spec(c), 1)), "");
}

// Wild cumulative lengths of a packed batch: whatever they are, nothing outside is touched.
TEST(Append, WildCumulativeLengths) {
  AppendCase c;
  c.rotary_dims = 64;
  c.h_q = 2;
  c.rows = {2, 3, 1, 4, 1};
  c.before = {0, 5, 9, 17, 3};
  for (std::uint32_t seed = 0; seed < 40; ++seed) {
    AppendData data(c);
    std::uint32_t state = seed * 2654435761u + 1;
    for (const auto part : {fa::test::AppendPart::cu, fa::test::AppendPart::used}) {
      auto& bytes = data.buffers()[static_cast<std::size_t>(part)].bytes;
      for (std::size_t i = 0; i + 3 < bytes.size(); i += 4) {
        state = state * 1664525u + 1013904223u;
        if (state >> 30 == 0) continue;
        const std::uint32_t wild = state >> 28 & 1 ? state : state >> 8 & 15;
        std::memcpy(&bytes[i], &wild, sizeof wild);
      }
    }
    EXPECT_NO_THROW(run_append(c, data, append_spec(c), seed)) << seed;
  }
}

}  // namespace
}  // namespace emulator
