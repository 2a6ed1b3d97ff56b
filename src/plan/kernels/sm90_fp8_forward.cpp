#include "plan/sm90_fp8_forward.hpp"

#include "plan/catalogue.hpp"

namespace fa::plan {
namespace {

constexpr Field kFields[] = {
    field<&SpecHead::d_qk>("d_qk").as("kHeadDimQk"),
    field<&SpecHead::d_v>("d_v").as("kHeadDimV"),
    field<&SpecHead::causal>("causal").as("kCausal"),
    field<&SpecHead::positive_scale>("positive_scale").as("kPositiveScale"),
    field<&SpecHead::tile_m>("tile_m").as("kTileM", "query rows of a thread block").open("Query rows of a tile"),
    field<&SpecHead::tile_n>("tile_n")
        .as("kTileN", "keys of a main-loop step")
        .open("Keys of one step of the main loop"),
    field<&SpecHead::stages>("stages").as("kStages", "K and V tiles in flight").open("K and V tiles in flight"),
    field<&Sm90Fp8Forward::q_buffers>("q_buffers")
        .as("kQBuffers", "query tiles in flight")
        .open("Query tiles in flight"),
    field<&Sm90Fp8Forward::value_columns>("value_columns")
        .as("kValueColumns", "of O, summed up at a time")
        .open("Columns of O that are summed up at a time"),
    field<&Sm90Fp8Forward::take_turns>("take_turns")
        .as("kTakeTurns", "at the tensor cores")
        .open("Warpgroups feed the tensor cores in turn"),
    field<&Sm90Fp8Forward::ahead>("ahead")
        .as("kAhead", "the next scores are made while O takes what is added")
        .open("The next scores are made while O takes what is added"),
    field<&Sm90Fp8Forward::single_level>("single_level")
        .as("kSingleLevel", "the tensor cores add to O itself")
        .open("The tensor cores add to O itself, with fewer bits"),
    field<&Sm90Fp8Forward::half_output>("half_output").as("kHalfOutput", "O is f16, else bf16"),
    field<&SpecHead::pack_gqa>("pack_gqa").as("kPackGqa").open("Query heads of a KV head share a tile").by_call(),
    field<&SpecHead::split>("split").as("kSplit"),
    launched("splits", "Thread blocks that share the keys of a query tile"),
    field<&SpecHead::varlen>("varlen").when_set().as("kVarlen"),
    field<&SpecHead::page_size>("page_size")
        .when_not_0()
        .as("kPageSize", "keys of a page; below 0: a contiguous cache"),
    field<&Sm90Fp8Forward::byte_output>("byte_output").when_set().as("kByteOutput", "O is e4m3"),
    field<&Sm90Fp8Forward::key_scales>("key_scales").when_set().as("kKeyScales", "k_scale is of keys"),
    field<&Sm90Fp8Forward::value_scales>("value_scales").when_set().as("kValueScales", "v_scale is of keys"),
    field<&Sm90Fp8Forward::precise>("precise").when_set().as("kPrecise", "P and V are f16 in their product"),
    field<&Sm90Fp8Forward::half_bytes>("half_bytes")
        .when_set()
        .as("kHalfBytes", "P becomes f16 on its way to e4m3")
        .open("P becomes f16 on its way to e4m3")
        .by_override(),
    field<&Sm90Fp8Forward::polynomials>("polynomials")
        .when_not_0()
        .as("kPolynomials", "of 8 exponentials, by the units of products")
        .open("Of 8 exponentials, so many are polynomials")
        .by_override(),
    field<&Sm90Fp8Forward::shared_scales>("shared_scales")
        .when_set()
        .as("kSharedScales", "of keys reach the threads by shared memory")
        .open("Scales of keys reach the threads by shared memory")
        .by_override(),
    field<&Sm90Fp8Forward::scales_of_all>("scales_of_all")
        .when_set()
        .as("kScalesOfAll", "P is relative to the greatest scale of V so far")
        .open("P is relative to the greatest scale of V so far")
        .by_override(),
    field<&SpecHead::bounded>("bounded").when_set().as("kBounded", "all blocks run at once"),
    field<&SpecHead::place_in_memory>("place_in_memory").when_set().as("kPlaceInMemory"),
};
static_assert(is_complete<Sm90Fp8Forward>(kFields));

/// The copy engine brings whole groups.
bool packs(const Problem& problem, const Fixed& fixed, const Choice&) noexcept {
  return sm90_fp8_forward_tile_m(problem, fixed) % (problem.h_q / problem.h_kv) == 0;
}

constexpr Kernel kKernel{
    .name = "sm90_fp8_forward",
    .op = Op::forward,
    .family = Family::sm90_fp8,
    .unit = {.header = "sm90/sm90_fp8_forward.cuh",
             .params = "Sm90Fp8Params",
             .variant_params = "Sm90Fp8Params",
             .stored_params = "Sm90Int8Params",
             .function = "sm90::fp8_forward",
             .room = "sm90::Fp8Forward",
             .asserts_threads = true},
    .fields = kFields,
    .persistent = true,
    .tensor_maps = true,
    .shared_bytes = sm90_fp8_forward_shared_bytes,
    .refusal = sm90_fp8_forward_refusal,
    .starts_early = [](const KernelSpec&) { return true; },
    .warps = sm90_fp8_forward_warps,
};

}  // namespace

constinit const ForwardFamily kSm90Fp8ForwardFamily{
    .family = Family::sm90_fp8,
    .kernel = &kKernel,
    .enough_blocks = kHopperMultiprocessors,  // as of sm90
    .of_bytes = true,
    .misfit = sm90_fp8_forward_misfit,
    .obstacle = sm90_fp8_forward_obstacle,
    .packs = packs,
    .decide = sm90_fp8_forward_decide,
    .specs = sm90_fp8_forward_specs,
    .candidates =
        [](const Problem& problem, const Choice& choice) {
          return Candidates{{sm90_fp8_forward_specs(problem, {}, choice).front(), 0}};
        },
};

const Kernel& Sm90Fp8Forward::kernel() noexcept {
  return kKernel;
}

}  // namespace fa::plan
