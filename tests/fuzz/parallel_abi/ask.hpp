#ifndef FA_TESTS_FUZZ_PARALLEL_ABI_ASK_HPP_
#define FA_TESTS_FUZZ_PARALLEL_ABI_ASK_HPP_

#include <functional>
#include <string>

#include "fuzz/parallel_abi/rank.hpp"

namespace fa::fuzz {

/// A call that waits for no rank, what it returned, and what is wrong with what it wrote; empty: nothing.
struct Asked {
  const char* function = "";
  int status = 0;
  std::string problem;
};

/// Hears of each call before the next one.
using Report = std::function<void(const Asked&)>;

/// What an attention says of its plans and its model, with arguments of `call`.
void ask(Random& random, const Setup& setup, RankCall& call, fa_parallel* parallel, const Report& report);
/// What needs no attention: rows, names, and groups with options or a program's functions.
void ask_without_attention(Random& random, const Setup& setup, RankCall& call, const Report& report);

}  // namespace fa::fuzz

#endif  // FA_TESTS_FUZZ_PARALLEL_ABI_ASK_HPP_
