#include "expression/parse.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <string>

#include <fa/error.hpp>

#include "evaluate.hpp"

namespace fa::expression {
namespace {

constexpr reference::Point kPoint{1, 2, 7, 3, 0.5};

TEST(Parse, ComputesAsCDoes) {
  struct Case {
    const char* text;
    double value;
  };
  const Case cases[] = {
      {"score", 0.5},
      {"2 + 3 * 4", 14},
      {"(2 + 3) * 4", 20},
      {"7 / 2", 3},
      {"-7 / 2", -3},
      {"-7 % 3", -1},
      {"floor_div(-7, 2)", -4},
      {"floor_mod(-7, 3)", 2},
      {"7 / 0 + 7 % 0", 0},
      {"7 / 2.0", 3.5},
      {"1 - 2 - 3", -4},
      {"100 / 10 / 5", 2},
      {"q - kv", 4},
      {"score + float(kv - q)", -3.5},
      {"b * 1000 + h * 100 + q * 10 + kv", 1273},
      {"s_q * 100 + s_kv", 1012},
      {"q > kv ? 1 : 2", 1},
      {"q <= kv ? 1 : q == 7 ? 2 : 3", 2},
      {"1 < 2 && 2 < 3 || false ? 5 : 6", 5},
      {"!(q == 7) ? 1.5 : 2.5f", 2.5},
      {"1 << 4 | 3 & 1", 17},
      {"~5 ^ 3", ~5 ^ 3},
      {"bit(5, 0) ? 10 : 20", 10},
      {"bit(5, 1) ? 10 : 20", 20},
      {"float(bit(-1, 31)) + float(bit(~0 << 31, 30))", 1},
      {"bit(4, 34) && bit(4, -30) ? 1 : 0", 1},
      {"bit(q > 0, 0) ? 1 : 0", 1},
      {"5 >> 1 == 2 ? 1 : 0", 1},
      {"- -3", 3},
      {"!true ? 1 : 0", 0},
      {"+4 - -2", 6},
      {"abs(-3) + abs(-0.5)", 3.5},
      {"min(3, 2.5) + max(1, 2) + clamp(9, 0, 4)", 8.5},
      {"int(2.9) + int(-2.9) + int(true)", 1},
      {"float(7) / 2", 3.5},
      {"bool(3) ? 1 : 0", 1},
      {".5 + 1e-1 + 2.E1", 20.6},
      {"exp(score)", std::exp(0.5)},
      {"exp2(3) + log2(8) + log(1)", 11},
      {"sqrt(2) * rsqrt(2)", 1},
      {"tanh(score)", std::tanh(0.5)},
      {"sigmoid(score)", 1 / (1 + std::exp(-0.5))},
      {"sin(score) + cos(score)", std::sin(0.5) + std::cos(0.5)},
      {"floor(-1.5) + ceil(1.2)", 0},
      {"2147483647 + 1", -2147483648.0},
      {"false ? score : -infinity", -INFINITY},
  };
  for (const Case& c : cases) {
    if (std::isinf(c.value)) {
      EXPECT_EQ(score_of(c.text, kPoint), c.value) << c.text;
    } else {
      EXPECT_NEAR(score_of(c.text, kPoint), c.value, 1e-12) << c.text;
    }
  }
  EXPECT_TRUE(mask_of("q >= kv && q - kv <= 4", kPoint));
  EXPECT_FALSE(mask_of("q >= kv && q - kv < 4", kPoint));
  EXPECT_TRUE(mask_of("q & 4", kPoint));
}

struct Mistake {
  const char* text;
  int column;
  const char* expected;
};

Error error_of(const std::string& score, const std::string& mask, const std::vector<Capture>& captures = {}) {
  try {
    Program::parse(score, mask, captures);
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "parsed: " << score << mask;
  return {ErrorCode::internal, ""};
}

std::string field(const Error& error, const std::string& name) {
  for (const ErrorField& entry : error.fields()) {
    if (entry.name == name) return entry.value;
  }
  return "";
}

TEST(Parse, AMistakeIsToldByItsColumnAndWhatWasExpected) {
  const Mistake mistakes[] = {
      {"score +", 8, "a number, a name or '('"},
      {"score + )", 9, "a number, a name or '('"},
      {"(score", 7, "')'"},
      {"score score", 7, "an operator or the end"},
      {"score + slop[h]", 9, "declared capture"},
      {"  score $ 2", 9, "an operator, a number or a name"},
      {"2x", 2, "an operator after a number"},
      {"1e+", 4, "the digits of an exponent"},
      {"99999999999", 1, "32 bits"},
      {"1e99", 1, "range of float"},
      {"q > 1 ? 2", 10, "':'"},
      {"tanh(1, 2)", 7, "')'"},
      {"min(1)", 6, "','"},
      {"bit(1)", 6, "','"},
      {"bit(score, 1)", 1, "integers on both sides of 'bit'"},
      {"bit(1, 0.5)", 1, "integers on both sides of 'bit'"},
      {"tanx(1)", 1, "tanh"},
      {"score % 2", 7, "integers on both sides of '%'"},
      {"score = 2", 7, "an operator, a number or a name"},
      {"slope[h", 8, "']'"},
      {"slope[1.5]", 7, "an integer index"},
      {"slope[h] + slope[h, q]", 17, "1 indices"},
      {"slope[1][2][3][4][5]", 19, "at most 4 indices"},
  };
  for (const Mistake& mistake : mistakes) {
    const Error error = error_of(mistake.text, "", {{"slope", DType::f32, -1, false}});
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument) << mistake.text;
    EXPECT_EQ(field(error, "column"), std::to_string(mistake.column)) << error.what();
    EXPECT_NE(std::string(error.what()).find(mistake.expected), std::string::npos) << error.what();
    EXPECT_EQ(std::string(error.what()).find("score, column"), 0U) << error.what();
  }
}

TEST(Parse, AMaskIsAConditionOnIndices) {
  EXPECT_EQ(field(error_of("", "score > 0"), "column"), "1");
  EXPECT_NE(std::string(error_of("", "float(q)").what()).find("condition"), std::string::npos);
  EXPECT_EQ(std::string(error_of("", "q >").what()).find("mask, column 4"), 0U);
}

TEST(Parse, DeepNestingAndLongTextsAreRefused) {
  EXPECT_NE(std::string(error_of(std::string(1000, '(') + "1", "").what()).find("levels"), std::string::npos);
  EXPECT_NE(std::string(error_of(std::string(9000, ' ') + "1", "").what()).find("characters"), std::string::npos);
}

/// Kernels have constants as literals of float, however they came about.
TEST(Parse, ConstantsStayWithinFloat) {
  for (const char* text :
       {"score + 1e30 * 1e30", "score * (1e30 * 1e30)", "score + exp(100)", "max(score, exp2(200))", "1e30 / 1e-30",
        "score < 3e38 + 3e38 ? score : 0", "score - float(1 << 30) * 1e30", "abs(-2e38 - 2e38) + score",
        "min(1e20 * 1e20, score)", "score + 1e39", "score / 1e-40", "score / (1e-20 * 1e-20)", "q / 1e-39"}) {
    const Error error = error_of(text, "");
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument) << text;
    EXPECT_NE(error.field("accepted").find("float"), std::string::npos) << text << ": " << error.what();
    EXPECT_FALSE(error.field("column").empty()) << text;
  }
  EXPECT_EQ(error_of("score + 1e30 * 1e30", "").field("column"), "14") << "of the operator";
  EXPECT_EQ(error_of("", "float(kv) < 1e30 * 1e30").field("column"), "18");
  EXPECT_DOUBLE_EQ(score_of("score + 1e30 * 1e-30", kPoint), 1.5);
  EXPECT_EQ(score_of("score * 3.4028234e38 > 1 ? infinity : exp(1000)", kPoint), HUGE_VAL);
  EXPECT_EQ(score_of("sigmoid(-100) < 1e-30 ? 1 : 2", kPoint), 1);
  EXPECT_DOUBLE_EQ(score_of("score / 3e38 * 3e38", kPoint), 0.5);
}

TEST(Parse, RanksFollowFromUse) {
  const Program program = Program::parse("score + a[h][q] + b1[kv] + c", "d[q, kv] != 0",
                                         {{"a", DType::f16, 0, false},
                                          {"b1", DType::bf16, 0, false},
                                          {"c", DType::f32, 0, false},
                                          {"d", DType::i32, 0, false},
                                          {"e", DType::f32, 0, false}});
  std::vector<int> ranks;
  for (const Capture& capture : program.captures) ranks.push_back(capture.rank);
  EXPECT_EQ(ranks, (std::vector<int>{2, 1, 0, 2, -1}));
}

TEST(Parse, SpacesDoNotCount) {
  EXPECT_EQ(without_spaces("score", " score\t+ slope [ h ]\n* 2.5f "), "score+slope[h]*2.5");
  EXPECT_EQ(with_score("score", "2 * score + score", "a + b"), "2 * (a + b) + (a + b)");
}

TEST(Parse, NamesOfCapturesAreFree) {
  EXPECT_TRUE(is_free_name("slope_2"));
  for (const char* name : {"", "2x", "a b", "score", "q", "tanh", "clamp", "float", "true", "infinity"}) {
    EXPECT_FALSE(is_free_name(name)) << name;
  }
}

TEST(Graph, FactorsWhoseProductIsBeyondFloatStayTwo) {
  EXPECT_DOUBLE_EQ(score_of("(score * 1e30) * 1e30", kPoint), 0.5e60);
  EXPECT_DOUBLE_EQ(score_of("1e30 * (score * 1e30 * 1e-30)", kPoint), 0.5e30);
  const Program program = Program::parse("1e20 * tanh(1e25 * score) + 1e30 * (1e30 * float(q))", "", {});
  const std::array roots{*program.score, program.score_derivative};
  for (const NodeId id : program.needed(roots)) {
    if (!program.graph.is_constant(id)) continue;
    EXPECT_LE(std::abs(program.graph[id].value), 3.4028234e38);
  }
}

TEST(Graph, EqualWorkIsOneNode) {
  const Program program = Program::parse("tanh(score / 30.0) * tanh(score / 30.0) + 0.0", "", {});
  int tanhs = 0;
  for (NodeId id = 0; id < program.graph.size(); ++id) tanhs += program.graph[id].op == Op::tanh;
  EXPECT_EQ(tanhs, 1);
}

}  // namespace
}  // namespace fa::expression
