#ifndef FA_SHARED_PREFIX_HPP_
#define FA_SHARED_PREFIX_HPP_

#include <cstddef>
#include <cstdint>

#include <fa/tensor.hpp>

/// Prefixes that requests over pages share: a system prompt, a conversation (docs/shared_prefixes.md).
///
/// Requests with a prefix in common are a group. Attention over the prefix reads it once for the rows of all of them,
/// which lie one behind the other in q. Each request's own keys begin behind its prefix (PagedCache::seq_begin), and
/// the partial results are merged. In a packed batch o and lse of rows of no request are 0 and -inf with zero_padding,
/// and without it their values mean nothing afterwards.
namespace fa {

/// One level of prefixes: groups, which have all rows of q among them. A group may have no prefix (length = begin).
/// Levels follow each other: the keys of a level begin where those of the level in front end, and a request's own keys
/// behind the last. The arrays are int32 on the Attention's device, are read when the kernels run, and may change
/// between replays of a captured call.
struct SharedPrefix {
  static constexpr std::size_t kMaxLevels = 8;

  /// [groups, max_pages], i32, any strides: where the pages of a group's prefix are, from position 0 on. Entries in
  /// front of `begin` and from `lengths` on are never read.
  TensorView block_table = {};
  /// [groups + 1]: of q, group g has the rows [cu_rows[g], cu_rows[g + 1]), of whole requests. Dense queries count row
  /// i of batch entry n as n * s_q + i.
  const std::int32_t* cu_rows = nullptr;
  const std::int32_t* lengths = nullptr;  ///< [groups], the position behind a group's last key. No row stands before it
  const std::int32_t* begin = nullptr;    ///< [groups], the position of its first key; optional: 0
  /// [groups, max_rows], i32: the position of each row of a group. With a window or chunk of the configuration, or with
  /// functions of q + s_kv - s_q, which is this position; else not read.
  TensorView positions = {};
  std::int64_t max_rows = 0;    ///< no group has more rows; 0: not known, which costs a little
  std::int64_t max_length = 0;  ///< no prefix is longer; 0: as long as a table row has room for
};

/// What of a level picks kernels, and bounds its scratch memory.
struct SharedPrefixShape {
  std::int64_t groups = 1;
  std::int64_t max_rows = 0;  ///< SharedPrefix::max_rows
  std::int64_t s_kv = 1;      ///< SharedPrefix::max_length, or the positions of a table row if that is 0 or more
  bool begin = false;         ///< SharedPrefix::begin is given
};

}  // namespace fa

#endif  // FA_SHARED_PREFIX_HPP_
