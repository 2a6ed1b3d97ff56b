#ifndef FA_SRC_PLAN_KERNEL_SPEC_HPP_
#define FA_SRC_PLAN_KERNEL_SPEC_HPP_

#include <string>
#include <vector>

#include <fa/attention.hpp>

#include "plan/arch.hpp"
#include "plan/variants.hpp"

namespace fa::plan {

enum class Op : std::uint8_t {
  forward,
  combine,              ///< of a split forward's partial results
  backward,             ///< dK, dV and, with write_dq, dQ's accumulator
  backward_dq,          ///< dQ alone, in a fixed order
  backward_preprocess,  ///< row statistics of the backward, and a zeroed accumulator
  backward_convert,     ///< dQ from its accumulator
  backward_reduce,      ///< of a split backward's partial dK and dV
  backward_sink,        ///< the gradient of the sinks
  clear_padding,        ///< zeroes (or another value) in the rows of a packed tensor that belong to no sequence
  row_norms,            ///< the greatest norms of rows of q and of k, by head
  mask_rows,            ///< lists of key tiles, for tiles of rows, that a mask function keeps something of
  mask_keys,            ///< lists of row tiles, for tiles of keys
};

/// A complete, hashable description of one kernel: two equal specs render the same source. Never a function of the
/// number of multiprocessors.
struct KernelSpec {
  Family family = Family::sm80;
  Op op = Op::forward;
  Arch arch;
  DType dtype = DType::bf16;
  int d_qk = 0;
  int d_v = 0;
  bool causal = false;
  bool positive_scale = true;  ///< scores keep their order under the scale, so the row maximum is taken before it
  bool aligned = true;         ///< 16-byte copies; else element by element
  int tile_m = 0;              ///< query rows of a thread block
  int tile_n = 0;              ///< keys of a main-loop step
  int warps = 0;
  int stages = 0;  ///< K and V tiles in flight
  bool q_in_registers = false;
  int loop_bodies = 1;
  bool pack_gqa = false;
  bool conditional_rescale = true;  ///< O is rescaled only when a row maximum grew, behind a branch
  bool split = false;               ///< writes partial O and LSE for the combine kernel
  int warps_n = 0;                  ///< backward: groups of keys in the grid of warps; sm80 forward: 2: warps in pairs
                                    ///< that share their rows
  int dq_warps_m = 0;               ///< backward: groups of queries in the grid of warps, for dQ
  int substeps = 1;                 ///< backward: parts in which a warp takes its queries of a step
  int operands_in_registers = 0;    ///< backward: 1: V, 2: V and K stay in registers
  bool write_dq = true;             ///< backward: adds to dQ's accumulator
  bool ordered_dq = false;          ///< sm90 backward: key tiles add to dQ's accumulator in one order
  bool delayed_dq = false;          ///< backward: adds a step's dQ during the next step
  int q_buffers = 0;                ///< sm90: query tiles in flight
  int softmax_chunks = 1;           ///< sm90: pieces of a KV tile that the softmax works on one after the other
  bool take_turns = false;          ///< sm90: the warpgroups feed the tensor cores one after the other
  bool own_ends = false;            ///< sm90 forward: each warpgroup's KV tiles end at its own last row
  bool dynamic = false;             ///< sm90 forward: blocks take query tiles from a counter in the workspace
  bool skips_hidden = false;        ///< sm90 forward: warps pass over pieces of a tile that causality hides from them
  bool affine_product = false;      ///< sm90 forward: the product S adds what an affine score function grows by
  bool affine_reach = false;        ///< sm90 forward: KV tiles out of an affine score function's reach are left out
  bool exact_max = false;           ///< sm90 forward: P is relative to the exact maximum of a row's scores
  bool varlen = false;              ///< of packed batches: lengths come from the device
  bool dropout = false;             ///< drops elements of P
  Variants variants;                ///< what is computed besides plain attention
  int cluster = 1;                  ///< thread blocks that share a tile
  int min_blocks = 1;               ///< resident thread blocks a multiprocessor that the register allocation must allow

  friend bool operator==(const KernelSpec&, const KernelSpec&) = default;

  int threads() const noexcept { return warps * 32; }
};

/// Kernels in order of preference: the first that ptxas does not spill is to be taken.
using Alternatives = std::vector<KernelSpec>;

/// "sm80_forward arch=sm_90a dtype=bf16 d_qk=128 ...": every field that the kernel depends on, in a fixed order. Equal
/// texts render equal kernels; it is what the cache hashes and `fa` prints.
std::string canonical(const KernelSpec& spec);

/// The entry point, "fa_sm80_forward".
std::string kernel_name(const KernelSpec& spec);

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_KERNEL_SPEC_HPP_
