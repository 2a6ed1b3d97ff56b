#include <array>
#include <cstring>

#include "driver/driver.hpp"

namespace fa::driver {

void encode_tensor_map(const support::TensorMapSpec& spec, kernel::TensorMap& map) {
  static constexpr std::array<cuuint32_t, support::TensorMapSpec::kMaxRank> kEveryElement{1, 1, 1, 1, 1};
  static_assert(sizeof(CUtensorMap) == sizeof(map.bytes));
  const CUtensorMapDataType type = size_of(spec.dtype) == 1   ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                   : spec.dtype == DType::f16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                              : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  CUtensorMap encoded;
  check(api().cuTensorMapEncodeTiled(&encoded, type, static_cast<cuuint32_t>(spec.rank), spec.base, spec.sizes.data(),
                                     spec.strides.data(), spec.box.data(), kEveryElement.data(),
                                     CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                     CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
        "cuTensorMapEncodeTiled");
  std::memcpy(map.bytes, &encoded, sizeof(encoded));
}

}  // namespace fa::driver
