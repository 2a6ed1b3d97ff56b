#ifndef FA_SRC_PLAN_KERNELS_SM80_FP8_FORWARD_HPP_
#define FA_SRC_PLAN_KERNELS_SM80_FP8_FORWARD_HPP_

namespace fa::plan {

struct Kernel;

/// What a spec of the mma.sync forward of 8-bit floats has besides its head.
struct Sm80Fp8Forward {
  bool q_in_registers = false;
  bool single_level = false;  ///< the tensor cores add to O itself
  bool half_output = false;   ///< O is f16, else bf16
  bool byte_output = false;   ///< O is e4m3
  bool key_scales = false;    ///< each key has a scale for its row of K
  bool value_scales = false;  ///< and for that of V

  static const Kernel& kernel() noexcept;
  friend bool operator==(const Sm80Fp8Forward&, const Sm80Fp8Forward&) = default;
};

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_KERNELS_SM80_FP8_FORWARD_HPP_
