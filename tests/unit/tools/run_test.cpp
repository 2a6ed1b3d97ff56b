// `fa run` on the host device, as a shell would call it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "run_command.hpp"
#include "support/attention_case.hpp"
#include "support/paged_case.hpp"
#include "support/variant_case.hpp"
#include "tools/safetensors.hpp"

namespace fa::test {
namespace {

namespace fs = std::filesystem;
using tools::Tensor;

AttentionCase grouped(DType dtype) {
  return {.b = 2, .h_q = 4, .h_kv = 2, .s_q = 37, .s_kv = 70, .d_qk = 16, .d_v = 24, .dtype = dtype, .causal = true};
}

TEST_F(RunCommand, WritesGradientsWhereDoutIsGiven) {
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32, DType::f64}) {
    const AttentionCase c = grouped(dtype);
    const AttentionInputs in = make_inputs(c);
    const HostTensor dout = make_dout(c), dlse = make_dlse(c);
    ASSERT_TRUE(run(
        {{"q", stored(in.q)}, {"k", stored(in.k)}, {"v", stored(in.v)}, {"dout", stored(dout)}, {"dlse", stored(dlse)}},
        "--causal --verify"));
    // O is rounded on its way from forward to backward: twice the roundoff of the result alone.
    const double allowed = dtype == DType::bf16 ? 0x1p-7 : dtype == DType::f16 ? 0x1p-10 : 1e-5;
    const AttentionGradients expected = reference_gradients_f64(c, in, dout.view(), dlse.view());
    expect_written("dq", expected.dq.view(), allowed);
    expect_written("dk", expected.dk.view(), allowed);
    expect_written("dv", expected.dv.view(), allowed);
    expect_written("o", reference_f64(c, in).o.view(), allowed);
  }
}

TEST_F(RunCommand, FunctionsFindTheirTensorsInTheFile) {
  AttentionCase c = grouped(DType::f16);
  AttentionConfig config;
  config.score = functions::compose({"score + offset[kv]", {{"offset", DType::f32, true}}}, functions::softcap(4));
  config.mask = MaskFunction{"doc[q] <= doc[kv]", {{"doc", DType::i32}}};
  config.window_left = 30;
  config.sink = true;
  const VariantCase variant(c, {"", config});
  const AttentionInputs in = make_inputs(c);
  const HostTensor dout = make_dout(c);
  std::map<std::string, Tensor> tensors = {
      {"q", stored(in.q)}, {"k", stored(in.k)}, {"v", stored(in.v)}, {"dout", stored(dout)}};
  for (const NamedTensor& tensor : variant.captures) tensors[tensor.name] = {tensor.dtype, tensor.shape, tensor.bytes};
  tensors["sink"] = {variant.sink.dtype, variant.sink.shape, variant.sink.bytes};
  ASSERT_TRUE(run(tensors,
                  "--causal --verify --score \"score + offset[kv]\" --capture offset:f32:grad --softcap 4 "
                  "--mask \"doc[q] <= doc[kv]\" --window-left 30 --sink"));
  const VariantGradients expected = reference_gradients_f64(variant, in, dout.view());
  expect_written("dq", expected.usual.dq.view(), 0x1p-9);
  expect_written("dv", expected.usual.dv.view(), 0x1p-9);
  const Tensor gradient = tools::SafetensorsFile::open(path("out")).read("doffset");
  EXPECT_EQ(gradient.shape, (std::vector<std::int64_t>{70}));
  EXPECT_TRUE(tools::SafetensorsFile::open(path("out")).contains("dsink"));
  EXPECT_FALSE(run(tensors, "--score \"score + ofset[kv]\""));
  tensors.erase("sink");
  EXPECT_FALSE(run(tensors, "--sink"));
}

TEST_F(RunCommand, WritesNoGradientsWithoutDout) {
  const AttentionInputs in = make_inputs(grouped(DType::f32));
  std::map<std::string, Tensor> tensors = {{"q", stored(in.q)}, {"k", stored(in.k)}, {"v", stored(in.v)}};
  ASSERT_TRUE(run(tensors, "--verify"));
  EXPECT_FALSE(tools::SafetensorsFile::open(path("out")).contains("dq"));
  tensors["dlse"] = stored(make_dlse(grouped(DType::f32)));
  EXPECT_FALSE(run(tensors, "--verify"));
}

TEST_F(RunCommand, ThreeAxesAreOneHead) {
  const AttentionCase c{.b = 3, .s_q = 9, .s_kv = 21, .d_qk = 8, .d_v = 8, .dtype = DType::f32};
  const AttentionInputs in = make_inputs(c);
  const HostTensor dout = make_dout(c);
  ASSERT_TRUE(run({{"q", stored(in.q, false)},
                   {"k", stored(in.k, false)},
                   {"v", stored(in.v, false)},
                   {"dout", stored(dout, false)}},
                  "--verify"));
  AttentionGradients expected = reference_gradients_f64(c, in, dout.view());
  TensorView dk = expected.dk.view();
  dk.rank = 3;
  dk.shape = {3, 21, 8, 0};
  dk.strides = {21 * 8, 8, 1, 0};
  Tensor written = tools::SafetensorsFile::open(path("out")).read("dk");
  ASSERT_EQ(written.shape, (std::vector<std::int64_t>{3, 21, 8}));
  EXPECT_LE(compare(written.view(), dk).max_abs_over_max_ref, 1e-5);
}

/// Three sequences, and rows that belong to none; with dropout. --verify compares with float64 under the same mask.
TEST_F(RunCommand, TakesPackedBatchesAndDropout) {
  const AttentionCase c{
      .h_q = 4, .h_kv = 2, .s_q = 40, .s_kv = 70, .d_qk = 16, .d_v = 24, .dtype = DType::f16, .layout = Layout::bshd};
  const AttentionInputs in = make_inputs(c);
  const auto packed = [](const HostTensor& tensor) {
    const TensorView view = tensor.view();
    return Tensor{view.dtype, {view.shape[2], view.shape[1], view.shape[3]}, tensor.bytes()};
  };
  const std::map<std::string, Tensor> tensors = {
      {"q", packed(in.q)}, {"k", packed(in.k)}, {"v", packed(in.v)}, {"dout", packed(make_dout(c))}};
  ASSERT_TRUE(
      run(tensors, "--causal --verify --lengths 5,0,33 --lengths-kv 9,20,41 --dropout 0.2 --seed 3 --offset 4"));
  Tensor o = tools::SafetensorsFile::open(path("out")).read("o");
  ASSERT_EQ(o.shape, (std::vector<std::int64_t>{40, 4, 24}));
  const auto last = o.bytes.end() - 2 * 4 * 24 * 2;  // two rows of no sequence
  EXPECT_TRUE(std::all_of(last, o.bytes.end(), [](std::byte byte) { return byte == std::byte{0}; }));
  EXPECT_EQ(tools::SafetensorsFile::open(path("out")).read("lse").shape, (std::vector<std::int64_t>{4, 40}));
  const Tensor first = o;
  ASSERT_TRUE(run(tensors, "--causal --lengths 5,0,33 --lengths-kv 9,20,41 --dropout 0.2 --seed 4 --offset 4"));
  EXPECT_NE(tools::SafetensorsFile::open(path("out")).read("o").bytes, first.bytes);
  EXPECT_FALSE(run(tensors, "--lengths 5,36"));  // longer than the tensor
  EXPECT_FALSE(run(tensors, "--lengths 5,3 --lengths-kv 9"));
  EXPECT_FALSE(run(tensors, "--lengths 5 --dropout 1"));
}

/// Every variant that there is, at once: what is written agrees with float64.
TEST_F(RunCommand, TakesAllVariantsTogether) {
  const AttentionCase c{
      .h_q = 4, .h_kv = 2, .s_q = 60, .s_kv = 60, .d_qk = 16, .d_v = 16, .dtype = DType::f32, .layout = Layout::bshd};
  AttentionConfig config;
  config.score = functions::alibi(true);
  config.mask = MaskFunction{"prefix[b] > 0", {{"prefix", DType::i32}}};
  config.sink = true;
  const VariantCase variant(c, {"", config});
  const AttentionInputs in = make_inputs(c);
  const auto packed = [&](const HostTensor& tensor) {  // [total, h, d]
    const TensorView view = tensor.view();
    return Tensor{view.dtype, {view.shape[2], view.shape[1], view.shape[3]}, tensor.bytes()};
  };
  std::map<std::string, Tensor> tensors = {
      {"q", packed(in.q)}, {"k", packed(in.k)}, {"v", packed(in.v)}, {"dout", packed(make_dout(c))}};
  for (const NamedTensor& tensor : variant.captures) tensors[tensor.name] = {tensor.dtype, tensor.shape, tensor.bytes};
  const std::int32_t prefix[3] = {1, 0, 2};  // the sequence in the middle sees nothing
  tensors["prefix"] = {DType::i32, {3}, std::vector<std::byte>(sizeof prefix)};
  std::memcpy(tensors["prefix"].bytes.data(), prefix, sizeof prefix);
  tensors["sink"] = {variant.sink.dtype, variant.sink.shape, variant.sink.bytes};
  const std::string all =
      "--lengths 20,7,33 --dropout 0.25 --seed 3 --alibi --gradients --mask \"prefix[b] > 0\" --window-left 9 "
      "--window-right 4 --chunk 16 --sink";
  ASSERT_TRUE(run(tensors, all + " --verify"));
  const tools::SafetensorsFile out = tools::SafetensorsFile::open(path("out"));
  EXPECT_EQ(out.read("dslope").shape, (std::vector<std::int64_t>{4}));
  EXPECT_EQ(out.read("dsink").shape, (std::vector<std::int64_t>{4}));
  const Tensor o = out.read("o"), lse = out.read("lse");
  const auto value = [](const Tensor& tensor, std::int64_t at) {
    float number = 0;
    std::memcpy(&number, tensor.bytes.data() + at * static_cast<std::int64_t>(sizeof number), sizeof number);
    return number;
  };
  for (std::int64_t row = 20; row < 27; ++row) {
    EXPECT_EQ(value(o, row * 4 * 16), 0);
    EXPECT_EQ(value(lse, row), value(tensors["sink"], 0));
  }
  EXPECT_NE(value(o, 0), 0);
  EXPECT_FALSE(run(tensors, all + " --window-left -2"));
  EXPECT_FALSE(run(tensors, all + " --dropout 1"));
}

/// Pages [pages, h_kv, page_size, d]; what no row sees holds NaN, and entries that no row needs lead astray.
TEST_F(RunCommand, ReadsAKvCache) {
  PagedCase c{.attention = {.h_q = 4, .h_kv = 2, .d_qk = 16, .d_v = 24, .dtype = DType::bf16, .causal = true},
              .rows = {3, 3, 3},
              .keys = {45, 3, 70},
              .begin = {0, 1, 30},
              .page_size = 12,
              .indexed = true};
  const PagedData data = make_data(c);
  std::map<std::string, Tensor> tensors = cache_file(data);
  tensors["q"] = stored(data.q);
  tensors["k"] = stored(data.k);
  tensors["v"] = stored(data.v);
  ASSERT_TRUE(run(tensors, "--causal --verify"));
  expect_written("o", reference_f64(c, data).o.view(), 0x1p-8);
  expect_written("lse", reference_f64(c, data).lse.view(), 1e-5);
  ASSERT_TRUE(run(tensors, "--causal --window-left 20 --softcap 5 --verify"));
  EXPECT_FALSE(run(tensors, "--causal --pages nhd")) << "as many heads as a page has rows";
  EXPECT_FALSE(run(tensors, "--causal --lengths-kv 1,2,3"));
  std::map<std::string, Tensor> wrong = tensors;
  wrong["seqused_kv"] = numbers({45, 3, 1000}, {3});
  EXPECT_FALSE(run(wrong, "--causal")) << "more keys than a row of the table has room for";
  wrong["seqused_kv"] = numbers({45, 3}, {2});
  EXPECT_FALSE(run(wrong, "--causal"));
  wrong.erase("seqused_kv");
  EXPECT_FALSE(run(wrong, "--causal"));
  wrong = tensors;
  wrong["block_table"].dtype = DType::f32;
  EXPECT_FALSE(run(wrong, "--causal"));
  wrong = tensors;
  wrong["dout"] = stored(data.q);
  EXPECT_FALSE(run(wrong, "--causal")) << "no gradients over pages";
}

/// Rows [rows, h_kv, s_max, d], found by batch_index; packed queries, too.
TEST_F(RunCommand, ReadsAContiguousCache) {
  PagedCase c{.attention = {.h_q = 4, .h_kv = 2, .d_qk = 16, .d_v = 24, .dtype = DType::bf16, .causal = true},
              .rows = {3, 3, 3},
              .keys = {45, 3, 70},
              .begin = {0, 1, 30},
              .page_size = kContiguous,
              .indexed = true};
  const PagedData data = make_data(c);
  std::map<std::string, Tensor> tensors = cache_file(data);
  tensors["q"] = stored(data.q);
  tensors["k"] = stored(data.k);
  tensors["v"] = stored(data.v);
  ASSERT_TRUE(run(tensors, "--causal --verify"));
  expect_written("o", reference_f64(c, data).o.view(), 0x1p-8);
  expect_written("lse", reference_f64(c, data).lse.view(), 1e-5);
  ASSERT_TRUE(run(tensors, "--causal --window-left 20 --softcap 5 --verify"));
  EXPECT_FALSE(run(tensors, "--causal --pages nhd")) << "as many heads as a row has positions";
  std::map<std::string, Tensor> wrong = tensors;
  wrong["seqused_kv"] = numbers({45, 3, 1000}, {3});
  EXPECT_FALSE(run(wrong, "--causal")) << "more keys than a row of the cache has";
  wrong = tensors;
  wrong["batch_index"] = numbers({0, 1, 5}, {3});
  EXPECT_FALSE(run(wrong, "--causal")) << "no such row";
  wrong.erase("batch_index");
  EXPECT_FALSE(run(wrong, "--causal")) << "more rows than requests";
}

/// Pages [pages, page_size, h_kv, d], and packed queries.
TEST_F(RunCommand, ReadsAKvCacheForAPackedBatch) {
  PagedCase c{
      .attention =
          {.h_q = 4, .h_kv = 2, .d_qk = 16, .d_v = 16, .dtype = DType::f32, .causal = true, .layout = Layout::bshd},
      .rows = {1, 20, 0, 5},
      .keys = {33, 20, 9, 70},
      .begin = {},
      .page_size = 3,
      .packed = true};
  const PagedData data = make_data(c);
  const std::int64_t in_front = data.cu_q.front();  // rows that `fa run` has no word for
  const auto pages = [](const HostTensor& tensor) {
    const TensorView view = tensor.view();
    return Tensor{view.dtype, {view.shape[0], view.shape[2], view.shape[1], view.shape[3]}, tensor.bytes()};
  };
  std::map<std::string, Tensor> tensors = cache_file(data);
  const TensorView q = data.q.view();
  tensors["k"] = pages(data.k);
  tensors["v"] = pages(data.v);
  tensors["q"] = {q.dtype, {q.shape[2] - in_front, q.shape[1], q.shape[3]}, data.q.bytes()};
  std::vector<std::byte>& bytes = tensors["q"].bytes;
  bytes.erase(bytes.begin(), bytes.begin() + in_front * q.strides[2] * 4);
  ASSERT_TRUE(run(tensors, "--causal --verify --pages nhd --lengths 1,20,0,5"));
  const AttentionOutputs expected = reference_f64(c, data);
  TensorView o = expected.o.view();  // [1, h, total, d] as [total, h, d]
  o.data = static_cast<double*>(o.data) + in_front * o.strides[2];
  o.rank = 3;
  o.shape = {o.shape[2] - in_front, o.shape[1], o.shape[3], 0};
  o.strides = {o.strides[2], o.strides[1], o.strides[3], 0};
  expect_written("o", o, 1e-5);
  EXPECT_FALSE(run(tensors, "--causal --pages nhd --lengths 1,20,5"));
  EXPECT_FALSE(run(tensors, "--causal --pages nhd"));
  tensors.erase("block_table");
  EXPECT_FALSE(run(tensors, "--causal --pages nhd --lengths 1,20,0,5")) << "pages are no rows of a cache";
  tensors.erase("seqused_kv");
  EXPECT_FALSE(run(tensors, "--causal --pages nhd --lengths 1,20,0,5")) << "no cache";
}

TEST_F(RunCommand, RefusesADoutOfAnotherShape) {
  const AttentionCase c = grouped(DType::f32);
  const AttentionInputs in = make_inputs(c);
  Tensor dout = stored(make_dout(c));
  dout.shape[2] -= 1;
  dout.bytes.resize(dout.bytes.size() / 37 * 36);
  EXPECT_FALSE(run({{"q", stored(in.q)}, {"k", stored(in.k)}, {"v", stored(in.v)}, {"dout", dout}}, "--causal"));
  EXPECT_FALSE(fs::exists(path("out")));
}

TEST_F(RunCommand, WritesPOfAHead) {
  const AttentionCase c = grouped(DType::f32);
  const AttentionInputs in = make_inputs(c);
  const std::map<std::string, Tensor> tensors{{"q", stored(in.q)}, {"k", stored(in.k)}, {"v", stored(in.v)}};
  ASSERT_TRUE(run(tensors, "--causal --debug --dump-p 1,2 --dropout 0.25 --verify"));
  Tensor p = tools::SafetensorsFile::open(path("out")).read("p");
  ASSERT_EQ(p.shape, (std::vector<std::int64_t>{c.s_q, c.s_kv}));
  Tensor o = tools::SafetensorsFile::open(path("out")).read("o");
  const auto* const weights = reinterpret_cast<const float*>(p.bytes.data());
  const auto* const outputs = reinterpret_cast<const float*>(o.bytes.data());
  for (std::int64_t i = 0; i < c.s_q; ++i) {
    double sum = 0;
    for (std::int64_t j = 0; j < c.s_kv; ++j) sum += weights[i * c.s_kv + j] * in.v.at(1, 1, j, 3);
    EXPECT_NEAR(sum, outputs[((c.h_q + 2) * c.s_q + i) * c.d_v + 3], 1e-5);
  }
  EXPECT_FALSE(run(tensors, "--dump-p 1,2"));
  EXPECT_FALSE(run(tensors, "--debug --dump-p 2,0"));
  EXPECT_FALSE(run(tensors, "--debug --dump-p 1"));
}

TEST_F(RunCommand, NamesTheFirstBrokenNumber) {
  const AttentionCase c = grouped(DType::bf16);
  AttentionInputs in = make_inputs(c);
  in.k.set(1, 1, 20, 7, std::numeric_limits<double>::quiet_NaN());
  const std::map<std::string, Tensor> tensors{{"q", stored(in.q)}, {"k", stored(in.k)}, {"v", stored(in.v)}};
  EXPECT_TRUE(run(tensors, "--causal"));
  EXPECT_FALSE(run(tensors, "--causal --debug"));
  EXPECT_NE(log().find("k[b=1, h=1, kv=20, d=7] is NaN, and reaches o"), std::string::npos) << log();
}

}  // namespace
}  // namespace fa::test
