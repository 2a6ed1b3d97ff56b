#include "parallel/geometry.hpp"

#include <algorithm>
#include <limits>
#include <span>

#include "parallel/layout.hpp"

namespace fa::parallel {
namespace {

constexpr std::int64_t kFar = std::numeric_limits<std::int64_t>::max() / 4;

std::int64_t floor_to(std::int64_t value, std::int64_t multiple) {
  const std::int64_t rest = value % multiple;
  return value - (rest < 0 ? rest + multiple : rest);
}

/// The keys that a row sees, both included, wherever a sequence begins and ends.
struct Bounds {
  std::int64_t first = -kFar;
  std::int64_t last = kFar;
};

Bounds bounds_of(const Problem& problem, int sequence, std::int64_t position) {
  const auto i = static_cast<std::size_t>(sequence);
  const std::int64_t at = position + (problem.bottom_right ? problem.lengths_kv[i] - problem.lengths_q[i] : 0);
  Bounds bounds;
  if (problem.window_left >= 0) bounds.first = at - problem.window_left;
  if (problem.window_right >= 0) bounds.last = at + problem.window_right;
  if (problem.causal) bounds.last = std::min(bounds.last, at);
  if (problem.chunk > 0) {
    const std::int64_t begin = floor_to(at, problem.chunk);
    bounds.first = std::max(bounds.first, begin);
    bounds.last = std::min(bounds.last, begin + problem.chunk - 1);
  }
  return bounds;
}

bool is_masked(const Problem& problem) {
  return problem.causal || problem.window_left >= 0 || problem.window_right >= 0 || problem.chunk > 0;
}

/// Causality of equal lengths, and nothing else: positions of rows and keys are compared as they are.
bool is_square_causal(const Problem& problem, int sequence) {
  const auto i = static_cast<std::size_t>(sequence);
  const bool aligned = !problem.bottom_right || problem.lengths_q[i] == problem.lengths_kv[i];
  return problem.causal && aligned && problem.window_left < 0 && problem.chunk == 0 && !problem.functions;
}

Block block_of(const Piece& q, const Piece& kv, BlockMask mask) {
  Block block;
  block.sequence = q.sequence;
  block.mask = mask;
  block.row = q.row;
  block.rows = q.count;
  block.key = kv.row;
  block.keys = kv.count;
  block.key_step = kv.row_step;
  block.q = q.begin;
  block.q_step = q.step;
  block.kv = kv.begin;
  block.kv_step = kv.step;
  return block;
}

/// Leaves out the first `rows`.
void drop_rows(Block& block, std::int64_t rows) {
  block.row += rows;
  block.rows -= rows;
  block.q += rows * block.q_step;
}

/// Pieces of neighbouring rows, where some keys are hidden from some rows by causality alone: rows that see all keys,
/// and rows whose last one sees the last key.
void add_causal(const Piece& q, const Piece& kv, std::vector<Block>& blocks) {
  Block block = block_of(q, kv, BlockMask::causal);
  if (kv.begin > q.begin) drop_rows(block, kv.begin - q.begin);
  const std::int64_t rows_end = q.begin + q.count, keys_end = kv.begin + kv.count;
  if (keys_end > rows_end) block.keys -= keys_end - rows_end;
  if (keys_end < rows_end) {
    Block all = block;
    const std::int64_t partial = std::max<std::int64_t>(keys_end - block.q, 0);
    block.rows = partial;
    drop_rows(all, partial);
    all.mask = BlockMask::none;
    blocks.push_back(all);
  }
  if (block.rows > 0 && block.keys > 0) blocks.push_back(block);
}

/// Stripes of one step and length: a row sees the keys of stripes in front of its own up to its own place, of those
/// behind it one less.
void add_stripes(const Piece& q, const Piece& kv, std::vector<Block>& blocks) {
  Block block = block_of(q, kv, BlockMask::causal);
  if (kv.begin > q.begin) {
    drop_rows(block, 1);
    block.keys -= 1;
  }
  if (block.rows > 0) blocks.push_back(block);
}

bool are_stripes(const Piece& q, const Piece& kv) {
  return q.step == kv.step && q.count == kv.count && q.begin < q.step && kv.begin < kv.step;
}

void add_pair(const Problem& problem, const Piece& q, const Piece& kv, std::vector<Block>& blocks) {
  const Visible seen = visible(problem, q, kv);
  if (seen == Visible::none) return;
  const bool square = !problem.functions && is_square_causal(problem, q.sequence);
  if (!problem.functions && seen == Visible::all) {
    blocks.push_back(block_of(q, kv, BlockMask::none));
  } else if (square && q.step == 1 && kv.step == 1) {
    add_causal(q, kv, blocks);
  } else if (square && are_stripes(q, kv)) {
    add_stripes(q, kv, blocks);
  } else {
    blocks.push_back(block_of(q, kv, BlockMask::placed));
  }
}

bool is_joinable(const Block& a, const Block& b) {
  return a.mask == BlockMask::none && b.mask == BlockMask::none && a.sequence == b.sequence && a.key_step == b.key_step;
}

bool same_rows(const Block& a, const Block& b) {
  return a.row == b.row && a.rows == b.rows;
}

bool same_keys(const Block& a, const Block& b) {
  return a.key == b.key && a.keys == b.keys;
}

/// Joins blocks without a mask that lie side by side.
void join(std::vector<Block>& blocks) {
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    for (std::size_t j = 0; j < blocks.size(); ++j) {
      Block& a = blocks[i];
      const Block& b = blocks[j];
      if (i == j || !is_joinable(a, b)) continue;
      const bool by_keys = same_rows(a, b) && b.key == a.key + a.keys * a.key_step;
      const bool by_rows = same_keys(a, b) && b.row == a.row + a.rows;
      if (!by_keys && !by_rows) continue;
      (by_keys ? a.keys : a.rows) += by_keys ? b.keys : b.rows;
      blocks.erase(blocks.begin() + static_cast<std::ptrdiff_t>(j));
      i = static_cast<std::size_t>(-1);  // from the start
      break;
    }
  }
}

bool are_own(std::span<const Piece> q, std::span<const Piece> kv) {
  if (q.size() != kv.size()) return false;
  for (std::size_t i = 0; i < q.size(); ++i) {
    const bool same = q[i].begin == kv[i].begin && q[i].count == kv[i].count && q[i].step == kv[i].step;
    const bool follows = i == 0 || (kv[i].row == kv[i - 1].row + kv[i - 1].count * kv[i - 1].row_step &&
                                    q[i].row == q[i - 1].row + q[i - 1].count && q[i].step == 1);
    if (!same || !follows || kv[i].row_step != kv[0].row_step) return false;
  }
  return true;
}

/// Pieces of one sequence, which come one behind the other.
std::span<const Piece> of_sequence(const Pieces& pieces, int sequence) {
  return {std::ranges::lower_bound(pieces, sequence, {}, &Piece::sequence),
          std::ranges::upper_bound(pieces, sequence, {}, &Piece::sequence)};
}

}  // namespace

Visible visible(const Problem& problem, const Piece& q, const Piece& kv) {
  if (q.count == 0 || kv.count == 0) return Visible::none;
  if (!is_masked(problem)) return Visible::all;
  const Bounds low = bounds_of(problem, q.sequence, q.begin);
  const Bounds high = bounds_of(problem, q.sequence, q.last());
  if (kv.last() < low.first || kv.begin > high.last) return Visible::none;
  return kv.begin >= high.first && kv.last() <= low.last ? Visible::all : Visible::some;
}

bool any_visible(const Problem& problem, const Pieces& q, const Pieces& kv) {
  for (const Piece& rows : q) {
    for (const Piece& keys : of_sequence(kv, rows.sequence)) {
      if (visible(problem, rows, keys) != Visible::none) return true;
    }
  }
  return false;
}

std::vector<Block> blocks_of(const Problem& problem, const Pieces& q, const Pieces& kv) {
  std::vector<Block> all;
  for (std::size_t begin = 0, end = 0; begin < q.size(); begin = end) {
    const int sequence = q[begin].sequence;
    while (end < q.size() && q[end].sequence == sequence) ++end;
    const std::span<const Piece> rows = std::span(q).subspan(begin, end - begin);
    const std::span<const Piece> keys = of_sequence(kv, sequence);
    if (keys.empty()) continue;
    std::vector<Block> blocks;
    if (is_square_causal(problem, sequence) && are_own(rows, keys)) {
      // Rows and keys are in ascending order, so that causality of the shard is that of the whole.
      Block own = block_of(rows.front(), keys.front(), BlockMask::causal);
      own.rows = own.keys = rows_of({rows.begin(), rows.end()});
      blocks.push_back(own);
    } else {
      for (const Piece& piece : rows) {
        for (const Piece& other : keys) add_pair(problem, piece, other, blocks);
      }
      join(blocks);
    }
    all.insert(all.end(), blocks.begin(), blocks.end());
  }
  return all;
}

KeyRange keys_of(const Problem& problem, int sequence, std::int64_t position) {
  const Bounds bounds = bounds_of(problem, sequence, position);
  const std::int64_t length = problem.lengths_kv[static_cast<std::size_t>(sequence)];
  const std::int64_t begin = std::clamp<std::int64_t>(bounds.first, 0, length);
  const std::int64_t end = bounds.last < 0 ? 0 : std::min(bounds.last + 1, length);
  return {begin, std::max(begin, end)};
}

double scores_of(const Problem& problem, const Block& block) {
  const auto rows = static_cast<double>(block.rows), keys = static_cast<double>(block.keys);
  if (block.mask == BlockMask::none) return rows * keys;
  if (block.mask == BlockMask::causal) {  // row i sees keys - rows + 1 + i of them, none below 0
    const double least = std::max(keys - rows, 0.0);
    const double seeing = std::min(rows, keys);
    return seeing * least + seeing * (seeing + 1) / 2;
  }
  double scores = 0;
  for (std::int64_t i = 0; i < block.rows; ++i) {
    const KeyRange seen = keys_of(problem, block.sequence, block.q + i * block.q_step);
    const auto below = [&block](std::int64_t end) {  // keys of the block in front of a position
      return std::clamp<std::int64_t>((end - block.kv + block.kv_step - 1) / block.kv_step, 0, block.keys);
    };
    scores += static_cast<double>(std::max<std::int64_t>(below(seen.end) - below(seen.begin), 0));
  }
  return scores;
}

}  // namespace fa::parallel
