#include "gpu/packed_case.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <ostream>
#include <string>
#include <utility>

#include "reference/packed.hpp"
#include "support/error_bounds.hpp"
#include "support/gradient_bounds.hpp"

namespace fa::test {
namespace {

std::vector<std::byte> bytes_of(const std::vector<std::int32_t>& values) {
  std::vector<std::byte> bytes(values.size() * sizeof(std::int32_t));
  if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

PackedSequences host_sequences(const PackedCase& c) {
  return {.b = static_cast<std::int64_t>(c.cu_q.size()) - 1,
          .cu_seqlens_q = c.cu_q.data(),
          .cu_seqlens_kv = c.cu_kv.data(),
          .seqused_q = c.used_q.empty() ? nullptr : c.used_q.data(),
          .seqused_kv = c.used_kv.empty() ? nullptr : c.used_kv.data()};
}

template <class Args>
void set_common(const PackedCase& c, std::vector<expression::CapturedView>& views, Args& args) {
  args.scale = static_cast<double>(c.attention.softmax_scale());
  args.causal = c.attention.causal;
  args.causal_align = c.attention.causal_align;
  args.dropout = {double{c.dropout}, c.state.seed, c.state.offset};
  args.f64 = true;
  if (c.variant != nullptr) args.variant = variant_args(*c.variant, views);
}

/// What an error may be of the largest result, or of the terms that cancel in it; three times as much with a fast tanh.
double tolerance(const PackedCase& c) {
  const DType dtype = c.attention.dtype;
  const bool tanh = c.variant != nullptr && c.variant->config.score.expression.find("tanh") != std::string::npos;
  return (tanh ? 3 : 1) * (dtype == DType::bf16 ? 1.5e-2 : dtype == DType::f16 ? 2e-3 : 2e-5);
}

double lse_tolerance(const PackedCase& c) {
  const bool f32 = c.attention.dtype == DType::f32;
  if (c.variant == nullptr) return f32 ? 1e-5 : 1e-3;
  return f32 ? 1e-4 : 5e-3;
}

AttentionCase of_dtype(AttentionCase c, DType dtype) {
  c.dtype = dtype;
  return c;
}

}  // namespace

DeviceVariant::DeviceVariant(const VariantCase& c) : sink(c.sink.bytes), dsink(c.sink.bytes.size()) {
  for (const NamedTensor& tensor : c.captures) {
    captures.emplace_back(tensor.bytes);
    gradients.emplace_back(tensor.requires_grad ? static_cast<std::size_t>(tensor.elements()) * sizeof(float) : 0);
    TensorView view = tensor.view();
    view.data = captures.back().data();
    given.add(tensor.by_value ? Captured(tensor.name, tensor.number()) : Captured(tensor.name, view));
    if (!tensor.requires_grad) continue;
    view.dtype = DType::f32;
    view.data = gradients.back().data();
    wanted.add({tensor.name, view});
  }
  if (!c.config.sink) return;
  sink_view = c.sink.view();
  sink_view.data = sink.data();
  dsink_view = sink_view;
  dsink_view.data = dsink.data();
}

AttentionConfig PackedCase::config() const {
  AttentionConfig config = variant != nullptr ? variant->config : config_of(attention);
  config.varlen = packed();
  config.zero_padding = zero_padding;
  config.dropout = dropout;
  config.deterministic = deterministic;
  config.kernel = kernel;
  config.kernel_backward = kernel_backward;
  return config;
}

AttentionShape PackedCase::shape() const {
  AttentionShape shape{.b = attention.b, .h_q = attention.h_q, .h_kv = attention.h_kv};
  shape.s_q = packed() ? max_s_q : attention.s_q;
  shape.s_kv = packed() ? max_s_kv : attention.s_kv;
  if (!packed()) return shape;
  shape.b = static_cast<std::int64_t>(cu_q.size()) - 1;
  shape.total_q = attention.s_q;
  shape.total_kv = attention.s_kv;
  return shape;
}

void PrintTo(const PackedCase& c, std::ostream* out) {
  *out << to_string(c.attention) << " dropout " << c.dropout << (c.deterministic ? " deterministic" : "");
  if (c.variant != nullptr) PrintTo(*c.variant, out);
  if (c.packed()) *out << ", " << c.cu_q.size() - 1 << " sequences, longest " << c.max_s_q << "x" << c.max_s_kv;
}

std::vector<std::int32_t> cumulative(const std::vector<std::int32_t>& lengths, std::int32_t first) {
  std::vector<std::int32_t> sums{first};
  for (const std::int32_t length : lengths) sums.push_back(sums.back() + length);
  return sums;
}

DevicePackedCase::DevicePackedCase(const PackedCase& c)
    : problem(c),
      host(make_inputs(c.attention)),
      host_dout(make_dout(c.attention)),
      host_dlse(make_dlse(c.attention)),
      q(host.q),
      k(host.k),
      v(host.v),
      o(make_outputs(c.attention).o),
      lse(make_outputs(c.attention).lse),
      dout(host_dout),
      dlse(host_dlse),
      dq(make_gradients(c.attention).dq),
      dk(make_gradients(c.attention).dk),
      dv(make_gradients(c.attention).dv),
      cu_q(bytes_of(c.cu_q)),
      cu_kv(bytes_of(c.cu_kv)),
      used_q(bytes_of(c.used_q)),
      used_kv(bytes_of(c.used_kv)),
      variant(c.variant != nullptr ? std::make_unique<DeviceVariant>(*c.variant) : nullptr) {
  if (c.packed()) set_lengths(c.cu_q, c.cu_kv);
}

void DevicePackedCase::set_lengths(const std::vector<std::int32_t>& q_lengths,
                                   const std::vector<std::int32_t>& kv_lengths) {
  problem.cu_q = q_lengths;
  problem.cu_kv = kv_lengths;
  cu_q.write(bytes_of(q_lengths));
  cu_kv.write(bytes_of(kv_lengths));
  const auto spoil = [&](HostTensor tensor, DeviceTensor& target, bool keys) {
    const TensorView view = tensor.view();
    for (std::int64_t h = 0; h < view.shape[1]; ++h) {
      for (std::int64_t row = 0; row < view.shape[2]; ++row) {
        if (in_sequence(row, keys)) continue;
        for (std::int64_t d = 0; d < view.shape[3]; ++d) tensor.set(0, h, row, d, std::nan(""));
      }
    }
    target.buffer.write(tensor.bytes());
  };
  spoil(host.q, q, false);
  spoil(host.k, k, true);
  spoil(host.v, v, true);
  spoil(host_dout, dout, false);
}

void DevicePackedCase::forget() {
  const AttentionOutputs outputs = make_outputs(problem.attention);
  const AttentionGradients gradients = make_gradients(problem.attention);
  o.buffer.write(outputs.o.bytes());
  lse.buffer.write(outputs.lse.bytes());
  dq.buffer.write(gradients.dq.bytes());
  dk.buffer.write(gradients.dk.bytes());
  dv.buffer.write(gradients.dv.bytes());
}

ForwardInputs DevicePackedCase::inputs() const {
  ForwardInputs in{q.const_view(), k.const_view(), v.const_view(), {}, {}};
  if (problem.dropout > 0) in.dropout = problem.state;
  if (variant != nullptr) in.captures = variant->given;
  if (variant != nullptr) in.sink = variant->sink_view;
  if (!problem.packed()) return in;
  const auto ints = [](const DeviceBuffer& buffer) {
    return buffer.size() == 0 ? nullptr : static_cast<const std::int32_t*>(buffer.data());
  };
  in.sequences = {.b = static_cast<std::int64_t>(problem.cu_q.size()) - 1,
                  .cu_seqlens_q = ints(cu_q),
                  .cu_seqlens_kv = ints(cu_kv),
                  .seqused_q = ints(used_q),
                  .seqused_kv = ints(used_kv),
                  .max_s_q = problem.max_s_q,
                  .max_s_kv = problem.max_s_kv};
  return in;
}

BackwardInputs DevicePackedCase::backward_inputs() const {
  const ForwardInputs in = inputs();
  return {.q = in.q,
          .k = in.k,
          .v = in.v,
          .o = o.const_view(),
          .lse = lse.const_view(),
          .dout = dout.const_view(),
          .dlse = problem.dlse ? dlse.const_view() : TensorView{},
          .captures = in.captures,
          .sink = in.sink,
          .sequences = in.sequences,
          .dropout = in.dropout};
}

BackwardOutputs DevicePackedCase::backward_outputs() const {
  BackwardOutputs out{dq.view(), dk.view(), dv.view()};
  if (variant != nullptr) out.captures = variant->wanted;
  if (variant != nullptr) out.dsink = variant->dsink_view;
  return out;
}

bool DevicePackedCase::in_sequence(std::int64_t row, bool keys) const {
  if (!problem.packed()) return true;
  const std::vector<std::int32_t>& cu = keys ? problem.cu_kv : problem.cu_q;
  const std::vector<std::int32_t>& used = keys ? problem.used_kv : problem.used_q;
  const auto after = std::upper_bound(cu.begin(), cu.end(), row);
  if (after == cu.begin() || after == cu.end()) return false;
  const auto i = static_cast<std::size_t>(after - cu.begin()) - 1;
  return used.empty() || row < cu[i] + used[i];
}

AttentionOutputs DevicePackedCase::exact() const {
  AttentionOutputs outputs = make_outputs(of_dtype(problem.attention, DType::f64));
  reference::ForwardArgs args;
  args.q = host.q.view();
  args.k = host.k.view();
  args.v = host.v.view();
  args.o = outputs.o.view();
  args.lse = outputs.lse.view();
  std::vector<expression::CapturedView> views;
  set_common(problem, views, args);
  if (problem.packed()) {
    reference::forward(args, host_sequences(problem), true);
  } else {
    reference::forward(args);
  }
  return outputs;
}

void DevicePackedCase::expect_near(const char* name, const DeviceTensor& actual, const HostTensor& expected, bool keys,
                                   double terms, double bound) {
  HostTensor result = name == std::string("lse") ? make_outputs(problem.attention).lse : HostTensor();
  if (name == std::string("o")) result = make_outputs(problem.attention).o;
  if (name == std::string("dq")) result = make_gradients(problem.attention).dq;
  if (name == std::string("dk")) result = make_gradients(problem.attention).dk;
  if (name == std::string("dv")) result = make_gradients(problem.attention).dv;
  actual.read(result);
  EXPECT_TRUE(actual.buffer.guards_intact()) << name;
  const TensorView view = expected.view();
  double worst = 0, largest = terms;
  for (std::int64_t b = 0; b < view.shape[0]; ++b) {
    for (std::int64_t h = 0; h < view.shape[1]; ++h) {
      for (std::int64_t s = 0; s < view.shape[2]; ++s) {
        const bool untouched = !problem.zero_padding && !in_sequence(s, keys);
        for (std::int64_t d = 0; d < (view.rank == 4 ? view.shape[3] : 1); ++d) {
          const double wanted = expected.at(b, h, s, d), got = result.at(b, h, s, d);
          if (std::isfinite(wanted)) largest = std::max(largest, std::abs(wanted));
          const double error = std::abs(got - wanted);
          const bool right = untouched ? std::isnan(got) : got == wanted;
          if (!right) worst = std::isnan(error) || untouched ? HUGE_VAL : std::max(worst, error);
        }
      }
    }
  }
  EXPECT_LE(worst, bound * largest) << name;
}

void DevicePackedCase::expect_forward() {
  driver::check(driver::api().cuCtxSynchronize(), "cuCtxSynchronize");
  const AttentionOutputs expected = exact();
  expect_near("o", o, expected.o, false, 1, tolerance(problem));
  expect_near("lse", lse, expected.lse, false, 1, lse_tolerance(problem));
}

void DevicePackedCase::expect_backward() {
  driver::check(driver::api().cuCtxSynchronize(), "cuCtxSynchronize");
  const AttentionOutputs forward = exact();
  AttentionGradients expected = make_gradients(of_dtype(problem.attention, DType::f64));
  reference::BackwardArgs args;
  args.q = host.q.view();
  args.k = host.k.view();
  args.v = host.v.view();
  args.o = forward.o.view();
  args.lse = forward.lse.view();
  args.dout = std::as_const(host_dout).view();
  if (problem.dlse) args.dlse = std::as_const(host_dlse).view();
  args.dq = expected.dq.view();
  args.dk = expected.dk.view();
  args.dv = expected.dv.view();
  std::vector<expression::CapturedView> views;
  set_common(problem, views, args);
  VariantGradients extra;
  if (problem.variant != nullptr) {
    add_gradients(*problem.variant, views, extra.captures);
    extra.dsink.resize(static_cast<std::size_t>(problem.variant->sink.elements()));
    if (!extra.dsink.empty()) {
      args.variant.dsink = TensorView(extra.dsink.data(), DType::f64, {problem.attention.h_q});
    }
  }
  if (problem.packed()) {
    reference::backward(args, host_sequences(problem), true);
  } else {
    reference::backward(args);
  }
  const double dp = std::sqrt(static_cast<double>(problem.attention.d_v)) / (1 - double{problem.dropout});
  const double scale = std::abs(static_cast<double>(problem.attention.softmax_scale()));
  const double bound = tolerance(problem);
  expect_near("dq", dq, expected.dq, false, dp * scale, bound);
  expect_near("dk", dk, expected.dk, true, dp * scale, bound);
  expect_near("dv", dv, expected.dv, true, 1, bound);
  const PackedSequences sequences = host_sequences(problem);
  if (variant == nullptr) {
    const GradientBounds bounds =
        gradient_bounds(args, problem.attention.dtype, problem.packed() ? &sequences : nullptr);
    AttentionGradients actual = make_gradients(problem.attention);
    dq.read(actual.dq);
    dk.read(actual.dk);
    dv.read(actual.dv);
    const bool untouched = problem.packed() && !problem.zero_padding;
    EXPECT_LE(worst_ratio(actual.dq, expected.dq, bounds.dq, untouched), 1) << "dq";
    EXPECT_LE(worst_ratio(actual.dk, expected.dk, bounds.dk, untouched), 1) << "dk";
    EXPECT_LE(worst_ratio(actual.dv, expected.dv, bounds.dv, untouched), 1) << "dv";
    return;
  }
  const ErrorBounds bounds = error_bounds(args, problem.attention.dtype, problem.packed() ? &sequences : nullptr);
  for (std::size_t i = 0; i < extra.captures.size(); ++i) {
    if (!problem.variant->captures[i].requires_grad) continue;
    fa::test::expect_near("gradient of " + problem.variant->captures[i].name, variant->gradients[i], extra.captures[i],
                          bounds.captures[i]);
  }
  if (problem.variant->config.sink) fa::test::expect_near("dsink", variant->dsink, extra.dsink, bounds.dsink);
}

void expect_near(const std::string& name, const DeviceBuffer& actual, const std::vector<double>& expected,
                 const std::vector<double>& bounds) {
  const std::vector<std::byte> bytes = actual.read();
  std::vector<float> values(bytes.size() / sizeof(float));
  if (!bytes.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  EXPECT_LE(worst_ratio(values, expected, bounds), 1) << name;
  EXPECT_TRUE(actual.guards_intact()) << name;
}

}  // namespace fa::test
