#ifndef FA_TESTS_EMULATOR_TENSOR_MAP_HPP_
#define FA_TESTS_EMULATOR_TENSOR_MAP_HPP_

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace emulator {

enum class Swizzle : std::uint8_t { none, bytes_32, bytes_64, bytes_128 };

/// Bytes of a row that the pattern permutes; 0 without one.
int swizzle_span(Swizzle swizzle);

/// Where the 16-byte chunk at an (absolute) shared address lies.
std::uint32_t swizzled(std::uint32_t address, Swizzle swizzle);

/// What a tensor map describes: the arguments of cuTensorMapEncodeTiled, innermost axis first.
struct TensorShape {
  const void* base = nullptr;
  int element_bytes = 2;
  std::vector<std::uint64_t> dims;
  std::vector<std::uint64_t> strides;  ///< in bytes, of all axes but the first
  std::vector<std::uint32_t> box;
  Swizzle swizzle = Swizzle::bytes_128;
};

/// The emulator's own encoding, as opaque as the driver's. Throws std::invalid_argument for what the driver refuses: 1
/// to 5 axes, base and strides multiples of 16 bytes, strides under 2^40, dims 1 to 2^32, boxes 1 to 256, inner box
/// rows multiples of 16 bytes that the swizzle spans.
void encode_tensor_map(unsigned char (&map)[128], const TensorShape& shape);

/// False when the bytes were not written by encode_tensor_map.
bool decode_tensor_map(const unsigned char* map, TensorShape& shape);

/// A box at some coordinates, row by row.
class TensorBox {
 public:
  /// What of a row lies inside of the tensor: `bytes` bytes from `source` on, `skip` bytes into the row.
  struct Row {
    const std::byte* source = nullptr;
    std::uint32_t skip = 0;
    std::uint32_t bytes = 0;
  };

  TensorBox() = default;
  TensorBox(TensorShape shape, std::array<int, 5> at);

  const TensorShape& shape() const { return shape_; }
  std::uint32_t row_bytes() const { return row_bytes_; }
  std::uint32_t bytes() const { return row_bytes_ * static_cast<std::uint32_t>(rows_.size()); }
  const std::vector<Row>& rows() const { return rows_; }

 private:
  TensorShape shape_;
  std::uint32_t row_bytes_ = 0;
  std::vector<Row> rows_;
};

}  // namespace emulator

#endif  // FA_TESTS_EMULATOR_TENSOR_MAP_HPP_
