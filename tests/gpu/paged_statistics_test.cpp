// Column sums and top keys of requests over a KV cache on the GPU against float64.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "device_case.hpp"
#include "gpu/paged_case.hpp"

namespace fa {
namespace {

using test::DeviceBuffer;
using test::DevicePaged;
using test::PagedCase;
using test::PagedSums;

class GpuPagedStatistics : public test::GpuTest {
 protected:
  /// Prefills, chunks of them, drafts and decodes; requests without rows, without keys, and of more rows than keys.
  static PagedCase requests(DType dtype, std::int64_t d, bool packed) {
    PagedCase c;
    c.attention.dtype = dtype;
    c.attention.d_qk = c.attention.d_v = d;
    c.attention.h_q = 4;
    c.attention.h_kv = 2;
    c.attention.causal = true;
    c.packed = packed;
    c.bounded = true;
    c.keys = {317, 1030, 5, 0, 64, 700};
    c.rows = packed ? std::vector<std::int32_t>{317, 200, 9, 1, 0, 1} : std::vector<std::int32_t>(6, 40);
    c.variant.config.statistics.column_sums = ColumnSums::kv_heads;
    return c;
  }

  static PagedCase begun(PagedCase c) {
    c.begin = {0, 500, 4, 0, 9, 699};
    c.attention.layout = test::Layout::bshd;
    c.indexed = true;
    return c;
  }

  /// Twice, with equal bits.
  static void expect_right(const PagedCase& c, bool without_sums = false) {
    SCOPED_TRACE(testing::PrintToString(c));
    const test::PagedData data = make_data(c);
    PagedSums expected(c, data), first = expected;
    reference_f64(c, data, &expected);
    for (int run = 0; run < 2; ++run) {
      const DevicePaged device(c, data);
      PagedSums actual(c, data);
      run_once(c, device, without_sums, actual);
      EXPECT_LE(error_of(c, actual, expected, without_sums), 1);
      if (run == 1) {
        EXPECT_EQ(actual.top_keys, first.top_keys);
      }
      if (run == 1 && !without_sums) {
        EXPECT_EQ(actual.sums, first.sums);
      }
      first = std::move(actual);
    }
  }

  static void run_once(const PagedCase& c, const DevicePaged& device, bool without_sums, PagedSums& to) {
    std::vector<float> nans(to.sums.size(), std::numeric_limits<float>::quiet_NaN());
    const DeviceBuffer sums(bytes_of_vector(nans)), keys(bytes_of_vector(to.top_keys));
    ForwardOutputs outputs = device.outputs();
    if (!without_sums) {
      outputs.statistics.column_sums = TensorView(sums.data(), DType::f32, {to.b, to.heads, to.s_kv});
    }
    const std::int64_t count = c.variant.config.statistics.top_keys;
    if (count > 0) outputs.statistics.top_keys = TensorView(keys.data(), DType::i32, {to.b, to.heads, count});
    Attention::create(config_of(c)).forward(device.inputs(), outputs);
    device.expect_forward();
    read(sums, nans);
    std::ranges::copy(nans, to.sums.begin());
    read(keys, to.top_keys);
  }

 private:
  template <class T>
  static std::vector<std::byte> bytes_of_vector(const std::vector<T>& values) {
    std::vector<std::byte> bytes(values.size() * sizeof(T));
    if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
    return bytes;
  }
  template <class T>
  static void read(const DeviceBuffer& buffer, std::vector<T>& values) {
    EXPECT_TRUE(buffer.guards_intact());
    const std::vector<std::byte> bytes = buffer.read();
    if (!bytes.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  }
};

TEST_F(GpuPagedStatistics, OfPagesOfEverySize) {
  int count = 0;
  for (const std::int64_t page : {std::int64_t{1}, std::int64_t{3}, std::int64_t{16}, std::int64_t{256}, kContiguous}) {
    for (const bool packed : {false, true}) {
      for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
        constexpr std::int64_t kHeadDims[] = {64, 128, 256};
        PagedCase c = requests(dtype, kHeadDims[(count + count / 3) % 3], packed);
        ++count;
        c.page_size = page;
        expect_right(c);
        expect_right(begun(c));
      }
    }
  }
}

TEST_F(GpuPagedStatistics, OfWideHeadsAndOneBufferOfRows) {
  for (const std::int64_t d : {192, 256, 512}) {
    PagedCase c = begun(requests(DType::bf16, d, true));
    c.variant.config.statistics.column_sums = ColumnSums::query_heads;
    expect_right(c);
    if (d > 256) continue;
    c.variant.config.kernel = KernelOverride{"column_sums", "row_buffers=1"};
    expect_right(c);
  }
}

TEST_F(GpuPagedStatistics, OfFunctionsMasksWindowsAndSinks) {
  for (const std::int64_t page : {std::int64_t{16}, kContiguous}) {
    for (const test::VariantChoice& choice : test::variant_choices(false)) {
      PagedCase c = begun(requests(DType::bf16, 128, true));
      c.page_size = page;
      const Statistics wanted = c.variant.config.statistics;
      c.variant = choice;
      c.variant.config.statistics = wanted;
      expect_right(c);
    }
  }
}

TEST_F(GpuPagedStatistics, OfCachesOf8And4Bits) {
  const std::pair<std::optional<DType>, std::optional<DType>> kinds[] = {
      {DType::e4m3, DType::e4m3}, {DType::i8, DType::i8},     {DType::e4m3, std::nullopt},
      {std::nullopt, DType::i8},  {DType::u4x2, DType::u4x2}, {DType::u4x2, DType::e4m3}};
  for (const auto& [k, v] : kinds) {
    for (const std::int64_t d : {64, 128, 256}) {
      PagedCase c = begun(requests(d == 128 ? DType::f16 : DType::bf16, d, true));
      c.k_dtype = k;
      c.v_dtype = v;
      c.group_size = k == DType::u4x2 ? 64 : 0;
      c.page_size = d == 256 ? kContiguous : 16;
      expect_right(c);
    }
  }
}

TEST_F(GpuPagedStatistics, OfLatentAttention) {
  for (const std::optional<DType> k : {std::optional<DType>(), std::optional(DType::e4m3)}) {
    PagedCase c = begun(requests(DType::bf16, 576, true));
    c.attention.d_v = 512;
    c.attention.h_kv = 1;
    c.value_in_key = true;
    c.k_dtype = k;
    expect_right(c);
  }
}

TEST_F(GpuPagedStatistics, TopKeysWithTheirSumsAndAlone) {
  for (const bool without_sums : {false, true}) {
    for (const int count : {1, 20, 700, 1024}) {
      for (const bool packed : {false, true}) {
        PagedCase c = begun(requests(DType::bf16, 64, packed));
        c.variant.config.statistics.top_keys = count;
        expect_right(c, without_sums);
        c.page_size = kContiguous;
        c.begin.clear();
        expect_right(c, without_sums);
      }
    }
  }
}

}  // namespace
}  // namespace fa
