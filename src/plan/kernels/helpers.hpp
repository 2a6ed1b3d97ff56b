#ifndef FA_SRC_PLAN_KERNELS_HELPERS_HPP_
#define FA_SRC_PLAN_KERNELS_HELPERS_HPP_

// The kernels around those that multiply, whose specs are heads alone.
namespace fa::plan {

struct Kernel;

/// Of a split forward's partial results.
struct ForwardCombine {
  bool folds = false;  ///< one split after the other, by the operations of a block that has all of a query tile

  static const Kernel& kernel() noexcept;
  friend bool operator==(const ForwardCombine&, const ForwardCombine&) = default;
};

/// Row statistics of the backward, and a zeroed accumulator.
struct BackwardPreprocess {
  static const Kernel& kernel() noexcept;
  friend bool operator==(const BackwardPreprocess&, const BackwardPreprocess&) = default;
};

/// dQ from its accumulator.
struct BackwardConvert {
  static const Kernel& kernel() noexcept;
  friend bool operator==(const BackwardConvert&, const BackwardConvert&) = default;
};

/// Of a split backward's partial dK and dV.
struct BackwardReduce {
  static const Kernel& kernel() noexcept;
  friend bool operator==(const BackwardReduce&, const BackwardReduce&) = default;
};

/// The gradient of the sinks.
struct BackwardSink {
  static const Kernel& kernel() noexcept;
  friend bool operator==(const BackwardSink&, const BackwardSink&) = default;
};

/// Zeroes (or another value) in the rows of a packed tensor that belong to no sequence.
struct ClearPadding {
  static const Kernel& kernel() noexcept;
  friend bool operator==(const ClearPadding&, const ClearPadding&) = default;
};

/// The greatest norms of rows of q and of k, by head.
struct RowNorms {
  static const Kernel& kernel() noexcept;
  friend bool operator==(const RowNorms&, const RowNorms&) = default;
};

/// The parts of thread blocks of a scheduled forward.
struct Schedule {
  /// KV tiles that an item costs besides, where equal items are not cut if parts of whole ones, or whole parts of one,
  /// are hardly longer. 0: items are cut anywhere.
  int whole_items = 0;

  static const Kernel& kernel() noexcept;
  friend bool operator==(const Schedule&, const Schedule&) = default;
};

/// Lists of key tiles, for tiles of rows, that a mask function keeps something of.
struct MaskRows {
  bool in_order = false;  ///< for a fixed order of sums, whatever is kept of a tile

  static const Kernel& kernel() noexcept;
  friend bool operator==(const MaskRows&, const MaskRows&) = default;
};

/// Lists of row tiles, for tiles of keys.
struct MaskKeys {
  static const Kernel& kernel() noexcept;
  friend bool operator==(const MaskKeys&, const MaskKeys&) = default;
};

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_KERNELS_HELPERS_HPP_
