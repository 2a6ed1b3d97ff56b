#ifndef FA_SRC_REFERENCE_APPEND_HPP_
#define FA_SRC_REFERENCE_APPEND_HPP_

#include <cstdint>
#include <optional>
#include <vector>

#include <fa/append.hpp>

namespace fa::reference {

/// A row of a batch: of which request, and where it stands there.
struct AppendedRow {
  std::int64_t request = -1;  ///< of none: -1, unless nothing of the call depends on the request
  std::int64_t position = 0;  ///< that its keys are put at, by seqused_kv
};

/// A place in the cache.
struct CacheRow {
  std::int64_t page;
  std::int64_t row;
};

/// Of an append in host memory. `inputs` is checked (api::check_append): its tensors have rank 4, those of a packed
/// batch [1, h, total, d]. Row `token` of a dense batch is row token % s_new of request token / s_new.
AppendedRow appended_row(const AppendInputs& inputs, std::int64_t token);

/// Where the row goes by its slot, else by the block table; nothing for what is in no page of the cache.
std::optional<CacheRow> cache_row(const AppendInputs& inputs, const AppendedRow& row, std::int64_t token);

/// For rotary embedding.
std::int64_t rotary_position(const AppendInputs& inputs, const AppendedRow& row, std::int64_t token);

/// Row `to` of a tensor of 8 bits becomes `row`, times what its scale says (AppendInputs::k_scale).
void store_row(const std::vector<double>& row, const TensorView& target, std::int64_t to, float& scale, bool given);

/// Writes the new rows into the cache, and q into q_out. Angles and products are computed in double and rounded once.
/// Rows that are in no request, or in no page, are skipped.
void append(const AppendInputs& inputs);

}  // namespace fa::reference

#endif  // FA_SRC_REFERENCE_APPEND_HPP_
