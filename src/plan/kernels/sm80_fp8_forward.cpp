#include "plan/sm80_fp8_forward.hpp"

#include "plan/catalogue.hpp"

namespace fa::plan {
namespace {

constexpr Field kFields[] = {
    field<&SpecHead::d_qk>("d_qk").as("kHeadDimQk"),
    field<&SpecHead::d_v>("d_v").as("kHeadDimV"),
    field<&SpecHead::causal>("causal").as("kCausal"),
    field<&SpecHead::tile_m>("tile_m")
        .as("kTileM", "query rows of a thread block")
        .open("Query rows of a thread block"),
    field<&SpecHead::tile_n>("tile_n")
        .as("kTileN", "keys of a main-loop step")
        .open("Keys of one step of the main loop"),
    field<&SpecHead::warps>("warps").as("kWarps").open("Warps of a thread block"),
    field<&SpecHead::stages>("stages").as("kStages", "K and V tiles in flight").open("K and V tiles in flight"),
    field<&Sm80Fp8Forward::q_in_registers>("q_in_registers")
        .as("kQInRegisters")
        .open("Keep the query tile in registers"),
    field<&Sm80Fp8Forward::half_output>("half_output").as("kHalfOutput", "O is f16, else bf16"),
    field<&SpecHead::pack_gqa>("pack_gqa").as("kPackGqa").open("Query heads of a KV head share a tile").by_call(),
    field<&SpecHead::split>("split").as("kSplit"),
    launched("splits", "Thread blocks that share the keys of a query tile"),
    field<&SpecHead::min_blocks>("min_blocks"),
    field<&Sm80Fp8Forward::single_level>("single_level")
        .when_set()
        .as("kSingleLevel", "the tensor cores add to O itself")
        .open("The tensor cores add to O itself, with fewer bits"),
    field<&SpecHead::varlen>("varlen").when_set().as("kVarlen"),
    field<&SpecHead::page_size>("page_size")
        .when_not_0()
        .as("kPageSize", "keys of a page; below 0: a contiguous cache"),
    field<&Sm80Fp8Forward::byte_output>("byte_output").when_set().as("kByteOutput", "O is e4m3"),
    field<&Sm80Fp8Forward::key_scales>("key_scales").when_set().as("kKeyScales", "k_scale is of keys"),
    field<&Sm80Fp8Forward::value_scales>("value_scales").when_set().as("kValueScales", "v_scale is of keys"),
    field<&SpecHead::bounded>("bounded").when_set().as("kBounded", "blocks go on from tile to tile"),
    field<&SpecHead::place_in_memory>("place_in_memory").when_set().as("kPlaceInMemory"),
};
static_assert(is_complete<Sm80Fp8Forward>(kFields));

constexpr Kernel kKernel{
    .name = "sm80_fp8_forward",
    .op = Op::forward,
    .family = Family::sm80_fp8,
    .unit = {.header = "sm80/sm80_fp8_forward.cuh",
             .params = "ForwardFp8Params",
             .variant_params = "ForwardFp8Params",
             .function = "sm80::fp8_forward",
             .room = "sm80::Fp8Forward"},
    .fields = kFields,
    .first_nvrtc = 1204,  // PTX 8.4 has mma of 8-bit floats
    .shared_bytes = sm80_fp8_forward_shared_bytes,
    .refusal = sm80_fp8_forward_refusal,
    .resident_blocks = sm80_fp8_forward_resident_blocks,
    .harmless_spill = sm80_fp8_forward_harmless_spill,
};

}  // namespace

constinit const ForwardFamily kSm80Fp8ForwardFamily{
    .family = Family::sm80_fp8,
    .kernel = &kKernel,
    .enough_blocks = 192,  // as of sm80
    .of_bytes = true,
    .misfit = sm80_fp8_forward_misfit,
    .obstacle = sm80_fp8_forward_obstacle,
    .decide = sm80_fp8_forward_decide,
    .specs = sm80_fp8_forward_specs,
    .candidates =
        [](const Problem& problem, const Choice& choice) {
          return Candidates{{sm80_fp8_forward_specs(problem, {}, choice).front(), 0}};
        },
};

const Kernel& Sm80Fp8Forward::kernel() noexcept {
  return kKernel;
}

}  // namespace fa::plan
