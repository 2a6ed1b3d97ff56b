#ifndef FA_TEMPLATES_COMMON_SCAN_RESULTS_PARAMS_CUH_
#define FA_TEMPLATES_COMMON_SCAN_RESULTS_PARAMS_CUH_

#include <common/types.cuh>

namespace fa::kernel {

inline constexpr int kMostResults = 12;  // of a call: dq, dk, dv, dsink and the gradients of eight captures
inline constexpr int kScanBlocks = 264;  // thread blocks of each

/// A tensor of numbers that may be broken. Strides are in elements, and 1 along d.
struct ScannedResult {
  const void* data;     // [b, h, s, d]; of a packed batch [total, h, d], and stride_b is not read
  const int32_t* cu;    // [b + 1], of a packed batch; else null
  const int32_t* used;  // [b], may be null
  int64_t stride_b, stride_h, stride_s;
  int32_t b, h, s, d;       // s: of a packed batch the most rows of a sequence
  int32_t total;            // rows of a packed batch
  int32_t bytes;            // of an element: 1, 2 or 4
  uint32_t exponent;        // bits that are all set in what is broken
  uint32_t minus_infinity;  // bits of a broken number that is legal; 0: of none
};

/// Launch parameters of scan_results.
struct ScanResultsParams {
  ScannedResult results[kMostResults];
  uint64_t* found;  // [kMostResults], all ones at the launch: the lowest index ((b * h + h) * s + s) * d + d
};

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_SCAN_RESULTS_PARAMS_CUH_
