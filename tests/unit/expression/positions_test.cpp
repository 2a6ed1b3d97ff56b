#include "expression/positions.hpp"

#include <gtest/gtest.h>

#include <array>
#include <string>

#include <fa/functions.hpp>

#include "evaluate.hpp"

namespace fa::expression {
namespace {

constexpr int kMost = 7;

Program of_mask(const std::string& text) {
  return Program::parse("", text, {{"tree", DType::i32, 0, false}, {"prefix", DType::i32, 0, false}});
}

bool keeps(const std::string& mask) {
  const Program program = of_mask(mask);
  return keeps_keys_in_front(program.graph, *program.mask);
}

bool alone(const std::string& score) {
  const Program program = Program::parse(score, "", {{"slope", DType::f32, 0, false}});
  return sees_positions_alone(program.graph, *program.score);
}

/// By looking at every key in front of requests of a few rows and keys; of masks without captures.
bool keeps_all(const std::string& mask) {
  const Program program = of_mask(mask);
  const std::array root{*program.mask};
  for (int s_kv = 1; s_kv <= kMost; ++s_kv) {
    for (int s_q = 1; s_q <= s_kv; ++s_q) {
      reference::Evaluator evaluator(program, root, {}, {.b = 1, .h_q = 2, .s_q = s_q, .s_kv = s_kv});
      for (int q = 0; q < s_q; ++q) {
        for (int kv = 0; kv < s_kv - s_q; ++kv) {
          for (int h = 0; h < 2; ++h) {
            evaluator.run({.b = 0, .h = h, .q = q, .kv = kv});
            if (evaluator[root[0]].integer == 0) return false;
          }
        }
      }
    }
  }
  return true;
}

TEST(KeysInFront, AreKeptByComparisonsOfSums) {
  for (const char* const mask :
       {"kv < s_kv - s_q", "kv <= s_kv - s_q", "kv < s_kv - s_q || h == 1", "kv <= q + s_kv - s_q",
        "q + s_kv - s_q >= kv", "!(kv > q + s_kv - s_q)", "kv < s_kv", "kv - s_kv + s_q < 0", "0 <= kv", "kv > -1",
        "s_q > 0", "true", "kv < s_kv - s_q && q >= 0", "q == 0 ? kv < s_kv : kv + 1 <= s_kv - s_q",
        "!(q < 0 && h == 1)", "-(s_kv - s_q - kv) < 0", "2 * kv - kv < s_kv"}) {
    EXPECT_TRUE(keeps_all(mask)) << mask;
    EXPECT_TRUE(keeps(mask)) << mask;
  }
  EXPECT_TRUE(keeps(functions::tree().expression));
  EXPECT_TRUE(keeps(functions::tree(false).expression));
  EXPECT_TRUE(keeps(functions::prefix_lm().expression));
}

TEST(KeysInFront, AreNotWhereOneIsHidden) {
  for (const char* const mask :
       {"kv < s_kv - s_q - 1", "kv < q", "q >= kv", "kv < 4", "kv > 0", "h == 1", "kv != 3", "false",
        "!(kv < s_kv - s_q)", "kv < s_kv - s_q && h == 1", "q == 0 ? kv < s_kv : kv < 3", "q + s_kv - s_q - kv < 4",
        "kv < s_kv - 2 * s_q", "kv >= s_q"}) {
    EXPECT_FALSE(keeps_all(mask)) << mask;
    EXPECT_FALSE(keeps(mask)) << mask;
  }
}

// Sums that may leave 32 bits wrap, and prove nothing.
TEST(KeysInFront, AreNotKnownToBeKeptBySumsThatMayWrap) {
  for (const char* const mask : {"kv < s_kv + 1", "kv < s_kv + s_kv", "q + s_kv >= kv + s_q", "kv * 2 < s_kv * 2",
                                 "kv - 2147483647 < s_kv", "kv < s_kv * 2147483647", "-kv * 2 <= 0"}) {
    EXPECT_FALSE(keeps(mask)) << mask;
  }
}

TEST(Positions, AreSeenAlone) {
  for (const char* const score :
       {"score", "score - float(h)", "score + float(kv)", "score + float(q + s_kv - s_q)",
        "score + float(kv - q + s_q - s_kv)", "score - slope[h] * abs(float(q + s_kv - s_q - kv))",
        "(s_kv - s_q) * 3 + q * 3 < 9 ? score : -score",
        "score + float(min(kv, s_kv - (s_q - q)) * max(2, q - s_q + s_kv))", "score + float((q + s_kv - s_q) % 4)",
        "score + float(q - q)", "score + float(-(-q - s_kv + s_q))"}) {
    EXPECT_TRUE(alone(score)) << score;
  }
  EXPECT_TRUE(alone(functions::alibi().expression));
}

TEST(Positions, AreNotSeenAlone) {
  for (const char* const score :
       {"score + float(q)", "score + float(s_q)", "score + float(s_kv)", "score + float(s_kv - kv)",
        "score + float(q - s_q)", "score + float(q) + float(s_kv) - float(s_q)", "score + float(q + s_kv - 2 * s_q)",
        "score + float(q * s_kv)", "score + float(max(q, 1) + s_kv - s_q)", "q < s_q ? score : 0.0",
        "score + float((q + s_kv - s_q) * q)", "score + slope[q]", "score + float(q / 2 + s_kv / 2 - s_q / 2)"}) {
    EXPECT_FALSE(alone(score)) << score;
  }
}

/// At each point of requests of a few rows, a function of positions is what it is of the row at its position.
TEST(Positions, TakeTheirPlace) {
  for (const std::string score :
       {"score + float(kv - q + s_q - s_kv)", "(s_kv - s_q) * 3 + q * 3 < 9 ? score : float(kv) - score",
        "score + float(min(kv, s_kv - (s_q - q)) * max(2, q - s_q + s_kv))",
        "score + float(floor_div(s_kv - s_q + q, 2))"}) {
    ASSERT_TRUE(alone(score)) << score;
    const Program program = Program::parse(score, "", {});
    const std::array root{*program.score};
    for (int s_kv = 1; s_kv <= kMost; ++s_kv) {
      for (int s_q = 1; s_q <= s_kv; ++s_q) {
        reference::Evaluator evaluator(program, root, {}, {.b = 1, .h_q = 1, .s_q = s_q, .s_kv = s_kv});
        for (int q = 0; q < s_q; ++q) {
          const std::string text = at_position("score", score, std::to_string(q + s_kv - s_q));
          for (int kv = 0; kv < s_kv; ++kv) {
            const reference::Point point{.q = q, .kv = kv, .score = 0.25};
            evaluator.run(point);
            EXPECT_EQ(score_of(text, point), evaluator[root[0]].real) << text;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace fa::expression
