#ifndef FA_SRC_PLAN_KERNELS_SM90_WIDE_FORWARD_HPP_
#define FA_SRC_PLAN_KERNELS_SM90_WIDE_FORWARD_HPP_

namespace fa::plan {

struct Kernel;

/// What a spec of the Hopper forward for wide heads has besides its head.
struct Sm90WideForward {
  bool scheduled = false;     ///< thread blocks take their parts of a schedule, and may share the keys of a query tile
  bool value_in_key = false;  ///< V is the first columns of K
  bool multicast = false;     ///< of keys, to the two blocks of a cluster, which have neighbouring heads

  static const Kernel& kernel() noexcept;
  friend bool operator==(const Sm90WideForward&, const Sm90WideForward&) = default;
};

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_KERNELS_SM90_WIDE_FORWARD_HPP_
