#include "plan/sm80_backward.hpp"

#include <common/backward_params.cuh>

#include "plan/catalogue.hpp"

namespace fa::plan {
namespace {

/// Whether additions to global memory come four at a time.
int vector_reduce(const KernelSpec& spec) {
  return spec.write_dq ? (spec.arch.major >= 9 ? 1 : 0) : Field::kAbsent;
}

constexpr Field kFields[] = {
    field<&SpecHead::d_qk>("d_qk").as("kHeadDimQk"),
    field<&SpecHead::d_v>("d_v").as("kHeadDimV"),
    field<&SpecHead::causal>("causal").as("kCausal"),
    field<&SpecHead::aligned>("aligned").as("kAligned", "rows start at multiples of 16 bytes"),
    field<&SpecHead::tile_m>("tile_m")
        .as("kTileM", "query rows of a main-loop step")
        .open("Query rows of one step of the main loop"),
    field<&SpecHead::tile_n>("tile_n").as("kTileN", "keys of a thread block").open("Keys of a thread block"),
    field<&SpecHead::warps>("warps").as("kWarps").open("Warps of a thread block"),
    field<&SpecHead::warps_n>("warps_n").as("kWarpsN", "groups of keys"),
    field<&Sm80Backward::dq_warps_m>("dq_warps_m").as("kDqWarpsM", "groups of queries, for dQ"),
    field<&Sm80Backward::substeps>("substeps").as("kSubsteps", "parts of a warp's queries"),
    field<&SpecHead::stages>("stages").as("kStages", "Q and dO tiles in flight").open("Q and dO tiles in flight"),
    field<&Sm80Backward::operands_in_registers>("operands_in_registers").as("kOperandsInRegisters", "1: V, 2: V and K"),
    field<&SpecHead::write_dq>("write_dq").as("kWriteDq"),
    field<&Sm80Backward::delayed_dq>("delayed_dq").as("kDelayedDq"),
    field<&SpecHead::split>("split").as("kSplit"),
    launched("splits", "Thread blocks that share the query rows of a key tile"),
    field<&SpecHead::min_blocks>("min_blocks"),
    derived("kVectorReduce", vector_reduce),
    field<&SpecHead::without_dk>("without_dk").when_set().as("kWithoutDk"),
    field<&SpecHead::without_dv>("without_dv").when_set().as("kWithoutDv"),
    field<&SpecHead::varlen>("varlen").when_set().as("kVarlen"),
    field<&SpecHead::dropout>("dropout").when_set().as("kDropout"),
    field<&SpecHead::bounded>("bounded").when_set().as("kBounded", "blocks go on from tile to tile"),
    field<&SpecHead::place_in_memory>("place_in_memory").when_set().as("kPlaceInMemory"),
    field<&SpecHead::entropy>("entropy").when_set().as("kEntropyGradient"),
    field<&SpecHead::max_logit>("max_logit").when_above_0().as("kMaxLogitGradient", "2: of the scaled scores"),
    field<&SpecHead::max_logit_by_head>("max_logit_by_head").when_set().as("kMaxLogitByHead"),
    field<&SpecHead::column_sums>("column_sums").when_set().as("kColumnSumsGradient"),
};
static_assert(is_complete<Sm80Backward>(kFields));

constexpr Field kDqFields[] = {
    field<&SpecHead::d_qk>("d_qk").as("kHeadDimQk"),
    field<&SpecHead::d_v>("d_v").as("kHeadDimV"),
    field<&SpecHead::causal>("causal").as("kCausal"),
    field<&SpecHead::aligned>("aligned").as("kAligned", "rows start at multiples of 16 bytes"),
    field<&SpecHead::tile_m>("tile_m").as("kTileM", "query rows of a thread block"),
    field<&SpecHead::tile_n>("tile_n").as("kTileN", "keys of a main-loop step"),
    field<&SpecHead::warps>("warps").as("kWarps"),
    field<&SpecHead::stages>("stages").as("kStages", "K and V tiles in flight"),
    field<&SpecHead::min_blocks>("min_blocks"),
    field<&SpecHead::varlen>("varlen").when_set().as("kVarlen"),
    field<&SpecHead::dropout>("dropout").when_set().as("kDropout"),
    field<&SpecHead::bounded>("bounded").when_set().as("kBounded", "blocks go on from tile to tile"),
    field<&SpecHead::place_in_memory>("place_in_memory").when_set().as("kPlaceInMemory"),
    field<&SpecHead::entropy>("entropy").when_set().as("kEntropyGradient"),
    field<&SpecHead::max_logit>("max_logit").when_above_0().as("kMaxLogitGradient", "2: of the scaled scores"),
    field<&SpecHead::max_logit_by_head>("max_logit_by_head").when_set().as("kMaxLogitByHead"),
    field<&SpecHead::column_sums>("column_sums").when_set().as("kColumnSumsGradient"),
};
static_assert(is_complete<Sm80BackwardDq>(kDqFields));

constexpr Kernel kKernel{
    .name = "sm80_backward",
    .op = Op::backward,
    .family = Family::sm80,
    .unit = {.header = "sm80/sm80_backward.cuh",
             .params = "BackwardParams",
             .variant_params = "BackwardVariantParams",
             .statistics_params = "BackwardStatisticsParams",
             .function = "sm80::backward",
             .room = "sm80::Backward",
             .part = expression::Part::gradients},
    .fields = kFields,
    .shared_bytes = sm80_backward_shared_bytes,
    .refusal = sm80_backward_refusal,
    .resident_blocks = sm80_backward_resident_blocks,
};

constexpr Kernel kDqKernel{
    .name = "sm80_backward_dq",
    .op = Op::backward_dq,
    .family = Family::sm80,
    .unit = {.header = "sm80/sm80_backward_dq.cuh",
             .params = "BackwardParams",
             .variant_params = "BackwardVariantParams",
             .statistics_params = "BackwardStatisticsParams",
             .function = "sm80::backward_dq",
             .room = "sm80::BackwardDq",
             .part = expression::Part::slopes},
    .fields = kDqFields,
    .shared_bytes = sm80_backward_dq_shared_bytes,
    .refusal = sm80_backward_dq_refusal,
    .resident_blocks = sm80_backward_resident_blocks,
};

}  // namespace

constinit const BackwardFamily kSm80BackwardFamily{
    .family = Family::sm80,
    .kernel = &kKernel,
    // More than the multiprocessors of any GPU so far, so that the choice need not know the GPU.
    .enough_blocks = [](const Problem&) noexcept -> std::int64_t { return 192; },
    .rows_together = kernel::kRowGroup,
    .specs = sm80_backward_specs,
    .fits = sm80_backward_fits,
    .candidates = sm80_backward_candidates,
};

const Kernel& Sm80Backward::kernel() noexcept {
  return kKernel;
}

const Kernel& Sm80BackwardDq::kernel() noexcept {
  return kDqKernel;
}

}  // namespace fa::plan
