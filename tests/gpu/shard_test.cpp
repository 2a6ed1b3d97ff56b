// Calls that are parts of a larger attention on a GPU, forward and backward, against the float64 reference and against
// the whole; and calls that leave multiprocessors to others.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "gpu/backward_case.hpp"
#include "gpu/captured_graph.hpp"
#include "gpu/packed_case.hpp"
#include "gpu/scoped_stream.hpp"
#include "support/variant_case.hpp"

namespace fa::test {
namespace {

/// What is computed besides plain attention, and where its calls may stand.
struct Kind {
  VariantChoice choice;
  DType dtype = DType::bf16;
  std::int64_t d = 64;
  bool causal = false;
  float dropout = 0;
};

std::vector<Kind> kinds() {
  std::vector<Kind> list;
  for (const VariantChoice& choice : variant_choices()) {
    if (choice.name == "tree" || choice.name == "ahead") continue;
    list.push_back({choice, list.size() % 3 == 0 ? DType::f16 : DType::bf16, list.size() % 2 == 0 ? 64 : 128,
                    list.size() % 2 == 0});
  }
  list.push_back({{"plain", {}}, DType::bf16, 128, true});
  list.push_back({{"plain", {}}, DType::bf16, 128, true, 0.2f});
  list.push_back({{"plain", {}}, DType::f16, 64, false, 0.5f});
  list.push_back({{"plain", {}}, DType::f32, 64, true, 0.5f});
  AttentionConfig chunks;
  chunks.chunk = 48;
  list.push_back({{"chunks", chunks}, DType::bf16, 64, true, 0.3f});
  return list;
}

/// Of a whole of 3 requests, 8 query and 4 KV heads, 700 rows and 900 keys.
struct Part {
  std::int64_t b, h_kv, s_q, s_kv;
  CausalAlign align;
  ShardPlace place;
};
std::vector<Part> parts() {
  using enum CausalAlign;
  return {{2, 2, 300, 400, bottom_right, {.b = 1, .h_q = 4, .q = 192, .kv = 320}},
          {1, 4, 257, 129, top_left, {.b = 2, .q = 416, .kv = 64}},
          {1, 1, 128, 200, bottom_right, {.b = 1, .h_q = 6, .q = 0, .kv = 640}},
          {3, 1, 100, 64, bottom_right, {.h_q = 2, .q = 576, .kv = 0}},
          {2, 2, 150, 170, bottom_right, {.b = 1, .h_q = 4, .q = 1, .kv = 3, .q_step = 4, .kv_step = 4}},
          {1, 2, 130, 220, top_left, {.b = 1, .h_q = 4, .q = 2, .kv = 1, .q_step = 5, .kv_step = 2}}};
}

AttentionCase whole_of(const Kind& kind, CausalAlign align) {
  AttentionCase c;
  c.dtype = kind.dtype;
  c.d_qk = c.d_v = kind.d;
  c.causal = kind.causal;
  c.causal_align = align;
  c.b = 3;
  c.h_q = 8;
  c.h_kv = 4;
  c.s_q = 700;
  c.s_kv = 900;
  return c;
}

VariantCase case_of(const Kind& kind, CausalAlign align) {
  VariantCase c(whole_of(kind, align), kind.choice);
  c.config.dropout = kind.dropout;
  c.drops = kind.dropout > 0;
  c.functions = api::read_functions(c.config, true);
  return c;
}

bool has_form(const VariantCase& c, const ShardPlace& place) {
  const bool masked =
      c.attention.causal || c.config.window_left >= 0 || c.config.window_right >= 0 || c.config.chunk > 0;
  if (masked && place.q_step != place.kv_step) return false;
  const bool strided = place.q_step != 1 || place.kv_step != 1;
  return !(c.drops && strided) && c.config.chunk % place.q_step == 0;
}

/// Of the largest element, as of variants_test.cpp.
double tolerance(const VariantCase& c) {
  const bool tanh = c.config.score.expression.find("tanh") != std::string::npos;
  const double plain = c.attention.dtype == DType::bf16 ? 1.5e-2 : c.attention.dtype == DType::f16 ? 2e-3 : 2e-5;
  return (tanh ? 3 * plain : plain) * (c.drops ? 1 / (1 - static_cast<double>(c.config.dropout)) : 1);
}

void expect_near(const std::string& name, const HostTensor& actual, const HostTensor& expected, double terms,
                 double bound) {
  EXPECT_LE(compare(actual.view(), expected.view()).max_abs, bound * std::max(largest(expected), terms)) << name;
}

struct Results {
  AttentionOutputs outputs;
  AttentionGradients gradients;
};

/// Both calls of a case; nothing for the place of the whole.
class Calls {
 public:
  Calls(const VariantCase& c, const Attention& attention, const std::optional<ShardPlace>& place,
        int max_multiprocessors = 0)
      : c_(c), variant_(c), device_(c.attention), dout_(make_dout(c.attention)), dlse_(make_dlse(c.attention)) {
    ForwardInputs in = device_.inputs();
    in.captures = variant_.given;
    in.sink = variant_.sink_view;
    in.place = place;
    in.max_multiprocessors = max_multiprocessors;
    attention.forward(in, device_.outputs());
    driver::check(driver::api().cuCtxSynchronize(), "cuCtxSynchronize");
    device_.o.read(device_.host_outputs.o);
    device_.lse.read(device_.host_outputs.lse);
    gradients_ = make_gradients(c.attention);
    DeviceTensor dout(dout_), dlse(dlse_), dq(gradients_.dq), dk(gradients_.dk), dv(gradients_.dv);
    BackwardInputs all;
    all.q = in.q, all.k = in.k, all.v = in.v;
    all.o = device_.o.const_view(), all.lse = device_.lse.const_view();
    all.dout = dout.const_view(), all.dlse = dlse.const_view();
    all.captures = variant_.given;
    all.sink = variant_.sink_view;
    all.place = place;
    all.max_multiprocessors = max_multiprocessors;
    attention.backward(all, {dq.view(), dk.view(), dv.view(), variant_.wanted, variant_.dsink_view});
    driver::check(driver::api().cuCtxSynchronize(), "cuCtxSynchronize");
    dq.read(gradients_.dq);
    dk.read(gradients_.dk);
    dv.read(gradients_.dv);
    for (const DeviceTensor* tensor : {&dq, &dk, &dv, &device_.o, &device_.lse}) {
      EXPECT_TRUE(tensor->buffer.guards_intact()) << "written outside of a tensor";
    }
  }

  void expect_reference() {
    const AttentionOutputs expected = reference_f64(c_, device_.host_inputs);
    const double bound = tolerance(c_);
    expect_near("o", device_.host_outputs.o, expected.o, 0, bound);
    EXPECT_LE(lse_max_abs_error(std::as_const(device_.host_outputs.lse).view(), expected.lse.view()),
              c_.attention.dtype == DType::f32 ? 1e-4 : 5e-3);
    const VariantGradients gradients =
        reference_gradients_f64(c_, device_.host_inputs, std::as_const(dout_).view(), std::as_const(dlse_).view());
    const double dp =
        std::sqrt(static_cast<double>(c_.attention.d_v)) * std::abs(static_cast<double>(c_.attention.softmax_scale()));
    expect_near("dq", gradients_.dq, gradients.usual.dq, dp, bound);
    expect_near("dk", gradients_.dk, gradients.usual.dk, dp, bound);
    expect_near("dv", gradients_.dv, gradients.usual.dv, 1, bound);
    for (std::size_t i = 0; i < c_.captures.size(); ++i) {
      if (!c_.captures[i].requires_grad) continue;
      test::expect_near("gradient of " + c_.captures[i].name, variant_.gradients[i], gradients.captures[i],
                        gradients.bounds.captures[i]);
    }
    if (c_.config.sink) test::expect_near("dsink", variant_.dsink, gradients.dsink, gradients.bounds.dsink);
  }

  const AttentionOutputs& outputs() const { return device_.host_outputs; }
  const AttentionGradients& gradients() const { return gradients_; }

 private:
  const VariantCase& c_;
  DeviceVariant variant_;
  DeviceCase device_;
  HostTensor dout_, dlse_;
  AttentionGradients gradients_;
};

class ShardsGpu : public GpuTest, public testing::WithParamInterface<std::size_t> {};

TEST_P(ShardsGpu, PartsMatchTheReference) {
  const Kind kind = kinds()[GetParam()];
  for (const Part& part : parts()) {
    VariantCase c = case_of(kind, part.align);
    if (!has_form(c, part.place)) continue;
    AttentionCase own = c.attention;
    own.b = part.b;
    own.h_q = 2 * part.h_kv;
    own.h_kv = part.h_kv;
    own.s_q = part.s_q;
    own.s_kv = part.s_kv;
    c.move_to(own, part.place);
    SCOPED_TRACE(testing::PrintToString(c) + " at q " + std::to_string(part.place.q) + " kv " +
                 std::to_string(part.place.kv));
    const Attention attention = Attention::create(c.config);
    const AttentionShape unplaced{.b = own.b, .h_q = own.h_q, .h_kv = own.h_kv, .s_q = own.s_q, .s_kv = own.s_kv};
    attention.prepare(unplaced);  // whose kernels placed calls must not take
    attention.prepare_backward(unplaced);
    Calls run(c, attention, c.place);
    run.expect_reference();
  }
}

INSTANTIATE_TEST_SUITE_P(All, ShardsGpu, testing::Range<std::size_t>(0, kinds().size()));

/// What a grid of fewer blocks leaves as it is: every bit of o and lse, and of gradients what their order allows.
class BoundedGpu : public GpuTest, public testing::WithParamInterface<std::size_t> {};

TEST_P(BoundedGpu, FewerMultiprocessorsComeToTheSame) {
  const Kind kind = kinds()[GetParam()];
  VariantCase c = case_of(kind, CausalAlign::bottom_right);
  SCOPED_TRACE(testing::PrintToString(c));
  const Attention attention = Attention::create(c.config);
  const AttentionCase& a = c.attention;
  const AttentionShape bounded{.b = a.b, .h_q = a.h_q, .h_kv = a.h_kv, .s_q = a.s_q, .s_kv = a.s_kv, .bounded = true};
  const std::string spec = attention.kernel_info(bounded).spec;
  EXPECT_TRUE(spec.starts_with("sm90") || spec.find("bounded=1") != std::string::npos) << spec;
  Calls all(c, attention, std::nullopt);
  for (const int multiprocessors : {1, 13, 100}) {
    Calls few(c, attention, std::nullopt, multiprocessors);
    EXPECT_EQ(few.outputs().o.bytes(), all.outputs().o.bytes()) << multiprocessors;
    EXPECT_EQ(few.outputs().lse.bytes(), all.outputs().lse.bytes()) << multiprocessors;
    few.expect_reference();
  }
}

INSTANTIATE_TEST_SUITE_P(All, BoundedGpu, testing::Range<std::size_t>(0, kinds().size()));

/// The mma.sync kernels on any GPU, whose blocks then take several tiles.
class MmaBoundedGpu : public GpuTest, public testing::WithParamInterface<std::size_t> {};

TEST_P(MmaBoundedGpu, FewerMultiprocessorsComeToTheSame) {
  struct Case {
    DType dtype;
    std::int64_t d_qk, d_v, b, h_q, h_kv, s_q, s_kv;
    bool causal, deterministic;
  };
  constexpr Case kCases[] = {
      {DType::bf16, 64, 64, 2, 8, 8, 1024, 1024, true, false},  {DType::f16, 128, 128, 1, 8, 2, 777, 1500, true, true},
      {DType::bf16, 192, 128, 1, 4, 4, 900, 900, false, false}, {DType::bf16, 256, 256, 1, 4, 4, 700, 700, true, true},
      {DType::f16, 512, 512, 1, 2, 2, 500, 500, true, false},   {DType::f32, 64, 64, 1, 4, 2, 600, 600, true, false},
      {DType::f32, 192, 192, 1, 2, 2, 300, 300, true, true},    {DType::bf16, 64, 64, 1, 4, 4, 1, 4096, false, false}};
  const Case& of = kCases[GetParam()];
  AttentionCase a;
  a.dtype = of.dtype;
  a.d_qk = of.d_qk, a.d_v = of.d_v;
  a.b = of.b, a.h_q = of.h_q, a.h_kv = of.h_kv, a.s_q = of.s_q, a.s_kv = of.s_kv;
  a.causal = of.causal;
  VariantCase c(a, {"plain", {}});
  c.config.kernel = c.config.kernel_backward = KernelOverride{.kernel = "sm80"};
  c.config.deterministic = of.deterministic;
  SCOPED_TRACE(testing::PrintToString(c));
  const Attention attention = Attention::create(c.config);
  Calls all(c, attention, std::nullopt);
  for (const int multiprocessors : {1, 7, 64}) {
    Calls few(c, attention, std::nullopt, multiprocessors);
    EXPECT_EQ(few.outputs().o.bytes(), all.outputs().o.bytes()) << multiprocessors;
    EXPECT_EQ(few.outputs().lse.bytes(), all.outputs().lse.bytes()) << multiprocessors;
    if (of.deterministic) {
      EXPECT_EQ(few.gradients().dq.bytes(), all.gradients().dq.bytes()) << multiprocessors;
      EXPECT_EQ(few.gradients().dk.bytes(), all.gradients().dk.bytes()) << multiprocessors;
      EXPECT_EQ(few.gradients().dv.bytes(), all.gradients().dv.bytes()) << multiprocessors;
    }
    few.expect_reference();
  }
}

INSTANTIATE_TEST_SUITE_P(All, MmaBoundedGpu, testing::Range<std::size_t>(0, 8));

/// One captured forward and backward, whose kernels read where the call stands.
class CapturedCalls {
 public:
  CapturedCalls(const VariantCase& c, const Attention& attention, const AttentionShape& shape)
      : variant_(c),
        device_(c.attention),
        gradients_(make_gradients(c.attention)),
        dout_(make_dout(c.attention)),
        dlse_(make_dlse(c.attention)),
        dq_(gradients_.dq),
        dk_(gradients_.dk),
        dv_(gradients_.dv),
        forward_workspace_(std::max<std::size_t>(attention.workspace_size(shape), 256)),
        backward_workspace_(std::max<std::size_t>(attention.backward_workspace_size(shape), 256)) {
    ForwardInputs in = device_.inputs();
    in.captures = variant_.given;
    in.sink = variant_.sink_view;
    in.place = c.place;
    in.place->b = in.place->h_q = in.place->q = in.place->kv = 0;
    in.place->begin = static_cast<const std::int64_t*>(memory_.data());
    BackwardInputs all;
    all.q = in.q, all.k = in.k, all.v = in.v;
    all.o = device_.o.const_view(), all.lse = device_.lse.const_view();
    all.dout = dout_.const_view(), all.dlse = dlse_.const_view();
    all.captures = variant_.given;
    all.sink = variant_.sink_view;
    all.place = in.place;
    const auto queue = [&] {
      attention.forward(in, device_.outputs(), stream_.get(), {forward_workspace_.data(), forward_workspace_.size()});
      attention.backward(all, {dq_.view(), dk_.view(), dv_.view(), variant_.wanted, variant_.dsink_view}, stream_.get(),
                         {backward_workspace_.data(), backward_workspace_.size()});
    };
    memory_.write(std::vector<std::byte>(4 * sizeof(std::int64_t)));
    queue();  // compiles
    driver::check(driver::api().cuCtxSynchronize(), "cuCtxSynchronize");
    graph_.emplace(stream_.get(), queue);
  }

  void replay(const std::array<std::int64_t, 4>& place) {
    const auto bytes = std::as_bytes(std::span(place));
    memory_.write({bytes.begin(), bytes.end()});
    graph_->replay(stream_.get());
    driver::check(driver::api().cuCtxSynchronize(), "cuCtxSynchronize");
    device_.o.read(device_.host_outputs.o);
    device_.lse.read(device_.host_outputs.lse);
    dq_.read(gradients_.dq);
    dk_.read(gradients_.dk);
    dv_.read(gradients_.dv);
    EXPECT_TRUE(forward_workspace_.guards_intact() && backward_workspace_.guards_intact());
  }

  const AttentionOutputs& outputs() const { return device_.host_outputs; }
  const AttentionGradients& gradients() const { return gradients_; }

 private:
  DeviceVariant variant_;
  DeviceCase device_;
  AttentionGradients gradients_;
  DeviceTensor dout_, dlse_, dq_, dk_, dv_;
  DeviceBuffer memory_{4 * sizeof(std::int64_t)};
  DeviceBuffer forward_workspace_, backward_workspace_;
  ScopedStream stream_;
  std::optional<CapturedGraph> graph_;
};

class PlaceInMemoryGpu : public GpuTest, public testing::WithParamInterface<std::size_t> {};

TEST_P(PlaceInMemoryGpu, AGraphServesOtherPlaces) {
  const Kind kind = kinds()[GetParam()];
  VariantCase c = case_of(kind, CausalAlign::bottom_right);
  AttentionCase own = c.attention;
  own.b = 1, own.h_q = 4, own.h_kv = 2, own.s_q = 200, own.s_kv = 300;
  c.move_to(own, {});
  SCOPED_TRACE(testing::PrintToString(c));
  const Attention attention = Attention::create(c.config);
  AttentionShape shape{.b = own.b, .h_q = own.h_q, .h_kv = own.h_kv, .s_q = own.s_q, .s_kv = own.s_kv, .placed = true};
  const KernelInfo given = attention.kernel_info(shape), given_backward = attention.backward_kernel_info(shape);
  shape.place_in_memory = true;
  const auto differs_in_place_alone = [](std::string spec, const std::string& of) {
    constexpr std::string_view kField = " place_in_memory=1";
    if (const std::size_t at = spec.find(kField); at != std::string::npos) spec.erase(at, kField.size());
    return spec == of;  // else ptxas spills registers in one of the two
  };
  const bool same = differs_in_place_alone(attention.kernel_info(shape).spec, given.spec);
  const bool same_backward = differs_in_place_alone(attention.backward_kernel_info(shape).spec, given_backward.spec);
  EXPECT_TRUE(same || kind.dtype == DType::f32) << attention.kernel_info(shape).spec;
  CapturedCalls captured(c, attention, shape);
  constexpr std::array<std::int64_t, 4> kPlaces[] = {
      {0, 0, 0, 0},   {2, 4, 480, 576}, {1, 2, 32, 0},    {0, 4, 0, 576},  {1, 0, 256, 128},
      {2, 2, 480, 0}, {0, 2, 128, 320}, {1, 4, 320, 352}, {2, 0, 64, 448}, {0, 0, 0, 0}};
  for (const auto& place : kPlaces) {
    SCOPED_TRACE(testing::PrintToString(place));
    captured.replay(place);
    c.place.b = place[0], c.place.h_q = place[1], c.place.q = place[2], c.place.kv = place[3];
    Calls expected(c, attention, c.place);
    const AttentionOutputs& o = captured.outputs();
    const AttentionGradients& gradients = captured.gradients();
    if (same) {
      EXPECT_EQ(o.o.bytes(), expected.outputs().o.bytes());
      EXPECT_EQ(o.lse.bytes(), expected.outputs().lse.bytes());
    }
    if (same && same_backward) {
      EXPECT_EQ(gradients.dk.bytes(), expected.gradients().dk.bytes());
      EXPECT_EQ(gradients.dv.bytes(), expected.gradients().dv.bytes());
    }
    const double bound = tolerance(c);
    expect_near("o", o.o, expected.outputs().o, 0, bound);
    expect_near("dq", gradients.dq, expected.gradients().dq, 0.1, bound);
    expect_near("dk", gradients.dk, expected.gradients().dk, 0.1, bound);
    expect_near("dv", gradients.dv, expected.gradients().dv, 0.1, bound);
  }
}

INSTANTIATE_TEST_SUITE_P(All, PlaceInMemoryGpu, testing::Range<std::size_t>(0, kinds().size()));

using ShardPlaceGpu = GpuTest;

// What is prepared is what a call takes, and a placed call has the workspace that its shape says.
TEST_F(ShardPlaceGpu, ShapesPrepareTheirCalls) {
  AttentionConfig config;
  config.head_dim = 64;
  config.causal = true;
  config.dropout = 0.1f;
  const Attention attention = Attention::create(config);
  const AttentionShape shape{.b = 1, .h_q = 4, .h_kv = 2, .s_q = 256, .s_kv = 256, .placed = true};
  AttentionShape whole = shape;
  whole.placed = false;
  attention.prepare(whole);
  EXPECT_NE(attention.kernel_info(shape).spec.find("placed=1"), std::string::npos);
  EXPECT_NE(attention.backward_kernel_info(shape).spec.find("placed=1"), std::string::npos);
  const CacheCounters before = attention.cache_counters();
  AttentionCase c;
  c.d_qk = c.d_v = 64;
  c.causal = true;
  c.h_q = 4;
  c.h_kv = 2;
  c.s_q = c.s_kv = 256;
  DeviceCase device(c);
  ForwardInputs in = device.inputs();
  in.place = ShardPlace{.q = 256, .whole_s_q = 1024, .whole_s_kv = 1024};
  DeviceBuffer workspace(std::max<std::size_t>(attention.workspace_size(shape), 256));
  attention.forward(in, device.outputs(), nullptr, {workspace.data(), workspace.size()});
  driver::check(driver::api().cuCtxSynchronize(), "cuCtxSynchronize");
  EXPECT_TRUE(workspace.guards_intact());
  EXPECT_EQ(attention.cache_counters().compiles, before.compiles);
}

}  // namespace
}  // namespace fa::test
