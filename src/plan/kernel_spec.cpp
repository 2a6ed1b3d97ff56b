#include "plan/kernel_spec.hpp"

#include <fmt/format.h>

namespace fa::plan {
namespace {

const char* family_name(Family family) {
  switch (family) {
    case Family::automatic:
      break;
    case Family::sm80:
      return "sm80";
    case Family::sm90:
      return "sm90";
  }
  return "automatic";
}

/// Packed batches and dropout; other kernels have texts without them.
std::string switches(const KernelSpec& spec) {
  return std::string(spec.varlen ? " varlen=1" : "") + (spec.dropout ? " dropout=1" : "");
}

std::string canonical_sm90_forward(const KernelSpec& spec) {
  return fmt::format(
             "sm90_forward arch={} dtype={} d_qk={} d_v={} causal={:d} positive_scale={:d} tile_m={} tile_n={} "
             "stages={} "
             "q_buffers={} softmax_chunks={} take_turns={:d} pack_gqa={:d} split={:d} min_blocks={}",
             to_string(spec.arch), to_string(spec.dtype), spec.d_qk, spec.d_v, spec.causal, spec.positive_scale,
             spec.tile_m, spec.tile_n, spec.stages, spec.q_buffers, spec.softmax_chunks, spec.take_turns, spec.pack_gqa,
             spec.split, spec.min_blocks) +
         (spec.skips_hidden ? " skips_hidden=1" : "") + (spec.own_ends ? " own_ends=1" : "") +
         (spec.dynamic ? " dynamic=1" : "") + (spec.affine_product ? " affine_product=1" : "") +
         (spec.affine_reach ? " affine_reach=1" : "") + (spec.exact_max ? " exact_max=1" : "") + switches(spec);
}

std::string canonical_sm90_backward(const KernelSpec& spec) {
  return fmt::format(
             "sm90_backward arch={} dtype={} d_qk={} d_v={} causal={:d} tile_m={} tile_n={} stages={} write_dq={:d} "
             "split={:d} min_blocks={}",
             to_string(spec.arch), to_string(spec.dtype), spec.d_qk, spec.d_v, spec.causal, spec.tile_m, spec.tile_n,
             spec.stages, spec.write_dq, spec.split, spec.min_blocks) +
         (spec.ordered_dq ? " ordered_dq=1" : "") + (spec.cluster > 1 ? fmt::format(" cluster={}", spec.cluster) : "") +
         switches(spec);
}

}  // namespace

std::string kernel_name(const KernelSpec& spec) {
  switch (spec.op) {
    case Op::forward:
      return fmt::format("fa_{}_forward", family_name(spec.family));
    case Op::combine:
      return "fa_forward_combine";
    case Op::backward:
      return fmt::format("fa_{}_backward{}", family_name(spec.family),
                         spec.family == Family::sm90 && spec.cluster > 1 ? "_pair" : "");
    case Op::backward_dq:
      return fmt::format("fa_{}_backward_dq", family_name(spec.family));
    case Op::backward_preprocess:
      return "fa_backward_preprocess";
    case Op::backward_convert:
      return "fa_backward_convert";
    case Op::backward_reduce:
      return "fa_backward_reduce";
    case Op::clear_padding:
      return "fa_clear_padding";
    case Op::backward_sink:
      return "fa_backward_sink";
    case Op::row_norms:
      return "fa_row_norms";
    case Op::mask_rows:
      return "fa_mask_rows";
    case Op::mask_keys:
      return "fa_mask_keys";
  }
  return {};
}

namespace {

std::string canonical_plain(const KernelSpec& spec) {
  const std::string name = kernel_name(spec).substr(3);
  const std::string target = fmt::format("{} arch={} dtype={}", name, to_string(spec.arch), to_string(spec.dtype));
  switch (spec.op) {
    case Op::forward:
      break;
    case Op::combine:
      return fmt::format("{} d_v={} warps={}", target, spec.d_v, spec.warps);
    case Op::backward:
      if (spec.family == Family::sm90) return canonical_sm90_backward(spec);
      return fmt::format(
                 "{} d_qk={} d_v={} causal={:d} aligned={:d} tile_m={} tile_n={} warps={} warps_n={} dq_warps_m={} "
                 "substeps={} stages={} "
                 "operands_in_registers={} write_dq={:d} delayed_dq={:d} split={:d} min_blocks={}",
                 target, spec.d_qk, spec.d_v, spec.causal, spec.aligned, spec.tile_m, spec.tile_n, spec.warps,
                 spec.warps_n, spec.dq_warps_m, spec.substeps, spec.stages, spec.operands_in_registers, spec.write_dq,
                 spec.delayed_dq, spec.split, spec.min_blocks) +
             switches(spec);
    case Op::backward_dq:
      return fmt::format(
                 "{} d_qk={} d_v={} causal={:d} aligned={:d} tile_m={} tile_n={} warps={} stages={} min_blocks={}",
                 target, spec.d_qk, spec.d_v, spec.causal, spec.aligned, spec.tile_m, spec.tile_n, spec.warps,
                 spec.stages, spec.min_blocks) +
             switches(spec);
    case Op::backward_preprocess:
      return fmt::format("{} d_qk={} d_v={} aligned={:d} warps={}{}", target, spec.d_qk, spec.d_v, spec.aligned,
                         spec.warps, spec.varlen ? " varlen=1" : "");
    case Op::backward_convert:
      return fmt::format("{} d_qk={} aligned={:d} warps={}{}", target, spec.d_qk, spec.aligned, spec.warps,
                         spec.varlen ? " varlen=1" : "");
    case Op::backward_reduce:
      return fmt::format("{} d_qk={} d_v={} warps={}", target, spec.d_qk, spec.d_v, spec.warps);
    case Op::backward_sink:
      return fmt::format("{} warps={}{}", target, spec.warps, spec.varlen ? " varlen=1" : "");
    case Op::clear_padding:
      return fmt::format("{} warps={}", target, spec.warps);
    case Op::row_norms:
      return fmt::format("{} d_qk={} warps={}", target, spec.d_qk, spec.warps);
    case Op::mask_rows:
    case Op::mask_keys:
      return fmt::format("{} causal={:d} tile_m={} tile_n={} pack_gqa={:d} warps={}", target, spec.causal, spec.tile_m,
                         spec.tile_n, spec.pack_gqa, spec.warps);
  }
  if (spec.family == Family::sm90) return canonical_sm90_forward(spec);
  return fmt::format(
             "{} d_qk={} d_v={} causal={:d} positive_scale={:d} aligned={:d} tile_m={} tile_n={} warps={} stages={} "
             "q_in_registers={:d} loop_bodies={} conditional_rescale={:d} pack_gqa={:d} split={:d} min_blocks={}",
             target, spec.d_qk, spec.d_v, spec.causal, spec.positive_scale, spec.aligned, spec.tile_m, spec.tile_n,
             spec.warps, spec.stages, spec.q_in_registers, spec.loop_bodies, spec.conditional_rescale, spec.pack_gqa,
             spec.split, spec.min_blocks) +
         (spec.warps_n > 1 ? fmt::format(" warps_n={}", spec.warps_n) : "") + switches(spec);
}

}  // namespace

std::string canonical(const KernelSpec& spec) {
  return canonical_plain(spec) + canonical(spec.variants);
}

}  // namespace fa::plan
