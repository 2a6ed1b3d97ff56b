#ifndef FA_TESTS_UNIT_CACHE_EXPECTATIONS_HPP_
#define FA_TESTS_UNIT_CACHE_EXPECTATIONS_HPP_

#include <functional>
#include <string>

#include "support.hpp"

/// What a store has to make of directories and files that are not as it would have made them.
namespace fa::cache::testing {

/// A store at `directory` builds, remembers, writes nothing, and says so once.
inline void expect_memory_only(const std::filesystem::path& directory, const std::string& reason) {
  SCOPED_TRACE(directory);
  Listener listener;
  Store store({directory, listener.callback()});
  EXPECT_TRUE(store.directory().empty());
  for (int i = 0; i < 3; ++i) {
    const Key key = make_key("spec " + std::to_string(i));
    EXPECT_EQ(store.get(key, builder(key)).origin, Origin::built);
    EXPECT_EQ(store.get(key, no_build()).origin, Origin::memory);
  }
  ASSERT_EQ(listener.messages().size(), 1U);
  EXPECT_NE(listener.messages()[0].find(reason), std::string::npos) << listener.messages()[0];
}

/// Spoils the stored entry of a key; the next store must count it, say so once, rebuild and heal the file.
inline void expect_healed(const std::string& what, const std::function<void(const std::filesystem::path&)>& spoil) {
  SCOPED_TRACE(what);
  const TemporaryDirectory directory;
  const Key key = make_key();
  Store({directory.path(), nullptr}).get(key, builder(key));
  const std::filesystem::path file = entry_path(directory.path(), key);
  spoil(file);

  Listener listener;
  Store store({directory.path(), listener.callback()});
  EXPECT_EQ(store.get(key, nullptr).entry, nullptr);
  EXPECT_EQ(store.counters().damaged, 1U);
  const Lookup built = store.get(key, builder(key));
  EXPECT_EQ(built.origin, Origin::built);
  expect_same(*built.entry, make_entry(key));
  EXPECT_EQ(store.counters().damaged, 2U);
  EXPECT_EQ(store.counters().publish_failures, 0U);
  EXPECT_EQ(listener.messages().size(), 1U);

  Store after({directory.path(), nullptr});
  EXPECT_EQ(after.get(key, no_build()).origin, Origin::disk);
  EXPECT_EQ(after.counters().damaged, 0U);
  EXPECT_TRUE(is_private(file));
}

}  // namespace fa::cache::testing

#endif  // FA_TESTS_UNIT_CACHE_EXPECTATIONS_HPP_
