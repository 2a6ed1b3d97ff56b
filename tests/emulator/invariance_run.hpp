#ifndef FA_TESTS_EMULATOR_INVARIANCE_RUN_HPP_
#define FA_TESTS_EMULATOR_INVARIANCE_RUN_HPP_

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "emulator/invariance_specs.hpp"
#include "support/invariance_case.hpp"

namespace emulator {

struct InvariantRun {
  std::uint64_t seed = 1;   ///< of threads, and of pages
  std::int64_t spare = 0;   ///< keys that no request has, up to which the call's limit goes
  std::string kernel = {};  ///< registered name, if not the path's
  std::string merge = {};   ///< likewise of the kernel that merges splits
  double scale = 1 / 4.0;   ///< that of head dims of 16 by default
};

/// One call of fa::test::ChunkCall, with kInvariantSinks where the path has sinks.
fa::test::AttentionOutputs run_chunks(const InvariantPath& path, const fa::test::ChunkCall& call,
                                      const InvariantRun& run);

inline constexpr std::int64_t kInvariantHeadsQ = 4;
inline constexpr std::int64_t kInvariantHeadsKv = 2;
inline constexpr std::array kInvariantSinks{0.5f, -1.f, 2.f, 0.f};

}  // namespace emulator

#endif  // FA_TESTS_EMULATOR_INVARIANCE_RUN_HPP_
