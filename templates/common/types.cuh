#ifndef FA_TEMPLATES_COMMON_TYPES_CUH_
#define FA_TEMPLATES_COMMON_TYPES_CUH_

// Types that the host and the kernels share. No toolkit header is used, so the run-time compiler needs none.

#if defined(__CUDACC_RTC__)
// The run-time compiler has no offsetof; this is what its front end folds to a constant.
#define FA_OFFSETOF(type, member) __INTADDR__(&((type*)0)->member)
namespace fa {
using int32_t = int;
using uint32_t = unsigned int;
using uint16_t = unsigned short;
using int64_t = long long;
using uint64_t = unsigned long long;
}  // namespace fa
#else
#include <cstddef>
#include <cstdint>
#define FA_OFFSETOF(type, member) offsetof(type, member)
namespace fa {
using std::int32_t;
using std::int64_t;
using std::uint16_t;
using std::uint32_t;
using std::uint64_t;
}  // namespace fa
#endif

namespace fa::kernel {

/// Storage types: arithmetic happens in float.
struct f16 {
  uint16_t bits;
};
struct bf16 {
  uint16_t bits;
};
using f32 = float;

/// Four registers that move as one 16-byte access.
struct alignas(16) Chunk {
  uint32_t word[4];
};

/// Opaque description of a tensor for the copy engine: the host writes it with cuTensorMapEncodeTiled.
struct alignas(64) TensorMap {
  unsigned char bytes[128];
};

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_TYPES_CUH_
