#include "plan/kernel_spec.hpp"

#include <fmt/format.h>

namespace fa::plan {
namespace {

const char* family_name(Family family) {
  return family == Family::sm80 ? "sm80" : "automatic";
}

}  // namespace

std::string kernel_name(const KernelSpec& spec) {
  if (spec.op == Op::combine) return "fa_forward_combine";
  return fmt::format("fa_{}_forward", family_name(spec.family));
}

std::string canonical(const KernelSpec& spec) {
  if (spec.op == Op::combine) {
    return fmt::format("forward_combine arch={} dtype={} d_v={} warps={}", to_string(spec.arch), to_string(spec.dtype),
                       spec.d_v, spec.warps);
  }
  return fmt::format(
      "{}_forward arch={} dtype={} d_qk={} d_v={} causal={:d} positive_scale={:d} aligned={:d} tile_m={} tile_n={} "
      "warps={} stages={} q_in_registers={:d} loop_bodies={} conditional_rescale={:d} pack_gqa={:d} split={:d} "
      "min_blocks={}",
      family_name(spec.family), to_string(spec.arch), to_string(spec.dtype), spec.d_qk, spec.d_v, spec.causal,
      spec.positive_scale, spec.aligned, spec.tile_m, spec.tile_n, spec.warps, spec.stages, spec.q_in_registers,
      spec.loop_bodies, spec.conditional_rescale, spec.pack_gqa, spec.split, spec.min_blocks);
}

}  // namespace fa::plan
