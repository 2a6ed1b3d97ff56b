// Forwards of 8-bit floats over pages against float64. What no row needs can be read neither in the pool nor in the
// table, and wrong tables lead nowhere.

#include "emulator/fp8_paged.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <random>

#include "emulator/fp8_specs.hpp"
#include "support/thorough.hpp"

namespace emulator {
namespace {

using fa::plan::KernelSpec;
using fa::test::PagedCase;
using fa::test::PagedData;

class Fp8Paged : public testing::TestWithParam<std::size_t> {};

TEST_P(Fp8Paged, MatchesTheReference) {
  const KernelSpec& spec = fp8_paged_specs()[GetParam()];
  for (std::size_t batch = 0; batch < kFp8PagedBatches; ++batch) {
    constexpr std::array<std::uint64_t, 2> kSchedules{1, 2};
    for (const std::uint64_t schedule : fa::test::tried(kSchedules, GetParam() + batch)) {
      const PagedCase c = fp8_paged_case(spec, batch, schedule == 1);
      SCOPED_TRACE(canonical(spec) + ", " + testing::PrintToString(c));
      const PagedData data = make_data(c);
      const Placement pool = batch % 2 == 0 ? Placement::bhsd : Placement::bshd;
      fa::test::AttentionOutputs actual;
      ASSERT_NO_THROW(actual = run_paged(spec, c, data, {.pool = pool, .schedule = schedule}));
      const Fp8PagedErrors errors = fp8_paged_errors(spec, c, data, actual);
      EXPECT_LE(errors.o, 1);
      EXPECT_LE(errors.lse, 0.02);
    }
  }
}

/// Scales far below 1, in KV tiles that end behind the last key.
TEST_P(Fp8Paged, SmallScalesOfValuesStandAlone) {
  const KernelSpec& spec = fp8_paged_specs()[GetParam()];
  if (!fp8_facts(spec).value_scales) return;
  for (std::size_t batch = 0; batch < kFp8PagedBatches; ++batch) {
    const PagedCase c = fp8_paged_case(spec, batch, false);
    SCOPED_TRACE(canonical(spec) + ", " + testing::PrintToString(c));
    PagedData data = make_data(c);
    const fa::TensorView scales = data.v_scale.view();
    for_each_row(scales.shape[0], scales.shape[1], scales.shape[2],
                 [&](std::int64_t b, std::int64_t h, std::int64_t s) {
                   data.v_scale.set(b, h, s, 0, 0x1p-13 * data.v_scale.at(b, h, s));
                 });
    fa::test::AttentionOutputs actual;
    ASSERT_NO_THROW(actual = run_paged(spec, c, data, {}));
    EXPECT_LE(fp8_paged_errors(spec, c, data, actual).o, 1);
  }
}

TEST_P(Fp8Paged, WrongTablesAndLengthsReadNothingElse) {
  const KernelSpec& spec = fp8_paged_specs()[GetParam()];
  for (std::size_t batch = 0; batch < kFp8PagedBatches; ++batch) {
    const PagedCase c = fp8_paged_case(spec, batch, true);
    SCOPED_TRACE(canonical(spec) + ", " + testing::PrintToString(c));
    PagedData data = make_data(c);
    std::mt19937_64 engine(batch + 1);
    constexpr std::int32_t kWild[] = {-1, std::numeric_limits<std::int32_t>::min(), 1 << 24, 7,
                                      std::numeric_limits<std::int32_t>::max()};
    for (std::vector<std::int32_t>* const values : {&data.table, &data.used_kv, &data.batch_index, &data.cu_q}) {
      if (values == &data.table && data.contiguous) continue;
      for (std::int32_t& value : *values) {
        if (engine() % 3 == 0) value = kWild[engine() % std::size(kWild)];
      }
    }
    EXPECT_NO_THROW(run_paged(spec, c, data, {.trust = false}));
  }
}

INSTANTIATE_TEST_SUITE_P(Hopper, Fp8Paged, testing::Range<std::size_t>(0, fp8_paged_specs().size()));

}  // namespace
}  // namespace emulator
