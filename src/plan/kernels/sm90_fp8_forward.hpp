#ifndef FA_SRC_PLAN_KERNELS_SM90_FP8_FORWARD_HPP_
#define FA_SRC_PLAN_KERNELS_SM90_FP8_FORWARD_HPP_

namespace fa::plan {

struct Kernel;

/// What a spec of the Hopper forward of 8-bit floats has besides its head.
struct Sm90Fp8Forward {
  int q_buffers = 1;           ///< query tiles in flight
  int value_columns = 0;       ///< of O, that the tensor cores sum up at a time
  bool take_turns = false;     ///< warpgroups feed the tensor cores one after the other
  bool ahead = false;          ///< scores of the next KV tile are made while O takes what this one adds
  bool single_level = false;   ///< the tensor cores add to O itself
  bool half_output = false;    ///< O is f16, else bf16
  bool byte_output = false;    ///< O is e4m3
  bool key_scales = false;     ///< each key has a scale for its row of K
  bool value_scales = false;   ///< and for that of V
  bool precise = false;        ///< P and V are f16 in their product
  bool half_bytes = false;     ///< P becomes f16 on its way to e4m3
  int polynomials = 0;         ///< of 8 exponentials, by the units of products
  bool shared_scales = false;  ///< of keys reach the threads that have these by shared memory
  bool scales_of_all = false;  ///< P is relative to the greatest scale of V so far, not to that of a KV tile

  static const Kernel& kernel() noexcept;
  friend bool operator==(const Sm90Fp8Forward&, const Sm90Fp8Forward&) = default;
};

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_KERNELS_SM90_FP8_FORWARD_HPP_
