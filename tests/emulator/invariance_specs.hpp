#ifndef FA_TESTS_EMULATOR_INVARIANCE_SPECS_HPP_
#define FA_TESTS_EMULATOR_INVARIANCE_SPECS_HPP_

#include <string>
#include <vector>

#include <fa/attention.hpp>

#include "plan/kernel_spec.hpp"

namespace emulator {

/// A way to compute rows with a fixed split size: all paths of one `arithmetic` have to give the same bits.
struct InvariantPath {
  std::string arithmetic;
  std::string name;
  fa::AttentionConfig config;
  fa::plan::KernelSpec spec;
};
const std::vector<InvariantPath>& invariant_paths();

/// Ways to compute requests with splits that follow from a request's length: those of one `arithmetic` give a request
/// the same bits, whatever else there is.
const std::vector<InvariantPath>& batch_paths();

/// Those of dense calls, whose requests are of one length.
const std::vector<InvariantPath>& dense_batch_paths();

/// A mistake that makes a path's bits depend on its company, or on how it is computed.
struct InvarianceMutation {
  std::string name;
  std::string header;
  std::string before;
  std::string after;
  std::string path;  ///< whose kernel has it
};
const std::vector<InvarianceMutation>& invariance_mutations();
const std::vector<InvarianceMutation>& batch_mutations();
const InvariantPath& path_of(const InvarianceMutation& mutation);

}  // namespace emulator

#endif  // FA_TESTS_EMULATOR_INVARIANCE_SPECS_HPP_
