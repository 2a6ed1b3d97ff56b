// Functions that are as long and as deep as texts may be, in threads with little stack.

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <functional>
#include <string>

#include <fa/error.hpp>

#include "evaluate.hpp"
#include "expression/emit.hpp"
#include "expression/ranges.hpp"
#include "support/platform.hpp"

namespace fa::expression {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr std::size_t kStack = std::size_t{4} << 20;  // frames are many times as large
#else
constexpr std::size_t kStack = std::size_t{256} << 10;
#endif

/// Runs `work` in a thread with a stack of `bytes`.
void run_on_small_stack(const std::function<void()>& work, std::size_t bytes = kStack) {
  ASSERT_EQ(support::platform::run_with_stack(bytes, work), 0);
}

std::string repeated(const std::string& text, int times) {
  std::string result;
  for (int i = 0; i < times; ++i) result += text;
  return result;
}

/// Everything that walks along a function.
void walk(const std::string& score, const std::string& mask) {
  const Program program =
      Program::parse(score, mask, {{"x", DType::f32, 0, true}, {"i", DType::i32}, {"a", DType::f16, 0, true}});
  for (const Part part : {Part::values, Part::slopes, Part::gradients}) EXPECT_FALSE(emit(program, part, true).empty());
  loads_ahead(program);
  is_affine(program);
  smallest_shapes(program, kLengths);
}

TEST(LongTexts, ChainsOfOperatorsTakeNoStack) {
  run_on_small_stack([] {
    walk("score" + repeated("*score", 1360) + "*x", "");
    walk("score" + repeated("+x*score", 1000), "");
    walk("x" + repeated("/score", 1300), "");
    walk("score" + repeated("-float(q)", 900), "");
    walk("score+float(kv" + repeated("+q", 4000) + ")", "kv" + repeated("-i", 4000) + ">q");
    walk("score + a[" + std::string("q") + repeated("+kv-kv", 1000) + "]", "q>0" + repeated("&&kv>1", 1300));
    walk("score", "q" + repeated("*65536", 1300) + " > kv");
  });
}

/// The deepest texts that are read, in every way to nest: one level more is refused.
TEST(LongTexts, NestingIsBounded) {
  struct Nest {
    std::string open, inner, close;
    bool mask;
  };
  const Nest nests[] = {{"(", "score", ")", false},
                        {"-(", "score", ")", false},
                        {"tanh(", "score", ")", false},
                        {"clamp(0.0,", "score", ",1.0)", false},
                        {"x>0.0?x:", "score", "", false},
                        {"a[int(", "score", ")]", false},
                        {"q>0||q>0&&1|1^1&q==1<q>>1+2*(", "q", ")", true}};
  run_on_small_stack([&] {
    for (const Nest& nest : nests) {
      const auto text = [&](int times) {
        return repeated(nest.open, times) + nest.inner + repeated(nest.close, times);
      };
      const auto read = [&](int times) {
        if (nest.mask) {
          walk("", text(times) + "!=0");
        } else {
          walk(text(times), "");
        }
      };
      EXPECT_NO_THROW(read(90)) << nest.open;
      EXPECT_THROW(read(200), Error) << nest.open;
    }
  });
}

/// What a long chain computes is what it says.
TEST(LongTexts, ChainsAreDifferentiated) {
  const Program program = Program::parse("score" + repeated("*score", 999), "", {});
  const std::array roots{*program.score, program.score_derivative};
  reference::Evaluator evaluator(program, roots, {}, kLengths);
  evaluator.run({.score = 1.001});
  EXPECT_NEAR(evaluator[roots[0]].real, std::pow(1.001, 1000), 1e-10);
  EXPECT_NEAR(evaluator[roots[1]].real, 1000 * std::pow(1.001, 999), 1e-7);
}

/// As many factors as a text has room for.
TEST(LongTexts, TheLongestProductIsDifferentiated) {
  constexpr int kFactors = 4090;
  const std::string product = "x" + repeated("*x", kFactors - 1);
  run_on_small_stack(
      [&] {
        walk(product, "");
        const Program program = Program::parse(product, "", {{"x", DType::f64, 0, true}});
        ASSERT_EQ(program.gradients.size(), 1U);
        const std::array roots{*program.score, program.gradients.front().derivative};
        const std::array captures{CapturedView{{}, 1.0001, {}}};
        reference::VariantArgs args;
        args.captures = captures;
        reference::Evaluator evaluator(program, roots, args, kLengths);
        evaluator.run({.score = 5.0});
        EXPECT_NEAR(evaluator[roots[0]].real, std::pow(1.0001, kFactors), 1e-11);
        EXPECT_NEAR(evaluator[roots[1]].real, kFactors * std::pow(1.0001, kFactors - 1), 1e-7);
      },
      2 * kStack);
  EXPECT_THROW(Program::parse(product + "*x*x*x*x*x*x*x", "", {{"x", DType::f32, 0, true}}), Error);
}

}  // namespace
}  // namespace fa::expression
