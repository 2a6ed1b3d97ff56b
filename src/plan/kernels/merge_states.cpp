#include "plan/kernels/merge_states.hpp"

#include "plan/catalogue.hpp"
#include "plan/early_start.hpp"

namespace fa::plan {
namespace {

int overlaps_others(const KernelSpec& spec) {
  return overlaps(spec.arch) ? 1 : Field::kAbsent;
}

constexpr Field kFields[] = {
    field<&SpecHead::d_v>("d_v").as("kHeadDimV"),
    field<&MergeStates::states>("states").as("kStates", "o of a state: 0: of Element, 1: of floats, 2: of either"),
    field<&MergeStates::float_result>("float_result").as("kFloatResult"),
    field<&SpecHead::aligned>("aligned").as("kAligned", "rows start at multiples of 16 bytes"),
    field<&SpecHead::warps>("warps").as("kWarps"),
    field<&SpecHead::min_blocks>("min_blocks"),
    field<&MergeStates::sum>("sum").as("kSum", "without weights").when_set(),
    derived("kOverlaps", overlaps_others, "with kernels before or behind it"),
};
static_assert(is_complete<MergeStates>(kFields));

constexpr Kernel kMergeStates{
    .name = "merge_states",
    .op = Op::merge,
    .unit = {.header = "common/merge_states.cuh",
             .params = "MergeStatesParams",
             .variant_params = "MergeStatesParams",
             .function = "kernel::merge_states"},
    .fields = kFields,
    .starts_early = [](const KernelSpec&) { return true; },
};

}  // namespace

const Kernel& MergeStates::kernel() noexcept {
  return kMergeStates;
}

}  // namespace fa::plan
