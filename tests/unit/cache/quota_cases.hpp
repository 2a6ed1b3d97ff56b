#ifndef FA_TESTS_UNIT_CACHE_QUOTA_CASES_HPP_
#define FA_TESTS_UNIT_CACHE_QUOTA_CASES_HPP_

#include <chrono>
#include <filesystem>
#include <string>

#include "cache/disk.hpp"
#include "support.hpp"

/// Stores with caps, and entries by number.
namespace fa::cache::testing {

inline Key numbered(int i) {
  return make_key("spec " + std::to_string(i));
}

inline StoreOptions capped(const std::filesystem::path& directory, Limits limits) {
  StoreOptions options;
  options.directory = directory;
  options.limits = limits;
  return options;
}

inline void fill(const std::filesystem::path& directory, int count) {
  Store store({directory, nullptr});
  for (int i = 0; i < count; ++i) store.get(numbered(i), builder(numbered(i)));
}

/// As if the entry had last been used that long ago.
inline void age(const std::filesystem::path& directory, int i, std::chrono::hours by) {
  std::filesystem::last_write_time(entry_path(directory, numbered(i)),
                                   std::filesystem::file_time_type::clock::now() - by);
}

inline bool stored(const std::filesystem::path& directory, int i) {
  return std::filesystem::exists(entry_path(directory, numbered(i)));
}

}  // namespace fa::cache::testing

#endif  // FA_TESTS_UNIT_CACHE_QUOTA_CASES_HPP_
