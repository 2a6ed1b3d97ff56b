#include "emulator/spec.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "plan/planner.hpp"
#include "render/templates.hpp"

namespace emulator {
namespace {

const char* element_name(const Spec& spec) {
  return spec.dtype == fa::DType::f16 ? "f16" : "bf16";
}

int slab_row_bytes(int columns) {
  return (columns + 63) / 64 * 128;
}

std::string sm90_unit(const Spec& spec) {
  return fmt::format(
      "// {}\n"
      "#include <sm90/sm90_forward.cuh>\n\n"
      "namespace {{\n\n"
      "struct Config {{\n"
      "  using Element = fa::kernel::{};\n"
      "  static constexpr int kHeadDimQk = {};\n"
      "  static constexpr int kHeadDimV = {};\n"
      "  static constexpr int kTileM = {};\n"
      "  static constexpr int kTileN = {};\n"
      "  static constexpr int kStages = {};\n"
      "  static constexpr int kQBuffers = {};\n"
      "  static constexpr bool kCausal = {};\n"
      "  static constexpr bool kPositiveScale = {};\n"
      "  static constexpr bool kTakeTurns = {};\n"
      "  static constexpr int kSoftmaxChunks = {};\n"
      "  static constexpr bool kPackGqa = {};\n"
      "  static constexpr bool kSplit = {};\n"
      "}};\n"
      "static_assert(fa::sm90::Forward<Config>::kSharedBytes == {});\n\n"
      "}}  // namespace\n\n"
      "FA_KERNEL(fa_sm90_forward, fa::kernel::Sm90ForwardParams, {}, 1) {{ fa::sm90::forward<Config>(params); }}\n",
      canonical(spec), element_name(spec), spec.d_qk, spec.d_v, spec.tile_m, spec.tile_n, spec.stages, spec.q_buffers,
      spec.causal, spec.positive_scale, spec.take_turns, spec.softmax_chunks, spec.pack_gqa, spec.split,
      shared_bytes(spec), spec.threads());
}

}  // namespace

std::string canonical(const Spec& spec) {
  if (!spec.sm90()) return fa::plan::canonical(spec);
  return fmt::format(
      "sm90_forward dtype={} d_qk={} d_v={} causal={} positive_scale={} tile_m={} tile_n={} stages={} "
      "q_buffers={} take_turns={} softmax_chunks={} pack_gqa={} split={}",
      element_name(spec), spec.d_qk, spec.d_v, spec.causal, spec.positive_scale, spec.tile_m, spec.tile_n, spec.stages,
      spec.q_buffers, spec.take_turns, spec.softmax_chunks, spec.pack_gqa, spec.split);
}

fa::render::Source render(const Spec& spec) {
  if (!spec.sm90()) return fa::render::render(spec);
  return {"fa_sm90_forward", sm90_unit(spec), fa::render::templates()};
}

int shared_bytes(const Spec& spec) {
  if (!spec.sm90()) return fa::plan::shared_bytes(spec);
  const int qk = slab_row_bytes(spec.d_qk);
  const int v = slab_row_bytes(spec.d_v);
  const bool stage_o = spec.q_buffers == 2 && !spec.pack_gqa && !spec.split;
  return spec.q_buffers * spec.tile_m * (stage_o ? std::max(qk, v) : qk) + spec.stages * spec.tile_n * (qk + v) + 1024;
}

}  // namespace emulator
