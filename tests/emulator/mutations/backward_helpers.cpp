// Mistakes in the small kernels around a backward.

#include "emulator/mutations/pieces.hpp"
#include "emulator/mutations/subjects.hpp"
#include "emulator/specs.hpp"

namespace emulator {

std::vector<Mutation> backward_preprocess_mutations() {
  using enum FaultKind;
  return in("common/backward_preprocess.cuh",
            {
                {"backward_accumulator_not_zeroed",
                 "if (params.dq_accum != nullptr) {",
                 "if (params.dq_accum != nullptr && params.b < 0) {",
                 backward_helper_spec(sm80_backward(), Op::backward_preprocess),
                 {global_uninitialised}},
                {"backward_padding_without_statistics",
                 "ptx::st_global(params.delta + index, sum);",
                 "if (position < lengths.s_q) ptx::st_global(params.delta + index, sum);",
                 backward_helper_spec(sm80_backward(), Op::backward_preprocess),
                 {global_uninitialised}},
            });
}

std::vector<Mutation> backward_convert_mutations() {
  const KernelSpec narrow = changed(sm90_backward(), [](KernelSpec& spec) { spec.d_qk = 64; });
  const KernelSpec convert = backward_helper_spec(narrow, Op::backward_convert);
  using enum FaultKind;
  return in("common/backward_convert.cuh",
            {
                {"hopper_convert_beside_the_kernel_before",
                 "if constexpr (kOverlaps<Config>) ptx::griddepcontrol_wait();",
                 "",
                 convert,
                 {too_early}},
                {"hopper_convert_quads_keep_their_columns", "transpose_quad(words, lane);", "", convert, {}},
            });
}

std::vector<Mutation> backward_reduce_mutations() {
  using enum FaultKind;
  return in("common/backward_reduce.cuh", {
                                              {"backward_reduce_reads_past_the_splits",
                                               "split < params.splits",
                                               "split <= params.splits",
                                               backward_helper_spec(sm80_backward(), Op::backward_reduce),
                                               {global_out_of_bounds}},
                                              {"hopper_reduce_beside_the_kernel_before",
                                               "if constexpr (kOverlaps<Config>) ptx::griddepcontrol_wait();",
                                               "",
                                               backward_helper_spec(sm90_backward(), Op::backward_reduce),
                                               {too_early}},
                                          });
}

}  // namespace emulator
