#include "gpu/backward_case.hpp"

#include <algorithm>
#include <cmath>

namespace fa::test {
namespace {

/// What an error may be of the largest gradient, or of the terms that cancel in it: P, dS and the gradients carry 8
/// bits in bf16, 11 in f16.
double tolerance(DType dtype) {
  return dtype == DType::bf16 ? 1.5e-2 : dtype == DType::f16 ? 2e-3 : 2e-5;
}

void expect_near(const char* name, const HostTensor& actual, const HostTensor& expected, double terms, DType dtype) {
  const double bound = tolerance(dtype) * std::max(largest(expected), terms);
  EXPECT_LE(compare(actual.view(), expected.view()).max_abs, bound) << name;
}

}  // namespace

DeviceBackwardCase::DeviceBackwardCase(const AttentionCase& c, bool with_dlse)
    : forward(c),
      has_dlse(with_dlse),
      host_dout(make_dout(c)),
      host_dlse(make_dlse(c)),
      host_gradients(make_gradients(c)),
      dout(host_dout),
      dlse(host_dlse),
      dq(host_gradients.dq),
      dk(host_gradients.dk),
      dv(host_gradients.dv) {
  Attention::create(config_of(c)).forward(forward.inputs(), forward.outputs());
  driver::check(driver::api().cuCtxSynchronize(), "cuCtxSynchronize");
}

BackwardInputs DeviceBackwardCase::inputs() const {
  BackwardInputs inputs;
  inputs.q = forward.q.const_view();
  inputs.k = forward.k.const_view();
  inputs.v = forward.v.const_view();
  inputs.o = forward.o.const_view();
  inputs.lse = forward.lse.const_view();
  inputs.dout = dout.const_view();
  if (has_dlse) inputs.dlse = dlse.const_view();
  return inputs;
}

BackwardOutputs DeviceBackwardCase::outputs() const {
  BackwardOutputs outputs;
  if (wanted.dq) outputs.dq = dq.view();
  if (wanted.dk) outputs.dk = dk.view();
  if (wanted.dv) outputs.dv = dv.view();
  return outputs;
}

void DeviceBackwardCase::forget() {
  AttentionGradients fresh = make_gradients(forward.problem);
  dq.buffer.write(fresh.dq.bytes());
  dk.buffer.write(fresh.dk.bytes());
  dv.buffer.write(fresh.dv.bytes());
}

std::vector<std::byte> DeviceBackwardCase::bits(bool all) const {
  std::vector<std::byte> result = dk.buffer.read();
  const auto append = [&](const std::vector<std::byte>& more) {
    result.insert(result.end(), more.begin(), more.end());
  };
  append(dv.buffer.read());
  if (all) append(dq.buffer.read());
  return result;
}

void expect_correct(DeviceBackwardCase& device) {
  driver::check(driver::api().cuCtxSynchronize(), "cuCtxSynchronize");
  const AttentionCase& c = device.forward.problem;
  AttentionGradients& actual = device.host_gradients;
  device.dq.read(actual.dq);
  device.dk.read(actual.dk);
  device.dv.read(actual.dv);
  const AttentionGradients expected =
      reference_gradients_f64(c, device.forward.host_inputs, std::as_const(device.host_dout).view(),
                              device.has_dlse ? std::as_const(device.host_dlse).view() : TensorView{});
  const double dp = std::sqrt(static_cast<double>(c.d_v));  // dout V^T and rowsum(dout o O)
  const double scale = std::abs(static_cast<double>(c.softmax_scale()));
  const auto expect = [&](const char* name, bool wanted, HostTensor& values, const HostTensor& exact, double terms) {
    if (wanted) return expect_near(name, values, exact, terms, c.dtype);
    AttentionGradients fresh = make_gradients(c);
    HostTensor& untouched = name[1] == 'q' ? fresh.dq : name[1] == 'k' ? fresh.dk : fresh.dv;
    EXPECT_EQ(values.bytes(), untouched.bytes()) << name << " is not wanted";
  };
  expect("dq", device.wanted.dq, actual.dq, expected.dq, dp * scale);
  expect("dk", device.wanted.dk, actual.dk, expected.dk, dp * scale);
  expect("dv", device.wanted.dv, actual.dv, expected.dv, 1);
  for (const DeviceTensor* tensor : {&device.dq, &device.dk, &device.dv, &device.dout, &device.forward.q}) {
    EXPECT_TRUE(tensor->buffer.guards_intact()) << "written outside of a tensor: " << to_string(c);
  }
}

void run_backward_case(const AttentionCase& c, const AttentionConfig& config, bool with_dlse) {
  SCOPED_TRACE(to_string(c));
  DeviceBackwardCase device(c, with_dlse);
  Attention::create(config).backward(device.inputs(), device.outputs());
  expect_correct(device);
}

AttentionShape shape_of(const AttentionCase& c) {
  return {.b = c.b, .h_q = c.h_q, .h_kv = c.h_kv, .s_q = c.s_q, .s_kv = c.s_kv};
}

}  // namespace fa::test
