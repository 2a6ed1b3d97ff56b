#ifndef FA_SRC_REFERENCE_PAGED_HPP_
#define FA_SRC_REFERENCE_PAGED_HPP_

#include <fa/paged.hpp>
#include <fa/types.hpp>

#include "reference/forward.hpp"

namespace fa::reference {

/// The call of forward.hpp over a KV cache: k and v are pages [pages, h_kv, page, d], or without a block table
/// [rows, h_kv, s_max, d]. The other tensors [b, h, s, d], or with
/// cu_seqlens_q packed as in packed.hpp. Lengths and table were checked. What no row sees is not read.
void forward(const ForwardArgs& args, const PackedSequences& sequences, const PagedCache& cache, bool clear);

/// The part of such a call that is request `i`.
ForwardArgs call_of_request(const ForwardArgs& args, const PackedSequences& sequences, const PagedCache& cache,
                            std::int64_t i);

}  // namespace fa::reference

#endif  // FA_SRC_REFERENCE_PAGED_HPP_
