#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "evaluate.hpp"

namespace fa::expression {
namespace {

using reference::Evaluator;
using reference::Point;

struct Values {
  double score;
  std::vector<double> by_capture;  // the derivatives, in order
  double by_score;
};

/// A score function of one captured scalar, and what is said of its derivatives.
Values values_of(const std::string& text, const Point& point, double x) {
  const Program program = Program::parse(text, "", {{"x", DType::f64, 0, true}});
  std::vector<NodeId> roots{*program.score, program.score_derivative};
  for (const CapturedGradient& gradient : program.gradients) roots.push_back(gradient.derivative);
  const std::vector<CapturedView> captures{{{}, x, {}}};
  reference::VariantArgs variant;
  variant.captures = captures;
  Evaluator evaluator(program, roots, variant, kLengths);
  evaluator.run(point);
  Values values{evaluator[roots[0]].real, {}, evaluator[roots[1]].real};
  for (std::size_t i = 2; i < roots.size(); ++i) values.by_capture.push_back(evaluator[roots[i]].real);
  return values;
}

constexpr double kStep = 1e-5;

TEST(Differentiate, AgreesWithFiniteDifferences) {
  const char* texts[] = {"score * x",
                         "score + x",
                         "x - score",
                         "score / x",
                         "x / (1.0 + score * score)",
                         "30.0 * tanh(score * x / 30.0)",
                         "exp(score * x)",
                         "exp2(score - x)",
                         "log(score * score + x * x)",
                         "log2(9.0 + score * x)",
                         "sqrt(9.0 + score * x)",
                         "rsqrt(2.0 + score + x)",
                         "sigmoid(score * x)",
                         "sin(score * x) + cos(x)",
                         "abs(score - x) * x",
                         "min(score, x) * x",
                         "max(score, x) * score",
                         "clamp(score * x, -0.5, 0.5)",
                         "score > x ? score * score : x * x * score",
                         "floor(score) + ceil(x) + score * x",
                         "-(score * -x)",
                         "score * score * score * 2.0 * x * 3.0",
                         "float(q - kv) * x * score + x * x",
                         "tanh(tanh(score) * exp(x)) / (x + 3.0)"};
  for (const char* text : texts) {
    for (const double score : {-1.3, 0.21, 0.77}) {
      for (const double x : {0.6, 1.9}) {
        const Point at{1, 2, 7, 3, score};
        const auto value = [&](double ds, double dx) {
          return values_of(text, {1, 2, 7, 3, score + ds}, x + dx).score;
        };
        const Values values = values_of(text, at, x);
        ASSERT_LE(values.by_capture.size(), 1U);
        const double by_x = values.by_capture.empty() ? 0 : values.by_capture[0];
        EXPECT_NEAR(values.by_score, (value(kStep, 0) - value(-kStep, 0)) / (2 * kStep), 1e-7) << text;
        EXPECT_NEAR(by_x, (value(0, kStep) - value(0, -kStep)) / (2 * kStep), 1e-7) << text;
      }
    }
  }
}

TEST(Differentiate, WhatIsNotChosenHasNoPart) {
  // The logarithm and its derivative are infinite where it is not chosen.
  const Values values = values_of("score > 0.0 ? log(score) * x : score", {0, 0, 0, 0, -0.0}, 2);
  EXPECT_EQ(values.by_score, 1);
  EXPECT_EQ(values.by_capture.at(0), 0);
}

TEST(Differentiate, EachPlaceOfACaptureIsOne) {
  const Program program =
      Program::parse("score + t[q] * t[kv] + t[q]", "", {{"t", DType::f32, 0, true}, {"u", DType::f32, 0, true}});
  EXPECT_EQ(program.gradients.size(), 2U);
  EXPECT_TRUE(program.graph.is_real(program.score_derivative, 1));
}

TEST(Differentiate, CapturesWithoutGradientAreLeftAlone) {
  EXPECT_TRUE(Program::parse("score + t[q]", "", {{"t", DType::f32, 0, false}}).gradients.empty());
  EXPECT_TRUE(Program::parse("score + float(int(t[q]))", "", {{"t", DType::f32, 0, true}}).gradients.empty());
}

}  // namespace
}  // namespace fa::expression
