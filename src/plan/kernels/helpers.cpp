#include "plan/kernels/helpers.hpp"

#include <common/schedule_params.cuh>

#include "plan/catalogue.hpp"
#include "plan/early_start.hpp"

namespace fa::plan {
namespace {

int overlaps_others(const KernelSpec& spec) {
  return overlaps(spec.arch) ? 1 : Field::kAbsent;
}

/// Whether additions to global memory come four at a time.
int vector_reduce(const KernelSpec& spec) {
  return spec.arch.major >= 9 ? 1 : 0;
}

bool always(const KernelSpec&) {
  return true;
}

int sink_shared_bytes(const KernelSpec& spec) {
  return spec.warps * static_cast<int>(sizeof(float));
}

constexpr Kernel mask_tiles(std::string_view name, Op op, std::span<const Field> fields) {
  return {.name = name,
          .op = op,
          .unit = {.header = "common/mask_tiles.cuh",
                   .params = "MaskTilesParams",
                   .variant_params = "MaskTilesParams",
                   .function = "kernel::mask_tiles",
                   .has_element = false},
          .fields = fields};
}

constexpr Field kForwardCombineFields[] = {
    field<&SpecHead::d_v>("d_v").as("kHeadDimV"),
    field<&SpecHead::warps>("warps").as("kWarps"),
    derived("kOverlaps", overlaps_others, "with the kernel before it"),
    field<&SpecHead::accumulate>("accumulate").when_set().as("kAccumulate", "to what o and lse hold"),
    field<&ForwardCombine::folds>("folds").when_set().as("kFoldsSplits", "as a block that has them all does"),
};
constexpr Kernel kForwardCombine{
    .name = "forward_combine",
    .op = Op::combine,
    .keyed_on = Facts::request,
    .unit = {.header = "common/forward_combine.cuh",
             .params = "ForwardParams",
             .variant_params = "ForwardVariantParams",
             .function = "kernel::forward_combine"},
    .fields = kForwardCombineFields,
    .starts_early = always,
};

constexpr Field kBackwardPreprocessFields[] = {
    field<&SpecHead::d_qk>("d_qk").as("kHeadDimQk"),
    field<&SpecHead::d_v>("d_v").as("kHeadDimV"),
    field<&SpecHead::aligned>("aligned").as("kAligned", "rows start at multiples of 16 bytes"),
    field<&SpecHead::warps>("warps").as("kWarps"),
    derived("kOverlaps", overlaps_others, "with kernels before or behind it"),
    field<&SpecHead::varlen>("varlen").when_set().as("kVarlen"),
    field<&SpecHead::entropy>("entropy").when_set().as("kEntropyGradient"),
    field<&SpecHead::column_sums>("column_sums").when_set().as("kColumnSumsGradient"),
};
constexpr Kernel kBackwardPreprocess{
    .name = "backward_preprocess",
    .op = Op::backward_preprocess,
    .unit = {.header = "common/backward_preprocess.cuh",
             .params = "BackwardParams",
             .variant_params = "BackwardVariantParams",
             .statistics_params = "BackwardStatisticsParams",
             .function = "kernel::backward_preprocess"},
    .fields = kBackwardPreprocessFields,
};

constexpr Field kBackwardConvertFields[] = {
    field<&SpecHead::d_qk>("d_qk").as("kHeadDimQk"),
    field<&SpecHead::aligned>("aligned").as("kAligned", "rows start at multiples of 16 bytes"),
    field<&SpecHead::warps>("warps").as("kWarps"),
    derived("kVectorReduce", vector_reduce),
    derived("kOverlaps", overlaps_others, "with kernels before or behind it"),
    field<&SpecHead::varlen>("varlen").when_set().as("kVarlen"),
};
constexpr Kernel kBackwardConvert{
    .name = "backward_convert",
    .op = Op::backward_convert,
    .unit = {.header = "common/backward_convert.cuh",
             .params = "BackwardParams",
             .variant_params = "BackwardVariantParams",
             .function = "kernel::backward_convert"},
    .fields = kBackwardConvertFields,
    .starts_early = always,
};

constexpr Field kBackwardReduceFields[] = {
    field<&SpecHead::d_qk>("d_qk").as("kHeadDimQk"),
    field<&SpecHead::d_v>("d_v").as("kHeadDimV"),
    field<&SpecHead::warps>("warps").as("kWarps"),
    derived("kOverlaps", overlaps_others, "with kernels before or behind it"),
    field<&SpecHead::without_dk>("without_dk").when_set().as("kWithoutDk"),
    field<&SpecHead::without_dv>("without_dv").when_set().as("kWithoutDv"),
};
constexpr Kernel kBackwardReduce{
    .name = "backward_reduce",
    .op = Op::backward_reduce,
    .keyed_on = Facts::request,
    .unit = {.header = "common/backward_reduce.cuh",
             .params = "BackwardParams",
             .variant_params = "BackwardVariantParams",
             .function = "kernel::backward_reduce"},
    .fields = kBackwardReduceFields,
    .starts_early = always,
};

constexpr Field kBackwardSinkFields[] = {
    field<&SpecHead::warps>("warps").as("kWarps"),
    field<&SpecHead::varlen>("varlen").when_set().as("kVarlen"),
};
constexpr Kernel kBackwardSink{
    .name = "backward_sink",
    .op = Op::backward_sink,
    .unit = {.header = "common/backward_sink.cuh",
             .params = "BackwardVariantParams",
             .variant_params = "BackwardVariantParams",
             .function = "kernel::backward_sink",
             .has_element = false},
    .fields = kBackwardSinkFields,
    .shared_bytes = sink_shared_bytes,
};

constexpr Field kClearPaddingFields[] = {
    field<&SpecHead::warps>("warps").as("kWarps"),
};
constexpr Kernel kClearPadding{
    .name = "clear_padding",
    .op = Op::clear_padding,
    .keyed_on = Facts::request,
    .unit = {.header = "common/clear_padding.cuh",
             .params = "PaddingParams",
             .variant_params = "PaddingParams",
             .function = "kernel::clear_padding"},
    .fields = kClearPaddingFields,
};

constexpr Field kRowNormsFields[] = {
    field<&SpecHead::d_qk>("d_qk").as("kHeadDim"),
    field<&SpecHead::warps>("warps").as("kWarps"),
};
constexpr Kernel kRowNorms{
    .name = "row_norms",
    .op = Op::row_norms,
    .keyed_on = Facts::request,
    .unit = {.header = "common/row_norms.cuh",
             .params = "ForwardVariantParams",
             .variant_params = "ForwardVariantParams",
             .function = "kernel::row_norms"},
    .fields = kRowNormsFields,
};

constexpr int kScheduleSharedBytes = 8 * 1024 + 2 * 8 * 32 + 2 * 8 * kernel::kMostSegments + 16;

constexpr Field kScheduleFields[] = {
    field<&SpecHead::causal>("causal").as("kCausal"),
    field<&SpecHead::tile_m>("tile_m").as("kTileM", "query rows of a tile"),
    field<&SpecHead::tile_n>("tile_n").as("kTileN", "keys of a tile"),
    field<&SpecHead::pack_gqa>("pack_gqa").as("kPackGqa"),
    field<&SpecHead::warps>("warps").as("kWarps"),
    derived("kOverlaps", overlaps_others, "with kernels before or behind it"),
    field<&SpecHead::varlen>("varlen").when_set().as("kVarlen"),
    field<&Schedule::whole_items>("whole_items")
        .when_set()
        .as("kWholeItems", "KV tiles that an item costs; equal ones stay whole"),
};
constexpr Kernel kSchedule{
    .name = "schedule",
    .op = Op::schedule,
    .unit = {.header = "common/schedule.cuh",
             .params = "ForwardParams",
             .variant_params = "ForwardVariantParams",
             .function = "kernel::schedule",
             .room = "kernel::Schedule",
             .asserts_threads = true,
             .has_element = false},
    .fields = kScheduleFields,
    .shared_bytes = [](const KernelSpec&) { return kScheduleSharedBytes; },
    .starts_early = always,
};

constexpr Field kMaskRowsFields[] = {
    field<&SpecHead::causal>("causal").as("kCausal"),
    field<&SpecHead::tile_m>("tile_m").as("kTileM", "query rows of a tile"),
    field<&SpecHead::tile_n>("tile_n").as("kTileN", "keys of a tile"),
    derived("kByKey", [](const KernelSpec&) { return 0; }).at(Field::Place::flags),
    field<&SpecHead::pack_gqa>("pack_gqa").as("kPackGqa"),
    field<&SpecHead::warps>("warps").as("kWarps"),
    field<&MaskRows::in_order>("in_order").when_set().as("kInOrder", "of keys, for a fixed order of sums"),
    field<&SpecHead::place_in_memory>("place_in_memory").when_set().as("kPlaceInMemory"),
};
constexpr Kernel kMaskRows = mask_tiles("mask_rows", Op::mask_rows, kMaskRowsFields);

constexpr Field kMaskKeysFields[] = {
    field<&SpecHead::causal>("causal").as("kCausal"),
    field<&SpecHead::tile_m>("tile_m").as("kTileM", "query rows of a tile"),
    field<&SpecHead::tile_n>("tile_n").as("kTileN", "keys of a tile"),
    derived("kByKey", [](const KernelSpec&) { return 1; }).at(Field::Place::flags),
    field<&SpecHead::pack_gqa>("pack_gqa").as("kPackGqa"),
    field<&SpecHead::warps>("warps").as("kWarps"),
    field<&SpecHead::place_in_memory>("place_in_memory").when_set().as("kPlaceInMemory"),
};
constexpr Kernel kMaskKeys = mask_tiles("mask_keys", Op::mask_keys, kMaskKeysFields);

}  // namespace

const Kernel& ForwardCombine::kernel() noexcept {
  return kForwardCombine;
}

const Kernel& BackwardPreprocess::kernel() noexcept {
  return kBackwardPreprocess;
}

const Kernel& BackwardConvert::kernel() noexcept {
  return kBackwardConvert;
}

const Kernel& BackwardReduce::kernel() noexcept {
  return kBackwardReduce;
}

const Kernel& BackwardSink::kernel() noexcept {
  return kBackwardSink;
}

const Kernel& ClearPadding::kernel() noexcept {
  return kClearPadding;
}

const Kernel& RowNorms::kernel() noexcept {
  return kRowNorms;
}

const Kernel& Schedule::kernel() noexcept {
  return kSchedule;
}

const Kernel& MaskRows::kernel() noexcept {
  return kMaskRows;
}

const Kernel& MaskKeys::kernel() noexcept {
  return kMaskKeys;
}

}  // namespace fa::plan
