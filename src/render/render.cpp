#include <fmt/format.h>

#include <cstddef>
#include <functional>
#include <iterator>
#include <set>
#include <string_view>

#include <common/backward_params.cuh>
#include <common/forward_params.cuh>
#include <common/padding_params.cuh>
#include <common/variant_params.cuh>
#include <fa/error.hpp>
#include <sm90/sm90_backward_params.cuh>
#include <sm90/sm90_forward_params.cuh>

#include "expression/emit.hpp"
#include "plan/early_start.hpp"
#include "plan/planner.hpp"
#include "render/source.hpp"
#include "render/templates.hpp"

namespace fa::render {
namespace {

using kernel::BackwardParams;
using kernel::BackwardVariantParams;
using kernel::CaptureParams;
using kernel::ForwardParams;
using kernel::ForwardVariantParams;
using kernel::MaskTilesParams;
using kernel::PaddingParams;
using kernel::Sm90BackwardParams;
using kernel::Sm90BackwardVariantParams;
using kernel::Sm90ForwardParams;
using kernel::Sm90ForwardVariantParams;
using kernel::VariantParams;

const char* element_name(DType dtype) {
  return dtype == DType::f16 ? "f16" : dtype == DType::bf16 ? "bf16" : "f32";
}

const char* boolean(bool value) {
  return value ? "true" : "false";
}

/// The host's layout of the launch parameters, asserted by the compiler of the kernel.
class LayoutAsserts {
 public:
  LayoutAsserts(std::string_view type, std::size_t size) : type_(type) {
    text_ = fmt::format("static_assert(sizeof(fa::kernel::{}) == {});\n", type, size);
  }
  void field(std::string_view name, std::size_t offset) {
    fmt::format_to(std::back_inserter(text_), "static_assert(FA_OFFSETOF(fa::kernel::{}, {}) == {});\n", type_, name,
                   offset);
  }
  const std::string& text() const { return text_; }

 private:
  std::string_view type_;
  std::string text_;
};

std::string forward_layout() {
  LayoutAsserts asserts("ForwardParams", sizeof(ForwardParams));
  asserts.field("q", offsetof(ForwardParams, q));
  asserts.field("lse", offsetof(ForwardParams, lse));
  asserts.field("partial_lse", offsetof(ForwardParams, partial_lse));
  asserts.field("stride_q_b", offsetof(ForwardParams, stride_q_b));
  asserts.field("stride_o_b", offsetof(ForwardParams, stride_o_b));
  asserts.field("stride_lse_s", offsetof(ForwardParams, stride_lse_s));
  asserts.field("b", offsetof(ForwardParams, b));
  asserts.field("splits", offsetof(ForwardParams, splits));
  asserts.field("scale_log2", offsetof(ForwardParams, scale_log2));
  asserts.field("sequences", offsetof(ForwardParams, sequences));
  asserts.field("dropout", offsetof(ForwardParams, dropout));
  return asserts.text();
}

std::string sm90_forward_layout() {
  LayoutAsserts asserts("Sm90ForwardParams", sizeof(Sm90ForwardParams));
  asserts.field("map_k", offsetof(Sm90ForwardParams, map_k));
  asserts.field("map_o", offsetof(Sm90ForwardParams, map_o));
  asserts.field("base", offsetof(Sm90ForwardParams, base));
  return forward_layout() + asserts.text();
}

std::string backward_layout() {
  LayoutAsserts asserts("BackwardParams", sizeof(BackwardParams));
  asserts.field("q", offsetof(BackwardParams, q));
  asserts.field("dout", offsetof(BackwardParams, dout));
  asserts.field("dv", offsetof(BackwardParams, dv));
  asserts.field("lse_log2", offsetof(BackwardParams, lse_log2));
  asserts.field("partial", offsetof(BackwardParams, partial));
  asserts.field("stride_q_b", offsetof(BackwardParams, stride_q_b));
  asserts.field("stride_lse_b", offsetof(BackwardParams, stride_lse_b));
  asserts.field("stride_dv_s", offsetof(BackwardParams, stride_dv_s));
  asserts.field("b", offsetof(BackwardParams, b));
  asserts.field("padded_rows", offsetof(BackwardParams, padded_rows));
  asserts.field("splits", offsetof(BackwardParams, splits));
  asserts.field("scale_log2", offsetof(BackwardParams, scale_log2));
  asserts.field("sequences", offsetof(BackwardParams, sequences));
  asserts.field("dropout", offsetof(BackwardParams, dropout));
  return asserts.text();
}

std::string padding_layout() {
  LayoutAsserts asserts("PaddingParams", sizeof(PaddingParams));
  asserts.field("cu", offsetof(PaddingParams, cu));
  asserts.field("stride_s", offsetof(PaddingParams, stride_s));
  asserts.field("b", offsetof(PaddingParams, b));
  asserts.field("value", offsetof(PaddingParams, value));
  return asserts.text();
}

/// Of what kernels with variants are launched with besides.
std::string variant_layout(const char* type, std::size_t size) {
  LayoutAsserts whole(type, size);
  LayoutAsserts capture("CaptureParams", sizeof(CaptureParams));
  capture.field("strides", offsetof(CaptureParams, strides));
  capture.field("bits", offsetof(CaptureParams, bits));
  LayoutAsserts asserts("VariantParams", sizeof(VariantParams));
  asserts.field("sink", offsetof(VariantParams, sink));
  asserts.field("diagonal", offsetof(VariantParams, diagonal));
  asserts.field("chunk", offsetof(VariantParams, chunk));
  asserts.field("tile_lists", offsetof(VariantParams, tile_lists));
  asserts.field("norms", offsetof(VariantParams, norms));
  asserts.field("b", offsetof(VariantParams, b));
  return whole.text() + capture.text() + asserts.text();
}

/// The Variant of a Config, as templates/common/variant.cuh describes it.
std::string variant(const plan::KernelSpec& spec) {
  const plan::Variants& variants = spec.variants;
  const auto part = spec.op == plan::Op::backward      ? expression::Part::gradients
                    : spec.op == plan::Op::backward_dq ? expression::Part::slopes
                                                       : expression::Part::values;
  return fmt::format(
      "struct KernelVariant {{\n"
      "  [[maybe_unused]] static constexpr bool kLeftWindow = {};\n"
      "  [[maybe_unused]] static constexpr bool kChunked = {};\n"
      "  [[maybe_unused]] static constexpr bool kSink = {};\n"
      "{}}};\n\n",
      boolean(variants.left_window), boolean(variants.chunked), boolean(variants.sink),
      expression::emit(expression::Program::parse(variants.score, variants.mask, variants.captures), part,
                       spec.dtype != DType::f32));
}

std::string sm90_backward_layout() {
  LayoutAsserts asserts("Sm90BackwardParams", sizeof(Sm90BackwardParams));
  asserts.field("map_k", offsetof(Sm90BackwardParams, map_k));
  asserts.field("map_dout", offsetof(Sm90BackwardParams, map_dout));
  asserts.field("base", offsetof(Sm90BackwardParams, base));
  return backward_layout() + asserts.text();
}

/// Besides, with variants.
std::string sm90_backward_variant_layout() {
  return variant_layout("BackwardVariantParams", sizeof(BackwardVariantParams)) +
         LayoutAsserts("Sm90BackwardVariantParams", sizeof(Sm90BackwardVariantParams)).text();
}

/// Whether additions to global memory come four at a time.
std::string vector_reduce(const plan::KernelSpec& spec) {
  return fmt::format("  static constexpr bool kVectorReduce = {};\n", boolean(spec.arch.major >= 9));
}

/// Switches of packed batches and dropout; other kernels have none of them.
std::string switches(const plan::KernelSpec& spec) {
  return std::string(spec.varlen ? "  static constexpr bool kVarlen = true;\n" : "") +
         (spec.dropout ? "  static constexpr bool kDropout = true;\n" : "");
}

/// Of kernels beside the main one of a backward.
std::string overlap(const plan::KernelSpec& spec) {
  return plan::overlaps(spec.arch) ? "  static constexpr bool kOverlaps = true;  // with kernels before or behind it\n"
                                   : "";
}

std::string forward_config(const plan::KernelSpec& spec) {
  return fmt::format(
      "struct Config {{\n"
      "  using Element = fa::kernel::{};\n"
      "  static constexpr int kHeadDimQk = {};\n"
      "  static constexpr int kHeadDimV = {};\n"
      "  static constexpr int kTileM = {};  // query rows of a thread block\n"
      "  static constexpr int kTileN = {};  // keys of a main-loop step\n"
      "  static constexpr int kWarps = {};\n"
      "  static constexpr int kStages = {};  // K and V tiles in flight\n"
      "  static constexpr int kLoopBodies = {};\n"
      "  static constexpr bool kCausal = {};\n"
      "  static constexpr bool kPositiveScale = {};\n"
      "  static constexpr bool kAligned = {};  // rows start at multiples of 16 bytes\n"
      "  static constexpr bool kQInRegisters = {};\n"
      "  static constexpr bool kConditionalRescale = {};\n"
      "  static constexpr bool kPackGqa = {};\n"
      "  static constexpr bool kSplit = {};\n"
      "{}{}"
      "}};\n",
      element_name(spec.dtype), spec.d_qk, spec.d_v, spec.tile_m, spec.tile_n, spec.warps, spec.stages,
      spec.loop_bodies, boolean(spec.causal), boolean(spec.positive_scale), boolean(spec.aligned),
      boolean(spec.q_in_registers), boolean(spec.conditional_rescale), boolean(spec.pack_gqa), boolean(spec.split),
      spec.warps_n > 1 ? fmt::format("  static constexpr int kWarpsN = {};  // share rows\n", spec.warps_n) : "",
      switches(spec));
}

std::string sm90_forward_config(const plan::KernelSpec& spec) {
  return fmt::format(
      "struct Config {{\n"
      "  using Element = fa::kernel::{};\n"
      "  static constexpr int kHeadDimQk = {};\n"
      "  static constexpr int kHeadDimV = {};\n"
      "  static constexpr int kTileM = {};  // query rows of a tile\n"
      "  static constexpr int kTileN = {};  // keys of a main-loop step\n"
      "  static constexpr int kStages = {};  // K and V tiles in flight\n"
      "  static constexpr int kQBuffers = {};  // query tiles in flight\n"
      "  static constexpr bool kCausal = {};\n"
      "  static constexpr bool kPositiveScale = {};\n"
      "  static constexpr int kSoftmaxChunks = {};  // of a KV tile\n"
      "  static constexpr bool kTakeTurns = {};  // at the tensor cores\n"
      "  static constexpr bool kPackGqa = {};\n"
      "  static constexpr bool kSplit = {};\n"
      "{}{}{}{}{}{}{}"
      "}};\n",
      element_name(spec.dtype), spec.d_qk, spec.d_v, spec.tile_m, spec.tile_n, spec.stages, spec.q_buffers,
      boolean(spec.causal), boolean(spec.positive_scale), spec.softmax_chunks, boolean(spec.take_turns),
      boolean(spec.pack_gqa), boolean(spec.split),
      spec.skips_hidden ? "  static constexpr bool kSkipsHidden = true;  // pieces of tiles behind the diagonal\n" : "",
      spec.own_ends ? "  static constexpr bool kOwnEnds = true;  // of each warpgroup's KV tiles\n" : "",
      spec.dynamic ? "  static constexpr bool kDynamic = true;  // query tiles come from a counter\n" : "",
      spec.affine_product ? "  static constexpr bool kAffineProduct = true;  // of an affine score function\n" : "",
      spec.affine_reach ? "  static constexpr bool kAffineReach = true;  // limits the KV tiles\n" : "",
      spec.exact_max ? "  static constexpr bool kExactMax = true;  // of a row's scores\n" : "", switches(spec));
}

std::string combine_config(const plan::KernelSpec& spec) {
  return fmt::format(
      "struct Config {{\n"
      "  using Element = fa::kernel::{};\n"
      "  static constexpr int kHeadDimV = {};\n"
      "  static constexpr int kWarps = {};\n"
      "}};\n",
      element_name(spec.dtype), spec.d_v, spec.warps);
}

std::string backward_config(const plan::KernelSpec& spec) {
  return fmt::format(
      "struct Config {{\n"
      "  using Element = fa::kernel::{};\n"
      "  static constexpr int kHeadDimQk = {};\n"
      "  static constexpr int kHeadDimV = {};\n"
      "  static constexpr int kTileM = {};  // query rows of a main-loop step\n"
      "  static constexpr int kTileN = {};  // keys of a thread block\n"
      "  static constexpr int kWarps = {};\n"
      "  static constexpr int kWarpsN = {};  // groups of keys\n"
      "  static constexpr int kDqWarpsM = {};  // groups of queries, for dQ\n"
      "  static constexpr int kSubsteps = {};  // parts of a warp's queries\n"
      "  static constexpr int kStages = {};  // Q and dO tiles in flight\n"
      "  static constexpr int kOperandsInRegisters = {};  // 1: V, 2: V and K\n"
      "  static constexpr bool kCausal = {};\n"
      "  static constexpr bool kAligned = {};  // rows start at multiples of 16 bytes\n"
      "  static constexpr bool kWriteDq = {};\n"
      "  static constexpr bool kDelayedDq = {};\n"
      "  static constexpr bool kSplit = {};\n"
      "{}{}"
      "}};\n",
      element_name(spec.dtype), spec.d_qk, spec.d_v, spec.tile_m, spec.tile_n, spec.warps, spec.warps_n,
      spec.dq_warps_m, spec.substeps, spec.stages, spec.operands_in_registers, boolean(spec.causal),
      boolean(spec.aligned), boolean(spec.write_dq), boolean(spec.delayed_dq), boolean(spec.split),
      spec.write_dq ? vector_reduce(spec) : "", switches(spec));
}

std::string sm90_backward_config(const plan::KernelSpec& spec) {
  return fmt::format(
      "struct Config {{\n"
      "  using Element = fa::kernel::{};\n"
      "  static constexpr int kHeadDimQk = {};\n"
      "  static constexpr int kHeadDimV = {};\n"
      "  static constexpr int kTileM = {};  // query rows of a main-loop step\n"
      "  static constexpr int kTileN = {};  // keys of a tile\n"
      "  static constexpr int kStages = {};  // Q and dO tiles in flight\n"
      "  static constexpr bool kCausal = {};\n"
      "  static constexpr bool kWriteDq = {};\n"
      "  static constexpr bool kSplit = {};\n"
      "{}{}"
      "}};\n",
      element_name(spec.dtype), spec.d_qk, spec.d_v, spec.tile_m, spec.tile_n, spec.stages, boolean(spec.causal),
      boolean(spec.write_dq), boolean(spec.split),
      spec.ordered_dq ? "  static constexpr bool kOrderedDq = true;  // additions to it\n" : "", switches(spec));
}

std::string backward_dq_config(const plan::KernelSpec& spec) {
  return fmt::format(
      "struct Config {{\n"
      "  using Element = fa::kernel::{};\n"
      "  static constexpr int kHeadDimQk = {};\n"
      "  static constexpr int kHeadDimV = {};\n"
      "  static constexpr int kTileM = {};  // query rows of a thread block\n"
      "  static constexpr int kTileN = {};  // keys of a main-loop step\n"
      "  static constexpr int kWarps = {};\n"
      "  static constexpr int kStages = {};  // K and V tiles in flight\n"
      "  static constexpr bool kCausal = {};\n"
      "  static constexpr bool kAligned = {};  // rows start at multiples of 16 bytes\n"
      "{}"
      "}};\n",
      element_name(spec.dtype), spec.d_qk, spec.d_v, spec.tile_m, spec.tile_n, spec.warps, spec.stages,
      boolean(spec.causal), boolean(spec.aligned), switches(spec));
}

std::string preprocess_config(const plan::KernelSpec& spec) {
  return fmt::format(
      "struct Config {{\n"
      "  using Element = fa::kernel::{};\n"
      "  static constexpr int kHeadDimQk = {};\n"
      "  static constexpr int kHeadDimV = {};\n"
      "  static constexpr int kWarps = {};\n"
      "  static constexpr bool kAligned = {};  // rows start at multiples of 16 bytes\n"
      "{}{}"
      "}};\n",
      element_name(spec.dtype), spec.d_qk, spec.d_v, spec.warps, boolean(spec.aligned), overlap(spec), switches(spec));
}

std::string convert_config(const plan::KernelSpec& spec) {
  return fmt::format(
      "struct Config {{\n"
      "  using Element = fa::kernel::{};\n"
      "  static constexpr int kHeadDimQk = {};\n"
      "  static constexpr int kWarps = {};\n"
      "  static constexpr bool kAligned = {};  // rows start at multiples of 16 bytes\n"
      "{}{}{}"
      "}};\n",
      element_name(spec.dtype), spec.d_qk, spec.warps, boolean(spec.aligned), vector_reduce(spec), overlap(spec),
      switches(spec));
}

std::string reduce_config(const plan::KernelSpec& spec) {
  return fmt::format(
      "struct Config {{\n"
      "  using Element = fa::kernel::{};\n"
      "  static constexpr int kHeadDimQk = {};\n"
      "  static constexpr int kHeadDimV = {};\n"
      "  static constexpr int kWarps = {};\n"
      "{}"
      "}};\n",
      element_name(spec.dtype), spec.d_qk, spec.d_v, spec.warps, overlap(spec));
}

std::string clear_config(const plan::KernelSpec& spec) {
  return fmt::format(
      "struct Config {{\n"
      "  using Element = fa::kernel::{};\n"
      "  static constexpr int kWarps = {};\n"
      "}};\n",
      element_name(spec.dtype), spec.warps);
}

std::string row_norms_config(const plan::KernelSpec& spec) {
  return fmt::format(
      "struct Config {{\n"
      "  using Element = fa::kernel::{};\n"
      "  static constexpr int kHeadDim = {};\n"
      "  static constexpr int kWarps = {};\n"
      "}};\n",
      element_name(spec.dtype), spec.d_qk, spec.warps);
}

std::string mask_tiles_config(const plan::KernelSpec& spec) {
  return fmt::format(
      "struct Config {{\n"
      "  static constexpr int kTileM = {};  // query rows of a tile\n"
      "  static constexpr int kTileN = {};  // keys of a tile\n"
      "  static constexpr int kWarps = {};\n"
      "  static constexpr bool kCausal = {};\n"
      "  static constexpr bool kByKey = {};\n"
      "  static constexpr bool kPackGqa = {};\n"
      "}};\n",
      spec.tile_m, spec.tile_n, spec.warps, boolean(spec.causal), boolean(spec.op == plan::Op::mask_keys),
      boolean(spec.pack_gqa));
}

/// What the unit of an operation is made of.
struct Parts {
  const char* header;
  const char* params;
  const char* function;     ///< template over Config that the kernel calls
  const char* shared_type;  ///< template over Config with kSharedBytes, if the kernel has shared memory
  std::string layout;
  std::string config;
};

Parts parts_of(const plan::KernelSpec& spec) {
  switch (spec.op) {
    case plan::Op::forward:
      break;
    case plan::Op::combine:
      return {"common/forward_combine.cuh", "ForwardParams", "kernel::forward_combine", nullptr, forward_layout(),
              combine_config(spec)};
    case plan::Op::backward:
      if (spec.cluster > 1) {
        const std::string threads =
            fmt::format("static_assert(fa::sm90::BackwardPair<Config>::kThreads == {});\n", spec.threads());
        return {"sm90/sm90_backward_pair.cuh", "Sm90BackwardParams",   "sm90::backward_pair",
                "sm90::BackwardPair",          sm90_backward_layout(), sm90_backward_config(spec) + threads};
      }
      if (spec.family == Family::sm90) {
        const std::string threads =
            fmt::format("static_assert(fa::sm90::Backward<Config>::kThreads == {});\n", spec.threads());
        return {"sm90/sm90_backward.cuh", "Sm90BackwardParams",   "sm90::backward",
                "sm90::Backward",         sm90_backward_layout(), sm90_backward_config(spec) + threads};
      }
      return {"sm80/sm80_backward.cuh", "BackwardParams",  "sm80::backward",
              "sm80::Backward",         backward_layout(), backward_config(spec)};
    case plan::Op::backward_dq:
      return {"sm80/sm80_backward_dq.cuh", "BackwardParams",  "sm80::backward_dq",
              "sm80::BackwardDq",          backward_layout(), backward_dq_config(spec)};
    case plan::Op::backward_preprocess:
      return {
          "common/backward_preprocess.cuh", "BackwardParams", "kernel::backward_preprocess", nullptr, backward_layout(),
          preprocess_config(spec)};
    case plan::Op::backward_convert:
      return {"common/backward_convert.cuh", "BackwardParams", "kernel::backward_convert", nullptr, backward_layout(),
              convert_config(spec)};
    case plan::Op::backward_reduce:
      return {"common/backward_reduce.cuh", "BackwardParams", "kernel::backward_reduce", nullptr, backward_layout(),
              reduce_config(spec)};
    case plan::Op::clear_padding:
      return {"common/clear_padding.cuh", "PaddingParams",   "kernel::clear_padding", nullptr,
              padding_layout(),           clear_config(spec)};
    case plan::Op::row_norms:
      return {"common/row_norms.cuh",
              "ForwardVariantParams",
              "kernel::row_norms",
              nullptr,
              forward_layout() + variant_layout("ForwardVariantParams", sizeof(ForwardVariantParams)),
              row_norms_config(spec)};
    case plan::Op::mask_rows:
    case plan::Op::mask_keys:
      return {"common/mask_tiles.cuh", "MaskTilesParams", "kernel::mask_tiles", nullptr, "", mask_tiles_config(spec)};
    case plan::Op::backward_sink:
      return {
          "common/backward_sink.cuh",
          "BackwardVariantParams",
          "kernel::backward_sink",
          nullptr,
          backward_layout() + variant_layout("BackwardVariantParams", sizeof(BackwardVariantParams)),
          fmt::format("struct Config {{\n  static constexpr int kWarps = {};\n{}}};\n", spec.warps, switches(spec))};
  }
  if (spec.family == Family::sm90) {
    const std::string threads =
        fmt::format("static_assert(fa::sm90::Forward<Config>::kThreads == {});\n", spec.threads());
    return {"sm90/sm90_forward.cuh", "Sm90ForwardParams",   "sm90::forward",
            "sm90::Forward",         sm90_forward_layout(), sm90_forward_config(spec) + threads};
  }
  return {"sm80/sm80_forward.cuh", "ForwardParams",  "sm80::forward",
          "sm80::Forward",         forward_layout(), forward_config(spec)};
}

/// Puts the Variant of `spec` before its Config, and into it.
Parts with_variant(Parts parts, const plan::KernelSpec& spec) {
  switch (spec.op) {
    case plan::Op::mask_rows:
    case plan::Op::mask_keys:
      parts.layout += variant_layout(parts.params, sizeof(MaskTilesParams));
      break;
    case plan::Op::forward:
    case plan::Op::combine:
      if (spec.op == plan::Op::forward && spec.family == Family::sm90) {
        parts.params = "Sm90ForwardVariantParams";
        parts.layout += variant_layout(parts.params, sizeof(Sm90ForwardVariantParams));
        break;
      }
      parts.params = "ForwardVariantParams";
      parts.layout += variant_layout(parts.params, sizeof(ForwardVariantParams));
      break;
    case plan::Op::backward:
      if (spec.family == Family::sm90) {
        parts.params = "Sm90BackwardVariantParams";
        parts.layout += sm90_backward_variant_layout();
        break;
      }
      [[fallthrough]];
    default:
      parts.params = "BackwardVariantParams";
      parts.layout += variant_layout(parts.params, sizeof(BackwardVariantParams));
  }
  constexpr std::string_view kStart = "struct Config {\n";
  parts.config.insert(kStart.size(), "  using Variant = KernelVariant;\n");
  parts.config.insert(0, variant(spec));
  return parts;
}

std::string render_unit(const plan::KernelSpec& spec) {
  const Parts parts = spec.variants.any() ? with_variant(parts_of(spec), spec) : parts_of(spec);
  const std::string shared_assert = parts.shared_type == nullptr
                                        ? ""
                                        : fmt::format("static_assert(fa::{}<Config>::kSharedBytes == {});\n",
                                                      parts.shared_type, plan::shared_bytes(spec));
  const std::string cluster = spec.cluster > 1 ? fmt::format(", {}", spec.cluster) : "";
  return fmt::format(
      "// {}\n"
      "#include <{}>\n\n"
      "{}\n{}{}\n"  // in no namespace: a cubin carries the mangled names of constants
      "{}({}, fa::kernel::{}, {}, {}{}) {{ fa::{}<Config>(params); }}\n",
      canonical(spec), parts.header, parts.layout, parts.config, shared_assert,
      spec.cluster > 1 ? "FA_CLUSTER_KERNEL" : "FA_KERNEL", kernel_name(spec), parts.params, spec.threads(),
      spec.min_blocks, cluster, parts.function);
}

/// What a reader, and nvcc with its default of C++17, has to know about a flattened source. It is no part of the unit,
/// and so of no key.
std::string head_of(const Source& source) {
  return fmt::format(
      "// {0} of fa for {1}. To compile it: nvcc -std=c++20 -arch={1} -cubin THIS_FILE\n"
      "#if __cplusplus < 201709L && !defined(_MSVC_LANG)\n"
      "#error \"the kernels of fa are C++20: compile with -std=c++20\"\n"
      "#endif\n",
      source.kernel_name, source.target);
}

/// The name between the brackets of an `#include <name>` line; empty for any other line.
std::string_view included_name(std::string_view line) {
  constexpr std::string_view kPrefix = "#include <";
  if (!line.starts_with(kPrefix) || line.back() != '>') return {};
  return line.substr(kPrefix.size(), line.size() - kPrefix.size() - 1);
}

}  // namespace

Source render(const plan::KernelSpec& spec) {
  return render(spec, templates());
}

Source render(const plan::KernelSpec& spec, const TemplateSet& from) {
  Source source;
  source.kernel_name = kernel_name(spec);
  source.target = to_string(spec.arch);
  source.unit = render_unit(spec);
  for (const Header* header : from.included_by(source.unit).headers) source.headers.push_back(*header);
  return source;
}

std::string unit_of(const plan::KernelSpec& spec) {
  return render_unit(spec);
}

std::string flatten(const Source& source) {
  std::set<std::string_view> done;
  std::string result = head_of(source);
  const std::function<void(std::string_view)> paste = [&](std::string_view text) {
    while (!text.empty()) {
      const std::size_t end = text.find('\n');
      const std::string_view line = text.substr(0, end);
      text = end == std::string_view::npos ? std::string_view{} : text.substr(end + 1);
      const std::string_view name = line.empty() ? std::string_view{} : included_name(line);
      const Header* header = nullptr;
      for (const Header& candidate : source.headers) {
        if (candidate.name == name) header = &candidate;
      }
      if (header == nullptr) {
        result.append(line).push_back('\n');
      } else if (done.insert(header->name).second) {
        paste(header->text);
      }
    }
  };
  paste(source.unit);
  return result;
}

}  // namespace fa::render
