#ifndef FA_TESTS_EMULATOR_SHARD_SPECS_HPP_
#define FA_TESTS_EMULATOR_SHARD_SPECS_HPP_

#include <set>
#include <string>
#include <vector>

#include "emulator/backward_run.hpp"
#include "emulator/fault.hpp"
#include "emulator/variant_specs.hpp"
#include "plan/kernel_spec.hpp"
#include "support/variant_case.hpp"

namespace emulator {

/// Kernels whose calls may be parts of a larger attention.
struct ShardKernels {
  enum class Family : std::uint8_t { sm80, sm90 };
  Family family = Family::sm80;
  VariantKernels kernels;
  bool strided = false;
  bool bounded = false;  ///< all blocks run at once, and go on from tile to tile
  bool forward = true;   ///< or a backward
  int tile_m = 64;       ///< of a backward of sm90
  int tile_n = 64;
  int warps_n = 1;         ///< of a forward of sm80: warps that share rows
  bool in_memory = false;  ///< kernels read where a call stands
  bool own_tiles = false;  ///< of sm90: those that are planned
};
const std::vector<ShardKernels>& shard_kernels();

/// The case of an entry for a whole, which its calls are parts of.
fa::test::VariantCase whole_case(const ShardKernels& shard, const fa::test::AttentionCase& whole);

/// The attention kernel of a forward, and what a backward needs.
fa::plan::KernelSpec forward_spec(const ShardKernels& shard);
BackwardSpecs backward_specs(const ShardKernels& shard);

/// All kernels, with those around them.
std::vector<fa::plan::KernelSpec> all_shard_specs();

/// A mistake in a kernel of an entry, and the faults that may name it; empty: results are wrong.
struct ShardMutation {
  std::string name;
  std::string header;
  std::string before;
  std::string after;
  std::size_t entry = 0;  ///< of shard_kernels()
  std::set<FaultKind> faults = {};
  int count = 1;
};
const std::vector<ShardMutation>& shard_mutations();
fa::plan::KernelSpec subject_of(const ShardMutation& mutation);

}  // namespace emulator

#endif  // FA_TESTS_EMULATOR_SHARD_SPECS_HPP_
