#include "plan/sm90_backward.hpp"

#include "plan/catalogue.hpp"
#include "plan/early_start.hpp"
#include "plan/sm90_backward_pair.hpp"
#include "plan/sm90_backward_split.hpp"

namespace fa::plan {
namespace {

constexpr Field kFields[] = {
    field<&SpecHead::d_qk>("d_qk").as("kHeadDimQk"),
    field<&SpecHead::d_v>("d_v").as("kHeadDimV"),
    field<&SpecHead::causal>("causal").as("kCausal"),
    field<&SpecHead::tile_m>("tile_m")
        .as("kTileM", "query rows of a main-loop step")
        .open("Query rows of one step of the main loop"),
    field<&SpecHead::tile_n>("tile_n").as("kTileN", "keys of a tile").open("Keys of a thread block"),
    field<&SpecHead::stages>("stages").as("kStages", "Q and dO tiles in flight").open("Q and dO tiles in flight"),
    field<&SpecHead::write_dq>("write_dq").as("kWriteDq"),
    field<&SpecHead::split>("split").as("kSplit"),
    launched("splits", "Thread blocks that share the query rows of a key tile"),
    field<&SpecHead::min_blocks>("min_blocks"),
    field<&Sm90Backward::split_blocks>("split_blocks")
        .when_set()
        .as("kSplitBlocks", "of a cluster, for a key tile")
        .open("Thread blocks of a cluster that share the query rows of a key tile")
        .by_call(),
    field<&Sm90Backward::in_turns>("in_turns")
        .when_set()
        .as("kInTurns", "blocks that share a key tile add dK and dV")
        .open("Thread blocks that share a key tile add dK and dV in turns")
        .by_call(),
    field<&Sm90Backward::ordered_dq>("ordered_dq").when_set().as("kOrderedDq", "additions to it"),
    field<&Sm90Backward::rows_without_keys>("rows_without_keys").when_set().as("kRowsWithoutKeys"),
    field<&SpecHead::without_dk>("without_dk").when_set().as("kWithoutDk"),
    field<&SpecHead::without_dv>("without_dv").when_set().as("kWithoutDv"),
    field<&SpecHead::varlen>("varlen").when_set().as("kVarlen"),
    field<&SpecHead::dropout>("dropout").when_set().as("kDropout"),
    field<&SpecHead::place_in_memory>("place_in_memory").when_set().as("kPlaceInMemory"),
};
static_assert(is_complete<Sm90Backward>(kFields));

/// Its texts say what makes it another kernel.
constexpr Field cluster_field() {
  Field result;
  result.name = "cluster";
  result.get = [](const KernelSpec& spec) { return spec.cluster(); };
  return result.when_set();
}

constexpr Field kPairFields[] = {
    field<&SpecHead::d_qk>("d_qk").as("kHeadDimQk"),
    field<&SpecHead::d_v>("d_v").as("kHeadDimV"),
    field<&SpecHead::causal>("causal").as("kCausal"),
    field<&SpecHead::tile_m>("tile_m")
        .as("kTileM", "query rows of a main-loop step")
        .open("Query rows of one step of the main loop"),
    field<&SpecHead::tile_n>("tile_n").as("kTileN", "keys of a tile").open("Keys of a thread block"),
    field<&SpecHead::stages>("stages").as("kStages", "Q and dO tiles in flight").open("Q and dO tiles in flight"),
    field<&SpecHead::write_dq>("write_dq").as("kWriteDq"),
    field<&SpecHead::split>("split").as("kSplit"),
    launched("splits", "Thread blocks that share the query rows of a key tile"),
    field<&SpecHead::min_blocks>("min_blocks"),
    field<&Sm90BackwardPair::ordered_dq>("ordered_dq").when_set().as("kOrderedDq", "additions to it"),
    cluster_field(),
    field<&SpecHead::without_dk>("without_dk").when_set().as("kWithoutDk"),
    field<&SpecHead::without_dv>("without_dv").when_set().as("kWithoutDv"),
    field<&SpecHead::varlen>("varlen").when_set().as("kVarlen"),
    field<&SpecHead::dropout>("dropout").when_set().as("kDropout"),
    field<&SpecHead::place_in_memory>("place_in_memory").when_set().as("kPlaceInMemory"),
};
static_assert(is_complete<Sm90BackwardPair>(kPairFields));

/// Tile lists are read first.
bool starts_early(const KernelSpec& spec) {
  return spec.varlen || spec.variants.mask.empty();
}

/// Blocks stay to the end, one a multiprocessor; or several share a tile.
std::int64_t enough_blocks(const Problem& problem) noexcept {
  return kHopperMultiprocessors / blocks_of_tile(problem);
}

/// Whether an override leaves alone what other kernels' tiles are.
bool follows(const Fixed& fixed) noexcept {
  return fixed.number("tile_m") % 64 == 0 && fixed.number("tile_n") % 64 == 0;
}

bool may_spill(const Problem& problem) noexcept {
  return !sm90_backward_is_plain(problem);
}

constexpr Kernel kKernel{
    .name = "sm90_backward",
    .op = Op::backward,
    .family = Family::sm90,
    .unit = {.header = "sm90/sm90_backward.cuh",
             .params = "Sm90BackwardParams",
             .variant_params = "Sm90BackwardVariantParams",
             .function = "sm90::backward",
             .room = "sm90::Backward",
             .asserts_threads = true,
             .part = expression::Part::gradients},
    .fields = kFields,
    .persistent = true,
    .tensor_maps = true,
    .shared_bytes = sm90_backward_shared_bytes,
    .refusal = sm90_backward_refusal,
    .starts_early = starts_early,
    .warps = sm90_backward_warps,
};

constexpr Kernel kPairKernel{
    .name = "sm90_backward",
    .entry = "sm90_backward_pair",
    .op = Op::backward,
    .family = Family::sm90,
    .unit = {.header = "sm90/sm90_backward_blocks.cuh",
             .params = "Sm90BackwardParams",
             .variant_params = "Sm90BackwardVariantParams",
             .function = "sm90::backward_blocks",
             .room = "sm90::BackwardBlocks",
             .asserts_threads = true,
             .part = expression::Part::gradients},
    .fields = kPairFields,
    .cluster = 2,
    .tensor_maps = true,
    .shared_bytes = sm90_backward_pair_shared_bytes,
    .refusal = sm90_backward_pair_refusal,
    .starts_early = starts_early,
    .warps = [](const KernelSpec&) { return kSm90BackwardPairWarps; },
};

}  // namespace

constinit const BackwardFamily kSm90BackwardFamily{
    .family = Family::sm90,
    .kernel = &kKernel,
    .enough_blocks = enough_blocks,
    .rows_together = 128,  // of the greatest tile
    .orders_dq = true,
    .misfit = sm90_backward_misfit,
    .obstacle = sm90_backward_obstacle,
    .follows = follows,
    .may_spill = may_spill,
    .shares = sm90_backward_shares,
    .takes_turns = sm90_backward_takes_turns,
    .specs = sm90_backward_specs,
    .candidates = sm90_backward_candidates,
};

const Kernel& Sm90Backward::kernel() noexcept {
  return kKernel;
}

const Kernel& Sm90BackwardPair::kernel() noexcept {
  return kPairKernel;
}

}  // namespace fa::plan
