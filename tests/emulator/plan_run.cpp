#include "emulator/plan_run.hpp"

#include <algorithm>
#include <vector>

#include "emulator/emulator.hpp"
#include "emulator/placement.hpp"
#include "emulator/registry.hpp"
#include "plan/planner.hpp"
#include "plan/schedule.hpp"

namespace emulator {
namespace {

using fa::plan::CallPlan;
using fa::plan::KernelSpec;
using fa::plan::Section;

std::byte* place_zeros(const CallPlan& call, Memory& memory, Section section) {
  const std::vector<std::byte> zeros(call.cleared);
  std::byte* const base = memory.add_input(name_of(section), zeros);
  memory.set_flags(base, zeros.size(), Memory::kReadable | Memory::kWritable);
  return base;
}

/// Zeros in the counter and in the norms, and nothing between the two.
std::byte* place_counters(const CallPlan& call, Memory& memory) {
  std::byte* const base = place_zeros(call, memory, Section::counters);
  if (std::ranges::find(call.steps(), fa::plan::Role::norms, &fa::plan::Step::role) != call.steps().end()) {
    memory.set_flags(base + sizeof(std::int32_t), fa::plan::kCounterBytes - sizeof(std::int32_t), 0);
  }
  return base;
}

/// The counter of blocks is cleared.
std::byte* place_schedule(Memory& memory, std::size_t bytes) {
  constexpr std::size_t kCleared = sizeof(fa::kernel::ScheduleHead::arrived);
  std::byte* const base = memory.add_output(name_of(Section::schedule), bytes);
  memory.track(base);
  std::fill_n(base, kCleared, std::byte{0});
  memory.set_flags(base, kCleared, Memory::kReadable | Memory::kWritable);
  return base;
}

fa::plan::SectionAddresses place_sections(const CallPlan& call, Memory& memory, bool trusted) {
  fa::plan::SectionAddresses at{};
  for (std::size_t i = 0; i < fa::plan::kSections; ++i) {
    const auto section = static_cast<Section>(i);
    if (!call.workspace.has(section)) continue;
    if (section == Section::counters) {
      at[i] = place_counters(call, memory);
      continue;
    }
    if (section == Section::max_rows) {
      at[i] = place_zeros(call, memory, section);
      continue;
    }
    if (section == Section::schedule) {
      at[i] = place_schedule(memory, call.workspace.bytes(section));
      continue;
    }
    const std::size_t bytes = call.workspace.bytes(section);
    at[i] = memory.add_output(name_of(section), bytes);
    if (section == Section::split_flags) memory.set_flags(at[i], bytes, Memory::kReadable | Memory::kWritable);
    const bool tells =
        section == Section::partial_o || section == Section::partial_lse || section == Section::partial_dkv;
    if (tells) memory.track(at[i]);  // blocks read what others have written
    if (!trusted) memory.set_flags(at[i], bytes, Memory::kReadable | Memory::kWritable);
  }
  return at;
}

}  // namespace

void add_companions(const fa::plan::Problem& problem, PlanKernels& kernels) {
  const fa::plan::KernelSet others = companions(problem, kernels.specs);
  for (const fa::plan::Role role : fa::plan::kAllRoles) {
    if (others[role].warps != 0) kernels.specs[role] = others[role];
  }
}

void* place_schedule(const fa::plan::Problem& problem, const KernelSpec& attention, int multiprocessors,
                     Memory& memory) {
  return place_schedule(memory, schedule_shape(problem, attention, multiprocessors).bytes());
}

void run_plan(CallPlan& call, const PlanKernels& kernels, Memory& memory, std::uint64_t seed, bool trusted) {
  call.bind(place_sections(call, memory, trusted));
  call.encode_maps([](const fa::plan::TensorMapSpec& spec, fa::kernel::TensorMap& map) { encode(map, spec); });
  for (const fa::plan::Step& step : call.steps()) {
    const KernelSpec& spec = kernels.specs[step.role];
    const std::string& name = kernels.names[step.role];
    const RegisteredKernel& kernel = registered_kernel(name.empty() ? canonical(spec) : name);
    LaunchOptions options;
    options.grid = static_cast<int>(step.grid);
    options.threads = kernel.threads;
    options.resident = kernel.min_blocks;
    options.shared_bytes = fa::plan::shared_bytes(spec);
    options.seed = seed;
    options.cluster = spec.cluster();
    options.early = step.early;
    options.early_inputs = spec.op() == fa::plan::Op::forward && &step == call.steps().data();  // behind the caller's
    options.last_first = spec.ordered_dq() || spec.own_parts() || (spec.split_keys() > 0 && spec.split);
    const void* const both[] = {step.params, step.place};
    launch(kernel.entry, step.place != nullptr ? static_cast<const void*>(both) : step.params, memory, options);
    memory.end_launch();
  }
}

void expect_flags_down(const std::uint64_t* flags, std::int64_t count) {
  constexpr std::uint64_t kUp = 0x6d45161bc6c0dd49;
  for (std::int64_t i = 0; i < count; ++i) {
    if (flags[i] == kUp) throw NotWritten("a flag is still up");
  }
}

}  // namespace emulator
