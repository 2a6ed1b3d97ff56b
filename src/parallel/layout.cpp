#include "parallel/layout.hpp"

#include <algorithm>
#include <string>

#include "parallel/errors.hpp"

namespace fa::parallel {
namespace {

/// Whether pieces of one sequence are the stripes of all of it, or of neighbours that meet.
bool are_all_stripes(std::span<const Piece> pieces) {
  const std::int64_t step = pieces.front().step;
  if (step == 1 || static_cast<std::int64_t>(pieces.size()) != step) return false;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const Piece& piece = pieces[i];
    const bool fits = piece.step == step && piece.begin == pieces.front().begin + static_cast<std::int64_t>(i) &&
                      piece.count == pieces.front().count;
    if (!fits) return false;
  }
  return true;
}

/// Joins ordered pieces of one sequence.
void join(std::span<const Piece> pieces, Pieces& joined) {
  if (are_all_stripes(pieces)) {
    Piece all = pieces.front();
    all.count *= all.step;
    all.step = 1;
    joined.push_back(all);
    return;
  }
  for (const Piece& piece : pieces) {
    Piece* const last = joined.empty() ? nullptr : &joined.back();
    const bool meets = last != nullptr && last->sequence == piece.sequence && last->step == 1 && piece.step == 1 &&
                       last->begin + last->count == piece.begin;
    if (meets) {
      last->count += piece.count;
    } else {
      joined.push_back(piece);
    }
  }
}

}  // namespace

void check_size(const char* name, std::int64_t value) {
  if (value < 0 || value > kMaxSize) throw_invalid(name, value, "0 to " + std::to_string(kMaxSize));
}

void check_ranks(const char* name, int ranks) {
  if (ranks < 1 || ranks > kMaxRanks) throw_invalid(name, ranks, "1 to " + std::to_string(kMaxRanks));
}

std::int64_t divisor(ShardLayout layout, int ranks) noexcept {
  return layout == ShardLayout::zigzag && ranks > 1 ? 2 * std::int64_t{ranks} : ranks;
}

void check_lengths(ShardLayout layout, int ranks, std::span<const std::int64_t> lengths, const char* name) {
  const std::int64_t by = divisor(layout, ranks);
  for (const std::int64_t length : lengths) {
    if (length > kMaxSize) check_size(name, length);
    if (length >= 0 && length % by == 0) continue;
    throw_invalid(name, length,
                  std::string("multiples of ") + std::to_string(by) + ", which " + to_string(layout) +
                      " shares among " + std::to_string(ranks) + " ranks");
  }
}

Pieces pieces_of(ShardLayout layout, int ranks, std::span<const std::int64_t> lengths, int rank) {
  if (ranks == 1) layout = ShardLayout::contiguous;
  Pieces pieces;
  std::int64_t row = 0;
  const auto add = [&](std::size_t sequence, std::int64_t begin, std::int64_t count, std::int64_t step) {
    if (count == 0) return;
    pieces.push_back({static_cast<int>(sequence), begin, count, step, row, 1});
    row += count;
  };
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    const std::int64_t share = lengths[i] / ranks;
    switch (layout) {
      case ShardLayout::contiguous:
        add(i, rank * share, share, 1);
        break;
      case ShardLayout::zigzag:
        add(i, rank * (share / 2), share / 2, 1);
        add(i, (2 * ranks - 1 - rank) * (share / 2), share / 2, 1);
        break;
      case ShardLayout::striped:
        add(i, rank, share, ranks);
        break;
    }
  }
  return pieces;
}

Pieces united(std::span<const Pieces> members) {
  Pieces all;
  for (const Pieces& pieces : members) all.insert(all.end(), pieces.begin(), pieces.end());
  std::ranges::sort(all, [](const Piece& a, const Piece& b) {
    return a.sequence != b.sequence ? a.sequence < b.sequence : a.begin < b.begin;
  });
  Pieces joined;
  for (std::size_t begin = 0, end = 0; begin < all.size(); begin = end) {
    while (end < all.size() && all[end].sequence == all[begin].sequence) ++end;
    join(std::span(all).subspan(begin, end - begin), joined);
  }
  std::int64_t row = 0;
  for (Piece& piece : joined) {
    piece.row = row;
    piece.row_step = 1;
    row += piece.count;
  }
  return joined;
}

Pieces placed_in(const Pieces& part, const Pieces& whole) {
  Pieces placed;
  for (Piece piece : part) {
    const auto holds = [&piece](const Piece& other) {
      return other.sequence == piece.sequence && other.begin <= piece.begin && piece.last() <= other.last() &&
             (piece.begin - other.begin) % other.step == 0 && piece.step % other.step == 0;
    };
    const auto found = std::ranges::find_if(whole, holds);
    if (found == whole.end()) throw_internal("a piece of a rank is not in its group");
    piece.row = found->row + (piece.begin - found->begin) / found->step * found->row_step;
    piece.row_step = piece.step / found->step * found->row_step;
    placed.push_back(piece);
  }
  return placed;
}

Pieces in_order(const Pieces& pieces, std::span<const std::int64_t> lengths) {
  Pieces whole;
  std::int64_t row = 0;
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    whole.push_back({static_cast<int>(i), 0, lengths[i], 1, row, 1});
    row += lengths[i];
  }
  return placed_in(pieces, whole);
}

std::int64_t rows_of(const Pieces& pieces) noexcept {
  std::int64_t rows = 0;
  for (const Piece& piece : pieces) rows += piece.count;
  return rows;
}

std::int64_t total(std::span<const std::int64_t> lengths) noexcept {
  std::int64_t rows = 0;
  for (const std::int64_t length : lengths) rows += length;
  return rows;
}

}  // namespace fa::parallel
