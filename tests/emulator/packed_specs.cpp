#include "emulator/packed_specs.hpp"

#include "plan/sm90_forward.hpp"

namespace emulator {
namespace {

using fa::DType;
using fa::plan::Arch;
using fa::plan::KernelSpec;
using fa::plan::Op;

struct ForwardShape {
  DType dtype;
  int d_qk, d_v, tile_m, warps, tile_n, stages;
  bool varlen, dropout, causal, pack_gqa = false, split = false, aligned = true, q_in_registers = false;
  int loop_bodies = 1;
  int q_buffers = 0;  // of an sm90 kernel
  int warps_n = 0;
};

constexpr ForwardShape kForward[] = {
    {.dtype = DType::f16,
     .d_qk = 40,
     .d_v = 40,
     .tile_m = 32,
     .warps = 2,
     .tile_n = 32,
     .stages = 1,
     .varlen = true,
     .dropout = false,
     .causal = true},
    {.dtype = DType::bf16,
     .d_qk = 64,
     .d_v = 64,
     .tile_m = 64,
     .warps = 2,
     .tile_n = 48,
     .stages = 2,
     .varlen = false,
     .dropout = true,
     .causal = false},
    {.dtype = DType::f32,
     .d_qk = 24,
     .d_v = 64,
     .tile_m = 16,
     .warps = 1,
     .tile_n = 16,
     .stages = 1,
     .varlen = true,
     .dropout = true,
     .causal = true,
     .loop_bodies = 2},
    {.dtype = DType::bf16,
     .d_qk = 64,
     .d_v = 64,
     .tile_m = 32,
     .warps = 1,
     .tile_n = 32,
     .stages = 2,
     .varlen = true,
     .dropout = true,
     .causal = true,
     .pack_gqa = true,
     .q_in_registers = true},
    {.dtype = DType::f16,
     .d_qk = 8,
     .d_v = 64,
     .tile_m = 32,
     .warps = 2,
     .tile_n = 32,
     .stages = 1,
     .varlen = false,
     .dropout = true,
     .causal = false,
     .split = true},
    {.dtype = DType::bf16,
     .d_qk = 72,
     .d_v = 40,
     .tile_m = 32,
     .warps = 2,
     .tile_n = 16,
     .stages = 3,
     .varlen = true,
     .dropout = true,
     .causal = false,
     .aligned = false},
    {.dtype = DType::bf16,
     .d_qk = 40,
     .d_v = 48,
     .tile_m = 64,
     .warps = 4,
     .tile_n = 32,
     .stages = 1,
     .varlen = true,
     .dropout = true,
     .causal = true,
     .warps_n = 2},
    {.dtype = DType::f16,
     .d_qk = 64,
     .d_v = 64,
     .tile_m = 32,
     .warps = 2,
     .tile_n = 64,
     .stages = 2,
     .varlen = true,
     .dropout = true,
     .causal = true,
     .pack_gqa = true,
     .aligned = false,
     .loop_bodies = 2,
     .warps_n = 2},
    {.dtype = DType::bf16,
     .d_qk = 64,
     .d_v = 64,
     .tile_m = 64,
     .warps = 12,
     .tile_n = 32,
     .stages = 2,
     .varlen = true,
     .dropout = true,
     .causal = true,
     .q_buffers = 2},
    {.dtype = DType::f16,
     .d_qk = 40,
     .d_v = 128,
     .tile_m = 128,
     .warps = 12,
     .tile_n = 48,
     .stages = 3,
     .varlen = true,
     .dropout = false,
     .causal = false,
     .q_buffers = 2},
    {.dtype = DType::bf16,
     .d_qk = 64,
     .d_v = 64,
     .tile_m = 192,
     .warps = 16,
     .tile_n = 48,
     .stages = 2,
     .varlen = true,
     .dropout = false,
     .causal = true,
     .q_buffers = 2},
    {.dtype = DType::bf16,
     .d_qk = 64,
     .d_v = 48,
     .tile_m = 256,
     .warps = 20,
     .tile_n = 48,
     .stages = 3,
     .varlen = true,
     .dropout = false,
     .causal = true,
     .q_buffers = 2},
    {.dtype = DType::f16,
     .d_qk = 72,
     .d_v = 40,
     .tile_m = 128,
     .warps = 12,
     .tile_n = 32,
     .stages = 3,
     .varlen = true,
     .dropout = false,
     .causal = true,
     .pack_gqa = true,
     .q_buffers = 1},
    {.dtype = DType::f16,
     .d_qk = 64,
     .d_v = 40,
     .tile_m = 192,
     .warps = 16,
     .tile_n = 48,
     .stages = 2,
     .varlen = true,
     .dropout = false,
     .causal = false,
     .q_buffers = 2},
    {.dtype = DType::bf16,
     .d_qk = 64,
     .d_v = 64,
     .tile_m = 192,
     .warps = 16,
     .tile_n = 48,
     .stages = 2,
     .varlen = false,
     .dropout = true,
     .causal = true,
     .q_buffers = 2},
    {.dtype = DType::f16,
     .d_qk = 128,
     .d_v = 64,
     .tile_m = 192,
     .warps = 16,
     .tile_n = 32,
     .stages = 2,
     .varlen = true,
     .dropout = true,
     .causal = true,
     .pack_gqa = true,
     .q_buffers = 1},
    {.dtype = DType::bf16,
     .d_qk = 8,
     .d_v = 64,
     .tile_m = 64,
     .warps = 12,
     .tile_n = 32,
     .stages = 2,
     .varlen = false,
     .dropout = true,
     .causal = false,
     .pack_gqa = true,
     .split = true,
     .q_buffers = 1},
    {.dtype = DType::bf16,
     .d_qk = 64,
     .d_v = 128,
     .tile_m = 128,
     .warps = 16,
     .tile_n = 32,
     .stages = 2,
     .varlen = false,
     .dropout = true,
     .causal = true,
     .q_buffers = 2},
    {.dtype = DType::f16,
     .d_qk = 40,
     .d_v = 64,
     .tile_m = 128,
     .warps = 16,
     .tile_n = 144,
     .stages = 2,
     .varlen = true,
     .dropout = true,
     .causal = false,
     .pack_gqa = true,
     .q_buffers = 1},
    {.dtype = DType::f16,
     .d_qk = 64,
     .d_v = 144,
     .tile_m = 128,
     .warps = 12,
     .tile_n = 48,
     .stages = 2,
     .varlen = false,
     .dropout = true,
     .causal = false,
     .q_buffers = 1},
    {.dtype = DType::bf16,
     .d_qk = 24,
     .d_v = 144,
     .tile_m = 64,
     .warps = 8,
     .tile_n = 32,
     .stages = 3,
     .varlen = true,
     .dropout = true,
     .causal = true,
     .q_buffers = 1},
};

struct BackwardShape {
  DType dtype;
  int d_qk, d_v, tile_m, tile_n, warps, warps_n, dq_warps_m, stages;
  bool varlen, dropout, causal, deterministic = false, split = false, aligned = true, delayed_dq = false;
  int substeps = 1;
  bool vector_reduce = true;
};

constexpr BackwardShape kBackward[] = {
    {.dtype = DType::f16,
     .d_qk = 40,
     .d_v = 40,
     .tile_m = 32,
     .tile_n = 32,
     .warps = 4,
     .warps_n = 2,
     .dq_warps_m = 2,
     .stages = 1,
     .varlen = true,
     .dropout = false,
     .causal = true},
    {.dtype = DType::bf16,
     .d_qk = 64,
     .d_v = 64,
     .tile_m = 32,
     .tile_n = 32,
     .warps = 2,
     .warps_n = 2,
     .dq_warps_m = 1,
     .stages = 2,
     .varlen = false,
     .dropout = true,
     .causal = false,
     .split = true,
     .vector_reduce = false},
    {.dtype = DType::f32,
     .d_qk = 24,
     .d_v = 64,
     .tile_m = 16,
     .tile_n = 32,
     .warps = 4,
     .warps_n = 1,
     .dq_warps_m = 1,
     .stages = 1,
     .varlen = true,
     .dropout = true,
     .causal = true,
     .deterministic = true},
    {.dtype = DType::bf16,
     .d_qk = 64,
     .d_v = 40,
     .tile_m = 32,
     .tile_n = 64,
     .warps = 4,
     .warps_n = 4,
     .dq_warps_m = 1,
     .stages = 2,
     .varlen = true,
     .dropout = true,
     .causal = true,
     .aligned = false,
     .delayed_dq = true},
    {.dtype = DType::f16,
     .d_qk = 64,
     .d_v = 64,
     .tile_m = 32,
     .tile_n = 64,
     .warps = 2,
     .warps_n = 2,
     .dq_warps_m = 1,
     .stages = 1,
     .varlen = false,
     .dropout = true,
     .causal = true,
     .deterministic = true,
     .substeps = 2},
};

KernelSpec to_spec(const ForwardShape& shape) {
  KernelSpec spec;
  spec.arch = {8, 0, '\0'};
  spec.dtype = shape.dtype;
  spec.d_qk = shape.d_qk;
  spec.d_v = shape.d_v;
  spec.tile_m = shape.tile_m;
  spec.warps = shape.warps;
  spec.tile_n = shape.tile_n;
  spec.stages = shape.stages;
  spec.varlen = shape.varlen;
  spec.dropout = shape.dropout;
  spec.causal = shape.causal;
  spec.pack_gqa = shape.pack_gqa;
  spec.split = shape.split;
  spec.aligned = shape.aligned;
  spec.q_in_registers = shape.q_in_registers;
  spec.loop_bodies = shape.loop_bodies;
  spec.warps_n = shape.warps_n;
  if (shape.q_buffers == 0) return spec;
  spec.family = fa::Family::sm90;
  spec.arch = {9, 0, 'a'};
  spec.q_buffers = shape.q_buffers;
  spec.softmax_chunks = 2;
  spec.take_turns = shape.tile_m > 64 && shape.tile_m < 256;
  spec.own_ends = fa::plan::sm90_forward_own_ends(spec);
  return spec;
}

BackwardSpecs to_specs(const BackwardShape& shape) {
  KernelSpec spec;
  spec.op = Op::backward;
  spec.arch = shape.vector_reduce ? Arch{9, 0, 'a'} : Arch{8, 0, '\0'};
  spec.dtype = shape.dtype;
  spec.d_qk = shape.d_qk;
  spec.d_v = shape.d_v;
  spec.causal = shape.causal;
  spec.aligned = shape.aligned;
  spec.varlen = shape.varlen;
  spec.dropout = shape.dropout;
  BackwardSpecs specs{spec, spec};
  specs.main.tile_m = shape.tile_m;
  specs.main.tile_n = shape.tile_n;
  specs.main.warps = shape.warps;
  specs.main.warps_n = shape.warps_n;
  specs.main.dq_warps_m = shape.dq_warps_m;
  specs.main.stages = shape.stages;
  specs.main.substeps = shape.substeps;
  specs.main.delayed_dq = shape.delayed_dq;
  specs.main.write_dq = !shape.deterministic;
  specs.main.split = shape.split;
  specs.dq.op = Op::backward_dq;
  specs.dq.tile_m = 32;
  specs.dq.tile_n = 16;
  specs.dq.warps = 1;
  specs.dq.stages = 2;
  return specs;
}

}  // namespace

const std::vector<KernelSpec>& packed_forward_specs() {
  static const std::vector<KernelSpec> specs = [] {
    std::vector<KernelSpec> result;
    for (const ForwardShape& shape : kForward) result.push_back(to_spec(shape));
    return result;
  }();
  return specs;
}

const std::vector<BackwardSpecs>& packed_backward_specs() {
  static const std::vector<BackwardSpecs> specs = [] {
    std::vector<BackwardSpecs> result;
    for (const BackwardShape& shape : kBackward) result.push_back(to_specs(shape));
    return result;
  }();
  return specs;
}

}  // namespace emulator
