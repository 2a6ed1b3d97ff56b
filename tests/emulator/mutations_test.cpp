// Deliberate mistakes in the kernel text: every one is caught, and called by its name.

#include "emulator/mutations.hpp"

#include <gtest/gtest.h>

#include <algorithm>

#include "emulator/forward_run.hpp"

namespace emulator {
namespace {

/// Ragged everywhere, four key tiles, two query tiles (of 32 rows, or two heads in one persistent block).
ForwardCase case_of(const Mutation& mutation) {
  ForwardCase c;
  c.spec = mutation.spec;
  c.attention.dtype = mutation.spec.dtype;
  c.attention.d_qk = mutation.spec.d_qk;
  c.attention.d_v = mutation.spec.d_v;
  c.attention.h_q = 2;
  c.attention.h_kv = 1;
  c.attention.s_q = 43;
  c.attention.s_kv = 101;
  c.splits = mutation.spec.split ? 2 : 1;
  c.blocks = 1;
  if (mutation.spec.sm90()) c.attention.scale = 2.f;  // row maxima grow by more than the slack
  return c;
}

ForwardKernels kernels_with(const Mutation& mutation, const ForwardCase& c) {
  ForwardKernels kernels = kernels_of(c);
  const bool combine = mutation.header == "common/forward_combine.cuh";
  (combine ? kernels.combine : kernels.attention) = "mutant " + mutation.name;
  return kernels;
}

class Mutants : public testing::TestWithParam<std::size_t> {};

TEST_P(Mutants, AreCaughtAndNamed) {
  const Mutation& mutation = mutations()[GetParam()];
  const ForwardCase c = case_of(mutation);
  const fa::test::AttentionInputs inputs = make_inputs(c);
  const fa::test::AttentionOutputs expected = fa::test::reference_f64(c.attention, inputs);
  for (const std::uint64_t seed : {1, 2, 3}) {
    try {
      const fa::test::AttentionOutputs actual = run_forward(c, inputs, kernels_with(mutation, c), seed);
      EXPECT_TRUE(mutation.faults.empty()) << "not caught, seed " << seed;
      EXPECT_GT(fa::test::compare(actual.o.view(), expected.o.view()).max_abs, 0.05) << "harmless, seed " << seed;
    } catch (const Fault& fault) {
      EXPECT_TRUE(mutation.faults.contains(fault.kind)) << fault.what();
      if (seed == 1) RecordProperty("fault", fault.what());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernel, Mutants, testing::Range<std::size_t>(0, mutations().size()),
                         [](const testing::TestParamInfo<std::size_t>& parameter) {
                           return mutations()[parameter.param].name;
                         });

TEST(Mutants, TheUnchangedKernelsHaveNoFault) {
  for (const Mutation& mutation : mutations()) {
    const ForwardCase c = case_of(mutation);
    ForwardKernels kernels = kernels_of(c);
    EXPECT_NO_THROW(run_forward(c, make_inputs(c), kernels, 1)) << mutation.name;
  }
}

}  // namespace
}  // namespace emulator
