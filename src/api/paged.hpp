#ifndef FA_SRC_API_PAGED_HPP_
#define FA_SRC_API_PAGED_HPP_

#include <cstdint>

#include <fa/attention.hpp>

#include "api/validate.hpp"

namespace fa::api {

/// Throws fa::Error naming what of `config` does not go with pages.
void validate_pages(const AttentionConfig& config);

/// Holds the cache of a call, whose `shape` has the axes of q, to its configuration and `sequences`, where it fills in
/// b. Tells `shape` how many keys a request may have. `rows`: of a contiguous cache. Throws
/// fa::Error(invalid_argument).
void set_paged(const AttentionConfig& config, const PagedCache& cache, std::int64_t rows, PackedSequences& sequences,
               AttentionShape& shape);

/// The lengths and tables of a call over a KV cache of so many pages, or rows, in memory of the host: throws
/// fa::Error(invalid_argument) naming the first that does not fit.
void check_requests(const AttentionConfig& config, const PackedSequences& sequences, const PagedCache& cache,
                    const AttentionShape& shape, std::int64_t pages);

}  // namespace fa::api

#endif  // FA_SRC_API_PAGED_HPP_
