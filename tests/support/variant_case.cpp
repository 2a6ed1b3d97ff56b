#include "support/variant_case.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <ostream>
#include <random>

#include "reference/backward.hpp"
#include "reference/forward.hpp"
#include "reference/geometry.hpp"
#include "support/shard_place.hpp"

namespace fa::test {
namespace {

constexpr int kTableDistance = 5;

AttentionConfig with_score(ScoreFunction score) {
  AttentionConfig config;
  config.score = std::move(score);
  return config;
}

AttentionConfig with_mask(MaskFunction mask) {
  AttentionConfig config;
  config.mask = std::move(mask);
  return config;
}

AttentionConfig with_window(std::int64_t left, std::int64_t right, std::int64_t chunk, bool sink) {
  AttentionConfig config;
  config.window_left = left;
  config.window_right = right;
  config.chunk = chunk;
  config.sink = sink;
  return config;
}

/// The axis lengths of a capture, from how an expression indexes it.
std::vector<std::int64_t> shape_of(const std::string& name, const std::string& expression, const AttentionCase& c) {
  if (name == "table") return {c.h_q, 2 * kTableDistance + 1};
  if (name == "doc") return {std::max(c.s_q, c.s_kv)};
  if (name == "tree") return {c.b, c.s_q, std::max<std::int64_t>((c.s_q + 31) / 32, 1)};
  const std::size_t at = expression.find(name + "[");
  if (at == std::string::npos) return {1};
  std::vector<std::int64_t> shape;
  std::string index;
  for (std::size_t i = at + name.size() + 1; i < expression.size(); ++i) {
    const char letter = expression[i];
    if (letter == ' ') continue;
    if (letter != ',' && letter != ']') {
      index += letter;
      continue;
    }
    const std::size_t plus = index.find('+');
    const std::int64_t shift = plus == std::string::npos ? 0 : std::stoll(index.substr(plus + 1));
    const std::int64_t factor = index[0] == '2' ? 2 : 1;
    const std::int64_t length = index == "b" ? c.b : index == "h" ? c.h_q : index == "q" ? c.s_q : c.s_kv;
    shape.push_back(factor * length + shift);
    index.clear();
    if (letter == ']') break;
  }
  return shape;
}

double uniform(std::mt19937_64& engine) {
  return static_cast<double>(engine() >> 11) * 0x1p-53;
}

/// Documents that grow along the sequence, prefixes, bits, or numbers of some size.
void fill(NamedTensor& tensor, const AttentionCase& c, std::mt19937_64& engine) {
  tensor.bytes.resize(static_cast<std::size_t>(tensor.elements()) * size_of(tensor.dtype));
  std::int32_t document = 0;
  for (std::int64_t i = 0; i < tensor.elements(); ++i) {
    double value = 2 * uniform(engine) - 1;
    if (tensor.name == "tree") value = static_cast<std::int32_t>(static_cast<std::uint32_t>(engine()));
    if (tensor.name == "slope") value = 0.05 + 0.4 * uniform(engine);
    if (tensor.name == "doc") value = document += uniform(engine) < 0.1 ? 1 : 0;
    if (tensor.name == "prefix") value = std::floor(uniform(engine) * static_cast<double>(c.s_kv + 1));
    TensorView view = tensor.view();
    reference::store_element(view, i, value);
  }
}

reference::ForwardArgs forward_args(const VariantCase& c, const AttentionInputs& inputs) {
  reference::ForwardArgs args;
  args.q = inputs.q.view();
  args.k = inputs.k.view();
  args.v = inputs.v.view();
  args.scale = c.attention.softmax_scale();
  args.causal = c.attention.causal;
  args.causal_align = c.attention.causal_align;
  args.f64 = true;
  if (!c.drops) return args;
  const ShardPlace at = support::resolved(c.place, {c.attention.b, c.attention.h_q, c.attention.s_q, c.attention.s_kv});
  const reference::DropoutMask whole(double{c.config.dropout}, 0, 0);
  args.dropout = whole.part(at.b * at.whole_h_q + at.h_q, at.q, at.kv);
  return args;
}

}  // namespace

TensorView NamedTensor::view() const {
  std::vector<std::int64_t> strides(shape.size(), 1);
  for (std::size_t axis = shape.size(); axis-- > 1;)
    strides[axis - 1] = strides[axis] * std::max<std::int64_t>(shape[axis], 1);
  return TensorView(const_cast<std::byte*>(bytes.data()), dtype, shape, strides);
}

double NamedTensor::number() const {
  double value = 0;
  reference::load(view(), 0, 1, 1, &value);
  return value;
}

std::int64_t NamedTensor::elements() const {
  std::int64_t count = 1;
  for (const std::int64_t length : shape) count *= length;
  return count;
}

std::vector<VariantChoice> variant_choices(bool with_gradients) {
  namespace f = functions;
  const bool grad = with_gradients;
  const ScoreFunction table = f::relative_table(kTableDistance, DType::f32, grad);
  const ScoreFunction bias_hqk = f::bias("hqk", DType::f16, grad);
  const ScoreFunction learned{"score * gain + offset[h, q] * float(kv % 3)",
                              {{"gain", DType::f32, grad}, {"offset", DType::bf16, grad}}};
  const MaskFunction strided{"(q - kv) % 4 == 0 || kv < 3"};
  std::vector<VariantChoice> choices{
      {"softcap", with_score(f::softcap(2))},
      {"alibi", with_score(f::alibi(grad))},
      {"bias", with_score(f::bias("bhqk", DType::f32, grad))},
      {"key_bias", with_score(f::bias("bk", DType::f32, grad))},
      {"table", with_score(table)},
      {"learned", with_score(learned)},
      {"softcap_bias", with_score(f::compose(f::softcap(3), bias_hqk))},
      {"documents", with_mask(f::documents())},
      {"prefix", with_mask(f::prefix_lm())},
      {"strided", with_mask(strided)},
      {"tree", with_mask(f::tree())},
      {"by_head", with_mask({"(q + h) % 3 != kv % 3 && kv / 20 != b + h"})},
      {"window", with_window(20, -1, 0, false)},
      {"two_sided", with_window(7, 11, 0, false)},
      {"ahead", with_window(-1, 5, 0, true)},
      {"chunked", with_window(-1, -1, 24, false)},
      {"sink", with_window(-1, -1, 0, true)},
      {"window_sink", with_window(16, 0, 0, true)},
  };
  AttentionConfig all = with_window(30, -1, 40, true);
  all.score = f::compose(f::alibi(grad), f::softcap(4));
  all.mask = f::documents();
  choices.push_back({"everything", all});
  // Where tanh is flat next to nothing is left of its derivative, which the distance multiplies.
  const ScoreFunction far{"score - slope[h] * float(kv + 300)", {{"slope", DType::f32, grad}}};
  choices.push_back({"saturated", with_score(f::compose(far, f::softcap(2)))});
  return choices;
}

VariantCase::VariantCase(const AttentionCase& c, const VariantChoice& choice) : attention(c), config(choice.config) {
  config.head_dim = static_cast<int>(c.d_qk);
  config.head_dim_v = static_cast<int>(c.d_v);
  config.dtype = c.dtype;
  config.scale = c.scale;
  config.causal = c.causal;
  config.causal_align = c.causal_align;
  if (config.causal && config.window_right > 0) config.window_right = 0;
  functions = api::read_functions(config, true);
  std::mt19937_64 engine(c.seed + 77);
  const std::string text = config.score.expression + " " + config.mask.expression;
  for (const expression::Capture& capture : functions.program.captures) {
    captures.push_back({capture.name, capture.dtype, shape_of(capture.name, text, c), capture.requires_grad});
    fill(captures.back(), c, engine);
    captures.back().by_value = capture.name == "number";
  }
  sink = {"sink", c.dtype == DType::f64 ? DType::f64 : DType::f32, {config.sink ? c.h_q : 0}};
  fill(sink, c, engine);
}

void VariantCase::move_to(const AttentionCase& part, const ShardPlace& at) {
  const AttentionCase whole = attention;
  attention = part;
  place = at;
  place.whole_b = whole.b;
  place.whole_h_q = whole.h_q;
  place.whole_s_q = whole.s_q;
  place.whole_s_kv = whole.s_kv;
  if (!config.sink) return;
  sink.shape = {part.h_q};
  sink.bytes.resize(static_cast<std::size_t>(part.h_q) * size_of(sink.dtype));
}

void PrintTo(const VariantCase& c, std::ostream* out) {
  PrintTo(c.attention, out);
  *out << canonical(c.functions.variants) << " left " << c.config.window_left << " right " << c.config.window_right
       << " chunk " << c.config.chunk;
}

reference::VariantArgs variant_args(const VariantCase& c, std::vector<expression::CapturedView>& views) {
  views.clear();
  for (const NamedTensor& tensor : c.captures) views.push_back({tensor.view(), 0, {}});
  reference::VariantArgs args;
  args.program = &c.functions.program;
  args.captures = views;
  if (c.config.sink) args.sink = c.sink.view();
  args.window_left = c.config.window_left;
  args.window_right = c.config.window_right;
  args.chunk = c.config.chunk;
  args.place = c.place;
  return args;
}

void add_gradients(const VariantCase& c, std::vector<expression::CapturedView>& views,
                   std::vector<std::vector<double>>& captures) {
  for (std::size_t i = 0; i < c.captures.size(); ++i) {
    const NamedTensor& tensor = c.captures[i];
    captures.emplace_back(static_cast<std::size_t>(tensor.requires_grad ? tensor.elements() : 0));
    if (!tensor.requires_grad) continue;
    const TensorView like = tensor.view();
    views[i].gradient = TensorView(static_cast<void*>(captures[i].data()), DType::f64, tensor.shape,
                                   std::span(like.strides).first(tensor.shape.size()));
  }
}

AttentionOutputs reference_f64(const VariantCase& c, const AttentionInputs& inputs) {
  const AttentionCase& a = c.attention;
  AttentionOutputs outputs{HostTensor(DType::f64, a.b, a.h_q, a.s_q, a.d_v, a.layout),
                           HostTensor(DType::f64, a.b, a.h_q, a.s_q)};
  std::vector<expression::CapturedView> views;
  reference::ForwardArgs args = forward_args(c, inputs);
  add_scale_views(a, inputs, args);
  args.o = outputs.o.view();
  args.lse = outputs.lse.view();
  args.variant = variant_args(c, views);
  reference::forward(args);
  return outputs;
}

VariantGradients reference_gradients_f64(const VariantCase& c, const AttentionInputs& inputs, const TensorView& dout,
                                         const TensorView& dlse) {
  const AttentionCase& a = c.attention;
  const AttentionOutputs forward = reference_f64(c, inputs);
  VariantGradients gradients{{HostTensor(DType::f64, a.b, a.h_q, a.s_q, a.d_qk, a.layout),
                              HostTensor(DType::f64, a.b, a.h_kv, a.s_kv, a.d_qk, a.layout),
                              HostTensor(DType::f64, a.b, a.h_kv, a.s_kv, a.d_v, a.layout)},
                             {},
                             std::vector<double>(static_cast<std::size_t>(c.sink.elements()))};
  const reference::ForwardArgs like = forward_args(c, inputs);
  reference::BackwardArgs args;
  args.q = like.q;
  args.k = like.k;
  args.v = like.v;
  args.scale = like.scale;
  args.causal = like.causal;
  args.causal_align = like.causal_align;
  args.f64 = true;
  args.dropout = like.dropout;
  args.o = forward.o.view();
  args.lse = forward.lse.view();
  args.dout = dout;
  args.dlse = dlse;
  args.dq = gradients.usual.dq.view();
  args.dk = gradients.usual.dk.view();
  args.dv = gradients.usual.dv.view();
  std::vector<expression::CapturedView> views;
  args.variant = variant_args(c, views);
  add_gradients(c, views, gradients.captures);
  if (c.config.sink) args.variant.dsink = TensorView(gradients.dsink.data(), DType::f64, {a.h_q});
  reference::backward(args);
  gradients.bounds = error_bounds(args, a.dtype);
  return gradients;
}

}  // namespace fa::test
