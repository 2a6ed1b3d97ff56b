#include "plan/fixed.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>

#include <fa/error.hpp>

#include "plan/backward.hpp"
#include "plan/catalogue.hpp"
#include "plan/planner.hpp"

namespace fa::plan {
namespace {

Fixed read(const char* kernel, const std::string& text, Op op = Op::forward) {
  return read_override(KernelOverride{kernel, text}, op, "kernel");
}

/// What the message of a refusal says; empty when there is none.
std::string refusal(const char* kernel, const std::string& text, Op op = Op::forward) {
  try {
    read(kernel, text, op);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    return error.what();
  }
  return {};
}

bool contains(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

TEST(Fixed, AnOverrideIsReadByTheListsOfItsKernels) {
  const Fixed fixed = read("sm90", "tile_m=192 stages=3,take_turns=0\texact_max=true splits=2");
  EXPECT_EQ(fixed.family, Family::sm90);
  EXPECT_EQ(fixed.number("tile_m"), 192);
  EXPECT_EQ(fixed.number("stages"), 3);
  EXPECT_EQ(fixed.number("tile_n", 64), 64) << "open";
  EXPECT_FALSE(fixed.flag("take_turns", true));
  EXPECT_TRUE(fixed.flag("exact_max", false));
  EXPECT_EQ(fixed.text(), "tile_m=192 stages=3 take_turns=0 exact_max=1 splits=2");
  EXPECT_EQ(fixed.without_tile(Family::sm80).text(), "splits=2");
  EXPECT_EQ(fixed.without_tile(Family::sm80).family, Family::sm80);
  EXPECT_TRUE(fixed.fits(Sm90Forward::kernel()));
  EXPECT_FALSE(fixed.fits(Sm80Forward::kernel()));
  EXPECT_EQ(read("sm90_forward", "").kernel, &Sm90Forward::kernel());
  EXPECT_EQ(read("sm90", "").kernel, nullptr);
  EXPECT_EQ(read("", "warps=4 q_buffers=2").family, Family::automatic) << "of some kernel each";
}

TEST(Fixed, ZeroLeavesANumberOpenAndNoSwitch) {
  const Fixed fixed = read("", "tile_m=0 take_turns=0");
  EXPECT_FALSE(fixed.has("tile_m"));
  EXPECT_TRUE(fixed.has("take_turns"));
  EXPECT_FALSE(read("", "splits=2 pack_gqa=0").fixes_tile());
  EXPECT_TRUE(read("", "take_turns=0").fixes_tile());
  EXPECT_EQ(read("", "tile_m=64 tile_m=64").number("tile_m"), 64);
}

/// Planners ask for no such field by name: it is off, and an override sets it in the kernel that has it.
TEST(Fixed, FieldsOfOverridesAloneAreSetByNothingElse) {
  int fields = 0;
  for (const Kernel* const kernel : catalogue()) {
    for (const Field& field : kernel->fields) {
      if (!field.of_override) continue;
      EXPECT_FALSE(field.help.empty()) << field.name << " can be set by nobody";
      EXPECT_TRUE(kernel->op == Op::forward || kernel->op == Op::backward) << "of others, calls have no override";
      Problem problem;
      problem.arch = parse_arch("sm_90a");
      problem.dtype = problem.o_dtype = kernel->family == Family::sm90_fp8 ? DType::e4m3 : DType::bf16;
      problem.d_qk = problem.d_v = kernel->family == Family::sm90_wide                           ? 512
                                   : std::string(kernel->name).find("pair") != std::string::npos ? 256
                                                                                                 : 128;
      problem.h_q = problem.h_kv = 8;
      problem.s_q = problem.s_kv = 4096;
      const std::string name(kernel->name);
      bool taken = false;  // with some kind of call
      for (const bool scales : {false, true}) {
        problem.key_scales = problem.value_scales = scales;
        const auto planned = [&](const std::string& text) {
          const Fixed fixed = read(name.c_str(), text, kernel->op);
          return kernel->op == Op::forward ? plan_forward(problem, fixed).kernel
                                           : plan_backward(problem, fixed, false).main.front();
        };
        EXPECT_FALSE(field.is_set(planned(""))) << name << " " << field.name;
        try {
          const KernelSpec spec = planned(std::string(field.name) + "=1");
          EXPECT_EQ(field.get(spec), 1) << name << " " << field.name;
          EXPECT_NE(canonical(spec).find(" " + std::string(field.name) + "=1"), std::string::npos) << canonical(spec);
          taken = true;
        } catch (const Error&) {  // the kernel's own refusal
        }
      }
      EXPECT_TRUE(taken) << name << " " << field.name;
      ++fields;
    }
  }
  EXPECT_GE(fields, 4);
}

TEST(Fixed, RefusalsNameTheFieldAndWhatIsAccepted) {
  EXPECT_TRUE(contains(refusal("sm70", ""),
                       "kernel.kernel = sm70: accepted is sm80, sm90, sm90_wide, sm90_fp8, sm80_fp8, sm80_forward, "
                       "sm90_forward"));
  EXPECT_TRUE(contains(refusal("sm90_forward", "", Op::backward), "sm90_backward"));
  EXPECT_TRUE(contains(refusal("", "tile_m"), "kernel.text = tile_m: accepted is field=value"));
  EXPECT_TRUE(contains(refusal("", "=64"), "field=value"));
  EXPECT_TRUE(contains(refusal("", "tile_m="), "tile_m=: accepted is a whole number"));
  EXPECT_TRUE(contains(refusal("", "tile_m=64x"), "tile_m=64x"));
  EXPECT_TRUE(contains(refusal("", "tile_m=-64"), "whole number"));
  EXPECT_TRUE(contains(refusal("", "tile_m=99999999999"), "whole number"));
  EXPECT_TRUE(contains(refusal("", "take_turns=2"), "take_turns=2: accepted is 0 or 1"));
  EXPECT_TRUE(contains(refusal("", "tile_m=64 tile_m=128"), "tile_m=64 tile_m=128: accepted is one value"));
  const std::string foreign = refusal("sm90", "warps=4");
  EXPECT_TRUE(contains(foreign, "kernel.text = warps: accepted is tile_m, tile_n, stages, q_buffers"));
  EXPECT_TRUE(contains(foreign, "(of sm90_forward)"));
  EXPECT_TRUE(contains(refusal("", "causal=1"), "kernel.text = causal")) << "the problem decides that";
  EXPECT_TRUE(contains(refusal("", "pack_gqa=1", Op::backward), "pack_gqa"));
}

Problem problem_of(int d, const Variants* variants = nullptr) {
  Problem problem;
  problem.arch = parse_arch("sm_90a");
  problem.d_qk = problem.d_v = d;
  problem.b = 4;
  problem.h_q = 16;
  problem.h_kv = 8;
  problem.s_q = problem.s_kv = 4096;
  problem.variants = variants;
  return problem;
}

/// Whether some value of a field, and no default of the planner, is in the kernel that is planned with it fixed.
template <class Plan>
bool reaches_the_spec(const Field& field, Family family, const Plan& plan) {
  const KernelSpec planned = plan(Fixed(family));
  for (const int value : {0, 1, 2, 3, 4, 8, 16, 32, 48, 64, 128}) {
    if (field.kind == Field::Kind::flag && value > 1) break;
    if (field.kind == Field::Kind::number && value == 0) continue;
    try {
      const KernelSpec spec = plan(Fixed(family, {{field.name, value}}));
      if (&spec.kernel() == &planned.kernel() && field.get(spec) == value && field.get(planned) != value) return true;
    } catch (const Error&) {  // another value may fit
    }
  }
  return false;
}

TEST(Fixed, EveryOpenFieldReachesTheKernel) {
  Variants alibi;
  alibi.score = "score-a[h]*abs(float(q-kv))";
  alibi.affine = true;
  for (const ForwardFamily* const family : forward_families()) {
    for (const Field& field : family->kernel->fields) {
      if (field.help.empty() || field.set == nullptr) continue;
      bool reached = false;
      Problem paged = problem_of(128);
      paged.page_size = 16;
      Problem decode = problem_of(128);
      decode.b = decode.s_q = 1;
      Problem few_pages = paged;
      few_pages.s_q = 1;
      few_pages.s_kv = 256;
      Problem wide = paged;
      wide.d_qk = wide.d_v = 320;
      Problem bytes = problem_of(128);
      bytes.dtype = bytes.k_dtype = bytes.v_dtype = DType::e4m3;
      Problem few_bytes = bytes;
      few_bytes.s_q = 1;
      Problem scaled_bytes = bytes;
      scaled_bytes.key_scales = scaled_bytes.value_scales = true;
      for (const Problem& problem : {problem_of(64), problem_of(256), problem_of(128, &alibi), paged, few_pages, decode,
                                     wide, bytes, few_bytes, scaled_bytes}) {
        if (family->misfit != nullptr && family->misfit(problem) != nullptr) continue;
        const auto plan = [&](const Fixed& fixed) { return plan_forward(problem, fixed).kernel; };
        reached = reached || reaches_the_spec(field, family->family, plan);
      }
      EXPECT_TRUE(reached) << family->kernel->name << ' ' << field.name;
    }
  }
  for (const BackwardFamily* const family : backward_families()) {
    for (const Field& field : family->kernel->fields) {
      if (field.help.empty() || field.set == nullptr) continue;
      const Problem problem = problem_of(64);
      const auto plan = [&](const Fixed& fixed) { return plan_backward(problem, fixed, false).main.front(); };
      EXPECT_TRUE(reaches_the_spec(field, family->family, plan)) << family->kernel->name << ' ' << field.name;
    }
  }
  EXPECT_EQ(choose(problem_of(64), {{"splits", 5}}).splits, 5);
  EXPECT_EQ(choose_backward(problem_of(64), {{"splits", 5}}).splits, 5);
}

TEST(Fixed, OpenFieldsAreThoseOfAllKernels) {
  std::set<std::string_view> names;
  for (const Field* const field : open_fields(Op::forward)) EXPECT_TRUE(names.insert(field->name).second);
  for (const char* const name :
       {"tile_m", "warps", "q_in_registers", "warps_n", "q_buffers", "exact_max", "splits", "dynamic"}) {
    EXPECT_TRUE(names.contains(name)) << name;
  }
  EXPECT_FALSE(names.contains("own_ends"));
  EXPECT_EQ(open_fields(Op::backward).size(), 7U);
}

}  // namespace
}  // namespace fa::plan
