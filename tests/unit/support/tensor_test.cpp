#include <gtest/gtest.h>

#include <array>
#include <fa/error.hpp>
#include <fa/tensor.hpp>
#include <limits>

namespace fa {
namespace {

using Axes = std::array<std::int64_t, 4>;

TEST(TensorView, DefaultMeansNotGiven) {
  const TensorView view;
  EXPECT_FALSE(view.defined());
  EXPECT_EQ(view.elements(), 0);
}

TEST(TensorView, RowMajorStrides) {
  float memory = 0;
  const TensorView view(&memory, DType::f32, {2, 3, 5, 8});
  EXPECT_EQ(view.data, &memory);
  EXPECT_EQ(view.rank, 4);
  EXPECT_EQ(view.strides, (Axes{120, 40, 8, 1}));
  EXPECT_EQ(view.elements(), 240);
  EXPECT_FALSE(view.read_only);
}

TEST(TensorView, ConstMemoryIsReadOnly) {
  const float memory = 0;
  EXPECT_TRUE(TensorView(&memory, DType::f32, {1}).read_only);
  EXPECT_TRUE(
      TensorView(&memory, DType::f32, std::array<std::int64_t, 1>{1}, std::array<std::int64_t, 1>{1}).read_only);
}

TEST(TensorView, SwapsAxes) {
  float memory = 0;
  const TensorView view = TensorView(&memory, DType::f32, {2, 7, 3, 8}).swap_axes(1, 2);  // [b, s, h, d]
  EXPECT_EQ(view.shape, (Axes{2, 3, 7, 8}));
  EXPECT_EQ(view.strides, (Axes{168, 8, 24, 1}));
  EXPECT_THROW(view.swap_axes(0, 4), Error);
  EXPECT_THROW(view.swap_axes(-1, 0), Error);
}

TEST(TensorView, KeepsExplicitStrides) {
  float memory = 0;
  const std::array<std::int64_t, 3> shape{4, 5, 8};
  const std::array<std::int64_t, 3> strides{0, -8, 1};
  const TensorView view(&memory, DType::bf16, shape, strides);
  EXPECT_EQ(view.strides, (Axes{0, -8, 1, 0}));
}

TEST(TensorView, RefusesWrongRanks) {
  float memory = 0;
  EXPECT_THROW(TensorView(&memory, DType::f32, {1, 1, 1, 1, 1}), Error);
  EXPECT_THROW(TensorView(&memory, DType::f32, std::initializer_list<std::int64_t>{}), Error);
  EXPECT_THROW(TensorView(&memory, DType::f32, std::array<std::int64_t, 2>{1, 1}, std::array<std::int64_t, 1>{1}),
               Error);
}

TEST(TensorView, CountsEmptyAndHugeShapes) {
  float memory = 0;
  constexpr std::int64_t kHuge = std::int64_t{1} << 40;
  EXPECT_EQ(TensorView(&memory, DType::f32, {kHuge, 0, kHuge, kHuge}).elements(), 0);
  EXPECT_EQ(TensorView(&memory, DType::f32, {kHuge, kHuge}).elements(), std::numeric_limits<std::int64_t>::max());
}

TEST(DType, NamesAndSizes) {
  EXPECT_STREQ(to_string(DType::bf16), "bf16");
  EXPECT_STREQ(to_string(DType::f16), "f16");
  EXPECT_STREQ(to_string(DType::f32), "f32");
  EXPECT_STREQ(to_string(DType::f64), "f64");
  EXPECT_EQ(size_of(DType::bf16), 2U);
  EXPECT_EQ(size_of(DType::f64), 8U);
}

}  // namespace
}  // namespace fa
