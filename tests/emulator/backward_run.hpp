#ifndef FA_TESTS_EMULATOR_BACKWARD_RUN_HPP_
#define FA_TESTS_EMULATOR_BACKWARD_RUN_HPP_

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

#include "emulator/emulator.hpp"
#include "emulator/placement.hpp"
#include "emulator/plan_run.hpp"
#include "plan/backward.hpp"
#include "plan/kernel_spec.hpp"
#include "support/attention_case.hpp"
#include "support/variant_case.hpp"

namespace emulator {

/// The kernels of a backward that are of interest; those around them follow.
struct BackwardSpecs {
  fa::plan::KernelSpec main;
  fa::plan::KernelSpec dq;  ///< meaningful when the main kernel does not write dQ
  bool without_dq = false;  ///< it is not wanted

  fa::Gradients gradients() const { return {!without_dq, !main.without_dk, !main.without_dv}; }
  bool passes_for_dq() const { return !without_dq && main.op() == fa::plan::Op::backward && !main.write_dq; }
};

/// One backward call.
struct BackwardCase {
  BackwardSpecs specs;
  fa::test::AttentionCase attention;
  Placement placement = Placement::bhsd;
  bool dlse = false;
  int splits = 1;
  int blocks = 1;                                  ///< of the persistent grid of an sm90 kernel, at most
  const fa::test::VariantCase* variant = nullptr;  ///< what the kernels compute besides, if anything
  bool bounded = false;                            ///< all `blocks` run at once

  bool deterministic() const { return !specs.main.adds_dq() || specs.main.ordered_dq(); }
};
void PrintTo(const BackwardCase& c, std::ostream* out);

/// What a call is given: q, k, v and, of the forward in float64, O and LSE rounded to what the forward returns.
struct BackwardData {
  fa::test::AttentionInputs inputs;
  fa::test::AttentionOutputs outputs;
  fa::test::HostTensor dout;
  fa::test::HostTensor dlse;
};
BackwardData make_backward_data(const BackwardCase& c);
BackwardData make_backward_data(const BackwardCase& c, fa::test::AttentionInputs inputs);

/// Registered names of the kernels of a call.
struct BackwardKernelNames {
  std::string preprocess, main, reduce, dq, convert, sink;
};
BackwardKernelNames kernels_of(const BackwardCase& c);

/// All kernels of a call; names that are empty are those of the specs.
PlanKernels plan_kernels(const BackwardSpecs& specs, const fa::plan::Problem& problem,
                         const BackwardKernelNames& names = {});

/// Gradients of captures, in order, and of sinks.
struct VariantResults {
  std::vector<std::vector<float>> captures;  ///< empty where none is required
  std::vector<float> dsink;
};

/// Runs the case. Throws the first Fault, and global_uninitialised for an element of a gradient that was never
/// written.
fa::test::AttentionGradients run_backward(const BackwardCase& c, const BackwardData& data,
                                          const BackwardKernelNames& kernels, std::uint64_t seed,
                                          VariantResults* extra = nullptr);

}  // namespace emulator

#endif  // FA_TESTS_EMULATOR_BACKWARD_RUN_HPP_
