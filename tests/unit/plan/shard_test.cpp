// Calls that are parts of a larger attention, and calls that leave multiprocessors to others: what their kernels are
// launched with.

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <fa/error.hpp>

#include "plan/call_plan.hpp"
#include "plan/mask_tiles.hpp"
#include "plan/variant_launch.hpp"
#include "reference/geometry.hpp"
#include "support/shard_place.hpp"

namespace fa::plan {
namespace {

std::int64_t floor_div(std::int64_t a, std::int64_t b) {
  return a / b - (a % b != 0 && (a < 0) != (b < 0) ? 1 : 0);
}

/// Masks in closed form, as configurations have them; -1 and 0: none.
struct Masks {
  bool causal = false;
  CausalAlign align = CausalAlign::bottom_right;
  std::int64_t left = -1, right = -1, chunk = 0;
};

Problem problem_of(const Masks& masks, const ShardPlace& place, std::int64_t s_q, std::int64_t s_kv) {
  Problem p;
  p.s_q = s_q;
  p.s_kv = s_kv;
  p.causal = masks.causal || masks.right >= 0;
  p.causal_align = masks.align;
  p.window_left = std::max<std::int64_t>(masks.left, 0);
  p.window_right = masks.causal ? 0 : std::max<std::int64_t>(masks.right, 0);
  p.chunk = masks.chunk;
  p.placed = true;
  p.place = support::resolved(place, {p.b, p.h_q, s_q, s_kv});
  return p;
}

/// What a kernel keeps by its launch parameters (templates/common/variant.cuh).
bool keeps(const Problem& p, const Masks& masks, const kernel::VariantParams& params, std::int64_t i, std::int64_t j) {
  if (p.causal && j > i + causal_shift(p)) return false;
  if (masks.left >= 0 && j < i + params.diagonal - params.window_left) return false;
  if (masks.chunk == 0) return true;
  const std::int64_t chunk = floor_div(i + params.diagonal, params.chunk);
  return j >= chunk * params.chunk - params.chunk_keys && j < (chunk + 1) * params.chunk - params.chunk_keys;
}

reference::Geometry geometry_of(const Problem& p, const Masks& masks) {
  reference::Geometry g;
  g.s_q = p.s_q;
  g.s_kv = p.s_kv;
  g.causal = masks.causal;
  g.causal_align = masks.align;
  g.window_left = masks.left;
  g.window_right = masks.right;
  g.chunk = masks.chunk;
  g.place = *p.place;
  return g;
}

void expect_as_the_reference(const Problem& p, const Masks& masks, const std::string& what) {
  Variants variants;
  variants.left_window = masks.left >= 0;
  variants.chunked = variants.placed = masks.chunk > 0;
  Problem with = p;
  with.variants = &variants;
  const kernel::VariantParams params = variant_params(with, {}, 1);
  const reference::Geometry g = geometry_of(p, masks);
  for (std::int64_t i = 0; i < p.s_q; ++i) {
    for (std::int64_t j = 0; j < p.s_kv; ++j) {
      const bool expected = j >= g.first_key(i) && j < g.visible_keys(i);
      ASSERT_EQ(keeps(with, masks, params, i, j), expected) << what << ": row " << i << ", key " << j;
    }
  }
}

TEST(ShardLaunch, MasksOfAPartAreThoseOfTheWhole) {
  std::mt19937 engine(7);
  const auto pick = [&engine](std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(engine() % static_cast<std::uint64_t>(high - low + 1));
  };
  for (int n = 0; n < 3000; ++n) {
    const std::int64_t step = pick(1, 4);
    Masks masks;
    masks.causal = pick(0, 1) == 1;
    masks.align = pick(0, 1) == 1 ? CausalAlign::top_left : CausalAlign::bottom_right;
    if (pick(0, 1) == 1) masks.left = pick(0, 30);
    if (pick(0, 2) == 0) masks.right = masks.causal ? 0 : pick(0, 30);
    if (pick(0, 1) == 1) masks.chunk = pick(1, 20) * step;
    ShardPlace place;
    place.q = pick(0, 100);
    place.kv = pick(0, 100);
    place.q_step = place.kv_step = step;
    const std::int64_t s_q = pick(1, 12), s_kv = pick(1, 12);
    place.whole_s_q = place.q + s_q * step + pick(0, 100);
    place.whole_s_kv = place.kv + s_kv * step + pick(0, 100);
    expect_as_the_reference(problem_of(masks, place, s_q, s_kv), masks, "case " + std::to_string(n));
  }
}

// Sums of rows, keys and parameters stay within 32 bits, wherever the call stands.
TEST(ShardLaunch, ParametersStayWithinTheCallsLengths) {
  constexpr std::int64_t kWhole = std::int64_t{1} << 28;
  constexpr std::int64_t kLargest = std::numeric_limits<std::int64_t>::max();
  for (const std::int64_t q : {std::int64_t{0}, kWhole - 8}) {
    for (const std::int64_t kv : {std::int64_t{0}, kWhole - 12}) {
      for (const std::int64_t size : {std::int64_t{5}, kLargest}) {
        const Masks masks{.left = size, .right = size, .chunk = size};
        const Problem p = problem_of(masks, {.q = q, .kv = kv, .whole_s_q = kWhole, .whole_s_kv = kWhole}, 8, 12);
        Variants variants;
        variants.left_window = variants.chunked = variants.placed = true;
        Problem with = p;
        with.variants = &variants;
        const kernel::VariantParams params = variant_params(with, {}, 1);
        const std::int64_t most = std::int64_t{3} << 28;
        EXPECT_LE(std::abs(std::int64_t{params.diagonal}), most);
        EXPECT_LE(std::abs(std::int64_t{params.window_left}), most);
        EXPECT_LE(std::abs(std::int64_t{causal_shift(p)}), 12);
        EXPECT_GE(params.chunk, 1);
      }
    }
  }
}

TEST(ShardLaunch, AnotherWholeHasOtherPlacesForFunctions) {
  Variants variants;
  variants.score = "score+float(q)";
  variants.placed = true;
  Problem p = problem_of({},
                         {.b = 3,
                          .h_q = 4,
                          .q = 50,
                          .kv = 60,
                          .q_step = 2,
                          .kv_step = 3,
                          .whole_b = 7,
                          .whole_h_q = 8,
                          .whole_s_q = 900,
                          .whole_s_kv = 1000},
                         8, 12);
  p.variants = &variants;
  const kernel::VariantParams params = variant_params(p, {}, 1);
  const int expected[] = {3, 4, 50, 60, 2, 3, 900, 1000};
  for (std::size_t i = 0; i < std::size(expected); ++i) EXPECT_EQ(params.captures[i].place, expected[i]) << i;
  EXPECT_EQ(params.b, 4);  // entries of captures up to the call's last
  p.place.reset();
  const kernel::VariantParams whole = variant_params(p, {}, 1);
  const int own[] = {0, 0, 0, 0, 1, 1, 8, 12};
  for (std::size_t i = 0; i < std::size(own); ++i) EXPECT_EQ(whole.captures[i].place, own[i]) << i;
}

TEST(ShardLaunch, DropoutCountsTheHeadsOfTheWhole) {
  Variants variants;
  variants.placed = true;
  Problem p = problem_of({}, {.b = 3, .h_q = 4, .whole_b = 7, .whole_h_q = 8}, 8, 12);
  p.variants = &variants;
  kernel::DropoutParams params{};
  params.offset = 100;
  EXPECT_EQ(placed_dropout(p, params).offset, 100U + 3 * 8 + 4);
  EXPECT_EQ(placed_dropout(p, params).heads, 8);
  const std::uint64_t state[2] = {1, 2};
  params.state = state;
  EXPECT_EQ(placed_dropout(p, params).offset, 3U * 8 + 4);  // which is added to the other
  variants.placed = false;
  EXPECT_EQ(placed_dropout(p, params).offset, 100U);
}

constexpr std::uintptr_t kBase = std::uintptr_t{1} << 40;

Problem some_problem(const char* arch, std::int64_t s, bool causal) {
  Problem p;
  p.arch = parse_arch(arch);
  p.d_qk = p.d_v = 64;
  p.causal = causal;
  p.b = 2;
  p.h_q = p.h_kv = 8;
  p.s_q = p.s_kv = s;
  p.bounded = true;
  return p;
}

TensorView view(const Problem& p) {
  return TensorView(reinterpret_cast<void*>(kBase), DType::bf16, {p.b, p.s_q, p.h_q, 64}).swap_axes(1, 2);
}

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

struct Planned {
  KernelSet kernels;
  CallPlan call;

  std::int64_t grid() { return call.step(Role::attention)->grid; }
};

void plan_forward_call(const Problem& p, int multiprocessors, Planned* planned) {
  planned->kernels = first_of(p, kernel_choices(p, {}));
  const TensorView all = view(p);
  plan_call(p, choose(p, {}), planned->kernels, ForwardTensors{all, all, all, all, {}},
            {0.5, multiprocessors, false, {}}, planned->call);
}

void plan_backward_call(const Problem& p, bool deterministic, int multiprocessors, Planned* planned) {
  planned->kernels = first_of(p, backward_kernel_choices(p, {}, deterministic));
  const TensorView all = view(p);
  const TensorView lse(reinterpret_cast<void*>(kBase), DType::f32, {p.b, p.h_q, p.s_q});
  plan_call(p, choose_backward(p, {}), planned->kernels,
            BackwardTensors{all, all, all, all, all, lse, {}, all, all, all}, {0.5, multiprocessors, false, {}},
            planned->call);
}

TEST(BoundedLaunch, APersistentForwardTakesAsManyBlocks) {
  for (const bool causal : {false, true}) {
    for (const std::int64_t s : {512, 4096, 16384}) {
      Planned few, many;
      plan_forward_call(some_problem("sm_90a", s, causal), 20, &few);
      plan_forward_call(some_problem("sm_90a", s, causal), 100, &many);
      EXPECT_EQ(few.grid(), 20) << s;
      EXPECT_LE(many.grid(), 100) << s;
      EXPECT_EQ(few.kernels[Role::attention], many.kernels[Role::attention]) << "a kernel never knows how many";
    }
  }
}

TEST(BoundedLaunch, ListedTilesComeInOneWave) {
  Variants variants;
  variants.mask = "q%3!=kv%5";
  Problem p = some_problem("sm_90a", 4096, false);
  p.variants = &variants;
  Planned bounded;
  plan_forward_call(p, 20, &bounded);
  EXPECT_EQ(bounded.grid(), 20);
  EXPECT_TRUE(bounded.kernels[Role::attention].bounded);
  p.bounded = false;
  Planned waves;
  plan_forward_call(p, 20, &waves);
  EXPECT_GT(waves.grid(), 20);
  EXPECT_FALSE(waves.kernels[Role::attention].bounded);
}

TEST(BoundedLaunch, ABackwardOfLongTilesStays) {
  for (const std::int64_t s : {1024, 16384}) {
    Planned planned;
    plan_backward_call(some_problem("sm_90a", s, true), false, 20, &planned);
    EXPECT_EQ(planned.grid(), 20) << s;
  }
}

// Wherever parts of one shape stand, they have one kernel, which their shape prepares.
TEST(ShardLaunch, KernelsDoNotDependOnThePlace) {
  for (const CausalAlign align : {CausalAlign::bottom_right, CausalAlign::top_left}) {
    for (const std::int64_t s : {256, 1024, 4096}) {
      Problem p = some_problem("sm_90a", s, true);
      p.bounded = false;
      p.placed = true;
      p.causal_align = align;
      const KernelChoices forward = kernel_choices(p, {});
      const KernelChoices backward = backward_kernel_choices(p, {}, false);
      const int split_blocks = choose_backward(p, {}).split_blocks;
      for (const std::int64_t kv : {0, 64, 4096, 100000}) {
        p.place = support::resolved({.q = 8192, .kv = kv, .whole_s_q = 200000, .whole_s_kv = 200000},
                                    {p.b, p.h_q, p.s_q, p.s_kv});
        EXPECT_EQ(kernel_choices(p, {})[Role::attention], forward[Role::attention]);
        EXPECT_EQ(backward_kernel_choices(p, {}, false)[Role::attention], backward[Role::attention]);
        EXPECT_EQ(choose_backward(p, {}).split_blocks, split_blocks);
      }
    }
  }
}

TEST(BoundedLaunch, ABackwardOfFewTilesHasNoClusters) {
  Problem p = some_problem("sm_90a", 2048, false);
  p.b = 1;
  p.h_q = p.h_kv = 2;
  p.bounded = false;
  EXPECT_GT(choose_backward(p, {}).split_blocks, 1);
  p.bounded = true;
  Planned planned;
  plan_backward_call(p, false, 20, &planned);
  EXPECT_EQ(planned.grid(), 20);
}

template <class Plan>
void expect_refused(const Plan& plan, const std::string& kernel) {
  try {
    plan();
    ADD_FAILURE() << "more blocks than multiprocessors";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unsupported);
    EXPECT_EQ(error.field("argument"), "max_multiprocessors");
    EXPECT_NE(std::string(error.what()).find(kernel), std::string::npos) << error.what();
  }
}

TEST(BoundedLaunch, BlocksOfMmaSyncKernelsGoOnFromTileToTile) {
  for (const bool causal : {false, true}) {
    for (const bool deterministic : {false, true}) {
      const Problem p = some_problem("sm_80", 4096, causal);
      Planned forward, backward;
      plan_forward_call(p, 20, &forward);
      EXPECT_EQ(forward.grid(), 20);
      EXPECT_TRUE(forward.kernels[Role::attention].bounded);
      EXPECT_EQ(forward.kernels[Role::attention].min_blocks, 1) << "a multiprocessor has one";
      plan_backward_call(p, deterministic, 20, &backward);
      EXPECT_EQ(backward.grid(), 20);
      if (!deterministic) continue;
      EXPECT_EQ(backward.call.step(Role::dq)->grid, 20);
    }
  }
  Planned small;  // whose tiles are fewer anyway
  plan_forward_call(some_problem("sm_80", 128, true), 40, &small);
  EXPECT_LE(small.grid(), 40);
}

/// Tiles, stages and the rest, which decide what is added to what.
TEST(BoundedLaunch, AnMmaSyncKernelDiffersInItsGridAlone) {
  for (const DType dtype : {DType::bf16, DType::f32}) {
    for (const int d : {64, 128, 192, 256, 512}) {
      Problem p = some_problem("sm_80", 4096, true);
      p.dtype = dtype;
      p.d_qk = p.d_v = d;
      KernelSpec bounded = kernel_choices(p, {})[Role::attention].front();
      p.bounded = false;
      const KernelSpec other = kernel_choices(p, {})[Role::attention].front();
      EXPECT_TRUE(bounded.bounded);
      bounded.bounded = false;
      bounded.min_blocks = other.min_blocks;
      EXPECT_EQ(bounded, other);
    }
  }
}

// Blocks that wait for each other start in an order that a bounded grid does not have.
TEST(BoundedLaunch, AGridOfATileABlockIsRefused) {
  Planned ordered;
  expect_refused([&] { plan_backward_call(some_problem("sm_90a", 4096, true), true, 20, &ordered); },
                 "fa_sm90_backward");
}

// What lists of tiles are of, their tag says.
TEST(ShardLaunch, ListsOfAnotherPlaceAreOthers) {
  Variants variants;
  variants.mask = "q%3!=kv%5";
  variants.placed = true;
  Problem p = some_problem("sm_90a", 512, false);
  p.variants = &variants;
  p.placed = true;
  p.place = support::resolved({.kv = 32}, {p.b, p.h_q, p.s_q, p.s_kv});
  const KernelSet kernels = first_of(p, kernel_choices(p, {}));
  const std::uint64_t tag = lists_tag(p, kernels);
  EXPECT_EQ(lists_tag(p, kernels), tag);
  for (std::int64_t ShardPlace::*member :
       {&ShardPlace::b, &ShardPlace::h_q, &ShardPlace::q, &ShardPlace::kv, &ShardPlace::q_step, &ShardPlace::kv_step,
        &ShardPlace::whole_s_q, &ShardPlace::whole_s_kv}) {
    Problem other = p;
    ++((*other.place).*member);
    EXPECT_NE(lists_tag(other, kernels), tag);
  }
}

}  // namespace
}  // namespace fa::plan
