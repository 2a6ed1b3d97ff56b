#include "emulator/packed_specs.hpp"

#include "plan/sm90_forward.hpp"

namespace emulator {
namespace {

using fa::DType;
using fa::plan::Arch;
using fa::plan::KernelSpec;
using fa::plan::Op;

// What a shape has; else it is dense, full, aligned and so on.
enum Flag : unsigned {
  kVarlen = 1,
  kDropout = 2,
  kCausal = 4,
  kSplit = 8,
  kUnaligned = 16,
  // Of forward:
  kPackGqa = 32,
  kQInRegisters = 64,
  kTwoBodies = 128,
  kPairs = 256,  // of warps
  // Of backward:
  kDeterministic = 512,
  kDelayedDq = 1024,
  kTwoSubsteps = 2048,
  kScalarReduce = 4096,
  kWide = 8192,      // of forward: the Hopper kernel for wide heads
  kBounded = 16384,  // blocks go on from tile to tile
  kTuring = 32768,   // for compute capability 7.5
  kDynamic = 65536,  // query tiles come from a counter
};

struct ForwardShape {
  DType dtype;
  int d_qk, d_v, tile_m, warps, tile_n, stages;
  unsigned flags;
  int q_buffers = 0;  // of an sm90 kernel

  bool has(Flag flag) const { return (flags & flag) != 0; }
};

constexpr ForwardShape kForward[] = {
    {DType::f16, 40, 40, 32, 2, 32, 1, kVarlen | kCausal},
    {DType::bf16, 64, 64, 64, 2, 48, 2, kDropout},
    {DType::f32, 24, 64, 16, 1, 16, 1, kVarlen | kDropout | kCausal | kTwoBodies},
    {DType::bf16, 64, 64, 32, 1, 32, 2, kVarlen | kDropout | kCausal | kPackGqa | kQInRegisters},
    {DType::f16, 8, 64, 32, 2, 32, 1, kDropout | kSplit},
    {DType::bf16, 72, 40, 32, 2, 16, 3, kVarlen | kDropout | kUnaligned},
    {DType::bf16, 40, 48, 64, 4, 32, 1, kVarlen | kDropout | kCausal | kPairs},
    {DType::f16, 64, 64, 32, 2, 64, 2, kVarlen | kDropout | kCausal | kPackGqa | kUnaligned | kTwoBodies | kPairs},
    {DType::bf16, 64, 64, 64, 12, 32, 2, kVarlen | kDropout | kCausal, 2},
    {DType::f16, 40, 128, 128, 12, 48, 3, kVarlen, 2},
    {DType::bf16, 64, 64, 192, 16, 48, 2, kVarlen | kCausal, 2},
    {DType::bf16, 64, 48, 256, 20, 48, 3, kVarlen | kCausal, 2},
    {DType::f16, 72, 40, 128, 12, 32, 3, kVarlen | kCausal | kPackGqa, 1},
    {DType::f16, 64, 40, 192, 16, 48, 2, kVarlen, 2},
    {DType::bf16, 64, 64, 128, 16, 48, 2, kDropout | kCausal, 2},
    {DType::f16, 128, 64, 128, 16, 32, 2, kVarlen | kDropout | kCausal | kPackGqa, 1},
    {DType::bf16, 8, 64, 64, 12, 32, 2, kDropout | kPackGqa | kSplit, 1},
    {DType::bf16, 64, 128, 128, 16, 32, 2, kDropout | kCausal, 2},
    {DType::f16, 40, 64, 128, 16, 144, 2, kVarlen | kDropout | kPackGqa, 1},
    {DType::f16, 64, 144, 128, 12, 48, 2, kDropout, 1},
    {DType::bf16, 24, 144, 64, 8, 32, 3, kVarlen | kDropout | kCausal, 1},
    {DType::bf16, 264, 128, 64, 12, 64, 1, kVarlen | kCausal | kPackGqa | kWide},
    {DType::f16, 40, 40, 32, 2, 32, 1, kVarlen | kCausal | kBounded},
    {DType::bf16, 64, 64, 64, 4, 32, 1, kVarlen | kDropout | kCausal | kPackGqa | kPairs | kBounded},
    {DType::f16, 40, 40, 32, 2, 32, 1, kVarlen | kCausal | kTuring},
    {DType::f32, 24, 64, 16, 1, 16, 1, kVarlen | kDropout | kCausal | kTwoBodies | kTuring},
    {DType::f16, 64, 64, 32, 2, 64, 2, kVarlen | kDropout | kCausal | kPackGqa | kUnaligned | kPairs | kTuring},
    {DType::f16, 8, 64, 32, 2, 32, 1, kDropout | kSplit | kTuring},
    {DType::bf16, 64, 48, 128, 12, 48, 2, kVarlen | kCausal | kDynamic, 2},
    {DType::f16, 72, 40, 64, 8, 32, 3, kVarlen | kPackGqa | kDynamic, 1},
    {DType::bf16, 40, 64, 256, 20, 48, 3, kVarlen | kCausal | kDynamic, 2},
};

struct BackwardShape {
  DType dtype;
  int d_qk, d_v, tile_m, tile_n, warps, warps_n, dq_warps_m, stages;
  unsigned flags;

  bool has(Flag flag) const { return (flags & flag) != 0; }
};

constexpr BackwardShape kBackward[] = {
    {DType::f16, 40, 40, 32, 32, 4, 2, 2, 1, kVarlen | kCausal},
    {DType::bf16, 64, 64, 32, 32, 2, 2, 1, 2, kDropout | kSplit | kScalarReduce},
    {DType::f32, 24, 64, 16, 32, 4, 1, 1, 1, kVarlen | kDropout | kCausal | kDeterministic},
    {DType::bf16, 64, 40, 32, 64, 4, 4, 1, 2, kVarlen | kDropout | kCausal | kUnaligned | kDelayedDq},
    {DType::f16, 64, 64, 32, 64, 2, 2, 1, 1, kDropout | kCausal | kDeterministic | kTwoSubsteps},
    {DType::bf16, 40, 40, 32, 32, 4, 2, 2, 2, kVarlen | kCausal | kDelayedDq | kBounded},
    {DType::f16, 24, 40, 32, 32, 2, 2, 1, 1, kVarlen | kDropout | kDeterministic | kBounded},
    {DType::f16, 40, 64, 32, 32, 4, 2, 2, 1, kVarlen | kDropout | kCausal | kTuring},
    {DType::f16, 64, 64, 32, 32, 2, 2, 1, 2, kDropout | kSplit | kTuring},
    {DType::f32, 24, 64, 16, 32, 4, 1, 1, 1, kVarlen | kDropout | kCausal | kDeterministic | kTuring},
};

KernelSpec to_spec(const ForwardShape& shape) {
  KernelSpec spec;
  spec.arch = shape.has(kTuring) ? Arch{7, 5, '\0'} : Arch{8, 0, '\0'};
  spec.dtype = shape.dtype;
  spec.d_qk = shape.d_qk;
  spec.d_v = shape.d_v;
  spec.tile_m = shape.tile_m;
  spec.warps = shape.warps;
  spec.tile_n = shape.tile_n;
  spec.stages = shape.stages;
  spec.varlen = shape.has(kVarlen);
  spec.dropout = shape.has(kDropout);
  spec.causal = shape.has(kCausal);
  spec.pack_gqa = shape.has(kPackGqa);
  spec.split = shape.has(kSplit);
  spec.bounded = shape.has(kBounded);
  spec.aligned = !shape.has(kUnaligned);
  spec.as<fa::plan::Sm80Forward>().q_in_registers = shape.has(kQInRegisters);
  spec.as<fa::plan::Sm80Forward>().loop_bodies = shape.has(kTwoBodies) ? 2 : 1;
  spec.warps_n = shape.has(kPairs) ? 2 : 0;
  if (shape.has(kWide)) {
    spec.own = fa::plan::Sm90WideForward{};
    spec.arch = {9, 0, 'a'};
    return spec;
  }
  if (shape.q_buffers == 0) return spec;
  spec.own = fa::plan::Sm90Forward{};
  spec.arch = {9, 0, 'a'};
  spec.as<fa::plan::Sm90Forward>().q_buffers = shape.q_buffers;
  spec.as<fa::plan::Sm90Forward>().softmax_chunks = 2;
  spec.as<fa::plan::Sm90Forward>().take_turns = shape.tile_m > 64 && shape.tile_m < 256;
  spec.as<fa::plan::Sm90Forward>().own_ends = fa::plan::sm90_forward_own_ends(spec);
  spec.as<fa::plan::Sm90Forward>().dynamic = shape.has(kDynamic);
  return spec;
}

BackwardSpecs to_specs(const BackwardShape& shape) {
  KernelSpec spec;
  spec.own = fa::plan::Sm80Backward{};
  spec.arch = shape.has(kTuring) ? Arch{7, 5, '\0'} : shape.has(kScalarReduce) ? Arch{8, 0, '\0'} : Arch{9, 0, 'a'};
  spec.dtype = shape.dtype;
  spec.d_qk = shape.d_qk;
  spec.d_v = shape.d_v;
  spec.causal = shape.has(kCausal);
  spec.aligned = !shape.has(kUnaligned);
  spec.varlen = shape.has(kVarlen);
  spec.dropout = shape.has(kDropout);
  spec.bounded = shape.has(kBounded);
  BackwardSpecs specs{spec, spec};
  specs.main.tile_m = shape.tile_m;
  specs.main.tile_n = shape.tile_n;
  specs.main.warps = shape.warps;
  specs.main.warps_n = shape.warps_n;
  specs.main.as<fa::plan::Sm80Backward>().dq_warps_m = shape.dq_warps_m;
  specs.main.stages = shape.stages;
  specs.main.as<fa::plan::Sm80Backward>().substeps = shape.has(kTwoSubsteps) ? 2 : 1;
  specs.main.as<fa::plan::Sm80Backward>().delayed_dq = shape.has(kDelayedDq);
  specs.main.write_dq = !shape.has(kDeterministic);
  specs.main.split = shape.has(kSplit);
  specs.dq.own = fa::plan::Sm80BackwardDq{};
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
