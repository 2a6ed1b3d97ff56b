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

TEST(Emit, TellsWhetherAScoreFunctionReadsNothingButTheScore) {
  const auto alone = [](const char* score, const std::vector<Capture>& captures = {}, const char* mask = "") {
    return has(emitted(score, mask, captures, Part::values), "kScoreAlone = true;");
  };
  EXPECT_TRUE(alone("30.0 * tanh(score / 30.0)"));
  EXPECT_TRUE(alone("score > 0 ? score : 0.5 * score"));
  EXPECT_TRUE(alone("2.0 * tanh(score)", {}, "q >= kv")) << "whatever the mask reads";
  EXPECT_FALSE(alone("tanh(score) * float(q)"));
  EXPECT_FALSE(alone("score > 0 ? score : float(kv - s_kv)"));
  EXPECT_FALSE(alone("tanh(score / cap)", {{"cap", DType::f32, 0, false}}));
  EXPECT_FALSE(alone("", {}, "q >= kv"));
}

/// Exact, however large the factor is: 0 on the diagonal.
TEST(Emit, ADistanceIsMultipliedAsAWhole) {
  const std::string text = emitted("score + slope[h] * float(kv - q)", "", {{"slope", DType::f32, 0, true}});
  EXPECT_TRUE(has(text, "(static_cast<float>((at.kv - at.q)) + static_cast<float>(-at.q_step + at.kv_step))")) << text;
  EXPECT_FALSE(has(text, "fma")) << text;
  EXPECT_TRUE(has(text, "kGradientOnQuery[] = {false}")) << text;
  EXPECT_TRUE(has(text, "kGradientOnKey[] = {false}")) << text;
}

TEST(Emit, AnAffineBiasIsLeftToTheSoftmax) {
  const std::vector<Capture> slope{{"slope", DType::f32, 0, false}};
  const std::string load =
      "(fa::kernel::captured_of_head<fa::kernel::f32>(params.captures[0], at.b, params.b, at.h)), "
      "params.inverse_scale), ";
  const std::string distance = emitted("score + slope[h] * float(kv - q)", "", slope, Part::values);
  EXPECT_TRUE(has(distance, "kAffine = true;")) << distance;
  EXPECT_TRUE(has(distance, "kAffineAbs = false;")) << distance;
  EXPECT_TRUE(has(distance, "kAffineStep = 1;")) << distance;
  EXPECT_TRUE(has(distance, "return {fa::kernel::affine_factor(" + load + "static_cast<float>((at.kv - at.q))};"))
      << distance;
  const std::string alibi = emitted("score - slope[h] * abs(float(q + s_kv - s_q - kv))", "", slope, Part::values);
  EXPECT_TRUE(has(alibi, "kAffineAbs = true;")) << alibi;
  EXPECT_TRUE(has(alibi, "kAffineStep = -1;")) << alibi;
  EXPECT_TRUE(has(alibi, "return {fa::kernel::affine_factor(-" + load)) << alibi;
  const std::string of_integers = emitted("float(abs(2 * kv - q)) * slope[h] + score", "", slope, Part::values);
  EXPECT_TRUE(has(of_integers, "kAffineAbs = true;")) << of_integers;
  EXPECT_TRUE(has(of_integers, "kAffineStep = 2;")) << of_integers;
}

TEST(Emit, OnlyAnAffineBiasIs) {
  const std::vector<Capture> slope{{"slope", DType::f32, 0, false}};
  for (const char* score :
       {"score * slope[h] * float(kv - q)", "score + slope[kv] * float(kv - q)", "score + slope[h] * float(kv * q)",
        "score + slope[h] * float(q)", "2.0 * score + slope[h] * float(kv)", "score + score * float(kv)",
        "slope[h] * float(kv) - score", "score + slope[h] * float(kv * 4096)", "score + float(kv)"}) {
    const std::string text = emitted(score, "", slope, Part::values);
    EXPECT_TRUE(has(text, "kAffine = false;")) << score << '\n' << text;
    EXPECT_FALSE(is_affine(Program::parse(score, "", slope))) << score;
  }
  EXPECT_TRUE(is_affine(Program::parse("slope[h] * float(kv) + score", "", slope)));
  EXPECT_FALSE(is_affine(Program::parse("", "kv < 3", {})));
  EXPECT_TRUE(has(emitted("score + slope[h] * float(kv)", "", slope, Part::slopes), "kAffine = false;"));
  EXPECT_TRUE(has(emitted("", "kv < 3", {}, Part::values), "kAffine = false;"));
}

TEST(Emit, WhatIsTheSameForAHeadMayBeGiven) {
  const std::vector<Capture> captures{{"slope", DType::f32, 0, false}, {"row", DType::f32, 0, false}};
  const std::string score = "h < 3 ? score + slope[b, h] * abs(float(kv - q)) : score + row[q]";
  const std::string text = emitted(score, "", captures, Part::values);
  EXPECT_TRUE(has(text, "kFixed = 1;")) << text;
  EXPECT_TRUE(has(text, "fixed[0] = fa::kernel::captured<fa::kernel::f32>(params.captures[0], at.b, at.h);")) << text;
  EXPECT_TRUE(has(text, "float raw, const float (&fixed)[1])")) << text;
  EXPECT_TRUE(has(text, "captured_of_head<fa::kernel::f32>(params.captures[0], at.b, params.b, at.b, at.h)")) << text;
  EXPECT_FALSE(has(text, "captured_of_head<fa::kernel::f32>(params.captures[1]")) << text;
  EXPECT_FALSE(has(emitted(score, "", captures, Part::slopes), "kFixed")) << text;
  EXPECT_FALSE(has(emitted("score * row[q]", "", captures, Part::values), "kFixed")) << text;
}

TEST(Emit, GradientsOfCapturesUseNoFastTanh) {
  const std::vector<Capture> captures{{"slope", DType::f32, 0, true}};
  const Program program = Program::parse("tanh(score - slope[h] * float(kv))", "", captures);
  const std::string fast = emit(program, Part::gradients, true);
  EXPECT_TRUE(has(fast, "fa::ptx::tanh(")) << fast;
  EXPECT_TRUE(has(fast, "by_score = (1.0f - (t")) << fast;
  EXPECT_TRUE(has(fast, "by_capture[0] = (-(fa::kernel::tanh_slope(")) << fast;
  EXPECT_FALSE(has(emit(program, Part::slopes, true), "tanh_slope")) << fast;
  const std::string precise = emit(program, Part::gradients, false);
  EXPECT_TRUE(has(precise, "fa::kernel::tanh(")) << precise;
  EXPECT_FALSE(has(precise, "1.0f - ")) << precise;
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

TEST(Emit, EveryConstantIsALiteral) {
  const std::string beyond = emitted("1e30 * (1e30 * score)", "", {}, Part::slopes);
  EXPECT_TRUE(has(beyond, "by_score = fa::kernel::kInfinity;")) << "the derivative is beyond float: " << beyond;
  EXPECT_TRUE(has(beyond, "kFactor = 1.00000002e+30f;")) << beyond;
  EXPECT_FALSE(has(emitted("-1e20 * tanh(1e25 * score)", "", {}, Part::slopes), "inf.0"));
  EXPECT_TRUE(has(emitted("score + float(q * (-2147483647 - 1))", "", {}, Part::values), "(-2147483647 - 1)"));
}

}  // namespace
}  // namespace fa::expression
