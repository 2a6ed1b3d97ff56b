#include "plan/kernels/append.hpp"

#include "plan/catalogue.hpp"
#include "plan/early_start.hpp"

namespace fa::plan {
namespace {

int overlaps_others(const KernelSpec& spec) {
  return overlaps(spec.arch) ? 1 : Field::kAbsent;
}

constexpr Field kFields[] = {
    field<&SpecHead::d_qk>("d_qk").as("kHeadDimQk"),
    field<&SpecHead::d_v>("d_v").as("kHeadDimV"),
    field<&SpecHead::page_size>("page_size").as("kPageSize", "0: a contiguous cache"),
    field<&Append::rotary_dims>("rotary_dims").as("kRotaryDims"),
    field<&Append::interleaved>("interleaved").as("kInterleaved", "pairs are neighbours"),
    field<&Append::table>("table").as("kTable", "of cosines and sines: 1: of floats, 2: of elements"),
    field<&SpecHead::aligned>("aligned").as("kAligned", "rows start at multiples of 16 bytes"),
    field<&SpecHead::warps>("warps").as("kWarps"),
    field<&SpecHead::min_blocks>("min_blocks"),
    derived("kOverlaps", overlaps_others, "with kernels before or behind it"),
};
static_assert(is_complete<Append>(kFields));

constexpr Kernel kAppend{
    .name = "append",
    .op = Op::append,
    .unit = {.header = "common/append.cuh",
             .params = "AppendParams",
             .variant_params = "AppendParams",
             .function = "kernel::append"},
    .fields = kFields,
    .starts_early = [](const KernelSpec&) { return true; },
};

constexpr Field kStoredFields[] = {
    field<&SpecHead::d_qk>("d_qk").as("kHeadDimQk"),
    field<&SpecHead::d_v>("d_v").as("kHeadDimV"),
    field<&SpecHead::page_size>("page_size").as("kPageSize", "0: a contiguous cache"),
    field<&AppendStored::rotary_dims>("rotary_dims").as("kRotaryDims"),
    field<&AppendStored::interleaved>("interleaved").as("kInterleaved", "pairs are neighbours"),
    field<&AppendStored::table>("table").as("kTable", "of cosines and sines: 1: of floats, 2: of elements"),
    field<&AppendStored::k_storage>("k_storage")
        .as("kKeyStorage", "1: e4m3, 2: i8, 3: latent rows, else: 4 bits, in groups of so many columns"),
    field<&AppendStored::v_storage>("v_storage").as("kValueStorage", "likewise"),
    field<&AppendStored::scales_given>("scales_given").as("kScalesGiven"),
    field<&SpecHead::aligned>("aligned").as("kAligned", "rows start at multiples of 16 bytes"),
    field<&SpecHead::warps>("warps").as("kWarps"),
    derived("kOverlaps", overlaps_others, "with kernels before or behind it"),
};
static_assert(is_complete<AppendStored>(kStoredFields));

constexpr Kernel kAppendStored{
    .name = "append_stored",
    .op = Op::append,
    .unit = {.header = "common/append_stored.cuh",
             .params = "AppendStoredParams",
             .variant_params = "AppendStoredParams",
             .function = "kernel::append_stored"},
    .fields = kStoredFields,
    .starts_early = [](const KernelSpec&) { return true; },
};

}  // namespace

const Kernel& Append::kernel() noexcept {
  return kAppend;
}

const Kernel& AppendStored::kernel() noexcept {
  return kAppendStored;
}

}  // namespace fa::plan
