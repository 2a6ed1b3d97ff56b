#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include <fa/error.hpp>

#include "fake_driver/launches_test.hpp"

// What a call with shared prefixes queues: its parts in their order, and nothing that depends on lengths.
namespace fa {
namespace {

constexpr std::int64_t kRequests = 256, kHeads = 32, kKvHeads = 8, kDim = 128, kPage = 16, kMaxPages = 600;

void* at(std::uintptr_t page) {
  return reinterpret_cast<void*>((std::uintptr_t{1} << 40) + (page << 32));
}
const std::int32_t* ints(std::uintptr_t page) {
  return static_cast<const std::int32_t*>(at(page));
}

class SharedLaunches : public LaunchesTest {
 protected:
  SharedLaunches() {
    config_.head_dim = kDim;
    config_.causal = true;
    config_.page_size = kPage;
  }

  static ForwardInputs inputs(std::int64_t rows) {
    ForwardInputs in{TensorView(at(1), DType::bf16, {kRequests, kHeads, rows, kDim}),
                     TensorView(at(2), DType::bf16, {10000, kPage, kKvHeads, kDim}).swap_axes(1, 2),
                     TensorView(at(3), DType::bf16, {10000, kPage, kKvHeads, kDim}).swap_axes(1, 2)};
    in.sequences.seqused_kv = ints(4);
    in.cache.block_table = TensorView(at(5), DType::i32, {kRequests, kMaxPages});
    in.cache.seq_begin = ints(6);
    return in;
  }
  static ForwardOutputs outputs(std::int64_t rows) {
    return {TensorView(at(7), DType::bf16, {kRequests, kHeads, rows, kDim})};
  }
  static SharedPrefix level(std::uintptr_t page, std::int64_t groups, bool first) {
    SharedPrefix prefix{TensorView(at(page), DType::i32, {groups, kMaxPages}), ints(page + 1), ints(page + 2)};
    if (!first) prefix.begin = ints(page + 3);
    return prefix;
  }

  /// Without what the stream's memory pool is asked for.
  std::vector<fake_driver::Launch> work() {
    std::vector<fake_driver::Launch> result;
    for (const fake_driver::Launch& launch : launches_()) {
      if (launch.kernel != "allocation" && launch.kernel != "release") result.push_back(launch);
    }
    return result;
  }
  std::vector<std::string> kernels() {
    std::vector<std::string> names;
    for (const fake_driver::Launch& launch : work()) names.push_back(launch.kernel);
    return names;
  }
};

/// Decodes: a group's rows are few tiles, whose keys thread blocks share.
TEST_F(SharedLaunches, AreThoseOfTheirParts) {
  const Attention attention = Attention::create(config_);
  const std::vector<SharedPrefix> levels{level(10, 1, true), level(20, 16, false)};
  ForwardInputs in = inputs(1);
  in.prefixes = levels;
  const AttentionShape shape{.b = kRequests, .h_q = kHeads, .h_kv = kKvHeads, .s_q = 1, .s_kv = kMaxPages * kPage};
  const std::vector<SharedPrefixShape> shapes{{1, 0, kMaxPages * kPage, false}, {16, 0, kMaxPages * kPage, true}};
  attention.prepare(shape, shapes);
  const std::size_t size = attention.workspace_size(shape, shapes);
  launches_().clear();
  attention.forward(in, outputs(1), nullptr, {at(100), size});
  EXPECT_EQ(kernels(), (std::vector<std::string>{"fa_schedule", "fa_sm80_forward", "fa_schedule", "fa_sm80_forward",
                                                 "fa_schedule", "fa_sm80_forward", "fa_merge_states"}));
  const std::vector<fake_driver::Launch> first = work();
  EXPECT_EQ(first.size(), launches_().size()) << "everything is in the workspace";
  EXPECT_THROW(attention.forward(in, outputs(1), nullptr, {at(100), size - 1}), Error);
  EXPECT_EQ(launches_().size(), first.size()) << "nothing is launched";
  launches_().clear();
  attention.forward(in, outputs(1));  // of the stream's memory pool
  ASSERT_EQ(work().size(), first.size());
  for (std::size_t i = 0; i < first.size(); ++i) EXPECT_EQ(work()[i].grid, first[i].grid) << i;
}

/// Prefills have tiles enough for the copy engine's kernel; own keys, which begin anywhere, are not its.
TEST_F(SharedLaunches, OfManyRowsTakeTheCopyEngine) {
  const Attention attention = Attention::create(config_);
  const std::vector<SharedPrefix> levels{level(10, 4, true)};
  ForwardInputs in = inputs(64);
  in.q = TensorView(at(1), DType::bf16, {kRequests, 64, kHeads, kDim}).swap_axes(1, 2);
  in.prefixes = levels;
  launches_().clear();
  attention.forward(in, outputs(64));
  EXPECT_EQ(kernels(),
            (std::vector<std::string>{"fa_schedule", "fa_sm80_forward", "fa_sm90_forward", "fa_merge_states"}));
}

/// Levels have whole groups: what they leave in rows behind the used ones is cleared behind the merge.
TEST_F(SharedLaunches, ClearRowsBehindTheUsedOnes) {
  config_.varlen = config_.zero_padding = true;
  const Attention attention = Attention::create(config_);
  const std::vector<SharedPrefix> levels{level(10, 1, true)};
  ForwardInputs in = inputs(1);
  in.q = TensorView(at(1), DType::bf16, {kRequests, kHeads, kDim});
  in.sequences.b = kRequests;
  in.sequences.cu_seqlens_q = ints(8);
  in.sequences.max_s_q = 1;
  in.prefixes = levels;
  const AttentionShape shape{
      .b = kRequests, .h_q = kHeads, .h_kv = kKvHeads, .s_q = 1, .s_kv = kMaxPages * kPage, .total_q = kRequests};
  const std::vector<SharedPrefixShape> shapes{{1, 0, kMaxPages * kPage, false}};
  attention.prepare(shape, shapes);
  const std::uint64_t compiles = attention.cache_counters().compiles;
  const ForwardOutputs out{TensorView(at(7), DType::bf16, {kRequests, kHeads, kDim}),
                           TensorView(at(9), DType::f32, {kHeads, kRequests})};
  launches_().clear();
  attention.forward(in, out);
  EXPECT_EQ(kernels().back(), "fa_merge_states");
  in.sequences.seqused_q = ints(30);
  launches_().clear();
  attention.forward(in, out);
  const std::vector<std::string> all = kernels();
  ASSERT_GT(all.size(), 3U);
  EXPECT_EQ(std::vector(all.end() - 3, all.end()),
            (std::vector<std::string>{"fa_merge_states", "fa_clear_padding", "fa_clear_padding"}));
  EXPECT_EQ(attention.cache_counters().compiles, compiles);
}

/// Scales are of pages: levels read those of the requests' own keys. Only the sm80 family reads such pages.
TEST_F(SharedLaunches, OfStoredPagesTakeTheirScales) {
  config_.k_dtype = DType::e4m3;
  config_.v_dtype = DType::u4x2;
  config_.group_size = 64;
  const Attention attention = Attention::create(config_);
  const std::vector<SharedPrefix> levels{level(10, 4, true), level(20, 16, false)};
  const AttentionShape shape{.b = kRequests, .h_q = kHeads, .h_kv = kKvHeads, .s_q = 64, .s_kv = kMaxPages * kPage};
  const std::vector<SharedPrefixShape> shapes{{4, 0, kMaxPages * kPage, false}, {16, 0, kMaxPages * kPage, true}};
  ForwardInputs in = inputs(64);
  in.q = TensorView(at(1), DType::bf16, {kRequests, 64, kHeads, kDim}).swap_axes(1, 2);
  in.k = TensorView(at(2), DType::e4m3, {10000, kPage, kKvHeads, kDim}).swap_axes(1, 2);
  in.v = TensorView(at(3), DType::u4x2, {10000, kPage, kKvHeads, kDim / 2}).swap_axes(1, 2);
  in.k_scale = TensorView(at(8), DType::f32, {10000, kKvHeads, kPage});
  in.v_scale = TensorView(at(9), DType::bf16, {10000, kPage, kKvHeads, 4}).swap_axes(1, 2);
  in.prefixes = levels;
  attention.prepare(shape, shapes);
  launches_().clear();
  attention.forward(in, outputs(64), nullptr, {at(100), attention.workspace_size(shape, shapes)});
  EXPECT_EQ(kernels(), (std::vector<std::string>{"fa_schedule", "fa_sm80_forward", "fa_schedule", "fa_sm80_forward",
                                                 "fa_schedule", "fa_sm80_forward", "fa_merge_states"}));
}

TEST_F(SharedLaunches, OfLatentRowsAreThoseOfTheirParts) {
  config_.head_dim = 576;
  config_.value_in_key = 512;
  config_.k_dtype = DType::e4m3;
  const Attention attention = Attention::create(config_);
  const std::vector<SharedPrefix> levels{level(10, 1, true)};
  ForwardInputs in;
  in.q = TensorView(at(1), DType::bf16, {kRequests, 16, 1, 576});
  in.k = TensorView(at(2), DType::e4m3, {10000, 1, kPage, 656});
  in.sequences.seqused_kv = ints(4);
  in.cache.block_table = TensorView(at(5), DType::i32, {kRequests, kMaxPages});
  in.cache.seq_begin = ints(6);
  in.prefixes = levels;
  launches_().clear();
  attention.forward(in, {TensorView(at(7), DType::bf16, {kRequests, 16, 1, 512})});
  EXPECT_EQ(kernels(), (std::vector<std::string>{"fa_schedule", "fa_sm80_forward", "fa_schedule", "fa_sm80_forward",
                                                 "fa_merge_states"}));
}

/// ALiBi of levels reads the rows' positions, and a tree of drafts is no part of them.
TEST_F(SharedLaunches, OfFunctionsByPositionAreThoseOfTheirParts) {
  config_.causal = false;
  config_.score = functions::alibi();
  config_.mask = functions::tree();
  const Attention attention = Attention::create(config_);
  std::vector<SharedPrefix> levels{level(10, 4, true)};
  levels[0].positions = TensorView(at(14), DType::i32, {4, kRequests * 8});
  ForwardInputs in = inputs(8);
  in.q = TensorView(at(1), DType::bf16, {kRequests, 8, kHeads, kDim}).swap_axes(1, 2);
  in.captures = {{"slope", TensorView(at(30), DType::f32, {kHeads})},
                 {"tree", TensorView(at(31), DType::i32, {kRequests, 8, 1})}};
  in.prefixes = levels;
  const AttentionShape shape{.b = kRequests, .h_q = kHeads, .h_kv = kKvHeads, .s_q = 8, .s_kv = kMaxPages * kPage};
  const std::vector<SharedPrefixShape> shapes{{4, 0, kMaxPages * kPage, false}};
  attention.prepare(shape, shapes);
  const std::uint64_t compiles = attention.cache_counters().compiles;
  launches_().clear();
  attention.forward(in, outputs(8), nullptr, {at(100), attention.workspace_size(shape, shapes)});
  EXPECT_EQ(attention.cache_counters().compiles, compiles) << "what was prepared serves the call";
  std::vector<std::string> attention_kernels;
  for (const std::string& kernel : kernels()) {
    if (kernel.ends_with("_forward")) attention_kernels.push_back(kernel);
  }
  ASSERT_EQ(attention_kernels.size(), 2U);
  EXPECT_EQ(attention_kernels[0], "fa_sm80_forward") << "own keys begin anywhere";
  EXPECT_EQ(kernels().back(), "fa_merge_states");
}

TEST_F(SharedLaunches, OfScatteredBatchEntriesAreRefused) {
  const Attention attention = Attention::create(config_);
  const std::vector<SharedPrefix> levels{level(10, 4, true)};
  ForwardInputs in = inputs(2);  // [b, h, s, d] in memory
  in.prefixes = levels;
  launches_().clear();
  try {
    attention.forward(in, outputs(2));
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    EXPECT_EQ(error.field("argument"), "q") << error.what();
  }
  EXPECT_TRUE(launches_().empty());
}

}  // namespace
}  // namespace fa
