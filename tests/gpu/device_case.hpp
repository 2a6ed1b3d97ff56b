#ifndef FA_TESTS_GPU_DEVICE_CASE_HPP_
#define FA_TESTS_GPU_DEVICE_CASE_HPP_

#include <gtest/gtest.h>

#include <cstddef>
#include <random>
#include <vector>

#include <fa/attention.hpp>

#include "driver/driver.hpp"
#include "support/attention_case.hpp"

namespace fa::test {

/// Skips the test, saying so, on a machine without a GPU; else makes GPU 0's primary context current for the test.
class GpuTest : public ::testing::Test {
 protected:
  void SetUp() override;
  void TearDown() override;

 private:
  std::optional<driver::ContextRef> context_;
};

/// Device memory with guard bytes on both sides, which `guards_intact` checks.
class DeviceBuffer {
 public:
  explicit DeviceBuffer(std::size_t size);
  explicit DeviceBuffer(const std::vector<std::byte>& bytes);
  ~DeviceBuffer();
  DeviceBuffer(DeviceBuffer&& other) noexcept;
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  void* data() const;
  std::size_t size() const { return size_; }
  void write(const std::vector<std::byte>& bytes);
  std::vector<std::byte> read() const;
  bool guards_intact() const;

 private:
  CUdeviceptr base_ = 0;
  std::size_t size_ = 0;
};

/// A copy of a host tensor on the device, with the same shape and strides.
struct DeviceTensor {
  explicit DeviceTensor(const HostTensor& host) : buffer(host.bytes()), layout(host.view()) {}
  TensorView view() const;
  TensorView const_view() const;
  /// Copies back into a host tensor of the same layout.
  void read(HostTensor& host) const { host.bytes() = buffer.read(); }

  DeviceBuffer buffer;
  TensorView layout;
};

/// The inputs of a case on the device, and NaN-filled outputs.
struct DeviceCase {
  explicit DeviceCase(const AttentionCase& c);
  ForwardInputs inputs() const { return {q.const_view(), k.const_view(), v.const_view()}; }
  ForwardOutputs outputs() const { return {o.view(), lse.view()}; }

  AttentionCase problem;
  AttentionInputs host_inputs;
  AttentionOutputs host_outputs;
  DeviceTensor q, k, v, o, lse;
};

AttentionConfig config_of(const AttentionCase& c);

/// Error bounds of a dtype's kernels against float64, for standard normal inputs.
struct Bounds {
  double o;    ///< max |error| / max |O|
  double lse;  ///< max |error|
};
Bounds bounds(DType dtype);

/// Waits for the device, then holds the outputs to the float64 reference and the guards to their bytes.
void expect_correct(DeviceCase& device);

/// A few heads and hundreds of rows and keys, of any 16-bit or f32 type, mask and memory order.
AttentionCase random_case(std::mt19937_64& random);

/// forward on the default stream, then expect_correct.
void run_case(const AttentionCase& c, const AttentionConfig& config);

}  // namespace fa::test

#endif  // FA_TESTS_GPU_DEVICE_CASE_HPP_
