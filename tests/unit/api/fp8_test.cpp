// Calls of 8-bit floats on the host device: what is refused, and what scales mean.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include <fa/attention.hpp>

#include "expect_error.hpp"
#include "reference/convert.hpp"
#include "support/attention_case.hpp"
#include "support/paged_case.hpp"

namespace fa::test {
namespace {

AttentionConfig config_of(DType dtype) {
  AttentionConfig config;
  config.head_dim = 32;
  config.dtype = dtype;
  return config;
}

void create(const AttentionConfig& config) {
  Attention::create(config, Device::host());
}

TEST(Fp8, ConfigurationsThatHaveNoMeaningAreRefused) {
  for (const DType dtype : {DType::e4m3, DType::e5m2}) {
    EXPECT_NO_THROW(create(config_of(dtype)));
    const auto refused = [&](const char* argument, auto change) {
      AttentionConfig config = config_of(dtype);
      change(config);
      expect_invalid(argument, [&] { create(config); });
    };
    refused("head_dim", [](AttentionConfig& c) { c.head_dim = 24; });
    refused("head_dim", [](AttentionConfig& c) { c.head_dim = 272; });
    refused("head_dim_v", [](AttentionConfig& c) { c.head_dim_v = 40; });
    refused("o_dtype", [](AttentionConfig& c) { c.o_dtype = DType::f32; });
    refused("o_dtype", [](AttentionConfig& c) { c.o_dtype = DType::e5m2; });
    refused("zero_padding", [](AttentionConfig& c) {
      c.o_dtype = DType::e4m3;
      c.varlen = c.zero_padding = true;
    });
    refused("k_dtype", [](AttentionConfig& c) { c.k_dtype = DType::e4m3; });
    refused("v_dtype", [](AttentionConfig& c) { c.v_dtype = DType::i8; });
    refused("dropout", [](AttentionConfig& c) { c.dropout = 0.5f; });
    refused("accumulate", [](AttentionConfig& c) { c.accumulate = true; });
    refused("value_in_key", [](AttentionConfig& c) { c.value_in_key = 16; });
    refused("invariance", [](AttentionConfig& c) { c.invariance = Invariance::batch; });
  }
  for (const DType dtype : {DType::u4x2, DType::i32}) expect_invalid("dtype", [&] { create(config_of(dtype)); });
  AttentionConfig plain = config_of(DType::bf16);
  plain.key_scales = true;
  expect_invalid("key_scales", [&] { create(plain); });
  plain.key_scales = false;
  plain.value_scales = true;
  expect_invalid("value_scales", [&] { create(plain); });
  plain.value_scales = false;
  plain.precise = true;
  expect_invalid("precise", [&] { create(plain); });
  plain.precise = false;
  plain.o_dtype = DType::bf16;
  expect_invalid("o_dtype", [&] { create(plain); });
}

/// A call of b 2, h_q 4, h_kv 2 and its scales.
struct Call {
  explicit Call(DType dtype, DType o_dtype = DType::bf16) {
    c = {.b = 2, .h_q = 4, .h_kv = 2, .s_q = 5, .s_kv = 9, .d_qk = 32, .d_v = 32, .dtype = dtype, .o_dtype = o_dtype};
    inputs = make_inputs(c);
    add_scales(c, inputs);
    outputs = make_outputs(c);
    in.q = std::as_const(inputs.q).view();
    in.k = std::as_const(inputs.k).view();
    in.v = std::as_const(inputs.v).view();
    in.q_scale = std::as_const(inputs.q_scale).view();
    in.k_scale = std::as_const(inputs.k_scale).view();
    in.v_scale = std::as_const(inputs.v_scale).view();
    in.k_scale.rank = in.v_scale.rank = 2;
  }
  void run() {
    AttentionConfig config = config_of(c.dtype);
    config.o_dtype = c.o_dtype;
    config.key_scales = key_scales;
    config.value_scales = value_scales;
    config.precise = precise;
    Attention::create(config, Device::host()).forward(in, {outputs.o.view(), outputs.lse.view()});
  }

  AttentionCase c;
  AttentionInputs inputs;
  AttentionOutputs outputs;
  ForwardInputs in;
  bool key_scales = false, value_scales = false, precise = false;
};

/// By the formula, in double.
double expected_o(const Call& call, std::int64_t b, std::int64_t h, std::int64_t s, std::int64_t column, double* lse) {
  const AttentionInputs& inputs = call.inputs;
  const std::int64_t kv = h / 2;
  double sum = 0, weighted = 0;
  for (std::int64_t j = 0; j < call.c.s_kv; ++j) {
    double score = 0;
    for (std::int64_t d = 0; d < 32; ++d) score += inputs.q.at(b, h, s, d) * inputs.k.at(b, kv, j, d);
    score *= inputs.q_scale.at(b, h, s) * inputs.k_scale.at(b, kv, call.key_scales ? j : 0) / std::sqrt(32.0);
    sum += std::exp(score);
    weighted += std::exp(score) * inputs.v.at(b, kv, j, column) * inputs.v_scale.at(b, kv, call.value_scales ? j : 0);
  }
  *lse = std::log(sum);
  return weighted / sum;
}

TEST(Fp8, ScalesMultiplyRowsOfQAndHeadsOfKAndV) {
  for (const DType dtype : {DType::e4m3, DType::e5m2}) {
    for (const DType o_dtype : {DType::bf16, DType::f16}) {
      Call call(dtype, o_dtype);
      call.run();
      for (std::int64_t b = 0; b < 2; ++b) {
        for (std::int64_t h = 0; h < 4; ++h) {
          for (std::int64_t s = 0; s < 5; ++s) {
            double lse = 0;
            const double o = expected_o(call, b, h, s, 7, &lse);
            EXPECT_NEAR(call.outputs.o.at(b, h, s, 7), o, std::abs(o) / 128 + 1e-5);
            EXPECT_NEAR(call.outputs.lse.at(b, h, s), lse, 1e-5);
          }
        }
      }
    }
  }
}

ForwardInputs inputs_of(const PagedCase& c, const PagedData& data) {
  ForwardInputs in{data.q.view(), data.k.view(), data.v.view()};
  in.sequences = data.sequences();
  in.cache = data.cache();
  in.q_scale = data.q_scale.view();
  if (c.packed) in.q_scale = {in.q_scale.data, DType::f32, {in.q_scale.shape[1], in.q_scale.shape[2]}};
  in.k_scale = data.k_scale.view();
  in.v_scale = data.v_scale.view();
  if (!c.key_scales) in.k_scale.rank = 2;
  if (!c.value_scales) in.v_scale.rank = 2;
  return in;
}

// Over pages of any size a request is what it is alone, in tensors of its own.
TEST(Fp8, PagesAreReadAsRows) {
  for (const std::int64_t page_size : {std::int64_t{1}, std::int64_t{4}, std::int64_t{16}, kContiguous}) {
    for (const bool of_keys : {false, true}) {
      PagedCase c;
      c.attention = {.h_q = 4, .h_kv = 2, .d_qk = 32, .d_v = 48, .dtype = DType::e4m3, .causal = true};
      c.attention.o_dtype = DType::f16;
      c.page_size = page_size;
      c.packed = of_keys;
      c.indexed = !of_keys;
      c.scaled = true;
      c.key_scales = c.value_scales = of_keys;
      c.keys = {9, 1, 30, 0};
      c.rows = {2, 2, 2, 2};
      const PagedData data = make_data(c);
      AttentionOutputs out = make_outputs(c, data);
      AttentionConfig config = variant_of(c).config;
      config.o_dtype = DType::f16;
      Attention::create(config, Device::host()).forward(inputs_of(c, data), {out.o.view(), out.lse.view()});
      const std::int64_t b = 2, key_count = 30;
      AttentionCase alone = c.attention;
      alone.s_q = 2;
      alone.s_kv = key_count;
      AttentionInputs inputs = make_inputs(alone);
      add_scales(alone, inputs);
      if (of_keys) add_key_scales(alone, inputs), add_value_scales(alone, inputs);
      const std::int64_t row = data.batch_index.empty() ? b : data.batch_index[b];
      const std::int64_t first = c.packed ? data.cu_q[b] : 0, entry = c.packed ? 0 : b;
      for (std::int64_t h = 0; h < 4; ++h) {
        for (std::int64_t s = 0; s < 2; ++s) {
          inputs.q_scale.set(0, h, s, 0, data.q_scale.at(entry, h, first + s));
          for (std::int64_t d = 0; d < 32; ++d) inputs.q.set(0, h, s, d, data.q.at(entry, h, first + s, d));
        }
      }
      for (std::int64_t h = 0; h < 2; ++h) {
        for (std::int64_t j = 0; j < key_count; ++j) {
          const std::int64_t page = data.contiguous ? row : data.table[row * data.max_pages + j / page_size];
          const std::int64_t at = data.contiguous ? j : j % page_size;
          for (std::int64_t d = 0; d < 32; ++d) inputs.k.set(0, h, j, d, data.k.at(page, h, at, d));
          for (std::int64_t d = 0; d < 48; ++d) inputs.v.set(0, h, j, d, data.v.at(page, h, at, d));
          if (of_keys) inputs.k_scale.set(0, h, j, 0, data.k_scale.at(page, h, at));
          if (of_keys) inputs.v_scale.set(0, h, j, 0, data.v_scale.at(page, h, at));
        }
        if (!of_keys) inputs.k_scale.set(0, h, 0, 0, data.k_scale.at(b, h, 0));
        if (!of_keys) inputs.v_scale.set(0, h, 0, 0, data.v_scale.at(b, h, 0));
      }
      const AttentionOutputs expected = reference_f64(alone, inputs);
      for (std::int64_t i = 0; i < 4 * 2 * 48; ++i) {
        const std::int64_t h = i / 96, s = i / 48 % 2;
        const double o = expected.o.at(0, h, s, i % 48);
        EXPECT_NEAR(out.o.at(entry, h, first + s, i % 48), o, std::abs(o) / 1024 + 1e-5);
      }
    }
  }
}

TEST(Fp8, PagesThatAreRefused) {
  PagedCase c;
  c.attention = {.h_q = 2, .h_kv = 2, .d_qk = 32, .d_v = 32, .dtype = DType::e4m3};
  c.page_size = 8;
  c.scaled = c.key_scales = true;
  c.keys = {9, 20};
  c.rows = {2, 2};
  const PagedData data = make_data(c);
  AttentionOutputs out = make_outputs(c, data);
  const AttentionConfig config = variant_of(c).config;
  const auto expect = [&](const char* argument, const auto& change) {
    ForwardInputs in = inputs_of(c, data);
    change(in);
    expect_invalid(argument, [&] {
      Attention::create(config, Device::host()).forward(in, {out.o.view(), out.lse.view()});
    });
  };
  const std::vector<std::int32_t> begin{0, 3};
  expect("cache.seq_begin", [&](ForwardInputs& in) { in.cache.seq_begin = begin.data(); });
  expect("k_scale", [](ForwardInputs& in) { in.k_scale.rank = 2; });
  expect("k_scale", [](ForwardInputs& in) { in.k_scale.shape[0] = 2; });
  expect("v_scale", [](ForwardInputs& in) { in.v_scale = in.k_scale; });
}

TEST(Fp8, TheHostIsPreciseInAnyCase) {
  Call call(DType::e4m3);
  call.run();
  const std::vector<std::byte> plain(call.outputs.o.bytes().begin(), call.outputs.o.bytes().end());
  call.precise = true;
  call.run();
  EXPECT_TRUE(std::ranges::equal(call.outputs.o.bytes(), plain));
}

TEST(Fp8, KeysHaveScalesOfTheirOwn) {
  Call call(DType::e4m3, DType::f16);
  add_key_scales(call.c, call.inputs);
  call.in.k_scale = std::as_const(call.inputs.k_scale).view();
  expect_invalid("k_scale", [&] { call.run(); });
  call.key_scales = true;
  call.run();
  add_value_scales(call.c, call.inputs);
  call.in.v_scale = std::as_const(call.inputs.v_scale).view();
  expect_invalid("v_scale", [&] { call.run(); });
  call.value_scales = true;
  call.run();
  for (std::int64_t i = 0; i < 2 * 4 * 5; ++i) {
    const std::int64_t b = i / 20, h = i / 5 % 4, s = i % 5;
    double lse = 0;
    const double o = expected_o(call, b, h, s, 7, &lse);
    EXPECT_NEAR(call.outputs.o.at(b, h, s, 7), o, std::abs(o) / 1024 + 1e-5);
    EXPECT_NEAR(call.outputs.lse.at(b, h, s), lse, 1e-5);
  }
  const auto refused = [&](auto change) {
    const TensorView scale = call.in.k_scale;
    change(call.in.k_scale);
    expect_invalid("k_scale", [&] { call.run(); });
    call.in.k_scale = scale;
  };
  refused([](TensorView& scale) { scale.shape[2] = 8; });
  refused([](TensorView& scale) { scale.shape[1] = 4; });
  refused([](TensorView& scale) { scale.dtype = DType::bf16; });
  // One scale of a head is one of all of its keys.
  Call heads(DType::e4m3), keys(DType::e4m3);
  keys.key_scales = true;
  heads.run();
  keys.run();
  EXPECT_EQ(heads.outputs.o.bytes(), keys.outputs.o.bytes());
  keys.in.k_scale.rank = 3;
  keys.in.k_scale.shape[2] = 9;
  keys.in.k_scale.strides[2] = 0;
  keys.run();
  EXPECT_EQ(heads.outputs.o.bytes(), keys.outputs.o.bytes());
}

/// Rows that append has stored are keys of a forward of 8-bit floats, bit for bit what a forward over the cache makes.
TEST(Fp8, RowsOfACacheAreKeys) {
  const AttentionCase c{.b = 2, .h_q = 4, .h_kv = 2, .s_q = 5, .s_kv = 9, .d_qk = 32, .d_v = 32, .dtype = DType::bf16};
  const AttentionInputs fresh = make_inputs(c);
  HostTensor k(DType::e4m3, 2, 2, 9, 32, Layout::bhsd), v(DType::e4m3, 2, 2, 9, 32, Layout::bhsd);
  HostTensor k_scale(DType::f32, 2, 2, 9), v_scale(DType::f32, 2, 2, 9);
  AttentionConfig cache = config_of(DType::bf16);
  cache.k_dtype = cache.v_dtype = DType::e4m3;
  const Attention stored = Attention::create(cache, Device::host());
  const std::array<std::int32_t, 2> lengths{9, 9};
  AppendInputs append{fresh.k.view(), fresh.v.view(), k.view(), v.view()};
  append.seqused_kv = lengths.data();
  append.k_scale = k_scale.view();
  append.v_scale = v_scale.view();
  stored.append(append);
  HostTensor q(DType::e4m3, 2, 4, 5, 32, Layout::bhsd), same_q(DType::bf16, 2, 4, 5, 32, Layout::bhsd);
  for (std::int64_t i = 0; i < 2 * 4 * 5 * 32; ++i) {
    const std::int64_t b = i / 640, h = i / 160 % 4, s = i / 32 % 5, d = i % 32;
    q.set(b, h, s, d, fresh.q.at(b, h, s, d));
    same_q.set(b, h, s, d, q.at(b, h, s, d));
  }
  AttentionOutputs of_bytes = make_outputs(c), of_cache = make_outputs(c);
  const auto run = [&](const Attention& attention, const HostTensor& from, AttentionOutputs& to) {
    ForwardInputs in{from.view(), k.view(), v.view()};
    in.k_scale = k_scale.view();
    in.v_scale = v_scale.view();
    attention.forward(in, {to.o.view(), to.lse.view()});
  };
  AttentionConfig bytes = config_of(DType::e4m3);
  bytes.key_scales = bytes.value_scales = true;
  run(Attention::create(bytes, Device::host()), q, of_bytes);
  run(stored, same_q, of_cache);
  EXPECT_EQ(of_bytes.o.bytes(), of_cache.o.bytes());
  EXPECT_EQ(of_bytes.lse.bytes(), of_cache.lse.bytes());
}

TEST(Fp8, OutputsOfBytesAreThoseOfF16Rounded) {
  Call wide(DType::e4m3, DType::f16), bytes(DType::e4m3, DType::e4m3);
  wide.run();
  bytes.run();
  for (std::int64_t i = 0; i < 2 * 4 * 5 * 32; ++i) {
    const std::int64_t b = i / 640, h = i / 160 % 4, s = i / 32 % 5, d = i % 32;
    const double o = wide.outputs.o.at(b, h, s, d);
    EXPECT_NEAR(bytes.outputs.o.at(b, h, s, d), o, std::max(std::abs(o) / 15.5, 0x1p-10)) << i;
  }
  EXPECT_EQ(bytes.outputs.lse.bytes(), wide.outputs.lse.bytes());
  Call nan(DType::e4m3, DType::e4m3);
  nan.inputs.q.bytes()[5] = std::byte{0x7f};
  nan.run();
  EXPECT_EQ(nan.outputs.o.bytes()[3], std::byte{0x7f});
}

/// Bit for bit what calls of the sequences alone give.
void run_packed_batch(bool key_scales) {
  const std::vector<std::int32_t> cu{0, 3, 3, 8}, cu_keys{0, 4, 6, 13};
  AttentionCase c{.b = 1, .h_q = 4, .h_kv = 2, .s_q = 8, .s_kv = 13, .d_qk = 32, .d_v = 32, .dtype = DType::e4m3};
  const AttentionInputs inputs = make_inputs(c);
  AttentionOutputs packed = make_outputs(c), alone = make_outputs(c);
  HostTensor q_scale(DType::f32, 1, 4, 8), k_scale(DType::f32, 3, 2, 1), v_scale(DType::f32, 3, 2, 1);
  AttentionInputs of_keys;
  add_key_scales(c, of_keys);
  add_value_scales(c, of_keys);
  for (std::int64_t i = 0; i < 32; ++i) q_scale.set(0, i / 8, i % 8, 0, 0.5 + static_cast<double>(i) / 16);
  for (std::int64_t i = 0; i < 6; ++i) {
    k_scale.set(i / 2, i % 2, 0, 0, 0.5 - static_cast<double>(i) / 8);
    v_scale.set(i / 2, i % 2, 0, 0, 1 + static_cast<double>(i) / 4);
  }
  const auto total = [](const TensorView& view) {  // [1, h, total, d] as [total, h, d]
    const std::array<std::int64_t, 3> shape{view.shape[2], view.shape[1], view.shape[3]};
    const std::array<std::int64_t, 3> strides{view.strides[2], view.strides[1], view.strides[3]};
    return TensorView(view.data, view.dtype, shape, strides);
  };
  const auto of_heads = [](const HostTensor& scale, std::int64_t sequences) {
    return TensorView(static_cast<const void*>(scale.bytes().data()), DType::f32, {sequences, 2});
  };
  AttentionConfig config = config_of(DType::e4m3);
  config.varlen = true;
  config.key_scales = config.value_scales = key_scales;
  ForwardInputs in{total(inputs.q.view()), total(inputs.k.view()), total(inputs.v.view())};
  in.sequences.b = 3;
  in.sequences.cu_seqlens_q = cu.data();
  in.sequences.cu_seqlens_kv = cu_keys.data();
  in.q_scale = TensorView(static_cast<const void*>(q_scale.bytes().data()), DType::f32, {4, 8});
  in.k_scale = key_scales ? TensorView(static_cast<const void*>(of_keys.k_scale.bytes().data()), DType::f32, {2, 13})
                          : of_heads(k_scale, 3);
  in.v_scale = key_scales ? TensorView(static_cast<const void*>(of_keys.v_scale.bytes().data()), DType::f32, {2, 13})
                          : of_heads(v_scale, 3);
  const ForwardOutputs out{total(packed.o.view()), TensorView(packed.lse.view().data, DType::f32, {4, 8})};
  const Attention attention = Attention::create(config, Device::host());
  attention.forward(in, out);
  for (std::size_t i = 0; i < 3; ++i) {
    const auto rows = [&](TensorView view, const std::vector<std::int32_t>& of) {
      view.data = static_cast<std::byte*>(view.data) + of[i] * view.strides[2] * std::int64_t(size_of(view.dtype));
      view.shape[2] = of[i + 1] - of[i];
      return view;
    };
    if (cu[i] == cu[i + 1]) continue;
    ForwardInputs one{rows(inputs.q.view(), cu), rows(inputs.k.view(), cu_keys), rows(inputs.v.view(), cu_keys)};
    one.q_scale = rows(q_scale.view(), cu);
    const auto head = [&](const HostTensor& scale) {
      return TensorView(static_cast<const void*>(scale.bytes().data() + i * 8), DType::f32, {1, 2});
    };
    one.k_scale = key_scales ? rows(of_keys.k_scale.view(), cu_keys) : head(k_scale);
    one.v_scale = key_scales ? rows(of_keys.v_scale.view(), cu_keys) : head(v_scale);
    AttentionConfig dense = config_of(DType::e4m3);
    dense.key_scales = dense.value_scales = key_scales;
    Attention::create(dense, Device::host()).forward(one, {rows(alone.o.view(), cu), rows(alone.lse.view(), cu)});
  }
  EXPECT_EQ(packed.o.bytes(), alone.o.bytes());
  EXPECT_EQ(packed.lse.bytes(), alone.lse.bytes());
  const auto refused = [&](const char* argument, auto change) {
    ForwardInputs wrong = in;
    change(wrong);
    expect_invalid(argument, [&] { attention.forward(wrong, out); });
  };
  refused("q_scale", [](ForwardInputs& wrong) { wrong.q_scale.shape[1] = 7; });
  refused("q_scale", [](ForwardInputs& wrong) { wrong.q_scale.rank = 1; });
  refused("k_scale", [](ForwardInputs& wrong) { wrong.k_scale.shape[0] = 1; });
  refused("v_scale", [](ForwardInputs& wrong) { wrong.v_scale.dtype = DType::f16; });
}

TEST(Fp8, PackedBatchesAreTheirSequences) {
  run_packed_batch(false);
}

TEST(Fp8, KeysOfPackedBatchesHaveScalesOfTheirOwn) {
  run_packed_batch(true);
}

TEST(Fp8, AScaleOfAHeadIsThatOfItsRows) {
  Call of_rows(DType::e4m3), of_heads(DType::e4m3);
  TensorView head = of_rows.in.q_scale;
  head.strides[2] = 0;
  of_rows.in.q_scale = head;
  head.rank = 2;
  of_heads.in.q_scale = head;
  of_rows.run();
  of_heads.run();
  EXPECT_EQ(of_rows.outputs.o.bytes(), of_heads.outputs.o.bytes());
}

TEST(Fp8, CodesOfNanAreNan) {
  constexpr std::byte kNan{0x7f};  // of both dtypes
  for (const DType dtype : {DType::e4m3, DType::e5m2}) {
    Call clean(dtype), in_q(dtype), in_v(dtype);
    clean.run();
    in_q.inputs.q.bytes()[5] = kNan;  // head 0, row 0 of the first sequence
    in_q.run();
    in_v.inputs.v.bytes()[7] = kNan;  // KV head 0, which heads 0 and 1 read, column 7
    in_v.run();
    for (std::int64_t b = 0; b < 2; ++b) {
      for (std::int64_t h = 0; h < 4; ++h) {
        for (std::int64_t s = 0; s < 5; ++s) {
          const bool of_q = b == 0 && h == 0 && s == 0;
          EXPECT_EQ(std::isnan(in_q.outputs.o.at(b, h, s, 3)), of_q);
          EXPECT_EQ(std::isnan(in_q.outputs.lse.at(b, h, s)), of_q);
          EXPECT_EQ(std::isnan(in_v.outputs.o.at(b, h, s, 7)), b == 0 && h < 2);
          EXPECT_EQ(in_v.outputs.o.at(b, h, s, 8), clean.outputs.o.at(b, h, s, 8));
        }
      }
    }
  }
}

TEST(Fp8, CallsThatDoNotFitAreRefused) {
  const auto refused = [](const char* argument, auto change) {
    Call call(DType::e4m3);
    change(call);
    expect_invalid(argument, [&] { call.run(); });
  };
  refused("q", [](Call& call) { call.in.q.dtype = DType::e5m2; });
  refused("o", [](Call& call) { call.c.o_dtype = DType::f16; });
  refused("q_scale", [](Call& call) { call.in.q_scale.dtype = DType::f16; });
  refused("q_scale", [](Call& call) { call.in.q_scale.shape[2] = 4; });
  refused("q_scale", [](Call& call) { call.in.q_scale.rank = 1; });
  refused("k_scale", [](Call& call) { call.in.k_scale.shape[1] = 4; });
  refused("k_scale", [](Call& call) { call.in.k_scale = call.in.q_scale; });
  refused("v_scale", [](Call& call) { call.in.v_scale.shape[0] = 1; });
  AttentionCase plain{.s_q = 4, .s_kv = 4, .d_qk = 32, .d_v = 32};
  const AttentionInputs inputs = make_inputs(plain);
  AttentionOutputs outputs = make_outputs(plain);
  const HostTensor scale(DType::f32, 1, 1, 4);
  ForwardInputs in{inputs.q.view(), inputs.k.view(), inputs.v.view()};
  in.q_scale = scale.view();
  expect_invalid("q_scale", [&] {
    Attention::create(config_of(DType::bf16), Device::host()).forward(in, {outputs.o.view(), outputs.lse.view()});
  });
}

TEST(Fp8, HasForwardAlone) {
  const Attention attention = Attention::create(config_of(DType::e4m3), Device::host());
  expect_error(ErrorCode::unsupported, "dtype", [&] { attention.prepare_backward({.s_q = 4, .s_kv = 4}); });
  expect_error(ErrorCode::unsupported, "dtype", [&] { attention.append({}); });
  expect_error(ErrorCode::unsupported, "dtype", [&] { attention.merge({}, {}); });
}

TEST(Fp8, CodesOfE5m2) {
  EXPECT_EQ(reference::decode_e5m2(0x7b), 57344.f);
  EXPECT_EQ(reference::decode_e5m2(0x01), std::ldexp(1.f, -16));
  EXPECT_TRUE(std::isnan(reference::decode_e5m2(0x7f)));
  for (int code = 0; code < 256; ++code) {
    const float value = reference::decode_e5m2(static_cast<std::uint8_t>(code));
    if (!std::isfinite(value)) continue;
    EXPECT_EQ(reference::encode_e5m2(static_cast<double>(value)), code);
  }
  EXPECT_EQ(reference::encode_e5m2(1.125), 0x3c) << "ties to even";
  EXPECT_EQ(reference::encode_e5m2(1.375), 0x3e) << "ties to even";
  EXPECT_EQ(reference::encode_e5m2(1e9), 0x7b);
  EXPECT_EQ(reference::encode_e5m2(std::ldexp(3.0, -18)), 0x01);
}

}  // namespace
}  // namespace fa::test
