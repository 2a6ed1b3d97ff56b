#ifndef FA_SRC_PLAN_KERNELS_SM90_FORWARD_HPP_
#define FA_SRC_PLAN_KERNELS_SM90_FORWARD_HPP_

namespace fa::plan {

struct Kernel;

/// What a spec of the Hopper forward has besides its head.
struct Sm90Forward {
  int q_buffers = 0;            ///< query tiles in flight
  int softmax_chunks = 1;       ///< pieces of a KV tile that the softmax works on one after the other
  bool take_turns = false;      ///< the warpgroups feed the tensor cores one after the other
  bool skips_hidden = false;    ///< warps skip pieces of a tile that causality hides from them
  bool own_ends = false;        ///< each warpgroup's KV tiles end at its own last row
  bool dynamic = false;         ///< blocks take query tiles from a counter in the workspace
  bool affine_product = false;  ///< the product S adds what an affine score function grows by
  bool affine_reach = false;    ///< KV tiles out of an affine score function's reach are left out
  bool exact_max = false;       ///< P is relative to the exact maximum of a row's scores
  bool scheduled = false;       ///< over pages: thread blocks take their parts of a schedule
  bool own_parts = false;       ///< likewise, without a schedule: each block finds its part by itself
  bool wide_boxes = false;      ///< over pages: a copy brings all columns of its rows, not 64
  bool evict_first = false;     ///< K and V are the first to leave the L2 cache
  int split_blocks = 1;         ///< blocks of a cluster, which share the keys of a query tile and merge what they have
  int length_keys = 0;          ///< splits follow from a request's length, of so many keys at least; 0: from the call
  bool whole_tiles = false;     ///< a block folds such splits of the query tiles that it takes whole
  int split_keys = 0;           ///< fixed split size: the softmax of so many keys is formed alone; 0: none

  static const Kernel& kernel() noexcept;
  friend bool operator==(const Sm90Forward&, const Sm90Forward&) = default;
};

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_KERNELS_SM90_FORWARD_HPP_
