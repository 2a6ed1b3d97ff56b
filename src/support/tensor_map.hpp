#ifndef FA_SRC_SUPPORT_TENSOR_MAP_HPP_
#define FA_SRC_SUPPORT_TENSOR_MAP_HPP_

#include <array>
#include <cstdint>

#include <fa/tensor.hpp>

namespace fa::support {

/// A tensor of 16-bit elements for the copy engine, innermost axis first, and the box that one copy moves: the
/// arguments of cuTensorMapEncodeTiled that are not the same for every map.
struct TensorMapSpec {
  static constexpr int kMaxRank = 5;

  void* base = nullptr;
  DType dtype = DType::bf16;
  int rank = 0;
  std::array<std::uint64_t, kMaxRank> sizes{};
  std::array<std::uint64_t, kMaxRank - 1> strides{};  ///< in bytes, of all axes but the first
  std::array<std::uint32_t, kMaxRank> box{};
};

}  // namespace fa::support

#endif  // FA_SRC_SUPPORT_TENSOR_MAP_HPP_
