#include "run_wide.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "api/validate.hpp"
#include "elements.hpp"
#include "reference/u4.hpp"

namespace fa::cli {
namespace {

using tools::Tensor;

constexpr std::size_t kBiasColumns = 8;  // head dims are multiples of it

std::size_t elements(const Tensor& tensor) {
  return tensor.bytes.size() / size_of(tensor.dtype);
}

std::optional<Tensor> widen(const std::optional<Tensor>& tensor) {
  if (!tensor) return std::nullopt;
  Tensor wide = make_tensor(DType::f64, tensor->shape);
  for (std::size_t i = 0; i < elements(*tensor); ++i) {
    store_element(wide.bytes.data(), DType::f64, i, number_at(*tensor, i));
  }
  return wide;
}

double* numbers(Tensor& wide) {
  return reinterpret_cast<double*>(wide.bytes.data());
}

/// The rows of a tensor in its file's order.
struct RowOrder {
  RowOrder(const Tensor& tensor, bool packed, bool nhd) : last_first(packed || nhd) {
    const std::size_t rank = tensor.shape.size();
    middle = static_cast<std::size_t>(rank == 3 && !packed ? 1 : tensor.shape[rank - 3]);
    last = static_cast<std::size_t>(tensor.shape[rank - 2]);
    columns = static_cast<std::size_t>(tensor.shape[rank - 1]);
    count = columns == 0 ? 0 : elements(tensor) / columns;
  }

  /// Where a row is among rows that are [b, h, s], or [h, total].
  std::size_t scale_of(std::size_t row) const {
    if (!last_first) return row;
    const std::size_t block = row / (middle * last), within = row % (middle * last);
    return (block * last + within % last) * middle + within / last;
  }

  bool last_first;  ///< the axis of heads is behind that of rows
  std::size_t middle = 0, last = 0, columns = 0, count = 0;
};

/// Rows of u4x2: numbers of `dtype`, as a scale and an offset of each group make them.
Tensor from_pairs(const Tensor& codes, const Tensor& pairs, const RowOrder& order, DType dtype) {
  std::vector<std::int64_t> shape = codes.shape;
  shape.back() *= 2;
  Tensor wide = make_tensor(DType::f64, shape);
  const std::size_t d = 2 * order.columns, of_row = static_cast<std::size_t>(pairs.shape.back()),
                    group = 2 * d / of_row;
  for (std::size_t row = 0; row < order.count; ++row) {
    const std::byte* const bytes = codes.bytes.data() + row * order.columns;
    for (std::size_t i = 0; i < d; ++i) {
      const std::size_t pair = order.scale_of(row) * of_row + 2 * (i / group);
      const int code = reference::u4_code(bytes, static_cast<std::int64_t>(i));
      numbers(wide)[row * d + i] =
          reference::round_to(dtype, number_at(pairs, pair) * code + number_at(pairs, pair + 1));
    }
  }
  return wide;
}

/// Latent rows (docs/mla.md): 512 codes, a scale of each 128, and 64 columns of bf16.
Tensor from_latent_rows(const Tensor& rows, DType dtype) {
  constexpr std::size_t kColumns = api::kLatentColumns, kCodes = api::kLatentValues, kGroup = 128;
  std::vector<std::int64_t> shape = rows.shape;
  shape.back() = api::kLatentColumns;
  Tensor wide = make_tensor(DType::f64, shape);
  for (std::size_t row = 0; row * api::kLatentRowBytes < rows.bytes.size(); ++row) {
    const std::byte* const bytes = rows.bytes.data() + row * api::kLatentRowBytes;
    const std::byte* const scales = bytes + kCodes;
    const std::byte* const turned = scales + kCodes / kGroup * sizeof(float);
    double* const to = numbers(wide) + row * kColumns;
    for (std::size_t i = 0; i < kCodes; ++i) {
      const double scale = load_element(scales, DType::f32, i / kGroup);
      to[i] = reference::round_to(dtype, scale * load_element(bytes, DType::e4m3, i));
    }
    for (std::size_t i = kCodes; i < kColumns; ++i) to[i] = load_element(turned, DType::bf16, i - kCodes);
  }
  return wide;
}

/// Numbers, times a scale of each row where there is one.
Tensor times_rows(const Tensor& codes, const std::optional<Tensor>& scale, const RowOrder& order) {
  Tensor wide = *widen(codes);
  for (std::size_t row = 0; scale && row < order.count; ++row) {
    const double factor = number_at(*scale, order.scale_of(row));
    for (std::size_t i = 0; i < order.columns; ++i) numbers(wide)[row * order.columns + i] *= factor;
  }
  return wide;
}

/// Multiplies the rows of q or o with the numbers of their sequence and KV head, of `heads` [b, h_kv].
void multiply(const RunInputs& inputs, const Tensor& heads, Tensor* rows) {
  const RowOrder order(*rows, inputs.packed(), false);
  const AttentionShape shape = shape_of(inputs);
  const std::int64_t group = std::max<std::int64_t>(shape.h_q / std::max<std::int64_t>(shape.h_kv, 1), 1);
  const auto total = static_cast<std::size_t>(inputs.packed() ? shape.total_q : shape.s_q);
  for (std::size_t row = 0; row < order.count; ++row) {
    const std::size_t at = order.scale_of(row);  // [b, h, s] or [h, total]
    std::int64_t head = static_cast<std::int64_t>(at / total), entry = head / shape.h_q;
    if (inputs.packed()) {
      const auto behind = std::ranges::upper_bound(inputs.cumulative_q, static_cast<std::int32_t>(at % total));
      entry = behind - inputs.cumulative_q.begin() - 1;
      if (entry < 0 || entry >= shape.b) continue;  // of no sequence
    }
    const double factor = number_at(heads, static_cast<std::size_t>(entry * shape.h_kv + head % shape.h_q / group));
    for (std::size_t i = 0; i < order.columns; ++i) numbers(*rows)[row * order.columns + i] *= factor;
  }
}

/// Adds columns: the first has `first` of each row, or 1, and the others 0.
void add_columns(const RowOrder& order, const Tensor* first, Tensor* wide) {
  Tensor result = *wide;
  result.shape.back() += static_cast<std::int64_t>(kBiasColumns);
  result = make_tensor(DType::f64, result.shape);
  const std::size_t d = order.columns + kBiasColumns;
  for (std::size_t row = 0; row < order.count; ++row) {
    std::copy_n(numbers(*wide) + row * order.columns, order.columns, numbers(result) + row * d);
    numbers(result)[row * d + order.columns] = first != nullptr ? number_at(*first, order.scale_of(row)) : 1;
  }
  *wide = std::move(result);
}

AttentionConfig wide_config(AttentionConfig config) {
  config.dtype = DType::f64;
  config.k_dtype = config.v_dtype = config.o_dtype = std::nullopt;
  config.group_size = 0;
  config.key_scales = config.value_scales = config.precise = false;
  config.kernel.reset();
  config.kernel_backward.reset();
  return config;
}

}  // namespace

double number_at(const Tensor& tensor, std::size_t index) {
  constexpr double kNotANumber = 480;  // what its code would be, in e4m3
  const double number = load_element(tensor.bytes.data(), tensor.dtype, index);
  const bool is_nan = tensor.dtype == DType::e4m3 && std::abs(number) == kNotANumber;
  return is_nan ? std::numeric_limits<double>::quiet_NaN() : number;
}

WideCall::WideCall(const AttentionConfig& given, const RunInputs& in, Of of)
    : config(wide_config(given)), inputs{Tensor{},    Tensor{},       std::nullopt,    widen(in.dout),   widen(in.dlse),
                                         in.captures, widen(in.sink), in.cumulative_q, in.cumulative_kv, in.dropout,
                                         in.cache,    in.dump,        in.value_in_key} {
  const bool originals = of == Of::originals;
  const bool packed_keys = in.packed() && !in.cache, nhd = in.cache && in.cache->nhd;
  const bool scales_of_heads = has_codes(given.dtype);
  const RowOrder q_order(in.q, in.packed(), false), k_order(in.k, packed_keys, nhd);
  const auto keys = [&](const Tensor& tensor, const RowOrder& order, const std::optional<Tensor>& scale, bool of_rows) {
    if (tensor.dtype == DType::u4x2) return from_pairs(tensor, *scale, order, given.dtype);
    return times_rows(tensor, of_rows ? scale : std::nullopt, order);
  };
  if (originals && in.originals.q) {
    inputs.q = *widen(in.originals.q);
  } else {
    inputs.q = times_rows(in.q, in.scales.q, q_order);
  }
  const bool original_k = originals && in.originals.k;
  if (original_k) {
    inputs.k = *widen(in.originals.k);
  } else if (api::has_latent_rows(given)) {
    inputs.k = from_latent_rows(in.k, given.dtype);
  } else {
    inputs.k = keys(in.k, k_order, in.scales.k, !scales_of_heads || in.scales.of_keys);
    if (in.scales.k && scales_of_heads && !in.scales.of_keys) multiply(in, *in.scales.k, &inputs.q);
  }
  if (originals && in.originals.v) {
    inputs.v = widen(in.originals.v);
  } else if (in.v) {
    inputs.v = keys(*in.v, RowOrder(*in.v, packed_keys, nhd), in.scales.v, !scales_of_heads || in.scales.of_values);
    if (scales_of_heads && !in.scales.of_values) v_heads = in.scales.v;
  }
  if (!in.scales.row_bias || original_k) return;  // keys have their mean
  add_columns(q_order, &*in.scales.row_bias, &inputs.q);
  add_columns(k_order, nullptr, &inputs.k);
  if (!config.scale) config.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(config.head_dim)));
  config.head_dim += static_cast<int>(kBiasColumns);
}

RunOutputs WideCall::run() {
  RunOutputs outputs = make_outputs(config, inputs);
  run_on_host(Attention::create(config, Device::host()), &inputs, &outputs);
  if (v_heads) multiply(inputs, *v_heads, &outputs.o);
  return outputs;
}

}  // namespace fa::cli
