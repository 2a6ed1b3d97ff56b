#include "fuzz/parallel_abi/whole.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>

#include "fuzz/c_abi/memory.hpp"

namespace fa::fuzz {
namespace {

std::int64_t divisor_of(int layout, int ranks) {
  return layout == FA_LAYOUT_ZIGZAG && ranks > 1 ? 2 * ranks : ranks;
}

std::int64_t random_length(Random& random, std::int64_t by, std::int64_t most) {
  return by * (random.one_in(10) ? 0 : random.between(1, std::max<std::int64_t>(most / by, 1)));
}

void set_mask(Random& random, fa_config* value) {
  value->causal = random.one_in(2);
  value->causal_align = random.one_in(3) ? FA_CAUSAL_BOTTOM_RIGHT : FA_CAUSAL_TOP_LEFT;
  value->has_window_left = random.one_in(5);
  value->window_left = random.between(0, 30);
  value->has_window_right = value->causal == 0 && random.one_in(5);
  value->window_right = random.between(0, 30);
  if (random.one_in(8)) value->chunk = random.between(1, 5) * 12;  // a multiple of 1 to 4 ranks
}

void set_functions(Random& random, Setup* setup) {
  const char* const kScores[] = {"4.0 * tanh(score / 4.0)", "score - 0.1 * abs(float(q - kv))",
                                 "kv % 3 == q % 3 ? score : -infinity", "score + 0.1 * float(h)"};
  const char* const kMasks[] = {"q >= kv", "(q - kv) % 4 == 0 || kv < 3", "kv < s_kv - 2 || q + b > 1"};
  if (random.one_in(6)) setup->score = {sizeof(fa_function), 0, random.pick(kScores), nullptr};
  if (random.one_in(6)) setup->mask = {sizeof(fa_function), 0, random.pick(kMasks), nullptr};
}

void set_scheme(Random& random, Setup* setup) {
  fa_parallel_config& config = setup->config;
  const int n = setup->ranks;
  config.scheme = static_cast<std::int32_t>(random.below(4));
  config.gradients = random.one_in(3) ? FA_GRADIENTS_NATIVE : FA_GRADIENTS_F32;
  if (config.scheme == FA_SCHEME_ULYSSES) {
    setup->h_kv = n * random.between(1, 4 / n);
    if (random.one_in(2)) config.ulysses = n;
  } else if (random.one_in(3)) {
    config.ulysses = n % 2 == 0 && random.one_in(2) ? 2 : random.one_in(2) ? n : 1;
    if (config.ulysses > 1) setup->h_kv = config.ulysses * random.between(1, 4 / config.ulysses);
  }
  const std::int64_t heads = setup->h_kv / std::max<std::int64_t>(config.ulysses, 1);
  const bool gathers = config.scheme == FA_SCHEME_ALL_GATHER && config.ulysses != n;
  if (gathers && random.one_in(2)) config.head_groups = static_cast<std::int32_t>(random.one_in(2) ? heads : 1);
  if (random.one_in(8)) {
    config.has_reserved_multiprocessors = 1;
    config.reserved_multiprocessors = static_cast<std::int32_t>(random.between(0, 40));
  }
}

double value_of(std::int32_t dtype, const std::byte* bytes) {
  if (dtype == FA_F64) {
    double value = 0;
    std::memcpy(&value, bytes, sizeof value);
    return value;
  }
  if (dtype == FA_F32) {
    float value = 0;
    std::memcpy(&value, bytes, sizeof value);
    return static_cast<double>(value);
  }
  std::uint16_t bits = 0;
  std::memcpy(&bits, bytes, sizeof bits);
  if (dtype == FA_BF16) return static_cast<double>(std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16));
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  const double size = exponent == 0    ? std::ldexp(mantissa, -24)
                      : exponent == 31 ? (mantissa == 0 ? std::numeric_limits<double>::infinity()
                                                        : std::numeric_limits<double>::quiet_NaN())
                                       : std::ldexp(1024 + mantissa, exponent - 25);
  return (bits & 0x8000) != 0 ? -size : size;
}

}  // namespace

Setup random_setup(Random& random, int ranks) {
  constexpr std::int64_t kHeadDims[] = {8, 8, 16, 24, 32};
  constexpr std::int32_t kDtypes[] = {FA_F32, FA_F32, FA_BF16, FA_BF16, FA_F16, FA_F64};
  Setup setup;
  setup.ranks = ranks;
  setup.d_qk = random.pick(kHeadDims);
  setup.d_v = random.one_in(2) ? setup.d_qk : random.pick(kHeadDims);
  setup.h_kv = random.between(1, 4);
  setup.config.struct_size = sizeof setup.config;
  setup.config.layout = static_cast<std::int32_t>(random.below(3));
  set_scheme(random, &setup);
  setup.h_q = setup.h_kv * random.between(1, 2);
  fa_config& attention = setup.attention;
  attention.struct_size = sizeof attention;
  attention.head_dim = static_cast<std::int32_t>(setup.d_qk);
  attention.head_dim_v = setup.d_v == setup.d_qk && random.one_in(2) ? 0 : static_cast<std::int32_t>(setup.d_v);
  attention.dtype = random.pick(kDtypes);
  attention.has_scale = random.one_in(3);
  attention.scale = 0.25F;
  attention.deterministic = random.one_in(4);
  attention.compile = FA_COMPILE_NEVER;
  attention.cache_mode = FA_CACHE_MEMORY;
  attention.host_f64 = random.one_in(3);
  attention.varlen = random.one_in(3);
  attention.sink = random.one_in(4);
  set_mask(random, &attention);
  set_functions(random, &setup);
  const bool drops = random.one_in(12) && (setup.config.layout != FA_LAYOUT_STRIPED || ranks == 1);
  const std::int64_t by = divisor_of(setup.config.layout, ranks) * (drops && ranks > 1 ? 32 : 1);
  if (drops) {
    attention.dropout = 0.3F;
    setup.dropout = {sizeof(fa_dropout_state), 0, random.next(), random.below(1000), nullptr};
  }
  if (setup.packed()) {
    for (std::int64_t count = random.between(1, 3); count > 0; --count) {
      setup.lengths.push_back(random_length(random, by, 32));
    }
    setup.s_q = setup.s_kv = std::accumulate(setup.lengths.begin(), setup.lengths.end(), std::int64_t{0});
  } else {
    setup.b = random.between(1, 2);
    setup.s_q = random_length(random, by, 64);
    setup.s_kv = random.one_in(2) ? setup.s_q : random_length(random, by, 64);
  }
  setup.has_dlse = random.one_in(2);
  setup.has_dsink = attention.sink != 0 && random.one_in(2);
  return setup;
}

std::vector<std::int64_t> rows_of_rank(int layout, int ranks, int rank, const std::vector<std::int64_t>& lengths) {
  std::vector<std::int64_t> rows;
  std::int64_t begin = 0;
  for (const std::int64_t length : lengths) {
    for (std::int64_t row = 0; row < length; ++row) {
      std::int64_t owner = 0;
      if (layout == FA_LAYOUT_CONTIGUOUS || ranks == 1) {
        owner = row * ranks / length;
      } else if (layout == FA_LAYOUT_STRIPED) {
        owner = row % ranks;
      } else {
        const std::int64_t part = row * 2 * ranks / length;
        owner = std::min<std::int64_t>(part, 2 * ranks - 1 - part);
      }
      if (owner == rank) rows.push_back(begin + row);
    }
    begin += length;
  }
  return rows;
}

std::size_t Data::elements() const {
  std::size_t count = 1;
  for (const std::int64_t length : shape) count *= static_cast<std::size_t>(length);
  return count;
}

fa_tensor Data::tensor() {
  fa_tensor value{};
  value.struct_size = sizeof value;
  value.dtype = dtype;
  value.rank = static_cast<std::int32_t>(shape.size());
  value.flags = FA_TENSOR_ROW_MAJOR;
  value.data = bytes.data();
  std::ranges::copy(shape, value.shape);
  return value;
}

void fill(std::int32_t dtype, std::byte* bytes, std::size_t elements, Random& random) {
  const std::size_t size = size_of(dtype);
  for (std::size_t i = 0; i < elements; ++i) {
    const std::uint64_t draw = random.next();
    const double value = (static_cast<double>(draw >> 11) * 0x1p-53 * 0.75 + 0.25) * ((draw & 1) != 0 ? -1 : 1);
    const auto single = static_cast<float>(value);
    std::uint64_t bits = std::bit_cast<std::uint32_t>(single);
    if (dtype == FA_F64) bits = std::bit_cast<std::uint64_t>(value);
    if (dtype == FA_BF16) bits >>= 16;
    if (dtype == FA_F16) bits = 0x3400 + (draw >> 8) % 0x0800 + ((draw & 1) != 0 ? 0x8000 : 0);
    std::memcpy(bytes + i * size, &bits, size);
  }
}

std::vector<std::int64_t> offsets_of(const fa_tensor& tensor) {
  std::vector<std::int64_t> offsets{0};
  std::int64_t row_major = 1;
  const auto element = static_cast<std::int64_t>(size_of(tensor.dtype));
  for (int axis = tensor.rank - 1; axis >= 0; --axis) {
    const std::int64_t stride = (tensor.flags & FA_TENSOR_ROW_MAJOR) != 0 ? row_major : tensor.strides[axis];
    std::vector<std::int64_t> all;
    for (std::int64_t i = 0; i < tensor.shape[axis]; ++i) {
      for (const std::int64_t inner : offsets) all.push_back(i * stride * element + inner);
    }
    offsets = std::move(all);
    row_major *= tensor.shape[axis];
  }
  return offsets;
}

void move_rows(Data& whole, const fa_tensor& part, const std::vector<std::int64_t>& rows, bool to_part) {
  const std::vector<std::int64_t> places = offsets_of(part);
  const std::size_t element = size_of(whole.dtype);
  std::int64_t inner = 1, outer = 1;
  const int rank = static_cast<int>(whole.shape.size());
  for (int axis = whole.row_axis + 1; axis < rank; ++axis) inner *= whole.shape[static_cast<std::size_t>(axis)];
  for (int axis = 0; axis < whole.row_axis; ++axis) outer *= whole.shape[static_cast<std::size_t>(axis)];
  const std::int64_t all = whole.row_axis < 0 ? 0 : whole.shape[static_cast<std::size_t>(whole.row_axis)];
  std::size_t at = 0;
  const auto move = [&](std::int64_t index) {
    std::byte* const from = whole.bytes.data() + static_cast<std::size_t>(index) * element;
    std::byte* const to = static_cast<std::byte*>(part.data) + places[at++];
    std::memcpy(to_part ? to : from, to_part ? from : to, element);
  };
  if (whole.row_axis < 0) {
    for (std::int64_t i = 0; i < inner; ++i) move(i);
    return;
  }
  for (std::int64_t i = 0; i < outer; ++i) {
    for (const std::int64_t row : rows) {
      for (std::int64_t j = 0; j < inner; ++j) move((i * all + row) * inner + j);
    }
  }
}

Whole::Whole(const Setup& setup, Random& random) {
  const std::int32_t own = setup.attention.dtype;
  const std::int32_t wide = own == FA_F64 ? FA_F64 : FA_F32;
  const auto rows = [&](std::int64_t heads, std::int64_t s, std::int64_t d, bool of_q) {
    return setup.packed() ? Data{own, {s, heads, d}, 0, of_q, {}} : Data{own, {setup.b, heads, s, d}, 2, of_q, {}};
  };
  const Data statistic = setup.packed() ? Data{wide, {setup.h_q, setup.s_q}, 1, true, {}}
                                        : Data{wide, {setup.b, setup.h_q, setup.s_q}, 2, true, {}};
  data_[kQ] = data_[kDq] = rows(setup.h_q, setup.s_q, setup.d_qk, true);
  data_[kK] = data_[kDk] = rows(setup.h_kv, setup.s_kv, setup.d_qk, false);
  data_[kV] = data_[kDv] = rows(setup.h_kv, setup.s_kv, setup.d_v, false);
  data_[kO] = data_[kDout] = rows(setup.h_q, setup.s_q, setup.d_v, true);
  data_[kLse] = data_[kDlse] = statistic;
  data_[kSink] = data_[kDsink] = Data{wide, {setup.h_q}, -1, true, {}};
  for (Data& data : data_) {
    data.bytes.resize(data.elements() * size_of(data.dtype));
    fill(data.dtype, data.bytes.data(), data.elements(), random);
  }
}

bool Whole::compute(const Setup& setup, bool backward) {
  fa_config config = setup.attention;
  config.score = setup.score.expression != nullptr ? &setup.score : nullptr;
  config.mask = setup.mask.expression != nullptr ? &setup.mask : nullptr;
  fa_attention* made = nullptr;
  if (fa_create(&config, {FA_DEVICE_HOST, 0}, &made) != FA_OK) return false;
  const std::unique_ptr<fa_attention, decltype(&fa_destroy)> attention(made, fa_destroy);
  std::array<fa_tensor, kNames> tensors;
  for (std::size_t i = 0; i < kNames; ++i) tensors[i] = data_[i].tensor();
  std::vector<std::int32_t> cu{0};
  for (const std::int64_t length : setup.lengths) cu.push_back(cu.back() + static_cast<std::int32_t>(length));
  fa_sequences sequences{};
  sequences.struct_size = sizeof sequences;
  sequences.b = static_cast<std::int64_t>(setup.lengths.size());
  sequences.cu_seqlens_q = sequences.cu_seqlens_kv = cu.data();
  fa_forward_inputs inputs{};
  inputs.struct_size = sizeof inputs;
  inputs.q = &tensors[kQ];
  inputs.k = &tensors[kK];
  inputs.v = &tensors[kV];
  inputs.sink = config.sink != 0 ? &tensors[kSink] : nullptr;
  inputs.sequences = setup.packed() ? &sequences : nullptr;
  inputs.dropout = config.dropout > 0 ? &setup.dropout : nullptr;
  fa_forward_outputs outputs{};
  outputs.struct_size = sizeof outputs;
  outputs.o = &tensors[kO];
  outputs.lse = &tensors[kLse];
  if (fa_forward(attention.get(), &inputs, &outputs, nullptr, nullptr) != FA_OK) return false;
  if (!backward) return true;
  fa_backward_inputs given{};
  given.struct_size = sizeof given;
  given.q = inputs.q;
  given.k = inputs.k;
  given.v = inputs.v;
  given.o = &tensors[kO];
  given.lse = &tensors[kLse];
  given.dout = &tensors[kDout];
  given.dlse = setup.has_dlse ? &tensors[kDlse] : nullptr;
  given.sink = inputs.sink;
  given.sequences = inputs.sequences;
  given.dropout = inputs.dropout;
  fa_backward_outputs gradients{};
  gradients.struct_size = sizeof gradients;
  gradients.dq = &tensors[kDq];
  gradients.dk = &tensors[kDk];
  gradients.dv = &tensors[kDv];
  gradients.dsink = setup.has_dsink ? &tensors[kDsink] : nullptr;
  return fa_backward(attention.get(), &given, &gradients, nullptr, nullptr) == FA_OK;
}

std::string difference(const char* name, const Data& result, const Data& expected) {
  const std::size_t size = size_of(expected.dtype);
  const bool narrow = expected.dtype == FA_BF16 || expected.dtype == FA_F16;
  double largest = 1;
  for (std::size_t i = 0; i < expected.elements(); ++i) {
    const double value = std::abs(value_of(expected.dtype, expected.bytes.data() + i * size));
    if (std::isfinite(value)) largest = std::max(largest, value);
  }
  const double bound = (expected.dtype == FA_BF16 ? 0.06 : narrow ? 0.01 : 2e-4) * largest;
  for (std::size_t i = 0; i < expected.elements(); ++i) {
    const double got = value_of(expected.dtype, result.bytes.data() + i * size);
    const double wanted = value_of(expected.dtype, expected.bytes.data() + i * size);
    if (got == wanted || std::abs(got - wanted) <= bound) continue;
    return std::string(name) + "[" + std::to_string(i) + "] is " + std::to_string(got) + " of all ranks, and " +
           std::to_string(wanted) + " of one";
  }
  return {};
}

}  // namespace fa::fuzz
