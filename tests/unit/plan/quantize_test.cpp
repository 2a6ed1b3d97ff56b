#include <gtest/gtest.h>

#include <fa/error.hpp>

#include "plan/catalogue.hpp"
#include "plan/quantize.hpp"

namespace fa::plan {
namespace {

QuantizePass pass_of(std::int64_t b, std::int64_t h, std::int64_t s, std::int64_t d) {
  QuantizePass pass;
  pass.x.dtype = DType::bf16;
  pass.x.shape = {b, h, s, d};
  pass.x.strides = {h * s * d, s * d, d, 1};
  pass.codes = pass.x;
  pass.codes.dtype = DType::i8;
  return pass;
}

TEST(QuantizePlan, BlocksHaveWholeRowsAndColumns) {
  constexpr Arch kHopper{9, 0, 'a'};
  kernel::QuantizeParams params;
  for (const auto& [d, rows] : {std::pair{16, 128}, {48, 32}, {64, 32}, {128, 16}, {256, 8}}) {
    QuantizePass pass = pass_of(2, 3, 1000, d);
    const KernelSpec spec = quantize_spec(pass, kHopper);
    EXPECT_TRUE(spec.aligned);
    EXPECT_EQ(shared_bytes(spec), 0);
    EXPECT_EQ(quantize_params(pass, spec, params), (6000 + rows - 1) / rows) << d;
    pass.means = true;
    const KernelSpec means = quantize_spec(pass, kHopper);
    EXPECT_EQ(quantize_params(pass, means, params), 6 * d / 16);
    EXPECT_EQ(shared_bytes(means), 16 * 16 * 4);
    EXPECT_NE(canonical(spec), canonical(means));
  }
  QuantizePass unaligned = pass_of(1, 1, 4, 64);
  unaligned.x.strides[2] = 68;
  EXPECT_FALSE(quantize_spec(unaligned, kHopper).aligned);
}

TEST(QuantizePlan, RowsAreCountedInThirtyOneBits) {
  kernel::QuantizeParams params;
  const QuantizePass most = pass_of(1, 1, (std::int64_t{1} << 31) - 1, 64),
                     more = pass_of(1, 2, std::int64_t{1} << 30, 64);
  const KernelSpec spec = quantize_spec(most, {9, 0, 'a'});
  EXPECT_NO_THROW(quantize_params(most, spec, params));
  EXPECT_THROW(quantize_params(more, spec, params), Error);
}

TEST(QuantizePlan, GpusWithoutBf16RefuseIt) {
  EXPECT_THROW(quantize_spec(pass_of(1, 1, 4, 64), parse_arch("sm_75")), Error);
}

}  // namespace
}  // namespace fa::plan
