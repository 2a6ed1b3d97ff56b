#ifndef FA_SRC_PLAN_KERNELS_SM90_FP8_FORWARD_HPP_
#define FA_SRC_PLAN_KERNELS_SM90_FP8_FORWARD_HPP_

namespace fa::plan {

struct Kernel;

/// What a spec of the Hopper forward of 8-bit floats has besides its head.
struct Sm90Fp8Forward {
  int q_buffers = 1;          ///< query tiles in flight
  int value_columns = 0;      ///< of O, that the tensor cores sum up at a time
  bool take_turns = false;    ///< warpgroups feed the tensor cores one after the other
  bool ahead = false;         ///< scores of the next KV tile are made while O takes what this one adds
  bool single_level = false;  ///< the tensor cores add to O itself
  bool half_output = false;   ///< O is f16, else bf16
  bool byte_output = false;   ///< O is e4m3
  bool key_scales = false;    ///< each key has a scale for its row of K
  bool value_scales = false;  ///< and for that of V
  bool precise = false;       ///< P and V are f16 in their product

  static const Kernel& kernel() noexcept;
  friend bool operator==(const Sm90Fp8Forward&, const Sm90Fp8Forward&) = default;
};

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_KERNELS_SM90_FP8_FORWARD_HPP_
