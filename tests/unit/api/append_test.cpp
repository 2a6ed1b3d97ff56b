// Appends to KV caches on the host device, through the public API.

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include <fa/attention.hpp>

#include "expect_error.hpp"
#include "support/append_case.hpp"
#include "support/thorough.hpp"

namespace fa {
namespace {

using test::AppendCase;
using test::AppendData;
using test::expect_invalid;
using test::RowNumbers;

Attention host(const AttentionConfig& config) {
  return Attention::create(config, Device::host());
}

void run(const AppendCase& c) {
  AppendData data(c);
  const AppendData before = data;
  host(c.config()).append(data.inputs());
  std::array<std::vector<std::byte>, test::kAppendParts> after;
  for (std::size_t i = 0; i < test::kAppendParts; ++i) after[i] = data.buffers()[i].bytes;
  EXPECT_EQ(before.judge(after), "") << to_string(c);
}

TEST(Append, RandomCallsAreWhatAFormulaSays) {
  const std::uint32_t cases = test::thorough() ? 300 : 60;
  for (std::uint32_t seed = 0; seed < cases; ++seed) run(test::random_append_case(seed, false));
}

// The judge sees a wrong element, and one that must not have changed.
TEST(Append, TheFormulaSeesMistakes) {
  AppendCase c;
  c.rows = {2, 3};
  c.before = {5, 0};
  c.rotary_dims = 32;
  c.h_q = 4;
  AppendData data(c);
  const AppendData before = data;
  host(c.config()).append(data.inputs());
  std::array<std::vector<std::byte>, test::kAppendParts> right;
  for (std::size_t i = 0; i < test::kAppendParts; ++i) right[i] = data.buffers()[i].bytes;
  ASSERT_EQ(before.judge(right), "");
  int wrong = 0, bytes = 0;
  for (const auto part : {test::AppendPart::k_cache, test::AppendPart::v_cache, test::AppendPart::q_out}) {
    auto& buffer = right[static_cast<std::size_t>(part)];
    for (std::size_t at = 1; at < buffer.size(); at += 114, ++bytes) {
      buffer[at] ^= std::byte{0x41};  // sign and exponent
      wrong += before.judge(right).empty() ? 0 : 1;
      buffer[at] ^= std::byte{0x41};
    }
  }
  EXPECT_EQ(wrong, bytes);
}

/// A row at position 0 is not turned.
TEST(Append, PositionZeroIsACopy) {
  AppendCase c;
  c.dtype = DType::f16;
  c.rotary_dims = 64;
  AppendData data(c);
  const AppendInputs inputs = data.inputs();
  host(c.config()).append(inputs);
  const auto* const k = static_cast<const std::uint16_t*>(inputs.k.data);
  const auto* const cache = static_cast<const std::uint16_t*>(inputs.k_cache.data);
  const std::int32_t page = static_cast<const std::int32_t*>(inputs.cache.block_table.data)[0];
  for (int i = 0; i < 64; ++i) EXPECT_EQ(cache[page * inputs.k_cache.strides[0] + i], k[i]) << i;
}

// As many keys as a decode loop appends are those of one call.
TEST(Append, OneByOneOrTogether) {
  AppendCase c;
  c.rotary_dims = 64;
  c.rows = {7};
  c.before = {13};
  c.packed = false;
  AppendData together(c), single(c);
  const AppendInputs all = together.inputs();
  const AppendInputs one_by_one = single.inputs();
  const Attention attention = host(c.config());
  attention.append(all);
  for (std::int32_t i = 0; i < 7; ++i) {
    AppendInputs step = one_by_one;
    const std::int32_t used = 13 + i + 1;
    step.seqused_kv = &used;
    for (TensorView* const view : {&step.k, &step.v}) {
      view->data = static_cast<std::uint16_t*>(view->data) + i * view->strides[2];
      view->shape[2] = 1;
    }
    attention.append(step);
  }
  for (std::size_t i = 0; i < test::kAppendParts; ++i) {
    EXPECT_EQ(together.buffers()[i].bytes, single.buffers()[i].bytes) << i;
  }
}

TEST(Append, F64) {
  AppendCase c;
  c.dtype = DType::f64;
  c.rotary_dims = 24;
  c.rows = {2, 0, 3};
  c.before = {9, 4, 30};
  run(c);
  c.table = DType::f64;
  run(c);
}

TEST(Append, NothingToDo) {
  AppendCase c;
  c.rows = {0, 0};
  c.before = {3, 4};
  run(c);
  AppendData data(c);
  AppendInputs inputs = data.inputs();
  inputs.b = 0;
  inputs.cu_seqlens_k_new = nullptr;
  inputs.seqused_kv = nullptr;
  host(c.config()).append(inputs);
  // Without heads, whatever lengths say.
  const std::vector<std::int32_t> cu{5, -1, 99}, used{-7, 1 << 30};
  AppendInputs headless = data.inputs();
  headless.cu_seqlens_k_new = cu.data();
  headless.seqused_kv = used.data();
  for (TensorView* const view : {&headless.k, &headless.v, &headless.k_cache, &headless.v_cache}) view->shape[1] = 0;
  headless.k.shape[0] = headless.v.shape[0] = 4;
  host(c.config()).append(headless);
}

class AppendRefuses : public testing::Test {
 protected:
  AppendRefuses() {
    case_.rows = {2, 2};
    case_.before = {3, 20};
    case_.packed = true;
    case_.rotary_dims = 32;
    case_.h_q = 4;
  }

  /// The call with a change is refused, naming the argument, and leaves its memory alone.
  void expect(const std::string& argument, const std::function<void(AppendInputs&)>& change) {
    SCOPED_TRACE(argument);
    AppendData data(case_);
    const AppendData before = data;
    AppendInputs inputs = data.inputs();
    change(inputs);
    AttentionConfig config = case_.config();
    if (change_config) change_config(config);
    expect_invalid(argument, [&] { host(config).append(inputs); });
    for (std::size_t i = 0; i < test::kAppendParts; ++i) {
      EXPECT_EQ(data.buffers()[i].bytes, before.buffers()[i].bytes) << data.buffers()[i].name;
    }
  }

  AppendCase case_;
  std::function<void(AttentionConfig&)> change_config;
  std::vector<std::int32_t> ints_ = std::vector<std::int32_t>(64, 0);
  std::vector<std::int64_t> longs_ = std::vector<std::int64_t>(64, 0);
};

TEST_F(AppendRefuses, RotaryEmbeddingThatDoesNotFit) {
  for (const int dims : {-2, 3, 66, 31}) expect("rotary.dims", [&](AppendInputs& i) { i.rotary.dims = dims; });
  for (const double base : {0.0, -1.0, HUGE_VAL, std::nan("")}) {
    expect("rotary.base", [&](AppendInputs& i) { i.rotary.base = base; });
  }
  std::vector<float> table(64 * 16);
  const TensorView right(table.data(), DType::f32, {64, 16});
  expect("rotary.sin", [&](AppendInputs& i) { i.rotary.cos = right; });
  expect("rotary.cos", [&](AppendInputs& i) { i.rotary.sin = right; });
  expect("rotary.sin", [&](AppendInputs& i) {
    i.rotary.cos = right;
    i.rotary.sin = TensorView(table.data(), DType::f32, {64, 15});
  });
  expect("rotary.cos", [&](AppendInputs& i) {
    i.rotary.cos = i.rotary.sin = TensorView(table.data(), DType::f16, {64, 16});
  });
  expect("rotary.cos", [&](AppendInputs& i) { i.rotary.cos = i.rotary.sin = right.swap_axes(0, 1); });
  expect("rotary.positions", [&](AppendInputs& i) {  // beyond the table
    i.rotary.cos = i.rotary.sin = TensorView(table.data(), DType::f32, {4, 16});
  });
  expect("rotary.positions_64", [&](AppendInputs& i) {
    i.rotary.positions = ints_.data();
    i.rotary.positions_64 = longs_.data();
  });
  expect("q", [&](AppendInputs& i) { i.rotary = {}; });
  expect("rotary.cos", [&](AppendInputs& i) {
    i.rotary = {};
    i.rotary.cos = right;
    i.q = i.q_out = {};
  });
  expect("rotary.positions", [&](AppendInputs& i) {
    i.rotary = {};
    i.rotary.positions = ints_.data();
    i.q = i.q_out = {};
  });
}

TEST_F(AppendRefuses, TensorsThatDoNotFit) {
  for (TensorView AppendInputs::*tensor : {&AppendInputs::k, &AppendInputs::v, &AppendInputs::k_cache,
                                           &AppendInputs::v_cache, &AppendInputs::q, &AppendInputs::q_out}) {
    const std::string name = tensor == &AppendInputs::k         ? "k"
                             : tensor == &AppendInputs::v       ? "v"
                             : tensor == &AppendInputs::k_cache ? "k_cache"
                             : tensor == &AppendInputs::v_cache ? "v_cache"
                             : tensor == &AppendInputs::q       ? "q"
                                                                : "q_out";
    expect(name, [&](AppendInputs& i) { (i.*tensor).dtype = DType::f16; });
    expect(name, [&](AppendInputs& i) { (i.*tensor) = {}; });
    expect(name, [&](AppendInputs& i) { (i.*tensor).data = nullptr; });
    expect(name, [&](AppendInputs& i) { (i.*tensor).rank = 2; });
    expect(name, [&](AppendInputs& i) { --(i.*tensor).shape[static_cast<std::size_t>((i.*tensor).rank - 1)]; });
    expect(name, [&](AppendInputs& i) { (i.*tensor).strides[static_cast<std::size_t>((i.*tensor).rank - 1)] = 2; });
    if (name == "k" || name == "v" || name == "q") continue;
    expect(name, [&](AppendInputs& i) { (i.*tensor).read_only = true; });
    expect(name, [&](AppendInputs& i) { (i.*tensor).strides[0] = 0; });
  }
  expect("v", [](AppendInputs& i) { --i.v.shape[0]; });
  expect("v", [](AppendInputs& i) { --i.v.shape[1]; });
  expect("k_cache", [](AppendInputs& i) { --i.k_cache.shape[2]; });
  expect("v_cache", [](AppendInputs& i) { --i.v_cache.shape[0]; });
  expect("q", [](AppendInputs& i) { i.q.shape[1] = i.q_out.shape[1] = 3; });
}

TEST_F(AppendRefuses, MemoryThatIsShared) {
  expect("v_cache", [](AppendInputs& i) { i.v_cache = i.k_cache; });
  expect("k_cache", [](AppendInputs& i) { i.k.data = i.k_cache.data; });
  expect("v_cache", [](AppendInputs& i) { i.k.data = i.v_cache.data; });
  expect("q_out", [](AppendInputs& i) { i.q_out.data = i.k.data; });
  expect("q_out", [](AppendInputs& i) {  // in place, but for a stride
    i.q_out = i.q;
    i.q_out.shape[1] = i.q.shape[1] = 2;
    i.q_out.strides[1] *= 2;
  });
  expect("k_cache", [](AppendInputs& i) { i.cache.block_table.data = i.k_cache.data; });
  expect("k_cache", [](AppendInputs& i) { i.seqused_kv = static_cast<const std::int32_t*>(i.k_cache.data); });
}

TEST_F(AppendRefuses, PlacesThatAreNotGiven) {
  expect("cache.block_table", [](AppendInputs& i) { i.cache = {}; });
  expect("cache.block_table", [](AppendInputs& i) { i.cache.block_table.rank = 1; });
  expect("cache.block_table", [](AppendInputs& i) { i.cache.block_table.dtype = DType::f32; });
  expect("cache.block_table", [](AppendInputs& i) { i.cache.block_table.data = nullptr; });
  expect("b", [](AppendInputs& i) { i.cache.block_table.shape[0] = 1; });
  expect("b", [](AppendInputs& i) { i.b = -1; });
  expect("seqused_kv", [](AppendInputs& i) { i.seqused_kv = nullptr; });
  expect("cu_seqlens_k_new", [](AppendInputs& i) { i.cu_seqlens_k_new = nullptr; });
  expect("slots_64", [&](AppendInputs& i) {
    i.slots = ints_.data();
    i.slots_64 = longs_.data();
  });
  expect("seqused_kv", [&](AppendInputs& i) {  // for positions of the rotary embedding
    i.slots = ints_.data();
    i.seqused_kv = nullptr;
  });
  const auto odd = [](const auto* pointer) {
    return reinterpret_cast<decltype(pointer)>(reinterpret_cast<std::uintptr_t>(pointer) + 1);
  };
  expect("seqused_kv", [&](AppendInputs& i) { i.seqused_kv = odd(i.seqused_kv); });
  expect("slots", [&](AppendInputs& i) { i.slots = odd(ints_.data()); });
  expect("slots_64", [&](AppendInputs& i) { i.slots_64 = odd(longs_.data()); });
  expect("cache.batch_index", [&](AppendInputs& i) { i.cache.batch_index = odd(ints_.data()); });
  expect("rotary.positions", [&](AppendInputs& i) { i.rotary.positions = odd(ints_.data()); });
  case_.packed = false;
  expect("cu_seqlens_k_new", [&](AppendInputs& i) { i.cu_seqlens_k_new = ints_.data(); });
  case_.page_size = 0;
  expect("cache.block_table", [&](AppendInputs& i) {
    i.cache.block_table = TensorView(ints_.data(), DType::i32, {2, 2});
  });
  expect("b", [](AppendInputs& i) { i.k_cache.shape[0] = i.v_cache.shape[0] = 1; });
}

TEST_F(AppendRefuses, ValuesThatDoNotFit) {
  std::vector<std::int32_t> cu{0, 2, 4}, used{5, 22}, index{0, 1};
  const auto expect_with = [&](const std::string& argument, std::vector<std::int32_t>& array, std::size_t at,
                               std::int32_t value) {
    const std::int32_t before = std::exchange(array[at], value);
    expect(argument, [&](AppendInputs& i) {
      i.cu_seqlens_k_new = cu.data();
      i.seqused_kv = used.data();
      i.cache.batch_index = index.data();
    });
    array[at] = before;
  };
  expect_with("cu_seqlens_k_new[0]", cu, 0, -1);
  expect_with("cu_seqlens_k_new[2]", cu, 2, 1);
  expect_with("cu_seqlens_k_new[2]", cu, 2, 5);
  expect_with("seqused_kv[0]", used, 0, 1);   // fewer than the new ones
  expect_with("seqused_kv[1]", used, 1, 49);  // three pages of 16
  expect_with("seqused_kv[1]", used, 1, -5);
  expect_with("cache.batch_index[1]", index, 1, 2);
  expect_with("cache.batch_index[0]", index, 0, -1);
  const auto table_with = [&](std::int32_t page) {
    return [=](AppendInputs& i) { static_cast<std::int32_t*>(i.cache.block_table.data)[0] = page; };
  };
  for (const std::int32_t page : {-1, 1 << 20}) {
    AppendData data(case_);
    AppendInputs inputs = data.inputs();
    table_with(page)(inputs);
    expect_invalid("cache.block_table", [&] { host(case_.config()).append(inputs); });
  }
  case_.slots = RowNumbers::i64;
  case_.positions = RowNumbers::i32;
  AppendData data(case_);
  AppendInputs inputs = data.inputs();
  longs_[2] = inputs.k_cache.shape[0] * 16;
  inputs.slots_64 = longs_.data();
  expect_invalid("slots_64[2]", [&] { host(case_.config()).append(inputs); });
}

TEST_F(AppendRefuses, PageSizes) {
  for (const std::int64_t size : {kContiguous - 1, std::int64_t{1} << 31}) {
    AttentionConfig config = case_.config();
    config.page_size = size;
    expect_invalid("page_size", [&] { host(config); });
  }
}

TEST(Append, ShapesArePrepared) {
  AppendCase c;
  const Attention attention = host(c.config());
  EXPECT_EQ(attention.append_kernel_info({}).name, "fa_reference_append");
  attention.prepare_append({.rotary_dims = 64, .interleaved = true, .table = DType::f32});
  expect_invalid("rotary_dims", [&] { attention.prepare_append({.rotary_dims = 63}); });
  expect_invalid("rotary_dims", [&] { attention.prepare_append({.rotary_dims = 66}); });
  expect_invalid("table", [&] { attention.prepare_append({.table = DType::f32}); });
  expect_invalid("table", [&] { attention.prepare_append({.rotary_dims = 64, .table = DType::f16}); });
}

}  // namespace
}  // namespace fa
