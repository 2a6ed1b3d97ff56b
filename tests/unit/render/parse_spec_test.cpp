#include <gtest/gtest.h>

#include <algorithm>
#include <fa/error.hpp>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "plan/catalogue.hpp"
#include "plan/mask_tiles.hpp"
#include "plan/parse_spec.hpp"
#include "plan/planner.hpp"
#include "render/source.hpp"
#include "spec_list.hpp"

// A canonical text says all of a kernel: what is read from it renders and launches alike.
namespace fa::render {
namespace {

void expect_same(const NamedSpec& named) {
  const plan::KernelSpec& spec = named.spec;
  const plan::KernelSpec read = plan::parse_spec(canonical(spec));
  EXPECT_EQ(canonical(read), canonical(spec)) << named.name;
  EXPECT_EQ(unit_of(read), unit_of(spec)) << named.name;
  EXPECT_EQ(kernel_name(read), kernel_name(spec)) << named.name;
  EXPECT_EQ(read.threads(), spec.threads()) << named.name;
  EXPECT_EQ(plan::shared_bytes(read), plan::shared_bytes(spec)) << named.name;
  EXPECT_EQ(refusal(read), refusal(spec)) << named.name;
  if (plan::reads_tile_lists(spec.op()) && !spec.variants.mask.empty()) {
    EXPECT_EQ(canonical(plan::mask_tiles_spec(read)), canonical(plan::mask_tiles_spec(spec))) << named.name;
  }
}

TEST(ParseSpec, ReadsWhatThePlannerTakes) {
  for (const NamedSpec& named : golden_list()) expect_same(named);
  for (const NamedSpec& named : family_list()) expect_same(named);
}

TEST(ParseSpec, ReadsAPairwiseCover) {
  std::size_t with_functions = 0;
  for (const NamedSpec& named : pairwise_list()) {
    expect_same(named);
    with_functions += named.spec.variants.any() ? 1 : 0;
  }
  EXPECT_GT(with_functions, 10U);
}

void expect_refused(const std::string& text, const std::string& part) {
  try {
    plan::parse_spec(text);
    FAIL() << text;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument) << text;
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

TEST(ParseSpec, RefusesWhatItDoesNotKnow) {
  const std::vector<NamedSpec> list = golden_list();
  const auto tiled = std::ranges::find_if(list, [](const NamedSpec& named) { return named.spec.tile_m > 0; });
  ASSERT_NE(tiled, list.end());
  const std::string good = canonical(tiled->spec);
  EXPECT_NO_THROW(plan::parse_spec(good));
  expect_refused("", "kernel = ");
  expect_refused("sm70_forward arch=sm_70", "kernel = sm70_forward");
  expect_refused(good + " wings=2", "field = wings");
  expect_refused(good + " score=score+", "score");
  expect_refused(good + " captures=slope:f12:1", "dtype = f12");
  expect_refused(good + " captures=slope:f32:one", "captures = one");
  expect_refused(good.substr(0, good.rfind('=')) + "=x", "accepted is a whole number");
  expect_refused(good.substr(0, good.rfind(' ')), "kernel = ");  // a field is missing
  std::string huge = good;
  huge.replace(huge.find("tile_m="), std::string("tile_m=").size(), "tile_m=9");
  expect_refused(huge, "a kernel that can be built");
}

/// Whatever a field says, the text is read or refused.
TEST(ParseSpec, SurvivesAnyNumber) {
  std::set<std::string_view> seen;
  std::size_t refused = 0;
  for (const NamedSpec& named : golden_list()) {
    if (!seen.insert(named.spec.kernel().name).second) continue;
    const std::string text = canonical(named.spec);
    for (std::size_t at = text.find('='); at != std::string::npos; at = text.find('=', at + 1)) {
      for (const char* number : {"0", "-1", "7", "65536", "2147483647", "-2147483648"}) {
        std::string changed = text;
        changed.replace(at + 1, changed.find(' ', at) - at - 1, number);
        try {
          EXPECT_EQ(canonical(plan::parse_spec(changed)), changed);
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ErrorCode::invalid_argument) << changed;
          ++refused;
        }
      }
    }
  }
  EXPECT_GT(seen.size(), 5U);
  EXPECT_GT(refused, 100U);
}

}  // namespace
}  // namespace fa::render
