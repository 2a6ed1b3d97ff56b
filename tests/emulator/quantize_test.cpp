// Codes, scales, means and biases of quantize against the host device, under other schedules, and with mistakes.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <vector>

#include "api/quantize.hpp"
#include "emulator/emulator.hpp"
#include "emulator/placement.hpp"
#include "emulator/quantize_specs.hpp"
#include "emulator/registry.hpp"
#include "plan/catalogue.hpp"

namespace emulator {
namespace {

using fa::DType;
using fa::TensorView;
using fa::plan::KernelSpec;
using fa::test::HostTensor;
using fa::test::Layout;

/// Tensors of a call on the host, with room for what it writes.
struct Data {
  explicit Data(const QuantizeCase& c)
      : q(c.dtype, c.b, c.h_q, c.s_q, c.d, Layout::bhsd),
        k(c.dtype, c.b, c.h_kv, c.s_kv, c.d, Layout::bhsd),
        q_codes(c.codes, c.b, c.h_q, c.s_q, c.d, Layout::bhsd),
        k_codes(c.codes, c.b, c.h_kv, c.s_kv, c.d, Layout::bhsd),
        q_scale(DType::f32, c.b, c.h_q, c.s_q),
        k_scale(DType::f32, c.b, c.h_kv, c.s_kv),
        mean(DType::f32, c.b, c.h_kv, c.d),
        bias(DType::f32, c.b, c.h_q, c.s_q) {
    fa::test::AttentionCase of;
    of.dtype = c.dtype;
    of.b = c.b, of.h_q = c.h_q, of.h_kv = c.h_kv, of.s_q = c.s_q, of.s_kv = c.s_kv, of.d_qk = c.d, of.d_v = c.d;
    fa::test::AttentionInputs inputs = make_inputs(of);
    for_each_row(c.b, c.h_q, c.s_q, [&](std::int64_t b, std::int64_t h, std::int64_t s) {
      for (std::int64_t d = 0; d < c.d; ++d) q.set(b, h, s, d, inputs.q.at(b, h, s, d));
      q_scale.set(b, h, s, 0, 0.02);
    });
    for_each_row(c.b, c.h_kv, c.s_kv, [&](std::int64_t b, std::int64_t h, std::int64_t s) {
      for (std::int64_t d = 0; d < c.d; ++d) {
        k.set(b, h, s, d, inputs.k.at(b, h, s, d) + static_cast<double>((d + 3 * h + 5 * b) % 7 - 3));
      }
      k_scale.set(b, h, s, 0, 0.02);
    });
    for_each_row(c.b, c.h_kv, c.d, [&](std::int64_t b, std::int64_t h, std::int64_t d) {
      mean.set(b, h, d, 0, static_cast<double>(d % 5) - 2);
    });
    if (c.s_q > 4) {  // a row of zeros, and one with an infinity
      fill(q, {2, 1}, 0);
      q.set(0, 0, 3, 1, HUGE_VAL);
    }
  }

  HostTensor q, k, q_codes, k_codes, q_scale, k_scale, mean, bias;
};

fa::AttentionConfig config_of(const QuantizeCase& c) {
  fa::AttentionConfig config;
  config.dtype = c.codes;
  config.head_dim = static_cast<int>(c.d);
  return config;
}

fa::QuantizeInputs inputs_of(const QuantizeCase& c, const std::array<TensorView, 8>& views) {
  fa::QuantizeInputs in;
  in.q = views[0];
  in.k = views[1];
  in.q_codes = views[2];
  in.k_codes = views[3];
  in.q_scale = views[4];
  in.k_scale = views[5];
  in.scales_given = c.scales_given;
  in.mean_given = c.smooths && c.mean_given;
  if (!c.smooths) return in;
  in.k_mean = views[6];
  in.row_bias = views[7];
  return in;
}

/// What the host device makes of the tensors.
Data expected_of(const QuantizeCase& c) {
  Data data(c);
  const fa::QuantizeInputs in =
      inputs_of(c, {data.q.view(), data.k.view(), data.q_codes.view(), data.k_codes.view(), data.q_scale.view(),
                    data.k_scale.view(), data.mean.view(), data.bias.view()});
  fa::Attention::create(config_of(c), fa::Device::host()).quantize(in);
  return data;
}

TensorView written(const Placed& placed, const HostTensor& tensor) {
  TensorView view = view_of(placed, tensor);
  view.read_only = false;
  return view;
}

/// `name`: of the kernel in the place of that of `mutated`.
Data run(const QuantizeCase& c, std::uint64_t seed, const std::string& name = {}, const KernelSpec& mutated = {}) {
  Data data(c);
  Memory memory;
  const Placement placement = c.aligned ? Placement::gaps : Placement::padded;
  const auto input = [&](const char* label, const HostTensor& tensor, Placement how, bool aligned) {
    return place_input(memory, label, tensor, how, aligned);
  };
  const auto given = [&](const char* label, const HostTensor& tensor) {
    return c.scales_given ? input(label, tensor, Placement::bhsd, true)
                          : place_output(memory, label, tensor, Placement::bhsd, true);
  };
  const Placed q_codes = place_output(memory, "q_codes", data.q_codes, Placement::bhsd, true);
  const Placed k_codes = place_output(memory, "k_codes", data.k_codes, Placement::gaps, true);
  const Placed q_scale = given("q_scale", data.q_scale), k_scale = given("k_scale", data.k_scale);
  const Placed mean = place_state(memory, "k_mean", data.mean, Placement::bhsd, true);
  const Placed bias = place_output(memory, "row_bias", data.bias, Placement::bhsd, true);
  const fa::QuantizeInputs in =
      inputs_of(c, {view_of(input("q", data.q, placement, c.aligned), data.q),
                    view_of(input("k", data.k, placement, c.aligned), data.k), written(q_codes, data.q_codes),
                    written(k_codes, data.k_codes), written(q_scale, data.q_scale), written(k_scale, data.k_scale),
                    written(mean, data.mean), written(bias, data.bias)});
  const fa::api::QuantizeCall call = fa::api::check_quantize(config_of(c), in);
  for (const fa::plan::QuantizePass& pass : call.given()) {
    const KernelSpec spec = quantize_spec(pass, {8, 0, '\0'});
    EXPECT_EQ(spec.aligned, c.aligned);
    fa::kernel::QuantizeParams params;
    LaunchOptions options;
    options.grid = static_cast<int>(quantize_params(pass, spec, params));
    const RegisteredKernel& kernel = registered_kernel(!name.empty() && spec == mutated ? name : canonical(spec));
    options.threads = kernel.threads;
    options.resident = kernel.min_blocks;
    options.shared_bytes = fa::plan::shared_bytes(spec);
    options.seed = seed;
    launch(kernel.entry, &params, memory, options);
    memory.end_launch();
  }
  fetch(memory, q_codes, data.q_codes);
  fetch(memory, k_codes, data.k_codes);
  if (!c.scales_given) {
    fetch(memory, q_scale, data.q_scale);
    fetch(memory, k_scale, data.k_scale);
  }
  if (c.smooths) {
    fetch(memory, mean, data.mean);
    fetch(memory, bias, data.bias);
  }
  return data;
}

double difference(double x, double y) {
  return x == y || (std::isnan(x) && std::isnan(y)) ? 0 : std::isfinite(x - y) ? std::abs(x - y) : HUGE_VAL;
}

/// The greatest difference from what is expected, as a multiple of what the order of sums may make of it.
double worst_of(const QuantizeCase& c, const Data& actual, const Data& expected) {
  double worst = 0;
  const auto look = [&](const HostTensor& x, const HostTensor& y, double allowed) {
    const TensorView view = x.view();
    for_each_row(view.shape[0], view.shape[1], view.shape[2], [&](std::int64_t b, std::int64_t h, std::int64_t s) {
      for (std::int64_t d = 0; d < (view.rank == 4 ? view.shape[3] : 1); ++d) {
        const double error = difference(x.at(b, h, s, d), y.at(b, h, s, d));
        const double of = allowed == 0 ? 0 : allowed * (view.rank == 4 ? 1 : 1 + std::abs(y.at(b, h, s, d)));
        worst = std::max(worst, error == 0 ? 0 : of == 0 ? HUGE_VAL : error / of);
      }
    });
  };
  look(actual.q_codes, expected.q_codes, 0);
  look(actual.q_scale, expected.q_scale, 0);
  const bool exact = !c.smooths || c.mean_given;
  look(actual.k_scale, expected.k_scale, exact ? 0 : 1e-6);
  // A mean that is off by its last bit may bring a code to its neighbour.
  look(actual.k_codes, expected.k_codes, exact ? 0 : c.codes == DType::i8 ? 1 : 32);
  if (c.smooths) look(actual.mean, expected.mean, 2e-6);
  if (c.smooths) look(actual.bias, expected.bias, 2e-5);
  return worst;
}

TEST(Quantize, EveryCaseIsWhatTheHostMakes) {
  for (const QuantizeCase& c : quantize_cases()) {
    SCOPED_TRACE(c.name);
    const Data expected = expected_of(c);
    Data first(c);
    ASSERT_NO_THROW(first = run(c, 1));
    EXPECT_LE(worst_of(c, first, expected), 1);
    Data again(c);
    ASSERT_NO_THROW(again = run(c, 2));
    EXPECT_EQ(again.k_codes.bytes(), first.k_codes.bytes());
    EXPECT_EQ(again.mean.bytes(), first.mean.bytes());
    EXPECT_EQ(again.bias.bytes(), first.bias.bytes());
  }
}

class QuantizeMutants : public testing::TestWithParam<std::size_t> {};

TEST_P(QuantizeMutants, AreCaughtAndNamed) {
  const StatisticsMutation& mutation = quantize_mutations()[GetParam()];
  const QuantizeCase& c = quantize_case_named(mutation.subject);
  const Data expected = expected_of(c);
  try {
    const Data actual = run(c, 1, "mutant " + mutation.name, quantized_subject_of(mutation));
    EXPECT_TRUE(mutation.faults.empty()) << "not caught";
    EXPECT_GT(worst_of(c, actual, expected), 1) << "harmless";
  } catch (const Fault& fault) {
    EXPECT_TRUE(mutation.faults.contains(fault.kind)) << fault.what();
  }
}

INSTANTIATE_TEST_SUITE_P(All, QuantizeMutants, testing::Range<std::size_t>(0, quantize_mutations().size()),
                         [](const testing::TestParamInfo<std::size_t>& parameter) {
                           return quantize_mutations()[parameter.param].name;
                         });

}  // namespace
}  // namespace emulator
