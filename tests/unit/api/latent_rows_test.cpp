// Latent rows of a cache on the host: 512 codes of e4m3, 4 scales and 64 columns of bf16, beside the same numbers in
// rows of bf16.

#include <gtest/gtest.h>

#include <vector>

#include <fa/attention.hpp>

#include "expect_error.hpp"
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
  expect("k_dtype", [](AttentionConfig& c) { c.dtype = DType::f32; });
  expect("k_dtype", [](AttentionConfig& c) { c.v_dtype = DType::e4m3; });
}

}  // namespace
}  // namespace fa
