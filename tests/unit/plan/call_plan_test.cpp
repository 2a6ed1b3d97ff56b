#include "plan/call_plan.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <fa/error.hpp>
#include <string>
#include <vector>

#include "plan/column_sums.hpp"
#include "plan/mask_tiles.hpp"

#include <sm90/sm90_forward_layout.cuh>

namespace fa::plan {
namespace {

std::byte* at(std::uintptr_t address) {
  return reinterpret_cast<std::byte*>(address);
}

constexpr std::uintptr_t kBase = std::uintptr_t{1} << 40;
constexpr std::uintptr_t kLists = std::uintptr_t{1} << 44;

Problem some_problem(std::int64_t s, bool causal = false) {
  Problem p;
  p.arch = parse_arch("sm_90a");
  p.d_qk = p.d_v = 64;
  p.causal = causal;
  p.b = 2;
  p.h_q = p.h_kv = 4;
  p.s_q = p.s_kv = s;
  return p;
}

TensorView view(const Problem& p, std::int64_t heads, std::int64_t s) {
  return TensorView(static_cast<void*>(at(kBase)), DType::bf16, {p.b, s, heads, 64}).swap_axes(1, 2);
}

ForwardTensors forward_tensors(const Problem& p) {
  return {view(p, p.h_q, p.s_q), view(p, p.h_kv, p.s_kv), view(p, p.h_kv, p.s_kv), view(p, p.h_q, p.s_q), {}};
}

BackwardTensors backward_tensors(const Problem& p) {
  const TensorView rows = view(p, p.h_q, p.s_q);
  const TensorView keys = view(p, p.h_kv, p.s_kv);
  const TensorView lse(static_cast<void*>(at(kBase)), DType::f32, {p.b, p.h_q, p.s_q});
  return {rows, keys, keys, rows, rows, lse, {}, rows, keys, keys};
}

/// The first of each.
KernelSet first_of(const Problem& problem, const KernelChoices& choices) {
  KernelSet kernels;
  for (const Role role : kAllRoles) {
    if (!choices[role].empty()) kernels[role] = choices[role].front();
  }
  const KernelSet others = companions(problem, kernels);
  for (const Role role : kAllRoles) {
    if (others[role].warps != 0) kernels[role] = others[role];
  }
  return kernels;
}

/// The kernels of the steps, with "+" in front of what may start early.
std::vector<std::string> text_of(const CallPlan& call, const KernelSet& kernels) {
  std::vector<std::string> names;
  for (const Step& step : call.steps()) names.push_back((step.early ? "+" : "") + kernel_name(kernels[step.role]));
  return names;
}

using Names = std::vector<std::string>;

struct Planned {
  KernelSet kernels;
  CallPlan call;
};

void plan_forward_call(const Problem& p, const Fixed& fixed, bool listed, Planned* planned) {
  planned->kernels = first_of(p, kernel_choices(p, fixed));
  plan_call(p, choose(p, fixed), planned->kernels, forward_tensors(p), {0.5, 132, listed, {}}, planned->call);
}

void plan_backward_call(const Problem& p, const Fixed& fixed, bool deterministic, bool listed, Planned* planned) {
  planned->kernels = first_of(p, backward_kernel_choices(p, fixed, deterministic));
  plan_call(p, choose_backward(p, fixed), planned->kernels, backward_tensors(p), {0.5, 132, listed, {}}, planned->call);
}

TEST(CallPlan, APlainForwardIsOneLaunchWithFourMaps) {
  const Problem p = some_problem(512);
  Planned planned;
  plan_forward_call(p, {}, false, &planned);
  EXPECT_EQ(text_of(planned.call, planned.kernels), Names{"+fa_sm90_forward"});
  EXPECT_EQ(planned.call.workspace.bytes(), 0U);
  EXPECT_EQ(planned.call.cleared, 0U);
  EXPECT_EQ(planned.call.steps().front().params, &planned.call.forward_params.attention);
  std::vector<const kernel::TensorMap*> places;
  planned.call.encode_maps([&](const TensorMapSpec& spec, kernel::TensorMap& place) {
    EXPECT_EQ(spec.base, at(kBase));
    places.push_back(&place);
  });
  const kernel::Sm90ForwardVariantParams& params = planned.call.forward_params.attention;
  EXPECT_EQ(places,
            (std::vector<const kernel::TensorMap*>{&params.map_q, &params.map_k, &params.map_v, &params.map_o}));
}

TEST(CallPlan, TheSm80FamilyTakesWhatIsBehindTheMaps) {
  const Problem p = some_problem(512);
  Planned planned;
  plan_forward_call(p, {Family::sm80, {{"splits", 2}}}, false, &planned);
  EXPECT_EQ(text_of(planned.call, planned.kernels), (Names{"fa_sm80_forward", "+fa_forward_combine"}));
  for (const Step& step : planned.call.steps()) {
    EXPECT_EQ(step.params, &planned.call.forward_params.attention.base);
  }
  planned.call.encode_maps([](const TensorMapSpec&, kernel::TensorMap&) { ADD_FAILURE() << "there are none"; });
  planned.call.bind(planned.call.workspace.addresses(at(kBase), nullptr));
  const kernel::ForwardVariantParams& params = planned.call.forward_params.attention.base;
  EXPECT_EQ(params.partial_o, reinterpret_cast<float*>(kBase));
  EXPECT_EQ(params.partial_lse, params.partial_o + 2 * 2 * 4 * 512 * 64);
  EXPECT_EQ(params.next_tile, nullptr);
}

TEST(CallPlan, SplitsOfFewRowsMayHaveAMultiprocessorEach) {
  struct Case {
    std::int64_t s_q;
    Fixed fixed;
    bool alone;
  };
  const Case cases[] = {
      {1, {}, true},
      {5, {}, false},                                    // more rows than a merge that starts early has
      {1, {{"splits", 32}}, false},                      // more blocks than multiprocessors
      {1, {{"splits", 8}, {"split_blocks", 8}}, false},  // which no kernel merges
      {1, {Family::sm80, {{"splits", 8}}}, false},
  };
  for (const Case& c : cases) {
    Problem p = some_problem(8192);
    p.b = 1;
    p.h_q = 32;
    p.h_kv = 8;
    p.s_q = c.s_q;
    Planned planned;
    plan_forward_call(p, c.fixed, false, &planned);
    const Step& step = planned.call.steps().front();
    planned.call.bind(planned.call.workspace.addresses(at(kBase), nullptr));
    EXPECT_EQ(planned.call.forward_params.attention.base.merge.beside_lone, c.alone) << c.s_q;
    EXPECT_EQ(step.shared, c.alone ? sm90::kMoreThanHalf : 0) << c.s_q;
    if (!c.alone) continue;
    EXPECT_LT(shared_bytes(planned.kernels[Role::attention]), step.shared);
    EXPECT_EQ(most_shared_bytes(planned.kernels[Role::attention]), step.shared);
  }
}

/// Where most rows may need no merge. A block looks at many then.
TEST(CallPlan, MergesOfRowsThatMayBeWholeHaveFewBlocks) {
  for (const std::int64_t b : {8, 256}) {
    Problem p = some_problem(1024);
    p.invariance = Invariance::batch;
    p.page_size = -1;
    p.b = b;
    p.h_q = 32;
    p.h_kv = 8;
    p.s_q = 1;
    Planned planned;
    plan_forward_call(p, {}, false, &planned);
    ASSERT_EQ(text_of(planned.call, planned.kernels), (Names{"+fa_sm90_forward", "+fa_forward_combine"}));
    EXPECT_EQ(planned.call.forward_params.attention.base.merge.some_whole, b == 256);
    EXPECT_EQ(planned.call.steps().back().grid, b == 256 ? 132 * 2 : b * 32 * 2 / 4);
  }
}

TEST(CallPlan, TopKeysComeBehindSumsThatMayBeInTheWorkspace) {
  for (const bool counted : {false, true}) {
    Problem p = some_problem(counted ? 8192 : 512, true);
    if (counted) p.d_qk = p.d_v = 128;
    p.h_kv = 2;
    p.statistics = {MaxLogit::none, false, false, ColumnSums::kv_heads, 5};
    Planned alone;
    plan_forward_call(p, {}, false, &alone);
    EXPECT_EQ(alone.kernels[Role::attention].dynamic(), counted);
    EXPECT_EQ(text_of(alone.call, alone.kernels),
              (Names{counted ? "fa_sm90_forward" : "+fa_sm90_forward", "fa_column_sums", "fa_top_keys"}));
    const WorkspaceLayout& layout = alone.call.workspace;
    EXPECT_EQ(layout.bytes(Section::column_sums), sizeof(float) * static_cast<std::size_t>(2 * 2 * p.s_kv));
    EXPECT_LE(layout.bytes(), forward_workspace_size(p, {}, 132).bytes);
    alone.call.bind(layout.addresses(at(kBase), nullptr));
    const CallPlan::ForwardParams& params = alone.call.forward_params;
    EXPECT_EQ(params.sums.column_sums, reinterpret_cast<float*>(kBase + layout.offset(Section::column_sums)));
    EXPECT_EQ(params.top_keys.sums, params.sums.column_sums);
    EXPECT_EQ(params.top_keys.count, 5);
    EXPECT_EQ(params.top_keys.heads, 2);
    EXPECT_EQ(alone.call.step(Role::top_keys)->grid, 2 * 2);
    EXPECT_EQ(alone.call.step(Role::top_keys)->params, &params.top_keys);

    ForwardTensors given = forward_tensors(p);
    given.statistics.column_sums = TensorView(at(kLists), DType::f32, {2, 2, p.s_kv});
    given.statistics.top_keys = TensorView(at(kBase), DType::i32, {2, 2, 5});
    CallPlan call;
    plan_call(p, choose(p, {}), alone.kernels, given, {0.5, 132, false, {}}, call);
    EXPECT_FALSE(call.workspace.has(Section::column_sums));
    call.bind(call.workspace.addresses(at(kBase), nullptr));
    EXPECT_EQ(call.forward_params.sums.column_sums, reinterpret_cast<float*>(kLists));
    EXPECT_EQ(call.forward_params.top_keys.sums, reinterpret_cast<float*>(kLists));
    EXPECT_EQ(call.forward_params.top_keys.keys, reinterpret_cast<std::int32_t*>(kBase));
  }
}

TEST(CallPlan, TopKeysOfPackedBatches) {
  Problem p = some_problem(512);
  p.varlen = true;
  p.b = 7;
  p.total_q = p.total_kv = 900;
  p.statistics.top_keys = 9;  // of query heads
  Planned planned;
  plan_forward_call(p, {}, false, &planned);
  EXPECT_EQ(planned.call.workspace.bytes(Section::column_sums), sizeof(float) * 4 * 900);
  EXPECT_TRUE(planned.kernels[Role::top_keys].varlen);
  EXPECT_EQ(planned.call.step(Role::top_keys)->grid, 7 * 4);
  EXPECT_EQ(planned.call.forward_params.top_keys.sequences.total_kv, 900);
}

/// Of a causal call, heads whose rows fit the L2 cache together, in sections of one size.
TEST(CallPlan, ColumnSumsOfManyHeadsRunInSections) {
  const auto heads = [](std::int64_t b, std::int64_t s, ColumnSums sums) {
    Problem p = some_problem(s, true);
    p.b = b;
    p.h_q = 32;
    p.h_kv = 8;
    p.d_qk = p.d_v = 128;
    p.statistics.column_sums = sums;
    Planned planned;
    plan_forward_call(p, {}, false, &planned);
    return planned.call.forward_params.sums.heads_in_flight;
  };
  EXPECT_EQ(heads(1, 4096, ColumnSums::query_heads), 32) << "1 MiB each";
  EXPECT_EQ(heads(3, 4096, ColumnSums::query_heads), 32) << "of 96";
  EXPECT_EQ(heads(1, 12288, ColumnSums::query_heads), 8) << "10 fit";
  EXPECT_EQ(heads(1, 4096, ColumnSums::kv_heads), 8) << "4 MiB each";
  EXPECT_EQ(heads(1, std::int64_t{1} << 20, ColumnSums::kv_heads), 1);
}

TEST(CallPlan, ColumnSumsOfFewHeadsTakeFewerKeysABlock) {
  const auto keys = [](std::int64_t b, bool causal, ColumnSums sums) {
    Problem p = some_problem(4096, causal);
    p.b = b;
    p.h_q = 32;
    p.h_kv = 8;
    p.d_qk = p.d_v = 128;
    p.statistics.column_sums = sums;
    return column_sums_spec(p).tile_n;
  };
  EXPECT_EQ(keys(1, true, ColumnSums::kv_heads), 64) << "256 tiles of 128 keys";
  EXPECT_EQ(keys(2, true, ColumnSums::kv_heads), 128);
  EXPECT_EQ(keys(1, false, ColumnSums::kv_heads), 128) << "all are as long";
  EXPECT_EQ(keys(1, true, ColumnSums::query_heads), 128) << "of 32 heads";
}

/// Packed queries or not, each request has sums of all positions.
TEST(CallPlan, TopKeysOfRequestsOverPages) {
  constexpr std::int32_t kFirst = 3;
  for (const bool varlen : {false, true}) {
    Problem p = some_problem(512);
    p.varlen = varlen;
    p.b = 7;
    p.total_q = varlen ? 900 : 0;
    p.s_kv = 300;
    p.page_size = 16;
    p.k_dtype = DType::i8;
    p.statistics.top_keys = 9;
    Planned planned;
    plan_forward_call(p, {}, false, &planned);
    EXPECT_EQ(planned.call.workspace.bytes(Section::column_sums), sizeof(float) * 7 * 4 * 300);
    const KernelSpec& sums = planned.kernels[Role::column_sums];
    EXPECT_EQ(sums.page_size, 16);
    EXPECT_TRUE(sums.stored());
    EXPECT_EQ(planned.call.step(Role::column_sums)->grid, 7 * 4 * ((300 + sums.tile_n - 1) / sums.tile_n));
    EXPECT_TRUE(planned.kernels[Role::top_keys].as<TopKeys>().requests);
    EXPECT_EQ(planned.call.step(Role::top_keys)->grid, 7 * 4);
    EXPECT_EQ(planned.call.forward_params.top_keys.begin, nullptr);
    kernel::TopKeysParams params;
    top_keys_params(p, {}, &kFirst, nullptr, {}, params);
    EXPECT_EQ(params.begin, &kFirst);
  }
}

TEST(CallPlan, CountersAndNormsAreClearedInOnePlace) {
  Problem p = some_problem(8192, true);
  p.d_qk = p.d_v = 128;
  Planned counted;
  counted.kernels = first_of(p, kernel_choices(p, {}));
  ASSERT_TRUE(counted.kernels[Role::attention].dynamic());
  plan_forward_call(p, {}, false, &counted);
  EXPECT_EQ(text_of(counted.call, counted.kernels), Names{"fa_sm90_forward"}) << "in order, behind what is cleared";
  EXPECT_EQ(counted.call.cleared, sizeof(std::int32_t));
  counted.call.bind(counted.call.workspace.addresses(at(kBase), nullptr));
  EXPECT_EQ(counted.call.forward_params.attention.base.next_tile, reinterpret_cast<std::int32_t*>(kBase));

  Variants alibi;
  alibi.score = "score-a[h]*abs(float(q-kv))";
  alibi.affine = true;
  p.variants = &alibi;
  Planned reaching;
  plan_forward_call(p, {{"affine_reach", true}}, false, &reaching);
  EXPECT_EQ(text_of(reaching.call, reaching.kernels), (Names{"fa_row_norms", "fa_sm90_forward"}));
  EXPECT_EQ(reaching.call.cleared, kCounterBytes + 2 * (4 + 4) * sizeof(float));
  reaching.call.bind(reaching.call.workspace.addresses(at(kBase), nullptr));
  EXPECT_EQ(reaching.call.forward_params.attention.base.variant.norms,
            reinterpret_cast<std::uint32_t*>(kBase + kCounterBytes));
}

TEST(CallPlan, ABackwardOverlapsBehindItsFirstLaunch) {
  const Problem p = some_problem(512);
  Planned planned;
  plan_backward_call(p, {}, false, false, &planned);
  EXPECT_EQ(text_of(planned.call, planned.kernels),
            (Names{"fa_backward_preprocess", "+fa_sm90_backward", "+fa_backward_convert"}));
  Problem without_rows = p;
  without_rows.s_q = 0;
  Planned keys_only;
  keys_only.kernels = planned.kernels;
  plan_call(without_rows, {.family = Family::sm90}, planned.kernels, backward_tensors(without_rows),
            {0.5, 132, false, {}}, keys_only.call);
  EXPECT_EQ(text_of(keys_only.call, keys_only.kernels), Names{"fa_sm90_backward"}) << "the first is in order";
}

TEST(CallPlan, ListsAreWrittenInFrontOfWhoReadsThemUnlessTheyAreThere) {
  Problem p = some_problem(512);
  Variants mask;
  mask.mask = "q%3!=kv%3";
  p.variants = &mask;
  for (const bool listed : {false, true}) {
    Planned planned;
    plan_backward_call(p, {}, true, listed, &planned);
    Names expected{"fa_backward_preprocess",
                   planned.kernels[Role::attention].family() == Family::sm90 ? "fa_sm90_backward" : "fa_sm80_backward",
                   "fa_sm80_backward_dq"};
    if (!listed) {
      expected.insert(expected.begin() + 2, "fa_mask_rows");
      expected.insert(expected.begin() + 1, "fa_mask_keys");
    }
    EXPECT_EQ(text_of(planned.call, planned.kernels), expected);
    // The caller may have memory for lists, which lie one behind the other there, too.
    const WorkspaceLayout& layout = planned.call.workspace;
    EXPECT_EQ(layout.other_bytes() + layout.list_bytes(), layout.bytes());
    planned.call.bind(layout.addresses(at(kBase), at(kLists)));
    const CallPlan::BackwardParams& params = planned.call.backward_params;
    EXPECT_EQ(params.attention.base.variant.tile_lists, reinterpret_cast<std::int32_t*>(kLists));
    EXPECT_EQ(params.lists.lists, params.attention.base.variant.tile_lists);
    EXPECT_EQ(reinterpret_cast<std::byte*>(params.dq_lists.lists), at(kLists) + layout.bytes(Section::tile_lists));
    EXPECT_EQ(params.dq.variant.tile_lists, params.dq_lists.lists);
    EXPECT_EQ(params.attention.base.delta, params.dq.delta);
    EXPECT_EQ(params.attention.base.dq_accum, nullptr);
  }
}

TEST(CallPlan, SectionsFollowEachOtherAndASizeIsEnoughForAll) {
  for (const bool deterministic : {false, true}) {
    for (const std::int64_t s : {1, 77, 500, 3000}) {
      for (const int splits : {0, 3}) {
        for (const char* expression : {"", "q>kv"}) {
          Problem p = some_problem(s);
          Variants mask;
          mask.mask = expression;
          if (!mask.mask.empty()) p.variants = &mask;
          const Fixed fixed{{"splits", splits}};
          Planned forward;
          plan_forward_call(p, fixed, false, &forward);
          Planned backward;
          plan_backward_call(p, fixed, deterministic, false, &backward);
          EXPECT_LE(forward.call.workspace.bytes(), forward_workspace_size(p, fixed, 132).bytes);
          EXPECT_LE(backward.call.workspace.bytes(), backward_workspace_size(p, fixed, deterministic).bytes);
          for (const WorkspaceLayout* layout : {&forward.call.workspace, &backward.call.workspace}) {
            std::size_t end = 0;
            for (std::size_t i = 0; i < kSections; ++i) {
              const auto section = static_cast<Section>(i);
              if (!layout->has(section)) continue;
              EXPECT_GE(layout->offset(section), end) << name_of(section);
              EXPECT_EQ(layout->offset(section) % sizeof(float), 0U);
              end = layout->offset(section) + layout->bytes(section);
            }
            EXPECT_EQ(end, layout->bytes());
          }
        }
      }
    }
  }
}

TEST(CallPlan, PaddingOfTheLongestRowsDoesNotWrap) {
  Problem p = some_problem(512);
  p.b = p.h_q = p.h_kv = 1;
  p.s_q = (std::int64_t{1} << 31) - 1;
  Planned planned;
  plan_backward_call(p, {{"splits", 1}}, false, false, &planned);
  EXPECT_EQ(planned.call.step(Role::statistics)->grid, std::int64_t{1} << 27);
  EXPECT_EQ(planned.call.workspace.bytes(Section::delta), std::size_t{4} << 31);
}

TEST(CallPlan, GridsThatNobodyCountsAreRefused) {
  Problem p = some_problem(1 << 20);
  p.b = std::int64_t{1} << 24;
  Planned planned;
  try {
    plan_forward_call(p, {{"splits", 1}}, false, &planned);
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.field("argument"), "b * h_q * s_q");
  }
  Planned backward;
  try {
    plan_backward_call(p, {{"splits", 1}}, false, false, &backward);
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.field("argument"), "b * h * s");
  }
}

}  // namespace
}  // namespace fa::plan
