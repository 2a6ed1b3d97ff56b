// Statistics of forward on the GPU against the host device.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "device_case.hpp"
#include "support/statistics_case.hpp"
#include "support/statistics_gradients.hpp"

namespace fa {
namespace {

using test::attention_of;
using test::AttentionCase;
using test::AttentionSizes;
using test::DeviceBuffer;
using test::StatisticsCase;
using test::StatisticsData;
using test::StatisticsGradientCase;
using test::StatisticsGradientData;
using test::StatisticsGradientResults;
using test::StatisticsResults;

/// Bytes of the host on the device, and back.
class Copies {
 public:
  test::StatisticsMemory memory() {
    const auto place = [this](const void* bytes, std::size_t size) {
      std::vector<std::byte> copy(size);
      if (size != 0) std::memcpy(copy.data(), bytes, size);
      return buffers_.emplace_back(copy).data();
    };
    return {place, [this, place](void* bytes, std::size_t size) {
              written_.emplace_back(bytes, buffers_.size());
              return place(bytes, size);
            }};
  }

  void fetch() const {
    for (const auto& [to, index] : written_) {
      const std::vector<std::byte> bytes = buffers_[index].read();
      if (!bytes.empty()) std::memcpy(to, bytes.data(), bytes.size());
    }
    for (const DeviceBuffer& buffer : buffers_) EXPECT_TRUE(buffer.guards_intact());
  }

 private:
  std::deque<DeviceBuffer> buffers_;
  std::vector<std::pair<void*, std::size_t>> written_;
};

class GpuStatistics : public test::GpuTest {
 protected:
  static void expect_right(const StatisticsCase& c) {
    SCOPED_TRACE(c.name + " " + to_string(c.attention));
    const StatisticsData data(c);
    AttentionConfig config = data.variant.config;
    config.kernel = c.kernel.kernel.empty() ? std::nullopt : std::optional(c.kernel);
    const Attention attention = Attention::create(config);
    const StatisticsResults expected = test::expected_of(c, data);
    std::optional<StatisticsResults> first;
    for (int run = 0; run < 2; ++run) {
      StatisticsResults results(c);
      Copies copies;
      const test::StatisticsMemory memory = copies.memory();
      attention.forward(test::inputs_of(c, data, memory), test::outputs_of(c, results, memory));
      driver::check(driver::api().cuCtxSynchronize(), "cuCtxSynchronize");
      copies.fetch();
      EXPECT_LE(test::error_of(c, results, expected), 1);
      if (first) {
        EXPECT_EQ(results.max_logit, first->max_logit);
        EXPECT_EQ(results.entropy, first->entropy);
        EXPECT_EQ(results.column_sums, first->column_sums);
        EXPECT_EQ(results.top_keys, first->top_keys);
      }
      first = std::move(results);
    }
  }

  static AttentionConfig asks(MaxLogit max_logit, bool by_head, bool entropy) {
    AttentionConfig config;
    config.statistics = {max_logit, by_head, entropy, ColumnSums::none};
    return config;
  }
};

TEST_F(GpuStatistics, OfEveryDtypeAndHeadDim) {
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
    for (const std::int64_t d : {64, 96, 128, 192, 256, 512}) {
      for (const bool causal : {false, true}) {
        for (const char* const family : {"", "sm80"}) {
          expect_right({"plain",
                        attention_of(dtype, {2, 4, 2, 333, 517, d, d}, causal),
                        asks(MaxLogit::softmax, false, true),
                        {family, ""}});
        }
      }
    }
  }
}

TEST_F(GpuStatistics, OfHeads) {
  expect_right(
      {"long", attention_of(DType::bf16, {2, 4, 2, 700, 700, 128, 128}, true), asks(MaxLogit::scaled, true, true)});
  expect_right({"below_zero", attention_of(DType::bf16, {2, 4, 4, 333, 700, 64, 64}, true), [] {
                  AttentionConfig config = asks(MaxLogit::softmax, true, false);
                  config.score = ScoreFunction{"score - 100.0"};
                  return config;
                }()});
  expect_right(
      {"decode", attention_of(DType::f16, {3, 8, 2, 1, 900, 128, 128}, true), asks(MaxLogit::softmax, true, true)});
}

TEST_F(GpuStatistics, OfFunctionsMasksWindowsAndSinks) {
  for (const MaxLogit logits : {MaxLogit::softmax, MaxLogit::scaled}) {
    for (const std::int64_t d : {64, 128, 256}) {
      for (const test::VariantChoice& choice : test::variant_choices(false)) {
        StatisticsCase c{choice.name, attention_of(DType::bf16, {2, 4, 2, 200, 333, d, d}, true), choice.config};
        c.config.statistics = {logits, false, true, ColumnSums::none};
        expect_right(c);
      }
    }
  }
}

/// The entropy by offsets that trail the maxima: as they are, raised, of lost scores, of far ones, and beside a sink.
/// Of so many rows that the tiles are large.
TEST_F(GpuStatistics, OfTrailingOffsets) {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const std::int64_t d : {64, 128}) {
      for (const bool causal : {false, true}) {
        const auto expect = [&](float steep, float common, std::optional<float> scale, bool sink = false) {
          StatisticsCase c{"trailing", attention_of(dtype, {1, 36, 36, 800, 600, d, d}, causal, scale),
                           asks(MaxLogit::none, false, true)};
          c.steep = steep;
          c.common = common;
          c.config.sink = sink;
          expect_right(c);
        };
        expect(1, 0, std::nullopt);
        expect(60, 0, std::nullopt);
        expect(1, 0, -1.F);
        expect(1, 0, std::nullopt, true);
        if (dtype == DType::f16) expect(1, 4000, 1.F);
      }
    }
  }
}

TEST_F(GpuStatistics, OfTrailingOffsetsOfFewRows) {
  for (const std::int64_t d : {16, 72, 128}) {
    for (const std::int64_t rows : {1, 40, 300}) {
      for (const bool causal : {false, true}) {
        StatisticsCase c{"trailing", attention_of(DType::bf16, {2, 4, 2, rows, 517, d, d}, causal),
                         asks(MaxLogit::none, false, true)};
        expect_right(c);
        c.steep = 60;
        expect_right(c);
      }
    }
  }
}

TEST_F(GpuStatistics, OfDropoutAndOtherScales) {
  StatisticsCase drops{"dropout", attention_of(DType::bf16, {2, 4, 2, 200, 333, 128, 128}, true),
                       asks(MaxLogit::softmax, false, true)};
  drops.config.dropout = 0.25F;
  expect_right(drops);
  for (const float scale : {-0.3F, 0.F, 30.F}) {
    expect_right({"scale", attention_of(DType::f16, {2, 4, 2, 200, 333, 64, 64}, true, scale),
                  asks(MaxLogit::softmax, false, true)});
  }
}

TEST_F(GpuStatistics, OfPackedBatchesAndPages) {
  for (const std::int64_t d : {64, 128, 256}) {
    StatisticsCase packed{"packed", attention_of(DType::bf16, {1, 4, 2, 900, 1000, d, d}, true),
                          asks(MaxLogit::softmax, false, true)};
    packed.cu_q = {5, 300, 300, 431, 890};
    packed.cu_kv = {0, 420, 440, 440, 1000};
    packed.config.varlen = true;
    expect_right(packed);
    packed.config.statistics.max_logit_by_head = true;
    expect_right(packed);
    for (const std::int64_t rows : {1, 200}) {
      StatisticsCase pages{"pages", attention_of(DType::bf16, {3, 8, 2, rows, 2000, d, d}, true),
                           asks(MaxLogit::softmax, false, true)};
      pages.config.page_size = 16;
      pages.used_kv = {2000, 0, 777};
      expect_right(pages);
    }
  }
}

TEST_F(GpuStatistics, OfColumns) {
  for (const ColumnSums sums : {ColumnSums::query_heads, ColumnSums::kv_heads}) {
    AttentionConfig config;
    config.statistics.column_sums = sums;
    for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
      for (const std::int64_t d : {64, 128, 256, 512}) {
        for (const bool causal : {false, true}) {
          expect_right({"sums", attention_of(dtype, {2, 4, 2, 333, 517, d, d}, causal), config});
        }
      }
    }
    for (const test::VariantChoice& choice : test::variant_choices(false)) {
      StatisticsCase c{choice.name, attention_of(DType::bf16, {2, 4, 2, 200, 333, 128, 128}, true), choice.config};
      c.config.statistics = {MaxLogit::softmax, false, true, sums};
      expect_right(c);
    }
    StatisticsCase packed{"packed", attention_of(DType::bf16, {1, 4, 2, 900, 1000, 128, 128}, true), config};
    packed.cu_q = {5, 300, 300, 431, 890};
    packed.cu_kv = {0, 420, 440, 440, 1000};
    packed.config.varlen = true;
    expect_right(packed);
    StatisticsCase decode{"decode", attention_of(DType::bf16, {2, 8, 2, 1, 3000, 128, 128}, true), config};
    expect_right(decode);  // whose keys are split
    decode.attention.s_q = 0;
    expect_right(decode);
  }
}

/// By four warps with two buffers of rows, and by eight with one.
TEST_F(GpuStatistics, OfColumnsByEitherBlock) {
  for (const char* const text : {"row_buffers=1", "row_buffers=2"}) {
    for (const std::int64_t d : {64, 192, 256}) {
      for (const bool causal : {false, true}) {
        StatisticsCase c{
            text, attention_of(DType::bf16, {2, 4, 2, 1333, 717, d, d}, causal), {}, {"column_sums", text}};
        c.config.statistics.column_sums = ColumnSums::kv_heads;
        expect_right(c);
        c.config.statistics.column_sums = ColumnSums::query_heads;
        c.config.score = ScoreFunction{"score * 0.5"};
        c.config.mask = MaskFunction{"(q + kv) % 3 != 0"};
        expect_right(c);
      }
    }
  }
}

class GpuStatisticsGradients : public test::GpuTest {
 protected:
  static void expect_right(const StatisticsGradientCase& c) {
    SCOPED_TRACE(c.of.name + " " + to_string(c.of.attention));
    const StatisticsGradientData data(c);
    AttentionConfig config = data.forward.variant.config;
    if (!c.kernel.kernel.empty()) config.kernel_backward = c.kernel;
    const Attention attention = Attention::create(config);
    const StatisticsGradientResults expected = test::expected_of(c, data);
    std::optional<StatisticsGradientResults> first;
    for (int run = 0; run < (config.deterministic ? 2 : 1); ++run) {
      StatisticsGradientResults results(c, data);
      Copies copies;
      const test::StatisticsMemory memory = copies.memory();
      attention.backward(test::inputs_of(c, data, memory), test::outputs_of(c, data, results, memory));
      driver::check(driver::api().cuCtxSynchronize(), "cuCtxSynchronize");
      copies.fetch();
      EXPECT_LE(test::error_of(c, results, expected), 1);
      if (first) {
        EXPECT_EQ(results.dq.bytes(), first->dq.bytes());
        EXPECT_EQ(results.dk.bytes(), first->dk.bytes());
        EXPECT_EQ(results.dv.bytes(), first->dv.bytes());
      }
      first = std::move(results);
    }
  }

  static AttentionConfig asks(MaxLogit max_logit, bool deterministic) {
    AttentionConfig config;
    config.statistics = {.max_logit = max_logit, .entropy = true, .entropy_gradient = true, .max_logit_gradient = true};
    config.deterministic = deterministic;
    return config;
  }
};

TEST_F(GpuStatisticsGradients, OfSmallCalls) {
  for (StatisticsGradientCase c : test::statistics_gradient_cases()) {
    expect_right(c);
    c.kernel = {};
    expect_right(c);
  }
}

TEST_F(GpuStatisticsGradients, OfEveryDtypeAndHeadDim) {
  for (const bool deterministic : {false, true}) {
    for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
      for (const std::int64_t d : {64, 96, 128, 192, 256}) {
        for (const bool causal : {false, true}) {
          expect_right({{"plain", attention_of(dtype, {2, 4, 2, 333, 517, d, d}, causal),
                         asks(MaxLogit::softmax, deterministic)}});
        }
      }
    }
  }
}

TEST_F(GpuStatisticsGradients, OfHeads) {
  for (const bool deterministic : {false, true}) {
    for (const std::int64_t d : {64, 128, 256}) {
      StatisticsGradientCase c{
          {"heads", attention_of(DType::f16, {3, 4, 2, 700, 517, d, d}, true), asks(MaxLogit::softmax, deterministic)}};
      c.of.config.statistics.max_logit_by_head = true;
      expect_right(c);
      c.of.attention = attention_of(DType::f16, {1, 4, 2, 900, 1000, d, d}, true);
      c.of.cu_q = {5, 300, 300, 431, 890};
      c.of.cu_kv = {0, 420, 440, 440, 1000};
      c.of.config.varlen = true;
      expect_right(c);
    }
  }
}

TEST_F(GpuStatisticsGradients, OfFunctionsMasksWindowsAndSinks) {
  for (const bool deterministic : {false, true}) {
    for (const std::int64_t d : {64, 128}) {
      for (const test::VariantChoice& choice : test::variant_choices()) {
        // Gradients of captures may be sums in any order, which deterministic calls refuse.
        if (deterministic && std::ranges::any_of(choice.config.score.captures, &Capture::requires_grad)) continue;
        // A fast tanh may change which of two near logits is the greater.
        StatisticsGradientCase c{
            {choice.name, attention_of(DType::f16, {2, 4, 2, 200, 333, d, d}, true), choice.config}};
        c.of.config.statistics = asks(MaxLogit::scaled, deterministic).statistics;
        c.of.config.deterministic = deterministic;
        expect_right(c);
      }
    }
  }
}

TEST_F(GpuStatisticsGradients, OfPackedBatchesAndDropout) {
  for (const bool deterministic : {false, true}) {
    for (const std::int64_t d : {64, 128}) {
      StatisticsGradientCase packed{{"packed", attention_of(DType::f16, {1, 4, 2, 900, 1000, d, d}, true),
                                     asks(MaxLogit::softmax, deterministic)}};
      packed.of.cu_q = {5, 300, 300, 431, 890};
      packed.of.cu_kv = {0, 420, 440, 440, 1000};
      packed.of.config.varlen = true;
      expect_right(packed);
      StatisticsGradientCase drops{{"dropout", attention_of(DType::f16, {2, 4, 2, 200, 333, d, d}, true),
                                    asks(MaxLogit::softmax, deterministic)}};
      drops.of.config.dropout = 0.25F;
      expect_right(drops);
    }
  }
}

TEST_F(GpuStatistics, TopKeys) {
  for (const ColumnSums sums : {ColumnSums::query_heads, ColumnSums::kv_heads}) {
    for (const bool without_sums : {false, true}) {
      for (const int count : {1, 20, 700, 1024}) {
        AttentionConfig config;
        config.statistics = {MaxLogit::none, false, false, sums, count};
        const auto of = [&](const char* name, const AttentionCase& attention) {
          StatisticsCase c{name, attention, config};
          c.without_sums = without_sums;
          return c;
        };
        for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
          expect_right(of("top_keys", attention_of(dtype, {2, 4, 2, 333, 517, 64, 64}, true)));
        }
        expect_right(of("decode", attention_of(DType::bf16, {2, 8, 2, 1, 3000, 128, 128}, true)));
        expect_right(of("no_rows", attention_of(DType::bf16, {2, 8, 2, 0, 300, 128, 128}, true)));
        expect_right(of("no_keys", attention_of(DType::bf16, {2, 8, 2, 9, 0, 128, 128}, false)));
        StatisticsCase packed = of("packed", attention_of(DType::bf16, {1, 4, 2, 900, 6000, 128, 128}, true));
        packed.cu_q = {5, 300, 300, 431, 890};
        packed.cu_kv = {0, 420, 440, 440, 6000};
        packed.config.varlen = true;
        expect_right(packed);
      }
    }
  }
}

/// Of long rows, exactly by the sums that the call has left.
TEST_F(GpuStatistics, TopKeysOfLongRowsAreThoseOfASort) {
  // Of usual sums, of sums that are all equal (a score of 0), and of sums in a few steps.
  for (const char* const score : {"", "score * 0.0", "score * 0.0 + float(kv % 5)"}) {
    for (const std::int64_t s_kv : {2048, 2049, 131075}) {
      StatisticsCase c{"long", attention_of(DType::bf16, {2, 4, 2, 17, s_kv, 64, 64}, false), {}};
      c.config.statistics = {MaxLogit::none, false, false, ColumnSums::query_heads, 1024};
      if (*score != 0) c.config.score = ScoreFunction{score};
      SCOPED_TRACE(c.config.score.expression + " " + to_string(c.attention));
      const StatisticsData data(c);
      StatisticsResults results(c);
      Copies copies;
      const test::StatisticsMemory memory = copies.memory();
      Attention::create(data.variant.config)
          .forward(test::inputs_of(c, data, memory), test::outputs_of(c, results, memory));
      driver::check(driver::api().cuCtxSynchronize(), "cuCtxSynchronize");
      copies.fetch();
      for (std::size_t row = 0; row < 2 * 4; ++row) {
        const float* const sums = results.column_sums.data() + row * static_cast<std::size_t>(s_kv);
        std::vector<std::int32_t> order(static_cast<std::size_t>(s_kv));
        std::iota(order.begin(), order.end(), 0);
        std::ranges::stable_sort(order, [&](std::int32_t i, std::int32_t j) { return sums[i] > sums[j]; });
        order.resize(1024);
        const auto first = results.top_keys.begin() + static_cast<std::ptrdiff_t>(1024 * row);
        EXPECT_TRUE(std::equal(order.begin(), order.end(), first)) << "row " << row;
      }
    }
  }
}

}  // namespace
}  // namespace fa
