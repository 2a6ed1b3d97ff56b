#ifndef FA_TESTS_EMULATOR_PLAN_RUN_HPP_
#define FA_TESTS_EMULATOR_PLAN_RUN_HPP_

#include <cstdint>
#include <stdexcept>
#include <string>

#include "emulator/memory.hpp"
#include "plan/call_plan.hpp"

namespace emulator {

/// The kernels of a call by the part that they have in it, and the registered names of those that are not their spec's.
struct PlanKernels {
  fa::plan::KernelSet specs;
  fa::plan::ByRole<std::string> names = {};
};

/// Adds the kernels that find norms and tile lists, where the others need them.
void add_companions(const fa::plan::Problem& problem, PlanKernels& kernels);

/// Memory for a schedule, whose counter of blocks is cleared.
void* place_schedule(const fa::plan::Problem& problem, const fa::plan::KernelSpec& attention, int multiprocessors,
                     Memory& memory);

/// Runs what the library would queue. Each section of the workspace is a region of its own; `trusted`: what was not
/// written must not be read. Throws the first Fault.
void run_plan(fa::plan::CallPlan& call, const PlanKernels& kernels, Memory& memory, std::uint64_t seed,
              bool trusted = true);

/// What a kernel has left undone: a row of a request's, a flag.
struct NotWritten : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// What blocks tell each other by (templates/common/flags.cuh): those of an earlier launch, a later one would take for
/// its own. Throws NotWritten.
void expect_flags_down(const std::uint64_t* flags, std::int64_t count);

}  // namespace emulator

#endif  // FA_TESTS_EMULATOR_PLAN_RUN_HPP_
