#ifndef FA_TESTS_GPU_BACKWARD_CASE_HPP_
#define FA_TESTS_GPU_BACKWARD_CASE_HPP_

#include "gpu/device_case.hpp"

namespace fa::test {

/// A case with what `forward` made of it on the device, and NaN-filled gradients.
struct DeviceBackwardCase {
  explicit DeviceBackwardCase(const AttentionCase& c, bool with_dlse = false);

  BackwardInputs inputs() const;
  BackwardOutputs outputs() const;  ///< those that are `wanted`
  /// NaN again.
  void forget();
  /// Every bit of dk and dv, and with `all` of dq.
  std::vector<std::byte> bits(bool all) const;

  DeviceCase forward;
  bool has_dlse;
  Gradients wanted = {};
  HostTensor host_dout, host_dlse;
  AttentionGradients host_gradients;
  DeviceTensor dout, dlse, dq, dk, dv;
};

/// Waits for the device, then holds the gradients to the float64 reference and the guards to their bytes.
void expect_correct(DeviceBackwardCase& device);

/// forward and backward on the default stream, then expect_correct.
void run_backward_case(const AttentionCase& c, const AttentionConfig& config, bool with_dlse = false);

AttentionShape shape_of(const AttentionCase& c);

}  // namespace fa::test

#endif  // FA_TESTS_GPU_BACKWARD_CASE_HPP_
