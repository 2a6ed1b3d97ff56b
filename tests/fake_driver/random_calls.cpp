#include "fake_driver/random_calls.hpp"

#include <algorithm>
#include <array>
#include <fa/functions.hpp>
#include <span>
#include <sstream>
#include <utility>

namespace fa {
namespace {

constexpr std::uintptr_t kApart = std::uintptr_t{1} << 34;  // more than any tensor reaches

int d_v_of(const AttentionConfig& config) {
  if (config.head_dim_v != 0) return config.head_dim_v;
  return config.value_in_key != 0 ? config.value_in_key : config.head_dim;
}

/// As include/fa/attention.hpp says it, and not as the library computes it.
bool has_aligned_rows(const TensorView& view) {
  const auto element = static_cast<std::int64_t>(size_of(view.dtype));
  if (reinterpret_cast<std::uintptr_t>(view.data) % 16 != 0) return false;
  for (std::size_t axis = 0; axis + 1 < static_cast<std::size_t>(view.rank); ++axis) {
    if (view.shape[axis] > 1 && view.strides[axis] * element % 16 != 0) return false;
  }
  return true;
}

bool all_aligned(std::initializer_list<TensorView> views) {
  for (const TensorView& view : views) {
    if (!has_aligned_rows(view)) return false;
  }
  return true;
}

}  // namespace

AttentionConfig RandomCalls::config() {
  AttentionConfig config;
  config.dtype = one_of({DType::f16, DType::bf16, DType::f16, DType::bf16, DType::f32});
  config.head_dim = one_of({64, 128, 128, static_cast<int>(8 * up_to(32))});
  if (one_in(4)) config.head_dim_v = one_of({64, 128, static_cast<int>(8 * up_to(32))});
  config.causal = one_in(2);
  config.causal_align = one_of({CausalAlign::bottom_right, CausalAlign::top_left});
  config.deterministic = one_in(3);
  config.sink = one_in(6);
  if (one_in(8)) config.dropout = 0.25f;
  if (one_in(6)) config.window_left = 100;
  if (one_in(4)) {
    config.score = functions::alibi();
  } else if (one_in(6)) {
    config.score = {"score + bias[q, kv]", {{"bias", DType::bf16}}};
  }
  if (one_in(3)) {
    config.mask = {"doc[b, q] == doc[b, kv]", {{"doc", DType::i32}}};
  } else if (one_in(4)) {
    config.mask = {"(q + h) % 3 != kv % 5"};
  }
  if (one_in(6)) config.window_right = 30;
  if (one_in(10)) config.chunk = 64;
  if (one_in(8)) config.scale = one_of({-0.1f, 0.0f, 0.3f});
  config.varlen = one_in(3);
  config.zero_padding = config.varlen && one_in(3);
  if (one_in(4)) {
    KernelOverride fixed;
    fixed.kernel = one_of({"", "sm80", "sm90"});
    fixed.text = one_of({"splits=0", "splits=1", "splits=3"});
    config.kernel_backward = fixed;
    if (one_in(2)) fixed.text += one_in(2) ? " pack_gqa=1" : " pack_gqa=0";
    // Drawn for every family, so that the calls behind are the same whatever its kernels have.
    for (const char* const field : {" affine_reach=", " exact_max="}) {
      if (!one_in(4)) continue;
      const char* const value = one_in(2) ? "1" : "0";
      if (fixed.kernel != "sm80") fixed.text += std::string(field) + value;
    }
    config.kernel = fixed;
  }
  if (usual_ && config.dtype == DType::f32) config.dtype = DType::bf16;
  if (usual_ && one_in(2)) config.score = {}, config.mask = {}, config.varlen = config.zero_padding = false;
  if (usual_ && !config.deterministic && !config.score.captures.empty()) {
    config.score.captures.front().requires_grad = one_in(2);
  }
  return config;
}

AttentionConfig RandomCalls::paged_config() {
  AttentionConfig config = this->config();
  config.page_size = one_of<std::int64_t>({1, 3, 8, 12, 16, 16, 40, 64, 256});
  config.causal_align = CausalAlign::bottom_right;
  config.dropout = 0;
  config.kernel_backward.reset();
  if (config.kernel && config.kernel->kernel == "sm90") config.kernel.reset();
  for (Capture& capture : config.score.captures) capture.requires_grad = false;
  return config;
}

AttentionShape RandomCalls::shape(const AttentionConfig& config) {
  const auto length = [&] {
    return one_of<std::int64_t>(
        {one_in(8) ? 0 : 1, up_to(70), up_to(300), 1023, up_to(5000), one_in(4) ? 65536 : 2048});
  };
  AttentionShape shape;
  shape.b = one_of<std::int64_t>({1, 1, 2, 3, 16, one_in(8) ? 0 : 5});
  shape.h_kv = one_of<std::int64_t>({1, 1, 2, 8});
  shape.h_q = shape.h_kv * one_of<std::int64_t>({1, 1, 2, 3, 8});
  shape.s_q = length();
  shape.s_kv = length();
  if (usual_ && one_in(2)) {  // long rows of several heads
    shape.b = up_to(4);
    shape.h_kv = shape.h_q = 8 * up_to(4);
    shape.s_q = shape.s_kv = one_of<std::int64_t>({1024, 2048, 4096, 8192, 1000 + up_to(8000)});
  }
  if (!config.varlen) return shape;
  const auto total = [&](std::int64_t longest) { return longest + (shape.b < 2 ? up_to(5) - 1 : up_to(longest + 1)); };
  shape.total_q = shape.b == 0 ? 0 : total(shape.s_q);
  shape.total_kv = shape.b == 0 ? 0 : total(shape.s_kv);
  if (one_in(4)) shape.s_q = 0;  // not known
  if (one_in(4)) shape.s_kv = 0;
  return shape;
}

std::uintptr_t RandomCalls::memory() {
  next_ += 4 * kApart;
  return next_ + 2 * kApart;
}

/// [b, h, s, d] in one of the ways in which programs have it: a tensor of its own with heads or rows outside, part of
/// one with more columns, and for inputs broadcast, upside down or from an odd address.
TensorView RandomCalls::tensor(const AttentionConfig& config, std::int64_t b, std::int64_t h, std::int64_t s, int d,
                               bool written) {
  const std::int64_t pitch = d + one_of<std::int64_t>({0, 0, 0, 0, 0, 8, 64, 1, 4});
  if (usual_) return TensorView(reinterpret_cast<void*>(memory()), config.dtype, {b, s, h, d}).swap_axes(1, 2);
  std::array<std::int64_t, 4> strides = {h * s * pitch, s * pitch, pitch, 1};
  if (one_in(3)) strides = {s * h * pitch, pitch, h * pitch, 1};
  std::uintptr_t address = memory();
  const auto element = static_cast<std::uintptr_t>(size_of(config.dtype));
  if (one_in(16)) address += element * one_of<std::uintptr_t>({1, 2, 4, 8});
  if (!written && one_in(6)) strides[random_() % 3] = 0;
  if (!written && one_in(16)) {
    std::int64_t& stride = strides[random_() % 3];
    stride = -stride;
  }
  return {reinterpret_cast<void*>(address), config.dtype, std::array{b, h, s, std::int64_t{d}}, strides};
}

TensorView RandomCalls::statistic(std::int64_t b, std::int64_t h, std::int64_t s) {
  return {reinterpret_cast<void*>(memory()), DType::f32, {b, h, s}};
}

PackedSequences RandomCalls::sequences(const AttentionConfig& config, const AttentionShape& shape) {
  const auto array = [&] { return reinterpret_cast<const std::int32_t*>(memory()); };
  PackedSequences sequences;
  sequences.b = shape.b;
  if (config.page_size > 0) {
    if (config.varlen) sequences.cu_seqlens_q = array();
    if (config.varlen && one_in(3)) sequences.seqused_q = array();
    sequences.seqused_kv = array();
    sequences.max_s_q = config.varlen ? shape.s_q : 0;
    sequences.max_s_kv = shape.s_kv;
    return sequences;
  }
  sequences.cu_seqlens_q = array();
  sequences.cu_seqlens_kv = array();
  if (one_in(3)) sequences.seqused_q = array();
  if (one_in(3)) sequences.seqused_kv = array();
  sequences.max_s_q = shape.s_q;
  sequences.max_s_kv = shape.s_kv;
  return sequences;
}

PagedCache RandomCalls::cache(const AttentionConfig& config, const AttentionShape& shape) {
  PagedCache cache;
  const bool indexed = one_in(3);
  const std::int64_t rows = indexed ? shape.b + up_to(5) : shape.b;
  const std::int64_t pages = (shape.s_kv + config.page_size - 1) / config.page_size + up_to(3) - 1;
  cache.block_table = TensorView(reinterpret_cast<const void*>(memory()), DType::i32, {rows, pages});
  if (one_in(4)) cache.block_table.strides = {pages + 7, 1};
  if (indexed) cache.batch_index = reinterpret_cast<const std::int32_t*>(memory());
  if (one_in(3)) cache.seq_begin = reinterpret_cast<const std::int32_t*>(memory());
  return cache;
}

Captures RandomCalls::captures(const AttentionConfig& config, const AttentionShape& shape) {
  // Of sequences whose lengths are not known, one may be all there is.
  const std::int64_t s_q = config.varlen && shape.s_q == 0 ? shape.total_q : shape.s_q;
  const bool known = !config.varlen || shape.s_kv != 0 || config.page_size > 0;
  const std::int64_t s_kv = known ? shape.s_kv : shape.total_kv;
  std::vector<Captured> all;
  void* const data = reinterpret_cast<void*>(memory());
  for (const Capture& capture : config.score.captures) {
    if (capture.name == "slope") all.emplace_back("slope", TensorView(data, capture.dtype, {shape.h_q}));
    if (capture.name == "bias") all.emplace_back("bias", TensorView(data, capture.dtype, {s_q, s_kv}));
  }
  for (const Capture& capture : config.mask.captures) {
    const std::int64_t longest = std::max(s_q, s_kv);
    all.emplace_back("doc", TensorView(reinterpret_cast<void*>(memory()), capture.dtype, {shape.b, longest}));
  }
  Captures result;
  for (const Captured& captured : all) result.add(captured);
  return result;
}

void RandomCalls::add_statistics(const AttentionConfig& config, const AttentionShape& shape, std::int64_t s_kv,
                                 Call& call) {
  const Statistics& wanted = config.statistics;
  const std::int64_t b = call.outputs.o.shape[0], s_q = call.outputs.o.shape[2];
  const std::int64_t summed = wanted.summed_heads() == ColumnSums::kv_heads ? shape.h_kv : shape.h_q;
  const auto greatest = [&] {
    return wanted.max_logit_by_head ? TensorView(reinterpret_cast<void*>(memory()), DType::f32, {shape.h_q})
                                    : statistic(b, shape.h_q, s_q);
  };
  const auto of_keys = [&] {
    return config.page_size > 0 ? statistic(shape.b, summed, shape.s_kv) : statistic(b, summed, s_kv);
  };
  StatisticsOutputs& outputs = call.outputs.statistics;
  if (wanted.max_logit != MaxLogit::none) outputs.max_logit = greatest();
  if (wanted.entropy) outputs.entropy = statistic(b, shape.h_q, s_q);
  if (wanted.column_sums != ColumnSums::none) outputs.column_sums = of_keys();
  if (wanted.top_keys > 0) {
    outputs.top_keys = {reinterpret_cast<void*>(memory()), DType::i32, {shape.b, summed, wanted.top_keys}};
  }
  StatisticsGradients& gradients = call.backward_inputs.statistics;
  if (wanted.entropy_gradient) gradients.entropy = outputs.entropy, gradients.dentropy = statistic(b, shape.h_q, s_q);
  if (wanted.max_logit_gradient) gradients.dmax_logit = greatest();
  if (wanted.column_sums_gradient) gradients.dcolumn_sums = of_keys();
}

RandomCalls::Call RandomCalls::call(const AttentionConfig& config, const AttentionShape& given) {
  AttentionShape shape = given;
  const bool paged = config.page_size > 0;
  if (paged) shape.s_kv = std::max<std::int64_t>(shape.s_kv, 1);  // 0 stands for all of the table's
  const int d_v = d_v_of(config);
  const std::int64_t b = config.varlen ? 1 : shape.b;
  const std::int64_t s_q = config.varlen ? shape.total_q : shape.s_q;
  const std::int64_t s_kv = paged ? config.page_size : config.varlen ? shape.total_kv : shape.s_kv;
  const std::int64_t pools = paged ? up_to(1000) : b;
  const auto rows = [&](int d, bool written) { return tensor(config, b, shape.h_q, s_q, d, written); };
  const auto keys = [&](int d, bool written) { return tensor(config, pools, shape.h_kv, s_kv, d, written); };
  Call call;
  call.inputs.q = rows(config.head_dim, false);
  call.inputs.k = keys(config.head_dim, false);
  call.inputs.v = keys(d_v, false);
  call.inputs.captures = captures(config, shape);
  if (config.sink) call.inputs.sink = TensorView(reinterpret_cast<void*>(memory()), DType::f32, {shape.h_q});
  if (config.dropout > 0) call.inputs.dropout.seed = 7;
  if (config.varlen || paged) call.inputs.sequences = sequences(config, shape);
  if (paged) call.inputs.cache = cache(config, shape);
  call.outputs.o = rows(d_v, true);
  call.outputs.lse = statistic(b, shape.h_q, s_q);

  BackwardInputs& inputs = call.backward_inputs;
  inputs.q = call.inputs.q;
  inputs.k = call.inputs.k;
  inputs.v = call.inputs.v;
  inputs.captures = call.inputs.captures;
  inputs.sink = call.inputs.sink;
  inputs.dropout = call.inputs.dropout;
  inputs.sequences = call.inputs.sequences;
  inputs.o = call.outputs.o;
  inputs.lse = call.outputs.lse;
  inputs.dout = rows(d_v, false);
  call.backward_outputs = {rows(config.head_dim, true), keys(config.head_dim, true), keys(d_v, true)};
  if (usual_) {
    if (one_in(4)) inputs.dlse = statistic(b, shape.h_q, s_q);
    if (config.sink)
      call.backward_outputs.dsink = TensorView(reinterpret_cast<void*>(memory()), DType::f32, {shape.h_q});
    for (const Capture& capture : config.score.captures) {
      if (!capture.requires_grad) continue;
      TensorView gradient = inputs.captures.begin()->tensor;  // that of the score comes first
      gradient.data = reinterpret_cast<void*>(memory());
      gradient.dtype = DType::f32;
      call.backward_outputs.captures.add({capture.name, gradient});
    }
  }

  add_statistics(config, shape, s_kv, call);
  if (config.value_in_key > 0) call.inputs.v = inputs.v = {};

  call.forward_shape = call.backward_shape = shape;
  call.forward_shape.aligned = all_aligned({call.inputs.q, call.inputs.k, call.inputs.v, call.outputs.o});
  call.backward_shape.aligned =
      call.forward_shape.aligned &&
      all_aligned({inputs.dout, call.backward_outputs.dq, call.backward_outputs.dk, call.backward_outputs.dv});
  return call;
}

void add_to(AttentionConfig& config, RandomCalls& random) {
  if (random.one_in(3)) config.invariance = random.one_of({Invariance::batch, Invariance::rows});
  if (config.invariance != Invariance::none) {
    config.kernel = config.kernel_backward = std::nullopt;
  } else if (random.one_in(3)) {
    config.accumulate = true;
    config.sink = false;
  }
  if (config.page_size > 0 && config.invariance == Invariance::none && random.one_in(3)) {
    config.k_dtype = random.one_of({DType::e4m3, DType::i8});
    config.v_dtype = random.one_of({DType::e4m3, DType::i8});
  }
  if (config.page_size > 0 || config.varlen || !random.one_in(3)) return;
  const auto [causal, align] = std::pair(config.causal, config.causal_align);
  const auto [tune, cache] = std::pair(config.tune, config.cache);
  config = {};
  config.tune = tune, config.cache = cache;
  config.dtype = random.one_of({DType::e4m3, DType::e5m2});
  config.head_dim = random.one_of({64, 128, 256});
  config.causal = causal, config.causal_align = align;
}

namespace {

Statistics some_statistics(RandomCalls& random) {
  Statistics wanted;
  wanted.max_logit = random.one_of({MaxLogit::none, MaxLogit::softmax, MaxLogit::scaled});
  wanted.max_logit_by_head = wanted.max_logit != MaxLogit::none && random.one_in(3);
  wanted.entropy = random.one_in(2);
  wanted.column_sums = random.one_of({ColumnSums::none, ColumnSums::query_heads, ColumnSums::kv_heads});
  if (random.one_in(3)) wanted.top_keys = static_cast<int>(random.one_of<std::int64_t>({1, random.up_to(100), 1024}));
  wanted.entropy_gradient = wanted.entropy && random.one_in(2);
  wanted.max_logit_gradient = wanted.max_logit != MaxLogit::none && random.one_in(2);
  wanted.column_sums_gradient = wanted.column_sums != ColumnSums::none && random.one_in(2);
  return wanted;
}

}  // namespace

void widen(AttentionConfig& config, RandomCalls& random) {
  if (size_of(config.dtype) == 1) return;
  if (random.one_in(2)) {
    config.head_dim = random.one_of({264, 320, 384, 512, 576, static_cast<int>(256 + 8 * random.up_to(40))});
    const int d_v = static_cast<int>(8 * random.up_to(64));
    config.head_dim_v = random.one_of({std::min(config.head_dim, 512), std::min(config.head_dim, 512), d_v});
  }
  if (config.invariance == Invariance::none && !config.accumulate && random.one_in(2)) {
    config.statistics = some_statistics(random);
    if (config.statistics.any() && random.one_in(2)) config.kernel.reset();
  }
  if (random.one_in(4)) {
    config.value_in_key = std::min({config.head_dim, 512, static_cast<int>(8 * random.up_to(64))});
    config.head_dim_v = 0;
    config.v_dtype = config.k_dtype;
  }
  const bool may_store = config.dtype != DType::f32 && config.invariance == Invariance::none;
  if (config.k_dtype || config.value_in_key > 0 || !may_store || !random.one_in(config.page_size > 0 ? 2 : 3)) return;
  config.group_size = random.one_of({0, 32, 64, 128});
  config.head_dim = random.one_of({128, 256});
  config.head_dim_v = random.one_of({0, 128, 256});
  config.k_dtype = random.one_of({DType::u4x2, DType::u4x2, DType::e4m3});
  config.v_dtype = random.one_of({DType::u4x2, DType::u4x2, DType::i8});
  config.dropout = 0;
  if (config.page_size == 0) config.varlen = config.zero_padding = false;
  if (random.one_in(2)) config.statistics = {};
}

namespace {

template <class Inputs>
void place_any(Inputs& inputs, AttentionShape& shape, const AttentionConfig& config, RandomCalls& random) {
  if (random.one_in(4)) inputs.max_multiprocessors = static_cast<int>(random.up_to(100));
  shape.bounded = inputs.max_multiprocessors > 0;
  if (config.page_size > 0 || !random.one_in(2)) return;
  ShardPlace place;
  place.q = random.up_to(10000) - 1;
  place.kv = random.up_to(10000) - 1;
  if (!config.varlen && random.one_in(2)) place.q_step = place.kv_step = random.up_to(4);
  if (config.varlen || !random.one_in(3)) {
    inputs.place = place;
  } else {
    constexpr std::int64_t kWhole = 30000;  // of what captures have room for
    inputs.place = ShardPlace{.q_step = place.q_step,
                              .kv_step = place.kv_step,
                              .whole_b = kWhole,
                              .whole_h_q = kWhole,
                              .whole_s_q = kWhole,
                              .whole_s_kv = kWhole,
                              .begin = reinterpret_cast<const std::int64_t*>(std::uintptr_t{1} << 57)};
    shape.place_in_memory = true;
  }
  shape.placed = true;
  shape.strided = place.q_step != 1 || place.kv_step != 1;
}

}  // namespace

void place(ForwardInputs& inputs, AttentionShape& shape, const AttentionConfig& config, RandomCalls& random) {
  place_any(inputs, shape, config, random);
}

void place(BackwardInputs& inputs, AttentionShape& shape, const AttentionConfig& config, RandomCalls& random) {
  place_any(inputs, shape, config, random);
}

void store_in_few_bits(ForwardInputs& inputs, AttentionShape& shape, const AttentionConfig& config) {
  std::uintptr_t at = std::uintptr_t{1} << 59;
  const int group = config.group_size != 0 ? config.group_size : 32;
  const auto set = [&](TensorView& view, TensorView& scale, DType dtype) {
    const auto [pages, heads, rows, d] = view.shape;
    const bool pairs = dtype == DType::u4x2;
    view = TensorView(view.data, dtype, {pages, heads, rows, pairs ? d / 2 : d});
    view.data = reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(view.data) & ~std::uintptr_t{15});
    const auto* const data = reinterpret_cast<const void*>(at += std::uintptr_t{1} << 50);
    scale = pairs ? TensorView(data, config.dtype, {pages, heads, rows, 2 * d / group})
                  : TensorView(data, DType::f32, {pages, heads, rows});
  };
  set(inputs.k, inputs.k_scale, *config.k_dtype);
  if (config.v_dtype && config.value_in_key == 0) set(inputs.v, inputs.v_scale, *config.v_dtype);
  shape.aligned = all_aligned({inputs.q, inputs.k, inputs.v});
}

std::string text_of(const AttentionConfig& config, const AttentionShape& shape) {
  std::ostringstream text;
  text << to_string(config.dtype) << " d " << config.head_dim << "/" << d_v_of(config) << " causal " << config.causal
       << " deterministic " << config.deterministic << " dropout " << config.dropout << " window " << config.window_left
       << " score '" << config.score.expression << "' mask '" << config.mask.expression << "' kernel "
       << config.kernel.has_value() << "; b " << shape.b << " h " << shape.h_q << "/" << shape.h_kv << " s "
       << shape.s_q << "/" << shape.s_kv << " packed " << config.varlen << " " << shape.total_q << "/" << shape.total_kv
       << " aligned " << shape.aligned;
  return text.str();
}

}  // namespace fa
