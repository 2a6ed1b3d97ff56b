#include "plan/sm90_fp8_forward.hpp"

#include <gtest/gtest.h>

#include <string>

#include <fa/error.hpp>

#include "plan/call_plan.hpp"
#include "plan/catalogue.hpp"
#include "plan/planner.hpp"
#include "plan/workspace.hpp"

namespace fa::plan {
namespace {

Problem fp8(int d, DType dtype = DType::e4m3) {
  Problem problem;
  problem.arch = parse_arch("sm_90a");
  problem.dtype = problem.k_dtype = problem.v_dtype = dtype;
  problem.d_qk = problem.d_v = d;
  problem.b = 2;
  problem.h_q = problem.h_kv = 16;
  problem.s_q = problem.s_kv = 8192;
  return problem;
}

TEST(Sm90Fp8Forward, ServesEveryHeadDim) {
  for (const DType dtype : {DType::e4m3, DType::e5m2}) {
    for (int d_qk = 16; d_qk <= 256; d_qk += 16) {
      for (int d_v = 16; d_v <= 256; d_v += 16) {
        Problem problem = fp8(d_qk, dtype);
        problem.d_v = d_v;
        const ForwardPlan plan = plan_forward(problem, {});
        ASSERT_TRUE(plan.kernel.is<Sm90Fp8Forward>()) << canonical(plan.kernel);
        Alternatives all = plan.alternatives;
        all.push_back(plan.kernel);
        for (const KernelSpec& spec : all) {
          EXPECT_LE(shared_bytes(spec), limits(spec.arch).shared_per_block) << canonical(spec);
          EXPECT_EQ(spec.tile_m, plan.kernel.tile_m) << "grids are of the first choice";
          EXPECT_EQ(d_v % spec.as<Sm90Fp8Forward>().value_columns, 0) << canonical(spec);
        }
      }
    }
  }
}

TEST(Sm90Fp8Forward, HeadsThatDoNotFillATileAreNotPacked) {
  for (const bool varlen : {false, true}) {
    for (const int group : {3, 4, 5}) {
      Problem decode = fp8(128);
      decode.varlen = varlen;
      decode.h_kv = 8;
      decode.h_q = 8 * group;
      decode.s_q = 1;
      decode.total_q = decode.b;
      const KernelSpec spec = plan_forward(decode, {}).kernel;
      ASSERT_TRUE(spec.is<Sm90Fp8Forward>()) << group;
      EXPECT_EQ(spec.pack_gqa, spec.tile_m % group == 0) << group;
    }
  }
}

TEST(Sm90Fp8Forward, TwoLevelsUnlessAnOverrideWantsOne) {
  const KernelSpec spec = plan_forward(fp8(128), {}).kernel;
  EXPECT_FALSE(spec.as<Sm90Fp8Forward>().single_level);
  EXPECT_EQ(canonical(spec),
            "sm90_fp8_forward arch=sm_90a dtype=e4m3 d_qk=128 d_v=128 causal=0 positive_scale=1 tile_m=192 tile_n=128 "
            "stages=3 q_buffers=2 value_columns=128 take_turns=1 ahead=0 single_level=0 half_output=0 pack_gqa=0 "
            "split=0");
  const KernelSpec single = plan_forward(fp8(128), {Family::sm90_fp8, {{"single_level", 1}}}).kernel;
  EXPECT_TRUE(single.as<Sm90Fp8Forward>().single_level && !single.as<Sm90Fp8Forward>().ahead);
  Problem half = fp8(128);
  half.o_dtype = DType::f16;
  EXPECT_TRUE(plan_forward(half, {}).kernel.as<Sm90Fp8Forward>().half_output);
  half.o_dtype = DType::e4m3;
  EXPECT_TRUE(plan_forward(half, {}).kernel.as<Sm90Fp8Forward>().byte_output);
  EXPECT_NE(canonical(plan_forward(half, {}).kernel).find("byte_output=1"), std::string::npos);
}

TEST(Sm90Fp8Forward, ThreeConsumersOfI8TakeTurnsUnlessTheyHaveVariants) {
  for (const int d : {64, 96, 128}) {
    Problem problem = fp8(d);
    problem.dtype = DType::i8;
    for (const bool causal : {false, true}) {
      problem.causal = causal;
      const KernelSpec spec = plan_forward(problem, {}).kernel;
      EXPECT_EQ(spec.tile_m, 192) << d;
      EXPECT_TRUE(spec.as<Sm90Fp8Forward>().take_turns) << d;
      EXPECT_NE(canonical(spec).find("dtype=i8"), std::string::npos);
    }
    Variants variants;
    variants.sink = true;
    problem.variants = &variants;
    EXPECT_EQ(plan_forward(problem, {}).kernel.tile_m, 128) << d;
  }
}

TEST(Sm90Fp8Forward, ThreeConsumersTakeTurnsWhereMostKvTilesAreWhole) {
  const auto turns = [](const Problem& problem) {
    const KernelSpec spec = plan_forward(problem, {}).kernel;
    EXPECT_EQ(spec.tile_m, 192) << canonical(spec);
    return spec.as<Sm90Fp8Forward>().take_turns;
  };
  for (const std::int64_t s : {512, 2048, 3072, 8192}) {
    Problem problem = fp8(64);
    problem.s_q = problem.s_kv = s;
    EXPECT_TRUE(turns(problem)) << s;
    problem.causal = true;
    EXPECT_EQ(turns(problem), s >= 3072) << s;
    problem.causal_align = CausalAlign::top_left;
    problem.s_kv = 16384;
    EXPECT_EQ(turns(problem), s >= 3072) << "rows see as many keys: " << s;
    problem.d_qk = problem.d_v = 128;
    EXPECT_FALSE(turns(problem)) << s;
    problem.causal = false;
    EXPECT_TRUE(turns(problem)) << s;
  }
  EXPECT_FALSE(turns(fp8(96)));
  Problem decodes = fp8(64);
  decodes.b = 64;
  decodes.s_q = 1;
  EXPECT_FALSE(turns(decodes)) << "one consumer has rows";
  Variants variants;
  variants.sink = true;
  Problem problem = fp8(64);
  problem.variants = &variants;
  EXPECT_FALSE(turns(problem)) << "not measured";
  EXPECT_FALSE(plan_forward(fp8(64), {Family::sm90_fp8, {{"take_turns", 0}}}).kernel.as<Sm90Fp8Forward>().take_turns);
}

TEST(Sm90Fp8Forward, PreciseHasOneLevelOfSixteenBits) {
  for (const int d : {16, 64, 80, 128, 192, 256}) {
    Problem problem = fp8(d);
    problem.precise = true;
    const KernelSpec spec = plan_forward(problem, {}).kernel;
    const auto& own = spec.as<Sm90Fp8Forward>();
    EXPECT_TRUE(own.precise && own.single_level && own.ahead && own.take_turns) << d;
    EXPECT_EQ(own.value_columns, d);
    EXPECT_NE(canonical(spec).find("precise=1"), std::string::npos);
    EXPECT_THROW(plan_forward(problem, {Family::sm90_fp8, {{"single_level", 0}}}), Error);
    EXPECT_NO_THROW(plan_forward(problem, {Family::sm90_fp8, {{"tile_n", 48}}}));
    EXPECT_THROW(plan_forward(fp8(d), {Family::sm90_fp8, {{"tile_n", 48}}}), Error);
  }
}

TEST(Sm90Fp8Forward, PackedBatchesHaveTwoConsumers) {
  Problem packed = fp8(128);
  packed.varlen = true;
  packed.total_q = packed.total_kv = 9000;
  const KernelSpec spec = plan_forward(packed, {}).kernel;
  EXPECT_TRUE(spec.varlen);
  EXPECT_EQ(spec.tile_m, 128) << "what knows sequences does not fit three consumers' registers";
}

TEST(Sm90Fp8Forward, RefusesWhatNoKernelServes) {
  using Change = void (*)(Problem&);
  constexpr Change kChanges[] = {
      [](Problem& p) { p.arch = parse_arch("sm_80"); },
      [](Problem& p) { p.d_qk = 264; },
      [](Problem& p) { p.d_v = 40; },
      [](Problem& p) { p.page_size = 20, p.dtype = DType::i8; },
      [](Problem& p) { p.dropout = true; },
      [](Problem& p) { p.accumulate = true; },
      [](Problem& p) { p.invariance = Invariance::batch; },
      [](Problem& p) { p.value_in_key = true; },
      [](Problem& p) { p.aligned = false; },
      [](Problem& p) { p.tensor_maps = false, p.precise = true; },
      [](Problem& p) { p.dtype = DType::i8, p.arch = parse_arch("sm_89"); },
  };
  for (const Change change : kChanges) {
    Problem problem = fp8(128);
    change(problem);
    EXPECT_THROW(plan_forward(problem, {}), Error);
  }
  Variants mask;
  mask.mask = "q>=kv";
  Problem masked = fp8(128, DType::i8);
  masked.variants = &mask;
  EXPECT_THROW(plan_forward(masked, {}), Error);
  EXPECT_THROW(plan_forward(fp8(128), {Family::sm80}), Error);
  EXPECT_THROW(plan_forward(fp8(128), {Family::sm90}), Error);
  Problem plain = fp8(128, DType::bf16);
  EXPECT_EQ(choose(plain, {}).family, Family::sm90);
  EXPECT_THROW(plan_forward(plain, {Family::sm90_fp8}), Error);
}

TEST(Sm90Fp8Forward, NamesAWindowWithinAPage) {
  Variants window;
  window.left_window = true;
  Problem problem = fp8(128, DType::i8);
  problem.variants = &window;
  problem.page_size = 64;
  problem.window_left = 64;
  EXPECT_NO_THROW(plan_forward(problem, {}));
  problem.window_left = 63;
  try {
    plan_forward(problem, {});
    FAIL() << "a window of 63 keys over pages of 64";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unsupported);
    EXPECT_EQ(error.field("argument"), "window_left");
    EXPECT_EQ(error.field("value"), "63");
  }
}

TEST(Sm90Fp8Forward, RefusesFieldsThatDoNotFit) {
  const auto plan = [](const char* name, int value) {
    return plan_forward(fp8(128), {Family::sm90_fp8, {{name, value}}});
  };
  EXPECT_NO_THROW(plan("tile_m", 128));
  EXPECT_THROW(plan("tile_m", 96), Error);
  EXPECT_THROW(plan("tile_n", 48), Error);
  EXPECT_THROW(plan("tile_n", 288), Error);
  EXPECT_THROW(plan("stages", 9), Error);
  EXPECT_THROW(plan("q_buffers", 3), Error);
  EXPECT_THROW(plan("value_columns", 48), Error);
  EXPECT_NO_THROW(plan("splits", 2));
}

Problem few_rows(std::int64_t s_q, std::int64_t s_kv, int d = 128) {
  Problem problem = fp8(d);
  problem.b = 1;
  problem.h_q = 32;
  problem.h_kv = 8;
  problem.s_q = s_q;
  problem.s_kv = s_kv;
  return problem;
}

TEST(Sm90Fp8Forward, FewRowsOverLongKeysHaveSplits) {
  for (const int d : {16, 64, 96, 128, 192, 256}) {
    for (const bool precise : {false, true}) {
      Problem problem = few_rows(1, 32768, d);
      problem.precise = precise;
      EXPECT_EQ(choose(problem, {}).splits, 16);
      const KernelSpec spec = plan_forward(problem, {}).kernel;
      EXPECT_TRUE(spec.split && spec.pack_gqa);
      EXPECT_EQ(spec.tile_m, 64) << "other warpgroups would have no rows";
      EXPECT_FALSE(spec.as<Sm90Fp8Forward>().take_turns);
      for (const KernelSpec& other : plan_forward(problem, {}).alternatives) EXPECT_EQ(other.tile_m, 64);
    }
  }
  Problem problem = few_rows(128, 32768);
  EXPECT_EQ(choose(problem, {}).splits, 4);
  EXPECT_EQ(plan_forward(problem, {}).kernel.tile_m, 192);
  problem.s_q = 8192;
  EXPECT_EQ(choose(problem, {}).splits, 1);
  EXPECT_EQ(choose(few_rows(1, 300), {}).splits, 1);
  EXPECT_EQ(choose(few_rows(1, 32768), {{"splits", 5}}).splits, 5);
  EXPECT_EQ(choose(few_rows(1, 32768), {{"splits", 1}}).splits, 1);
  EXPECT_FALSE(plan_forward(few_rows(1, 32768), {{"splits", 1}}).kernel.split);
  EXPECT_EQ(plan_forward(few_rows(1, 32768), {{"splits", 1}}).kernel.tile_m, 192);
  EXPECT_EQ(plan_forward(few_rows(1, 32768), {Family::sm90_fp8, {{"tile_m", 128}}}).kernel.tile_m, 128);
  Problem odd = few_rows(1, 32768);
  odd.h_q = 24;
  EXPECT_TRUE(plan_forward(odd, {}).kernel.pack_gqa);
  EXPECT_EQ(plan_forward(odd, {}).kernel.tile_m, 192) << "the copy engine brings whole groups";
  EXPECT_NE(choose(odd, {}).slot(), choose(few_rows(1, 32768), {}).slot());
}

TEST(Sm90Fp8Forward, OneRequestOverPagesHasSplits) {
  Problem pages = few_rows(1, 32768);
  for (const int page_size : {8, 64, static_cast<int>(kContiguous)}) {
    pages.page_size = page_size;
    EXPECT_TRUE(choose(pages, {}).splits_request);
    EXPECT_EQ(choose(pages, {}).splits, 16);
    EXPECT_TRUE(plan_forward(pages, {}).kernel.split);
    Problem two = pages;
    two.b = 2;
    EXPECT_EQ(choose(two, {}).splits, 1) << "whose lengths the host does not know";
    EXPECT_FALSE(plan_forward(two, {}).kernel.split);
    Problem packed = pages;
    packed.varlen = true;
    packed.total_q = 1;
    EXPECT_EQ(choose(packed, {}).splits, 1);
    EXPECT_FALSE(plan_forward(packed, {Family::sm90_fp8, {{"splits", 2}}}).kernel.split);
  }
}

TEST(Sm90Fp8Forward, SplitsAreCombinedIntoWhatOIsOf) {
  for (const DType o_dtype : {DType::bf16, DType::f16, DType::e4m3}) {
    Problem problem = few_rows(1, 32768);
    problem.o_dtype = o_dtype;
    Variants sink;
    sink.sink = true;
    problem.variants = &sink;
    const ForwardPlan plan = plan_forward(problem, {});
    EXPECT_EQ(plan.combine.dtype, o_dtype);
    EXPECT_TRUE(plan.combine.variants.sink);
    EXPECT_EQ(kernels_of(plan).back().front(), plan.combine);
    const WorkspaceLayout layout =
        forward_workspace(problem, choose(problem, {}), forward_needs(problem, plan.kernel, 132, false));
    EXPECT_GE(layout.bytes(Section::partial_o), 16u * 32 * 128 * 4);
    EXPECT_TRUE(layout.has(Section::partial_lse));
  }
}

TEST(Sm90Fp8Forward, OverridesHaveOtherExponentialsAndBytes) {
  const auto plan = [](Problem problem, Fixed fixed) { return plan_forward(problem, fixed).kernel; };
  const KernelSpec usual = plan(fp8(64), {});
  EXPECT_FALSE(usual.as<Sm90Fp8Forward>().half_bytes);
  EXPECT_EQ(usual.as<Sm90Fp8Forward>().polynomials, 0);
  const KernelSpec other = plan(fp8(64), {Family::sm90_fp8, {{"half_bytes", 1}, {"polynomials", 2}}});
  EXPECT_NE(canonical(other).find("half_bytes=1 polynomials=2"), std::string::npos) << canonical(other);
  EXPECT_THROW(plan(fp8(64), {Family::sm90_fp8, {{"polynomials", 9}}}), Error);
  Problem precise = fp8(64);
  precise.precise = true;
  EXPECT_THROW(plan(precise, {Family::sm90_fp8, {{"half_bytes", 1}}}), Error);
  EXPECT_THROW(plan(precise, {Family::sm90_fp8, {{"polynomials", 1}}}), Error);
  Problem scaled = fp8(64);
  scaled.value_scales = true;
  EXPECT_THROW(plan(scaled, {Family::sm90_fp8, {{"half_bytes", 1}}}), Error) << "P has signs";
  const KernelSpec shared = plan(scaled, {Family::sm90_fp8, {{"shared_scales", 1}, {"scales_of_all", 1}}});
  EXPECT_EQ(shared_bytes(shared) - shared_bytes(plan(scaled, {})), 4 * 4 * shared.tile_n * shared.tile_m / 64);
  EXPECT_THROW(plan(fp8(64), {Family::sm90_fp8, {{"shared_scales", 1}}}), Error);
  EXPECT_THROW(plan(fp8(64), {Family::sm90_fp8, {{"scales_of_all", 1}}}), Error);
}

TEST(Sm90Fp8Forward, BoxesHave128Columns) {
  Problem problem = fp8(96);
  TensorView tensor(reinterpret_cast<void*>(4096), DType::e4m3, {2, 16, 8192, 96});
  ForwardTensors tensors{tensor, tensor, tensor, tensor, {}};
  tensors.o.dtype = DType::bf16;
  const Sm90ForwardMaps maps = sm90_forward_maps(tensors, plan_forward(problem, {}).kernel);
  for (const TensorMapSpec& map : {maps.q, maps.k, maps.v}) {
    EXPECT_EQ(map.box[0], 128u);
    EXPECT_EQ(map.sizes[0], 96u);
    EXPECT_EQ(map.strides[1], map.rank == 5 ? 96u : 8192u * 96u);
  }
  EXPECT_EQ(maps.o.box[0], 64u);
}

}  // namespace
}  // namespace fa::plan
