#include "expression/emit.hpp"

#include <gtest/gtest.h>

#include <string>

namespace fa::expression {
namespace {

std::string emitted(const std::string& score, const std::string& mask, const std::vector<Capture>& captures = {},
                    Part part = Part::gradients, bool approximate = true) {
  return emit(Program::parse(score, mask, captures), part, approximate);
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(Emit, SoftcapCostsOneTanhAndLeavesItsFactorToTheSoftmax) {
  const std::string text = emitted("30.0 * tanh(score / 30.0)", "", {}, Part::values);
  EXPECT_TRUE(has(text, "kFactor = 30.0f;")) << text;
  EXPECT_TRUE(has(text, "return fa::ptx::tanh((raw * (at.scale * 0.0333333333f)));") ||
              has(text, "return fa::ptx::tanh((raw * (at.scale * 0.0333333351f)));"))
      << text;
  const std::string slope = emitted("30.0 * tanh(score / 30.0)", "", {}, Part::slopes);
  EXPECT_TRUE(has(slope, "const float t0 = fa::ptx::tanh(")) << "shared by the function and its derivative: " << slope;
  EXPECT_TRUE(has(emitted("30.0 * tanh(score / 30.0)", "", {}, Part::values, false), "fa::kernel::tanh"));
}

TEST(Emit, ADistanceIsOneFusedMultiplication) {
  const std::string text = emitted("score + slope[h] * float(kv - q)", "", {{"slope", DType::f32, 0, true}});
  EXPECT_TRUE(has(text,
                  "fa::ptx::fma(fa::kernel::captured<fa::kernel::f32>(params.captures[0], at.h), "
                  "static_cast<float>(-at.q_step + at.kv_step), ") ||
              has(text, "static_cast<float>(-at.q_step + at.kv_step)"))
      << text;
  EXPECT_TRUE(has(text, "static_cast<float>((at.kv - at.q))")) << text;
  EXPECT_TRUE(has(text, "kGradientOnQuery[] = {false}")) << text;
  EXPECT_TRUE(has(text, "kGradientOnKey[] = {false}")) << text;
}

TEST(Emit, IndicesStayInside) {
  const std::string text = emitted("", "doc[q] == doc[kv] && q >= kv", {{"doc", DType::i32, 0, false}});
  EXPECT_TRUE(has(text, "captured<fa::int32_t>(params.captures[0], fa::kernel::inside(at.q + at.q_step, at.s_q))"))
      << text;
  EXPECT_TRUE(has(text, "((at.kv + at.kv_step) <= (at.q + at.q_step))")) << text;
  EXPECT_TRUE(has(text, "kScore = false")) << text;
}

TEST(Emit, ElementsOfABiasAreDistinct) {
  const std::string text = emitted("score + bias[h, q, kv]", "", {{"bias", DType::f16, 0, true}});
  EXPECT_TRUE(has(text, "kGradientDistinct[] = {true}")) << text;
  EXPECT_TRUE(has(text, "by_score = 1.0f;")) << text;
  EXPECT_TRUE(has(text, "by_capture[0] = 1.0f;")) << text;
  EXPECT_TRUE(has(emitted("score + t[clamp(kv - q, 0, 3)]", "", {{"t", DType::f32, 0, true}}),
                  "kGradientDistinct[] = {false}"));
}

}  // namespace
}  // namespace fa::expression
