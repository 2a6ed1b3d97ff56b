#include "plan/sm90_forward.hpp"

#include "plan/catalogue.hpp"
#include "plan/early_start.hpp"

namespace fa::plan {
namespace {

/// No line where there is one.
int two_blocks(const KernelSpec& spec) {
  return spec.min_blocks == 2 ? 1 : Field::kAbsent;
}

constexpr Field kFields[] = {
    field<&SpecHead::d_qk>("d_qk").as("kHeadDimQk"),
    field<&SpecHead::d_v>("d_v").as("kHeadDimV"),
    field<&SpecHead::causal>("causal").as("kCausal"),
    field<&SpecHead::positive_scale>("positive_scale").as("kPositiveScale"),
    field<&SpecHead::tile_m>("tile_m").as("kTileM", "query rows of a tile").open("Query rows of a thread block"),
    field<&SpecHead::tile_n>("tile_n")
        .as("kTileN", "keys of a main-loop step")
        .open("Keys of one step of the main loop"),
    field<&SpecHead::stages>("stages").as("kStages", "K and V tiles in flight").open("K and V tiles in flight"),
    field<&Sm90Forward::q_buffers>("q_buffers").as("kQBuffers", "query tiles in flight").open("Query tiles in flight"),
    field<&Sm90Forward::softmax_chunks>("softmax_chunks").as("kSoftmaxChunks", "of a KV tile").at(Field::Place::flags),
    field<&Sm90Forward::take_turns>("take_turns")
        .as("kTakeTurns", "at the tensor cores")
        .open("Warpgroups feed the tensor cores in turn"),
    field<&SpecHead::pack_gqa>("pack_gqa").as("kPackGqa").open("Query heads of a KV head share a tile").by_call(),
    field<&SpecHead::split>("split").as("kSplit"),
    launched("splits", "Thread blocks that share the keys of a query tile"),
    field<&SpecHead::min_blocks>("min_blocks"),
    derived("kTwoBlocks", two_blocks, "a multiprocessor"),
    field<&Sm90Forward::skips_hidden>("skips_hidden")
        .when_set()
        .as("kSkipsHidden", "pieces of tiles behind the diagonal"),
    field<&Sm90Forward::own_ends>("own_ends").when_set().as("kOwnEnds", "of each warpgroup's KV tiles"),
    field<&Sm90Forward::dynamic>("dynamic")
        .when_set()
        .as("kDynamic", "query tiles come from a counter")
        .open("Query tiles come from a counter that thread blocks share"),
    field<&Sm90Forward::affine_product>("affine_product")
        .when_set()
        .as("kAffineProduct", "of an affine score function")
        .open("The tensor cores add an affine score function"),
    field<&Sm90Forward::affine_reach>("affine_reach")
        .when_set()
        .as("kAffineReach", "limits the KV tiles")
        .open("Keys out of an affine score function's reach are left out"),
    field<&Sm90Forward::exact_max>("exact_max")
        .when_set()
        .as("kExactMax", "of a row's scores")
        .open("P is relative to the exact maximum of a row's scores"),
    field<&SpecHead::varlen>("varlen").when_set().as("kVarlen"),
    field<&SpecHead::bounded>("bounded").when_set().as("kBounded", "all blocks run at once"),
    field<&SpecHead::place_in_memory>("place_in_memory").when_set().as("kPlaceInMemory"),
    field<&SpecHead::dropout>("dropout").when_set().as("kDropout"),
    field<&SpecHead::page_size>("page_size").when_not_0().as("kPageSize", "keys of a page"),
    field<&Sm90Forward::scheduled>("scheduled")
        .when_set()
        .as("kScheduled", "thread blocks take their parts of a schedule")
        .open("Of few rows over pages: share keys among thread blocks by a schedule")
        .by_call(),
    field<&Sm90Forward::own_parts>("own_parts")
        .when_set()
        .as("kOwnParts", "thread blocks find their parts of the keys by themselves")
        .open("The same, by thread blocks that find their parts by themselves")
        .by_call(),
    field<&Sm90Forward::split_blocks>("split_blocks")
        .when_set()
        .as("kSplitBlocks", "of a cluster, which merge their splits")
        .open("Thread blocks of a cluster that share the keys of a query tile")
        .by_call(),
    field<&Sm90Forward::split_keys>("split_keys")
        .when_above_0()
        .as("kSplitKeys", "whose softmax is formed alone: a fixed split size"),
    field<&Sm90Forward::length_keys>("length_keys")
        .when_above_0()
        .as("kLengthKeys", "at least of a split: as many as a request's length has"),
    field<&Sm90Forward::whole_tiles>("whole_tiles").when_set().as("kWholeTiles").by_call(),
    field<&Sm90Forward::wide_boxes>("wide_boxes").when_set().as("kWideBoxes").open("Copies of all columns of pages"),
    field<&Sm90Forward::evict_first>("evict_first")
        .when_set()
        .as("kEvictFirst", "from the L2 cache: K and V")
        .open("K and V are the first to leave the L2 cache")
        .by_override(),
    field<&SpecHead::accumulate>("accumulate").when_set().as("kAccumulate", "to what o and lse hold"),
    field<&SpecHead::max_logit>("max_logit")
        .when_above_0()
        .as("kMaxLogit", "of rows: 1 of the softmax, 2 of the scaled scores"),
    field<&SpecHead::max_logit_by_head>("max_logit_by_head").when_set().as("kMaxLogitByHead"),
    field<&SpecHead::entropy>("entropy").when_set().as("kEntropy", "of rows"),
};
static_assert(is_complete<Sm90Forward>(kFields));

/// The counters of dynamic kernels are cleared in front of them. Blocks that find their parts, or share fixed splits,
/// wait for those of lower numbers alone.
bool starts_early(const KernelSpec& spec) {
  return !spec.as<Sm90Forward>().dynamic;
}

/// The copy engine brings whole groups.
bool packs(const Problem& problem, const Fixed& fixed, const Choice& choice) noexcept {
  return sm90_forward_tile_m(problem, fixed, choice) % (problem.h_q / problem.h_kv) == 0;
}

constexpr Kernel kKernel{
    .name = "sm90_forward",
    .op = Op::forward,
    .family = Family::sm90,
    .unit = {.header = "sm90/sm90_forward.cuh",
             .params = "Sm90ForwardParams",
             .variant_params = "Sm90ForwardVariantParams",
             .function = "sm90::forward",
             .room = "sm90::Forward",
             .asserts_threads = true},
    .fields = kFields,
    .persistent = true,
    .tensor_maps = true,
    .shared_bytes = sm90_forward_shared_bytes,
    .refusal = sm90_forward_refusal,
    .starts_early = starts_early,
    .warps = sm90_forward_warps,
};

}  // namespace

constinit const ForwardFamily kSm90ForwardFamily{
    .family = Family::sm90,
    .kernel = &kKernel,
    .bits_of = Facts::row,
    // Blocks stay to the end, one a multiprocessor: more tiles than Hopper has of them would make some run twice as
    // long as others.
    .enough_blocks = kHopperMultiprocessors,
    .has_counter = true,
    .misfit = sm90_forward_misfit,
    .obstacle = sm90_copy_obstacle,
    .form_clusters = sm90_forward_form_clusters,
    .takes_whole = sm90_forward_takes_whole,
    .packs = packs,
    .may_have_reach = sm90_forward_may_have_reach,
    .scheduled_keys = sm90_forward_scheduled_keys,
    .decide = sm90_forward_decide,
    .specs = sm90_forward_specs,
    .candidates = sm90_forward_candidates,
};

const Kernel& Sm90Forward::kernel() noexcept {
  return kKernel;
}

}  // namespace fa::plan
