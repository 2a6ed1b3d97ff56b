#ifndef FA_TESTS_DIFFERENTIAL_APPENDS_HPP_
#define FA_TESTS_DIFFERENTIAL_APPENDS_HPP_

#include <cstdint>

#include "differential/pool.hpp"

/// Random appends to KV caches, on the host or a GPU, against float64: what must be in memory afterwards, element by
/// element, and nothing else that has changed.
namespace fa::differential {

/// Runs `options.configs` configurations of `options.shapes` calls each; returns the number of failures.
std::uint64_t run_appends(const Options& options);

/// Of one of them, for its replay: the exit status.
int replay_append(const Options& options, const CaseId& id);

/// Sees that mistakes in appends are found; returns how many are not.
int self_test_appends();

}  // namespace fa::differential

#endif  // FA_TESTS_DIFFERENTIAL_APPENDS_HPP_
