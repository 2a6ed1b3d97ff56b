#include "plan/sm90_wide_forward.hpp"

#include "plan/catalogue.hpp"
#include "plan/sm90_forward.hpp"

namespace fa::plan {
namespace {

constexpr Field kFields[] = {
    field<&SpecHead::d_qk>("d_qk").as("kHeadDimQk"),
    field<&SpecHead::d_v>("d_v").as("kHeadDimV"),
    field<&SpecHead::causal>("causal").as("kCausal"),
    field<&SpecHead::positive_scale>("positive_scale").as("kPositiveScale"),
    field<&SpecHead::tile_m>("tile_m").as("kTileM", "query rows of a tile"),
    field<&SpecHead::tile_n>("tile_n").as("kTileN", "keys of a main-loop step"),
    field<&SpecHead::stages>("stages").as("kStages", "K and V tiles in flight").open("K and V tiles in flight"),
    field<&SpecHead::pack_gqa>("pack_gqa").as("kPackGqa").open("Query heads of a KV head share a tile").by_call(),
    field<&SpecHead::split>("split").as("kSplit"),
    launched("splits", "Thread blocks that share the keys of a query tile"),
    field<&SpecHead::varlen>("varlen").when_set().as("kVarlen"),
    field<&SpecHead::bounded>("bounded").when_set().as("kBounded", "all blocks run at once"),
    field<&SpecHead::place_in_memory>("place_in_memory").when_set().as("kPlaceInMemory"),
    field<&SpecHead::page_size>("page_size").when_not_0().as("kPageSize", "keys of a page"),
    field<&Sm90WideForward::scheduled>("scheduled")
        .when_set()
        .as("kScheduled", "thread blocks take their parts of a schedule")
        .open("Of pages: share keys among thread blocks by a schedule")
        .by_call(),
    field<&Sm90WideForward::value_in_key>("value_in_key").when_set().as("kValueInKey", "V is the first columns of K"),
    field<&Sm90WideForward::multicast>("multicast")
        .when_set()
        .as("kMulticast", "keys are copied for both blocks of a cluster")
        .open("Two thread blocks of a cluster, which have neighbouring heads, copy keys for each other")
        .by_call(),
};
static_assert(is_complete<Sm90WideForward>(kFields));

/// Heads fill the rows of a tile.
bool packs(const Problem& problem, const Fixed&, const Choice&) noexcept {
  const std::int64_t group = problem.h_q / problem.h_kv;
  return kSm90WideTile % group == 0 || group % kSm90WideTile == 0;
}

constexpr Kernel kKernel{
    .name = "sm90_wide_forward",
    .op = Op::forward,
    .family = Family::sm90_wide,
    .unit = {.header = "sm90/sm90_wide_forward.cuh",
             .params = "Sm90ForwardParams",
             .variant_params = "Sm90ForwardVariantParams",
             .function = "sm90::wide_forward",
             .room = "sm90::WideForward",
             .asserts_threads = true},
    .fields = kFields,
    .persistent = true,
    .tensor_maps = true,
    .cuts_groups = true,
    .spread_heads = heads_of_spread_places,
    .shared_bytes = sm90_wide_forward_shared_bytes,
    .refusal = sm90_wide_forward_refusal,
    .starts_early = [](const KernelSpec&) { return true; },
    .warps = sm90_wide_forward_warps,
};

}  // namespace

constinit const ForwardFamily kSm90WideForwardFamily{
    .family = Family::sm90_wide,
    .kernel = &kKernel,
    .bits_of = Facts::request,
    .enough_blocks = kHopperMultiprocessors,  // as of sm90_forward
    .misfit = sm90_wide_forward_misfit,
    .obstacle = sm90_copy_obstacle,
    .form_clusters = sm90_wide_forward_form_clusters,
    .packs = packs,
    .scheduled_keys = [](const Problem&, const Choice&) noexcept { return std::optional(kScheduledKeys); },
    .decide = sm90_wide_forward_decide,
    .specs = sm90_wide_forward_specs,
    .candidates =
        [](const Problem& problem, const Choice& choice) {
          return Candidates{{sm90_wide_forward_specs(problem, {}, choice).front(), 0}};
        },
};

const Kernel& Sm90WideForward::kernel() noexcept {
  return kKernel;
}

}  // namespace fa::plan
