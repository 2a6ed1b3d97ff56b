#include "fuzz/c_abi/arguments.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace fa::fuzz {
namespace {

constexpr double kMostWork = 4000000;  // elements of q times keys

std::int32_t statistic_dtype(const fa_config& config) {
  return config.dtype == FA_F64 ? FA_F64 : FA_F32;
}

std::int64_t head_dim(std::int32_t wanted) {
  return std::clamp(wanted, 1, 512);
}

double elements(const fa_tensor& tensor) {
  double count = 1;
  for (int axis = 0; axis < std::clamp(tensor.rank, 0, 4); ++axis) {
    count *= static_cast<double>(std::max<std::int64_t>(tensor.shape[axis], 0));
  }
  return count;
}

}  // namespace

float Arguments::number() {
  constexpr float kEdges[] = {0,
                              -0.0F,
                              1,
                              -1,
                              0.5F,
                              1e-40F,
                              3e38F,
                              -3e38F,
                              2.3e38F,
                              2e10F,
                              1e-5F,
                              65504.F,
                              1e-30F,
                              0.9999F,
                              std::numeric_limits<float>::infinity(),
                              -std::numeric_limits<float>::infinity(),
                              std::numeric_limits<float>::quiet_NaN()};
  return random_.pick(kEdges);
}

const char* Arguments::arch() {
  const char* const known[] = {"sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120"};
  if (!bad()) return text(random_.pick(known));
  const char* const wrong[] = {"", "sm_", "sm_9999999999999999999", "sm_-80", "sm_90ab", "compute_90", "sm_00"};
  if (random_.one_in(6)) return nullptr;
  return text(random_.one_in(3) ? hostile_text(random_) : random_.pick(wrong));
}

fa_device Arguments::device(bool host) {
  if (host && !bad()) return {FA_DEVICE_HOST, random_.wild32()};
  fa_device device{random_.one_in(2) ? FA_DEVICE_CUDA : FA_DEVICE_CURRENT, 0};
  spoil(&device.kind);
  if (random_.one_in(2)) device.ordinal = random_.wild32();
  return device;
}

// ---- Configurations ----

const fa_kernel_override* Arguments::kernel_override() {
  fa_kernel_override value{};
  std::int32_t* const fields[] = {&value.family,       &value.tile_m,      &value.tile_n,        &value.warps,
                                  &value.stages,       &value.loop_bodies, &value.splits,        &value.q_buffers,
                                  &value.warps_n,      &value.pack_gqa,    &value.take_turns,    &value.q_in_registers,
                                  &value.affine_reach, &value.exact_max,   &value.affine_product};
  constexpr const char* kKernels[] = {"", "sm80", "sm90", "sm90_wide", "sm90_forward", "sm80_backward", "sm70"};
  constexpr const char* kTexts[] = {
      "",        "tile_m=64", "tile_m=64 warps=4",  "splits=2, stages=2",     "exact_max=1",
      "tile_m=", "=",         "tile_m=99999999999", "q_buffers=1 q_buffers=2"};
  if (random_.one_in(3)) value.kernel = kKernels[random_.index(std::size(kKernels))];
  if (random_.one_in(3)) value.text = kTexts[random_.index(std::size(kTexts))];
  constexpr std::int32_t kUsual[] = {1, 2, 3, 4, 8, 16, 32, 64, 96, 128, 192, 256};
  for (std::uint64_t count = random_.below(4); count > 0; --count) {
    std::int32_t* const field = fields[random_.index(std::size(fields))];
    *field = random_.one_in(3) ? 1 + static_cast<std::int32_t>(random_.below(2)) : random_.pick(kUsual);
    spoil(field);
  }
  return give(value);
}

const fa_function* Arguments::function(bool mask, bool host, std::vector<NamedCapture>* captures) {
  Expression expression = random_expression(random_, mask);
  std::erase_if(expression.captures, [&](const NamedCapture& capture) {  // one declaration of a name
    return std::any_of(captures->begin(), captures->end(),
                       [&](const NamedCapture& c) { return c.name == capture.name; });
  });
  std::vector<fa_capture> declared;
  for (NamedCapture& capture : expression.captures) {
    if (capture.dtype == FA_F64 && !host) capture.dtype = FA_F32;
    fa_capture item{text(bad() ? hostile_text(random_) : capture.name), capture.dtype, capture.requires_grad};
    spoil(&item.dtype);
    spoil(&item.requires_grad);
    if (bad()) item.name = nullptr;
    declared.push_back(item);
    captures->push_back(capture);
  }
  fa_function value{};
  value.expression = text(bad() ? hostile_text(random_) : expression.text);
  if (bad()) value.expression = nullptr;
  value.capture_count = static_cast<std::uint32_t>(declared.size());
  value.captures = array(declared);
  if (bad()) value.captures = nullptr;
  if (bad()) value.capture_count = random_.one_in(2) ? 9 + random_.wild32() % 2 : 0;
  if (value.capture_count > declared.size() && value.capture_count <= 8) value.capture_count = 0;
  return give(value);
}

void Arguments::set_cache(fa_config* config) {
  const char* const folders[] = {"", "relative", "/dev/null", "/proc/self/nothing", "."};
  const char* const compilers[] = {"any", "13.0", ">=12.8", ""};
  const char* const wrong[] = {"13", ">=", "99999999999.0", "-1.0", "13.0 ", "13.x"};
  config->cache_mode = random_.one_in(8) ? FA_CACHE_DISK : FA_CACHE_MEMORY;
  if (random_.one_in(4)) config->cache_compilers = text(bad() ? random_.pick(wrong) : random_.pick(compilers));
  spoil(&config->cache_mode);
  spoil(&config->cache_max_bytes);
  spoil(&config->cache_max_entries);
  if (bad()) config->cache_directory = text(random_.one_in(3) ? hostile_text(random_) : random_.pick(folders));
  if (!random_.one_in(20)) return;
  const char* const packs[] = {"/dev/null", "/proc/self/exe", "/", "", "no such file"};
  std::vector<const char*> given;
  for (std::uint64_t count = random_.below(4); count > 0; --count) given.push_back(text(random_.pick(packs)));
  if (!given.empty() && bad()) given.back() = nullptr;
  config->cache_packs = array(given);
  config->cache_pack_count = given.size();
  if (bad()) config->cache_pack_count = 1025 + random_.below(1000);
  if (bad()) config->cache_packs = nullptr;
}

void Arguments::spoil_fields(fa_config& value) {
  for (std::int32_t* const field : {&value.head_dim,
                                    &value.head_dim_v,
                                    &value.dtype,
                                    &value.has_scale,
                                    &value.causal,
                                    &value.causal_align,
                                    &value.deterministic,
                                    &value.compile,
                                    &value.host_f64,
                                    &value.tune,
                                    &value.varlen,
                                    &value.zero_padding,
                                    &value.check_sequences,
                                    &value.sink,
                                    &value.has_window_left,
                                    &value.has_window_right,
                                    &value.accumulate,
                                    &value.invariance,
                                    &value.has_o_dtype,
                                    &value.o_dtype,
                                    &value.has_k_dtype,
                                    &value.k_dtype,
                                    &value.has_v_dtype,
                                    &value.v_dtype,
                                    &value.group_size,
                                    &value.key_scales,
                                    &value.value_scales,
                                    &value.precise,
                                    &value.max_logit,
                                    &value.max_logit_by_head,
                                    &value.entropy,
                                    &value.column_sums,
                                    &value.top_keys,
                                    &value.entropy_gradient,
                                    &value.max_logit_gradient,
                                    &value.column_sums_gradient}) {
    spoil(field);
  }
  for (std::int64_t* const field : {&value.window_left, &value.window_right, &value.chunk, &value.page_size}) {
    spoil(field);
  }
  if (bad()) value.dropout = number();
}

GivenConfig Arguments::config(bool host) {
  GivenConfig given;
  // Every other configuration is sound, for the calls to get somewhere.
  const std::uint64_t mischief = std::exchange(mischief_, random_.one_in(2) ? 0 : mischief_);
  constexpr std::int32_t kHeadDims[] = {8, 8, 8, 16, 16, 24, 32, 64, 128, 256};
  fa_config value{};
  value.head_dim = random_.pick(kHeadDims);
  value.head_dim_v = random_.one_in(2) ? 0 : random_.pick(kHeadDims);
  value.dtype = static_cast<std::int32_t>(random_.below(host ? 4 : 3));
  value.has_scale = random_.one_in(3);
  value.scale = bad() ? number() : 0.25F;
  value.causal = random_.one_in(3);
  value.causal_align = random_.one_in(3);
  value.deterministic = random_.one_in(4);
  value.compile = FA_COMPILE_NEVER;
  value.host_f64 = random_.one_in(4);
  value.tune = static_cast<std::int32_t>(random_.below(4));
  value.varlen = random_.one_in(4);
  value.zero_padding = value.varlen != 0 && random_.one_in(2);
  value.check_sequences = value.varlen != 0 && random_.one_in(4);
  value.dropout = random_.one_in(4) ? 0.3F : 0;
  value.sink = random_.one_in(4);
  value.has_window_left = random_.one_in(6);
  value.window_left = random_.between(0, 20);
  value.has_window_right = value.causal == 0 && random_.one_in(6);
  value.window_right = random_.between(0, 20);
  value.chunk = random_.one_in(6) ? random_.between(1, 20) : 0;
  if (random_.one_in(3)) value.score = function(false, host, &given.captures);
  if (random_.one_in(3)) value.mask = function(true, host, &given.captures);
  if (random_.one_in(host ? 8 : 3)) value.kernel = kernel_override();
  if (random_.one_in(host ? 8 : 3)) value.kernel_backward = kernel_override();
  if (random_.one_in(4)) {
    constexpr std::int64_t kPageSizes[] = {1, 3, 8, 12, 16, 40, 64, 256, FA_CONTIGUOUS, FA_CONTIGUOUS};
    value.page_size = random_.pick(kPageSizes);
    value.dropout = 0;
    value.causal_align = 0;
    value.check_sequences = value.check_sequences != 0 || random_.one_in(4);
  }
  value.accumulate = value.sink == 0 && random_.one_in(8);
  if (value.accumulate == 0 && random_.one_in(6)) {
    value.invariance = random_.one_in(2) ? FA_INVARIANCE_ROWS : FA_INVARIANCE_BATCH;
    value.kernel = nullptr;
  }
  if (random_.one_in(8)) {
    set_fp8(&value);
  } else if (random_.one_in(8)) {
    set_stored(&value);
  }
  if (value.accumulate == 0 && value.invariance == 0 && random_.one_in(6)) {
    value.max_logit = static_cast<std::int32_t>(random_.below(3));
    value.max_logit_by_head = value.max_logit != 0 && random_.one_in(2);
    value.entropy = random_.one_in(2);
    value.column_sums = static_cast<std::int32_t>(random_.below(3));
    if (random_.one_in(2)) value.top_keys = static_cast<std::int32_t>(1 + random_.below(random_.one_in(4) ? 1024 : 20));
    value.entropy_gradient = value.entropy != 0 && random_.one_in(2);
    value.column_sums_gradient = value.column_sums != 0 && random_.one_in(2);
    value.max_logit_gradient = value.max_logit != 0 && random_.one_in(2);
  }
  value.debug = random_.one_in(6);
  set_cache(&value);
  value.on_compile = [](void*, const fa_compile_event*) {};
  value.cache_keep_source = random_.one_in(8);
  spoil_fields(value);
  const std::uint32_t size = struct_size(sizeof value);
  given.seen = cut(value, size);
  if (given.seen.score == nullptr && given.seen.mask == nullptr) given.captures.clear();
  given.config = bad() && random_.one_in(4) ? nullptr : write(value, size);
  mischief_ = mischief;
  return given;
}

const fa_shape* Arguments::shape(const GivenConfig& config) {
  if (bad() && random_.one_in(4)) return nullptr;
  constexpr std::int64_t kLengths[] = {0, 1, 2, 3, 16, 63, 64, 65, 100, 128, 512, 1000, 2048, 4097, 100000};
  fa_shape value{};
  value.unaligned = random_.one_in(4);
  value.b = random_.between(0, 5);
  value.h_kv = random_.between(0, 4);
  value.h_q = value.h_kv * random_.between(1, 8);
  value.s_q = random_.pick(kLengths);
  value.s_kv = random_.pick(kLengths);
  if (config.seen.varlen != 0) {
    value.total_q = random_.one_in(2) ? 0 : random_.pick(kLengths);
    value.total_kv = random_.one_in(2) ? 0 : random_.pick(kLengths);
  }
  for (std::int64_t* const field :
       {&value.b, &value.h_q, &value.h_kv, &value.s_q, &value.s_kv, &value.total_q, &value.total_kv}) {
    spoil(field);
  }
  for (std::int32_t* const field : {&value.placed, &value.strided, &value.bounded, &value.place_in_memory}) {
    if (random_.one_in(6)) *field = 1;
  }
  return give(value);
}

const fa_shard_place* Arguments::place(const Sizes& sizes) {
  if (!random_.one_in(3)) return nullptr;
  constexpr std::int64_t kBegins[] = {0, 0, 1, 16, 32, 64, 96, 4096};
  fa_shard_place value{};
  value.b = random_.between(0, 2);
  value.h_q = sizes.h_kv > 0 ? random_.between(0, 2) * (sizes.h_q / sizes.h_kv) : 0;
  value.q = random_.pick(kBegins);
  value.kv = random_.pick(kBegins);
  value.q_step = value.kv_step = random_.one_in(2) ? 0 : random_.between(1, 4);
  if (random_.one_in(8)) value.q_step = 3;
  if (random_.one_in(2)) value.whole_b = value.b + sizes.b;
  if (random_.one_in(2)) value.whole_h_q = value.h_q + sizes.h_q + 8;
  if (random_.one_in(2)) value.whole_s_q = value.q + 4 * sizes.s_q + 1;
  if (random_.one_in(2)) value.whole_s_kv = value.kv + 4 * sizes.s_kv + 1;
  for (std::int64_t* const field : {&value.b, &value.h_q, &value.q, &value.kv, &value.q_step, &value.kv_step,
                                    &value.whole_b, &value.whole_h_q, &value.whole_s_q, &value.whole_s_kv}) {
    spoil(field);
  }
  if (random_.one_in(4)) {
    std::vector<std::int64_t> begin{value.b, value.h_q, value.q, value.kv};
    spoil(&begin[random_.index(begin.size())]);  // kernels stay within the whole
    value.begin = array(begin);
    if (!random_.one_in(8)) value.b = value.h_q = value.q = value.kv = 0;
  }
  return give(value);
}

std::int32_t Arguments::multiprocessors() {
  if (!random_.one_in(4)) return 0;
  std::int32_t value = static_cast<std::int32_t>(random_.between(1, 200));
  spoil(&value);
  return value;
}

const fa_workspace* Arguments::workspace() {
  if (random_.one_in(2)) return nullptr;
  fa_workspace value{};
  value.size = static_cast<std::size_t>(random_.below(4096));
  value.data = memory_.block(value.size);
  if (bad()) value.data = reinterpret_cast<void*>(random_.next());  // the host device has no use for it
  if (bad()) value.size = static_cast<std::size_t>(random_.wild());
  return give(value);
}

const fa_mask_tiles* Arguments::tiles() {
  if (!random_.one_in(6)) return nullptr;
  fa_mask_tiles value{};
  value.size = static_cast<std::size_t>(random_.below(4096));
  value.data = memory_.block(value.size);
  spoil(&value.filled);
  if (bad()) value.data = nullptr;
  return give(value);
}

const fa_schedule_memory* Arguments::schedule() {
  if (random_.one_in(6)) return nullptr;
  fa_schedule_memory value{};
  value.size = static_cast<std::size_t>(random_.below(4096));
  value.data = memory_.block(value.size);
  if (bad()) value.data = reinterpret_cast<void*>(random_.next());  // the host device has no use for it
  return give(value);
}

const fa_schedule_inputs* Arguments::schedule_inputs(const GivenConfig& config) {
  if (bad() && random_.one_in(4)) return nullptr;
  fa_schedule_inputs value{};
  const Sizes chosen = sizes(config);
  value.limits = shape(config);
  if (!bad()) value.sequences = sequences(config, chosen, {});
  if (random_.one_in(3)) value.seq_begin = lengths({1}, chosen.b);
  return give(value);
}

const fa_dropout_state* Arguments::dropout() {
  if (random_.one_in(3)) return nullptr;
  fa_dropout_state value{};
  value.seed = random_.next();
  value.offset = random_.one_in(2) ? random_.next() : random_.below(100);
  if (random_.one_in(3)) {
    std::byte* const state = memory_.block(24);
    value.device = reinterpret_cast<const std::uint64_t*>(state + (bad() ? random_.below(8) : 0));
  }
  return give(value);
}

// ---- Tensors ----

Sizes Arguments::sizes(const GivenConfig& config) {
  constexpr std::int64_t kLengths[] = {0, 1, 1, 2, 3, 5, 8, 17, 33, 64, 65, 70};
  Sizes result;
  result.b = random_.one_in(12) ? 0 : random_.between(1, 3);
  result.h_kv = random_.one_in(16) ? 0 : random_.between(1, 2);
  result.h_q = result.h_kv * random_.between(1, 3);
  result.s_q = random_.pick(kLengths);
  result.s_kv = random_.pick(kLengths);
  result.d_qk = head_dim(config.seen.head_dim);
  result.d_v = config.seen.value_in_key > 0  ? head_dim(config.seen.value_in_key)
               : config.seen.head_dim_v != 0 ? head_dim(config.seen.head_dim_v)
                                             : result.d_qk;
  result.heads = result.h_q != 1 || result.h_kv != 1 || random_.one_in(2);
  if (config.seen.varlen == 0) return result;
  result.heads = true;
  for (std::vector<std::int32_t>* const cu : {&result.cu_q, &result.cu_kv}) {
    cu->push_back(static_cast<std::int32_t>(random_.below(3)));
    for (std::int64_t i = 0; i < result.b; ++i) {
      cu->push_back(cu->back() + (random_.one_in(5) ? 0 : static_cast<std::int32_t>(random_.below(40))));
    }
  }
  result.s_q = result.cu_q.back() + random_.between(0, 3);
  result.s_kv = result.cu_kv.back() + random_.between(0, 3);
  return result;
}

/// Strides of some order of the axes, with gaps, backwards, or 0.
void Arguments::lay_out(fa_tensor* tensor, Use use, bool contiguous_rows) {
  const int rank = tensor->rank;
  if (random_.one_in(3)) {
    tensor->flags |= FA_TENSOR_ROW_MAJOR;
    for (std::int64_t& stride : tensor->strides) stride = random_.wild();  // which nobody reads
    return;
  }
  std::array<int, 4> order{0, 1, 2, 3};
  for (int i = rank - (contiguous_rows ? 2 : 1); i > 0; --i) {
    if (random_.one_in(2))
      std::swap(order[static_cast<std::size_t>(i)], order[random_.index(static_cast<std::size_t>(i))]);
  }
  std::uint64_t stride = 1;  // of an axis that was spoilt it wraps, and the tensor gets no memory
  for (int i = rank - 1; i >= 0; --i) {
    const int axis = order[static_cast<std::size_t>(i)];
    tensor->strides[axis] = static_cast<std::int64_t>(stride);
    const std::uint64_t reversed = 0 - stride;
    stride *= static_cast<std::uint64_t>(std::max<std::int64_t>(tensor->shape[axis], 1));
    if (random_.one_in(5)) stride += static_cast<std::uint64_t>(random_.between(1, 9));
    const bool last = contiguous_rows && axis == rank - 1;
    if (!last && random_.one_in(12)) tensor->strides[axis] = static_cast<std::int64_t>(reversed);
    if (!last && use == Use::input && random_.one_in(12)) tensor->strides[axis] = 0;
  }
}

const fa_tensor* Arguments::tensor(std::int32_t dtype, std::initializer_list<std::int64_t> shape, Use use,
                                   bool contiguous_rows, fa_tensor* seen) {
  fa_tensor value{};
  value.dtype = dtype;
  value.rank = static_cast<std::int32_t>(shape.size());
  std::copy(shape.begin(), shape.end(), value.shape);
  lay_out(&value, use, contiguous_rows);
  if (use == Use::input && random_.one_in(3)) value.flags |= FA_TENSOR_READ_ONLY;
  if (bad()) value.flags ^= random_.one_in(2) ? 1U : static_cast<std::uint32_t>(random_.next());
  spoil(&value.dtype);
  spoil(&value.rank);
  const std::size_t spoilt = random_.index(4);
  spoil(&value.shape[spoilt]);
  if (bad()) value.strides[spoilt] = random_.one_in(2) ? 0 : random_.wild();
  const std::uint32_t size = struct_size(sizeof value);
  const fa_tensor known = cut(value, size);
  if (seen != nullptr) *seen = known;
  constexpr double kMost = 1 << 22;  // elements that a call may go over one by one
  value.data = elements(known) > kMost ? nullptr : memory_.place(known, use == Use::output, bad());
  if (value.data == nullptr) {
    must_fail_ = true;
    value.data = reinterpret_cast<void*>(std::uintptr_t{1} << 44);
  }
  // A tensor without memory is refused, and so is one off its alignment, which bytes cannot be.
  if (bad()) {
    value.data = random_.one_in(2) || size_of(known.dtype) == 1 ? nullptr : static_cast<std::byte*>(value.data) + 1;
  }
  return write(value, size);
}

const fa_tensor* Arguments::heads_tensor(const GivenConfig& config, const Sizes& sizes, bool keys, bool of_v, Use use,
                                         fa_tensor* seen) {
  if (seen != nullptr) *seen = {};
  if (bad() && random_.one_in(3)) return nullptr;
  const std::int64_t heads = keys ? sizes.h_kv : sizes.h_q;
  const std::int64_t rows = keys ? sizes.s_kv : sizes.s_q;
  const std::int32_t of_o = config.seen.has_o_dtype != 0 ? config.seen.o_dtype : FA_BF16;
  const std::int32_t own = is_fp8(config.seen) && use == Use::output ? of_o : config.seen.dtype;
  const auto [dtype, d] = keys ? stored_rows(config.seen, sizes, of_v) : Rows{own, of_v ? sizes.d_v : sizes.d_qk};
  const std::int64_t page = config.seen.page_size;
  if (keys && page > 0 && page <= 256) {
    const std::int64_t pages = sizes.b * (rows / page + 1);
    if (!sizes.heads && random_.one_in(2)) return tensor(dtype, {pages, page, d}, use, true, seen);
    return tensor(dtype, {pages, heads, page, d}, use, true, seen);
  }
  const bool of_cache = keys && page == FA_CONTIGUOUS;
  if (config.seen.varlen != 0 && !of_cache) return tensor(dtype, {rows, heads, d}, use, true, seen);
  if (!sizes.heads) return tensor(dtype, {sizes.b, rows, d}, use, true, seen);
  return tensor(dtype, {sizes.b, heads, rows, d}, use, true, seen);
}

const fa_tensor* Arguments::statistic(const GivenConfig& config, const Sizes& sizes, Use use) {
  if (bad() && random_.one_in(3)) return nullptr;
  const std::int32_t dtype = statistic_dtype(config.seen);
  if (config.seen.varlen != 0) return tensor(dtype, {sizes.h_q, sizes.s_q}, use, false);
  if (!sizes.heads && random_.one_in(2)) return tensor(dtype, {sizes.b, sizes.s_q}, use, false);
  return tensor(dtype, {sizes.b, sizes.h_q, sizes.s_q}, use, false);
}

const fa_tensor* Arguments::sink(const GivenConfig& config, const Sizes& sizes, Use use) {
  if ((config.seen.sink != 0) == bad()) return nullptr;
  return tensor(statistic_dtype(config.seen), {sizes.h_q}, use, false);
}

/// `count` numbers, of which `values` are the first.
const std::int32_t* Arguments::lengths(std::vector<std::int32_t> values, std::int64_t count) {
  constexpr std::int64_t kMost = 65536;
  if (count > kMost) must_fail_ = true;
  values.resize(static_cast<std::size_t>(std::clamp<std::int64_t>(count, 0, kMost)),
                values.empty() ? 0 : values.back());
  if (!values.empty() && bad()) values[random_.index(values.size())] = random_.wild32();
  if (bad() && random_.one_in(3)) return nullptr;
  if (!bad() || random_.one_in(2)) return array(values);
  std::byte* const bytes = memory_.block(values.size() * sizeof(std::int32_t) + 1);
  return reinterpret_cast<const std::int32_t*>(bytes + 1);  // off its alignment
}

/// Of dense queries, `b` may be 0 for that of q, right or wrong.
const fa_sequences* Arguments::sequences(const GivenConfig& config, const Sizes& sizes, const fa_tensor& q) {
  const bool paged = config.seen.page_size != 0;
  requests_ = sizes.b;
  if ((config.seen.varlen != 0 || paged) == bad()) return nullptr;
  fa_sequences value{};
  value.b = sizes.b;
  spoil(&value.b);
  const bool of_q = config.seen.varlen == 0 && value.b == 0 && q.rank == 4;
  requests_ = of_q ? q.shape[0] : value.b;
  const std::int64_t b = std::clamp<std::int64_t>(requests_, -1, std::int64_t{1} << 40);
  if (config.seen.varlen != 0 || !paged || bad()) value.cu_seqlens_q = lengths(sizes.cu_q, b + 1);
  if (!paged || bad()) value.cu_seqlens_kv = lengths(sizes.cu_kv, b + 1);
  if ((config.seen.varlen != 0 || !paged || bad()) && random_.one_in(3)) value.seqused_q = lengths({0}, b);
  if (paged) {
    value.seqused_kv = lengths({static_cast<std::int32_t>(random_.between(0, sizes.s_kv))}, b);
  } else if (random_.one_in(3)) {
    value.seqused_kv = lengths({0}, b);
  }
  if (random_.one_in(2)) value.max_s_q = sizes.s_q;
  if (random_.one_in(2)) value.max_s_kv = sizes.s_kv;
  spoil(&value.max_s_q);
  spoil(&value.max_s_kv);
  return give(value);
}

const fa_paged_cache* Arguments::cache(const GivenConfig& config, const Sizes& sizes) {
  const std::int64_t page = config.seen.page_size;
  if (page == FA_CONTIGUOUS ? random_.one_in(3) : (page > 0) == bad()) return nullptr;
  fa_paged_cache value{};
  const bool indexed = random_.one_in(3);
  const std::int64_t max_pages = sizes.s_kv / std::clamp<std::int64_t>(page, 1, 256) + 1;
  if (page != FA_CONTIGUOUS || bad()) {
    value.block_table = tensor(bad() ? FA_F32 : FA_I32, {sizes.b + (indexed ? 1 : 0), max_pages}, Use::input, false);
  }
  if (indexed) value.batch_index = lengths({0, 1}, requests_);
  if (random_.one_in(3)) value.seq_begin = lengths({static_cast<std::int32_t>(random_.below(3))}, requests_);
  if (bad() && random_.one_in(3)) value.block_table = nullptr;
  return give(value);
}

// ---- Captures ----

const fa_tensor* Arguments::captured_tensor(const NamedCapture& capture, const GivenConfig& config, const Sizes& sizes,
                                            bool gradient) {
  std::vector<std::int64_t> shape;
  const bool packed = config.seen.varlen != 0;
  const std::int64_t b = packed ? std::max<std::int64_t>(sizes.b, 1) : sizes.b;
  for (const char axis : capture.axes) {
    const std::int64_t length = axis == 'b'   ? b
                                : axis == 'h' ? sizes.h_q
                                : axis == 'q' ? sizes.s_q
                                : axis == 'k' ? sizes.s_kv
                                : axis == 'm' ? std::max(sizes.s_q, sizes.s_kv)
                                              : axis - '0';
    shape.push_back(!gradient && random_.one_in(8) ? 1 : length);
  }
  if (shape.empty()) shape.push_back(1);
  std::vector<std::int64_t>& known = shapes_[capture.name];
  if (gradient && !capture.axes.empty() && !bad()) shape = known;
  known = shape;
  const std::int32_t dtype = gradient ? statistic_dtype(config.seen) : capture.dtype;
  const Use use = gradient ? Use::output : Use::input;
  switch (shape.size()) {
    case 0:
      return nullptr;
    case 1:
      return tensor(dtype, {shape[0]}, use, false);
    case 2:
      return tensor(dtype, {shape[0], shape[1]}, use, false);
    case 3:
      return tensor(dtype, {shape[0], shape[1], shape[2]}, use, false);
    default:
      return tensor(dtype, {shape[0], shape[1], shape[2], shape[3]}, use, false);
  }
}

const fa_captured* Arguments::captured(const GivenConfig& config, const Sizes& sizes, bool gradients,
                                       std::uint64_t* count) {
  std::vector<fa_captured> items;
  for (const NamedCapture& capture : config.captures) {
    if (gradients && (!capture.requires_grad || random_.one_in(3))) continue;
    fa_captured item{};
    item.name = text(bad() ? hostile_text(random_) : capture.name);
    item.number = static_cast<double>(random_.one_in(2) ? 2.0F : number());
    if (!gradients) shapes_[capture.name].clear();
    if (!capture.axes.empty() || gradients || random_.one_in(2)) {
      item.tensor = captured_tensor(capture, config, sizes, gradients);
    }
    if (bad()) item.tensor = nullptr;
    if (bad()) item.name = nullptr;
    if (!bad() || random_.one_in(2)) items.push_back(item);
    if (bad() && !items.empty()) items.push_back(items.back());
  }
  *count = items.size();
  if (bad()) *count = 9 + random_.next() % (random_.one_in(2) ? 2 : UINT64_MAX - 9);
  return items.empty() && random_.one_in(2) ? nullptr : array(items);
}

// ---- Calls ----

/// A call that would take seconds may not start.
void Arguments::hold_back(const fa_tensor& q, const fa_tensor& k) {
  std::int64_t keys = 1;
  for (int axis = 0; axis < std::clamp(k.rank, 0, 4) - 1; ++axis) keys = std::max(keys, k.shape[axis]);
  if (elements(q) * static_cast<double>(keys) > kMostWork) must_fail_ = true;
}

template <class Inputs>
void Arguments::refuse(const GivenConfig& config, Inputs* inputs) {
  if (!must_fail_) return;
  if (random_.one_in(2)) {  // behind every other check
    inputs->sink = config.seen.sink != 0 ? nullptr : tensor(FA_F32, {1}, Use::input, false);
    return;
  }
  fa_captured intruder{};
  intruder.name = text("nobody_declares_this");
  inputs->captures = array(std::vector{intruder});
  inputs->capture_count = 1;
}

ForwardArguments Arguments::forward(const GivenConfig& config) {
  const Sizes given = sizes(config);
  fa_tensor q{}, k{};
  fa_forward_inputs inputs{};
  inputs.q = heads_tensor(config, given, false, false, Use::input, &q);
  inputs.k = heads_tensor(config, given, true, false, Use::input, &k);
  if (config.seen.value_in_key == 0 || bad()) inputs.v = heads_tensor(config, given, true, true, Use::input);
  inputs.sequences = sequences(config, given, q);
  if (config.seen.dropout > 0 || bad()) inputs.dropout = dropout();
  inputs.captures = captured(config, given, false, &inputs.capture_count);
  inputs.sink = sink(config, given, Use::input);
  inputs.tiles = tiles();
  inputs.place = place(given);
  inputs.max_multiprocessors = multiprocessors();
  if (config.seen.page_size != 0 ? random_.one_in(2) : bad()) inputs.schedule = schedule();
  inputs.cache = cache(config, given);
  if (config.seen.page_size > 0 ? random_.one_in(4) : bad()) {
    inputs.prefixes = prefixes(config, given, &inputs.prefix_count);
  }
  set_scales(config, given, &inputs);
  fa_forward_outputs outputs{};
  outputs.o = heads_tensor(config, given, false, true, Use::output);
  if (random_.one_in(2)) outputs.lse = statistic(config, given, Use::output);
  set_statistics(config, given, k, &outputs);
  if (config.seen.debug != 0 ? random_.one_in(2) : bad()) outputs.dump = dump(config, given, k);
  hold_back(q, k);
  refuse(config, &inputs);
  if (must_fail_) return {write(inputs, sizeof inputs), write(outputs, sizeof outputs)};
  return {bad() && random_.one_in(3) ? nullptr : give(inputs), bad() && random_.one_in(3) ? nullptr : give(outputs)};
}

const fa_probability_dump* Arguments::dump(const GivenConfig& config, const Sizes& given, const fa_tensor& k) {
  fa_probability_dump value{};
  const std::int64_t keys = k.rank == 4 ? k.shape[2] : k.shape[0];
  const std::int64_t rows = config.seen.varlen != 0 ? static_cast<std::int64_t>(random_.below(9)) : given.s_q;
  value.p = tensor(statistic_dtype(config.seen), {rows, keys}, Use::output, false);
  value.b = static_cast<std::int64_t>(random_.below(static_cast<std::uint64_t>(given.b + 1)));
  value.h = static_cast<std::int64_t>(random_.below(static_cast<std::uint64_t>(given.h_q + 1)));
  if (bad()) value.b = static_cast<std::int64_t>(random_.next());
  return give(value);
}

const fa_tensor* Arguments::max_logit(const GivenConfig& config, const Sizes& given, Use use) {
  if (config.seen.max_logit_by_head == 0) return statistic(config, given, use);
  return tensor(statistic_dtype(config.seen), {given.h_q}, use, true);
}

void Arguments::set_statistics(const GivenConfig& config, const Sizes& given, const fa_tensor& k,
                               fa_forward_outputs* outputs) {
  if ((config.seen.max_logit != 0) != bad()) outputs->max_logit = max_logit(config, given, Use::output);
  if ((config.seen.entropy != 0) != bad()) outputs->entropy = statistic(config, given, Use::output);
  const std::int64_t heads = config.seen.column_sums == FA_COLUMN_SUMS_KV_HEADS ? given.h_kv : given.h_q;
  if ((config.seen.top_keys != 0) != bad()) {
    outputs->top_keys = tensor(FA_I32, {given.b, heads, std::clamp(config.seen.top_keys, 0, 4096)}, Use::output, false);
    if (random_.one_in(2)) return;
  }
  if ((config.seen.column_sums != 0) != bad()) outputs->column_sums = column_sums(config, given, k, Use::output);
}

const fa_tensor* Arguments::column_sums(const GivenConfig& config, const Sizes& given, const fa_tensor& k, Use use) {
  const std::int32_t dtype = statistic_dtype(config.seen);
  const std::int64_t heads = config.seen.column_sums == FA_COLUMN_SUMS_KV_HEADS ? given.h_kv : given.h_q;
  const std::int64_t keys = k.rank == 4 ? k.shape[2] : k.shape[0];
  return config.seen.varlen != 0 ? tensor(dtype, {heads, keys}, use, false)
                                 : tensor(dtype, {given.b, heads, keys}, use, false);
}

BackwardArguments Arguments::backward(const GivenConfig& config) {
  const Sizes given = sizes(config);
  fa_tensor q{}, k{};
  fa_backward_inputs inputs{};
  inputs.q = heads_tensor(config, given, false, false, Use::input, &q);
  inputs.k = heads_tensor(config, given, true, false, Use::input, &k);
  inputs.v = heads_tensor(config, given, true, true, Use::input);
  inputs.o = heads_tensor(config, given, false, true, Use::input);
  inputs.dout = heads_tensor(config, given, false, true, Use::input);
  inputs.lse = statistic(config, given, Use::input);
  if (random_.one_in(2)) inputs.dlse = statistic(config, given, Use::input);
  inputs.sequences = sequences(config, given, q);
  if (config.seen.dropout > 0 || bad()) inputs.dropout = dropout();
  inputs.captures = captured(config, given, false, &inputs.capture_count);
  inputs.sink = sink(config, given, Use::input);
  inputs.tiles = tiles();
  inputs.place = place(given);
  inputs.max_multiprocessors = multiprocessors();
  if ((config.seen.entropy_gradient != 0) != bad()) inputs.entropy = statistic(config, given, Use::input);
  if ((config.seen.entropy_gradient != 0) != bad()) inputs.dentropy = statistic(config, given, Use::input);
  if ((config.seen.max_logit_gradient != 0) != bad()) inputs.dmax_logit = max_logit(config, given, Use::input);
  if ((config.seen.column_sums_gradient != 0) != bad()) inputs.dcolumn_sums = column_sums(config, given, k, Use::input);
  fa_backward_outputs outputs{};
  outputs.dq = heads_tensor(config, given, false, false, Use::output);
  outputs.dk = heads_tensor(config, given, true, false, Use::output);
  outputs.dv = heads_tensor(config, given, true, true, Use::output);
  outputs.captures = captured(config, given, true, &outputs.capture_count);
  if (random_.one_in(2)) outputs.dsink = sink(config, given, Use::output);
  for (const fa_tensor** gradient : {&outputs.dq, &outputs.dk}) {  // one at least is left
    if (random_.one_in(6)) *gradient = nullptr;
  }
  hold_back(q, k);
  refuse(config, &inputs);
  if (must_fail_) return {write(inputs, sizeof inputs), write(outputs, sizeof outputs)};
  return {bad() && random_.one_in(3) ? nullptr : give(inputs), bad() && random_.one_in(3) ? nullptr : give(outputs)};
}

}  // namespace fa::fuzz
