// shard and unshard: there and back, of every layout and kind of tensor.

#include <gtest/gtest.h>

#include <numeric>

#include <fa/parallel.hpp>

namespace fa {
namespace {

std::vector<float> numbers(std::size_t count) {
  std::vector<float> all(count);
  std::iota(all.begin(), all.end(), 1.0F);
  return all;
}

TEST(Shard, ThereAndBack) {
  for (const ShardLayout layout : {ShardLayout::contiguous, ShardLayout::zigzag, ShardLayout::striped}) {
    for (const bool packed : {false, true}) {
      for (const bool statistics : {false, true}) {
        constexpr std::int64_t kRows = 24, kHeads = 3, kColumns = 4;
        const std::vector<std::int64_t> lengths{8, 0, 16};
        const std::int64_t columns = statistics ? 1 : kColumns;
        const std::int64_t b = packed ? 1 : 2;
        const std::vector<float> whole = numbers(static_cast<std::size_t>(b * kRows * kHeads * columns));
        std::vector<float> back(whole.size());
        const auto view = [&](const std::vector<float>& data, std::int64_t rows) {
          float* const at = const_cast<float*>(data.data());
          if (statistics) {
            return packed ? TensorView(at, DType::f32, {kHeads, rows}) : TensorView(at, DType::f32, {b, kHeads, rows});
          }
          return packed ? TensorView(at, DType::f32, {rows, kHeads, kColumns})
                        : TensorView(at, DType::f32, {b, kHeads, rows, kColumns});
        };
        for (int rank = 0; rank < 4; ++rank) {
          std::vector<float> part(whole.size() / 4);
          ShardCopy how{layout, 4, rank, {}, statistics, Device::host()};
          if (packed) how.lengths = lengths;
          shard(how, view(whole, kRows), view(part, kRows / 4));
          // Rows are those that shard_rows tells of.
          const std::vector<std::int64_t> rows =
              shard_rows(layout, 4, rank, packed ? lengths : std::vector<std::int64_t>{kRows});
          const TensorView from = view(whole, kRows), to = view(part, kRows / 4);
          const std::size_t row_axis = packed && !statistics ? 0 : packed ? 1 : 2;
          for (std::size_t i = 0; i < rows.size(); ++i) {
            EXPECT_EQ(part[i * static_cast<std::size_t>(to.strides[row_axis])],
                      whole[static_cast<std::size_t>(rows[i] * from.strides[row_axis])]);
          }
          unshard(how, to, view(back, kRows));
        }
        EXPECT_EQ(back, whole) << to_string(layout) << packed << statistics;
      }
    }
  }
}

TEST(Shard, BadInput) {
  std::vector<float> memory(256);
  const TensorView whole(memory.data(), DType::f32, {1, 1, 16, 4}), part(memory.data(), DType::f32, {1, 1, 8, 4});
  ShardCopy how{ShardLayout::zigzag, 2, 0, {}, false, Device::host()};
  const auto refused = [&](const TensorView& from, const TensorView& to) -> std::string {
    try {
      shard(how, from, to);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      return std::string(error.field("argument"));
    }
    return "";
  };
  std::vector<float> other(256);
  EXPECT_EQ(refused(whole, TensorView(other.data(), DType::f32, {1, 1, 8, 4})), "");
  EXPECT_EQ(refused(whole, TensorView(other.data(), DType::f32, {1, 1, 9, 4})), "part");
  EXPECT_EQ(refused(whole, TensorView(static_cast<const float*>(other.data()), DType::f32, {1, 1, 8, 4})), "part");
  EXPECT_EQ(refused(TensorView(memory.data(), DType::f32, {1, 1, 15, 4}), part), "s");
  EXPECT_EQ(refused(whole, part), "part") << "memory of the whole";
  for (const std::int64_t stride : {std::int64_t{1} << 62, std::numeric_limits<std::int64_t>::min()}) {
    TensorView far = whole;
    far.strides[2] = stride;
    EXPECT_EQ(refused(far, TensorView(other.data(), DType::f32, {1, 1, 8, 4})), "whole");
  }
  EXPECT_EQ(refused(TensorView(memory.data(), DType::f32, {16}), part), "whole");
  how.rank = 2;
  EXPECT_EQ(refused(whole, part), "rank");
  how.ranks = 0;
  EXPECT_EQ(refused(whole, part), "ranks");
}

}  // namespace
}  // namespace fa
