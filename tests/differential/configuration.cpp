#include "differential/configuration.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <sstream>

#include "differential/functions.hpp"
#include "differential/random.hpp"

namespace fa::differential {
namespace {

std::int64_t random_head_dim(Random& random) {
  if (random.percent(70)) return random.pick<std::int64_t>({64, 64, 64, 128, 128, 96, 256, 192});
  return 8 * random.between(1, 32);
}

void choose_masks(Random& random, Configuration& c) {
  AttentionConfig& config = c.config;
  config.causal = random.percent(45);
  config.causal_align = random.percent(30) ? CausalAlign::top_left : CausalAlign::bottom_right;
  if (random.percent(25)) config.window_left = random.pick<std::int64_t>({0, 1, 7, 20, 63, 64, 100, 127, 500});
  if (random.percent(20)) {
    config.window_right = config.causal ? 0 : random.pick<std::int64_t>({0, 1, 5, 31, 64, 129});
  }
  if (random.percent(12)) config.chunk = random.pick<std::int64_t>({1, 5, 24, 64, 100, 128});
}

/// Whether scores reach the softmax as the product leaves them: what the exact maximum is offered for.
bool has_plain_scores(const Configuration& c) {
  const AttentionConfig& config = c.config;
  return !config.varlen && config.dropout == 0 && c.score == nullptr && c.mask == nullptr && config.window_left < 0 &&
         config.window_right < 0 && config.chunk == 0;
}

constexpr const char* kExactMax = "exact_max=1";

/// The planner's kernel, or one of a family, or one with a choice made for it.
void choose_kernels(Random& random, Configuration& c, Where where) {
  if (where == Where::host) return;
  const int choice = static_cast<int>(random.below(100));
  KernelOverride forward, backward;
  if (choice < 20) forward.kernel = backward.kernel = "sm80";
  if (choice >= 20 && choice < 26) forward.text = "pack_gqa=1";
  if (choice >= 26 && choice < 30) forward.text = "splits=3";
  if (choice >= 30 && choice < 34) forward.text = kExactMax;
  if (choice >= 34 && choice < 38) forward = {"sm80", "tile_m=64 tile_n=48 warps=4"};
  static constexpr const char* kClusters[] = {"split_blocks=2", "split_blocks=3", "in_turns=1", "split_blocks=8"};
  if (choice >= 38 && choice < 54) c.config.kernel_backward = KernelOverride{"", kClusters[choice % 4]};
  if (choice >= 38) return;
  c.config.kernel = forward;
  if (choice < 20) c.config.kernel_backward = backward;
}

std::int64_t random_length(Random& random, Size size, Where where, bool keys) {
  static constexpr std::int64_t kEdges[] = {15,  16,  17,  31,  32,  33,  47,  63,  64,  65, 80,
                                            127, 128, 129, 176, 191, 192, 193, 255, 256, 257};
  static constexpr std::int64_t kPrimes[] = {2, 3, 5, 7, 11, 13, 19, 37, 53, 71, 97, 109, 131, 163, 211, 293, 307};
  const bool tiny = where == Where::host || size == Size::small;
  const std::int64_t most = tiny ? 140 : 320;
  std::int64_t length = 0;
  const int kind = static_cast<int>(random.below(100));
  if (kind < 4) return keys ? random.below(2) : 1;
  if (kind < 40) {
    length = kEdges[random.below(std::size(kEdges))];
  } else if (kind < 70) {
    length = kPrimes[random.below(std::size(kPrimes))];
  } else {
    length = random.between(1, most);
  }
  if (where == Where::host) length = 1 + length % (keys ? 90 : 60);
  if (size == Size::small && where == Where::cuda) length = std::min(length, most);
  return length;
}

Layout random_layout(Random& random, LayoutClass layouts, bool input, std::int64_t element_bytes, bool has_negative) {
  static constexpr int kOrders[][3] = {{0, 1, 2}, {0, 2, 1}, {0, 2, 1}, {1, 0, 2}, {2, 0, 1}, {2, 1, 0}, {1, 2, 0}};
  Layout layout;
  const auto& order = kOrders[random.below(std::size(kOrders))];
  std::copy_n(order, 3, layout.order.begin());
  const std::int64_t unit = 16 / element_bytes;
  if (random.percent(30)) layout.row_padding = unit * random.between(1, 3);
  if (random.percent(20)) layout.offset = unit;
  const bool unaligned = layouts == LayoutClass::unaligned || (layouts == LayoutClass::mixed && random.percent(30));
  if (unaligned) layout.row_padding = random.pick<std::int64_t>({0, 1, 3, unit + 1});
  if (unaligned && random.percent(60)) layout.offset = 1;
  const bool strange = layouts == LayoutClass::strange || (layouts == LayoutClass::mixed && random.percent(30));
  if (strange && input && random.percent(40)) layout.expanded = 1u << random.below(3);
  if (strange && has_negative && random.percent(30)) layout.negative = static_cast<int>(random.below(3));
  return layout;
}

void choose_layouts(Random& random, const Configuration& c, Call& call) {
  const auto bytes = static_cast<std::int64_t>(size_of(c.config.dtype));
  for (Layout* layout : {&call.q, &call.k, &call.v, &call.dout}) {
    *layout = random_layout(random, c.layouts, true, bytes, true);
  }
  for (Layout* layout : {&call.o, &call.dq, &call.dk, &call.dv}) {
    *layout = random_layout(random, c.layouts, false, bytes, true);
  }
  for (Layout* layout : {&call.lse_layout, &call.dlse_layout}) {
    if (random.percent(60)) continue;
    *layout = random_layout(random, c.layouts, layout == &call.dlse_layout, 4, false);
    layout->row_padding = 0;
    if (random.percent(30)) layout->step = 2;
  }
  call.capture.row_padding = random.percent(30) ? random.between(1, 5) : 0;
  call.capture.offset = random.percent(30) ? random.between(1, 3) : 0;
  call.capture.negative = random.percent(10) ? 0 : -1;
}

std::int64_t lay_out(Random& random, std::int64_t count, std::int64_t most, std::vector<std::int32_t>* cu,
                     std::vector<std::int32_t>* used) {
  cu->push_back(static_cast<std::int32_t>(random.percent(50) ? 0 : random.below(3)));
  const bool partly = random.percent(33);
  for (std::int64_t i = 0; i < count; ++i) {
    std::int64_t length = random.percent(12) ? 0 : random.between(1, most);
    if (random.percent(20)) length = std::min<std::int64_t>(random.pick<std::int64_t>({1, 16, 64, 128}), most);
    cu->push_back(cu->back() + static_cast<std::int32_t>(length));
    if (partly) used->push_back(static_cast<std::int32_t>(random.percent(30) ? length : random.below(length + 1)));
  }
  return cu->back() + (random.percent(50) ? 0 : random.between(1, 3));
}

std::int64_t longest(const std::vector<std::int32_t>& cu) {
  std::int64_t result = 0;
  for (std::size_t i = 1; i < cu.size(); ++i) result = std::max<std::int64_t>(result, cu[i] - cu[i - 1]);
  return result;
}

void choose_packed(Random& random, const Configuration& c, Size size, Where where, Call& call) {
  const bool tiny = where == Where::host || size == Size::small;
  const std::int64_t count =
      tiny ? random.pick<std::int64_t>({1, 2, 3, 5}) : random.pick<std::int64_t>({1, 2, 3, 6, 12, 40});
  const std::int64_t most = where == Where::host ? 40 : count > 10 ? 60 : tiny ? 70 : 280;
  call.b = 1;
  call.s_q = lay_out(random, count, c.decode ? 4 : most, &call.cu_q, &call.used_q);
  call.s_kv = lay_out(random, count, most, &call.cu_kv, &call.used_kv);
  if (!random.percent(50)) return;
  call.max_s_q = longest(call.cu_q);
  call.max_s_kv = longest(call.cu_kv);
}

void choose_dense(Random& random, const Configuration& c, std::uint64_t shape, Size size, Where where, Call& call) {
  call.b = random.pick<std::int64_t>({1, 1, 2, 3});
  call.s_q = c.decode ? random.between(1, 6) : random_length(random, size, where, false);
  call.s_kv = random_length(random, size, where, true);
  if (c.config.causal && random.percent(30)) call.s_kv = std::max<std::int64_t>(call.s_q, 1);
  const bool large = where == Where::cuda && size == Size::usual && shape == 4;
  if (large && random.percent(50)) {
    call.b = 1;
    call.s_kv = random.pick<std::int64_t>({1024, 2048, 1531, 2503, 4096});
    call.s_q = c.decode ? random.between(1, 6) : random.pick<std::int64_t>({384, 768, 1031, 1600});
  }
  if (random.percent(1)) call.b = 0;
  if (random.percent(1)) call.s_q = 0;
}

/// A cache in pages, or contiguous, which has no backward, dropout and alignment to the first key.
void choose_pages(Random& random, Configuration& c) {
  AttentionConfig& config = c.config;
  config.page_size = random.pick<std::int64_t>({1, 3, 8, 12, 16, 16, 40, 64, 256, kContiguous, kContiguous});
  config.causal_align = CausalAlign::bottom_right;
  config.dropout = 0;
  config.kernel_backward.reset();
  if (config.kernel && config.kernel->text == kExactMax) config.kernel.reset();
  config.check_sequences = random.percent(20);
  for (CaptureChoice& capture : c.captures) capture.requires_grad = false;
}

/// Dense calls of `batch` refuse some strides, and so do rows by wgmma, with some pages and first keys.
void choose_invariance(Random& random, Configuration& c, Where where) {
  AttentionConfig& config = c.config;
  if (!random.percent(15) || config.accumulate) return;
  const bool ragged = config.varlen || config.page_size != 0;
  config.invariance = ragged && random.percent(40) ? Invariance::batch : Invariance::rows;
  if (where == Where::cuda && (ragged || c.layouts != LayoutClass::aligned)) config.kernel = KernelOverride{"sm80", ""};
  if (!config.kernel) return;
  config.kernel->text.clear();
  if (config.kernel->kernel != "sm80") config.kernel.reset();
}

bool is_stored(const AttentionConfig& config) {
  return config.k_dtype.has_value() || config.v_dtype.has_value();
}

/// K or V in 8 or 4 bits, where the rest has it.
void choose_stored(Random& random, AttentionConfig& config) {
  const bool half = config.dtype == DType::f16 || config.dtype == DType::bf16;
  const bool packed = config.varlen && config.page_size == 0;
  if (!half || packed || config.dropout > 0 || config.invariance != Invariance::none || !random.percent(35)) return;
  const auto pick = [&] { return random.pick({DType::e4m3, DType::i8, DType::u4x2, DType::u4x2}); };
  const std::int64_t which = random.below(4);
  if (which != 0) config.k_dtype = pick();
  if (which != 1) config.v_dtype = pick();
  const bool u4 = config.k_dtype == DType::u4x2 || config.v_dtype == DType::u4x2;
  const int group = random.pick({32, 32, 64, 128});
  if (u4) config.group_size = random.percent(30) && group == 32 ? 0 : group;
  const int granule = u4 ? group : 16;
  const auto round_up = [&](int d) { return std::min((d + granule - 1) / granule * granule, 256); };
  config.head_dim = round_up(config.head_dim);
  config.head_dim_v = round_up(config.head_dim_v);
  config.kernel.reset();
}

bool without_stored(AttentionConfig& config) {
  const bool changed = is_stored(config);
  config.k_dtype = config.v_dtype = std::nullopt;
  config.group_size = 0;
  return changed;
}

bool without_bytes(AttentionConfig& config) {
  const bool changed = has_bytes(config);
  if (changed) config.dtype = DType::bf16;
  config.o_dtype.reset();
  config.key_scales = config.value_scales = config.precise = false;
  return changed;
}

/// q, k and v in 8 bits, of which there is a forward alone; on a GPU with fewer masks.
void choose_bytes(Random& random, Configuration& c, Where where) {
  AttentionConfig& config = c.config;
  if (is_stored(config) || config.dtype == DType::f64 || !random.percent(20)) return;
  config.dtype = random.pick({DType::e4m3, DType::e4m3, DType::e5m2, DType::i8, DType::i8});
  if (random.percent(60)) config.o_dtype = random.pick({DType::bf16, DType::f16, DType::e4m3});
  config.key_scales = random.percent(45);
  config.value_scales = random.percent(45);
  config.precise = random.percent(30);
  config.head_dim = std::min((config.head_dim + 15) / 16 * 16, 256);
  config.head_dim_v = std::min((config.head_dim_v + 15) / 16 * 16, 256);
  config.dropout = 0;
  config.accumulate = false;
  config.invariance = Invariance::none;
  config.zero_padding = config.zero_padding && config.o_dtype != DType::e4m3;
  config.kernel.reset(), config.kernel_backward.reset();
  if (where == Where::cuda && random.percent(30)) {
    config.kernel = random.pick<KernelOverride>({{"sm90_fp8", "stages=2 q_buffers=1"}, {"", "pack_gqa=1"}});
  }
  for (CaptureChoice& capture : c.captures) capture.requires_grad = false;
  if (where == Where::host) return;
  c.mask = nullptr;
  if (config.page_size == 0) return;
  config.chunk = 0;
  if (config.window_left < 256) config.window_left = -1;  // shorter than a page, or than a KV tile
  if (config.page_size > 0) config.page_size = (config.page_size + 7) / 8 * 8;
}

/// Rows of multiples of 16 bytes, in any order of the axes.
void align_rows(Layout& layout) {
  layout.row_padding = layout.row_padding / 16 * 16;
  layout.offset = layout.offset / 16 * 16;
  layout.expanded = 0;
  layout.negative = -1;
}

void choose_scales(Random& random, const Configuration& c, Where where, Call& call) {
  const auto of_keys = [&](bool rows) {
    return rows ? random.pick(
                      {ScaleOf::row, ScaleOf::row, ScaleOf::block, ScaleOf::head, ScaleOf::tensor, ScaleOf::none})
                : random.pick({ScaleOf::head, ScaleOf::head, ScaleOf::tensor, ScaleOf::none});
  };
  call.q_scale = of_keys(true);
  call.k_scale = of_keys(c.config.key_scales);
  call.v_scale = of_keys(c.config.value_scales);
  call.row_bias = c.config.dtype == DType::i8 && random.percent(70);
  call.backward = call.scheduled = false;
  call.begin.clear();
  for (Layout* layout : {&call.q, &call.k, &call.v, &call.o}) align_rows(*layout);
  if (where == Where::host || c.config.page_size == 0) return;
  // Pages are a whole number of heads apart, of k and v the same.
  if (call.k.order[0] == 1 || call.k.order == std::array<int, 3>{2, 1, 0}) call.k.order = {0, 2, 1};
  call.v.order = call.k.order;
}

/// Lengths of dense requests, and which positions of all count.
void choose_requests(Random& random, const Configuration& c, Call& call) {
  call.backward = false;
  call.indexed = random.percent(30);
  call.scheduled = random.percent(40);
  if (!c.config.varlen && random.percent(70)) {
    for (std::int64_t b = 0; b < call.b; ++b) {
      call.used_kv.push_back(static_cast<std::int32_t>(random.between(0, call.s_kv)));
    }
  }
  if (random.percent(60)) return;
  for (std::int64_t i = 0; i < call.sequences(c.config.varlen); ++i) {
    call.begin.push_back(static_cast<std::int32_t>(random.between(0, call.keys_of(c.config.varlen, i))));
  }
}

}  // namespace

bool has_bytes(const AttentionConfig& config) {
  return config.dtype == DType::e4m3 || config.dtype == DType::e5m2 || config.dtype == DType::i8;
}

DType output_dtype(const AttentionConfig& config) {
  return has_bytes(config) ? config.o_dtype.value_or(DType::bf16) : config.dtype;
}

std::int64_t Call::keys_of(bool varlen, std::int64_t i) const {
  const auto n = static_cast<std::size_t>(i);
  if (!used_kv.empty()) return used_kv[n];
  return varlen ? cu_kv[n + 1] - cu_kv[n] : s_kv;
}

std::vector<std::string> Configuration::capture_names() const {
  std::vector<std::string> names;
  for (const CaptureChoice& capture : captures) names.push_back(capture.name);
  return names;
}

void Configuration::settle() {
  const std::vector<std::string> names = capture_names();
  config.score = {to_text(score, names), {}};
  config.mask = {to_text(mask, names), {}};
  const auto declare = [&](const ExprPtr& function, std::vector<Capture>* declared, bool of_mask) {
    visit(function, [&](const Expr& e) {
      if (e.op != Op::load) return;
      const CaptureChoice& capture = captures[static_cast<std::size_t>(e.capture)];
      const auto same = [&](const Capture& known) { return known.name == capture.name; };
      if (std::ranges::none_of(*declared, same)) {
        declared->push_back({capture.name, capture.dtype, !of_mask && capture.requires_grad});
      }
    });
  };
  declare(score, &config.score.captures, false);
  declare(mask, &config.mask.captures, true);
}

namespace {

/// By numbers of its own. Statistics of rows are of kernels that leave rows to one thread block.
void choose_statistics(Random random, Configuration& c) {
  AttentionConfig& config = c.config;
  if (has_bytes(config) || config.accumulate || config.invariance != Invariance::none || !random.percent(40)) return;
  Statistics& wanted = config.statistics;
  wanted.max_logit = random.pick({MaxLogit::none, MaxLogit::softmax, MaxLogit::scaled});
  wanted.entropy = random.percent(50);
  wanted.column_sums = random.pick({ColumnSums::none, ColumnSums::query_heads, ColumnSums::kv_heads});
  if (wanted.max_logit != MaxLogit::none || wanted.entropy) config.kernel.reset();
}

}  // namespace

Configuration random_configuration(std::uint64_t seed, std::uint64_t number, Where where, Size size) {
  Random random(seed * 1000003 + number);
  Configuration c;
  AttentionConfig& config = c.config;
  config.dtype = random.pick({DType::bf16, DType::bf16, DType::f16, DType::f16, DType::f32});
  if (where == Where::host && random.percent(20)) config.dtype = DType::f64;
  if (where == Where::host) config.host_f64 = random.percent(20);
  config.head_dim = static_cast<int>(random_head_dim(random));
  config.head_dim_v = static_cast<int>(random.percent(25) ? random_head_dim(random) : config.head_dim);
  if (where == Where::host || (size == Size::small && random.percent(50))) {
    config.head_dim = 8 * static_cast<int>(1 + config.head_dim / 8 % 9);
    config.head_dim_v = 8 * static_cast<int>(1 + config.head_dim_v / 8 % 9);
  }
  if (random.percent(15)) config.scale = random.pick({-0.1f, 0.05f, 0.2f, 0.f, 0.3f});
  config.tune = TunePolicy::off;
  config.deterministic = random.percent(20);
  choose_masks(random, c);
  config.sink = random.percent(25);
  if (random.percent(30)) config.dropout = random.pick({0.1f, 0.3f, 0.5f, 0.05f, 0.8f, 0.9f});
  config.varlen = random.percent(30);
  config.zero_padding = config.varlen && random.percent(35);
  config.check_sequences = config.varlen && random.percent(10);
  c.layouts = random.pick({LayoutClass::aligned, LayoutClass::aligned, LayoutClass::aligned, LayoutClass::aligned,
                           LayoutClass::unaligned, LayoutClass::strange, LayoutClass::mixed});
  c.decode = random.percent(12);
  choose_kernels(random, c, where);
  const bool gradients = random.percent(60) && (where == Where::host || !config.deterministic);
  choose_functions(random, c, where, gradients);
  if (config.kernel && config.kernel->text == kExactMax && !has_plain_scores(c)) config.kernel->text.clear();
  if (random.percent(20)) choose_pages(random, c);
  config.accumulate = !config.sink && random.percent(12);
  choose_invariance(random, c, where);
  choose_stored(random, config);
  choose_bytes(random, c, where);
  choose_statistics(Random(seed * 1000033 + number), c);
  c.settle();
  return c;
}

namespace {

/// Somewhere in a larger attention. Masks in closed form take equal steps, and dropout whole calls of its generator.
void choose_place(Random& random, const Configuration& c, Call& call) {
  const AttentionConfig& config = c.config;
  const bool masked = config.causal || config.window_left >= 0 || config.window_right >= 0 || config.chunk > 0;
  const std::int64_t unit = config.dropout > 0 ? 32 : 1;
  ShardPlace place;
  place.b = random.between(0, 2);
  place.h_q = call.h_kv > 0 ? random.between(0, 2) * (call.h_q / call.h_kv) : 0;
  place.q = random.between(0, 200 / unit) * unit;
  place.kv = random.between(0, 200 / unit) * unit;
  if (config.dropout == 0 && random.percent(30)) place.q_step = place.kv_step = random.between(1, 4);
  if (!masked && config.dropout == 0 && random.percent(20)) place.q_step = random.between(1, 3);
  if (config.chunk % place.q_step != 0) place.q_step = place.kv_step = 1;
  place.whole_b = place.b + call.b + random.between(0, 1);
  place.whole_h_q = place.h_q + call.h_q + random.between(0, 3);
  place.whole_s_q = place.q + call.s_q * place.q_step + random.between(0, 100);
  place.whole_s_kv = place.kv + call.s_kv * place.kv_step + random.between(0, 100);
  call.place = place;
}

}  // namespace

Call random_call(const Configuration& c, std::uint64_t seed, std::uint64_t number, std::uint64_t shape, Where where,
                 Size size) {
  Random random((seed * 1000003 + number) * 1009 + shape + 17);
  Call call;
  call.h_kv = random.pick<std::int64_t>({1, 1, 2, 3});
  call.h_q = call.h_kv * random.pick<std::int64_t>({1, 1, 2, 3, 4, 5, 8});
  if (random.percent(1)) call.h_q = call.h_kv = 0;
  if (c.config.varlen) {
    choose_packed(random, c, size, where, call);
  } else {
    choose_dense(random, c, shape, size, where, call);
  }
  if (call.s_q * call.s_kv > 500000 && call.h_q > 4) call.h_q = call.h_kv * std::max<std::int64_t>(1, 4 / call.h_kv);
  if (where == Where::host && call.h_q > 6) call.h_q = call.h_kv * 2;
  call.lse = random.percent(85);
  call.dlse = random.percent(50);
  call.backward = random.percent(85);
  call.dsink = random.percent(80);
  call.positive_empty_lse = random.percent(15);
  call.workspace = random.percent(30);
  call.tiles = random.percent(30);
  call.values = random.bits();
  call.dropout = {.seed = random.bits(), .offset = random.bits() >> static_cast<int>(random.below(64))};
  call.dropout_on_device = random.percent(25);
  if (random.percent(35)) {
    call.hostile =
        random.pick({Hostile::unseen_keys, Hostile::empty_rows, Hostile::large, Hostile::tiny, Hostile::equal_keys});
  }
  choose_layouts(random, c, call);
  if (c.config.page_size != 0) choose_requests(random, c, call);
  if (c.config.accumulate) call.lse = true, call.backward = false;  // whose o and lse are of other keys, too
  if (is_stored(c.config)) call.backward = false, call.k.expanded = call.v.expanded = 0;
  if (random.percent(25)) {
    call.gradients = random.pick<Gradients>(
        {{true, false, false}, {false, true, true}, {false, true, false}, {false, false, true}, {true, true, false}});
  }
  const bool alone = c.config.varlen || c.config.page_size != 0 || c.config.invariance != Invariance::none;
  if (!alone && random.percent(25)) choose_place(random, c, call);
  if (has_bytes(c.config)) choose_scales(random, c, where, call);
  return call;
}

// ---- edits ----

namespace {

/// A whole call in the place of packed sequences: the longest of them.
void make_dense(Configuration& c, Call& call) {
  const std::int64_t s_q = std::max<std::int64_t>(longest(call.cu_q), 1), s_kv = longest(call.cu_kv);
  c.config.varlen = c.config.zero_padding = c.config.check_sequences = false;
  call.cu_q.clear(), call.cu_kv.clear(), call.used_q.clear(), call.used_kv.clear();
  call.begin.clear();
  call.max_s_q = call.max_s_kv = 0;
  call.b = 1, call.s_q = s_q, call.s_kv = s_kv;
}

/// Leaves the sequences out that `keep` says false of.
void keep_sequences(Call& call, std::size_t first, std::size_t count) {
  const auto cut = [&](std::vector<std::int32_t>& cu, std::vector<std::int32_t>& used) {
    cu.assign(cu.begin() + static_cast<std::ptrdiff_t>(first),
              cu.begin() + static_cast<std::ptrdiff_t>(first + count + 1));
    if (!used.empty()) {
      used.assign(used.begin() + static_cast<std::ptrdiff_t>(first),
                  used.begin() + static_cast<std::ptrdiff_t>(first + count));
    }
  };
  cut(call.cu_q, call.used_q);
  cut(call.cu_kv, call.used_kv);
  if (call.begin.empty()) return;
  call.begin.assign(call.begin.begin() + static_cast<std::ptrdiff_t>(first),
                    call.begin.begin() + static_cast<std::ptrdiff_t>(first + count));
}

/// The nth operand of the root, where it can stand for it.
bool replace_root(ExprPtr& root, std::size_t n) {
  if (root == nullptr || n >= root->in.size()) return false;
  const ExprPtr in = root->in[n];
  const bool boolean = root->kind == Kind::boolean;
  if (boolean != (in->kind == Kind::boolean) || in->kind == Kind::integer) return false;
  root = in;
  return true;
}

using Edit = bool (*)(Configuration&, Call&);

/// All of them are done.
template <class... Changes>
bool any(Changes... changed) {
  return (changed || ...);
}

template <class T>
bool set(T& target, const T& value) {
  if (target == value) return false;
  target = value;
  return true;
}

bool plain_layout(Layout& layout) {
  const Layout plain;
  const bool changed = layout.order != plain.order || layout.row_padding != 0 || layout.offset != 0 ||
                       layout.expanded != 0 || layout.negative != -1 || layout.step != 1;
  layout = plain;
  return changed;
}

bool aligned_layouts(Call& call) {
  bool changed = false;
  for (Layout* layout : {&call.q, &call.k, &call.v, &call.o, &call.lse_layout, &call.dout, &call.dlse_layout, &call.dq,
                         &call.dk, &call.dv, &call.capture}) {
    changed |= plain_layout(*layout);
  }
  return changed;
}

/// Lengths of dense requests stay within a shorter s_kv.
bool with_shorter_requests(bool changed, Call& call) {
  for (std::vector<std::int32_t>* values : {&call.used_kv, &call.begin}) {
    for (std::int32_t& value : *values) value = std::min(value, static_cast<std::int32_t>(call.s_kv));
  }
  return changed;
}

bool halve(std::int64_t& length, const Configuration& c, std::int64_t least) {
  if (c.config.varlen || length <= least) return false;
  length = std::max(least, length / 2);
  return true;
}

bool less(std::int64_t& length, const Configuration& c, std::int64_t least) {
  if (c.config.varlen || length <= least) return false;
  --length;
  return true;
}

using Edits = std::map<std::string, Edit>;

/// Functions, packed batches and pages.
Edits edits_of_requests() {
  return {
      {"no_backward", [](Configuration&, Call& call) { return set(call.backward, false); }},
      {"no_score", [](Configuration& c, Call&) { return set(c.score, ExprPtr{}); }},
      {"no_mask", [](Configuration& c, Call&) { return set(c.mask, ExprPtr{}); }},
      {"dense", [](Configuration& c, Call& call) { return c.config.varlen && (make_dense(c, call), true); }},
      {"first_half",
       [](Configuration& c, Call& call) {
         const std::size_t count = call.cu_q.empty() ? 0 : call.cu_q.size() - 1;
         return c.config.varlen && count > 1 && (keep_sequences(call, 0, count / 2), true);
       }},
      {"second_half",
       [](Configuration& c, Call& call) {
         const std::size_t count = call.cu_q.empty() ? 0 : call.cu_q.size() - 1;
         return c.config.varlen && count > 1 && (keep_sequences(call, count / 2, count - count / 2), true);
       }},
      {"no_used",
       [](Configuration&, Call& call) {
         if (call.used_q.empty() && call.used_kv.empty()) return false;
         call.used_q.clear(), call.used_kv.clear();  // requests get longer: first positions stay inside
         return true;
       }},
      {"no_pages",
       [](Configuration& c, Call& call) {
         if (!c.config.varlen) call.used_kv.clear(), c.config.check_sequences = false;
         call.begin.clear();
         if (c.config.varlen && without_stored(c.config)) return true;
         return any(set(c.config.page_size, std::int64_t{0}), set(call.indexed, false), set(call.scheduled, false));
       }},
      {"no_stored", [](Configuration& c, Call&) { return without_stored(c.config); }},
      {"no_bytes", [](Configuration& c, Call&) { return without_bytes(c.config); }},
      {"no_precise", [](Configuration& c, Call&) { return set(c.config.precise, false); }},
      {"no_o_dtype", [](Configuration& c, Call&) { return set(c.config.o_dtype, std::optional<DType>{}); }},
      {"no_scales",
       [](Configuration& c, Call& call) {
         return any(set(c.config.key_scales, false), set(c.config.value_scales, false),
                    set(call.q_scale, ScaleOf::none), set(call.k_scale, ScaleOf::none),
                    set(call.v_scale, ScaleOf::none));
       }},
      {"no_row_bias", [](Configuration&, Call& call) { return set(call.row_bias, false); }},
      {"no_schedule", [](Configuration&, Call& call) { return set(call.scheduled, false); }},
      {"no_begin", [](Configuration&, Call& call) { return any(set(call.begin, {}), set(call.indexed, false)); }},
      {"no_maxima",
       [](Configuration&, Call& call) {
         return any(set(call.max_s_q, std::int64_t{0}), set(call.max_s_kv, std::int64_t{0}));
       }},
      {"no_zero_padding", [](Configuration& c, Call&) { return set(c.config.zero_padding, false); }},
      {"no_check", [](Configuration& c, Call&) { return set(c.config.check_sequences, false); }},
  };
}

/// What is on in a configuration or a call.
Edits edits_of_switches() {
  return {
      {"no_dropout", [](Configuration& c, Call&) { return set(c.config.dropout, 0.f); }},
      {"no_accumulate", [](Configuration& c, Call&) { return set(c.config.accumulate, false); }},
      {"no_statistics", [](Configuration& c, Call&) { return set(c.config.statistics, Statistics{}); }},
      {"no_invariance", [](Configuration& c, Call&) { return set(c.config.invariance, Invariance::none); }},
      {"no_place",
       [](Configuration&, Call& call) {
         const bool changed = call.place.has_value();
         call.place.reset();
         return changed;
       }},
      {"no_sink", [](Configuration& c, Call&) { return set(c.config.sink, false); }},
      {"no_causal", [](Configuration& c, Call&) { return set(c.config.causal, false); }},
      {"no_window_left", [](Configuration& c, Call&) { return set(c.config.window_left, std::int64_t{-1}); }},
      {"no_window_right", [](Configuration& c, Call&) { return set(c.config.window_right, std::int64_t{-1}); }},
      {"no_chunk", [](Configuration& c, Call&) { return set(c.config.chunk, std::int64_t{0}); }},
      {"no_scale",
       [](Configuration& c, Call&) {
         if (!c.config.scale) return false;
         c.config.scale.reset();
         return true;
       }},
      {"no_deterministic", [](Configuration& c, Call&) { return set(c.config.deterministic, false); }},
      {"no_kernel",
       [](Configuration& c, Call&) {
         if (!c.config.kernel && !c.config.kernel_backward) return false;
         c.config.kernel.reset(), c.config.kernel_backward.reset();
         return true;
       }},
      {"no_hostile", [](Configuration&, Call& call) { return set(call.hostile, Hostile::none); }},
      {"no_dlse", [](Configuration&, Call& call) { return set(call.dlse, false); }},
      {"no_positive_lse", [](Configuration&, Call& call) { return set(call.positive_empty_lse, false); }},
      {"no_extras",
       [](Configuration&, Call& call) {
         return any(set(call.workspace, false), set(call.tiles, false), set(call.dropout_on_device, false));
       }},
      {"no_gradients",
       [](Configuration& c, Call&) {
         bool changed = false;
         for (CaptureChoice& capture : c.captures) changed |= set(capture.requires_grad, false);
         return changed;
       }},
      {"no_numbers",
       [](Configuration& c, Call&) {
         bool changed = false;
         for (CaptureChoice& capture : c.captures) changed |= set(capture.as_number, false);
         return changed;
       }},
  };
}

/// Layouts, sizes, and roots of functions.
Edits edits_of_sizes() {
  return {
      {"plain_layouts", [](Configuration&, Call& call) { return aligned_layouts(call); }},
      {"b=1", [](Configuration& c, Call& call) { return !c.config.varlen && set(call.b, std::int64_t{1}); }},
      {"h=1",
       [](Configuration&, Call& call) { return any(set(call.h_q, std::int64_t{1}), set(call.h_kv, std::int64_t{1})); }},
      {"no_groups", [](Configuration&, Call& call) { return set(call.h_q, call.h_kv); }},
      {"d_v=d_qk", [](Configuration& c, Call&) { return set(c.config.head_dim_v, c.config.head_dim); }},
      {"d=64",
       [](Configuration& c, Call&) {
         return c.config.group_size <= 64 && any(set(c.config.head_dim, 64), set(c.config.head_dim_v, 64));
       }},
      {"halve_s_q", [](Configuration& c, Call& call) { return halve(call.s_q, c, 1); }},
      {"halve_s_kv",
       [](Configuration& c, Call& call) {
         return !c.config.varlen && with_shorter_requests(halve(call.s_kv, c, 1), call);
       }},
      {"less_s_q", [](Configuration& c, Call& call) { return less(call.s_q, c, 1); }},
      {"less_s_kv", [](Configuration& c,
                       Call& call) { return !c.config.varlen && with_shorter_requests(less(call.s_kv, c, 1), call); }},
      {"score.0", [](Configuration& c, Call&) { return replace_root(c.score, 0); }},
      {"score.1", [](Configuration& c, Call&) { return replace_root(c.score, 1); }},
      {"score.2", [](Configuration& c, Call&) { return replace_root(c.score, 2); }},
      {"mask.0", [](Configuration& c, Call&) { return replace_root(c.mask, 0); }},
      {"mask.1", [](Configuration& c, Call&) { return replace_root(c.mask, 1); }},
  };
}

const Edits& known_edits() {
  static const Edits kEdits = [] {
    Edits all = edits_of_requests();
    all.merge(edits_of_switches());
    all.merge(edits_of_sizes());
    return all;
  }();
  return kEdits;
}

}  // namespace

bool edit(const std::string& name, Configuration& c, Call& call) {
  const auto found = known_edits().find(name);
  if (found == known_edits().end() || !found->second(c, call)) return false;
  c.settle();
  return true;
}

std::vector<std::string> edits_for(const Configuration& c, const Call& call) {
  static const char* const kOrder[] = {
      "no_backward", "no_hostile",      "no_score",         "no_mask",       "no_stored",
      "no_bytes",    "no_precise",      "no_scales",        "no_row_bias",   "no_o_dtype",
      "no_pages",    "no_schedule",     "no_begin",         "dense",         "first_half",
      "second_half", "no_dropout",      "no_accumulate",    "no_statistics", "no_invariance",
      "no_place",    "no_sink",         "no_kernel",        "plain_layouts", "no_gradients",
      "no_causal",   "no_window_left",  "no_window_right",  "no_chunk",      "h=1",
      "b=1",         "no_groups",       "no_deterministic", "no_scale",      "no_used",
      "no_maxima",   "no_zero_padding", "no_check",         "no_dlse",       "no_positive_lse",
      "no_extras",   "no_numbers",      "score.0",          "score.1",       "score.2",
      "mask.0",      "mask.1",          "halve_s_q",        "halve_s_kv",    "d_v=d_qk",
      "d=64",        "less_s_q",        "less_s_kv"};
  std::vector<std::string> possible;
  for (const char* name : kOrder) {
    Configuration changed = c;
    Call changed_call = call;
    if (edit(name, changed, changed_call)) possible.emplace_back(name);
  }
  return possible;
}

// ---- texts ----

namespace {

std::string layout_text(const char* name, const Layout& layout) {
  std::ostringstream out;
  out << " " << name << ":"
      << "bhs"[layout.order[0]] << "bhs"[layout.order[1]] << "bhs"[layout.order[2]];
  if (layout.row_padding != 0) out << "+" << layout.row_padding;
  if (layout.offset != 0) out << "@" << layout.offset;
  for (int axis = 0; axis < 3; ++axis) {
    if ((layout.expanded >> axis & 1) != 0)
      out << "0"
          << "bhs"[axis];
  }
  if (layout.negative >= 0)
    out << "-"
        << "bhs"[layout.negative];
  return out.str();
}

void add_list(std::ostringstream& out, const char* name, const std::vector<std::int32_t>& values) {
  if (values.empty()) return;
  out << " " << name << "=";
  for (std::size_t i = 0; i < values.size(); ++i) out << (i == 0 ? "" : ",") << values[i];
}

const char* name_of(Hostile hostile) {
  switch (hostile) {
    case Hostile::none:
      return "none";
    case Hostile::unseen_keys:
      return "unseen_keys";
    case Hostile::empty_rows:
      return "empty_rows";
    case Hostile::large:
      return "large";
    case Hostile::tiny:
      return "tiny";
    case Hostile::equal_keys:
      return "equal_keys";
  }
  return "";
}

std::string statistics_text(const Statistics& wanted) {
  std::string text;
  if (wanted.max_logit != MaxLogit::none) text += wanted.max_logit == MaxLogit::scaled ? " max_scaled" : " max_logit";
  if (wanted.entropy) text += " entropy";
  if (wanted.column_sums == ColumnSums::none) return text;
  return text + (wanted.column_sums == ColumnSums::kv_heads ? " sums_of_kv_heads" : " sums");
}

const char* name_of(ScaleOf of) {
  static constexpr const char* kNames[] = {"none", "tensor", "head", "block", "row"};
  return kNames[static_cast<std::size_t>(of)];
}

}  // namespace

std::string to_string(const Configuration& c) {
  const AttentionConfig& config = c.config;
  std::ostringstream out;
  out << fa::to_string(config.dtype) << " d " << config.head_dim << "/" << config.head_dim_v;
  if (config.scale) out << " scale " << *config.scale;
  if (config.causal) out << " causal";
  if (config.causal_align == CausalAlign::top_left) out << " top_left";
  if (config.window_left >= 0) out << " window_left " << config.window_left;
  if (config.window_right >= 0) out << " window_right " << config.window_right;
  if (config.chunk > 0) out << " chunk " << config.chunk;
  if (config.sink) out << " sink";
  if (config.accumulate) out << " accumulate";
  if (config.invariance != Invariance::none) out << " invariance " << to_string(config.invariance);
  if (config.statistics.any()) out << statistics_text(config.statistics);
  if (config.dropout > 0) out << " dropout " << config.dropout;
  if (config.deterministic) out << " deterministic";
  if (config.varlen)
    out << " varlen" << (config.zero_padding ? " zero_padding" : "") << (config.check_sequences ? " checked" : "");
  if (config.page_size != 0) {
    out << (config.page_size < 0 ? " contiguous" : " pages of " + std::to_string(config.page_size));
    out << (!config.varlen && config.check_sequences ? " checked" : "");
  }
  if (config.k_dtype) out << " k " << fa::to_string(*config.k_dtype);
  if (config.v_dtype) out << " v " << fa::to_string(*config.v_dtype);
  if (config.group_size != 0) out << " group " << config.group_size;
  if (config.o_dtype) out << " o " << fa::to_string(*config.o_dtype);
  out << (config.key_scales ? " key_scales" : "") << (config.value_scales ? " value_scales" : "")
      << (config.precise ? " precise" : "");
  if (config.host_f64) out << " host_f64";
  if (config.kernel) {
    out << " kernel{" << config.kernel->kernel << ' ' << config.kernel->text << "}";
  }
  if (!config.score.expression.empty()) out << " score '" << config.score.expression << "'";
  if (!config.mask.expression.empty()) out << " mask '" << config.mask.expression << "'";
  for (const CaptureChoice& capture : c.captures) {
    out << " " << capture.name << ":" << fa::to_string(capture.dtype) << (capture.requires_grad ? ":grad" : "")
        << (capture.as_number ? ":number" : "");
  }
  return out.str();
}

std::string to_string(const Configuration& c, const Call& call) {
  std::ostringstream out;
  out << to_string(c) << " | b " << call.b << " h " << call.h_q << "/" << call.h_kv << " s " << call.s_q << "x"
      << call.s_kv;
  add_list(out, "cu_q", call.cu_q);
  add_list(out, "cu_kv", call.cu_kv);
  add_list(out, "used_q", call.used_q);
  add_list(out, "used_kv", call.used_kv);
  add_list(out, "begin", call.begin);
  if (call.indexed) out << " indexed";
  if (call.scheduled) out << " scheduled";
  if (has_bytes(c.config)) {
    out << " scales " << name_of(call.q_scale) << "/" << name_of(call.k_scale) << "/" << name_of(call.v_scale)
        << (call.row_bias ? " row_bias" : "");
  }
  if (call.max_s_q != 0) out << " max " << call.max_s_q << "x" << call.max_s_kv;
  if (call.place) {
    const ShardPlace& at = *call.place;
    out << " at b " << at.b << " h " << at.h_q << " q " << at.q << "+" << at.q_step << " kv " << at.kv << "+"
        << at.kv_step << " of b " << at.whole_b << " h " << at.whole_h_q << " s " << at.whole_s_q << "x"
        << at.whole_s_kv;
  }
  if (call.hostile != Hostile::none) out << " values " << name_of(call.hostile);
  out << (call.backward ? "" : " forward only") << (call.lse ? "" : " no lse") << (call.dlse ? " dlse" : "");
  out << (call.positive_empty_lse ? " lse+inf" : "") << (call.workspace ? " workspace" : "")
      << (call.tiles ? " tiles" : "");
  const auto [dq, dk, dv] = call.gradients;
  out << (dq ? "" : " without dq") << (dk ? "" : " without dk") << (dv ? "" : " without dv");
  out << layout_text("q", call.q) << layout_text("k", call.k) << layout_text("v", call.v) << layout_text("o", call.o);
  if (call.backward) {
    out << layout_text("dout", call.dout) << layout_text("dq", call.dq) << layout_text("dk", call.dk)
        << layout_text("dv", call.dv);
  }
  return out.str();
}

}  // namespace fa::differential
