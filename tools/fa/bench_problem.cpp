#include "bench_problem.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <limits>
#include <random>

#include "elements.hpp"
#include "options.hpp"
#include "reference/backward.hpp"
#include "reference/forward.hpp"
#include "tolerance.hpp"

namespace fa::cli {
namespace {

constexpr std::size_t kBlockElements = 1048573;  // the greatest prime below 2^20
constexpr std::int64_t kCheckedRows = 64;

constexpr DropoutState kDropout{.seed = 20240229, .offset = 4711};

std::size_t q_rows(const BenchProblem& problem) {
  const AttentionShape& shape = problem.shape;
  return static_cast<std::size_t>(problem.packed.varlen ? shape.total_q : shape.b * shape.s_q);
}

std::size_t kv_rows(const BenchProblem& problem) {
  const AttentionShape& shape = problem.shape;
  return static_cast<std::size_t>(problem.packed.varlen ? shape.total_kv : shape.b * shape.s_kv);
}

std::size_t row_bytes(const BenchProblem& problem, std::int64_t heads, int head_dim) {
  return static_cast<std::size_t>(heads * head_dim) * size_of(problem.dtype);
}

std::vector<std::byte> download(const DeviceBuffer& buffer) {
  std::vector<std::byte> bytes(buffer.size());
  buffer.download(bytes.data(), bytes.size());
  return bytes;
}

/// The rows from `first` on of the last `heads` heads of the last batch.
TensorView last_heads(TensorView view, std::int64_t heads, std::int64_t first) {
  const std::int64_t offset =
      (view.shape[0] - 1) * view.strides[0] + (view.shape[1] - heads) * view.strides[1] + first * view.strides[2];
  view.data = static_cast<std::byte*>(view.data) + offset * static_cast<std::int64_t>(size_of(view.dtype));
  view.shape = {1, heads, view.shape[2] - first, view.shape[3]};
  return view;
}

TensorView last_head(const TensorView& view, std::int64_t first) {
  return last_heads(view, 1, first);
}

/// A tensor laid out like another in other memory.
TensorView like(TensorView view, const DeviceBuffer& buffer) {
  view.data = buffer.data();
  return view;
}

/// A tensor of the shape of `like` in `memory`.
TensorView f64_like(const TensorView& like, std::vector<double>* memory) {
  memory->resize(static_cast<std::size_t>(like.elements()));
  return TensorView(memory->data(), DType::f64, {like.shape[0], like.shape[1], like.shape[2], like.shape[3]});
}

double greatest_magnitude(const TensorView& view) {
  double greatest = 0;
  for (std::int64_t row = 0; row < view.shape[2]; ++row) {
    for (std::int64_t column = 0; column < view.shape[3]; ++column) {
      const auto index = static_cast<std::size_t>(row * view.strides[2] + column);
      greatest = std::max(greatest, std::abs(load_element(view.data, view.dtype, index)));
    }
  }
  return greatest;
}

double greatest_difference(const TensorView& view, const std::vector<double>& expected) {
  double greatest = 0;
  for (std::int64_t row = 0; row < view.shape[2]; ++row) {
    for (std::int64_t column = 0; column < view.shape[3]; ++column) {
      const auto index = static_cast<std::size_t>(row * view.strides[2] + column);
      const double difference = std::abs(load_element(view.data, view.dtype, index) -
                                         expected[static_cast<std::size_t>(row * view.shape[3] + column)]);
      greatest = std::isnan(difference) ? std::numeric_limits<double>::infinity() : std::max(greatest, difference);
    }
  }
  return greatest;
}

/// Of the last batch entry: of its last `heads` heads, from a row and a key on.
reference::DropoutMask mask(const BenchProblem& problem, std::int64_t heads, std::int64_t row, std::int64_t key) {
  if (problem.packed.dropout == 0) return {};
  const reference::DropoutMask whole(double{problem.packed.dropout}, kDropout.seed, kDropout.offset);
  return whole.part(problem.shape.b * problem.shape.h_q - heads, row, key);
}

/// NaN in every element type.
void spoil(DeviceBuffer& buffer) {
  const std::vector<std::byte> ones(256, std::byte{0xff});
  buffer.tile(ones.data(), ones.size());
}

}  // namespace

const char* to_string(Operation op) {
  return op == Operation::backward ? "backward" : op == Operation::append ? "append" : "forward";
}

AttentionConfig BenchProblem::config(const KernelOverride& kernel) const {
  AttentionConfig config;
  config.head_dim = d_qk;
  config.head_dim_v = d_v;
  config.dtype = dtype;
  config.causal = causal;
  config.causal_align = causal_align;
  config.deterministic = deterministic;
  config.tune = tune;
  packed.apply(&config);
  apply(variant, &config);
  (op == Operation::forward ? config.kernel : config.kernel_backward) = if_given(kernel);
  return config;
}

std::string BenchProblem::text() const {
  return fmt::format("{}{} b={} h_q={} h_kv={} s_q={} s_kv={} d_qk={} d_v={}{}{}",
                     op == Operation::backward ? "backward " : "", to_string(dtype), shape.b, shape.h_q, shape.h_kv,
                     shape.s_q, shape.s_kv, d_qk, d_v, causal ? " causal" : "",
                     variant_text() == "plain" ? "" : " " + variant_text());
}

std::string BenchProblem::variant_text() const {
  const std::string functions = cli::text(variant);
  if (functions.empty()) return packed.text();
  return packed.text() == "plain" ? functions : packed.text() + "+" + functions;
}

double BenchProblem::flops() const {
  double pairs = static_cast<double>(shape.b) * static_cast<double>(shape.s_q) * static_cast<double>(shape.s_kv);
  if (packed.varlen) {
    pairs = 0;
    for (std::size_t i = 1; i < cumulative.size(); ++i) {
      const double length = cumulative[i] - cumulative[i - 1];
      pairs += length * length;
    }
  }
  const double all = 2.0 * static_cast<double>(shape.h_q) * pairs * (d_qk + d_v);
  return all * (op == Operation::backward ? 2.5 : 1) / (causal ? 2 : 1);
}

std::vector<std::int32_t> uniform_lengths(std::int64_t b, std::int64_t longest) {
  std::mt19937_64 generator(64);
  std::vector<std::int32_t> cumulative{0};
  for (std::int64_t i = 0; i < b; ++i) {
    const std::uint64_t length = 1 + generator() % static_cast<std::uint64_t>(longest);
    cumulative.push_back(cumulative.back() + static_cast<std::int32_t>(length));
  }
  return cumulative;
}

std::vector<std::byte> normal_block(DType dtype, std::uint64_t seed) {
  std::mt19937_64 generator(seed);
  std::normal_distribution<double> normal;
  std::vector<std::byte> block(kBlockElements * size_of(dtype));
  for (std::size_t i = 0; i < kBlockElements; ++i) {
    store_element(block.data(), dtype, i, normal(generator));
  }
  return block;
}

BenchTensors::BenchTensors(const BenchProblem& problem)
    : problem_(problem),
      functions_(api::read_functions(problem.config(), false)),
      sink_(problem.variant.sink ? static_cast<std::size_t>(problem.shape.h_q) : 0, 0.5f),
      device_sink_(sink_.size() * sizeof(float)),
      dsink_(problem.op == Operation::backward ? device_sink_.size() : 0),
      q_(q_rows(problem) * row_bytes(problem, problem.shape.h_q, problem.d_qk)),
      k_(kv_rows(problem) * row_bytes(problem, problem.shape.h_kv, problem.d_qk)),
      v_(kv_rows(problem) * row_bytes(problem, problem.shape.h_kv, problem.d_v)),
      o_(q_rows(problem) * row_bytes(problem, problem.shape.h_q, problem.d_v)),
      lse_(q_rows(problem) * static_cast<std::size_t>(problem.shape.h_q) * sizeof(float)),
      dout_(problem.op == Operation::backward ? o_.size() : 0),
      dq_(problem.op == Operation::backward ? q_.size() : 0),
      dk_(problem.op == Operation::backward ? k_.size() : 0),
      dv_(problem.op == Operation::backward ? v_.size() : 0),
      cumulative_(problem.cumulative.size() * sizeof(std::int32_t)) {
  if (cumulative_.size() != 0) cumulative_.upload(problem.cumulative.data(), cumulative_.size());
  std::uint64_t seed = 1;
  for (DeviceBuffer* buffer : {&q_, &k_, &v_, &dout_}) {
    const std::vector<std::byte> block = normal_block(problem.dtype, seed++);
    buffer->tile(block.data(), block.size());
  }
  if (!sink_.empty()) device_sink_.upload(sink_.data(), sink_.size() * sizeof(float));
  add_captures();
  spoil(o_);  // also where it is an input: initcheck does not see what the copy engine writes
  spoil_output();
}

/// Small numbers, and integers that grow along the last axis in 16 steps: documents.
void BenchTensors::add_captures() {
  const AttentionShape& shape = problem_.shape;
  const auto shapes = expression::smallest_shapes(functions_.program,
                                                  {shape.b, shape.h_q, shape.s_q, shape.s_kv, problem_.packed.varlen});
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    const expression::Capture& capture = functions_.program.captures[i];
    std::vector<std::int64_t> strides(shapes[i].size(), 1);
    for (std::size_t axis = strides.size(); axis-- > 1;) strides[axis - 1] = strides[axis] * shapes[i][axis];
    const std::int64_t elements = strides[0] * shapes[i][0];
    std::vector<std::byte> memory(static_cast<std::size_t>(elements) * size_of(capture.dtype));
    for (std::int64_t n = 0; n < elements; ++n) {
      const std::int64_t last = shapes[i].back();
      const std::int64_t sixteenth = n % last * 16 / last;
      const double value =
          capture.dtype == DType::i32 ? static_cast<double>(sixteenth) : static_cast<double>(n * 37 % 101) / 101;
      store_element(memory.data(), capture.dtype, static_cast<std::size_t>(n), value);
    }
    const std::size_t gradient = capture.requires_grad && problem_.op == Operation::backward
                                     ? static_cast<std::size_t>(elements) * sizeof(float)
                                     : 0;
    Captured& added = captures_.emplace_back(Captured{{}, std::move(memory), DeviceBuffer(0), DeviceBuffer(gradient)});
    added.device = DeviceBuffer(added.memory.size());
    added.device.upload(added.memory.data(), added.memory.size());
    added.host = TensorView(static_cast<void*>(added.memory.data()), capture.dtype, shapes[i], strides);
  }
}

Captures BenchTensors::captures(bool gradients) const {
  Captures result;
  for (std::size_t i = 0; i < captures_.size(); ++i) {
    TensorView view = captures_[i].host;
    view.data = gradients ? captures_[i].gradient.data() : captures_[i].device.data();
    if (gradients && captures_[i].gradient.size() == 0) continue;
    if (gradients) view.dtype = DType::f32;
    result.add({functions_.program.captures[i].name, view});
  }
  return result;
}

TensorView BenchTensors::of_heads(const DeviceBuffer& buffer) const {
  if (buffer.size() == 0) return {};
  return TensorView(buffer.data(), DType::f32, {problem_.shape.h_q});
}

reference::VariantArgs BenchTensors::variant_args(std::vector<expression::CapturedView>* views, std::int64_t heads,
                                                  std::int64_t row, std::int64_t key) const {
  const AttentionShape& shape = problem_.shape;
  for (const Captured& captured : captures_) views->push_back({captured.host, 0, {}});
  reference::VariantArgs args;
  args.program = &functions_.program;
  args.captures = *views;
  if (!sink_.empty()) args.sink = TensorView(sink_.data(), DType::f32, {shape.h_q});
  args.window_left = problem_.variant.window_left;
  args.window_right = problem_.variant.window_right;
  args.chunk = problem_.variant.chunk;
  std::int64_t s_q = shape.s_q, s_kv = shape.s_kv;
  if (problem_.packed.varlen) s_q = s_kv = problem_.cumulative.back() - problem_.cumulative.end()[-2];
  args.part = {shape.b - 1, shape.h_q - heads, row, key, {shape.b, shape.h_q, s_q, s_kv}};
  return args;
}

TensorView BenchTensors::view(const void* data, std::int64_t heads, std::int64_t rows, int head_dim) const {
  void* memory = const_cast<void*>(data);
  if (problem_.packed.varlen) return TensorView(memory, problem_.dtype, {rows, heads, head_dim});
  if (problem_.layout == Layout::bhsd) {
    return TensorView(memory, problem_.dtype, {problem_.shape.b, heads, rows, head_dim});
  }
  return TensorView(memory, problem_.dtype, {problem_.shape.b, rows, heads, head_dim}).swap_axes(1, 2);
}

ForwardInputs BenchTensors::inputs() const {
  const AttentionShape& shape = problem_.shape;
  const bool packed = problem_.packed.varlen;
  const std::int64_t s_q = packed ? shape.total_q : shape.s_q, s_kv = packed ? shape.total_kv : shape.s_kv;
  return {view(q_.data(), shape.h_q, s_q, problem_.d_qk),
          view(k_.data(), shape.h_kv, s_kv, problem_.d_qk),
          view(v_.data(), shape.h_kv, s_kv, problem_.d_v),
          captures(false),
          of_heads(device_sink_),
          sequences(),
          dropout()};
}

ForwardOutputs BenchTensors::outputs() const {
  const AttentionShape& shape = problem_.shape;
  if (problem_.packed.varlen) {
    return {view(o_.data(), shape.h_q, shape.total_q, problem_.d_v),
            TensorView(lse_.data(), DType::f32, {shape.h_q, shape.total_q})};
  }
  return {view(o_.data(), shape.h_q, shape.s_q, problem_.d_v),
          TensorView(lse_.data(), DType::f32, {shape.b, shape.h_q, shape.s_q})};
}

BackwardInputs BenchTensors::backward_inputs() const {
  const ForwardInputs in = inputs();
  const ForwardOutputs out = outputs();
  BackwardInputs result;
  result.q = in.q;
  result.k = in.k;
  result.v = in.v;
  result.o = out.o;
  result.lse = out.lse;
  result.dout = like(out.o, dout_);
  result.captures = in.captures;
  result.sink = in.sink;
  result.sequences = in.sequences;
  result.dropout = in.dropout;
  return result;
}

BackwardOutputs BenchTensors::backward_outputs() const {
  const ForwardInputs in = inputs();
  return {like(in.q, dq_), like(in.k, dk_), like(in.v, dv_), captures(true), of_heads(dsink_)};
}

PackedSequences BenchTensors::sequences() const {
  if (!problem_.packed.varlen) return {};
  const auto* cumulative = static_cast<const std::int32_t*>(cumulative_.data());
  const std::int64_t longest = problem_.shape.s_q;
  return {.b = problem_.shape.b,
          .cu_seqlens_q = cumulative,
          .cu_seqlens_kv = cumulative,
          .max_s_q = longest,
          .max_s_kv = longest};
}

DropoutState BenchTensors::dropout() const {
  return problem_.packed.dropout > 0 ? kDropout : DropoutState{};
}

/// The last batch entry, or sequence, as [1, h, s, d].
TensorView BenchTensors::last_entry(const TensorView& tensor) const {
  TensorView view = tensor;
  std::int64_t offset = (view.shape[0] - 1) * view.strides[0];
  if (problem_.packed.varlen) {
    const bool statistic = view.rank == 2;  // [h, total], not [total, h, d]
    const std::size_t rows = statistic ? 1 : 0, heads = statistic ? 0 : 1;
    const std::int64_t first = problem_.cumulative[problem_.cumulative.size() - 2];
    offset = first * tensor.strides[rows];
    view.shape = {1, tensor.shape[heads], problem_.cumulative.back() - first, statistic ? 0 : tensor.shape[2]};
    view.strides = {0, tensor.strides[heads], tensor.strides[rows], 1};
    view.rank = tensor.rank + 1;
  } else {
    view.shape[0] = 1;
  }
  view.data = static_cast<std::byte*>(view.data) + offset * static_cast<std::int64_t>(size_of(view.dtype));
  return view;
}

void BenchTensors::spoil_output() {
  const bool backward = problem_.op == Operation::backward;
  for (DeviceBuffer* buffer : backward ? std::vector{&dq_, &dk_, &dv_} : std::vector{&o_}) spoil(*buffer);
}

double BenchTensors::variant_slack() const {
  return functions_.variants.score.find("tanh") == std::string::npos ? 1 : 3;
}

double BenchTensors::check() const {
  return problem_.op == Operation::forward ? check_forward() : check_backward();
}

double BenchTensors::check_forward() const {
  const std::vector<std::byte> q = download(q_), k = download(k_), v = download(v_), o = download(o_);
  const ForwardInputs in = inputs();
  const auto entry = [&](TensorView device, const std::vector<std::byte>& bytes) {
    device.data = const_cast<std::byte*>(bytes.data());
    return last_entry(device);
  };
  const TensorView q_entry = entry(in.q, q);
  // The last rows keep their keys under a bottom-right mask; a top-left one is the same where s_q == s_kv.
  const std::int64_t first = std::max<std::int64_t>(q_entry.shape[2] - kCheckedRows, 0);
  const TensorView result = last_head(entry(outputs().o, o), first);
  std::vector<double> expected(static_cast<std::size_t>(result.elements()));
  reference::ForwardArgs args;
  args.q = last_head(q_entry, first);
  args.k = last_head(entry(in.k, k), 0);
  args.v = last_head(entry(in.v, v), 0);
  args.dropout = mask(problem_, 1, first, 0);
  args.o = TensorView(expected.data(), DType::f64, {1, 1, result.shape[2], result.shape[3]});
  args.scale = 1 / std::sqrt(static_cast<double>(problem_.d_qk));
  args.causal = problem_.causal;
  args.f64 = true;
  std::vector<expression::CapturedView> views;
  args.variant = variant_args(&views, 1, first, 0);
  reference::forward(args);
  return greatest_difference(result, expected) /
         (variant_slack() * output_tolerance(problem_.dtype) * greatest_magnitude(args.v) * args.dropout.scale());
}

double BenchTensors::check_backward() const {
  // A gradient is made of o, P and dS, each rounded once, and is rounded itself: twice what is allowed for o.
  const double tolerance = 2 * variant_slack() * output_tolerance(problem_.dtype);
  std::deque<std::vector<std::byte>> kept;
  const auto fetch = [&](const DeviceBuffer& buffer, TensorView device) {
    device.data = kept.emplace_back(download(buffer)).data();
    return last_entry(device);
  };
  const BackwardInputs in = backward_inputs();
  const BackwardOutputs out = backward_outputs();
  const TensorView q = fetch(q_, in.q), k = fetch(k_, in.k), v = fetch(v_, in.v), o = fetch(o_, in.o);
  const TensorView lse = fetch(lse_, in.lse), dout = fetch(dout_, in.dout);
  reference::BackwardArgs args;
  args.scale = 1 / std::sqrt(static_cast<double>(problem_.d_qk));
  args.causal = problem_.causal;
  args.f64 = true;
  std::vector<double> dq, dk, dv;
  // Of the given heads: the query rows from `row` on with the keys from `key` on.
  const auto expect = [&](std::int64_t heads, std::int64_t row, std::int64_t key) {
    args.q = last_heads(q, heads, row);
    args.o = last_heads(o, heads, row);
    args.dout = last_heads(dout, heads, row);
    args.lse = last_heads(lse, heads, row);
    args.dropout = mask(problem_, heads, row, key);
    args.k = last_head(k, key);
    args.v = last_head(v, key);
    args.dq = f64_like(args.q, &dq);
    args.dk = f64_like(args.k, &dk);
    args.dv = f64_like(args.v, &dv);
    std::vector<expression::CapturedView> views;
    args.variant = variant_args(&views, heads, row, key);
    reference::backward(args);
  };
  const auto error = [&](const TensorView& actual, const TensorView& wanted, const std::vector<double>& values) {
    return greatest_difference(actual, values) / (tolerance * greatest_magnitude(wanted));
  };
  // As in forward: a top-left mask is the same where s_q == s_kv.
  const std::int64_t row = std::max<std::int64_t>(q.shape[2] - kCheckedRows, 0);
  const std::int64_t key = std::max<std::int64_t>(k.shape[2] - kCheckedRows, 0);
  expect(1, row, 0);
  const double of_rows = error(last_head(fetch(dq_, out.dq), row), args.dq, dq);
  expect(problem_.shape.h_q / problem_.shape.h_kv, 0, key);
  return std::max({of_rows, error(last_head(fetch(dk_, out.dk), key), args.dk, dk),
                   error(last_head(fetch(dv_, out.dv), key), args.dv, dv)});
}

KernelInfo prepare(const Attention& attention, const BenchProblem& problem) {
  return problem.op == Operation::forward ? attention.kernel_info(problem.shape)
                                          : attention.backward_kernel_info(problem.shape);
}

std::size_t workspace_size(const Attention& attention, const BenchProblem& problem) {
  return problem.op == Operation::forward ? attention.workspace_size(problem.shape)
                                          : attention.backward_workspace_size(problem.shape);
}

void launch(const Attention& attention, const BenchProblem& problem, const BenchTensors& tensors, Stream stream,
            Workspace workspace) {
  if (problem.op == Operation::forward) {
    attention.forward(tensors.inputs(), tensors.outputs(), stream, workspace);
  } else {
    attention.backward(tensors.backward_inputs(), tensors.backward_outputs(), stream, workspace);
  }
}

}  // namespace fa::cli
