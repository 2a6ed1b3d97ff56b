#include "gpu/device_case.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace fa::test {
namespace {

constexpr std::size_t kGuard = 256;
constexpr unsigned char kGuardByte = 0x5a;

const driver::Api& api() {
  return driver::api();
}

}  // namespace

void GpuTest::SetUp() {
  setenv("FA_TUNE", "off", 1);  // what is tested is the planner's kernel; tests of tuning take this back
  try {
    context_.emplace(driver::ContextRef::acquire(Device::cuda(0)));
  } catch (const Error& error) {
    if (error.code() != ErrorCode::no_driver) throw;
    GTEST_SKIP() << "no GPU: " << error.what();
  }
  driver::check(api().cuCtxPushCurrent(context_->context()), "cuCtxPushCurrent");
}

void GpuTest::TearDown() {
  if (!context_) return;
  EXPECT_EQ(api().cuCtxSynchronize(), CUDA_SUCCESS) << "the context must stay usable";
  CUcontext popped = nullptr;
  driver::check(api().cuCtxPopCurrent(&popped), "cuCtxPopCurrent");
}

DeviceBuffer::DeviceBuffer(std::size_t size) : size_(size) {
  driver::check(api().cuMemAlloc(&base_, size + 2 * kGuard), "cuMemAlloc");
  driver::check(api().cuMemsetD8(base_, kGuardByte, size + 2 * kGuard), "cuMemsetD8");
}

DeviceBuffer::DeviceBuffer(const std::vector<std::byte>& bytes) : DeviceBuffer(bytes.size()) {
  write(bytes);
}

DeviceBuffer::DeviceBuffer(DeviceBuffer&& other) noexcept
    : base_(std::exchange(other.base_, 0)), size_(std::exchange(other.size_, 0)) {}

DeviceBuffer::~DeviceBuffer() {
  if (base_ != 0) api().cuMemFree(base_);
}

void* DeviceBuffer::data() const {
  return reinterpret_cast<void*>(base_ + kGuard);
}

void DeviceBuffer::write(const std::vector<std::byte>& bytes) {
  if (bytes.empty()) return;
  driver::check(api().cuMemcpyHtoD(base_ + kGuard, bytes.data(), bytes.size()), "cuMemcpyHtoD");
  // The bytes may still be on their way, and a stream of its own would not wait for them.
  driver::check(api().cuStreamSynchronize(nullptr), "cuStreamSynchronize");
}

std::vector<std::byte> DeviceBuffer::read() const {
  std::vector<std::byte> bytes(size_);
  if (size_ != 0) driver::check(api().cuMemcpyDtoH(bytes.data(), base_ + kGuard, size_), "cuMemcpyDtoH");
  return bytes;
}

bool DeviceBuffer::guards_intact() const {
  std::vector<unsigned char> guards(2 * kGuard);
  driver::check(api().cuMemcpyDtoH(guards.data(), base_, kGuard), "cuMemcpyDtoH");
  driver::check(api().cuMemcpyDtoH(guards.data() + kGuard, base_ + kGuard + size_, kGuard), "cuMemcpyDtoH");
  return std::ranges::all_of(guards, [](unsigned char byte) { return byte == kGuardByte; });
}

TensorView DeviceTensor::view() const {
  TensorView result = layout;
  result.data = buffer.data();
  result.read_only = false;
  return result;
}

TensorView DeviceTensor::const_view() const {
  TensorView result = view();
  result.read_only = true;
  return result;
}

DeviceCase::DeviceCase(const AttentionCase& c)
    : problem(c),
      host_inputs(make_inputs(c)),
      host_outputs(make_outputs(c)),
      q(host_inputs.q),
      k(host_inputs.k),
      v(host_inputs.v),
      o(host_outputs.o),
      lse(host_outputs.lse) {}

AttentionConfig config_of(const AttentionCase& c) {
  AttentionConfig config;
  config.head_dim = static_cast<int>(c.d_qk);
  config.head_dim_v = static_cast<int>(c.d_v);
  config.dtype = c.dtype;
  config.scale = c.scale;
  config.causal = c.causal;
  config.causal_align = c.causal_align;
  if (size_of(c.dtype) == 1) config.o_dtype = c.o_dtype;
  return config;
}

Bounds bounds(DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return {1.0 / 128, 1e-3};  // P and O carry 8 bits each
    case DType::f16:
      return {1.0 / 1024, 1e-3};  // 11 bits
    default:
      return {1e-5, 1e-5};
  }
}

void expect_correct(DeviceCase& device) {
  driver::check(api().cuCtxSynchronize(), "cuCtxSynchronize");
  device.o.read(device.host_outputs.o);
  device.lse.read(device.host_outputs.lse);
  const AttentionOutputs expected = reference_f64(device.problem, device.host_inputs);
  const Bounds bound = bounds(device.problem.dtype);
  const ErrorMetrics error = compare(std::as_const(device.host_outputs.o).view(), std::as_const(expected.o).view());
  EXPECT_LE(error.max_abs_over_max_ref, bound.o) << to_string(device.problem);
  // Scores of standard normal inputs reach about 5 * scale * sqrt(d_qk); far beyond 8, float has no finer steps.
  const double largest_score = 5 * std::abs(device.problem.softmax_scale()) * std::sqrt(double(device.problem.d_qk));
  EXPECT_LE(lse_max_abs_error(std::as_const(device.host_outputs.lse).view(), std::as_const(expected.lse).view()),
            bound.lse * std::max(1.0, largest_score / 8))
      << to_string(device.problem);
  for (const DeviceTensor* tensor : {&device.q, &device.k, &device.v, &device.o, &device.lse}) {
    EXPECT_TRUE(tensor->buffer.guards_intact()) << "written outside of a tensor: " << to_string(device.problem);
  }
}

AttentionCase random_case(std::mt19937_64& random) {
  const auto pick = [&](std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(high - low + 1));
  };
  AttentionCase c;
  c.b = pick(1, 3);
  c.h_kv = pick(1, 3);
  c.h_q = c.h_kv * pick(1, 4);
  c.s_q = pick(1, 700);
  c.s_kv = pick(1, 900);
  const std::int64_t dims[] = {24, 64, 80, 128};
  c.d_qk = dims[pick(0, 3)];
  c.d_v = dims[pick(0, 3)];
  c.dtype = static_cast<DType>(pick(0, 2));
  c.causal = pick(0, 1) == 1;
  c.causal_align = static_cast<CausalAlign>(pick(0, 1));
  c.layout = static_cast<Layout>(pick(0, 1));
  c.seed = random();
  return c;
}

void run_case(const AttentionCase& c, const AttentionConfig& config) {
  SCOPED_TRACE(to_string(c));
  DeviceCase device(c);
  const Attention attention = Attention::create(config);
  attention.forward(device.inputs(), device.outputs());
  expect_correct(device);
}

}  // namespace fa::test
