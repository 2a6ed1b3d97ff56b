#ifndef FA_TESTS_DIFFERENTIAL_TENSOR_HPP_
#define FA_TESTS_DIFFERENTIAL_TENSOR_HPP_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <fa/tensor.hpp>

#include "differential/configuration.hpp"

namespace fa::differential {

/// Memory of a device, from a 256-byte boundary on, with the bytes of an image.
class Memory {
 public:
  Memory(Where where, const std::vector<std::byte>& image);
  ~Memory();
  Memory(Memory&&) noexcept;
  Memory& operator=(Memory&&) = delete;

  std::byte* data() const { return data_; }
  void write(const std::vector<std::byte>& image);
  std::vector<std::byte> read() const;

 private:
  Where where_;
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

/// Guard bytes on both sides of every tensor. 0 under a memory checker, which then sees every access outside.
void set_guard(std::size_t bytes);
std::size_t guard();

/// A tensor of up to four axes, laid out somehow, between guards. What is not an element is 0xff, a NaN in every dtype.
class Tensor {
 public:
  Tensor() = default;
  /// Axes b, h, s of `layout`, and a contiguous last one; of rank 3 without the last.
  Tensor(DType dtype, std::vector<std::int64_t> shape, const Layout& layout);
  /// A capture: row-major, with the layout's row padding behind the last axis.
  static Tensor capture(DType dtype, std::vector<std::int64_t> shape, const Layout& layout);
  /// Without gaps.
  static Tensor dense(DType dtype, std::vector<std::int64_t> shape);

  bool defined() const { return !shape_.empty(); }
  DType dtype() const { return dtype_; }
  const std::vector<std::int64_t>& shape() const { return shape_; }
  std::int64_t elements() const;
  double at(std::int64_t a, std::int64_t b = 0, std::int64_t c = 0, std::int64_t d = 0) const;
  void set(double value, std::int64_t a, std::int64_t b = 0, std::int64_t c = 0, std::int64_t d = 0);
  /// What `value` becomes in this dtype.
  double rounded(double value) const;
  /// d elements of the last axis of rank 4.
  void row(std::int64_t a, std::int64_t b, std::int64_t c, double* to) const;

  void upload(Where where);
  void refresh();   ///< uploads the image again
  void download();  ///< into the image
  /// 0xff everywhere, guards apart: what is not written is found out.
  void poison();
  /// Whether a byte that belongs to no element differs from what upload() wrote.
  bool touched_outside() const;

  TensorView view() const;
  TensorView const_view() const;

 private:
  std::int64_t offset(std::int64_t a, std::int64_t b, std::int64_t c, std::int64_t d) const;
  void allocate(std::int64_t low, std::int64_t high, std::int64_t front);

  DType dtype_ = DType::f32;
  std::vector<std::int64_t> shape_, strides_;
  std::int64_t first_ = 0;  // element [0, 0, 0, 0], in elements from the image's start
  std::vector<std::byte> image_, before_;
  std::shared_ptr<Memory> memory_;
};

}  // namespace fa::differential

#endif  // FA_TESTS_DIFFERENTIAL_TENSOR_HPP_
