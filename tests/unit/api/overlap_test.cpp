#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <random>
#include <set>
#include <vector>

#include "api/views.hpp"

namespace fa {
namespace {

constexpr std::int64_t kBase = 1 << 20;

/// A view of memory that is never touched.
TensorView view(std::int64_t byte_offset, DType dtype, std::vector<std::int64_t> shape,
                std::vector<std::int64_t> strides) {
  return TensorView(reinterpret_cast<void*>(kBase + byte_offset), dtype, shape, strides);
}

/// Every byte, once for each element that covers it.
std::multiset<std::int64_t> bytes_of(const TensorView& tensor) {
  std::multiset<std::int64_t> bytes;
  std::array<std::int64_t, 4> index{};
  for (std::int64_t element = 0; element < tensor.elements(); ++element) {
    std::int64_t rest = element;
    std::int64_t offset = reinterpret_cast<std::intptr_t>(tensor.data);
    for (std::size_t axis = static_cast<std::size_t>(tensor.rank); axis-- > 0;) {
      index[axis] = rest % tensor.shape[axis];
      rest /= tensor.shape[axis];
      offset += index[axis] * tensor.strides[axis] * static_cast<std::int64_t>(size_of(tensor.dtype));
    }
    for (std::int64_t byte = 0; byte < static_cast<std::int64_t>(size_of(tensor.dtype)); ++byte) {
      bytes.insert(offset + byte);
    }
  }
  return bytes;
}

bool truly_overlaps_itself(const TensorView& tensor) {
  const std::multiset<std::int64_t> bytes = bytes_of(tensor);
  return std::set<std::int64_t>(bytes.begin(), bytes.end()).size() != bytes.size();
}

bool truly_overlap(const TensorView& a, const TensorView& b) {
  const std::multiset<std::int64_t> bytes = bytes_of(b);
  for (const std::int64_t byte : bytes_of(a)) {
    if (bytes.contains(byte)) {
      return true;
    }
  }
  return false;
}

class RandomViews {
 public:
  TensorView next() {
    const auto rank = static_cast<std::size_t>(pick(1, 4));
    std::vector<std::int64_t> shape(rank), strides(rank);
    for (std::size_t axis = 0; axis < rank; ++axis) {
      shape[axis] = pick(0, 12) == 0 ? 0 : pick(1, 4);
      strides[axis] = pick(-12, 40);
    }
    return view(pick(-40, 40), pick(0, 1) == 0 ? DType::f16 : DType::f32, shape, strides);
  }

 private:
  std::int64_t pick(std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(generator_);
  }
  std::mt19937 generator_{7};
};

TEST(OverlapTest, AgreesWithCountingBytes) {
  RandomViews views;
  for (int i = 0; i < 20000; ++i) {
    const TensorView a = views.next(), b = views.next();
    EXPECT_EQ(api::overlap(a, b), truly_overlap(a, b)) << "case " << i;
  }
}

TEST(OverlapTest, NeverMissesASelfOverlap) {
  RandomViews views;
  for (int i = 0; i < 20000; ++i) {
    const TensorView tensor = views.next();
    if (truly_overlaps_itself(tensor)) {
      EXPECT_TRUE(api::overlaps_itself(tensor)) << "case " << i;
    }
  }
}

TEST(OverlapTest, OrdinaryLayoutsDoNotOverlapThemselves) {
  EXPECT_FALSE(api::overlaps_itself(view(0, DType::bf16, {2, 3, 4, 8}, {96, 32, 8, 1})));   // [b, h, s, d]
  EXPECT_FALSE(api::overlaps_itself(view(0, DType::bf16, {2, 3, 4, 8}, {96, 8, 24, 1})));   // [b, s, h, d]
  EXPECT_FALSE(api::overlaps_itself(view(0, DType::bf16, {2, 3, 4, 8}, {288, 8, 72, 1})));  // packed qkv
  EXPECT_FALSE(api::overlaps_itself(view(0, DType::bf16, {2, 1, 4, 8}, {32, 0, 8, 1})));    // an axis of one element
}

TEST(OverlapTest, SlicesOfPackedQkvAreDisjoint) {
  // [b, s, 3, h, d]: q, k and v alternate within every row.
  const std::vector<std::int64_t> shape{2, 16, 512, 64}, strides{512 * 3 * 16 * 64, 64, 3 * 16 * 64, 1};
  const TensorView q = view(0, DType::bf16, shape, strides);
  const TensorView k = view(16 * 64 * 2, DType::bf16, shape, strides);
  EXPECT_FALSE(api::overlap(q, k));
  EXPECT_TRUE(api::overlap(q, view(16 * 64 * 2 - 2, DType::bf16, shape, strides)));
}

TEST(OverlapTest, NothingOverlapsAMissingOrEmptyTensor) {
  const TensorView tensor = view(0, DType::f32, {4}, {1});
  EXPECT_FALSE(api::overlap(tensor, {}));
  EXPECT_FALSE(api::overlap(tensor, view(0, DType::f32, {0}, {1})));
}

}  // namespace
}  // namespace fa
