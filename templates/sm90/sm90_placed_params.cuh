#ifndef FA_TEMPLATES_SM90_SM90_PLACED_PARAMS_CUH_
#define FA_TEMPLATES_SM90_SM90_PLACED_PARAMS_CUH_

#include <common/types.cuh>
#include <sm90/sm90_backward_params.cuh>
#include <sm90/sm90_fp8_params.cuh>

namespace fa::kernel {

// Parameters of kernels whose place comes from memory (common/place_in_memory.cuh). The copy engine reads maps where
// they were launched.

template <class Base>
struct Sm90PlacedForward {
  const TensorMap& map_q;
  const TensorMap& map_k;
  const TensorMap& map_v;
  const TensorMap& map_o;
  Base base;
};

struct Sm90PlacedFp8 : Sm90PlacedForward<ForwardVariantParams> {
  const Fp8ScaleParams& scales;
};

struct Sm90PlacedInt8 : Sm90PlacedFp8 {
  const RowBiasParams& row_bias;
};

template <class Base>
struct Sm90PlacedBackward {
  const TensorMap& map_q;
  const TensorMap& map_k;
  const TensorMap& map_v;
  const TensorMap& map_dout;
  Base base;
};

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_SM90_SM90_PLACED_PARAMS_CUH_
