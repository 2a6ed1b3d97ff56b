// Arguments of calls with shared prefixes.

#include <algorithm>
#include <vector>

#include "fuzz/c_abi/arguments.hpp"

namespace fa::fuzz {

/// A level or two whose groups have all rows.
const fa_shared_prefix* Arguments::prefixes(const GivenConfig& config, const Sizes& sizes, std::uint64_t* count) {
  std::vector<fa_shared_prefix> levels(1 + random_.below(2));
  const std::int64_t page = std::clamp<std::int64_t>(config.seen.page_size, 1, 256);
  const auto rows = static_cast<std::int32_t>(config.seen.varlen != 0 ? (sizes.cu_q.empty() ? 0 : sizes.cu_q.back())
                                                                      : sizes.b * sizes.s_q);
  for (std::size_t i = 0; i < levels.size(); ++i) {
    fa_shared_prefix& level = levels[i];
    level.block_table = tensor(bad() ? FA_F32 : FA_I32, {1, sizes.s_kv / page + 1}, Use::input, false);
    level.cu_rows = lengths({0, rows}, 2);
    const auto end = static_cast<std::int32_t>(random_.below(3));
    level.lengths = lengths({end}, 1);
    if (i > 0) level.begin = lengths({end}, 1);
    if (random_.one_in(2)) level.positions = tensor(FA_I32, {1, std::max(rows, 1)}, Use::input, false);
    if (random_.one_in(3)) level.max_rows = rows;
    if (random_.one_in(3)) level.max_length = sizes.s_kv;
    spoil(&level.max_rows);
    spoil(&level.max_length);
  }
  *count = bad() ? random_.below(12) : levels.size();
  if (*count > levels.size() && *count <= 8) levels.resize(*count);
  return bad() && random_.one_in(3) ? nullptr : array(levels);
}

const fa_shared_prefix_shape* Arguments::prefix_shapes(std::uint64_t* count) {
  std::vector<fa_shared_prefix_shape> levels(1 + random_.below(3));
  for (fa_shared_prefix_shape& level : levels) {
    level = {random_.between(1, 9), random_.between(0, 40), random_.between(0, 3000), random_.one_in(2)};
    spoil(&level.groups);
    spoil(&level.max_rows);
    spoil(&level.s_kv);
  }
  *count = bad() ? 9 + random_.below(100) : levels.size();
  return bad() && random_.one_in(3) ? nullptr : array(levels);
}

}  // namespace fa::fuzz
