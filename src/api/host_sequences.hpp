#ifndef FA_SRC_API_HOST_SEQUENCES_HPP_
#define FA_SRC_API_HOST_SEQUENCES_HPP_

#include <cstdint>
#include <vector>

#include <fa/attention.hpp>

#include "driver/driver.hpp"

namespace fa::api {

/// A packed batch's lengths in memory of the host. The copies are queued on a stream, which is to be waited for.
struct HostSequences {
  HostSequences(const PackedSequences& from, Stream stream);
  HostSequences(const HostSequences&) = delete;
  HostSequences& operator=(const HostSequences&) = delete;

  std::vector<std::int32_t> cu_q, cu_kv, used_q, used_kv;
  PackedSequences sequences;
};

/// A cache's table and arrays in memory of the host, of `b` requests: all that its strides reach, in one piece.
/// Likewise.
struct HostCache {
  HostCache(const PagedCache& from, std::int64_t b, Stream stream);
  HostCache(const HostCache&) = delete;
  HostCache& operator=(const HostCache&) = delete;

  std::vector<std::int32_t> batch_index, seq_begin, table;
  PagedCache cache;
};

}  // namespace fa::api

#endif  // FA_SRC_API_HOST_SEQUENCES_HPP_
