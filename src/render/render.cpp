#include <fmt/format.h>

#include <cstddef>
#include <functional>
#include <iterator>
#include <set>
#include <string_view>

#include <common/forward_params.cuh>
#include <fa/error.hpp>

#include "plan/planner.hpp"
#include "render/source.hpp"
#include "render/templates.hpp"

namespace fa::render {
namespace {

using kernel::ForwardParams;

const char* element_name(DType dtype) {
  return dtype == DType::f16 ? "f16" : dtype == DType::bf16 ? "bf16" : "f32";
}

const char* boolean(bool value) {
  return value ? "true" : "false";
}

/// The host's layout of the launch parameters, asserted by the compiler of the kernel.
std::string layout_asserts() {
  std::string text = fmt::format("static_assert(sizeof(fa::kernel::ForwardParams) == {});\n", sizeof(ForwardParams));
  const auto field = [&](std::string_view name, std::size_t offset) {
    fmt::format_to(std::back_inserter(text), "static_assert(FA_OFFSETOF(fa::kernel::ForwardParams, {}) == {});\n", name,
                   offset);
  };
  field("q", offsetof(ForwardParams, q));
  field("lse", offsetof(ForwardParams, lse));
  field("partial_lse", offsetof(ForwardParams, partial_lse));
  field("stride_q_b", offsetof(ForwardParams, stride_q_b));
  field("stride_o_b", offsetof(ForwardParams, stride_o_b));
  field("stride_lse_s", offsetof(ForwardParams, stride_lse_s));
  field("b", offsetof(ForwardParams, b));
  field("splits", offsetof(ForwardParams, splits));
  field("scale_log2", offsetof(ForwardParams, scale_log2));
  return text;
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
      "}};\n",
      element_name(spec.dtype), spec.d_qk, spec.d_v, spec.tile_m, spec.tile_n, spec.warps, spec.stages,
      spec.loop_bodies, boolean(spec.causal), boolean(spec.positive_scale), boolean(spec.aligned),
      boolean(spec.q_in_registers), boolean(spec.conditional_rescale), boolean(spec.pack_gqa), boolean(spec.split));
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

std::string render_unit(const plan::KernelSpec& spec) {
  const bool combine = spec.op == plan::Op::combine;
  const std::string shared_assert =
      combine
          ? ""
          : fmt::format("static_assert(fa::sm80::Forward<Config>::kSharedBytes == {});\n", plan::shared_bytes(spec));
  return fmt::format(
      "// {}\n"
      "#include <{}>\n\n"
      "namespace {{\n\n{}\n{}{}\n}}  // namespace\n\n"
      "FA_KERNEL({}, fa::kernel::ForwardParams, {}, {}) {{ {}<Config>(params); }}\n",
      canonical(spec), combine ? "common/forward_combine.cuh" : "sm80/sm80_forward.cuh", layout_asserts(),
      combine ? combine_config(spec) : forward_config(spec), shared_assert, kernel_name(spec), spec.threads(),
      spec.min_blocks, combine ? "fa::kernel::forward_combine" : "fa::sm80::forward");
}

/// The name between the brackets of an `#include <name>` line; empty for any other line.
std::string_view included_name(std::string_view line) {
  constexpr std::string_view kPrefix = "#include <";
  if (!line.starts_with(kPrefix) || line.back() != '>') return {};
  return line.substr(kPrefix.size(), line.size() - kPrefix.size() - 1);
}

}  // namespace

Source render(const plan::KernelSpec& spec) {
  Source source;
  source.kernel_name = kernel_name(spec);
  source.unit = render_unit(spec);
  source.headers = templates();
  return source;
}

std::string unit_of(const plan::KernelSpec& spec) {
  return render_unit(spec);
}

std::string flatten(const Source& source) {
  std::set<std::string_view> done;
  std::string result;
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
