// Which compilers' entries serve, and what a miss is explained by.

#include <string>
#include <utility>
#include <vector>

#include "cache/explain.hpp"
#include "support.hpp"

namespace fa::cache {
namespace {

using testing::builder;
using testing::make_entry;
using testing::make_key;
using testing::no_build;
using testing::TemporaryDirectory;

Entry compiled_by(const std::string& compiler) {
  Entry entry = make_entry(make_key());
  entry.compiler = compiler;
  return entry;
}

TEST(Acceptance, VersionsAreComparedAsNumbers) {
  const auto accepts = [](const char* rule, const char* compiler) {
    return parse_acceptance(rule).value().refusal(compiled_by(compiler)).empty();
  };
  for (const char* compiler : {"nvrtc 12.0", "nvrtc 13.0", "something else", ""}) EXPECT_TRUE(accepts("", compiler));
  EXPECT_TRUE(accepts("12.8", "nvrtc 12.8"));
  EXPECT_FALSE(accepts("12.8", "nvrtc 12.9"));
  EXPECT_FALSE(accepts("12.8", "nvrtc 13.8"));
  EXPECT_TRUE(accepts(">=12.8", "nvrtc 12.8"));
  EXPECT_TRUE(accepts(">=12.8", "nvrtc 12.10"));
  EXPECT_TRUE(accepts(">=12.8", "nvrtc 13.0"));
  EXPECT_FALSE(accepts(">=12.8", "nvrtc 12.7"));
  EXPECT_FALSE(accepts(">=12.8", "nvrtc"));
  EXPECT_FALSE(accepts(">=12.8", ""));
  for (const char* wrong : {"12", "12.", ".8", "12.8.1", ">12.8", ">=", "nvrtc 12.8", "-1.0", "12.x"}) {
    EXPECT_FALSE(parse_acceptance(wrong)) << wrong;
  }
}

TEST(Acceptance, AnEntryForALaterDriverIsNotLoaded) {
  Acceptance accept;
  EXPECT_EQ(accept.refusal(compiled_by("nvrtc 13.0")), "");
  accept.driver = 12080;
  EXPECT_NE(accept.refusal(compiled_by("nvrtc 13.0")).find("13.0"), std::string::npos);
  accept.driver = 13000;
  EXPECT_EQ(accept.refusal(compiled_by("nvrtc 13.0")), "");
}

TEST(Acceptance, ARefusedEntryIsAMissAndIsReplaced) {
  const TemporaryDirectory directory;
  const Key key = make_key();
  Store({directory.path(), nullptr}).get(key, builder(key));  // by nvrtc 13.0
  StoreOptions options;
  options.directory = directory.path();
  options.accept = parse_acceptance(">=13.1").value();
  Store store(options);
  const Lookup refused = store.get(key, nullptr);
  EXPECT_EQ(refused.entry, nullptr);
  EXPECT_NE(refused.refused.find("nvrtc 13.0"), std::string::npos) << refused.refused;
  const Lookup built = store.get(key, [] { return compiled_by("nvrtc 13.2"); });
  EXPECT_EQ(built.origin, Origin::built);
  EXPECT_EQ(store.counters().unaccepted, 2U);
  EXPECT_EQ(store.counters().damaged, 0U);
  EXPECT_EQ(Store(options).get(key, no_build()).entry->compiler, "nvrtc 13.2");
  EXPECT_EQ(Store({directory.path(), nullptr}).get(key, no_build()).entry->compiler, "nvrtc 13.2");
}

TEST(Acceptance, StoresOfOneDirectoryWithDifferentRulesAreDifferent) {
  const TemporaryDirectory directory;
  StoreOptions any;
  any.directory = directory.path();
  StoreOptions later = any;
  later.accept = parse_acceptance(">=99.0").value();
  StoreOptions capped = any;
  capped.limits = {1000, 10};
  StoreOptions packed = any;
  packed.packs = {"/none"};
  const auto store = Store::shared(any);
  EXPECT_EQ(store, Store::shared(any));
  EXPECT_NE(store, Store::shared(later));
  EXPECT_NE(store, Store::shared(capped));
  EXPECT_NE(store, Store::shared(packed));
  const Key key = make_key();
  store->get(key, builder(key));
  EXPECT_EQ(Store::shared(later)->get(key, nullptr).entry, nullptr);
}

TEST(Explain, NamesExactlyTheFieldThatDiffers) {
  const Key key = make_key("sm80_forward arch=sm_90a dtype=bf16 d_qk=128 tile_m=128");
  EXPECT_TRUE(differences(key, key).empty());
  const auto expect_one = [&key](auto change, const Difference& expected) {
    Key stored = key;
    change(stored);
    const std::vector<Difference> found = differences(key, stored);
    ASSERT_EQ(found.size(), 1U) << expected.field;
    EXPECT_EQ(found[0].field, expected.field);
    EXPECT_EQ(found[0].wanted, expected.wanted);
    EXPECT_EQ(found[0].stored, expected.stored);
  };
  const auto respell = [](const std::string& spec) {
    return [spec](Key& stored) {
      stored.spec = spec;
      stored.unit = "follows the spec";
    };
  };
  expect_one(respell("sm80_forward arch=sm_90a dtype=f16 d_qk=128 tile_m=128"), {"dtype", "bf16", "f16"});
  expect_one(respell("sm90_forward arch=sm_90a dtype=bf16 d_qk=128 tile_m=128"),
             {"kernel", "sm80_forward", "sm90_forward"});
  expect_one(respell("sm80_forward arch=sm_90a dtype=bf16 d_qk=128"), {"tile_m", "128", ""});
  expect_one(respell(key.spec + " stages=2"), {"stages", "", "2"});
  expect_one(respell("sm80_forward dtype=bf16 arch=sm_90a d_qk=128 tile_m=128"),
             {"spec", key.spec, "sm80_forward dtype=bf16 arch=sm_90a d_qk=128 tile_m=128"});
  expect_one([](Key& stored) { stored.target = "sm_80"; }, {"target", "sm_90a", "sm_80"});
  expect_one(
      [](Key& stored) {
        stored.templates = "x";
        stored.unit = "y";
      },
      {"templates", key.templates, "x"});
  expect_one([](Key& stored) { stored.unit = "y"; }, {"unit", key.unit, "y"});
  expect_one([](Key& stored) { stored.options.pop_back(); }, {"options", "--std=c++17 --use_fast_math", "--std=c++17"});
}

TEST(Explain, NearestFirst) {
  const auto stored = [](const std::string& spec, const std::string& problem = "") {
    StoredEntry item;
    item.entry.key = make_key(spec);
    item.problem = problem;
    return item;
  };
  const std::vector<StoredEntry> all = {
      stored("sm90_forward d_qk=128 tile_m=64"), stored("sm80_forward d_qk=64 tile_m=64"),
      stored("sm80_forward d_qk=128 tile_m=128"), stored("sm80_forward d_qk=128 tile_m=64", "damaged")};
  const std::vector<Neighbour> found = nearest(make_key("sm80_forward d_qk=128 tile_m=64"), all, 2);
  ASSERT_EQ(found.size(), 2U);
  EXPECT_EQ(found[0].stored, &all[2]);
  EXPECT_EQ(found[1].stored, &all[1]);
}

}  // namespace
}  // namespace fa::cache
