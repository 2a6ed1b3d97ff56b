#ifndef FA_SRC_PARALLEL_CONFIG_HPP_
#define FA_SRC_PARALLEL_CONFIG_HPP_

#include <cstdint>
#include <span>

#include <fa/parallel.hpp>

#include "parallel/plan.hpp"

namespace fa::parallel {

/// Throws fa::Error(invalid_argument, unsupported) for what no call of it could be served.
void check_config(const ContextParallelConfig& config, ShardLayout layout, int ranks);

/// Facts of a call. The scheme is one of the configuration, or of the model. Throws fa::Error(invalid_argument).
Problem problem_of(const ContextParallelConfig& config, ShardLayout layout, int ranks, const ContextShape& shape,
                   std::span<const std::int64_t> lengths, const SchemeTime& scheme);

/// The same for every choice of configuration, layout and speeds that changes what ranks transfer or compute.
std::uint64_t hash_of(const ContextParallelConfig& config, ShardLayout layout, const ClusterSpeeds& speeds);

/// Of a ring over packed batches the heads whose own keys come last, where transfers are a small part of the time:
/// calls of many lengths end unevenly, and one call fills the end of another.
void set_late_heads(Problem& problem, std::size_t element_size, const ClusterSpeeds& speeds, bool by_copy_engines);

/// A configuration's times, for these lengths (docs/scale.md).
std::vector<SchemeTime> scheme_times(const ContextParallelConfig& config, ShardLayout layout, const ContextShape& shape,
                                     std::span<const std::int64_t> lengths, int ranks, const ClusterSpeeds& speeds);

/// The greatest part of all scores that one rank computes, and to how many ranks behind its own K and V have to go.
struct Shares {
  double scores = 0;    ///< of the whole, of one head and batch entry
  double greatest = 0;  ///< of the rank that has most
  int hops = 0;
};
Shares shares_of(const Problem& problem);

}  // namespace fa::parallel

#endif  // FA_SRC_PARALLEL_CONFIG_HPP_
