// `fa run` on files with codes of 8 and 4 bits, and with V in the columns of K.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "run_command.hpp"
#include "support/attention_case.hpp"
#include "support/paged_case.hpp"
#include "tools/safetensors.hpp"

namespace fa::test {
namespace {

using tools::Tensor;
using Tensors = std::map<std::string, Tensor>;

class RunCodes : public RunCommand {
 protected:
  Tensor written(const char* name) const { return tools::SafetensorsFile::open(path("out")).read(name); }

  void expect_refusal(const Tensors& tensors, const std::string& options, const std::string& message) const {
    std::filesystem::remove(path("out"));
    EXPECT_FALSE(run(tensors, options)) << message;
    EXPECT_NE(log().find(message), std::string::npos) << message << "\n" << log();
    EXPECT_FALSE(std::filesystem::exists(path("out"))) << message;
  }
};

AttentionCase case_of(DType dtype, Layout layout = Layout::bhsd) {
  return {.b = 2,
          .h_q = 4,
          .h_kv = 2,
          .s_q = 19,
          .s_kv = 40,
          .d_qk = 32,
          .d_v = 48,
          .dtype = dtype,
          .causal = true,
          .layout = layout};
}

/// Scales of heads, [b, h, 1] in a test's inputs, as files have them.
Tensor of_heads(const HostTensor& scale) {
  Tensor tensor = stored(scale);
  tensor.shape.pop_back();
  return tensor;
}

Tensors file_of(const AttentionInputs& in) {
  Tensors tensors = {{"q", stored(in.q)}, {"k", stored(in.k)}, {"v", stored(in.v)}};
  if (!in.q_scale.bytes().empty()) tensors["q_scale"] = stored(in.q_scale);
  if (!in.row_bias.bytes().empty()) tensors["row_bias"] = stored(in.row_bias);
  for (const auto& [name, scale] : {std::pair{"k_scale", &in.k_scale}, std::pair{"v_scale", &in.v_scale}}) {
    if (scale->bytes().empty()) continue;
    tensors[name] = scale->view().shape[2] == 1 ? of_heads(*scale) : stored(*scale);
  }
  return tensors;
}

Tensor floats(const std::vector<float>& values, std::vector<std::int64_t> shape) {
  Tensor tensor{DType::f32, std::move(shape), std::vector<std::byte>(sizeof(float) * values.size())};
  std::memcpy(tensor.bytes.data(), values.data(), tensor.bytes.size());
  return tensor;
}

/// O saturates at 448, and NaN has codes.
TEST_F(RunCodes, ComparesAnOOfEightBits) {
  const AttentionInputs in = make_inputs(case_of(DType::e4m3));
  Tensors tensors = file_of(in);
  tensors["v_scale"] = floats({1000}, {1});
  ASSERT_TRUE(run(tensors, "--o-dtype e4m3 --verify")) << log();
  const Tensor o = written("o");
  EXPECT_TRUE(std::ranges::find(o.bytes, std::byte{0x7e}) != o.bytes.end()) << "448";
  tensors["v"].bytes[5] = std::byte{0x7f};
  ASSERT_TRUE(run(tensors, "--o-dtype e4m3 --verify")) << log();
  EXPECT_NE(log().find("38 of 7296 are NaN"), std::string::npos) << log();
}

PagedCase cache_case(DType dtype, std::int64_t page_size, Layout layout = Layout::bhsd) {
  return {.attention = {.h_q = 4, .h_kv = 2, .d_qk = 64, .d_v = 32, .dtype = dtype, .causal = true, .layout = layout},
          .rows = {3, 3, 3},
          .keys = {45, 3, 70},
          .begin = {},
          .page_size = page_size,
          .indexed = true};
}

Tensors file_of(const PagedData& data) {
  Tensors tensors = cache_file(data);
  tensors["q"] = stored(data.q);
  tensors["k"] = stored(data.k);
  tensors["v"] = stored(data.v);
  const auto add = [&](const char* name, const TensorView& view, const HostTensor& scale) {
    if (scale.bytes().empty()) return;
    tensors[name] = stored(scale);
    if (view.defined()) tensors[name].shape.assign(view.shape.begin(), view.shape.begin() + view.rank);
    if (view.defined() && view.rank == 3 && view.shape[2] == 1) tensors[name].shape.pop_back();  // of heads
  };
  add("k_scale", data.k_scales(), data.k_scale);
  add("v_scale", data.v_scales(), data.v_scale);
  add("q_scale", {}, data.q_scale);
  add("row_bias", {}, data.row_bias);
  return tensors;
}

TEST_F(RunCodes, TakesCodesOfEightBitsWithScalesOfRowsAndHeads) {
  for (const DType dtype : {DType::e4m3, DType::e5m2, DType::i8}) {
    const AttentionCase c = case_of(dtype);
    AttentionInputs in = make_inputs(c);
    add_scales(c, in);
    const Tensors tensors = file_of(in);
    const AttentionOutputs expected = reference_f64(c, in);
    ASSERT_TRUE(run(tensors, "--causal --verify")) << log();
    EXPECT_EQ(written("o").dtype, DType::bf16);
    expect_written("o", expected.o.view(), 0x1p-8);
    expect_written("lse", expected.lse.view(), 1e-5);
    ASSERT_TRUE(run(tensors, "--causal --verify --precise --o-dtype f16")) << log();
    EXPECT_EQ(written("o").dtype, DType::f16);
    expect_written("o", expected.o.view(), 0x1p-11);
    ASSERT_TRUE(run(tensors, "--causal --verify --o-dtype e4m3")) << log();
    EXPECT_EQ(written("o").dtype, DType::e4m3);
    if (largest(expected.o) < 448) expect_written("o", expected.o.view(), 0x1p-4);
  }
}

TEST_F(RunCodes, TakesScalesOfKeys) {
  const AttentionCase c = case_of(DType::e4m3);
  AttentionInputs in = make_inputs(c);
  add_scales(c, in);
  add_key_scales(c, in);
  ASSERT_TRUE(run(file_of(in), "--causal --verify")) << log();
  expect_written("o", reference_f64(c, in).o.view(), 0x1p-8);
  add_value_scales(c, in);
  ASSERT_TRUE(run(file_of(in), "--causal --verify")) << log();
  expect_written("o", reference_f64(c, in).o.view(), 0x1p-8);
  expect_written("lse", reference_f64(c, in).lse.view(), 1e-5);
}

/// A number, and axes of 1, stand for as many as there are.
TEST_F(RunCodes, RepeatsScales) {
  const AttentionInputs in = make_inputs(case_of(DType::e4m3));
  Tensors tensors = file_of(in);
  tensors["q_scale"] = floats(std::vector<float>(2 * 4 * 19, 0.5f), {2, 4, 19});
  tensors["k_scale"] = floats({0.25f, -2, 0.25f, -2}, {2, 2});
  tensors["v_scale"] = floats({3, 3, 3, 3}, {2, 2});
  ASSERT_TRUE(run(tensors, "--verify")) << log();
  const Tensor o = written("o"), lse = written("lse");
  const Tensor ones[] = {floats({0.5f}, {}), floats({0.5f}, {1}), floats({0.5f, 0.5f}, {2, 1}),
                         floats(std::vector<float>(19, 0.5f), {1, 1, 19})};
  for (const Tensor& one : ones) {
    tensors["q_scale"] = one;
    tensors["k_scale"] = floats({0.25f, -2}, {1, 2});
    tensors["v_scale"] = floats({3}, {1});
    ASSERT_TRUE(run(tensors, "--verify")) << log();
    EXPECT_EQ(written("o").bytes, o.bytes);
    EXPECT_EQ(written("lse").bytes, lse.bytes);
  }
  tensors["k_scale"] = floats({0.25f, -2}, {1, 2, 1});
  ASSERT_TRUE(run(tensors, "--verify")) << log();
  expect_written("o", Tensor(o).view(), 0x1p-8);
}

/// One scale of all that a cache stores.
TEST_F(RunCodes, RepeatsScalesOfCaches) {
  PagedCase c = cache_case(DType::bf16, 12);
  c.k_dtype = c.v_dtype = DType::e4m3;
  PagedData data = make_data(c);
  Tensors tensors = file_of(data);
  for (HostTensor* scale : {&data.k_scale, &data.v_scale}) {
    for (std::int64_t row = 0; row < scale->view().elements(); ++row) {
      scale->set(row / 24, row / 12 % 2, row % 12, 0, 0.5);
    }
  }
  tensors["k_scale"] = floats({0.5f}, {1});
  tensors["v_scale"] = floats({0.5f, 0.5f}, {1, 2, 1});
  ASSERT_TRUE(run(tensors, "--causal --verify")) << log();
  expect_written("o", reference_f64(c, data).o.view(), 0x1p-8);
  expect_written("lse", reference_f64(c, data).lse.view(), 1e-5);
}

/// [b, h, s] as [h, b * s].
Tensor packed_rows(const Tensor& rows) {
  Tensor result = rows;
  const std::int64_t b = rows.shape[0], h = rows.shape[1], s = rows.shape[2];
  for (std::int64_t at = 0; at < b * h * s; ++at) {
    const std::int64_t to = at / s % h * b * s + at / (s * h) * s + at % s;
    std::memcpy(result.bytes.data() + 4 * to, rows.bytes.data() + 4 * at, 4);
  }
  result.shape = {h, b * s};
  return result;
}

/// Two sequences of the same length are a dense batch of two in [b, s, h, d].
TEST_F(RunCodes, TakesPackedBatches) {
  for (const bool of_keys : {false, true}) {
    const AttentionCase c = case_of(DType::i8, Layout::bshd);
    AttentionInputs in = make_inputs(c);
    add_scales(c, in);
    if (of_keys) {
      add_key_scales(c, in);
      add_value_scales(c, in);
    }
    Tensors tensors = file_of(in);
    for (const char* name : {"q", "k", "v"}) {
      std::vector<std::int64_t>& shape = tensors[name].shape;
      shape = {shape[0] * shape[2], shape[1], shape[3]};
    }
    for (const char* name : {"q_scale", "row_bias"}) tensors[name] = packed_rows(tensors[name]);
    if (of_keys) {
      for (const char* name : {"k_scale", "v_scale"}) tensors[name] = packed_rows(tensors[name]);
    }
    const AttentionOutputs expected = reference_f64(c, in);
    TensorView o = expected.o.view();
    o.rank = 3;
    o.shape = {2 * 19, 4, 48, 0};
    o.strides = {4 * 48, 48, 1, 0};
    const std::string lengths = "--causal --verify --lengths 19,19 --lengths-kv 40,40";
    ASSERT_TRUE(run(tensors, lengths)) << log();
    expect_written("o", o, 0x1p-8);
    ASSERT_EQ(run(tensors, lengths + " --key-scales --value-scales"), of_keys) << log();
    ASSERT_TRUE(run(tensors, lengths + " --o-dtype e4m3")) << log();
  }
}

/// Rows of no sequence, which no call writes where o is e4m3.
TEST_F(RunCodes, PaddingIsZeroInEveryTypeOfO) {
  const AttentionInputs in =
      make_inputs({.h_q = 2, .s_q = 9, .s_kv = 9, .d_qk = 16, .d_v = 16, .dtype = DType::e4m3, .layout = Layout::bshd});
  Tensors tensors = {{"q", stored(in.q)}, {"k", stored(in.k)}, {"v", stored(in.v)}};
  tensors["q"].shape = {9, 2, 16};
  for (const char* name : {"k", "v"}) tensors[name].shape = {9, 1, 16};
  ASSERT_TRUE(run(tensors, "--lengths 4,3 --o-dtype e4m3 --verify")) << log();
  const Tensor o = written("o"), lse = written("lse");
  EXPECT_TRUE(std::all_of(o.bytes.end() - 2 * 2 * 16, o.bytes.end(), [](std::byte x) { return x == std::byte{0}; }));
  for (const std::size_t row : {7U, 8U, 16U, 17U}) {
    float number = 0;
    std::memcpy(&number, lse.bytes.data() + row * sizeof number, sizeof number);
    EXPECT_TRUE(std::isinf(number) && number < 0) << row;
  }
}

TEST_F(RunCodes, ReadsCachesOfEightBitsUnderSixteenBitQueries) {
  for (const std::int64_t page_size : {std::int64_t{12}, kContiguous}) {
    for (const auto& [k_dtype, v_dtype] :
         {std::pair<std::optional<DType>, std::optional<DType>>{DType::e4m3, DType::i8},
          {DType::i8, std::nullopt},
          {std::nullopt, DType::e4m3}}) {
      PagedCase c = cache_case(DType::bf16, page_size);
      c.k_dtype = k_dtype;
      c.v_dtype = v_dtype;
      const PagedData data = make_data(c);
      const Tensors tensors = file_of(data);
      ASSERT_TRUE(run(tensors, "--causal --verify")) << log();
      expect_written("o", reference_f64(c, data).o.view(), 0x1p-8);
      expect_written("lse", reference_f64(c, data).lse.view(), 1e-5);
      Tensors wrong = tensors;
      const char* const scale = k_dtype ? "k_scale" : "v_scale";
      wrong.erase(scale);
      expect_refusal(wrong, "--causal", std::string(scale) + " = nothing: accepted is f32 [");
    }
  }
}

TEST_F(RunCodes, ReadsCachesOfFourBits) {
  for (const int group_size : {32, 64}) {
    PagedCase c = cache_case(DType::f16, 12);
    c.attention.d_v = 64;
    c.k_dtype = c.v_dtype = DType::u4x2;
    c.group_size = group_size;
    const PagedData data = make_data(c);
    const Tensors tensors = file_of(data);
    ASSERT_EQ(tensors.at("k").shape.back(), 32) << "two columns a byte";
    ASSERT_TRUE(run(tensors, "--causal --verify")) << log();
    expect_written("o", reference_f64(c, data).o.view(), 0x1p-11);
    expect_written("lse", reference_f64(c, data).lse.view(), 1e-5);
  }
}

/// Pages [pages, page_size, h_kv, d], whose scales stay [pages, h_kv, page_size].
TEST_F(RunCodes, ReadsPagesInTheOtherOrder) {
  PagedCase c = cache_case(DType::bf16, 12, Layout::bshd);
  c.k_dtype = DType::i8;
  c.v_dtype = DType::e4m3;
  const PagedData data = make_data(c);
  Tensors tensors = file_of(data);
  for (const char* name : {"q", "k", "v"}) {
    std::vector<std::int64_t>& shape = tensors[name].shape;
    if (name[0] != 'q') std::swap(shape[1], shape[2]);
  }
  const TensorView q = data.q.view();  // [b, h, s, d] in the memory order of [b, s, h, d]
  for (std::int64_t row = 0; row < q.shape[0] * q.shape[1] * q.shape[2]; ++row) {
    const std::int64_t s = row % q.shape[2], h = row / q.shape[2] % q.shape[1], b = row / q.shape[2] / q.shape[1];
    const std::int64_t from = b * q.strides[0] + h * q.strides[1] + s * q.strides[2];
    std::memcpy(tensors["q"].bytes.data() + 2 * row * q.shape[3], data.q.bytes().data() + 2 * from,
                static_cast<std::size_t>(2 * q.shape[3]));
  }
  ASSERT_TRUE(run(tensors, "--causal --verify --pages nhd")) << log();
  expect_written("o", reference_f64(c, data).o.view(), 0x1p-8);
}

TEST_F(RunCodes, ReadsCachesUnderQueriesOfEightBits) {
  for (const std::int64_t page_size : {std::int64_t{12}, kContiguous}) {
    for (const bool of_keys : {false, true}) {
      PagedCase c = cache_case(DType::e4m3, page_size);
      c.scaled = true;
      c.key_scales = c.value_scales = of_keys;
      const PagedData data = make_data(c);
      ASSERT_TRUE(run(file_of(data), "--causal --verify")) << log();
      expect_written("o", reference_f64(c, data).o.view(), 0x1p-8);
      expect_written("lse", reference_f64(c, data).lse.view(), 1e-5);
    }
  }
}

TEST_F(RunCodes, TakesTheFirstColumnsOfKForV) {
  const AttentionCase c{.b = 2, .h_q = 4, .s_q = 5, .s_kv = 33, .d_qk = 64, .d_v = 48, .dtype = DType::bf16};
  AttentionInputs in = make_inputs(c);
  for (std::int64_t row = 0; row < 2 * 33; ++row) {
    for (std::int64_t d = 0; d < 48; ++d) in.v.set(row / 33, 0, row % 33, d, in.k.at(row / 33, 0, row % 33, d));
  }
  Tensors tensors = file_of(in);
  tensors.erase("v");
  ASSERT_TRUE(run(tensors, "--causal --value-in-key 48 --verify")) << log();
  AttentionCase causal = c;
  causal.causal = true;
  EXPECT_EQ(written("o").shape, (std::vector<std::int64_t>{2, 4, 5, 48}));
  expect_written("o", reference_f64(causal, in).o.view(), 0x1p-8);
  expect_refusal(tensors, "--causal", "tensor = missing");
  expect_refusal(tensors, "--value-in-key 2000000000", "--value-in-key = 2000000000: accepted is at most the columns");
  expect_refusal(tensors, "--value-in-key 42", "value_in_key = 42: accepted is a multiple of 8");
  expect_refusal(tensors, "--value-in-key 0", "--value-in-key");
  tensors["v_original"] = stored(in.v);
  expect_refusal(tensors, "--value-in-key 48 --verify", "v_original = given: accepted is none with --value-in-key");
  tensors["dout"] = stored(in.v);
  expect_refusal(tensors, "--value-in-key 48", "dout = given: accepted is none: there are no gradients with");
  tensors["v"] = stored(in.v);
  expect_refusal(tensors, "--value-in-key 48", "v = given: accepted is none with --value-in-key");
}

/// Rows of 656 bytes have their scales, and V.
TEST_F(RunCodes, ReadsLatentRows) {
  PagedCase c = cache_case(DType::bf16, 12);
  c.attention.h_kv = 1;
  c.attention.d_qk = 576;
  c.attention.d_v = 512;
  c.value_in_key = true;
  for (const std::optional<DType> k_dtype : {std::optional<DType>(), std::optional(DType::e4m3)}) {
    c.k_dtype = k_dtype;
    const PagedData data = make_data(c);
    Tensors tensors = file_of(data);
    tensors.erase("v");
    EXPECT_EQ(tensors.at("k").shape.back(), k_dtype ? 656 : 576);
    ASSERT_TRUE(run(tensors, "--causal --value-in-key 512 --verify")) << log();
    expect_written("o", reference_f64(c, data).o.view(), 0x1p-8);
    expect_written("lse", reference_f64(c, data).lse.view(), 1e-5);
    tensors["k_scale"] = floats({1}, {1});
    expect_refusal(tensors, "--causal --value-in-key 512", "k_scale = given: accepted is none");
  }
}

/// Codes of i8 of each row, [b, h, s, d], and their scales.
HostTensor codes_of(const HostTensor& numbers, HostTensor* scales) {
  const TensorView view = numbers.view();
  HostTensor codes(DType::i8, view.shape[0], view.shape[1], view.shape[2], view.shape[3], Layout::bhsd);
  *scales = HostTensor(DType::f32, view.shape[0], view.shape[1], view.shape[2]);
  for (std::int64_t row = 0; row < view.shape[0] * view.shape[1] * view.shape[2]; ++row) {
    const std::int64_t s = row % view.shape[2], h = row / view.shape[2] % view.shape[1],
                       b = row / view.shape[2] / view.shape[1];
    double greatest = 0;
    for (std::int64_t d = 0; d < view.shape[3]; ++d) greatest = std::max(greatest, std::abs(numbers.at(b, h, s, d)));
    scales->set(b, h, s, 0, greatest / 127);
    for (std::int64_t d = 0; d < view.shape[3]; ++d) {
      codes.set(b, h, s, d, std::nearbyint(numbers.at(b, h, s, d) / scales->at(b, h, s)));
    }
  }
  return codes;
}

/// --verify tells the kernel's error and that of the codes apart.
TEST_F(RunCodes, PrintsTheErrorAgainstTheOriginalsApart) {
  const AttentionCase c = case_of(DType::bf16);
  const AttentionInputs in = make_inputs(c);
  HostTensor k_scale, v_scale;
  Tensors tensors = {{"q", stored(in.q)},
                     {"k", stored(codes_of(in.k, &k_scale))},
                     {"v", stored(codes_of(in.v, &v_scale))},
                     {"k_original", stored(in.k)},
                     {"v_original", stored(in.v)}};
  tensors["k_scale"] = stored(k_scale);
  tensors["v_scale"] = stored(v_scale);
  ASSERT_TRUE(run(tensors, "--causal --verify --json")) << log();
  const nlohmann::json report = nlohmann::json::parse(log());
  EXPECT_EQ(report["k_dtype"], "i8");
  Tensor o = written("o"), lse = written("lse");
  const AttentionOutputs expected = reference_f64(c, in);
  const ErrorMetrics error = compare(o.view(), expected.o.view());
  EXPECT_NEAR(report["original"]["o"]["max"].get<double>(), error.max_abs, 1e-6);
  EXPECT_NEAR(report["original"]["o"]["mean"].get<double>(), error.mean_abs, 1e-6);
  EXPECT_NEAR(report["original"]["lse"]["max"].get<double>(), compare(lse.view(), expected.lse.view()).max_abs, 1e-6);
  EXPECT_GT(report["original"]["o"]["relative_rms"].get<double>(), 1e-3);
  EXPECT_LT(report["original"]["o"]["relative_rms"].get<double>(), 3e-2);
  EXPECT_GT(report["original"]["lse"]["mean"].get<double>(), 10 * report["verify"]["lse"]["mean"].get<double>());
  ASSERT_TRUE(run(tensors, "--causal --verify"));
  EXPECT_NE(log().find("original o    max error"), std::string::npos) << log();
  ASSERT_TRUE(run(tensors, "--causal"));
  EXPECT_EQ(log().find("original o"), std::string::npos) << log();
  tensors["k_original"].shape = {2, 2, 20, 64};
  expect_refusal(tensors, "--causal --verify", "k_original = shape [2, 2, 20, 64]: accepted is [2, 2, 40, 32]");
  tensors["k_original"] = tensors["k"];
  expect_refusal(tensors, "--causal --verify", "k_original = i8: accepted is f16, bf16, f32 or f64");
}

/// K less its mean, with the bias that gives it back: the originals have it.
TEST_F(RunCodes, BiasesOfRowsAreNoneOfTheOriginals) {
  const AttentionCase c = case_of(DType::f32);
  AttentionInputs in = make_inputs(c);
  HostTensor shifted = in.k, bias(DType::f32, 2, 4, 19);
  for (std::int64_t row = 0; row < 2 * 2 * 40; ++row) {  // a mean of 3 in the first column
    const std::int64_t b = row / 80, h = row / 40 % 2, s = row % 40;
    in.k.set(b, h, s, 0, shifted.at(b, h, s, 0) + 3);
  }
  for (std::int64_t row = 0; row < 2 * 4 * 19; ++row) {
    bias.set(row / 76, row / 19 % 4, row % 19, 0, 3 * in.q.at(row / 76, row / 19 % 4, row % 19, 0));
  }
  AttentionCase of_v = c;
  of_v.dtype = DType::e4m3;
  HostTensor q_scale, k_scale, v = make_inputs(of_v).v;
  Tensors tensors = {{"q", stored(codes_of(in.q, &q_scale))},
                     {"k", stored(codes_of(shifted, &k_scale))},
                     {"v", stored(v)},
                     {"row_bias", stored(bias)},
                     {"q_original", stored(in.q)},
                     {"k_original", stored(in.k)}};
  tensors["q_scale"] = stored(q_scale);
  tensors["k_scale"] = stored(k_scale);
  ASSERT_TRUE(run(tensors, "--causal --verify --json")) << log();
  const nlohmann::json report = nlohmann::json::parse(log());
  EXPECT_LT(report["verify"]["lse"]["max"].get<double>(), 1e-4);
  EXPECT_LT(report["original"]["lse"]["max"].get<double>(), 0.1);
  EXPECT_LT(report["original"]["o"]["relative_rms"].get<double>(), 3e-2);
  tensors.erase("row_bias");
  ASSERT_TRUE(run(tensors, "--causal --verify --json")) << log();
  const nlohmann::json without = nlohmann::json::parse(log());
  EXPECT_LT(without["verify"]["lse"]["max"].get<double>(), 1e-4);
  EXPECT_GT(without["original"]["lse"]["max"].get<double>(), 0.1) << "its logarithm is that of other scores";
}

TEST_F(RunCodes, NamesWhatItRefuses) {
  const AttentionCase c = case_of(DType::e4m3);
  const AttentionInputs in = make_inputs(c);
  const Tensors tensors = file_of(in);
  const auto refused = [&](const char* name, Tensor tensor, const char* options, const std::string& message) {
    Tensors wrong = tensors;
    wrong[name] = std::move(tensor);
    expect_refusal(wrong, options, message);
  };
  refused("k_scale", floats({1, 2, 3}, {3}), "", "k_scale = shape [3]: accepted is f32 [b, h_kv] = [2, 2]");
  refused("v_scale", floats({1, 2, 3}, {1, 1, 3}), "", "v_scale = shape [1, 1, 3]: accepted is f32 [b, h_kv] = [2, 2]");
  refused("q_scale", floats({1, 2, 3}, {1, 3}), "", "q_scale = shape [1, 3]: accepted is f32 [b, h_q] = [2, 4]");
  refused("q_scale", numbers({1}, {1}), "", "q_scale = i32: accepted is f32");
  refused("row_bias", floats({1}, {1}), "", "row_bias = given: accepted is none without a dtype of i8");
  refused("k", stored(make_inputs(case_of(DType::e5m2)).k), "", "k = e5m2: accepted is dtype e4m3");
  refused("dout", stored(in.v), "", "dout = given: accepted is none: there are no gradients of 8 bits");
  expect_refusal(tensors, "--o-dtype f32", "--o-dtype");
  expect_refusal(tensors, "--dropout 0.5", "dropout = given: accepted is none with dtype e4m3");
  Tensors plain = file_of(make_inputs(case_of(DType::bf16)));
  expect_refusal(plain, "--o-dtype f16", "o_dtype = f16: accepted is none without a dtype of 8 bits");
  expect_refusal(plain, "--precise", "precise = true: accepted is false without a dtype of 8 bits");
  plain["k_scale"] = floats({1}, {1});
  expect_refusal(plain, "", "k_scale = given: accepted is none without AttentionConfig::k_dtype");
  EXPECT_TRUE(run(plain, "--score 'score * k_scale[0]' --verify")) << "a function has named it" << log();
  plain["k"].dtype = DType::u4x2;
  plain["k"].shape.back() /= 2;
  plain["k"].bytes.resize(plain["k"].bytes.size() / 4);
  expect_refusal(plain, "", "k_scale = f32: accepted is bf16 [2, 2, 40, 2], a scale and an offset of each group of k");
  Tensors number = plain;
  number["k"] = Tensor{DType::u4x2, {}, std::vector<std::byte>(1)};
  number["k_scale"] = Tensor{DType::bf16, {1, 1, 1, 2}, std::vector<std::byte>(4)};
  EXPECT_FALSE(run(number, ""));
  plain["k_scale"] = Tensor{DType::bf16, {2, 2, 40, 3}, std::vector<std::byte>(2 * 2 * 2 * 40 * 3)};
  expect_refusal(plain, "", "k_scale = shape [2, 2, 40, 3]: accepted is bf16 [2, 2, 40, 2]");
}

}  // namespace
}  // namespace fa::test
