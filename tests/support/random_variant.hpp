#ifndef FA_TESTS_SUPPORT_RANDOM_VARIANT_HPP_
#define FA_TESTS_SUPPORT_RANDOM_VARIANT_HPP_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "support/variant_case.hpp"

/// Random combinations of functions, masks, windows, chunks, sinks, dropout and packed batches with dtypes, head dims,
/// GQA, lengths and causal masks. The GPU runs all of them, the emulator those of small head dims and lengths.
namespace fa::test {

/// What a combination compiles; `attention` has no lengths and heads yet.
struct RandomKernel {
  VariantChoice choice;
  AttentionCase attention;
  bool pack_gqa = false;
  int splits = 1;  ///< for kernels that do not come from the planner
};

constexpr std::size_t kRandomKernels = 70;
constexpr std::size_t kRandomLaunches = 3;       ///< of each
constexpr std::size_t kShortRandomLaunches = 2;  ///< the first of them
static_assert(kRandomKernels * kRandomLaunches >= 200);

/// The same for the same index, on every platform.
RandomKernel random_kernel(std::size_t index);

/// The indices of the first `count` kernels whose head dims are at most `head_dim`.
std::vector<std::size_t> small_random_kernels(std::size_t count, std::int64_t head_dim);

/// One call of a kernel.
struct RandomProblem {
  AttentionCase attention;  ///< of a packed batch b is 1, and s_q and s_kv are the rows of the packed tensors
  std::vector<std::int32_t> cu_q = {}, cu_kv = {};      ///< empty: dense
  std::vector<std::int32_t> used_q = {}, used_kv = {};  ///< empty: all rows
  std::int64_t max_s_q = 0, max_s_kv = 0;
  bool dlse = false;

  /// Its captures; b counts the sequences.
  VariantCase variant(const RandomKernel& kernel) const;
};

/// A score function of random operations behind tests of random indices, the same for the same index. It names a number
/// that is given by value, and tensors by row and by key. Smooth in the score, which it changes by little more than the
/// score itself changes; every row keeps its first keys.
ScoreFunction random_function(std::size_t index);

RandomProblem random_problem(const RandomKernel& kernel, std::size_t index, std::size_t launch);

}  // namespace fa::test

#endif  // FA_TESTS_SUPPORT_RANDOM_VARIANT_HPP_
