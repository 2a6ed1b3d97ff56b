#ifndef FA_TEMPLATES_SM90_SM90_FORWARD_PARAMS_CUH_
#define FA_TEMPLATES_SM90_SM90_FORWARD_PARAMS_CUH_

#include <common/forward_params.cuh>
#include <common/types.cuh>

namespace fa::kernel {

/// Launch parameters of the Hopper forward. The maps describe the tensors in boxes of 64 columns with the 128-byte
/// swizzle, innermost axis first.
struct Sm90ForwardParams {
  TensorMap map_q;  // [d_qk, group, s_q, h_kv, b], a box of tile_m packed rows
  TensorMap map_k;  // [d_qk, s_kv, h_kv, b], a box of tile_n keys
  TensorMap map_v;  // [d_v, s_kv, h_kv, b], likewise
  TensorMap map_o;  // [d_v, group, s_q, h_kv, b], a box of 16 rows of one query head
  ForwardParams base;
};

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_SM90_SM90_FORWARD_PARAMS_CUH_
