#include "run_scales.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "support/text.hpp"

namespace fa::cli {
namespace {

using tools::Tensor;
using Shape = std::vector<std::int64_t>;

/// Scales of the rows of `tensor`, as a call takes them: [b, h, s], or [h, total] of a packed one. Empty where the
/// tensor has other axes, which a call refuses, or nothing to bound their number by.
Shape shape_of_rows(const Tensor& tensor, bool packed, bool nhd) {
  const Shape& axes = tensor.shape;
  if (tensor.bytes.empty()) return {};
  if (packed) return axes.size() == 3 ? Shape{axes[1], axes[0]} : Shape{};
  if (axes.size() == 3) return {axes[0], 1, axes[1]};
  if (axes.size() != 4) return {};
  return nhd ? Shape{axes[0], axes[2], axes[1]} : Shape{axes[0], axes[1], axes[2]};
}

bool is_number(const Shape& shape) {
  return std::ranges::all_of(shape, [](std::int64_t size) { return size == 1; });
}

/// Whether `shape` becomes `wanted` by repeating axes of 1.
bool fits(const Shape& shape, const Shape& wanted) {
  if (wanted.empty()) return false;
  if (is_number(shape)) return true;
  return std::ranges::equal(shape, wanted, [](std::int64_t size, std::int64_t of) { return size == of || size == 1; });
}

/// `tensor`, which fits, with its axes of 1 repeated.
Tensor repeated(const Tensor& tensor, const Shape& wanted) {
  Tensor result = make_tensor(tensor.dtype, wanted);
  const std::size_t size = size_of(tensor.dtype), count = result.bytes.size() / size;
  const bool number = is_number(tensor.shape);
  for (std::size_t i = 0; i < count; ++i) {
    std::size_t rest = i, from = 0, stride = 1;
    for (std::size_t axis = number ? 0 : wanted.size(); axis-- > 0;) {
      const auto length = static_cast<std::size_t>(wanted[axis]), own = static_cast<std::size_t>(tensor.shape[axis]);
      from += own == 1 ? 0 : rest % length * stride;
      rest /= length;
      stride *= own;
    }
    std::memcpy(result.bytes.data() + i * size, tensor.bytes.data() + from * size, size);
  }
  return result;
}

void repeat_if_it_fits(const Shape& wanted, Tensor* tensor) {
  if (fits(tensor->shape, wanted)) *tensor = repeated(*tensor, wanted);
}

/// Of rows of q: [b, h] is one of each head.
void set_axes_of_q(const RunInputs& inputs, std::optional<Tensor>* scale) {
  if (!*scale) return;
  const Shape rows = shape_of_rows(inputs.q, inputs.packed(), false);
  Shape& own = (*scale)->shape;
  if (rows.size() == 3 && own.size() == 2 && fits(own, {rows[0], rows[1]})) own.push_back(1);
  repeat_if_it_fits(rows, &**scale);
}

/// Of k or v. Returns whether it has a scale for each row, of 8-bit q.
bool set_axes_of_keys(const RunInputs& inputs, const Tensor& keys, bool forced, std::optional<Tensor>* scale) {
  if (!*scale) return false;
  const bool packed = inputs.packed() && !inputs.cache;
  const Shape rows = shape_of_rows(keys, packed, inputs.cache && inputs.cache->nhd);
  if (!has_codes(inputs.q.dtype)) {
    if (keys.dtype != DType::u4x2) repeat_if_it_fits(rows, &**scale);
    return false;
  }
  const bool has_rows = (*scale)->shape.size() == 3;
  if (rows.empty()) return has_rows || (forced && packed);
  const AttentionShape shape = shape_of(inputs);
  const Shape heads{shape.b, shape.h_kv};
  const bool of_heads = fits((*scale)->shape, heads);
  const bool of_rows = fits((*scale)->shape, rows) && (forced || !of_heads);
  repeat_if_it_fits(of_rows ? rows : heads, &**scale);
  return of_rows || (has_rows && !of_heads);
}

std::string shape_text(const Shape& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

std::optional<Tensor> read_original(const tools::SafetensorsFile& file, const char* name, Shape shape,
                                    std::int64_t columns) {
  if (!file.contains(name)) return std::nullopt;
  Tensor tensor = file.read(name);
  if (has_codes(tensor.dtype) || tensor.dtype == DType::i32) {
    support::throw_invalid(name, to_string(tensor.dtype), "f16, bf16, f32 or f64");
  }
  if (!shape.empty()) shape.back() = columns;
  if (tensor.shape != shape) {
    support::throw_invalid(name, "shape " + shape_text(tensor.shape),
                           shape_text(shape) + ", the numbers that were stored");
  }
  return tensor;
}

}  // namespace

void read_scales(const tools::SafetensorsFile& file, const RunOptions& options, RunInputs* inputs) {
  const auto read = [&](const char* name) {
    std::optional<Tensor> tensor;
    if (!file.contains(name) || inputs->captures.contains(name)) return tensor;
    tensor = file.read(name);
    if (tensor->shape.empty()) tensor->shape = {1};
    return tensor;
  };
  RunScales& scales = inputs->scales;
  scales.q = read("q_scale");
  scales.k = read("k_scale");
  scales.v = read("v_scale");
  scales.row_bias = read("row_bias");
  set_axes_of_q(*inputs, &scales.q);
  set_axes_of_q(*inputs, &scales.row_bias);
  scales.of_keys = set_axes_of_keys(*inputs, inputs->k, options.key_scales, &scales.k);
  if (inputs->v) scales.of_values = set_axes_of_keys(*inputs, *inputs->v, options.value_scales, &scales.v);
}

void read_originals(const tools::SafetensorsFile& file, RunInputs* inputs) {
  const std::int64_t d_qk = inputs->q.shape.back();
  inputs->originals.q = read_original(file, "q_original", inputs->q.shape, d_qk);
  inputs->originals.k = read_original(file, "k_original", inputs->k.shape, d_qk);
  if (inputs->v) {
    inputs->originals.v = read_original(file, "v_original", inputs->v->shape, inputs->d_v());
  } else if (file.contains("v_original")) {
    support::throw_invalid("v_original", "given", "none with --value-in-key: V is the first columns of k_original");
  }
}

}  // namespace fa::cli
