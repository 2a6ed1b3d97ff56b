#ifndef FA_CACHE_ENTRY_HPP_
#define FA_CACHE_ENTRY_HPP_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cache/store.hpp"

/// The bytes of an entry file. Everything is little endian and fixed width; a text is a u32 length and its bytes.
///
///     magic[8]  u32 schema  u32 zero  u64 facts_size  u64 cubin_size
///     facts:    templates  spec  u32 count, options  target  unit                  (the key)
///               kernel_name  compiler  i32 registers, local_bytes, shared_bytes, threads, min_driver  f64 compile_ms
///     cubin
///     digest[16] over all bytes before it
namespace fa::cache {

inline constexpr std::uint32_t kMaxTextBytes = 1U << 20U;
inline constexpr std::uint32_t kMaxOptions = 1U << 10U;
inline constexpr std::uint64_t kMaxFactsBytes = 16ULL << 20U;
inline constexpr std::uint64_t kMaxCubinBytes = 256ULL << 20U;
inline constexpr std::uint64_t kMaxEntryBytes = kMaxFactsBytes + kMaxCubinBytes + 64;

/// The key's fields as they stand in an entry file: equal exactly for equal keys.
std::string encode_key(const Key& key);

/// The size of its file.
std::uint64_t encoded_size(const Entry& entry);

/// Empty when the entry has no cubin or breaks a limit, so that nothing is written that `decode_entry` would refuse.
std::vector<std::byte> encode_entry(const Entry& entry);

/// Safe on any bytes; nullopt with the reason in `*problem` when they are not one whole entry with its digest.
std::optional<Entry> decode_entry(std::span<const std::byte> bytes, std::string* problem = nullptr);

}  // namespace fa::cache

#endif  // FA_CACHE_ENTRY_HPP_
