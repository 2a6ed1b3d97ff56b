#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <set>
#include <span>
#include <string>
#include <string_view>

#include <common/append_params.cuh>
#include <common/backward_params.cuh>
#include <common/forward_params.cuh>
#include <common/fp8_params.cuh>
#include <common/merge_states_params.cuh>
#include <common/padding_params.cuh>
#include <common/place_params.cuh>
#include <common/probabilities_params.cuh>
#include <common/quantize_params.cuh>
#include <common/scan_results_params.cuh>
#include <common/stored_params.cuh>
#include <common/top_keys_params.cuh>
#include <common/variant_params.cuh>
#include <fa/error.hpp>
#include <sm90/sm90_backward_params.cuh>
#include <sm90/sm90_forward_params.cuh>
#include <sm90/sm90_fp8_params.cuh>

#include "expression/emit.hpp"
#include "plan/catalogue.hpp"
#include "plan/planner.hpp"
#include "render/source.hpp"
#include "render/templates.hpp"
#include "support/text.hpp"

namespace fa::render {
namespace {

using kernel::AppendParams;
using kernel::AppendStoredParams;
using kernel::BackwardParams;
using kernel::BackwardStatisticsParams;
using kernel::BackwardVariantParams;
using kernel::CaptureParams;
using kernel::ForwardFp8Params;
using kernel::ForwardParams;
using kernel::ForwardStoredParams;
using kernel::ForwardVariantParams;
using kernel::Fp8ScaleParams;
using kernel::MaskTilesParams;
using kernel::MergeStatesParams;
using kernel::PaddingParams;
using kernel::PlaceParams;
using kernel::ProbabilitiesParams;
using kernel::QuantizeParams;
using kernel::RowBiasParams;
using kernel::ScaleParams;
using kernel::ScannedResult;
using kernel::ScanResultsParams;
using kernel::Sm90BackwardParams;
using kernel::Sm90BackwardVariantParams;
using kernel::Sm90ForwardParams;
using kernel::Sm90ForwardVariantParams;
using kernel::Sm90Fp8Params;
using kernel::Sm90Int8Params;
using kernel::StatisticRowsParams;
using kernel::TopKeysParams;
using kernel::VariantParams;

const char* element_name(DType dtype) {
  return size_of(dtype) == 1 ? to_string(dtype) : dtype == DType::f16 ? "f16" : dtype == DType::bf16 ? "bf16" : "f32";
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
    support::append_format(text_, "static_assert(FA_OFFSETOF(fa::kernel::{}, {}) == {});\n", type_, name, offset);
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

std::string append_layout() {
  LayoutAsserts asserts("AppendParams", sizeof(AppendParams));
  asserts.field("sin", offsetof(AppendParams, sin));
  asserts.field("slots_64", offsetof(AppendParams, slots_64));
  asserts.field("stride_k_b", offsetof(AppendParams, stride_k_b));
  asserts.field("stride_table_page", offsetof(AppendParams, stride_table_page));
  asserts.field("b", offsetof(AppendParams, b));
  asserts.field("token_blocks", offsetof(AppendParams, token_blocks));
  asserts.field("turns", offsetof(AppendParams, turns));
  return asserts.text();
}

std::string append_stored_layout() {
  return append_layout() + LayoutAsserts("AppendStoredParams", sizeof(AppendStoredParams)).text();
}

std::string merge_states_layout() {
  LayoutAsserts asserts("MergeStatesParams", sizeof(MergeStatesParams));
  asserts.field("lse", offsetof(MergeStatesParams, lse));
  asserts.field("sink", offsetof(MergeStatesParams, sink));
  asserts.field("stride_o", offsetof(MergeStatesParams, stride_o));
  asserts.field("stride_merged_lse", offsetof(MergeStatesParams, stride_merged_lse));
  asserts.field("states", offsetof(MergeStatesParams, states));
  asserts.field("head_axis", offsetof(MergeStatesParams, head_axis));
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

std::string stored_layout() {
  LayoutAsserts scales("ScaleParams", sizeof(ScaleParams));
  scales.field("stride_k_b", offsetof(ScaleParams, stride_k_b));
  scales.field("stride_v_s", offsetof(ScaleParams, stride_v_s));
  return variant_layout("ForwardVariantParams", sizeof(ForwardVariantParams)) + scales.text() +
         LayoutAsserts("ForwardStoredParams", sizeof(ForwardStoredParams)).text();
}

/// The Variant of a Config, as templates/common/variant.cuh describes it.
std::string variant(const plan::KernelSpec& spec) {
  const plan::Variants& variants = spec.variants;
  const expression::Part part = spec.kernel().unit.part;
  const auto positions = variants.strided  ? expression::Positions::of_whole_in_steps
                         : variants.placed ? expression::Positions::of_whole
                                           : expression::Positions::of_call;
  return fmt::format(
      "struct KernelVariant {{\n"
      "  [[maybe_unused]] static constexpr bool kLeftWindow = {};\n"
      "  [[maybe_unused]] static constexpr bool kChunked = {};\n"
      "  [[maybe_unused]] static constexpr bool kSink = {};\n"
      "{}{}}};\n\n",
      boolean(variants.left_window), boolean(variants.chunked), boolean(variants.sink),
      variants.placed ? "  [[maybe_unused]] static constexpr bool kPlaced = true;\n" : "",
      expression::emit(expression::Program::parse(variants.score, variants.mask, variants.captures), part,
                       spec.dtype != DType::f32, positions));
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

/// What every kernel with a params type asserts of it, by its name.
struct Layout {
  std::string_view params;
  std::string (*text)();
};

std::string row_norms_layout() {
  return forward_layout() + variant_layout("ForwardVariantParams", sizeof(ForwardVariantParams));
}

std::string sink_layout() {
  return backward_layout() + variant_layout("BackwardVariantParams", sizeof(BackwardVariantParams));
}

std::string fp8_scales() {
  LayoutAsserts scales("Fp8ScaleParams", sizeof(Fp8ScaleParams));
  scales.field("stride_q_b", offsetof(Fp8ScaleParams, stride_q_b));
  scales.field("stride_v_h", offsetof(Fp8ScaleParams, stride_v_h));
  scales.field("stride_v_s", offsetof(Fp8ScaleParams, stride_v_s));
  return scales.text();
}

std::string fp8_layout() {
  return sm90_forward_layout() + variant_layout("Sm90ForwardVariantParams", sizeof(Sm90ForwardVariantParams)) +
         fp8_scales() + LayoutAsserts("Sm90Fp8Params", sizeof(Sm90Fp8Params)).text();
}

std::string forward_fp8_layout() {
  return row_norms_layout() + fp8_scales() + LayoutAsserts("ForwardFp8Params", sizeof(ForwardFp8Params)).text();
}

/// Besides, of q and k in i8.
std::string int8_layout() {
  LayoutAsserts bias("RowBiasParams", sizeof(RowBiasParams));
  bias.field("stride_s", offsetof(RowBiasParams, stride_s));
  return bias.text() + LayoutAsserts("Sm90Int8Params", sizeof(Sm90Int8Params)).text();
}

std::string scan_results_layout() {
  LayoutAsserts result("ScannedResult", sizeof(ScannedResult));
  result.field("stride_b", offsetof(ScannedResult, stride_b));
  result.field("bytes", offsetof(ScannedResult, bytes));
  LayoutAsserts asserts("ScanResultsParams", sizeof(ScanResultsParams));
  asserts.field("found", offsetof(ScanResultsParams, found));
  return result.text() + asserts.text();
}

std::string quantize_layout() {
  LayoutAsserts asserts("QuantizeParams", sizeof(QuantizeParams));
  asserts.field("stride_mean_b", offsetof(QuantizeParams, stride_mean_b));
  asserts.field("scale_given", offsetof(QuantizeParams, scale_given));
  return asserts.text();
}

std::string top_keys_layout() {
  LayoutAsserts asserts("TopKeysParams", sizeof(TopKeysParams));
  asserts.field("sequences", offsetof(TopKeysParams, sequences));
  asserts.field("count", offsetof(TopKeysParams, count));
  asserts.field("begin", offsetof(TopKeysParams, begin));
  return asserts.text();
}

std::string probabilities_layout() {
  return row_norms_layout() + LayoutAsserts("ProbabilitiesParams", sizeof(ProbabilitiesParams)).text();
}

constexpr Layout kLayouts[] = {
    {"ForwardParams", forward_layout},
    {"Sm90ForwardParams", sm90_forward_layout},
    {"Sm90Fp8Params", fp8_layout},
    {"ForwardFp8Params", forward_fp8_layout},
    {"BackwardParams", backward_layout},
    {"Sm90BackwardParams", sm90_backward_layout},
    {"PaddingParams", padding_layout},
    {"ForwardVariantParams", row_norms_layout},
    {"BackwardVariantParams", sink_layout},
    {"MaskTilesParams", [] { return std::string(); }},
    {"AppendParams", append_layout},
    {"MergeStatesParams", merge_states_layout},
    {"AppendStoredParams", append_stored_layout},
    {"ScanResultsParams", scan_results_layout},
    {"ProbabilitiesParams", probabilities_layout},
    {"QuantizeParams", quantize_layout},
    {"TopKeysParams", top_keys_layout},
    {"StatisticRowsParams", [] { return LayoutAsserts("StatisticRowsParams", sizeof(StatisticRowsParams)).text(); }},
};

/// Besides, of what they are launched with where a spec has variants.
constexpr Layout kVariantLayouts[] = {
    {"Sm90Fp8Params", [] { return std::string(); }},
    {"ForwardFp8Params", [] { return std::string(); }},
    {"Sm90Int8Params", int8_layout},
    {"ProbabilitiesParams", [] { return std::string(); }},
    {"ForwardStoredParams", stored_layout},
    {"ForwardVariantParams", [] { return variant_layout("ForwardVariantParams", sizeof(ForwardVariantParams)); }},
    {"Sm90ForwardVariantParams",
     [] { return variant_layout("Sm90ForwardVariantParams", sizeof(Sm90ForwardVariantParams)); }},
    {"BackwardVariantParams", [] { return variant_layout("BackwardVariantParams", sizeof(BackwardVariantParams)); }},
    {"BackwardStatisticsParams",
     [] { return variant_layout("BackwardStatisticsParams", sizeof(BackwardStatisticsParams)); }},
    {"StatisticRowsParams", [] { return std::string(); }},
    {"Sm90BackwardVariantParams", sm90_backward_variant_layout},
    {"MaskTilesParams", [] { return variant_layout("MaskTilesParams", sizeof(MaskTilesParams)); }},
};

std::string layout_of(std::span<const Layout> layouts, std::string_view params) {
  const auto found = std::ranges::find(layouts, params, &Layout::params);
  if (found == layouts.end()) {
    throw Error(ErrorCode::internal, fmt::format("the layout of {} is asserted nowhere", params));
  }
  return found->text();
}

/// A constant of Config; empty where the spec has none.
std::string config_line(const plan::Field& field, const plan::KernelSpec& spec) {
  if (field.constant.empty()) return {};
  const int value = field.get(spec);
  if (field.shown == plan::Field::Shown::when_set && !field.is_set(spec)) return {};
  if (field.shown == plan::Field::Shown::derived && value == plan::Field::kAbsent) return {};
  const bool flag = field.kind == plan::Field::Kind::flag;
  return fmt::format("  static constexpr {} {} = {};{}{}\n", flag ? "bool" : "int", field.constant,
                     flag ? boolean(value != 0) : fmt::format("{}", value), field.comment.empty() ? "" : "  // ",
                     field.comment);
}

std::string config(const plan::KernelSpec& spec) {
  const plan::Kernel& kernel = spec.kernel();
  std::string text = "struct Config {\n";
  if (spec.variants.any()) text += "  using Variant = KernelVariant;\n";
  if (kernel.unit.has_element) text += fmt::format("  using Element = fa::kernel::{};\n", element_name(spec.dtype));
  for (const auto place : {plan::Field::Place::numbers, plan::Field::Place::flags, plan::Field::Place::last}) {
    for (const plan::Field& field : kernel.fields) {
      if (field.place == place) text += config_line(field, spec);
    }
  }
  return text + "};\n";
}

/// What the host knows of the kernel's room, asserted by its compiler.
std::string room_asserts(const plan::KernelSpec& spec) {
  const plan::Kernel::Unit& unit = spec.kernel().unit;
  std::string text;
  if (unit.asserts_threads) {
    text += fmt::format("static_assert(fa::{}<Config>::kThreads == {});\n", unit.room, spec.threads());
  }
  if (unit.room != nullptr) {
    text += fmt::format("static_assert(fa::{}<Config>::kSharedBytes == {});\n", unit.room, plan::shared_bytes(spec));
  }
  return text;
}

std::string place_layout() {
  LayoutAsserts asserts("PlaceParams", sizeof(PlaceParams));
  asserts.field("b", offsetof(PlaceParams, b));
  asserts.field("whole_b", offsetof(PlaceParams, whole_b));
  asserts.field("rows_and_keys_are", offsetof(PlaceParams, rows_and_keys_are));
  return asserts.text();
}

/// Headers besides the kernel's own.
std::string more_headers(const plan::KernelSpec& spec) {
  std::string text = spec.variants.placed ? "#include <common/shard_place.cuh>\n" : "";
  if (!spec.place_in_memory) return text;
  const bool maps = spec.kernel().tensor_maps;
  return text + (maps ? "#include <sm90/sm90_place_in_memory.cuh>\n" : "#include <common/place_in_memory.cuh>\n");
}

/// "FA_KERNEL(name, Params, threads, min_blocks) { function<Config>(params); }"
std::string entry(const plan::KernelSpec& spec, std::string_view params) {
  const int blocks = spec.cluster();
  const bool reads = spec.place_in_memory;
  return fmt::format("FA_{}{}KERNEL({}, fa::kernel::{}, {}{}, {}{}) {{ fa::{}<Config>({}); }}\n",
                     reads ? "PLACED_" : "", blocks > 1 ? "CLUSTER_" : "", kernel_name(spec), params,
                     reads ? "fa::kernel::PlaceParams, " : "", spec.threads(), spec.min_blocks,
                     blocks > 1 ? fmt::format(", {}", blocks) : "", spec.kernel().unit.function,
                     reads ? "fa::kernel::placed<Config>(params, place)" : "params");
}

std::string render_unit(const plan::KernelSpec& spec) {
  const plan::Kernel::Unit& unit = spec.kernel().unit;
  const bool has_variant = spec.variants.any();
  const bool stored = spec.stored() || spec.dtype == DType::i8;
  const bool statistics =
      unit.statistics_params != nullptr && (spec.entropy || spec.max_logit != 0 || spec.column_sums);
  const char* const params = statistics    ? unit.statistics_params
                             : stored      ? unit.stored_params
                             : has_variant ? unit.variant_params
                                           : unit.params;
  std::string layout = layout_of(kLayouts, unit.params);
  if (has_variant || stored || statistics) layout += layout_of(kVariantLayouts, params);
  if (spec.place_in_memory) layout += place_layout();
  return fmt::format(
      "// {}\n{}{}"
      "#include <{}>\n{}\n"
      "{}\n{}{}{}\n{}",  // in no namespace: a cubin carries the mangled names of constants
      canonical(spec), spec.debug ? "#define FA_DEBUG_KERNELS 1\n" : "",
      spec.arch.major < 8 ? "#define FA_TURING 1\n" : "", unit.header, more_headers(spec), layout,
      has_variant ? variant(spec) : "", config(spec), room_asserts(spec), entry(spec, params));
}

/// What a reader, and nvcc with its default of C++17, has to know about a flattened source. It is no part of the unit,
/// and so of no key.
std::string head_of(const Source& source) {
  return fmt::format(
      "// {0} of fa for {1}. To compile it: nvcc -std=c++20 -arch={1}{2} -cubin THIS_FILE\n"
      "#if __cplusplus < 201709L && !defined(_MSVC_LANG)\n"
      "#error \"the kernels of fa are C++20: compile with -std=c++20\"\n"
      "#endif\n",
      source.kernel_name, source.target, source.fuses ? "" : " -fmad=false");
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
  const bool folds = spec.is<plan::ForwardCombine>() && spec.as<plan::ForwardCombine>().folds;
  source.fuses = spec.split_keys() == 0 && spec.length_keys() == 0 && !folds;
  source.first_nvrtc = spec.kernel().first_nvrtc;
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
