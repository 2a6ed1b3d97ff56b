#ifndef FA_SRC_PARALLEL_LAYOUT_HPP_
#define FA_SRC_PARALLEL_LAYOUT_HPP_

#include <cstdint>
#include <span>
#include <vector>

#include "parallel/problem.hpp"

namespace fa::parallel {

/// Of a size, as in calls of one GPU.
inline constexpr std::int64_t kMaxSize = (std::int64_t{1} << 31) - 65536;
/// Plans take a step, and time, for each of them.
inline constexpr int kMaxRanks = 65536;

/// Throws fa::Error(invalid_argument) for a size of which no sum or product with others is computed.
void check_size(const char* name, std::int64_t value);
void check_ranks(const char* name, int ranks);

/// What each sequence's length has to be a multiple of.
std::int64_t divisor(ShardLayout layout, int ranks) noexcept;

/// Throws fa::Error(invalid_argument) for a length that the layout cannot divide. `name`: "s_q", or "lengths".
void check_lengths(ShardLayout layout, int ranks, std::span<const std::int64_t> lengths, const char* name);

/// Rows of `rank`, sequence by sequence, in ascending order, one behind the other in its shard.
Pieces pieces_of(ShardLayout layout, int ranks, std::span<const std::int64_t> lengths, int rank);

/// Pieces of several ranks as those of one: ordered, and joined where they meet. Their rows are numbered anew.
Pieces united(std::span<const Pieces> members);

/// Pieces of `part`, with the rows that they have in `whole`, which contains them.
Pieces placed_in(const Pieces& part, const Pieces& whole);

/// The same rows in tensors that hold every sequence whole, one behind the other.
Pieces in_order(const Pieces& pieces, std::span<const std::int64_t> lengths);

std::int64_t rows_of(const Pieces& pieces) noexcept;
std::int64_t total(std::span<const std::int64_t> lengths) noexcept;

}  // namespace fa::parallel

#endif  // FA_SRC_PARALLEL_LAYOUT_HPP_
