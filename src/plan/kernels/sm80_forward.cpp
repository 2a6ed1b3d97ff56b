#include "plan/sm80_forward.hpp"

#include "plan/catalogue.hpp"
#include "plan/early_start.hpp"

namespace fa::plan {
namespace {

/// A schedule is written by a kernel in front; decodes over caches of fewer bits are short, and may merge splits.
bool starts_early(const KernelSpec& spec) {
  const Sm80Forward& own = spec.as<Sm80Forward>();
  return spec.scheduled() || (own.split_warps && own.stored() && !spec.bounded);
}

int overlaps_others(const KernelSpec& spec) {
  return starts_early(spec) && overlaps(spec.arch) ? 1 : Field::kAbsent;
}

int half_products(const KernelSpec& spec) {
  const Sm80Forward& own = spec.as<Sm80Forward>();
  return has_half_products(spec.arch, own.k_storage, own.v_storage) ? 1 : Field::kAbsent;
}

constexpr Field kFields[] = {
    field<&SpecHead::d_qk>("d_qk").as("kHeadDimQk"),
    field<&SpecHead::d_v>("d_v").as("kHeadDimV"),
    field<&SpecHead::causal>("causal").as("kCausal"),
    field<&SpecHead::positive_scale>("positive_scale").as("kPositiveScale"),
    field<&SpecHead::aligned>("aligned").as("kAligned", "rows start at multiples of 16 bytes"),
    field<&SpecHead::tile_m>("tile_m")
        .as("kTileM", "query rows of a thread block")
        .open("Query rows of a thread block"),
    field<&SpecHead::tile_n>("tile_n")
        .as("kTileN", "keys of a main-loop step")
        .open("Keys of one step of the main loop"),
    field<&SpecHead::warps>("warps").as("kWarps").open("Warps of a thread block"),
    field<&SpecHead::stages>("stages").as("kStages", "K and V tiles in flight").open("K and V tiles in flight"),
    field<&Sm80Forward::q_in_registers>("q_in_registers").as("kQInRegisters").open("Keep the query tile in registers"),
    field<&Sm80Forward::loop_bodies>("loop_bodies")
        .as("kLoopBodies")
        .open("1: masked and plain tiles share a loop body, 2: one each"),
    field<&Sm80Forward::conditional_rescale>("conditional_rescale").as("kConditionalRescale"),
    field<&SpecHead::pack_gqa>("pack_gqa").as("kPackGqa").open("Query heads of a KV head share a tile").by_call(),
    field<&SpecHead::split>("split").as("kSplit"),
    launched("splits", "Thread blocks that share the keys of a query tile"),
    field<&SpecHead::min_blocks>("min_blocks"),
    field<&SpecHead::warps_n>("warps_n")
        .when_set()
        .as("kWarpsN", "share rows")
        .open("1: no warps share query rows, 2: pairs do, 4 and 8: groups of so many"),
    field<&SpecHead::varlen>("varlen").when_set().as("kVarlen"),
    field<&SpecHead::dropout>("dropout").when_set().as("kDropout"),
    field<&SpecHead::page_size>("page_size").when_not_0().as("kPageSize", "keys of a page"),
    field<&Sm80Forward::split_keys>("split_keys")
        .when_above_0()
        .as("kSplitKeys", "whose softmax is formed alone: a fixed split size"),
    field<&Sm80Forward::scheduled>("scheduled")
        .when_set()
        .as("kScheduled", "thread blocks take their parts of a schedule")
        .open("Of pages: share keys among thread blocks by a schedule")
        .by_call(),
    field<&Sm80Forward::own_parts>("own_parts")
        .when_set()
        .as("kOwnParts", "thread blocks find their parts of the keys by themselves")
        .open("Share keys among thread blocks that find their parts by themselves")
        .by_call(),
    field<&Sm80Forward::split_warps>("split_warps")
        .when_set()
        .as("kSplitWarps", "share rows, each with its own keys")
        .open("Warps share the query rows, each with keys of its own"),
    field<&Sm80Forward::k_storage>("k_storage")
        .when_above_0()
        .as("kKeyStorage", "1: e4m3, 2: i8, else: 4 bits, in groups of so many columns"),
    field<&Sm80Forward::v_storage>("v_storage").when_above_0().as("kValueStorage", "likewise"),
    derived("kHalfProducts", half_products, "of 8-bit K or V: in f16"),
    derived("kOverlaps", overlaps_others, "with the kernel before it"),
    field<&SpecHead::accumulate>("accumulate").when_set().as("kAccumulate", "to what o and lse hold"),
    field<&Sm80Forward::value_in_key>("value_in_key").when_set().as("kValueInKey", "V is the first columns of K"),
    field<&SpecHead::max_logit>("max_logit")
        .when_above_0()
        .as("kMaxLogit", "of rows: 1 of the softmax, 2 of the scaled scores"),
    field<&SpecHead::max_logit_by_head>("max_logit_by_head").when_set().as("kMaxLogitByHead"),
    field<&SpecHead::entropy>("entropy").when_set().as("kEntropy", "of rows"),
    field<&SpecHead::bounded>("bounded").when_set().as("kBounded", "blocks go on from tile to tile"),
    field<&SpecHead::place_in_memory>("place_in_memory").when_set().as("kPlaceInMemory"),
};
static_assert(is_complete<Sm80Forward>(kFields));

constexpr Kernel kKernel{
    .name = "sm80_forward",
    .op = Op::forward,
    .family = Family::sm80,
    .unit = {.header = "sm80/sm80_forward.cuh",
             .params = "ForwardParams",
             .variant_params = "ForwardVariantParams",
             .stored_params = "ForwardStoredParams",
             .function = "sm80::forward",
             .room = "sm80::Forward"},
    .fields = kFields,
    .shared_bytes = sm80_forward_shared_bytes,
    .refusal = sm80_forward_refusal,
    .resident_blocks = sm80_forward_resident_blocks,
    .harmless_spill = sm80_forward_harmless_spill,
    .starts_early = starts_early,
};

}  // namespace

constinit const ForwardFamily kSm80ForwardFamily{
    .family = Family::sm80,
    .kernel = &kKernel,
    .bits_of = Facts::row,
    // More than the multiprocessors of any GPU so far, so that the choice need not know the GPU.
    .enough_blocks = 192,
    .scheduled_keys = [](const Problem&, const Choice&) noexcept { return std::optional(kScheduledKeys); },
    .decide = sm80_forward_decide,
    .specs = sm80_forward_specs,
    .fits = sm80_forward_fits,
    .candidates = sm80_forward_candidates,
};

const Kernel& Sm80Forward::kernel() noexcept {
  return kKernel;
}

}  // namespace fa::plan
