#ifndef FA_TESTS_GPU_PACKED_CASE_HPP_
#define FA_TESTS_GPU_PACKED_CASE_HPP_

#include <cstdint>
#include <iosfwd>
#include <memory>
#include <string>
#include <vector>

#include "gpu/device_case.hpp"
#include "support/variant_case.hpp"

namespace fa::test {

/// The tensors that functions name, their gradients and the sinks, on the device.
struct DeviceVariant {
  explicit DeviceVariant(const VariantCase& c);

  std::vector<DeviceBuffer> captures, gradients;
  DeviceBuffer sink, dsink;
  Captures given, wanted;
  TensorView sink_view, dsink_view;
};

/// Holds gradients of captures or sinks to float64, by the bounds of support/error_bounds.hpp.
void expect_near(const std::string& name, const DeviceBuffer& actual, const std::vector<double>& expected,
                 const std::vector<double>& bounds);

/// A problem with dropout, or a packed batch, or both, and whatever else a configuration may ask for.
struct PackedCase {
  /// Of a packed batch b is 1, and s_q and s_kv are the rows of the packed tensors.
  AttentionCase attention;
  std::vector<std::int32_t> cu_q = {}, cu_kv = {};      ///< empty: dense
  std::vector<std::int32_t> used_q = {}, used_kv = {};  ///< empty: all rows
  std::int64_t max_s_q = 0, max_s_kv = 0;
  float dropout = 0;
  DropoutState state = {.seed = 17, .offset = 40000000000};
  bool zero_padding = false;
  bool deterministic = false;
  bool dlse = false;
  KernelOverride kernel = {};
  KernelOverride kernel_backward = {};
  /// Functions, windows, chunks and sinks, if any, for the same dtype, head dims and mask; its b counts the sequences.
  std::shared_ptr<const VariantCase> variant = nullptr;

  bool packed() const { return !cu_q.empty(); }
  AttentionConfig config() const;
  AttentionShape shape() const;
};
void PrintTo(const PackedCase& c, std::ostream* out);

/// Cumulative lengths, from `first` on.
std::vector<std::int32_t> cumulative(const std::vector<std::int32_t>& lengths, std::int32_t first = 0);

/// The tensors of a case on the device; rows of no sequence hold NaN, in inputs too.
class DevicePackedCase {
 public:
  explicit DevicePackedCase(const PackedCase& c);

  ForwardInputs inputs() const;
  ForwardOutputs outputs() const { return {o.view(), lse.view()}; }
  BackwardInputs backward_inputs() const;
  BackwardOutputs backward_outputs() const;

  /// Other lengths in the place of the old ones, on both sides.
  void set_lengths(const std::vector<std::int32_t>& cu_q, const std::vector<std::int32_t>& cu_kv);
  /// NaN in every output again.
  void forget();

  /// Waits for the device, then holds what was computed to float64, and the guards to their bytes.
  void expect_forward();
  void expect_backward();

  PackedCase problem;
  AttentionInputs host;
  HostTensor host_dout, host_dlse;
  DeviceTensor q, k, v, o, lse, dout, dlse, dq, dk, dv;
  DeviceBuffer cu_q, cu_kv, used_q, used_kv;
  std::unique_ptr<DeviceVariant> variant;  ///< null: none

 private:
  AttentionOutputs exact() const;
  void expect_near(const char* name, const DeviceTensor& actual, const HostTensor& expected, bool keys, double terms,
                   double bound);
  bool in_sequence(std::int64_t row, bool keys) const;
};

}  // namespace fa::test

#endif  // FA_TESTS_GPU_PACKED_CASE_HPP_
