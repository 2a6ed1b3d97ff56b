#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "api/problem.hpp"
#include "api/variants.hpp"
#include "compile/compiler.hpp"
#include "plan/backward.hpp"
#include "plan/mask_tiles.hpp"
#include "plan/planner.hpp"
#include "render/source.hpp"

// Kernels of calls that are parts of a larger attention compile, without spilling; those of all places are one.
namespace fa {
namespace {

struct Kind {
  const char* name;
  void (*apply)(AttentionConfig& config);
  bool strided = false;
};
void PrintTo(const Kind& kind, std::ostream* out) {
  *out << kind.name;
}

constexpr Kind kKinds[] = {
    {"dropout", [](AttentionConfig& config) { config.dropout = 0.1f; }},
    {"chunks", [](AttentionConfig& config) { config.chunk = 1024; }},
    {"alibi", [](AttentionConfig& config) { config.score = functions::alibi(); }},
    {"strided_alibi", [](AttentionConfig& config) { config.score = functions::alibi(); }, true},
    {"strided_bias", [](AttentionConfig& config) { config.score = functions::bias("bhqk", DType::bf16, true); }, true},
    {"documents", [](AttentionConfig& config) { config.mask = functions::documents(); }}};

class ShardsCompile : public ::testing::TestWithParam<Kind> {};

/// The first choice, or what is taken in its place, compiles without spilling.
void expect_clean(const std::vector<plan::KernelSpec>& specs) {
  std::string seen;
  for (const plan::KernelSpec& spec : specs) {
    EXPECT_TRUE(spec.variants.placed) << canonical(spec);
    const compile::Cubin cubin = compile::compile(render::render(spec), spec.arch);
    EXPECT_EQ(cubin.log, "") << canonical(spec);
    if (cubin.facts.local_bytes == 0) return;
    seen += std::to_string(cubin.facts.local_bytes) + " bytes: " + canonical(spec) + "\n";
  }
  ADD_FAILURE() << "every kernel spills: " << seen;
}

TEST_P(ShardsCompile, ForwardAndBackward) {
  AttentionConfig config;
  config.head_dim = 128;
  config.causal = true;
  GetParam().apply(config);
  const api::Functions functions = api::read_functions(config, false);
  const AttentionShape shape{.b = 2,
                             .h_q = 16,
                             .h_kv = 4,
                             .s_q = 4096,
                             .s_kv = 4096,
                             .placed = true,
                             .strided = GetParam().strided,
                             .bounded = true};
  const plan::Problem problem = api::make_problem(config, shape, plan::parse_arch("sm_90a"), &functions.of(shape));
  const plan::ForwardPlan forward = plan::plan_forward(problem, {});
  EXPECT_EQ(forward.kernel.family(), plan::Family::sm90);
  std::vector<plan::KernelSpec> specs{forward.kernel};
  specs.insert(specs.end(), forward.alternatives.begin(), forward.alternatives.end());
  expect_clean(specs);
  expect_clean(plan::plan_backward(problem, {}, false).main);
  if (!config.mask.expression.empty()) expect_clean({plan::mask_tiles_spec(forward.kernel)});
}

INSTANTIATE_TEST_SUITE_P(All, ShardsCompile, testing::ValuesIn(kKinds),
                         [](const auto& kind) { return std::string(kind.param.name); });

}  // namespace
}  // namespace fa
