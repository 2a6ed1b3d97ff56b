#ifndef FA_CACHE_EXPLAIN_HPP_
#define FA_CACHE_EXPLAIN_HPP_

#include <string>
#include <vector>

#include "cache/store.hpp"

namespace fa::cache {

/// One thing in which a stored key differs from the one that was looked for.
struct Difference {
  std::string field;   ///< "target", "templates", "options", "unit", or of the spec: "kernel", "tile_m", ...
  std::string wanted;  ///< empty: the wanted key does not have it
  std::string stored;  ///< empty: the stored key does not have it

  friend bool operator==(const Difference&, const Difference&) = default;
};

/// Empty exactly for equal keys. A unit follows from spec and templates: it is only named where both are equal.
std::vector<Difference> differences(const Key& wanted, const Key& stored);

/// The stored entries whose keys differ least from `wanted`, nearest first, at most `count`.
struct Neighbour {
  const StoredEntry* stored = nullptr;
  std::vector<Difference> differences;
};
std::vector<Neighbour> nearest(const Key& wanted, const std::vector<StoredEntry>& stored, std::size_t count);

}  // namespace fa::cache

#endif  // FA_CACHE_EXPLAIN_HPP_
