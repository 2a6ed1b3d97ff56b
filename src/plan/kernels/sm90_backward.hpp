#ifndef FA_SRC_PLAN_KERNELS_SM90_BACKWARD_HPP_
#define FA_SRC_PLAN_KERNELS_SM90_BACKWARD_HPP_

namespace fa::plan {

struct Kernel;

/// What a spec of the Hopper backward has besides its head.
struct Sm90Backward {
  bool ordered_dq = false;         ///< key tiles add to dQ's accumulator in one order
  int split_blocks = 1;            ///< blocks of a cluster, which share the query tiles of a key tile
  bool in_turns = false;           ///< blocks that share a key tile add to one dK and dV, one behind the other
  bool rows_without_keys = false;  ///< of a dense batch, in front of the causal diagonal

  static const Kernel& kernel() noexcept;
  friend bool operator==(const Sm90Backward&, const Sm90Backward&) = default;
};

/// The same for head dims above 128, by two thread blocks that share a tile; above 256 by four.
struct Sm90BackwardPair {
  bool ordered_dq = false;

  static const Kernel& kernel() noexcept;
  friend bool operator==(const Sm90BackwardPair&, const Sm90BackwardPair&) = default;
};

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_KERNELS_SM90_BACKWARD_HPP_
