#ifndef FA_TEMPLATES_SM90_SM90_BACKWARD_PARAMS_CUH_
#define FA_TEMPLATES_SM90_SM90_BACKWARD_PARAMS_CUH_

#include <common/backward_params.cuh>
#include <common/types.cuh>
#include <common/variant_params.cuh>

namespace fa::kernel {

/// Launch parameters of the Hopper backward. The maps describe the tensors in boxes of 64 columns with the 128-byte
/// swizzle, innermost axis first.
struct Sm90BackwardParams {
  TensorMap map_q;     // [d_qk, s_q, h_q, b], a box of tile_m rows; varlen: [d_qk, total_q, h_q, 1], and so on
  TensorMap map_k;     // [d_qk, s_kv, h_kv, b], a box of tile_n keys; of four blocks a tile of half as many
  TensorMap map_v;     // [d_v, s_kv, h_kv, b], likewise
  TensorMap map_dout;  // [d_v, s_q, h_q, b], a box of tile_m rows
  BackwardParams base;
};

/// The same for variants.
struct Sm90BackwardVariantParams {
  TensorMap map_q, map_k, map_v, map_dout;
  BackwardVariantParams base;
};

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_SM90_SM90_BACKWARD_PARAMS_CUH_
