#include "expression/kept_keys.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include <fa/functions.hpp>

#include "evaluate.hpp"
#include "expression/emit.hpp"

namespace fa::expression {
namespace {

constexpr std::int32_t kEveryKey = std::numeric_limits<std::int32_t>::max();

/// Of batch entry 1, with prefix {2, 5}.
std::optional<std::int32_t> kept_keys_of(const std::string& mask, Lengths lengths = kLengths) {
  const Program program = Program::parse("", mask, {{"prefix", DType::i32, 0, false}});
  if (!program.kept_keys) return std::nullopt;
  std::int32_t prefix[] = {2, 5};
  const std::array captures{CapturedView{TensorView(static_cast<void*>(prefix), DType::i32, {2}), 0, {}}};
  reference::VariantArgs args;
  args.captures = captures;
  const std::array root{*program.kept_keys};
  reference::Evaluator evaluator(program, root, args, lengths);
  evaluator.run({.b = 1, .h = 2, .q = 9, .kv = 11});
  return evaluator[root[0]].integer;
}

TEST(KeptKeys, AreThoseBeforeAComparisonsOtherSide) {
  EXPECT_EQ(kept_keys_of("kv < 4"), 4);
  EXPECT_EQ(kept_keys_of("kv <= 4"), 5);
  EXPECT_EQ(kept_keys_of("4 > kv"), 4);
  EXPECT_EQ(kept_keys_of("4 >= kv"), 5);
  EXPECT_EQ(kept_keys_of("!(kv >= s_kv - s_q)"), 2);
  EXPECT_EQ(kept_keys_of("!(s_kv - s_q < kv)"), 3);
  EXPECT_EQ(kept_keys_of("kv < prefix[b] || kv <= q + s_kv - s_q"), 5);
  EXPECT_EQ(kept_keys_of("kv <= 2147483647"), std::numeric_limits<std::int32_t>::min()) << "wraps, and keeps nothing";
}

TEST(KeptKeys, FollowOperators) {
  EXPECT_EQ(kept_keys_of("kv < 4 || kv < prefix[b]"), 5);
  EXPECT_EQ(kept_keys_of("kv < 4 && kv < prefix[b]"), 4);
  EXPECT_EQ(kept_keys_of("kv < 4 || q == kv"), 4);
  EXPECT_EQ(kept_keys_of("kv < 4 && (kv < 3 || h == 1)"), 3);
  EXPECT_EQ(kept_keys_of("!(kv >= 4 && q != kv)"), 4);
  EXPECT_EQ(kept_keys_of("q > 2 ? kv < 4 : kv <= 6"), 4);
  EXPECT_EQ(kept_keys_of("kv < (b == 1 ? 7 : 8)"), 7);
  EXPECT_EQ(kept_keys_of("true"), kEveryKey);
}

TEST(KeptKeys, AreNoneWhereNoneIsSure) {
  for (const char* const mask : {"q >= kv", "kv < q", "kv < h", "kv < kv", "kv > 4", "kv < 4 && q == kv", "kv + 1 < 9",
                                 "q > 2 ? kv < 4 : q == kv", "!(kv < 4)", "kv != 4", "float(kv) < 4.0", "false",
                                 "2 * kv < 8", "kv < prefix[clamp(q, 0, 1)]"}) {
    EXPECT_EQ(kept_keys_of(mask), std::nullopt) << mask;
  }
}

/// Of masks made at random from comparisons, each key in front is kept.
TEST(KeptKeys, AreKept) {
  const std::string parts[] = {"kv < 4", "kv <= s_kv - s_q", "q == kv", "kv >= 2", "!(kv > 5)", "h == 1", "true"};
  int found = 0;
  for (const std::string& a : parts) {
    for (const std::string& b : parts) {
      for (const std::string& mask : {a + " || " + b, a + " && " + b, "!(" + a + " && !(" + b + "))",
                                      "q > 3 ? " + a + " : " + b, "!(" + a + ") || " + b}) {
        const auto kept = kept_keys_of(mask);
        if (!kept) continue;
        ++found;
        for (std::int64_t q = 0; q < kLengths.s_q; ++q) {
          for (std::int64_t kv = 0; kv < kLengths.s_kv && kv < *kept; ++kv) {
            EXPECT_TRUE(mask_of(mask, {.b = 1, .h = q % 3, .q = q, .kv = kv})) << mask << " at " << q << ", " << kv;
          }
        }
      }
    }
  }
  EXPECT_GT(found, 60);
}

TEST(KeptKeys, OfTreesAreTheContext) {
  const MaskFunction tree = functions::tree();
  const Program program = Program::parse("", tree.expression, {{"tree", DType::i32, 0, false}});
  ASSERT_TRUE(program.kept_keys);
  const std::string text = emit(program, Part::values, true);
  EXPECT_NE(text.find("kKeepsFirst = true;"), std::string::npos) << text;
  EXPECT_NE(text.find("    return (at.s_kv - at.s_q);"), std::string::npos) << text;
  const Program documents = Program::parse("", functions::documents().expression, {{"doc", DType::i32, 0, false}});
  EXPECT_EQ(emit(documents, Part::values, true).find("kKeepsFirst"), std::string::npos);
}

/// A chain as long as texts allow.
TEST(KeptKeys, OfLongTexts) {
  std::string mask = "kv < 1";
  while (mask.size() < 8000) mask += " || kv < 7";
  EXPECT_EQ(kept_keys_of(mask), 7);
}

}  // namespace
}  // namespace fa::expression
