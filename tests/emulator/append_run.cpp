#include "emulator/append_run.hpp"

#include "api/append.hpp"
#include "emulator/memory.hpp"
#include "emulator/plan_run.hpp"

namespace emulator {
namespace {

using fa::test::AppendData;
using fa::test::AppendPart;
using fa::test::kAppendParts;

/// Everything may be written by the kernel before, and so is writable as long as nothing has waited for that.
constexpr std::uint8_t kEarlyInput = Memory::kReadable | Memory::kWritable;

std::array<void*, kAppendParts> place(const fa::test::AppendCase& c, const AppendData& data, Memory& memory,
                                      bool early) {
  std::array<void*, kAppendParts> at{};
  for (std::size_t i = 0; i < kAppendParts; ++i) {
    const fa::test::AppendBuffer& buffer = data.buffers()[i];
    if (!buffer.bytes.empty()) at[i] = memory.add_input(buffer.name, buffer.bytes);
  }
  for (std::size_t i = 0; i < kAppendParts; ++i) {
    const fa::test::AppendBuffer& buffer = data.buffers()[i];
    if (at[i] == nullptr) continue;
    const auto part = static_cast<AppendPart>(i);
    const bool is_rows = part <= AppendPart::v_cache || part >= AppendPart::k_scale;
    if (!is_rows) {
      if (early) memory.set_flags(at[i], buffer.bytes.size(), kEarlyInput);
      continue;
    }
    memory.set_flags(at[i], buffer.bytes.size(), 0);
  }
  for (std::size_t i = 0; i < kAppendParts; ++i) {
    const auto part = static_cast<AppendPart>(i);
    if (part > AppendPart::v_cache && part < AppendPart::k_scale) continue;
    const bool shared = part == AppendPart::v_cache && at[i] == nullptr;
    const std::size_t memory_of = shared ? static_cast<std::size_t>(AppendPart::k_cache) : i;
    if (at[memory_of] == nullptr) continue;
    const bool written = data.buffers()[memory_of].written;
    const bool in_place = written && (part == AppendPart::q || (c.latent && c.scales_given));
    const std::uint8_t flags = written && !in_place ? std::uint8_t{Memory::kWritable}
                               : early || in_place  ? kEarlyInput
                                                    : std::uint8_t{Memory::kReadable};
    data.for_each_row(part, [&](std::size_t offset, std::size_t bytes) {
      memory.set_flags(static_cast<std::byte*>(at[memory_of]) + offset, bytes, flags);
    });
  }
  return at;
}

}  // namespace

std::array<std::vector<std::byte>, kAppendParts> run_append(const fa::test::AppendCase& c, const AppendData& data,
                                                            const fa::plan::KernelSpec& spec, std::uint64_t seed,
                                                            const std::string& name) {
  Memory memory;
  const std::array<void*, kAppendParts> at = place(c, data, memory, spec.arch.major >= 9);
  fa::api::AppendCall call = fa::api::check_append(c.config(), data.inputs(at));
  if (!call.empty) {
    const fa::plan::RotaryTurns turns = fa::plan::rotary_turns(c.rotary_dims, c.base);
    PlanKernels kernels;
    kernels.specs[fa::plan::Role::append] = spec;
    kernels.names[fa::plan::Role::append] = name;
    fa::plan::CallPlan plan;
    plan_call(call.problem, spec, call.inputs, c.rotary_dims > 0 && !c.table ? &turns : nullptr, plan);
    run_plan(plan, kernels, memory, seed);
  }
  std::array<std::vector<std::byte>, kAppendParts> after;
  for (std::size_t i = 0; i < kAppendParts; ++i) {
    const auto* const bytes = static_cast<const std::byte*>(at[i]);
    if (bytes != nullptr) after[i].assign(bytes, bytes + data.buffers()[i].bytes.size());
  }
  return after;
}

}  // namespace emulator
