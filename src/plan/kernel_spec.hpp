#ifndef FA_SRC_PLAN_KERNEL_SPEC_HPP_
#define FA_SRC_PLAN_KERNEL_SPEC_HPP_

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include <fa/tensor.hpp>
#include <fa/types.hpp>

#include "plan/arch.hpp"
#include "plan/kernels/append.hpp"
#include "plan/kernels/column_sums.hpp"
#include "plan/kernels/helpers.hpp"
#include "plan/kernels/inspect.hpp"
#include "plan/kernels/merge_states.hpp"
#include "plan/kernels/quantize.hpp"
#include "plan/kernels/sm80_backward.hpp"
#include "plan/kernels/sm80_forward.hpp"
#include "plan/kernels/sm80_fp8_forward.hpp"
#include "plan/kernels/sm90_backward.hpp"
#include "plan/kernels/sm90_forward.hpp"
#include "plan/kernels/sm90_fp8_forward.hpp"
#include "plan/kernels/sm90_wide_forward.hpp"
#include "plan/kernels/statistic_rows.hpp"
#include "plan/variants.hpp"

namespace fa::plan {

/// A kernel family: one way of using the tensor cores.
enum class Family : std::uint8_t {
  automatic,  ///< any, or all of them
  sm80,       ///< mma.sync + cp.async: Ampere and everything after it
  sm90,       ///< wgmma + the copy engine (TMA): Hopper, 16-bit elements
  sm90_wide,  ///< the same for a forward of head dims above 256: warpgroups share query rows
  sm90_fp8,   ///< the same for a forward of 8-bit floats
  sm80_fp8,   ///< and by mma.sync + cp.async, from compute capability 8.9 on
};

/// "sm90".
const char* to_string(Family family) noexcept;

/// Of the families that kernels may be of, from 0. No dtype has kernels of both sm80 and sm80_fp8, which share a
/// number.
constexpr int index_of(Family family) noexcept {
  return family == Family::sm80_fp8 ? 0 : static_cast<int>(family) - static_cast<int>(Family::sm80);
}
inline constexpr int kFamilies = index_of(Family::sm90_fp8) + 1;

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
  schedule,             ///< of query tiles, and keys, among thread blocks
  mask_rows,            ///< lists of key tiles, for tiles of rows, that a mask function keeps something of
  mask_keys,            ///< lists of row tiles, for tiles of keys
  statistic_rows,       ///< what gradients of statistics need of rows, in front of a backward
  append,               ///< new keys and values into a cache
  merge,                ///< partial results over different keys
  column_sums,          ///< of P, behind a forward
  top_keys,             ///< by the sums, behind these
  scan_results,         ///< for NaNs and infinities, behind a debug call
  probabilities,        ///< P of one query head, behind a debug forward
  quantize,             ///< rows as codes of 8 bits, and what is subtracted from them before
};

/// What specs of several kernels have. Which of it a kernel depends on, its list of fields says (field.hpp).
struct SpecHead {
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
  int stages = 0;   ///< K and V tiles in flight
  int warps_n = 0;  ///< warps side by side along keys
  bool pack_gqa = false;
  bool split = false;       ///< writes partial results for another kernel
  bool write_dq = true;     ///< backward: adds to dQ's accumulator
  bool without_dk = false;  ///< backward: dK is not wanted
  bool without_dv = false;  ///< likewise dV
  bool varlen = false;      ///< of packed batches: lengths come from the device
  bool dropout = false;     ///< drops elements of P
  int page_size = 0;        ///< keys of a page that k and v are in, or kContiguous; 0: plain tensors
  bool accumulate = false;  ///< adds to the state that o and lse hold
  int max_logit = 0;        ///< a forward stores the greatest logit of rows: 1 of the softmax, 2 of the scaled scores
  bool max_logit_by_head = false;  ///< or of query heads
  bool entropy = false;            ///< a forward stores the entropy of rows of P; a backward is given gradients of both
  bool column_sums = false;        ///< a backward is given gradients of column sums
  bool bounded = false;  ///< of no more blocks than the call may take multiprocessors: these go on from tile to tile
  bool place_in_memory = false;  ///< where the call stands in a larger attention, kernels read
  Variants variants;             ///< what is computed besides plain attention
  bool debug = false;            ///< waits and addresses are checked on the device
  int min_blocks = 1;            ///< resident thread blocks a multiprocessor that the register allocation must allow

  friend bool operator==(const SpecHead&, const SpecHead&) = default;
};

struct Kernel;

/// A complete, hashable description of one kernel: two equal specs render the same source. Never a function of the
/// number of multiprocessors.
struct KernelSpec : SpecHead {
  /// Which kernel it is, and what only that one has.
  using Own = std::variant<Sm80Forward, Sm90Forward, ForwardCombine, Sm80Backward, Sm80BackwardDq, Sm90Backward,
                           Sm90BackwardPair, BackwardPreprocess, BackwardConvert, BackwardReduce, BackwardSink,
                           ClearPadding, RowNorms, Schedule, MaskRows, MaskKeys, Append, MergeStates, AppendStored,
                           Sm90WideForward, Sm90Fp8Forward, ColumnSumsPass, ScanResults, Probabilities, Quantize,
                           TopKeys, StatisticRows, Sm80Fp8Forward>;
  Own own;

  template <class Which>
  bool is() const noexcept {
    return std::holds_alternative<Which>(own);
  }
  template <class Which>
  Which& as() {
    return std::get<Which>(own);
  }
  template <class Which>
  const Which& as() const {
    return std::get<Which>(own);
  }

  const Kernel& kernel() const noexcept;  ///< its entry in the catalogue
  Op op() const noexcept;
  Family family() const noexcept;
  int cluster() const noexcept;  ///< thread blocks that share a tile
  /// Whether another kernel merges the splits of a query tile.
  bool leaves_splits() const noexcept { return split && split_keys() == 0 && cluster() == 1; }

  // Of the kernels that have such a field; false for others.
  bool dynamic() const noexcept;
  bool affine_reach() const noexcept;
  bool scheduled() const noexcept;
  bool own_parts() const noexcept;
  bool stored() const noexcept;  ///< K or V is in 8 bits
  /// Keys whose softmax is formed alone, whoever else there is; 0: splits follow from the call.
  int split_keys() const noexcept;
  /// Keys of a split, at least, where splits follow from a request's length and from nothing else of the call; 0: not.
  int length_keys() const noexcept;
  bool whole_tiles() const noexcept;  ///< a block folds all such splits of a query tile, where it takes that whole
  bool ordered_dq() const noexcept;
  bool in_turns() const noexcept;  ///< blocks that share a key tile add to one dK and dV
  /// Of the main kernel of a backward: whether it adds to dQ's accumulator, and whether it sums dK or dV.
  bool adds_dq() const noexcept { return op() == Op::backward && write_dq; }
  bool sums_keys() const noexcept { return op() == Op::backward && !(without_dk && without_dv); }

  int threads() const noexcept { return warps * 32; }

  friend bool operator==(const KernelSpec&, const KernelSpec&) = default;
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
