#include <algorithm>
#include <array>
#include <string>

#include <fa/c_bridge.hpp>
#include <fa/parallel.hpp>

#include "parallel/errors.hpp"
#include "parallel/layout.hpp"
#include "parallel/memory.hpp"
#include "parallel/views.hpp"

namespace fa {
namespace {

using namespace parallel;

/// Both views, of rank 4, and which rows of the whole a rank has.
struct Pair {
  TensorView whole, part;
  Pieces pieces;
  std::vector<std::int64_t> lengths;
};

TensorView checked(const ShardCopy& how, const char* name, const TensorView& given) {
  const bool packed = !how.lengths.empty();
  if (!how.statistics) {
    const ShardSize size = shard_size(name, given, packed);
    const std::int64_t columns = given.shape[static_cast<std::size_t>(given.rank - 1)];
    return shard_view(name, given, {size.b, size.heads, size.rows, columns}, given.dtype, packed);
  }
  const bool flat = packed || given.rank == 2;
  const auto& n = given.shape;
  const std::array<std::int64_t, 4> shape = packed ? std::array{std::int64_t{1}, n[0], n[1], std::int64_t{1}}
                                            : flat ? std::array{n[0], std::int64_t{1}, n[1], std::int64_t{1}}
                                                   : std::array{n[0], n[1], n[2], std::int64_t{1}};
  return statistic_view(name, given, shape, given.dtype, packed);
}

Pair pair_of(const ShardCopy& how, const TensorView& whole, const TensorView& part) {
  check_ranks("ranks", how.ranks);
  c_bridge::check_tensors(std::array{c_bridge::NamedTensor{"whole", whole}, c_bridge::NamedTensor{"part", part}}, {});
  if (how.rank < 0 || how.rank >= how.ranks) {
    throw_invalid("rank", how.rank, "0 to " + std::to_string(how.ranks - 1));
  }
  Pair pair{checked(how, "whole", whole), checked(how, "part", part), {}, {}};
  pair.lengths.assign(how.lengths.begin(), how.lengths.end());
  if (pair.lengths.empty()) pair.lengths = {pair.whole.shape[2]};
  check_lengths(how.layout, how.ranks, pair.lengths, how.lengths.empty() ? "s" : "lengths");
  if (total(pair.lengths) != pair.whole.shape[2]) {
    throw_invalid("whole", std::to_string(pair.whole.shape[2]) + " rows",
                  std::to_string(total(pair.lengths)) + " rows, the sum of all lengths");
  }
  std::array<std::int64_t, 4> expected = pair.whole.shape;
  expected[2] /= how.ranks;
  if (pair.part.shape != expected || part.dtype != whole.dtype) {
    throw_invalid("part", "another shape or dtype",
                  "the whole's, with 1 / " + std::to_string(how.ranks) + " of the rows");
  }
  pair.pieces = pieces_of(how.layout, how.ranks, pair.lengths, how.rank);
  return pair;
}

TensorView rows_of_view(TensorView view, std::int64_t row, std::int64_t count, std::int64_t step) {
  view.data =
      static_cast<std::byte*>(view.data) + row * view.strides[2] * static_cast<std::int64_t>(size_of(view.dtype));
  view.shape[2] = count;
  view.strides[2] *= step;
  return view;
}

void copy(const ShardCopy& how, const Pair& pair, bool to_part, Stream stream) {
  if (pair.whole.elements() == 0) return;
  const std::unique_ptr<Memory> memory = memory_of(how.device);
  const Pieces places = in_order(pair.pieces, pair.lengths);
  for (std::size_t i = 0; i < places.size(); ++i) {
    const TensorView whole = rows_of_view(pair.whole, places[i].row, places[i].count, places[i].row_step);
    const TensorView part = rows_of_view(pair.part, pair.pieces[i].row, pair.pieces[i].count, 1);
    memory->copy(to_part ? part : whole, to_part ? whole : part, stream);
  }
}

}  // namespace

std::vector<std::int64_t> shard_rows(ShardLayout layout, int ranks, int rank, std::span<const std::int64_t> lengths) {
  check_ranks("ranks", ranks);
  if (rank < 0 || rank >= ranks) throw_invalid("rank", rank, "0 to " + std::to_string(ranks - 1));
  check_lengths(layout, ranks, lengths, "lengths");
  std::vector<std::int64_t> rows;
  for (const Piece& piece : in_order(pieces_of(layout, ranks, lengths, rank), lengths)) {
    for (std::int64_t i = 0; i < piece.count; ++i) rows.push_back(piece.row + i * piece.row_step);
  }
  return rows;
}

void shard(const ShardCopy& how, const TensorView& whole, const TensorView& part, Stream stream) {
  if (part.read_only) throw_invalid("part", "read-only", "memory that can be written");
  const Pair pair = pair_of(how, whole, part);
  c_bridge::check_tensors(std::array{c_bridge::NamedTensor{"whole", whole}},
                          std::array{c_bridge::NamedTensor{"part", part}});
  copy(how, pair, true, stream);
}

void unshard(const ShardCopy& how, const TensorView& part, const TensorView& whole, Stream stream) {
  if (whole.read_only) throw_invalid("whole", "read-only", "memory that can be written");
  const Pair pair = pair_of(how, whole, part);
  c_bridge::check_tensors(std::array{c_bridge::NamedTensor{"part", part}},
                          std::array{c_bridge::NamedTensor{"whole", whole}});
  copy(how, pair, false, stream);
}

}  // namespace fa
