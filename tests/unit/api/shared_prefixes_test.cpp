// Shared prefixes on the host device, through the public API: against calls that share nothing, and what is refused.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <fa/attention.hpp>

#include "expect_error.hpp"
#include "support/shared_case.hpp"

namespace fa {
namespace {

using test::expect_error;
using test::expect_invalid;
using test::SharedCase;
using test::SharedData;

/// A call over a case's memory.
struct Shared {
  explicit Shared(const SharedCase& of) : c(of), data(make_data(of)), outputs(make_outputs(of, data)) {}

  ForwardInputs inputs() {
    ForwardInputs in{data.q.view(), data.k.view(), c.value_in_key ? TensorView() : data.v.view()};
    if (c.sink) in.sink = TensorView(static_cast<void*>(data.sink.bytes().data()), DType::f32, {c.attention.h_q});
    in.captures = data.captures(c);
    in.k_scale = data.k_scales();
    in.v_scale = data.v_scales();
    in.sequences.b = c.b();
    if (c.packed) in.sequences.cu_seqlens_q = data.cu_q.data();
    in.sequences.seqused_kv = data.used_kv.data();
    in.sequences.max_s_q = data.max_s_q;
    in.sequences.max_s_kv = data.max_s_kv;
    in.cache.block_table = table(data.table, c.b());
    in.cache.seq_begin = data.begin.data();
    levels.clear();
    for (SharedData::Level& level : data.levels) {
      const auto groups = level.groups;
      SharedPrefix prefix{table(level.table, groups), level.cu_rows.data(), level.lengths.data()};
      if (!level.begin.empty()) prefix.begin = level.begin.data();
      prefix.positions = TensorView(static_cast<void*>(level.positions.data()), DType::i32,
                                    {groups, static_cast<std::int64_t>(level.positions.size()) / groups});
      prefix.max_rows = level.max_rows;
      prefix.max_length = level.max_length;
      levels.push_back(prefix);
    }
    in.prefixes = levels;
    return in;
  }
  TensorView table(std::vector<std::int32_t>& entries, std::int64_t rows) const {
    return TensorView(static_cast<void*>(entries.data()), DType::i32, {rows, data.max_pages});
  }
  void run(const ForwardInputs& in) {
    Attention::create(c.config(), Device::host()).forward(in, {outputs.o.view(), outputs.lse.view()});
  }
  void expect_right() {
    const test::AttentionOutputs expected = reference_f64(c, data);
    const DType dtype = c.attention.dtype;
    const double bound = dtype == DType::bf16 ? 2e-2 : dtype == DType::f16 ? 3e-3 : 2e-6;
    EXPECT_LE(worst_of(c, data, outputs.o, expected.o), bound) << "o";
    EXPECT_LE(worst_of(c, data, outputs.lse, expected.lse), 2e-5) << "lse";
  }

  SharedCase c;
  SharedData data;
  test::AttentionOutputs outputs;
  std::vector<SharedPrefix> levels;
};

SharedCase two_levels() {
  SharedCase c;
  c.attention.dtype = DType::f32;
  c.attention.d_qk = c.attention.d_v = 16;
  c.attention.h_q = 4;
  c.attention.h_kv = 2;
  c.attention.causal = true;
  c.page_size = 4;
  c.levels = {{{3, 9}, {2, 8}}, {{2, 3}, {1, 0}, {2, 6}}};
  c.rows = {2, 2, 2, 2, 2};
  c.keys = {5, 2, 7, 3, 4};
  return c;
}

class SharedPrefixes : public testing::TestWithParam<std::uint32_t> {};

TEST_P(SharedPrefixes, AreWhatACallWithoutThemComputes) {
  Shared shared(test::random_shared_case(GetParam()));
  SCOPED_TRACE(testing::PrintToString(shared.c));
  shared.run(shared.inputs());
  shared.expect_right();
}

INSTANTIATE_TEST_SUITE_P(Seeds, SharedPrefixes, testing::Range(0u, 40u));

class StoredSharedPrefixes : public testing::TestWithParam<std::uint32_t> {};

TEST_P(StoredSharedPrefixes, AreWhatACallWithoutThemComputes) {
  Shared shared(test::random_stored_case(GetParam()));
  SCOPED_TRACE(testing::PrintToString(shared.c));
  shared.run(shared.inputs());
  shared.expect_right();
}

INSTANTIATE_TEST_SUITE_P(Seeds, StoredSharedPrefixes, testing::Range(0u, 30u));

class SharedPrefixFunctions : public testing::TestWithParam<std::uint32_t> {};

TEST_P(SharedPrefixFunctions, AreThoseOfTheWholeRequest) {
  Shared shared(test::random_function_case(GetParam()));
  SCOPED_TRACE(testing::PrintToString(shared.c));
  shared.run(shared.inputs());
  shared.expect_right();
}

INSTANTIATE_TEST_SUITE_P(Seeds, SharedPrefixFunctions, testing::Range(0u, 50u));

// A mask that keeps the whole prefix is no part of a level, and needs no positions.
TEST(SharedPrefixCalls, OfTreesNeedNoPositions) {
  for (const MaskFunction& mask : {functions::tree(), functions::prefix_lm()}) {
    SharedCase c = two_levels();
    c.attention.causal = false;
    c.mask = mask;
    Shared shared(c);
    ForwardInputs in = shared.inputs();
    for (SharedPrefix& level : shared.levels) level.positions = {};
    in.prefixes = shared.levels;
    shared.run(in);
    shared.expect_right();
  }
}

TEST(SharedPrefixCalls, OfFunctionsOfRowsNeedPositions) {
  for (const bool score : {false, true}) {
    SharedCase c = two_levels();
    if (score) c.score = functions::alibi();
    if (!score) c.mask = {"q + s_kv - s_q - kv < 6 || kv < 2"};
    Shared shared(c);
    shared.run(shared.inputs());
    shared.expect_right();
    ForwardInputs in = shared.inputs();
    shared.levels[0].positions = {};
    in.prefixes = shared.levels;
    expect_invalid("prefixes[0].positions", [&] { shared.run(in); });
  }
}

TEST(SharedPrefixCalls, OfFunctionsAreGivenWhatTheseCaptureAlone) {
  SharedCase c = two_levels();
  c.score = functions::alibi();
  Shared shared(c);
  ForwardInputs in = shared.inputs();
  in.captures = {};
  expect_invalid("captures[slope]", [&] { shared.run(in); });
  in = shared.inputs();
  in.captures.add({"shared_positions", 1.0});
  expect_invalid("captures[shared_positions]", [&] { shared.run(in); });
}

// Positions are read from memory: an index that they reach is bounded by the function alone.
TEST(SharedPrefixCalls, OfIndicesByPositionNeedAClamp) {
  SharedCase c = two_levels();
  c.score = {"score + slope[q + s_kv - s_q]", {{"slope", DType::f32}}};
  Shared shared(c);
  const std::vector<float> slope(1000);
  ForwardInputs in = shared.inputs();
  in.captures = {{"slope", TensorView(slope.data(), DType::f32, {1000})}};
  expect_invalid("captures[slope]", [&] { shared.run(in); });
}

TEST(SharedPrefixCalls, OfStoredCachesNeedTheirScales) {
  SharedCase c = two_levels();
  c.attention.dtype = DType::bf16;
  c.k_dtype = DType::e4m3;
  c.v_dtype = DType::i8;
  Shared shared(c);
  shared.run(shared.inputs());
  shared.expect_right();
  ForwardInputs in = shared.inputs();
  in.k_scale = {};
  expect_invalid("k_scale", [&] { shared.run(in); });
  in = shared.inputs();
  in.v_scale.shape[1] = 1;
  expect_invalid("v_scale", [&] { shared.run(in); });
  in = shared.inputs();
  TensorView written = shared.outputs.lse.view();
  written.data = in.k_scale.data;
  expect_invalid("lse", [&] {
    Attention::create(c.config(), Device::host()).forward(in, {shared.outputs.o.view(), written});
  });
}

// What a server of drafts asks for: trees behind a shared prompt, over stored pages or latent rows.
TEST(SharedPrefixCalls, OfDraftsOverStoredPages) {
  for (const bool latent : {false, true}) {
    SharedCase c = two_levels();
    c.attention.dtype = DType::bf16;
    c.attention.causal = false;
    c.rows = {5, 5, 5, 5, 5};
    c.keys = {5, 9, 7, 6, 8};
    c.mask = functions::tree();
    c.k_dtype = DType::e4m3;
    if (latent) {
      c.attention.h_kv = 1;
      c.attention.d_qk = 576;
      c.attention.d_v = 512;
      c.value_in_key = true;
    } else {
      c.attention.d_v = 32;
      c.v_dtype = DType::u4x2;
      c.group_size = 32;
    }
    Shared shared(c);
    EXPECT_EQ(shared.data.k.view().shape[3], latent ? 656 : 16);
    shared.run(shared.inputs());
    shared.expect_right();
  }
}

// Levels see whole groups: what they make of rows behind the used ones is no part of the answer.
TEST(SharedPrefixCalls, ClearRowsBehindTheUsedOnes) {
  SharedCase c = two_levels();
  c.packed = c.zero_padding = true;
  Shared shared(c);
  ForwardInputs in = shared.inputs();
  const std::vector<std::int32_t> used{1, 2, 0, 2, 1};
  in.sequences.seqused_q = used.data();
  shared.run(in);
  for (std::size_t i = 0; i < used.size(); ++i) {
    for (std::int64_t row = shared.data.cu_q[i]; row < shared.data.cu_q[i + 1]; ++row) {
      const bool is_used = row < shared.data.cu_q[i] + used[i];
      for (std::int64_t h = 0; h < c.attention.h_q; ++h) {
        EXPECT_EQ(std::isfinite(shared.outputs.lse.at(0, h, row)), is_used) << row;
        for (std::int64_t d = 0; d < c.attention.d_v; ++d) {
          EXPECT_EQ(shared.outputs.o.at(0, h, row, d) != 0, is_used) << row;
        }
      }
    }
  }
}

TEST(SharedPrefixCalls, NeedNoLse) {
  Shared shared(two_levels());
  shared.run(shared.inputs());
  Shared other(two_levels());
  Attention::create(other.c.config(), Device::host()).forward(other.inputs(), {other.outputs.o.view()});
  EXPECT_EQ(other.outputs.o.bytes(), shared.outputs.o.bytes());
}

TEST(SharedPrefixCalls, TakeValuesInKeys) {
  SharedCase c = two_levels();
  c.attention.d_v = 8;
  c.value_in_key = true;
  Shared shared(c);
  shared.run(shared.inputs());
  shared.expect_right();
}

TEST(SharedPrefixCalls, WithoutLevelsAreOthers) {
  Shared shared(two_levels());
  ForwardInputs in = shared.inputs();
  in.prefixes = {};
  in.cache.block_table = shared.table(shared.data.whole_table, shared.c.b());
  in.cache.seq_begin = nullptr;
  shared.run(in);
  shared.expect_right();
}

TEST(SharedPrefixCalls, OfMistakesAreRefused) {
  const auto refused = [](const std::string& argument, const std::function<void(Shared&, ForwardInputs&)>& spoil) {
    Shared shared(two_levels());
    ForwardInputs in = shared.inputs();
    spoil(shared, in);
    in.prefixes = shared.levels;
    expect_invalid(argument, [&] { shared.run(in); });
    EXPECT_TRUE(std::isnan(shared.outputs.o.at(0, 0, 0, 0))) << argument;
  };
  refused("prefixes", [](Shared& s, ForwardInputs&) { s.levels.resize(9, s.levels[0]); });
  refused("cache.seq_begin", [](Shared&, ForwardInputs& in) { in.cache.seq_begin = nullptr; });
  refused("prefixes[1].block_table", [](Shared& s, ForwardInputs&) { s.levels[1].block_table = {}; });
  refused("prefixes[0].block_table", [](Shared& s, ForwardInputs&) { s.levels[0].block_table.dtype = DType::f32; });
  refused("prefixes[0].cu_rows", [](Shared& s, ForwardInputs&) { s.levels[0].cu_rows = nullptr; });
  refused("prefixes[1].lengths", [](Shared& s, ForwardInputs&) { s.levels[1].lengths = nullptr; });
  for (const int rank : {-1, 1'000'000}) {
    refused("prefixes[0].block_table", [=](Shared& s, ForwardInputs&) { s.levels[0].block_table.rank = rank; });
  }
  refused("prefixes[0].block_table", [](Shared& s, ForwardInputs&) { s.levels[0].block_table.data = nullptr; });
  for (const std::int64_t stride : {std::int64_t{1} << 62, std::numeric_limits<std::int64_t>::min()}) {
    refused("prefixes[0].block_table", [=](Shared& s, ForwardInputs&) { s.levels[0].block_table.strides[0] = stride; });
  }
  for (const std::int64_t size : {std::int64_t{-5}, std::int64_t{1} << 62}) {
    refused("prefixes[1].block_table", [=](Shared& s, ForwardInputs&) { s.levels[1].block_table.shape[1] = size; });
  }
  refused("prefixes[1].max_rows", [](Shared& s, ForwardInputs&) { s.levels[1].max_rows = -1; });
  refused("prefixes[1].max_length", [](Shared& s, ForwardInputs&) { s.levels[1].max_length = -1; });
  // What arrays hold.
  refused("prefixes[0].cu_rows", [](Shared& s, ForwardInputs&) { s.data.levels[0].cu_rows[1] = 5; });
  refused("prefixes[0].cu_rows", [](Shared& s, ForwardInputs&) { s.data.levels[0].cu_rows[2] = 8; });
  refused("prefixes[1].begin[0]", [](Shared& s, ForwardInputs&) { s.data.levels[1].begin[0] = 8; });
  refused("cache.seq_begin[2]", [](Shared& s, ForwardInputs&) { s.data.begin[2] = 8; });
  refused("seqused_kv[1]", [](Shared& s, ForwardInputs&) { s.data.used_kv[1] = 13; });
  refused("cache.block_table[1][0]",
          [](Shared& s, ForwardInputs&) { s.data.levels[0].table[static_cast<std::size_t>(s.data.max_pages)] = -1; });
}

/// A field of a level, moved to the front of memory of its own. Returns what it has last.
std::int32_t* move_to(std::vector<std::int32_t>& room, SharedPrefix& prefix, const std::string& field) {
  const auto moved = [&room](const std::int32_t* from, std::int64_t count) {
    std::copy_n(from, count, room.begin());
    return room.data();
  };
  const auto move_view = [&](TensorView& view) {
    EXPECT_EQ(view.strides[0], view.shape[1]);
    view.data = moved(static_cast<const std::int32_t*>(view.data), view.elements());
    return room.data() + view.elements() - 1;
  };
  const std::int64_t groups = prefix.block_table.shape[0];
  if (field == "block_table") return move_view(prefix.block_table);
  if (field == "positions") return move_view(prefix.positions);
  if (field == "cu_rows") prefix.cu_rows = moved(prefix.cu_rows, groups + 1);
  if (field == "lengths") prefix.lengths = moved(prefix.lengths, groups);
  if (field == "begin") prefix.begin = moved(prefix.begin, groups);
  return room.data() + groups - (field == "cu_rows" ? 0 : 1);
}

// An output begins at the last number that a level reads, or behind it.
TEST(SharedPrefixCalls, OutputsShareNoMemoryWithWhatLevelsRead) {
  SharedCase c = two_levels();
  c.window_left = 6;
  Shared shared(c);
  ForwardInputs in = shared.inputs();
  const std::vector<SharedPrefix> levels = shared.levels;
  const Attention attention = Attention::create(c.config(), Device::host());
  for (std::size_t level = 0; level < levels.size(); ++level) {
    for (const std::string field : {"block_table", "cu_rows", "lengths", "begin", "positions"}) {
      if (field == "begin" && levels[level].begin == nullptr) continue;
      std::vector<std::int32_t> room(4096);
      shared.levels = levels;
      std::int32_t* const last = move_to(room, shared.levels[level], field);
      in.prefixes = shared.levels;
      for (const std::string name : {"o", "lse"}) {
        const std::string other = "prefixes[" + std::to_string(level) + "]." + field;
        ForwardOutputs out{shared.outputs.o.view(), shared.outputs.lse.view()};
        TensorView& written = name == "o" ? out.o : out.lse;
        written.data = last;
        try {
          attention.forward(in, out);
          ADD_FAILURE() << name << " over " << other;
        } catch (const Error& error) {
          EXPECT_EQ(error.what(),
                    name + " = memory shared with " + other + ": accepted is an output that overlaps no other tensor");
        }
        written.data = last + 1;
        EXPECT_NO_THROW(attention.forward(in, out)) << name << " behind " << other;
      }
      const ForwardOutputs out{shared.outputs.o.view(), shared.outputs.lse.view()};
      const auto with_workspace = [&](std::int32_t* data) { attention.forward(in, out, nullptr, {data, 64}); };
      expect_invalid("workspace", [&] { with_workspace(last); });
      EXPECT_NO_THROW(with_workspace(last + 1));
    }
  }
}

TEST(SharedPrefixCalls, HaveAtMostEightLevelsWhereverTheyAreNamed) {
  const SharedCase c = two_levels();
  const Attention attention = Attention::create(c.config(), Device::host());
  const AttentionShape shape{.b = 2, .h_q = 4, .h_kv = 2, .s_q = 1, .s_kv = 8};
  const std::vector<SharedPrefixShape> eight(8), nine(9);
  EXPECT_NO_THROW(attention.prepare(shape, eight));
  EXPECT_GT(attention.workspace_size(shape, eight), 0U);
  expect_invalid("prefixes", [&] { attention.prepare(shape, nine); });
  expect_invalid("prefixes", [&] { attention.workspace_size(shape, nine); });
}

TEST(SharedPrefixCalls, OfConfigurationsWithoutAMeaningAreRefused) {
  const auto refused = [](ErrorCode code, const std::string& argument,
                          const std::function<void(AttentionConfig&)>& change) {
    Shared shared(two_levels());
    AttentionConfig config = shared.c.config();
    change(config);
    expect_error(code, argument, [&] {
      Attention::create(config, Device::host())
          .forward(shared.inputs(), {shared.outputs.o.view(), shared.outputs.lse.view()});
    });
  };
  refused(ErrorCode::unsupported, "invariance", [](AttentionConfig& config) { config.invariance = Invariance::batch; });
  refused(ErrorCode::unsupported, "accumulate", [](AttentionConfig& config) { config.accumulate = true; });
  for (const char* const mask : {"kv < q || kv != 3", "b == 1 || kv != 3", "kv < s_kv - s_q - 1 || q == kv"}) {
    refused(ErrorCode::unsupported, "config.mask", [=](AttentionConfig& config) { config.mask = {mask}; });
  }
  refused(ErrorCode::unsupported, "config.mask", [](AttentionConfig& config) { config.mask = functions::documents(); });
  refused(ErrorCode::unsupported, "config.score",
          [](AttentionConfig& config) { config.score = {"score + float(q - kv)"}; });
  refused(ErrorCode::unsupported, "config.score",
          [](AttentionConfig& config) { config.score = {"score + float(q) + float(s_kv) - float(s_q)"}; });
  refused(ErrorCode::unsupported, "config.score", [](AttentionConfig& config) { config.score = {"score + float(b)"}; });
  refused(ErrorCode::unsupported, "config.score",
          [](AttentionConfig& config) { config.score = {"score + float(s_kv)"}; });
}

TEST(SharedPrefixCalls, OfWindowsNeedPositions) {
  SharedCase c = two_levels();
  c.window_left = 6;
  Shared shared(c);
  shared.run(shared.inputs());
  shared.expect_right();
  ForwardInputs in = shared.inputs();
  shared.levels[1].positions = {};
  in.prefixes = shared.levels;
  expect_invalid("prefixes[1].positions", [&] { shared.run(in); });
}

}  // namespace
}  // namespace fa
