#include "bench_problem.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <numeric>
#include <random>
#include <span>
#include <utility>

#include "bench_blocks.hpp"
#include "elements.hpp"
#include "options.hpp"

namespace fa::cli {
namespace {

std::size_t q_rows(const BenchProblem& problem) {
  const AttentionShape& shape = problem.shape;
  return static_cast<std::size_t>(problem.packed.varlen ? shape.total_q : shape.b * shape.s_q);
}

std::size_t kv_rows(const BenchProblem& problem) {
  const AttentionShape& shape = problem.shape;
  if (problem.page_size > 0) return static_cast<std::size_t>(problem.pages() * problem.page_size);
  if (problem.page_size == kContiguous) return static_cast<std::size_t>(shape.b * shape.s_kv);
  return static_cast<std::size_t>(problem.packed.varlen ? shape.total_kv : shape.b * shape.s_kv);
}

/// That have a column sum: over a KV cache those of each request.
std::size_t summed_rows(const BenchProblem& problem) {
  return problem.page_size != 0 ? static_cast<std::size_t>(problem.shape.b * problem.shape.s_kv) : kv_rows(problem);
}

std::size_t row_bytes(const BenchProblem& problem, std::int64_t heads, int head_dim,
                      const std::optional<DType>& stored = std::nullopt) {
  const std::int64_t columns = stored == DType::u4x2 ? head_dim / 2 : head_dim;
  return static_cast<std::size_t>(heads * columns) * size_of(stored.value_or(problem.dtype));
}

/// Bytes of a row's scale, or of its groups' scales and offsets.
std::size_t scale_bytes_of_row(const BenchProblem& problem, const std::optional<DType>& stored, int head_dim) {
  if (!stored) return 0;
  const int group = problem.group_size != 0 ? problem.group_size : 32;
  return *stored == DType::u4x2 ? static_cast<std::size_t>(head_dim / group * 4) : sizeof(float);
}

std::size_t scale_bytes(const BenchProblem& problem, const std::optional<DType>& stored, int head_dim) {
  return kv_rows(problem) * static_cast<std::size_t>(problem.shape.h_kv) *
         scale_bytes_of_row(problem, stored, head_dim);
}

std::size_t key_scale_bytes(const BenchProblem& problem) {
  return kv_rows(problem) * static_cast<std::size_t>(problem.shape.h_kv) * sizeof(float);
}

/// Of a number for each query head and row.
std::size_t statistic_bytes(const BenchProblem& problem, std::size_t rows) {
  return rows * static_cast<std::size_t>(problem.shape.h_q) * sizeof(float);
}

std::string text_of(const Statistics& statistics) {
  std::string text;
  if (statistics.max_logit != MaxLogit::none) {
    text += statistics.max_logit == MaxLogit::scaled ? " max_logit=scaled" : " max_logit=softmax";
    if (statistics.max_logit_by_head) text += " by_head";
  }
  if (statistics.entropy) text += " entropy";
  if (statistics.column_sums != ColumnSums::none) {
    text += statistics.column_sums == ColumnSums::kv_heads ? " column_sums=kv_heads" : " column_sums=query_heads";
  }
  if (statistics.top_keys != 0) text += " top_keys=" + std::to_string(statistics.top_keys);
  return text;
}

/// A tensor laid out like another in other memory.
TensorView like(TensorView view, const DeviceBuffer& buffer) {
  view.data = buffer.data();
  return view;
}

std::vector<std::int64_t> differences(const std::vector<std::int32_t>& cumulative) {
  std::vector<std::int64_t> result;
  for (std::size_t i = 1; i < cumulative.size(); ++i) result.push_back(cumulative[i] - cumulative[i - 1]);
  return result;
}

template <class Number>
DeviceBuffer upload(const std::vector<Number>& numbers) {
  DeviceBuffer buffer(numbers.size() * sizeof(Number));
  buffer.upload(numbers.data(), buffer.size());
  return buffer;
}

/// NaN in every element type.
void spoil(DeviceBuffer& buffer) {
  const std::vector<std::byte> ones(256, std::byte{0xff});
  buffer.tile(ones.data(), ones.size());
}

/// Words [b, s_q, words] of trees of which each draft has two more.
void fill_tree(const std::vector<std::int64_t>& shape, std::vector<std::byte>* memory) {
  std::vector<std::int32_t> parents(static_cast<std::size_t>(shape[1]));
  for (std::size_t i = 0; i < parents.size(); ++i) parents[i] = (static_cast<std::int32_t>(i) + 1) / 2 - 1;
  const std::vector<std::int32_t> words = functions::tree_words(parents, static_cast<int>(shape[2]));
  const std::span<const std::byte> bytes = std::as_bytes(std::span(words));
  for (std::int64_t b = 0; b < shape[0]; ++b) {
    std::ranges::copy(bytes, memory->begin() + b * static_cast<std::ptrdiff_t>(bytes.size()));
  }
}

}  // namespace

const char* to_string(Operation op) {
  switch (op) {
    case Operation::backward:
      return "backward";
    case Operation::append:
      return "append";
    case Operation::decode:
      return "decode";
    case Operation::merge:
      return "merge";
    case Operation::shared:
      return "shared";
    case Operation::mla:
      return "mla";
    default:
      return "forward";
  }
}

AttentionConfig BenchProblem::config(const KernelOverride& kernel) const {
  AttentionConfig config;
  config.head_dim = d_qk;
  config.head_dim_v = d_v;
  config.dtype = dtype;
  if (dtype == DType::i8) config.scale = static_cast<float>(softmax_scale());
  config.causal = causal;
  config.causal_align = causal_align;
  config.deterministic = deterministic;
  config.tune = tune;
  packed.apply(&config);
  apply(variant, &config);
  config.page_size = page_size;
  if (value_in_key) config.value_in_key = d_v;
  config.k_dtype = k_dtype;
  config.v_dtype = v_dtype;
  config.group_size = group_size;
  config.key_scales = key_scales;
  config.value_scales = value_scales;
  config.precise = precise;
  if (op != Operation::append && op != Operation::merge) config.invariance = invariance;
  if (op == Operation::forward) config.statistics = statistics;
  (op == Operation::backward ? config.kernel_backward : config.kernel) = if_given(kernel);
  return config;
}

double BenchProblem::softmax_scale() const {
  const double unit = dtype == DType::i8 ? scale_of_block(dtype) : 1.0;
  return unit * unit / std::sqrt(static_cast<double>(d_qk));
}

std::optional<DType> BenchProblem::v_stored() const {
  return dtype == DType::i8 ? DType::e4m3 : v_dtype;
}

std::string BenchProblem::text() const {
  const auto stored = [](const char* name, const std::optional<DType>& as) {
    return as ? fmt::format(" {}={}", name, to_string(*as)) : std::string();
  };
  const auto [dq, dk, dv] = shape.gradients;
  const auto named = [](const char* name, bool wanted) { return wanted ? name : ""; };
  const std::string gradients = shape.gradients == Gradients{}
                                    ? ""
                                    : fmt::format(" outputs={}{}{}", named("dq", dq), named("dk", dk), named("dv", dv));
  return fmt::format("{}{} b={} h_q={} h_kv={} s_q={} s_kv={} d_qk={} d_v={}{}{}{}{}{}{}{}{}",
                     op == Operation::forward ? "" : std::string(to_string(op)) + " ", to_string(dtype), shape.b,
                     shape.h_q, shape.h_kv, shape.s_q, shape.s_kv, d_qk, d_v, causal ? " causal" : "",
                     page_size != 0 ? fmt::format(" page_size={}", page_size) : "", value_in_key ? " value_in_key" : "",
                     stored("k_dtype", k_dtype), stored("v_dtype", v_dtype),
                     invariance == Invariance::none ? "" : fmt::format(" invariance={}", to_string(invariance)),
                     variant_text() == "plain" ? "" : " " + variant_text(), gradients) +
         text_of(statistics) + (key_scales ? " key_scales" : "") + (value_scales ? " value_scales" : "") +
         (precise ? " precise" : "") + (place ? fmt::format(" at={}x{}", place->q, place->kv) : "") +
         (max_multiprocessors != 0 ? fmt::format(" multiprocessors={}", max_multiprocessors) : "");
}

ShardPlace BenchProblem::place_of(std::int64_t heads, std::int64_t row, std::int64_t key) const {
  ShardPlace at = place.value_or(ShardPlace{
      .whole_b = shape.b, .whole_h_q = shape.h_q, .whole_s_q = lengths_q().back(), .whole_s_kv = lengths_kv().back()});
  at.b += shape.b - 1;
  at.h_q += shape.h_q - heads;
  at.q += row;
  at.kv += key;
  return at;
}

std::string BenchProblem::variant_text() const {
  const std::string functions = cli::text(variant);
  if (functions.empty()) return packed.text();
  return packed.text() == "plain" ? functions : packed.text() + "+" + functions;
}

double BenchProblem::flops() const {
  const std::vector<std::int64_t> rows = lengths_q(), keys = lengths_kv();
  double pairs = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) pairs += static_cast<double>(rows[i]) * static_cast<double>(keys[i]);
  if (place && causal) {
    const bool ends_meet = causal_align == CausalAlign::bottom_right;
    const std::int64_t shift = place->q - place->kv + (ends_meet ? place->whole_s_kv - place->whole_s_q : 0);
    pairs = 0;
    for (std::int64_t i = 0; i < shape.s_q; ++i) {
      pairs += static_cast<double>(std::clamp<std::int64_t>(i + shift + 1, 0, shape.s_kv) * shape.b);
    }
  }
  const double all = 2.0 * static_cast<double>(shape.h_q) * pairs * (d_qk + d_v);
  return all * (op == Operation::backward ? 2.5 : 1) / (causal && !place ? 2 : 1);
}

std::vector<std::int64_t> BenchProblem::lengths_q() const {
  return packed.varlen ? differences(cumulative) : std::vector(static_cast<std::size_t>(shape.b), shape.s_q);
}

std::vector<std::int64_t> BenchProblem::lengths_kv() const {
  if (!cumulative_kv.empty()) return differences(cumulative_kv);
  return packed.varlen ? differences(cumulative) : std::vector(static_cast<std::size_t>(shape.b), shape.s_kv);
}

std::int64_t BenchProblem::pages() const {
  std::int64_t sum = 0;
  for (const std::int64_t keys : lengths_kv()) sum += (keys + page_size - 1) / page_size;
  return sum;
}

double BenchProblem::bytes() const {
  const auto element = [](DType type) { return static_cast<double>(size_of(type)) / (type == DType::u4x2 ? 2 : 1); };
  const auto scales =
      static_cast<double>(scale_bytes_of_row(*this, k_dtype, d_qk) + scale_bytes_of_row(*this, v_dtype, d_v));
  double keys = 0, rows = 0;
  for (const std::int64_t length : lengths_kv()) keys += static_cast<double>(length * shape.h_kv);
  for (const std::int64_t length : lengths_q()) rows += static_cast<double>(length * shape.h_q);
  const double of_row = d_qk * element(dtype) + d_v * element(o_dtype());
  if (latent()) return keys * key_columns() + rows * of_row;
  const double of_key =
      d_qk * element(k_dtype.value_or(dtype)) + (value_in_key ? 0 : d_v * element(v_dtype.value_or(dtype)));
  return keys * (of_key + scales) + rows * of_row;
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

BenchTensors::BenchTensors(const BenchProblem& problem, int sets)
    : problem_(problem),
      sets_(sets),
      functions_(api::read_functions(problem.config(), false)),
      sink_(problem.variant.sink ? static_cast<std::size_t>(problem.shape.h_q) : 0, 0.5f),
      device_sink_(sink_.size() * sizeof(float)),
      dsink_(problem.op == Operation::backward ? device_sink_.size() : 0),
      q_(static_cast<std::size_t>(sets) * q_rows(problem) * row_bytes(problem, problem.shape.h_q, problem.d_qk)),
      k_(static_cast<std::size_t>(sets) * kv_rows(problem) *
         row_bytes(problem, problem.shape.h_kv, problem.key_columns(), problem.k_dtype)),
      v_(static_cast<std::size_t>(sets) * kv_rows(problem) *
         row_bytes(problem, problem.shape.h_kv, problem.d_v, problem.v_dtype)),
      k_scale_(static_cast<std::size_t>(sets) * (problem.latent() ? 0
                                                 : problem.key_scales
                                                     ? key_scale_bytes(problem)
                                                     : scale_bytes(problem, problem.k_dtype, problem.d_qk))),
      v_scale_(static_cast<std::size_t>(sets) *
               (problem.value_scales ? key_scale_bytes(problem) : scale_bytes(problem, problem.v_dtype, problem.d_v))),
      o_(static_cast<std::size_t>(sets) * q_rows(problem) *
         row_bytes(problem, problem.shape.h_q, problem.d_v, problem.o_dtype())),
      lse_(static_cast<std::size_t>(sets) * q_rows(problem) * static_cast<std::size_t>(problem.shape.h_q) *
           sizeof(float)),
      max_logit_(problem.statistics.max_logit != MaxLogit::none ? statistic_bytes(problem, q_rows(problem)) : 0),
      entropy_(problem.statistics.entropy ? statistic_bytes(problem, q_rows(problem)) : 0),
      column_sums_(problem.statistics.column_sums != ColumnSums::none ? statistic_bytes(problem, summed_rows(problem))
                                                                      : 0),
      top_keys_(static_cast<std::size_t>(problem.shape.b * problem.shape.h_q * problem.statistics.top_keys) *
                sizeof(std::int32_t)),
      dout_(problem.op == Operation::backward ? o_.size() : 0),
      dq_(problem.op == Operation::backward ? q_.size() : 0),
      dk_(problem.op == Operation::backward ? k_.size() : 0),
      dv_(problem.op == Operation::backward ? v_.size() : 0),
      cumulative_(upload(problem.cumulative)),
      cumulative_kv_(upload(problem.cumulative_kv)),
      block_table_(0),
      used_kv_(0) {
  if (problem.page_size > 0) fill_block_table();
  if (problem.page_size != 0) {
    const std::vector<std::int64_t> keys = problem.lengths_kv();
    used_kv_ = upload(std::vector<std::int32_t>(keys.begin(), keys.end()));
  }
  std::uint64_t seed = 1;
  for (const auto& [buffer, dtype] :
       {std::pair{&q_, problem.dtype}, std::pair{&k_, problem.k_dtype.value_or(problem.dtype)},
        std::pair{&v_, problem.v_stored().value_or(problem.dtype)}, std::pair{&dout_, problem.dtype}}) {
    const bool rows = buffer == &k_ && problem.latent();
    const std::vector<std::byte> block = rows ? latent_rows(seed++) : normal_block(dtype, seed++);
    buffer->tile(block.data(), block.size());
  }
  for (const auto& [buffer, stored] : {std::pair{&k_scale_, problem.k_dtype}, std::pair{&v_scale_, problem.v_dtype}}) {
    if (!stored || problem.latent()) continue;
    if (*stored == DType::u4x2) {
      std::array<std::byte, 4> pair{};
      for (std::size_t i = 0; i < 2; ++i) store_element(pair.data(), problem.dtype, i, kPairOfBlock[i]);
      buffer->tile(pair.data(), pair.size());
      continue;
    }
    const float scale = scale_of_block(*stored);
    buffer->tile(&scale, sizeof scale);
  }
  for (const auto& [buffer, of_keys] :
       {std::pair{&k_scale_, problem.key_scales}, std::pair{&v_scale_, problem.value_scales}}) {
    const float one = 1;
    if (of_keys) buffer->tile(&one, sizeof one);
  }
  if (!sink_.empty()) device_sink_.upload(sink_.data(), sink_.size() * sizeof(float));
  add_captures();
  spoil(o_);  // also where it is an input: initcheck does not see what the copy engine writes
  spoil_output();
}

/// The pages of a request lie apart, in no order.
void BenchTensors::fill_block_table() {
  const std::vector<std::int64_t> keys = problem_.lengths_kv();
  const std::int64_t page_size = problem_.page_size;
  const auto width = static_cast<std::size_t>((problem_.shape.s_kv + page_size - 1) / page_size);
  std::vector<std::int32_t> pages(static_cast<std::size_t>(problem_.pages()));
  std::iota(pages.begin(), pages.end(), 0);
  std::mt19937_64 generator(16);
  for (std::size_t i = pages.size(); i > 1; --i) std::swap(pages[i - 1], pages[generator() % i]);
  table_.assign(keys.size() * width, -1);
  std::size_t next = 0;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const auto count = static_cast<std::size_t>((keys[i] + page_size - 1) / page_size);
    std::copy_n(pages.begin() + static_cast<std::ptrdiff_t>(next), count,
                table_.begin() + static_cast<std::ptrdiff_t>(i * width));
    next += count;
  }
  block_table_ = upload(table_);
}

/// Small numbers, and integers that grow along the last axis in 16 steps: documents. A tree has two drafts on each.
void BenchTensors::add_captures() {
  const AttentionShape& shape = problem_.shape;
  expression::Lengths lengths{shape.b, shape.h_q, shape.s_q, shape.s_kv, problem_.packed.varlen};
  if (problem_.place) {
    const ShardPlace& place = *problem_.place;
    lengths = {place.whole_b, place.whole_h_q, place.whole_s_q, place.whole_s_kv};
  }
  const auto shapes = expression::smallest_shapes(functions_.program, lengths);
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
    if (problem_.variant.tree && capture.name == "tree") fill_tree(shapes[i], &memory);
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
  if (!sink_.empty()) args.sink = TensorView(sink_.data() + (shape.h_q - heads), DType::f32, {heads});
  args.window_left = problem_.variant.window_left;
  args.window_right = problem_.variant.window_right;
  args.chunk = problem_.variant.chunk;
  args.place = problem_.place_of(heads, row, key);
  return args;
}

std::byte* BenchTensors::of_set(const DeviceBuffer& buffer, int set) const {
  return static_cast<std::byte*>(buffer.data()) +
         buffer.size() / static_cast<std::size_t>(sets_) * static_cast<std::size_t>(set);
}

TensorView BenchTensors::keys_view(const DeviceBuffer& buffer, int set, int head_dim,
                                   const std::optional<DType>& stored) const {
  const AttentionShape& shape = problem_.shape;
  const DType dtype = stored.value_or(problem_.dtype);
  if (stored == DType::u4x2) head_dim /= 2;
  if (problem_.page_size == 0) {
    TensorView keys = view(buffer, set, shape.h_kv, problem_.packed.varlen ? shape.total_kv : shape.s_kv, head_dim);
    keys.dtype = dtype;
    return keys;
  }
  void* const memory = of_set(buffer, set);
  const bool contiguous = problem_.page_size == kContiguous;
  const std::int64_t pages = contiguous ? shape.b : problem_.pages();
  const std::int64_t page_size = contiguous ? shape.s_kv : problem_.page_size;
  if (problem_.layout == Layout::bhsd) return TensorView(memory, dtype, {pages, shape.h_kv, page_size, head_dim});
  return TensorView(memory, dtype, {pages, page_size, shape.h_kv, head_dim}).swap_axes(1, 2);
}

TensorView BenchTensors::scales_view(const DeviceBuffer& buffer, int set, const TensorView& keys) const {
  if (buffer.size() == 0) return {};
  if (size_of(problem_.dtype) == 1 && problem_.packed.varlen) {
    return TensorView(static_cast<void*>(of_set(buffer, set)), DType::f32, {keys.shape[1], keys.shape[0]});
  }
  if (keys.dtype == DType::u4x2) {
    const std::int64_t pairs = 2 * keys.shape[3] / (problem_.group_size != 0 ? problem_.group_size : 32);
    return TensorView(static_cast<void*>(of_set(buffer, set)), problem_.dtype,
                      {keys.shape[0], keys.shape[1], keys.shape[2], 2 * pairs});
  }
  return TensorView(static_cast<void*>(of_set(buffer, set)), DType::f32, {keys.shape[0], keys.shape[1], keys.shape[2]});
}

TensorView BenchTensors::view(const DeviceBuffer& buffer, int set, std::int64_t heads, std::int64_t rows,
                              int head_dim) const {
  return view(buffer, set, heads, rows, head_dim, problem_.dtype);
}

TensorView BenchTensors::view(const DeviceBuffer& buffer, int set, std::int64_t heads, std::int64_t rows, int head_dim,
                              DType dtype) const {
  void* const memory = of_set(buffer, set);
  if (problem_.packed.varlen) return TensorView(memory, dtype, {rows, heads, head_dim});
  if (problem_.layout == Layout::bhsd) return TensorView(memory, dtype, {problem_.shape.b, heads, rows, head_dim});
  return TensorView(memory, dtype, {problem_.shape.b, rows, heads, head_dim}).swap_axes(1, 2);
}

ForwardInputs BenchTensors::inputs(int set) const {
  const AttentionShape& shape = problem_.shape;
  ForwardInputs result{view(q_, set, shape.h_q, problem_.packed.varlen ? shape.total_q : shape.s_q, problem_.d_qk),
                       keys_view(k_, set, problem_.key_columns(), problem_.k_dtype),
                       keys_view(v_, set, problem_.d_v, problem_.v_stored()),
                       captures(false),
                       of_heads(device_sink_),
                       sequences(),
                       dropout()};
  result.place = problem_.place;
  result.max_multiprocessors = problem_.max_multiprocessors;
  if (problem_.value_in_key) result.v = TensorView();
  if (!problem_.latent()) result.k_scale = scales_view(k_scale_, set, result.k);
  result.v_scale = scales_view(v_scale_, set, result.v);
  if (problem_.page_size > 0) {
    const std::int64_t width = static_cast<std::int64_t>(table_.size()) / shape.b;
    result.cache.block_table = TensorView(block_table_.data(), DType::i32, {shape.b, width});
  }
  return result;
}

ForwardOutputs BenchTensors::outputs(int set) const {
  const AttentionShape& shape = problem_.shape;
  const bool packed = problem_.packed.varlen;
  const auto rows = [&](void* data, std::int64_t heads, bool keys) {
    const bool requests = keys && problem_.page_size != 0;  // whose sums are apart, of packed queries too
    if (packed && !requests) return TensorView(data, DType::f32, {heads, keys ? shape.total_kv : shape.total_q});
    return TensorView(data, DType::f32, {shape.b, heads, keys ? shape.s_kv : shape.s_q});
  };
  ForwardOutputs result{view(o_, set, shape.h_q, packed ? shape.total_q : shape.s_q, problem_.d_v, problem_.o_dtype()),
                        rows(of_set(lse_, set), shape.h_q, false),
                        {}};
  const Statistics& wanted = problem_.statistics;
  if (wanted.max_logit != MaxLogit::none) {
    result.statistics.max_logit = wanted.max_logit_by_head ? TensorView(max_logit_.data(), DType::f32, {shape.h_q})
                                                           : rows(max_logit_.data(), shape.h_q, false);
  }
  if (wanted.entropy) result.statistics.entropy = rows(entropy_.data(), shape.h_q, false);
  if (wanted.column_sums != ColumnSums::none) {
    const bool of_kv = wanted.column_sums == ColumnSums::kv_heads;
    result.statistics.column_sums = rows(column_sums_.data(), of_kv ? shape.h_kv : shape.h_q, true);
  }
  if (wanted.top_keys != 0) {
    const bool of_kv = wanted.summed_heads() == ColumnSums::kv_heads;
    result.statistics.top_keys =
        TensorView(top_keys_.data(), DType::i32, {shape.b, of_kv ? shape.h_kv : shape.h_q, wanted.top_keys});
  }
  return result;
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
  result.place = in.place;
  result.max_multiprocessors = in.max_multiprocessors;
  return result;
}

BackwardOutputs BenchTensors::backward_outputs() const {
  const ForwardInputs in = inputs();
  const auto [wants_dq, wants_dk, wants_dv] = problem_.shape.gradients;
  BackwardOutputs out;
  if (wants_dq) out.dq = like(in.q, dq_);
  if (wants_dk) out.dk = like(in.k, dk_);
  if (wants_dv) out.dv = like(in.v, dv_);
  out.captures = captures(true);
  out.dsink = of_heads(dsink_);
  return out;
}

PackedSequences BenchTensors::sequences() const {
  const bool packed = problem_.packed.varlen, paged = problem_.page_size != 0;
  PackedSequences result;
  if (!packed && !paged) return result;
  const auto array = [](const DeviceBuffer& buffer) { return static_cast<const std::int32_t*>(buffer.data()); };
  result.b = problem_.shape.b;
  result.max_s_kv = problem_.shape.s_kv;
  if (paged) result.seqused_kv = array(used_kv_);
  if (!packed) return result;
  result.max_s_q = problem_.shape.s_q;
  result.cu_seqlens_q = array(cumulative_);
  if (!paged) result.cu_seqlens_kv = problem_.cumulative_kv.empty() ? array(cumulative_) : array(cumulative_kv_);
  return result;
}

DropoutState BenchTensors::dropout() const {
  return problem_.packed.dropout > 0 ? kBenchDropout : DropoutState{};
}

void BenchTensors::spoil_output() {
  const bool backward = problem_.op == Operation::backward;
  for (DeviceBuffer* buffer : backward ? std::vector{&dq_, &dk_, &dv_} : std::vector{&o_}) spoil(*buffer);
}

KernelInfo prepare(const Attention& attention, const BenchProblem& problem) {
  return problem.op == Operation::backward ? attention.backward_kernel_info(problem.shape)
                                           : attention.kernel_info(problem.shape);
}

std::size_t workspace_size(const Attention& attention, const BenchProblem& problem) {
  return problem.op == Operation::backward ? attention.backward_workspace_size(problem.shape)
                                           : attention.workspace_size(problem.shape);
}

void launch(const Attention& attention, const BenchProblem& problem, const BenchTensors& tensors, Stream stream,
            Workspace workspace) {
  if (problem.op == Operation::backward) {
    attention.backward(tensors.backward_inputs(), tensors.backward_outputs(), stream, workspace);
  } else {
    attention.forward(tensors.inputs(), tensors.outputs(), stream, workspace);
  }
}

}  // namespace fa::cli
