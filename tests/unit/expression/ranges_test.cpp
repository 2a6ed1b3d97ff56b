#include "expression/ranges.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include <fa/error.hpp>

#include "evaluate.hpp"

namespace fa::expression {
namespace {

/// Whether table[...] of the given shape is inside for all points of kLengths.
bool inside(const std::string& index, std::initializer_list<std::int64_t> shape) {
  const Program program = Program::parse("score + table[" + index + "]", "",
                                         {{"table", DType::f32, 0, false}, {"doc", DType::i32, 0, false}});
  float anything = 0;
  std::vector<CapturedView> captures(2);
  captures[0].view = TensorView(&anything, DType::f32, shape);
  captures[1].view = TensorView(&anything, DType::i32, {12});
  try {
    check_indices(program, captures, kLengths);
    return true;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    EXPECT_NE(std::string(error.what()).find("captures[table]"), std::string::npos) << error.what();
    return false;
  }
}

TEST(Ranges, IndicesAreHeldToTheirAxes) {
  EXPECT_TRUE(inside("b, h, q, kv", {2, 3, 10, 12}));
  EXPECT_FALSE(inside("b, h, q, kv", {2, 3, 10, 11}));
  EXPECT_FALSE(inside("b, h, q, kv", {2, 2, 10, 12}));
  EXPECT_TRUE(inside("b, h, q, kv", {1, 3, 1, 12})) << "axes of length 1 are broadcast";
  EXPECT_FALSE(inside("kv - q", {12}));
  EXPECT_TRUE(inside("kv - q + s_q - 1", {21}));
  EXPECT_FALSE(inside("kv - q + s_q - 1", {20}));
  EXPECT_TRUE(inside("clamp(kv - q, -2, 2) + 2", {5}));
  EXPECT_TRUE(inside("abs(kv - q)", {12}));
  EXPECT_FALSE(inside("abs(kv - q)", {11}));
  EXPECT_TRUE(inside("q / 4", {3}));
  EXPECT_TRUE(inside("floor_mod(q - kv, 4)", {4}));
  EXPECT_FALSE(inside("(q - kv) % 4", {4}));
  EXPECT_TRUE(inside("q % 4", {4}));
  EXPECT_TRUE(inside("q * 2 + 1", {20}));
  EXPECT_TRUE(inside("q > kv ? 3 : 1", {4}));
  EXPECT_TRUE(inside("int(q > kv)", {2}));
  EXPECT_TRUE(inside("kv & 3", {4}));
  EXPECT_TRUE(inside("q >> 2", {3}));
  EXPECT_FALSE(inside("q >> 2", {2}));
  EXPECT_TRUE(inside("(q - kv) + 11 >> 1", {11}));
  EXPECT_TRUE(inside("q >> kv", {10}));
  EXPECT_FALSE(inside("q >> 3 * kv", {10})) << "shifts of the length of a word and more";
  EXPECT_FALSE(inside("(q - kv) >> 1", {12}));
  EXPECT_TRUE(inside("clamp(kv - (s_kv - s_q), 0, s_q - 1) >> 5", {1}));
  EXPECT_TRUE(inside("clamp(kv - (s_kv - s_q), 0, s_q - 1) >> 1", {5}));
  EXPECT_FALSE(inside("clamp(kv - (s_kv - s_q), 0, s_q - 1) >> 1", {4}));
  EXPECT_FALSE(inside("doc[kv]", {100}));
  EXPECT_TRUE(inside("clamp(doc[kv], 0, 99)", {100}));
  EXPECT_FALSE(inside("int(score)", {100}));
  EXPECT_FALSE(inside("q * 1000000000", {2000000000})) << "wraps";
  EXPECT_FALSE(inside("doc[clamp(q, 0, 12)]", {100})) << "of the inner index";
}

TEST(Ranges, ShapesFollowFromIndices) {
  const Program program =
      Program::parse("score + a[h, clamp(kv - q, -2, 2) + 2] + a[b, 0] + c", "doc[q] == doc[kv]",
                     {{"a", DType::f32, 0, false}, {"c", DType::f32, 0, false}, {"doc", DType::i32, 0, false}});
  EXPECT_EQ(smallest_shapes(program, kLengths), (std::vector<std::vector<std::int64_t>>{{3, 5}, {1}, {12}}));
}

}  // namespace
}  // namespace fa::expression
