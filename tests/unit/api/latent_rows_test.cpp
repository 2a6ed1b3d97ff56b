// Latent rows of a cache on the host: 512 codes of e4m3, 4 scales and 64 columns of bf16, beside the same numbers in
// rows of bf16.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include <fa/attention.hpp>

#include "expect_error.hpp"
#include "expect_location.hpp"
#include "support/append_case.hpp"
#include "support/paged_case.hpp"

namespace fa {
namespace {

using test::expect_invalid;

test::PagedCase latent() {
  test::PagedCase c;
  c.attention = {.h_q = 4, .h_kv = 1, .d_qk = 576, .d_v = 512, .causal = true, .layout = test::Layout::bshd};
  c.page_size = 4;
  c.value_in_key = true;
  c.k_dtype = DType::e4m3;
  c.rows = {1, 1, 1};
  c.keys = {9, 1, 30};
  return c;
}

ForwardInputs inputs_of(const test::PagedData& data, const TensorView& k) {
  ForwardInputs in;
  in.q = data.q.view();
  in.k = k;
  in.sequences = data.sequences();
  in.cache = data.cache();
  return in;
}

TEST(LatentRows, StandForRowsOfBf16) {
  for (const bool packed : {false, true}) {
    test::PagedCase c = latent();
    c.packed = packed;
    if (packed) c.rows = {3, 1, 2};
    const test::PagedData data = make_data(c);
    EXPECT_EQ(data.k.view().shape[3], 656);
    AttentionConfig config = variant_of(c).config;
    test::AttentionOutputs stored = make_outputs(c, data), wide = make_outputs(c, data);
    Attention::create(config, Device::host())
        .forward(inputs_of(data, data.k.view()), {stored.o.view(), stored.lse.view()});
    config.k_dtype.reset();
    Attention::create(config, Device::host())
        .forward(inputs_of(data, data.wide_k.view()), {wide.o.view(), wide.lse.view()});
    EXPECT_EQ(stored.o.bytes(), wide.o.bytes());
    EXPECT_EQ(stored.lse.bytes(), wide.lse.bytes());
  }
}

/// By the first column that it scales.
TEST(LatentRows, AScaleThatIsNanIsNamedByItsColumn) {
  const test::PagedCase c = latent();
  test::PagedData data = make_data(c);
  test::AttentionOutputs out = make_outputs(c, data);
  AttentionConfig config = variant_of(c).config;
  config.debug = true;
  const auto run = [&] {
    return test::location_of([&] {
      Attention::create(config, Device::host()).forward(inputs_of(data, data.k.view()), {out.o.view(), out.lse.view()});
    });
  };
  EXPECT_FALSE(run());
  constexpr std::int64_t kKey = 22, kRequest = 2;
  const TensorView table = data.cache().block_table, k = data.k.view();
  const std::int64_t page =
      static_cast<const std::int32_t*>(table.data)[kRequest * table.strides[0] + kKey / c.page_size * table.strides[1]];
  const std::int64_t row = page * k.strides[0] + kKey % c.page_size * k.strides[2];
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::memcpy(data.k.bytes().data() + row + 512 + 2 * sizeof nan, &nan, sizeof nan);
  test::expect_at(run(), "k", {.b = kRequest, .h = 0, .kv = kKey, .d = 256}, "o");
}

TEST(LatentRows, AreOfOneSize) {
  const test::PagedCase c = latent();
  const test::PagedData data = make_data(c);
  test::AttentionOutputs out = make_outputs(c, data);
  const AttentionConfig config = variant_of(c).config;
  const Attention attention = Attention::create(config, Device::host());
  ForwardInputs in = inputs_of(data, data.k.view());
  in.k.shape[3] = 576;
  expect_invalid("k", [&] { attention.forward(in, {out.o.view(), out.lse.view()}); });
  in.k.shape[3] = 656;
  std::vector<float> scales(static_cast<std::size_t>(data.k.view().shape[0] * c.page_size), 1.f);
  in.k_scale = TensorView(scales.data(), DType::f32, {data.k.view().shape[0], 1, c.page_size});
  expect_invalid("k_scale", [&] { attention.forward(in, {out.o.view(), out.lse.view()}); });
}

TEST(LatentRows, AreRefusedElsewhere) {
  const auto expect = [](const char* argument, const auto& change) {
    AttentionConfig config = variant_of(latent()).config;
    change(config);
    expect_invalid(argument, [&] { Attention::create(config, Device::host()); });
  };
  expect("k_dtype", [](AttentionConfig& c) { c.k_dtype = DType::i8; });
  expect("k_dtype", [](AttentionConfig& c) { c.value_in_key = 256, c.head_dim_v = 0; });
  expect("k_dtype", [](AttentionConfig& c) { c.head_dim = 520; });
  expect("k_dtype", [](AttentionConfig& c) { c.page_size = 0; });
  AttentionConfig contiguous = variant_of(latent()).config;
  contiguous.page_size = kContiguous;
  EXPECT_NO_THROW(Attention::create(contiguous, Device::host()));
  expect("k_dtype", [](AttentionConfig& c) { c.dtype = DType::f32; });
  expect("k_dtype", [](AttentionConfig& c) { c.v_dtype = DType::e4m3; });
}

test::AppendCase append_case() {
  test::AppendCase c;
  c.latent = true;
  c.k_dtype = DType::e4m3;
  c.d_qk = 576;
  c.d_v = 512;
  c.h_kv = 1;
  c.h_q = 4;
  c.rotary_dims = 64;
  c.rows = {3, 1};
  c.before = {5, 0};
  return c;
}

TEST(LatentRows, AreAppended) {
  for (const std::int64_t page_size : {0, 1, 16}) {
    for (const bool given : {false, true}) {
      test::AppendCase c = append_case();
      c.page_size = page_size;
      c.scales_given = given;
      test::AppendData data(c);
      const test::AppendData before = data;
      Attention::create(c.config(), Device::host()).append(data.inputs());
      std::array<std::vector<std::byte>, test::kAppendParts> after;
      for (std::size_t i = 0; i < test::kAppendParts; ++i) after[i] = data.buffers()[i].bytes;
      EXPECT_EQ(before.judge(after), "");
      std::vector<std::byte>& rows = after[static_cast<std::size_t>(test::AppendPart::k_cache)];
      int wrong = 0, bytes = 0;
      before.for_each_row(test::AppendPart::k_cache, [&](std::size_t at, std::size_t count) {
        for (std::size_t i = at + 1; i < at + count; i += 53, ++bytes) {
          rows[i] ^= std::byte{0x41};
          wrong += before.judge(after).empty() ? 0 : 1;
          rows[i] ^= std::byte{0x41};
        }
      });
      EXPECT_EQ(wrong, bytes);
    }
  }
}

// What forward reads of appended rows is what was appended, within the rounding of codes.
TEST(LatentRows, AreReadAsTheyAreAppended) {
  test::AppendCase c = append_case();
  c.rotary_dims = 0;
  c.h_q = 0;
  c.rows = {20};
  c.before = {0};
  c.packed = false;
  test::AppendData data(c);
  const AppendInputs fresh = data.inputs();
  const Attention attention = Attention::create(c.config(), Device::host());
  attention.append(fresh);
  constexpr test::Layout kRows = test::Layout::bhsd;
  test::HostTensor q(DType::bf16, 1, 2, 1, 576, kRows), o(DType::bf16, 1, 2, 1, 512, kRows);
  test::HostTensor wide(DType::bf16, 1, 2, 1, 512, kRows);
  for (std::int64_t i = 0; i < 2 * 576; ++i) q.set(0, i / 576, 0, i % 576, static_cast<double>(i * 37 % 101) / 50 - 1);
  ForwardInputs in;
  in.q = q.view();
  in.k = fresh.k_cache;
  in.sequences.seqused_kv = fresh.seqused_kv;
  in.cache = fresh.cache;
  attention.forward(in, {o.view()});
  AttentionConfig plain = c.config();
  plain.k_dtype.reset();
  plain.page_size = 0;
  ForwardInputs of_plain;
  of_plain.q = q.view();
  of_plain.k = fresh.k;
  Attention::create(plain, Device::host()).forward(of_plain, {wide.view()});
  double worst = 0;
  for (std::int64_t i = 0; i < 2 * 512; ++i) {
    worst = std::max(worst, std::abs(o.at(0, i / 512, 0, i % 512) - wide.at(0, i / 512, 0, i % 512)));
  }
  EXPECT_GT(worst, 0);
  EXPECT_LE(worst, 0.3);  // of numbers up to 2
}

TEST(LatentRows, AppendsThatAreRefused) {
  const auto expect = [](const char* argument, const auto& change) {
    test::AppendCase c = append_case();
    test::AppendData data(c);
    AppendInputs inputs = data.inputs();
    AttentionConfig config = c.config();
    change(config, inputs);
    const Attention attention = Attention::create(config, Device::host());
    expect_invalid(argument, [&] { attention.append(inputs); });
  };
  expect("v", [](AttentionConfig&, AppendInputs& in) { in.v = in.k; });
  expect("v_cache", [](AttentionConfig&, AppendInputs& in) { in.v_cache = in.k_cache; });
  expect("k_cache", [](AttentionConfig&, AppendInputs& in) { in.k_cache.shape[3] = 576; });
  expect("k_scale", [](AttentionConfig&, AppendInputs& in) { in.k_scale = in.q; });
  expect("rotary.dims", [](AttentionConfig&, AppendInputs& in) { in.rotary.dims = 66; });
  AttentionConfig wide = append_case().config();
  wide.k_dtype.reset();
  EXPECT_THROW(Attention::create(wide, Device::host()).prepare_append({}), Error);
}

}  // namespace
}  // namespace fa
