#include <gtest/gtest.h>

#include <string>

#include "api/problem.hpp"
#include "api/variants.hpp"
#include "compile/compiler.hpp"
#include "plan/backward.hpp"
#include "plan/planner.hpp"
#include "render/source.hpp"

// Kernels with score and mask functions, windows, chunks and sinks compile with NVRTC without a toolkit header, without
// spilling, and in about the time of those without.
namespace fa {
namespace {

struct Variant {
  const char* name;
  void (*apply)(AttentionConfig& config);
};
void PrintTo(const Variant& variant, std::ostream* out) {
  *out << variant.name;
}

constexpr Variant kVariants[] = {
    {"softcap", [](AttentionConfig& config) { config.score = functions::softcap(30); }},
    {"alibi", [](AttentionConfig& config) { config.score = functions::alibi(true); }},
    {"bias", [](AttentionConfig& config) { config.score = functions::bias("bhqk", DType::bf16, true); }},
    {"table", [](AttentionConfig& config) { config.score = functions::relative_table(128, DType::f32, true); }},
    {"documents", [](AttentionConfig& config) { config.mask = functions::documents(); }},
    {"window_chunk_sink",
     [](AttentionConfig& config) {
       config.window_left = 1024;
       config.chunk = 4096;
       config.sink = true;
     }},
    {"everything",
     [](AttentionConfig& config) {
       config.score =
           functions::compose(functions::softcap(20), functions::compose(functions::alibi(), functions::bias("hk")));
       config.mask = functions::both(functions::prefix_lm(), functions::documents());
       config.window_left = 64;
       config.sink = true;
     }},
    {"every_function", [](AttentionConfig& config) {
       config.score = ScoreFunction{
           "score > 0.0 ? exp(score * 0.01) + exp2(score) + log(1.0 + score * score) + log2(2.0 + abs(score)) + "
           "sqrt(abs(score)) + rsqrt(1.0 + abs(score)) : sin(score) + cos(score) + sigmoid(score) + floor(score) + "
           "ceil(score) + float(floor_div(q - kv, 3) + floor_mod(q - kv, s_q) + (q - kv) / (kv + 1) + q % (h + 1) + "
           "(q << 1 ^ kv >> 1 | ~b & 3) + abs(q - kv) + int(score)) / (1.0 + abs(score)) + min(score, 3.0)"};
     }}};

class VariantsCompile : public ::testing::TestWithParam<Variant> {
 protected:
  static plan::Problem problem(const AttentionConfig& config, const api::Functions& functions) {
    const AttentionShape shape{.b = 4, .h_q = 16, .h_kv = 16, .s_q = 2048, .s_kv = 2048};
    plan::Problem result = api::make_problem(config, shape, plan::parse_arch("sm_90a"), &functions.variants);
    EXPECT_NE(result.variants, nullptr);
    return result;
  }

  static AttentionConfig config(DType dtype, int d, bool causal) {
    AttentionConfig result;
    result.head_dim = d;
    result.dtype = dtype;
    result.causal = causal;
    GetParam().apply(result);
    return result;
  }

  /// The first choice, or what is taken in its place, compiles without spilling.
  static void expect_clean(const std::vector<plan::KernelSpec>& specs) {
    std::string seen;
    for (const plan::KernelSpec& spec : specs) {
      const compile::Cubin cubin = compile::compile(render::render(spec), spec.arch);
      EXPECT_EQ(cubin.log, "") << canonical(spec);
      if (cubin.facts.local_bytes == 0) return;
      seen += std::to_string(cubin.facts.local_bytes) + " bytes: " + canonical(spec) + "\n";
    }
    ADD_FAILURE() << "every kernel spills: " << seen;
  }
};

TEST_P(VariantsCompile, ForwardAndBackward) {
  {
    const AttentionConfig wanted = config(DType::bf16, 128, true);
    const api::Functions functions = api::read_functions(wanted, false);
    const plan::Problem p = problem(wanted, functions);
    const plan::ForwardPlan forward = plan::plan_forward(p, {});
    EXPECT_EQ(forward.kernel.family(), plan::Family::sm90);
    std::vector<plan::KernelSpec> specs{forward.kernel};
    specs.insert(specs.end(), forward.alternatives.begin(), forward.alternatives.end());
    expect_clean(specs);
    const plan::BackwardPlan backward = plan::plan_backward(p, {}, false);
    expect_clean(backward.main);
    if (!wanted.sink) return;
    expect_clean(plan::plan_backward(p, {}, true).main);
    expect_clean(plan::plan_backward(p, {plan::Family::sm80}, true).dq);
    expect_clean({forward.combine});
    expect_clean({backward.sink});
  }
}

/// Kernels without a register to spare: what a head's slope is read through may not cost any.
TEST(SlopesCompile, SpillNoFirstChoice) {
  AttentionConfig config;
  config.head_dim = 128;
  config.dtype = DType::bf16;
  config.causal = true;
  config.score = functions::alibi();
  const api::Functions functions = api::read_functions(config, false);
  const AttentionShape shape{.b = 4, .h_q = 16, .h_kv = 16, .s_q = 4096, .s_kv = 4096};
  const plan::Problem sm80 = api::make_problem(config, shape, plan::parse_arch("sm_80"), &functions.variants);
  const plan::Problem sm90 = api::make_problem(config, shape, plan::parse_arch("sm_90a"), &functions.variants);
  for (const plan::KernelSpec& spec : {plan::plan_forward(sm80, {}).kernel, plan::plan_forward(sm90, {}).kernel,
                                       plan::plan_backward(sm90, {}, false).main.front()}) {
    EXPECT_EQ(compile::compile(render::render(spec), spec.arch).facts.local_bytes, 0) << canonical(spec);
  }
}

/// Splits that blocks of a cluster merge, of scores to which the product adds: none has them by choice.
TEST(SlopesCompile, AreMergedInClusters) {
  AttentionConfig config;
  config.head_dim = 16;
  config.dtype = DType::bf16;
  config.score = functions::alibi();
  const api::Functions functions = api::read_functions(config, false);
  const AttentionShape shape{.b = 1, .h_q = 32, .h_kv = 8, .s_q = 1, .s_kv = 8192};
  const plan::Problem p = api::make_problem(config, shape, plan::parse_arch("sm_90a"), &functions.variants);
  const plan::KernelSpec spec =
      plan::plan_forward(p, {{"split_blocks", 2}, {"affine_product", 1}, {"tile_n", 32}}).kernel;
  EXPECT_NE(canonical(spec).find("affine_product=1 split_blocks=2"), std::string::npos) << canonical(spec);
  EXPECT_NO_THROW((void)compile::compile(render::render(spec), spec.arch)) << canonical(spec);
}

INSTANTIATE_TEST_SUITE_P(Variants, VariantsCompile, ::testing::ValuesIn(kVariants),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace fa
