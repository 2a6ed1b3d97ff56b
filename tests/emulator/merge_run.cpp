#include "emulator/merge_run.hpp"

#include "api/merge_states.hpp"
#include "emulator/memory.hpp"
#include "emulator/plan_run.hpp"

namespace emulator {
namespace {

/// What is read may be written by the kernel before, and so is writable as long as nothing has waited for that.
std::vector<void*> place(const fa::test::MergeData& data, Memory& memory, bool early) {
  std::vector<void*> at;
  for (const fa::test::MergeData::Buffer& buffer : data.buffers()) {
    at.push_back(memory.add_input(buffer.name, buffer.bytes));
    memory.set_flags(at.back(), buffer.bytes.size(), 0);
  }
  data.for_each_row([&](std::size_t part, std::size_t offset, std::size_t bytes) {
    const fa::test::MergeData::Buffer& buffer = data.buffers()[part];
    const bool writable = buffer.written || early;
    const auto flags =
        static_cast<std::uint8_t>((buffer.read ? Memory::kReadable : 0) | (writable ? Memory::kWritable : 0));
    memory.set_flags(static_cast<std::byte*>(at[part]) + offset, bytes, flags);
  });
  return at;
}

}  // namespace

std::vector<std::vector<std::byte>> run_merge(const fa::test::MergeCase& c, const fa::test::MergeData& data,
                                              const fa::plan::KernelSpec& spec, std::uint64_t seed,
                                              const std::string& name) {
  Memory memory;
  const std::vector<void*> at = place(data, memory, spec.arch.major >= 9);
  const fa::test::MergeData::Call given = data.call(at);
  const fa::api::MergeCall call = fa::api::check_merge(c.config(), given.inputs, given.outputs);
  if (!call.empty) {
    PlanKernels kernels;
    kernels.specs[fa::plan::Role::merge] = spec;
    kernels.names[fa::plan::Role::merge] = name;
    fa::plan::CallPlan plan;
    plan_call(call.problem, spec, {call.given(), call.stacked, call.stride_o, call.stride_lse, call.merged, call.sink},
              plan);
    run_plan(plan, kernels, memory, seed);
  }
  std::vector<std::vector<std::byte>> after;
  for (std::size_t i = 0; i < at.size(); ++i) {
    const auto* const bytes = static_cast<const std::byte*>(at[i]);
    after.emplace_back(bytes, bytes + data.buffers()[i].bytes.size());
  }
  return after;
}

}  // namespace emulator
