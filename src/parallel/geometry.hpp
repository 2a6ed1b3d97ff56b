#ifndef FA_SRC_PARALLEL_GEOMETRY_HPP_
#define FA_SRC_PARALLEL_GEOMETRY_HPP_

#include <cstdint>
#include <vector>

#include "parallel/problem.hpp"

namespace fa::parallel {

/// What hides keys from rows inside of a block.
enum class BlockMask : std::uint8_t {
  none,    ///< every row sees every key
  causal,  ///< the last row sees the last key, and each row before it one key less
  placed,  ///< the configuration's own masks and functions, of the block's place in the whole
};

/// Rows of queries by keys: what one call of attention computes, but for its heads.
struct Block {
  int sequence = 0;
  BlockMask mask = BlockMask::none;
  std::int64_t row = 0;  ///< the first, in the tensor of queries
  std::int64_t rows = 0;
  std::int64_t key = 0;  ///< the first, in the tensor of keys
  std::int64_t keys = 0;
  std::int64_t key_step = 1;  ///< rows of that tensor from one key to the next
  std::int64_t q = 0;         ///< position of the first row in its sequence
  std::int64_t q_step = 1;
  std::int64_t kv = 0;
  std::int64_t kv_step = 1;

  friend bool operator==(const Block&, const Block&) = default;
};

/// How much of the scores of two pieces the closed-form masks keep. `some` may be none of them, where only a look at
/// every row would tell.
enum class Visible : std::uint8_t { none, some, all };
Visible visible(const Problem& problem, const Piece& q, const Piece& kv);

/// Whether a row of `q` may see a key of `kv`.
bool any_visible(const Problem& problem, const Pieces& q, const Pieces& kv);

/// Blocks that cover every visible pair of a row of `q` and a key of `kv` once. Few: neighbours are joined, and a
/// rank's own keys are one block where masks allow it.
std::vector<Block> blocks_of(const Problem& problem, const Pieces& q, const Pieces& kv);

/// Scores that a block computes, masked ones of causal blocks aside; those of placed blocks are counted row by row.
double scores_of(const Problem& problem, const Block& block);

/// Keys that row `position` of a sequence sees in closed form, [first, end), of `keys` from 0 on.
struct KeyRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};
KeyRange keys_of(const Problem& problem, int sequence, std::int64_t position);

}  // namespace fa::parallel

#endif  // FA_SRC_PARALLEL_GEOMETRY_HPP_
