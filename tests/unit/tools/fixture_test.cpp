// The CPU reference against tests/data: tensors of a trained model, answered by another program (numpy).
#include <gtest/gtest.h>

#include <string>

#include "reference/forward.hpp"
#include "support/attention_case.hpp"
#include "tools/safetensors.hpp"

namespace fa::test {
namespace {

class Fixture : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const auto file =
        tools::SafetensorsFile::open(std::string(FA_TEST_DATA_DIR "/char_transformer_") + GetParam() + ".safetensors");
    q_ = file.read("q");
    k_ = file.read("k");
    v_ = file.read("v");
    expected_o_ = file.read("expected_o");
    expected_lse_ = file.read("expected_lse");
    scale_ = std::stod(file.metadata().at("scale"));
    causal_ = file.metadata().at("causal") == "true";
    EXPECT_EQ(file.metadata().at("dtype"), fa::to_string(q_.dtype));
  }

  AttentionOutputs run(DType dtype, bool f64) {
    AttentionOutputs out{HostTensor(dtype, q_.shape[0], q_.shape[1], q_.shape[2], v_.shape[3], Layout::bhsd),
                         HostTensor(f64 ? DType::f64 : DType::f32, q_.shape[0], q_.shape[1], q_.shape[2])};
    reference::ForwardArgs args;
    args.q = q_.view();
    args.k = k_.view();
    args.v = v_.view();
    args.o = out.o.view();
    args.lse = out.lse.view();
    args.scale = scale_;
    args.causal = causal_;
    args.f64 = f64;
    reference::forward(args);
    return out;
  }

  tools::Tensor q_, k_, v_;     // [b, h, s, d]
  tools::Tensor expected_o_;    // [b, h, s, d]
  tools::Tensor expected_lse_;  // [b, h, s]
  double scale_ = 0;
  bool causal_ = false;
};

TEST_P(Fixture, ReferenceInDoubleReproducesTheStoredAnswer) {
  AttentionOutputs out = run(DType::f64, true);
  EXPECT_LE(compare(out.o.view(), expected_o_.view()).max_abs_over_max_ref, 1e-13);
  EXPECT_LE(compare(out.lse.view(), expected_lse_.view()).max_abs_over_max_ref, 1e-13);
}

TEST_P(Fixture, ReferenceInFloatIsAsGoodAsItsDtype) {
  AttentionOutputs out = run(q_.dtype, false);
  const double one_rounding = q_.dtype == DType::bf16 ? 0x1p-8 : 0x1p-11;
  EXPECT_LE(compare(out.o.view(), expected_o_.view()).max_abs_over_max_ref, 1.1 * one_rounding);
  EXPECT_LE(lse_max_abs_error(out.lse.view(), expected_lse_.view()), 1e-5);
}

TEST_P(Fixture, HoldsAttentionThatMatters) {
  EXPECT_EQ(q_.shape, (std::vector<std::int64_t>{2, 2, 128, 64}));
  causal_ = false;  // an answer to another question must not pass
  AttentionOutputs out = run(DType::f64, true);
  EXPECT_GT(compare(out.o.view(), expected_o_.view()).max_abs_over_max_ref, 0.1);
}

INSTANTIATE_TEST_SUITE_P(CharTransformer, Fixture, testing::Values("layer0", "layer1", "layer0_f16", "layer1_f16"),
                         [](const auto& parameter) { return std::string(parameter.param); });

}  // namespace
}  // namespace fa::test
