#ifndef FA_SRC_REFERENCE_TENSOR_ROWS_HPP_
#define FA_SRC_REFERENCE_TENSOR_ROWS_HPP_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <vector>

#include "reference/convert.hpp"
#include "reference/elements.hpp"
#include "reference/evaluator.hpp"
#include "reference/forward.hpp"
#include "reference/geometry.hpp"
#include "reference/u4.hpp"

namespace fa::reference {

/// Rows of the tensors of a forward as numbers, whatever they are stored as.
template <class Acc, bool kFetches = false>
class TensorRows {
 public:
  /// `args` and `fetch` outlive it. Without kFetches, or with no `fetch`, the host can read the tensors; else threads
  /// do not share it.
  explicit TensorRows(const ForwardArgs& args, const Fetch* fetch = nullptr) : a_(args), fetch_(fetch) {}

  /// Elements of any tensor, from `offset` on.
  void elements(const TensorView& t, std::int64_t offset, std::int64_t stride, std::int64_t count, Acc* to) const {
    load(readable(t, offset, stride, count, buffer_), offset, stride, count, to);
  }

  /// A row of q, times its scale.
  void query(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t d, Acc* row) const {
    plain_row(a_.q, row_offset(a_.q, b, h, i), d, row);
    if (a_.q_scale.defined()) multiply(a_.q_scale, row_offset(a_.q_scale, b, h, i), d, row);
  }

  /// A row of K or V, `t`, times its scale.
  void key(const TensorView& t, const TensorView& scales, std::int64_t b, std::int64_t h, std::int64_t j,
           std::int64_t d, Acc* row) const {
    if (t.dtype == DType::u4x2) return u4_row(t, scales, b, h, j, d, row);
    if (t.dtype == DType::e4m3 && !scales.defined() && size_of(a_.q.dtype) != 1) return latent_row(t, b, h, j, d, row);
    plain_row(t, key_offset(t, b, h, j), d, row);
    if (scales.defined()) multiply(scales, key_offset(scales, b, h, j), d, row);
  }

  std::int64_t key_offset(const TensorView& keys, std::int64_t b, std::int64_t h, std::int64_t j) const {
    if (a_.paged.entries == nullptr) return row_offset(keys, a_.paged.row >= 0 ? a_.paged.row : b, h, j);
    const std::int64_t page_size = keys.shape[2];
    return row_offset(keys, a_.paged.entries[j / page_size * a_.paged.stride], h, j % page_size);
  }

 private:
  TensorView readable(const TensorView& t, std::int64_t offset, std::int64_t stride, std::int64_t count,
                      std::vector<std::byte>& buffer) const {
    if constexpr (kFetches) {
      if (fetch_ != nullptr) return fetched(t, offset, stride, count, *fetch_, buffer);
    }
    return t;
  }

  /// NaN codes of e4m3 are read as 480, the value of no other code, and are NaN.
  void plain_row(const TensorView& t, std::int64_t offset, std::int64_t d, Acc* row) const {
    elements(t, offset, t.strides[3], d, row);
    if (t.dtype != DType::e4m3) return;
    std::replace_if(
        row, row + d, [](Acc x) { return std::abs(x) == Acc(480); }, std::numeric_limits<Acc>::quiet_NaN());
  }

  void multiply(const TensorView& scales, std::int64_t offset, std::int64_t d, Acc* row) const {
    Acc scale = 1;
    elements(scales, offset, 1, 1, &scale);
    for (std::int64_t i = 0; i < d; ++i) row[i] *= scale;
  }

  /// Of 4 bits: numbers of q's dtype.
  void u4_row(const TensorView& t, const TensorView& scales, std::int64_t b, std::int64_t h, std::int64_t j,
              std::int64_t d, Acc* row) const {
    const std::int64_t offset = key_offset(t, b, h, j), of_scales = key_offset(scales, b, h, j);
    const std::int64_t group = 2 * d / scales.shape[3];
    const TensorView read_scales = readable(scales, of_scales, 1, scales.shape[3], buffer_of_scales_);
    const std::byte* const codes = static_cast<const std::byte*>(readable(t, offset, 1, d / 2, buffer_).data) + offset;
    double pair[2] = {};
    for (std::int64_t i = 0; i < d; ++i) {
      if (i % group == 0) load(read_scales, of_scales + 2 * (i / group), 1, 2, pair);
      row[i] = static_cast<Acc>(round_to(a_.q.dtype, pair[0] * u4_code(codes, i) + pair[1]));
    }
  }

  /// The first d columns of a latent row (docs/mla.md): 512 codes, a scale of each 128, and columns of bf16.
  void latent_row(const TensorView& given, std::int64_t b, std::int64_t h, std::int64_t j, std::int64_t d,
                  Acc* row) const {
    constexpr std::int64_t kCodes = 512, kGroup = 128, kScales = kCodes / kGroup, kBytes = 656;
    const std::int64_t offset = key_offset(given, b, h, j);
    const TensorView t = readable(given, offset, 1, kBytes, buffer_);
    TensorView scales = t, rotary = t;
    scales.data = static_cast<std::byte*>(t.data) + offset + kCodes;
    scales.dtype = DType::f32;
    rotary.data = static_cast<std::byte*>(scales.data) + kScales * sizeof(float);
    rotary.dtype = DType::bf16;
    double scale[kScales] = {};
    load(scales, 0, 1, kScales, scale);
    load(t, offset, 1, std::min(d, kCodes), row);
    for (std::int64_t i = 0; i < std::min(d, kCodes); ++i) {
      row[i] = static_cast<Acc>(round_to(a_.q.dtype, scale[i / kGroup] * static_cast<double>(row[i])));
    }
    if (d > kCodes) load(rotary, 0, 1, d - kCodes, row + kCodes);
  }

  const ForwardArgs& a_;
  const Fetch* fetch_;
  mutable std::vector<std::byte> buffer_, buffer_of_scales_;  // of what was fetched last
};

}  // namespace fa::reference

#endif  // FA_SRC_REFERENCE_TENSOR_ROWS_HPP_
